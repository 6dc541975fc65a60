"""Is there an order in which the recorded history of one key makes sense? (S3: linearizable per key.)

Theory: Herlihy and Wing. An operation takes effect at one moment between its call and its answer; whatever was never answered may
have, at any moment after its call, or not. Wing and Gong's search goes through the orders: the next one is any that was called
before every other one that is left was answered. After Lowe, what was tried (what is done, what the key then holds) is not
tried again; and a read that fits is taken at once, for if any order exists then also one with it first. The search is bounded: what it
cannot tell it says it cannot.

States: none; a pure function of the history.
"""

from bisect import bisect_left
from typing import Any, NamedTuple

from hyperpodrun.agent.wire import store as op

INFINITY = 1 << 62
MOST_STATES = 300_000


class Call(NamedTuple):
    """`start` and `end` are places in the run; `end` is INFINITY for a call that was never answered. `took`: where its owner did it,
    as far as that was seen."""

    start: int
    end: int
    asked: op.KeyOperation
    answer: Any = None
    took: int | None = None


class Held(NamedTuple):
    """What a key holds."""

    value: bytes | None = None
    queue: tuple[bytes, ...] = ()


NOTHING = Held()
NEVER = object()
"""The answer of an operation that waits on."""


State = tuple[int, int, int, Held]


class TooHard(Exception):
    """So many states were tried that the question is left open."""


def apply(held: Held, asked: op.KeyOperation) -> tuple[Any, Held]:
    """(what must be answered, what the key holds after it)."""
    value, queue = held
    match asked:
        case op.Set(_, new):
            return None, Held(new, queue)
        case op.Get(_, block):
            return NEVER if value is None and block else value, held
        case op.Add(_, amount):
            total = int(value or b"0") + amount
            return total, Held(b"%d" % total, queue)
        case op.Append(_, more):
            return None, Held((value or b"") + more, queue)
        case op.CompareSet(_, expected, desired):
            if (value or b"") == expected:
                return desired, Held(desired, queue)
            return value if value is not None else expected, held
        case op.Check():
            return value is not None or bool(queue), held
        case op.Watch():
            return True if value is not None or queue else NEVER, held
        case op.Delete():
            return value is not None, Held(None, queue)
        case op.Push(_, item):
            return None, Held(value, (*queue, item))
        case op.Pop(_, block):
            if queue:
                return queue[0], Held(value, queue[1:])
            return NEVER if block else None, held
        case op.Length():
            return len(queue), held
    raise ValueError(f"no operation of one key: {asked}")


def linearizable(history: list[Call]) -> bool:
    """Raises TooHard."""
    calls = sorted((call for call in history if call.end != INFINITY), key=lambda call: call.start)
    lost = sorted((call for call in history if call.end == INFINITY), key=lambda call: call.start)
    popped = {call.answer: call.end for call in calls if type(call.asked) is op.Pop and call.answer is not None}
    hopes = [_hope(call, popped) for call in calls]
    # A state: how many from the front are done, which others are (a bit each, counted from there), which of those never answered
    # are, what the key holds.
    stack: list[State] = [(0, 0, 0, NOTHING)]
    seen = set(stack)
    while stack:
        state = stack.pop()
        low, done, gone, held = state
        if low == len(calls):
            return True
        choices, horizon = _choices(calls, low, done, held)
        nexts: list[State] = []
        if horizon is not None:
            for bit, call in enumerate(lost):
                if call.start > horizon:
                    break
                if not gone >> bit & 1:
                    answer, after = apply(held, call.asked)
                    if answer is not NEVER and after != held:  # else whether it happened here makes no difference
                        nexts.append((low, done, gone | 1 << bit, after))
        choices.sort(key=lambda choice: hopes[choice[0]], reverse=True)  # what is pushed last is looked at first
        nexts += [(*_advanced(low, done | 1 << (index - low)), gone, after) for index, after in choices]
        for following in nexts:
            if following not in seen:
                seen.add(following)
                stack.append(following)
        if len(seen) > MOST_STATES:
            raise TooHard(f"{len(history)} calls")
    return False


def without_order(history: list[Call], suspect: int = 0) -> list[Call] | None:
    """A short beginning of the history that has no order; [] when all of it has one, None when that is not known.

    What has an order has one up to any place. So begin small: the search grows faster than the history. `suspect`: nothing that
    was answered before this place is in doubt.
    """
    ends = sorted(call.end for call in history if call.end != INFINITY)
    if not ends:
        return []
    low, high, step = 0, min(bisect_left(ends, suspect), len(ends) - 1), 1
    while (answer := _decided(until(history, ends[high]))) is not False:
        if high == len(ends) - 1:
            return [] if answer else None
        high, step = min(high + step, len(ends) - 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        if _decided(until(history, ends[middle])) is False:
            high = middle
        else:
            low = middle + 1
    return until(history, ends[high])


def until(history: list[Call], place: int) -> list[Call]:
    """What was known at this place of the run, by start."""
    begun = sorted((call for call in history if call.start <= place), key=lambda call: call.start)
    return [call if call.end <= place else call._replace(end=INFINITY, answer=None) for call in begun]


def _decided(history: list[Call]) -> bool | None:
    try:
        return linearizable(history)
    except TooHard:
        return None


def _hope(call: Call, popped: dict[bytes, int]) -> int:
    """Less is more likely to come first: a guess, which makes the search of a good history nearly straight. Items are pushed in the
    order in which they were popped; what was never answered comes last."""
    return popped.get(call.asked.value, INFINITY) if type(call.asked) is op.Push else call.end


def _choices(calls: list[Call], low: int, done: int, held: Held) -> tuple[list[tuple[int, Held]], int | None]:
    """Which may come next, with what they leave behind, and until when others may have been called; None: this one it is."""
    horizon = INFINITY
    choices: list[tuple[int, Held]] = []
    for index in range(low, len(calls)):
        if done >> (index - low) & 1:
            continue
        call = calls[index]
        if call.start > horizon:
            break
        horizon = min(horizon, call.end)
        answer, after = apply(held, call.asked)
        if answer is NEVER or answer != call.answer:
            continue
        if reads(call):
            return [(index, after)], None
        choices.append((index, after))
    return choices, horizon


def reads(call: Call) -> bool:
    """Whether with this answer it can have changed nothing, wherever it took effect. (A write of what is there already would, at
    another moment.)"""
    match call.asked:
        case op.Get() | op.Check() | op.Watch() | op.Length():
            return True
        case _ if call.end == INFINITY:
            return False
        case op.Delete():
            return call.answer is False
        case op.Pop():
            return call.answer is None
        case op.CompareSet(_, _, desired):
            return bool(call.answer != desired)
    return False


def _advanced(low: int, done: int) -> tuple[int, int]:
    while done & 1:
        low += 1
        done >>= 1
    return low, done
