"""The store under the faults of whole worlds: every key has an order, whatever is lost, and mistakes are seen (S1-S5)."""

import itertools
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.mesh.keyspace import KeySpace
from hyperpodrun.agent.mesh.shard import Shard
from hyperpodrun.agent.mesh.stream import Stream
from hyperpodrun.agent.sim import linear
from hyperpodrun.agent.sim.__main__ import main, run_one
from hyperpodrun.agent.sim.faults import random_schedule
from hyperpodrun.agent.sim.linear import INFINITY, NEVER, NOTHING, Call, apply, linearizable, without_order
from hyperpodrun.agent.sim.witness import first_misfit, happened
from hyperpodrun.agent.wire import store as op


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_store_seeds(first: int) -> None:
    """Jobs of 2 to 6 nodes under random faults, two clients a node."""
    wrongs = ((seed, run_one(random_schedule(seed, 2, 6), store=True)[1]) for seed in range(first, first + 50))
    assert [f"seed {seed}: {wrong}" for seed, wrong in wrongs if wrong is not None] == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1100, 25))
def test_more_store_seeds(first: int) -> None:
    """3 to 12 nodes."""
    wrongs = ((seed, run_one(random_schedule(seed, 3, 12), store=True)[1]) for seed in range(first, first + 25))
    assert [f"seed {seed}: {wrong}" for seed, wrong in wrongs if wrong is not None] == []


def test_busy_clients_are_no_livelock() -> None:
    """44 of them that think for 2 ms: 42,000 events a second, 6 a call."""
    assert run_one(random_schedule(1374, 3, 12), store=True)[1] is None


# --- mistakes that must be seen


def a_retry_is_done_again(mp: pytest.MonkeyPatch) -> None:
    def receive(self: Stream, frame: op.Frame, now_ns: int) -> list[op.Item]:
        again = self._expects - frame.first >= len(frame.items) > 0
        fresh = original(self, frame, now_ns)
        return [item for item in frame.items if isinstance(item, op.Call)] if again else fresh

    original = Stream.receive
    mp.setattr(Stream, "receive", receive)


def the_answer_goes_to_another_client(mp: pytest.MonkeyPatch) -> None:
    original = KeySpace._settle
    mp.setattr(KeySpace, "_settle", lambda self, number, answer: original(self, min(self._asked, default=number), answer))


def a_wait_ends_before_the_key_is_there(mp: pytest.MonkeyPatch) -> None:
    def store(self: Shard, key: bytes, value: bytes, authors: Any) -> Any:
        if not all(self._watchers.get(key, {0: 0}).values()):
            return original(self, key, value, authors)
        self.late = (key, value, authors)
        for ticket in list(self._watchers[key]):
            self.cancel(ticket)
            self.woken.append((ticket, True))
        return None

    def call(self: Shard, ticket: Any, client: Any, asked: Any) -> Any:
        late, self.late = getattr(self, "late", None), None
        answer = original_call(self, ticket, client, asked)
        if late is not None:
            original(self, *late)
        return answer

    original, original_call = Shard._store, Shard.call
    mp.setattr(Shard, "_store", store)
    mp.setattr(Shard, "call", call)


def an_ended_generation_is_served(mp: pytest.MonkeyPatch) -> None:
    def end(self: KeySpace, reason: str) -> None:
        streams = dict(self._streams)
        original(self, reason)
        self._streams.update(streams)

    original = KeySpace.end
    mp.setattr(KeySpace, "end", end)
    original_ask = KeySpace._ask

    def ask(self: KeySpace, *rest: Any) -> Any:
        kept, self.ended = self.ended, ""
        try:
            return original_ask(self, *rest)
        finally:
            self.ended = kept

    mp.setattr(KeySpace, "_ask", ask)


def the_end_answers_nobody(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(KeySpace, "end", lambda self, reason: setattr(self, "ended", f"generation {self.generation} ended: {reason}"))


def a_read_joins_one_that_has_left(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(
        KeySpace, "frames", lambda self, now_ns: [(n, f) for n, s in self._streams.items() for f in s.frames(now_ns)]
    )  # fmt: skip


def nobody_is_woken(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Shard, "_wake", lambda *_: None)


def what_is_lost_is_not_sent_again(mp: pytest.MonkeyPatch) -> None:
    mp.setattr(Stream, "tick", lambda self, _: setattr(self, "_resend_at_ns", None))


def two_nodes_own_a_key(mp: pytest.MonkeyPatch) -> None:
    def owner(self: KeySpace, key: bytes) -> str:
        return self._me if key == b"count1" else original(self, key)

    original = KeySpace.owner
    mp.setattr(KeySpace, "owner", owner)


def items_change_their_order(mp: pytest.MonkeyPatch) -> None:
    def push(self: Shard, asked: op.Push, ticket: Any, client: Any) -> Any:
        answer = original(self, asked, ticket, client)
        if asked.key in self._queues and len(self._queues[asked.key]) > 1:
            self._queues[asked.key].rotate(1)
        return answer

    original = Shard._push
    mp.setattr(Shard, "_push", push)


BUGS = (
    a_retry_is_done_again, the_answer_goes_to_another_client, a_wait_ends_before_the_key_is_there, an_ended_generation_is_served,
    the_end_answers_nobody, a_read_joins_one_that_has_left, nobody_is_woken, what_is_lost_is_not_sent_again, two_nodes_own_a_key,
    items_change_their_order,
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_every_planted_bug_is_caught(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seeds that are clean without it (`test_store_seeds`) one complains about the store."""
    bug(monkeypatch)
    for seed in range(100):
        wrong = run_one(random_schedule(seed, 2, 6), store=True)[1]
        if wrong is not None:
            assert wrong.startswith("Violation") and " S" in wrong, wrong
            return
    pytest.fail("not caught")


# --- the judges themselves


def by_brute_force(history: list[Call]) -> bool:
    """Every order of every choice of what happened."""
    answered = [call for call in history if call.end != INFINITY]
    unknown = [call for call in history if call.end == INFINITY]
    for count in range(len(unknown) + 1):
        for taken in itertools.combinations(unknown, count):
            if any(_makes_sense(order) for order in itertools.permutations([*answered, *taken])):
                return True
    return False


def _makes_sense(order: tuple[Call, ...]) -> bool:
    held = NOTHING
    for index, call in enumerate(order):
        if any(later.end < call.start for later in order[index + 1 :]):
            return False
        answer, held = apply(held, call.asked)
        if answer is NEVER or (call.end != INFINITY and answer != call.answer):
            return False
    return True


ASKED = st.sampled_from([
    op.Set(b"k", b"x"), op.Set(b"k", b""), op.Get(b"k"), op.Get(b"k", True), op.Append(b"k", b"x"), op.CompareSet(b"k", b"", b"x"),
    op.CompareSet(b"k", b"x", b""), op.Check(b"k"), op.Watch(b"k"), op.Delete(b"k"), op.Push(b"k", b"1"), op.Pop(b"k"),
    op.Pop(b"k", True), op.Length(b"k"),
])  # fmt: skip


@st.composite
def histories(draw: st.DrawFn) -> list[Call]:
    """Up to five calls that overlap at random; what they were told would be right in one order, or nearly. Their owner is said to have
    done them in that order, now and then in another."""
    asked = draw(st.lists(ASKED, min_size=1, max_size=5))
    places = draw(st.permutations(range(2 * len(asked))))
    spans = [sorted(places[2 * i : 2 * i + 2]) for i in range(len(asked))]
    held, calls, place = NOTHING, [], 0
    for index in draw(st.permutations(range(len(asked)))):
        answer, held = apply(held, asked[index])
        never = answer is NEVER or draw(st.integers(0, 4)) == 0
        start, end = spans[index][0], INFINITY if never else spans[index][1]
        place = max(place + 1, 100 * start + 1)
        took = None if answer is NEVER else draw(st.sampled_from([place, place, place, place, place, 100 * end - 1, None]))
        calls.append(Call(100 * start, 100 * end if end != INFINITY else end, asked[index], None if never else answer, took))
    return calls


@settings(max_examples=400, deadline=None)
@given(histories())
def test_the_judge_finds_what_all_orders_find(history: list[Call]) -> None:
    assert linearizable(history) == by_brute_force(history)


@settings(max_examples=1000, deadline=None)
@given(histories())
def test_what_the_owners_order_explains_has_an_order(history: list[Call]) -> None:
    seen = happened(history)
    misfit = first_misfit(seen)
    event(f"misfit: {misfit is not None}")
    assert misfit is not None or by_brute_force(seen)
    assert (without_order(seen) == []) == by_brute_force(seen)


def test_what_breaks_the_owners_order_is_named() -> None:
    history = [
        Call(1, 3, op.Set(b"k", b"x"), None, 2), Call(4, 9, op.Append(b"k", b"y"), None, 6), Call(5, 10, op.Get(b"k"), b"xy"),
        Call(7, 8, op.Get(b"k"), b"x"), Call(11, 12, op.Get(b"k"), b"xy"),
    ]  # fmt: skip
    assert first_misfit(history) == history[3]
    assert without_order(history) == [], "it was done later than the owner says"
    history[1] = history[1]._replace(took=None)
    assert first_misfit(history) == history[1], "nobody did it"


def test_what_no_owner_did_explains_nothing() -> None:
    read = Call(3, 4, op.Get(b"k"), b"x")
    lost = Call(1, INFINITY, op.Set(b"k", b"x"))
    assert happened([lost, read]) == [read]
    assert happened([lost._replace(took=2), read]) == [lost._replace(took=2), read]
    assert happened([lost._replace(asked=op.Pop(b"k", True), took=2), read])[0].took == 2


def test_what_is_not_decided_is_neither_good_nor_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is named, it fails, and it is counted apart."""
    items_change_their_order(monkeypatch)
    assert run_one(random_schedule(0, 2, 6), store=True)[1].startswith("Violation")
    monkeypatch.setattr(linear, "MOST_STATES", 0)
    wrong = run_one(random_schedule(0, 2, 6), store=True)[1]
    assert wrong.startswith("Undecided"), wrong
    monkeypatch.setattr("sys.argv", ["sim", "--store", "--seeds", "0", "--nodes", "2:6"])
    assert main() == 1
    assert "0 failed, 1 undecided" in capsys.readouterr().out


def test_the_judge_can_say_no() -> None:
    stale = [Call(1, 2, op.Set(b"k", b"x")), Call(3, 4, op.Check(b"k"), False)]
    assert not linearizable(stale)
    assert linearizable([stale[0], stale[1]._replace(start=0)])


def test_a_write_of_what_is_there_still_has_its_place() -> None:
    """Taken too early it would not undo the other write."""
    empty, other = op.Set(b"k", b""), op.CompareSet(b"k", b"", b"x")
    history = [Call(1, 2, empty), Call(0, 6, other, b"x"), Call(5, 7, empty), Call(8, 9, op.Get(b"k"), b"")]
    assert linearizable(history)
