"""Who hangs: the silent before the absent, the absent before those behind, and nobody too early."""

import pytest

from hyperpodrun.agent.health.hang import START_S, UNCOUNTED_S, HangWatch, Unwatched, Verdict
from hyperpodrun.agent.wire import link


def beat(still_s: float | None, calls: int = 0, steps: int = 0, groups: dict[int, int] | None = None) -> link.Beat:
    return link.Beat(0, "function", steps, calls, still_s, groups or {})


def watch(ranks: int = 3, timeout_s: float | None = 2.0, at_s: float = 100.0) -> HangWatch:
    watch = HangWatch(timeout_s)
    watch.begin()
    watch.born(range(ranks), at_s - 50.0)
    watch.entered(range(ranks), at_s)
    watch.assembled(at_s)
    return watch


def run(watch: HangWatch, until_s: float, says: dict[int, object], from_s: float = 101.0) -> tuple[float, Verdict] | None:
    """Each second each rank says what `says` has for it (a function of the time); the first verdict and when it came."""
    now_s = from_s
    while now_s <= until_s:
        for rank, message in says.items():
            if callable(message):
                watch.heard(rank, message(now_s), now_s)
        while (due_s := watch.next_deadline_s()) is not None and due_s < now_s + 1.0:
            if isinstance(verdict := watch.tick(max(due_s, now_s)), Verdict):
                return max(due_s, now_s), verdict
            if watch.next_deadline_s() == due_s:
                raise AssertionError("a deadline that does not move")
        now_s += 1.0
    return None


def test_progress_is_no_hang() -> None:
    assert run(watch(), 200.0, {rank: lambda now_s: beat(0.9) for rank in range(3)}) is None


def test_silent_rank_is_the_culprit_though_all_are_still() -> None:
    found = run(watch(), 120.0, {0: lambda now_s: beat(now_s - 100.0), 2: lambda now_s: beat(now_s - 100.0)})
    assert found is not None
    assert found[1].local_ranks == (1,)
    assert "silent" in found[1].why
    assert found[0] <= 104.0, "the others' stillness was not used"


def test_silence_alone_is_enough() -> None:
    found = run(watch(timeout_s=1.0), 120.0, {0: lambda now_s: beat(0.0), 2: lambda now_s: beat(0.0)})
    assert found is not None and found[1].local_ranks == (1,)
    assert found[0] >= 105.0, "a few missing beats are no proof while all others go on"


def test_rank_behind_the_others_is_the_culprit() -> None:
    says = {
        0: lambda now_s: beat(now_s - 100.2, calls=8),
        1: lambda now_s: beat(now_s - 100.1, calls=7),
        2: lambda now_s: beat(now_s - 100.2, calls=8),
    }
    found = run(watch(), 120.0, says)
    assert found is not None and found[1].local_ranks == (1,)
    assert "behind" in found[1].why
    assert 102.0 < found[0] <= 104.0


def test_rank_that_never_came_is_the_culprit_for_those_who_wait() -> None:
    late = HangWatch(2.0)
    late.begin()
    late.born(range(3), 90.0)
    late.entered((0, 2), 100.0)
    found = run(late, 140.0, {0: lambda now_s: beat(now_s - 100.0), 2: lambda now_s: beat(now_s - 100.0)})
    assert found is not None and found[1].local_ranks == (1,)
    assert found[0] >= 100.0 + START_S


def test_waiting_for_ranks_that_have_not_come_is_no_hang() -> None:
    hangs = HangWatch(2.0)
    hangs.begin()
    hangs.born(range(2), 90.0)
    hangs.entered(range(2), 100.0)
    says = {rank: lambda now_s: beat(now_s - 100.0) for rank in range(2)}
    assert run(hangs, 125.0, says) is None, "another node's ranks are still being made"
    hangs.assembled(125.5)
    found = run(hangs, 140.0, says, from_s=126.0)
    assert found is not None and 127.5 <= found[0] <= 130.0


def test_rank_that_nobody_waits_for_may_take_its_time() -> None:
    late = HangWatch(2.0)
    late.begin()
    late.born(range(3), 90.0)
    late.entered((0, 2), 100.0)
    assert late.next_deadline_s() == 105.0, "of the two that are inside, who have said nothing yet"
    assert run(late, 150.0, {0: lambda now_s: beat(0.0), 2: lambda now_s: beat(0.0)}) is None


def test_all_equally_still_are_all_named() -> None:
    found = run(watch(), 120.0, {rank: lambda now_s: beat(now_s - 100.0, calls=3) for rank in range(3)})
    assert found is not None and found[1].local_ranks == (0, 1, 2)


def test_timeout_is_told_as_soon_as_everybody_has_said_so() -> None:
    hangs = watch(timeout_s=2.0)
    for rank in range(3):
        hangs.heard(rank, beat(1.4, calls=7 + (rank != 1)), 101.4)
    assert hangs.next_deadline_s() == 103.0, "what they did since is not known"
    for rank, at_s in ((0, 102.0), (2, 102.05)):
        hangs.heard(rank, beat(2.0, calls=8), at_s)
        assert hangs.next_deadline_s() == 103.0, "the others may have gone on"
    hangs.heard(1, beat(1.95, calls=7), 102.1)
    due_s = hangs.next_deadline_s()
    assert due_s is not None and due_s < 102.3
    hangs.heard(1, beat(2.0, calls=7), 102.15)
    found = hangs.tick(due_s)
    assert isinstance(found, Verdict) and found.local_ranks == (1,)


def test_who_has_gone_on_meanwhile_is_not_blamed_for_an_old_word() -> None:
    hangs = watch(timeout_s=2.0)
    for rank in range(3):
        hangs.heard(rank, beat(0.0, calls=7), 100.4)
    hangs.heard(0, beat(2.0, calls=8), 102.4)
    hangs.heard(2, beat(0.1, calls=9), 102.4)
    assert hangs.next_deadline_s() == 103.4, "rank 1 is due to say something"
    hangs.heard(1, beat(0.2, calls=9), 102.8)
    found = hangs.tick(hangs.next_deadline_s() or 0.0)
    assert isinstance(found, Verdict) and found.local_ranks == (0,)


def test_one_verdict_a_generation_and_a_new_one_in_the_next() -> None:
    hangs = watch()
    says = {rank: lambda now_s: beat(now_s - 100.0) for rank in range(3)}
    assert run(hangs, 120.0, says) is not None
    assert run(hangs, 140.0, says, from_s=121.0) is None
    hangs.begin()
    hangs.entered(range(3), 141.0)
    hangs.assembled(141.0)
    assert run(hangs, 160.0, {rank: lambda now_s: beat(now_s - 141.0) for rank in range(3)}, from_s=142.0) is not None


def test_watch_that_stood_still_itself_hears_everybody_first() -> None:
    hangs = watch()
    hangs.heard(0, beat(0.0), 101.0)
    assert hangs.tick(300.0) is None
    due_s = hangs.next_deadline_s()
    assert due_s is not None and 300.0 < due_s < 302.0
    for rank in range(3):
        hangs.heard(rank, beat(0.1), 300.1)
    assert hangs.tick(due_s) is None


def test_rank_that_is_done_or_has_ended_is_not_watched() -> None:
    hangs = watch()
    hangs.gone(1)
    assert run(hangs, 150.0, {0: lambda now_s: beat(0.0), 2: lambda now_s: beat(0.0)}) is None
    hangs.stop(150.0)
    assert hangs.next_deadline_s() is None


def test_without_a_timeout_only_progress_is_noted() -> None:
    hangs = watch(timeout_s=None)
    assert run(hangs, 150.0, {rank: lambda now_s: beat(None) for rank in range(3)}) is None
    assert hangs.next_deadline_s() is None


@pytest.mark.parametrize(
    ("earlier", "now", "progressed"),
    [(0, 0, True), (0, 5, True), (5, 0, False), (5, 1, True)],
    ids=["never", "first", "none now", "again"],
)
def test_no_progress_can_be_said_only_where_steps_are_counted(earlier: int, now: int, progressed: bool) -> None:
    hangs = watch()
    hangs.heard(0, beat(0.0, steps=earlier), 101.0)
    hangs.begin()
    hangs.entered(range(3), 102.0)
    hangs.heard(1, beat(0.0, steps=now), 103.0)
    assert hangs.progressed(103.0) == progressed


@pytest.mark.parametrize(("lasted_s", "progressed"), [(UNCOUNTED_S - 1, False), (UNCOUNTED_S, True)])
def test_where_nothing_counts_steps_the_time_inside_tells(lasted_s: float, progressed: bool) -> None:
    hangs = HangWatch(None, UNCOUNTED_S)
    hangs.begin()
    hangs.born(range(2), 0.0)
    hangs.entered(range(2), 100.0)
    assert hangs.progressed(100.0 + lasted_s) == progressed
    hangs.stop(100.0 + lasted_s)
    hangs.stop(1000.0)
    assert hangs.progressed(2000.0) == progressed, "the way back is not counted"
    hangs.begin()
    hangs.born((1,), 2000.0)
    assert not hangs.progressed(3000.0), "nobody came to its function"


def test_program_that_never_greets_is_judged_by_the_life_of_its_processes() -> None:
    hangs = HangWatch(None, UNCOUNTED_S)
    hangs.begin()
    assert not hangs.progressed(50.0)
    hangs.born(range(2), 100.0)
    assert not hangs.progressed(101.0)
    assert hangs.progressed(100.0 + UNCOUNTED_S)


def test_time_in_a_hang_is_no_progress() -> None:
    hangs = HangWatch(100.0, UNCOUNTED_S)
    hangs.begin()
    hangs.born(range(2), 90.0)
    hangs.entered(range(2), 100.0)
    hangs.assembled(100.0)
    assert run(hangs, 300.0, {rank: lambda now_s: beat(now_s - 100.0) for rank in range(2)}) is not None
    assert not hangs.progressed(300.0)


COUNTS = {
    "of two groups, behind in both": ([{1: 6}, {1: 5, 2: 5}, {2: 6}], (1,)),
    "one waits for another in a second group": ([{1: 6}, {1: 5, 2: 9}, {2: 8}], (2,)),
    "many at once": ([{1: 100}, {1: 92}, {1: 100}], (1,)),
    "own shares of sends and receives": ([{1: 40}, {1: 80}, {1: 40}], (0, 1, 2)),
    "nothing in common": ([{1: 6}, {2: 5}, {3: 4}], (0, 1, 2)),
    "each is ahead somewhere": ([{1: 6, 2: 5}, {1: 5, 2: 6}, {}], (0, 1, 2)),
}


@pytest.mark.parametrize(("counts", "named"), COUNTS.values(), ids=COUNTS)
def test_ranks_are_compared_in_what_they_share(counts: list[dict[int, int]], named: tuple[int, ...]) -> None:
    says = {rank: lambda now_s, rank=rank: beat(now_s - 100.0, calls=rank, groups=counts[rank]) for rank in range(3)}
    if not all(counts):
        says[2] = lambda now_s: beat(now_s - 100.0, calls=9, groups={7: 1})
    found = run(watch(), 120.0, says)
    assert found is not None and found[1].local_ranks == named
    assert ("behind" in found[1].why) == (len(named) == 1)


def test_rank_with_fewer_steps_is_the_culprit() -> None:
    says = {rank: lambda now_s, rank=rank: beat(now_s - 100.0, steps=4 + (rank != 1)) for rank in range(3)}
    found = run(watch(), 120.0, says)
    assert found is not None and found[1].local_ranks == (1,)


def test_that_nobody_is_watched_is_said_once() -> None:
    hangs = HangWatch(9.0)
    for began_s in (100.0, 200.0):
        hangs.begin()
        hangs.born(range(2), began_s)
        assert hangs.next_deadline_s() == (109.0 if began_s == 100.0 else None)
        assert hangs.tick(began_s + 9.0) == (Unwatched(9.0) if began_s == 100.0 else None)
        hangs.stop(began_s + 10.0)
    greeted = HangWatch(9.0)
    greeted.begin()
    greeted.born(range(2), 100.0)
    greeted.heard(1, link.Hello(1, 0), 101.0)
    assert greeted.next_deadline_s() is None


def test_functions_that_are_entered_without_a_word_are_known_by_their_beats() -> None:
    hangs = HangWatch(2.0)
    hangs.begin()
    hangs.born(range(2), 90.0)
    for rank in range(2):
        hangs.heard(rank, beat(0.0), 100.0)
    found = run(hangs, 120.0, {0: lambda now_s: beat(0.1, calls=9), 1: lambda now_s: beat(now_s - 100.0, calls=3)})
    assert found is not None and found[1].local_ranks == (1,)


def test_what_follows_the_function_is_no_hang() -> None:
    hangs = watch(1)
    hangs.heard(0, link.Beat(0, "returned", 0, 5, 0.5), 101.0)
    assert hangs.next_deadline_s() is None
