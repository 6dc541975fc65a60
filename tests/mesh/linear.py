"""Is there an order in which a recorded history of one key makes sense? (Wing and Gong's search, remembering visited states.)"""

from typing import Any, NamedTuple

INFINITY = 1 << 62


class Op(NamedTuple):
    """`end` is INFINITY for a call that was never answered: it may have happened or not."""

    client: int
    start: int
    end: int
    name: str
    args: tuple
    answer: Any


def apply(value: bytes | None, op: Op) -> tuple[Any, bytes | None]:
    """(what must be answered, the value after it); the value is None while there is no such key."""
    match op.name, op.args:
        case "set", (new,):
            return None, new
        case "get", ():
            return value, value
        case "add", (amount,):
            total = int(value or b"0") + amount
            return total, b"%d" % total
        case "append", (more,):
            return None, (value or b"") + more
        case "compare_set", (expected, desired):
            return (desired, desired) if (value or b"") == expected else (value if value is not None else expected, value)
        case "check", ():
            return value is not None, value
        case "delete", ():
            return value is not None, None
    raise ValueError(op)


def linearizable(history: list[Op]) -> bool:
    """Every client's calls follow one another."""
    lanes: dict[int, list[Op]] = {}
    for op in sorted(history, key=lambda op: op.start):
        lanes.setdefault(op.client, []).append(op)
    rows = list(lanes.values())
    start: tuple[tuple[int, ...], bytes | None] = (tuple(0 for _ in rows), None)
    stack, seen = [start], {start}
    while stack:
        at, value = stack.pop()
        waiting = [(i, row[at[i]]) for i, row in enumerate(rows) if at[i] < len(row)]
        if all(op.end == INFINITY for _, op in waiting):
            return True
        horizon = min(op.end for _, op in waiting)
        for i, op in waiting:
            if op.start > horizon:
                continue
            answer, after = apply(value, op)
            if op.end != INFINITY and answer != op.answer:
                continue
            move = ((*at[:i], at[i] + 1, *at[i + 1 :]), after)
            if move not in seen:
                seen.add(move)
                stack.append(move)
    return False
