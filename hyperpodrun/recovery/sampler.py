"""A sampler whose position is the job's: whoever goes on with it, in whatever world, goes on with the next sample.

    sampler = JobSampler(dataset, batch_size=8, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator(), num_workers=4)
    state = RecoverableState(model=model, optimizer=optimizer, sampler=sampler)
    step = state.restore()
    while step < steps:
        for batch in loader:
            ...
            with state.update(step):
                optimizer.step()
            step += 1

Theory. All ranks walk the same order of the samples, which an epoch's number and the seed give. A step takes the next `batch_size`
samples for each batch of each rank; which of them are whose follows from the rank and the size of the world at that time. So one
number is all the state there is: how many samples the job has consumed, all epochs together.

A loader draws batches ahead of time, and what was drawn is not trained: so the position does not move with the iterator. It moves when
a step is committed, by what a step takes: RecoverableState says when (`trained`, on entering `update`). An iterator begins at the
position and goes to the end of the epoch; the next one begins the next epoch. So a loop that is entered again after a restart, or left
in the middle, goes on with the first sample that was not trained.

Give the loader a generator of its own: without one, each of its iterators draws a seed from torch's generator, and after a restart
there is an iterator more than without.

At the end of an epoch the samples that are too few for a step are left out (`drop_last`), or are shared out, filled up with the first
ones of the epoch so that all ranks make as many steps (as torch's DistributedSampler does).

Invariants: without `drop_last` each sample of an epoch is drawn at least once, and but for those that fill up, once.
"""

import os
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from hyperpodrun.agent.wire import names


class JobSampler(Sampler[list[int]]):
    """Batches of indices of a dataset for this rank (`batch_sampler=` of a DataLoader).

    `dataset`: it, or its length. `batch_size`: samples a rank and batch; `batches_per_step`: batches between two updates. `seed`,
    `shuffle`: the order of each epoch. `rank`, `world_size`: among those that share out the samples (None: all ranks, as they are when
    an iterator begins); with tensor parallelism, those of the data-parallel group.

    Raises ValueError for numbers that make no sense.
    """

    job_wide = True

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        batches_per_step: int = 1,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._length = dataset if isinstance(dataset, int) else len(dataset)
        if min(self._length, batch_size, batches_per_step) < 1 or (rank is None) != (world_size is None):
            raise ValueError(
                f"JobSampler: {self._length} samples in batches of {batch_size}, {batches_per_step} a step, rank {rank} of "
                f"{world_size}: positive numbers are expected, and a rank with a world_size or neither"
            )
        self._batch, self._batches = batch_size, batches_per_step
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._given = None if rank is None or world_size is None else (rank, world_size)
        self._consumed = 0
        self._step: int | None = None

    @property
    def consumed(self) -> int:
        """Samples that the job has trained, all epochs together (those left out at the end of one count)."""
        return self._consumed

    @property
    def epoch(self) -> int:
        """The one that the next sample is of."""
        return self._begin(self._place()[1]) // self._length

    def __iter__(self) -> Iterator[list[int]]:
        """What is left of the epoch. Raises ValueError when there is less in one than a step takes."""
        rank, world = self._place()
        if not self._size(0, world):
            raise ValueError(
                f"JobSampler: a step takes {self._batch * self._batches * world} samples and the dataset has {self._length}: "
                "make batch_size smaller, or give drop_last=False"
            )
        at = self._begin(world)
        epoch, first = divmod(at, self._length)
        order = self._order(epoch)
        while first < self._length:
            size = self._size(first, world)
            if not size:
                return
            for number in range(self._batches):
                start = first + (number * world + rank) * size
                yield [order[place % self._length] for place in range(start, start + size)]
            first += size * self._batches * world

    def __len__(self) -> int:
        """Batches that are left of the epoch, for this rank."""
        _, world = self._place()
        unit, left = self._batch * self._batches * world, self._length - self._begin(world) % self._length
        return (left // unit if self._drop_last else -(-left // unit)) * self._batches

    def trained(self, step: int) -> None:
        """The batches of this step are trained: the position moves on, once a step. RecoverableState calls it."""
        if step == self._step:
            return
        _, world = self._place()
        at = self._begin(world)
        end = (at // self._length + 1) * self._length
        self._step, self._consumed = step, min(end, at + self._batch * self._batches * world)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"consumed": self._consumed, "length": self._length, "seed": self._seed, "shuffle": self._shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises ValueError when it is another dataset's or another order's."""
        mine = self.state_dict()
        for key in ("length", "seed", "shuffle"):
            if state[key] != mine[key]:
                raise ValueError(
                    f"JobSampler: {key} was {state[key]!r} and is {mine[key]!r}: the samples consumed would be others"
                )
        self._consumed, self._step = int(state["consumed"]), None

    def _begin(self, world: int) -> int:
        """Where the next step begins: what is too few for a step is left out."""
        at = self._consumed
        if at % self._length and not self._size(at % self._length, world):
            at = (at // self._length + 1) * self._length
        return at

    def _size(self, first: int, world: int) -> int:
        """Samples in each batch of the step that begins there in the epoch."""
        left, shares = self._length - first, self._batches * world
        if left >= self._batch * shares:
            return self._batch
        return 0 if self._drop_last else -(-left // shares)

    def _order(self, epoch: int) -> list[int] | range:
        if not self._shuffle:
            return range(self._length)
        drawing = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._length, generator=drawing).tolist()

    def _place(self) -> tuple[int, int]:
        if self._given is not None:
            return self._given
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return int(os.environ.get(names.RANK, "0")), int(os.environ.get(names.WORLD_SIZE, "1"))
