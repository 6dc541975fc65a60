"""RecoverableState: a training loop's state, brought back from memory after a restart.

    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in range(state.restore(), steps):
        ...
        with state.update(step):
            optimizer.step()
            scheduler.step()

Theory. Nothing is copied as long as all goes well, but what is small: private state (private.py) is exchanged on entering
`update`, schedulers' and scalers' values are noted on leaving it, and every k steps the node's shared memory gets a version
(nodestate.py). After a restart `restore` finds the newest step that is whole somewhere (restoring.py).

Leaving `update(step)` without an exception commits the step: model, optimizer, scheduler, scaler, sampler and random states are
then the state after `step`. What is changed outside of it (a scheduler stepped after the block) would be lost in a restart, so it
is an error.

States: *new* (before `restore`), *between* updates, *inside* one (torn until it is left in good order).
"""

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from hyperpodrun.agent.wire import node_state
from hyperpodrun.inprocess.progress import note_step
from hyperpodrun.inprocess.session import update_section
from hyperpodrun.recovery import memory, private, restoring, rng, shard
from hyperpodrun.recovery.exchange import Exchange
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.parts import Part, RecoveryError, part_of
from hyperpodrun.recovery.where import Meeting, Where, look, ranks_of

CHECKS = 3
"""For so many updates it is looked whether something was changed outside of them."""


class RecoverableState:
    """What a step changes, and how it comes back.

    `model`, `optimizer`, `scheduler`, `scaler`: one each, or a list. `sampler` and anything else that is given by name must have
    state_dict and load_state_dict and is private to the rank; a further module or optimizer is shared like the model. `rng`: True
    (random states are replicated each step), "counter" (every generator is seeded per step from (`seed`, rank, step)) or False.
    `replica_group`: the ranks that hold the same parameters (None: all; a process group, or a list of ranks); DTensors know by
    themselves. `copies`: below 2, live objects only; else versions in the node's shared memory too, and as many buddies for
    private state. `name` tells several states of one program apart.

    Raises TypeError for an object without state, ValueError for a bad option.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        sampler: Any = None,
        rng: bool | str | None = True,
        replica_group: Any = None,
        copies: int = 2,
        seed: int = 0,
        name: str = "default",
        **others: Any,
    ) -> None:
        if copies < 0:
            raise ValueError(f"copies={copies}: a number of copies is expected")
        shared = {**_each("model", model), **_each("optimizer", optimizer)}
        shared |= {key: thing for key, thing in others.items() if isinstance(thing, torch.nn.Module | torch.optim.Optimizer)}
        things = {**_each("sampler", sampler), **{key: thing for key, thing in others.items() if key not in shared}}
        for key, thing in things.items():
            part_of(key, thing)  # refuses what has no state
        models = {key: thing for key, thing in shared.items() if isinstance(thing, torch.nn.Module)}
        self._mode = _rng_mode(rng)
        self._shared: list[Part] = [part_of(key, thing) for key, thing in shared.items()]
        self._common: list[Part] = [part_of(k, t) for k, t in (_each("scheduler", scheduler) | _each("scaler", scaler)).items()]
        self._models = models
        self._private = private.Private(things, models, self._mode)
        self._group = replica_group
        self._copies = copies
        self._seed = seed
        self._name = name
        self._where: Where | None = None
        self._memory: Memory | None = None
        self._exchange: Exchange | None = None
        self._node: NodeState | None = None
        self._writes_shard = False
        self._every = 1
        self._checks = CHECKS
        self.restored_from = "fresh"
        """Where the state came from: "own", "peer", "copy", "shm" or "fresh"."""
        self.why = ""
        """The last restore in a sentence."""

    # --- a restart

    def restore(self) -> int:
        """Bring the state back, or begin afresh; the step to run next. All ranks call it, once the process group is there.

        Raises plan.Contradiction when ranks that should be replicas are not, RecoveryError when the objects are not those of before.
        """
        where = self._where = look()
        earlier = memory.of(self._name)
        key = _shard_key(self._models, ranks_of(self._group, where.world_size), where.rank)
        mine = self._memory = Memory(key, self._shared)
        if not where.launched:
            self.why = "not started by hyperpodrun: there is nothing to recover from"
            self._seed_step(0)
            return 0
        needs = [key, *([f"common {key}"] if self._common else []), f"rank {where.rank}"]
        self._node = NodeState(node_state.folder_of(where.job_id, where.node), self._say) if self._copies >= 2 else None
        on_node = (
            self._node.held([key, *(f"common {key}",), *(f"rank {rank}" for rank in range(where.world_size))])
            if self._node
            else {}
        )
        meeting = Meeting(where, self._name)
        attempt = restoring.Restoring(where, meeting, key, self._shared, earlier, {**restoring.held_by(earlier), **on_node})
        found = attempt.restore(needs)
        if isinstance(found, str):
            self.why = found
            step = -1
        else:
            step, self.restored_from, self.why = found.step, found.source, found.why
            self._install_small(attempt.blobs, step)
        if earlier is not None:
            mine.take_over(earlier, step)
        mine.step = step
        memory.remember(self._name, mine)
        self._settle(meeting, step, attempt.first_on_node(key))
        return step + 1

    def _install_small(self, blobs: dict[str, bytes], step: int) -> None:
        assert self._memory is not None and self._where is not None
        if self._common:
            text = blobs[f"common {self._memory.key}"]
            self._memory.common.put(step, text)
            layout, tensors = shard.unpack(text)
            shard.install(layout, self._common, tensors)
        text = blobs[f"rank {self._where.rank}"]
        self._memory.of_rank(self._where.rank).put(step, text)
        self._private.install(text)

    def _settle(self, meeting: Meeting, step: int, writes_shard: bool) -> None:
        """Everything is in place everywhere: what a step needs is made ready, and nobody depends on one rank's memory."""
        where, mine = self._where, self._memory
        assert where is not None and mine is not None
        if where.world_size > 1:
            self._exchange = Exchange(where.rank, where.world_size, self._copies, _cpu_group())
        if step >= 0:
            self._swap(step, self._private_text(step))
        if self._node is not None:
            self._writes_shard = writes_shard
            names = [
                f"rank {where.rank}",
                *([mine.key, *([f"common {mine.key}"] if self._common else [])] if writes_shard else []),
            ]
            self._node.begin(step, names)
        meeting.barrier()
        self._seed_step(step + 1)
        if where.rank == 0 and step >= 0:
            self._say(f"step {step + 1} is next: {self.why}")

    def _private_text(self, step: int) -> bytes:
        assert self._memory is not None and self._where is not None
        return self._memory.of_rank(self._where.rank).get(step) or self._private.capture()

    # --- a step

    def update(self, step: int) -> "_Update":
        """The block in which a step's update is applied: `with state.update(step): optimizer.step(); scheduler.step()`."""
        return _Update(self, step)

    def _enter(self, step: int) -> None:
        mine = self._memory
        if mine is None:
            raise RecoveryError("update() before restore(): call restore() once, it gives the step to begin with")
        if step <= mine.step:
            raise RecoveryError(f"update({step}): step {mine.step} is committed already; steps have to grow")
        if self._node is not None:
            self._node.settle()
        self._look_for_changes_outside(mine)
        if self._where is not None and self._where.launched:
            self._every = self._swap(step, self._private.capture())

    def _swap(self, step: int, text: bytes) -> int:
        """This rank's private state to others, theirs to here; how often versions are written."""
        mine, where = self._memory, self._where
        assert mine is not None and where is not None
        every = 1 if self._node is None else self._node.proposal()
        if self._exchange is not None:
            kept, every = self._exchange.swap(text, every)
            for rank, state in kept.items():
                mine.of_rank(rank).put(step, state)
        mine.of_rank(where.rank).put(step, text)
        return every

    def _committed(self, step: int) -> None:
        mine = self._memory
        assert mine is not None
        if self._common:
            mine.common.put(step, shard.pack(shard.of(self._common)))
        mine.step = step
        mine.torn = False
        if self._node is not None:
            self._node.stepped(step, self._every, lambda: self._versions(step))
        self._seed_step(step + 1)
        note_step(step)

    def _versions(self, step: int) -> dict[str, shard.Shard]:
        mine, where = self._memory, self._where
        assert mine is not None and where is not None
        rank = f"rank {where.rank}"
        made = {rank: restoring.blob(rank, mine.of_rank(where.rank).get(step) or b"")}
        if self._writes_shard:
            made[mine.key] = shard.of(self._shared)
            if self._common:
                name = f"common {mine.key}"
                made[name] = restoring.blob(name, mine.common.get(step) or b"")
        return made

    def _look_for_changes_outside(self, mine: Memory) -> None:
        before = mine.common.get(mine.step)
        if self._checks and before is not None:
            self._checks -= 1
            if shard.pack(shard.of(self._common)) != before:
                names = ", ".join(part.name for part in self._common)
                raise RecoveryError(
                    f"{names} changed outside of `with state.update(step):`, so a restart would lose the change: "
                    "move scheduler.step() and scaler.update() into the block"
                )

    def _seed_step(self, step: int) -> None:
        if self._mode == "counter":
            rng.seed_all(self._seed, self._where.rank if self._where else 0, step)

    def _say(self, text: str) -> None:
        print(f"hyperpodrun: {text}", file=sys.stderr, flush=True)


class _Update:
    """See RecoverableState.update. A raise of the in-process restart is held back inside."""

    __slots__ = ("_section", "_state", "_step")

    def __init__(self, state: RecoverableState, step: int) -> None:
        self._state = state
        self._step = step

    def __enter__(self) -> Self:
        self._state._enter(self._step)
        self._section = update_section()
        self._section.__enter__()
        mine = self._state._memory
        assert mine is not None
        mine.torn = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._state._committed(self._step)
        finally:
            self._section.__exit__(kind, error, trace)


def _rng_mode(given: bool | str | None) -> rng.Mode:
    return rng.mode_of(given)


def _each(name: str, given: Any) -> dict[str, Any]:
    """One object, several, or none, by name."""
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        return {f"{name}{place}": thing for place, thing in enumerate(given)}
    return {name: given}


def _shard_key(models: dict[str, torch.nn.Module], group: Sequence[int], rank: int) -> str:
    """What this rank holds in common with others: by its replica group, or by the coordinates of its DTensors' shards."""
    places: set[tuple[str, str]] = set()
    for name, model in models.items():
        for parameter in model.parameters():
            placements = getattr(parameter, "placements", None)
            if placements is not None:
                mesh = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
                coordinate = mesh.get_coordinate() or []
                spread = [(dim, coordinate[dim]) for dim, kind in enumerate(placements) if not kind.is_replicate()]
                places.add((f"{name}:{mesh.mesh_dim_names or mesh.ndim}", str(spread)))
        del parameter
    if places:
        return f"model {sorted(places)}"
    if rank not in group:
        raise ValueError(f"replica_group: rank {rank} is not in it ({list(group)[:8]})")
    return f"model of ranks {group[0]}-{group[-1]}/{len(group)}"


def _cpu_group() -> Any:
    """A group of all ranks that takes CPU tensors: the default one, or one of its own beside NCCL's."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RecoveryError("restore() before init_process_group(): the ranks cannot speak with each other yet")
    return None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")
