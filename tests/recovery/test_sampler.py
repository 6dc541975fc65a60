"""JobSampler: the job goes on behind the last sample that was trained, in whatever world, however far ahead a loader is."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import alone
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from hyperpodrun.recovery import Contradiction, JobSampler, RecoverableState
from hyperpodrun.recovery.counting import Counting

pytestmark = pytest.mark.torch


def of_all_ranks(world: int, length: int, state: dict[str, Any] | None, **options: Any) -> list[JobSampler]:
    made = [JobSampler(length, rank=rank, world_size=world, **options) for rank in range(world)]
    for one in made:
        if state is not None:
            one.load_state_dict(state)
    return made


def drawn(samplers: Sequence[JobSampler], steps: int, batches: int = 1) -> list[list[int]]:
    """By step, what all ranks draw. Iterators are ahead by what they can."""
    found, iterators = [], [iter(one) for one in samplers]
    for step in range(steps):
        step_of = []
        for _ in range(batches):
            some = [next(one, None) for one in iterators]
            if some[0] is None:
                iterators = [iter(one) for one in samplers]
                some = [next(one) for one in iterators]
            assert len({len(one) for one in some if one is not None}) == 1
            step_of += [sample for one in some if one is not None for sample in one]
        for one in samplers:
            one.trained(step)
        found.append(step_of)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_no_sample_is_lost_or_repeated_when_the_world_changes(seed: int) -> None:
    chance = random.Random(seed)
    length, batches = 960, chance.choice([1, 2])
    state: dict[str, Any] | None = None
    epoch: list[int] = []
    while len(epoch) < length:
        world = chance.choice([1, 2, 3, 4, 5])
        samplers = of_all_ranks(world, length, state, batch_size=2, seed=seed, batches_per_step=batches, drop_last=False)
        left = (length - len(epoch)) // (2 * world * batches)
        epoch += [sample for some in drawn(samplers, chance.randrange(1, 20) if left > 20 else left, batches) for sample in some]
        state = samplers[0].state_dict()
        assert all(one.state_dict() == state for one in samplers)
        if left <= 20:
            break
    seen = Counter(epoch)
    assert max(seen.values()) == 1 and len(seen) > length - 2 * 5 * 2


@pytest.mark.parametrize(("drop_last", "steps", "sizes"), [(True, 3, [6, 6, 6]), (False, 4, [6, 6, 6, 3])])
def test_the_end_of_an_epoch(drop_last: bool, steps: int, sizes: list[int]) -> None:
    """20 samples, three ranks, two each: two are left, which one more is added to, or which are left out."""
    samplers = of_all_ranks(3, 20, None, batch_size=2, drop_last=drop_last)
    assert [len(one) for one in samplers] == [steps] * 3 == [len([*one]) for one in samplers]
    first = drawn(samplers, steps)
    assert [len(some) for some in first] == sizes
    assert {*range(20)} == {sample for some in first for sample in some} or drop_last
    assert samplers[0].epoch == 1
    assert drawn(samplers, steps) != first
    assert samplers[0].epoch == 2


def test_the_position_moves_once_a_step() -> None:
    one = JobSampler(100, 8, rank=0, world_size=2)
    one.trained(0)
    one.trained(0)
    assert one.consumed == 16
    iterator = iter(one)
    assert [*iterator] and one.consumed == 16


@pytest.mark.parametrize("other", [{"dataset": 101}, {"seed": 2}, {"shuffle": False}])
def test_another_order_is_refused(other: dict[str, Any]) -> None:
    state = JobSampler(100, 8, seed=1).state_dict()
    with pytest.raises(ValueError, match="the samples consumed would be others"):
        JobSampler(**{"dataset": 100, "batch_size": 8, "seed": 1, **other}).load_state_dict(state)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="positive numbers"):
        JobSampler(100, 0)
    with pytest.raises(ValueError, match="a rank with a world_size"):
        JobSampler(100, 1, rank=1)
    with pytest.raises(ValueError, match="a step takes 128 samples and the dataset has 100"):
        next(iter(JobSampler(100, 64, rank=0, world_size=2)))


class Fault(Exception):
    """Ends a life."""


def life(until: int, workers: int, fault: int | None = None) -> tuple[int, list[tuple[int, list[int], float]]]:
    """Where it began, and by step, the samples and a random number. With a fault: before the update of that step."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(40.0)
    sampler = JobSampler(data, 3, seed=3)  # type: ignore[arg-type]  # a tensor has a length
    loader = DataLoader(
        data,  # type: ignore[arg-type]  # and items
        batch_sampler=sampler, num_workers=workers, prefetch_factor=4 if workers else None, generator=torch.Generator(),
    )  # fmt: skip
    torch.manual_seed(0)
    state = RecoverableState(model=model, optimizer=optimizer, sampler=sampler)
    begun = step = state.restore()
    seen: list[tuple[int, list[int], float]] = []
    while step <= until:
        for batch in loader:
            model(batch[:, None]).sum().backward()
            number = torch.rand(1).item()
            if step == fault:
                return begun, seen
            with state.update(step):
                optimizer.step()
            seen.append((step, batch.int().tolist(), number))
            step += 1
            if step > until:
                break
    return begun, seen


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank."""
    with alone.job(monkeypatch):
        yield


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_loader_fetched_ahead_is_fetched_again(workers: int) -> None:
    """20 steps are one and a half epochs; faults come within the first, and right at its end."""
    _, whole = life(19, 0)
    alone.the_node_is_lost()
    begun, seen = life(19, workers, fault=5)
    for fault in (13, None):
        since, more = life(19, workers, fault)
        assert since == begun + len(seen)
        begun, seen = 0, seen + more
    assert seen == whole


# --- samplers that do not say what their state counts


def moved(states: Sequence[dict[str, Any]], old: int, new: int) -> None:
    """The first ones in a world of `old` ranks, the last two in one of `new`."""
    first, then = Counting(), Counting()
    first.begin({"sampler": states[0]}, old)
    for state in states[1:-1]:
        first.step({"sampler": state})
    then.take_over(first.moves, new, ["sampler"])
    then.begin({"sampler": states[-2]}, new)
    then.step({"sampler": states[-1]})


@pytest.mark.parametrize(
    ("states", "old", "new"),
    [
        ([{"at": 0}, {"at": 8}, {"at": 14}], 4, 3),
        ([{"at": 0}, {"at": 8}, {"at": 24}], 4, 8),
        ([{"at": 0, "e": 1}, {"at": 90, "e": 1}, {"at": 4, "e": 2}, {"at": 94, "e": 2}, {"at": 139, "e": 2}], 4, 2),
        ([{"at": 0, "e": 1}, {"at": 8, "e": 1}, {"at": 6, "e": 2}], 4, 3),  # the end of an epoch shows nothing, yet
    ],
)
def test_numbers_that_move_with_the_worlds_size_are_the_jobs(states: list[dict[str, Any]], old: int, new: int) -> None:
    moved(states, old, new)


@pytest.mark.parametrize(
    "states",
    [
        [{"at": 0}, {"at": 1}, {"at": 2}],  # counts its own draws
        [{"at": 0, "seen": 0}, {"at": 8, "seen": 1}, {"at": 14, "seen": 2}],
        [{"at": 0}, {"at": 0}, {"at": 0}],
        [{"at": 0, "order": torch.arange(3)}, {"at": 8, "order": torch.arange(3)}, {"at": 14, "order": torch.arange(3)}],
        [{"at": 0, "of": [*range(99)]}, {"at": 8, "of": [*range(99)]}, {"at": 14, "of": [*range(99)]}],
        [{"at": 0, "by": "a"}, {"at": 8, "by": "b"}, {"at": 14, "by": "c"}],
    ],
)
def test_what_does_not_or_cannot_be_seen_is_refused(states: list[dict[str, Any]]) -> None:
    with pytest.raises(Contradiction, match=r"3 ranks instead of 4; the states of sampler are private.*JobSampler, or set"):
        moved(states, 4, 3)


def test_a_world_that_changes_twice_before_a_step_is_measured_against_the_first() -> None:
    first, second, third = Counting(), Counting(), Counting()
    first.begin({"s": {"at": 0}}, 4)
    first.step({"s": {"at": 4}})
    second.take_over(first.moves, 3, ["s"])
    second.begin({"s": {"at": 4}}, 3)
    third.take_over(second.moves, 2, ["s"])
    third.begin({"s": {"at": 4}}, 2)
    with pytest.raises(Contradiction, match="2 ranks instead of 4"):
        third.step({"s": {"at": 5}})
    third.begin({"s": {"at": 4}}, 2)
    third.step({"s": {"at": 6}})


def test_epochs_of_one_step_cannot_be_measured() -> None:
    one = Counting()
    one.begin({"s": {"at": 0}}, 4)
    one.step({"s": {"at": 4}})
    two = Counting()
    two.take_over(one.moves, 2, ["s"])
    two.begin({"s": {"at": 4}}, 2)
    with pytest.raises(Contradiction):
        for at in (3, 2, 1):
            two.step({"s": {"at": at}})
