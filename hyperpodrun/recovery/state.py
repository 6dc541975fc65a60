"""RecoverableState: a training loop's state, brought back from memory after a restart.

    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler)
    for step in range(state.restore(), steps):
        ...
        with state.update(step):
            optimizer.step()
            scheduler.step()

Theory. Nothing is copied as long as all goes well, but what is small: private state (private.py) is exchanged on entering
`update`, schedulers' and scalers' values are noted on leaving it, and every k steps a version of the state is written to the node's
shared memory and to buddies on other nodes (versions.py). After a restart `restore` finds the newest step that is whole somewhere
(restoring.py).

Leaving `update(step)` without an exception commits the step: model, optimizer, scheduler, scaler, sampler and random states are
then the state after `step`. What is changed outside of it (a scheduler stepped after the block) would be lost in a restart, and what
is private and changes inside it would come back a step old: both are errors, seen in the first steps. So is what should be equal on
ranks and is not.

States: *new* (before `restore`), *between* updates, *inside* one (torn until it is left in good order).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
import xxhash

from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.inprocess.progress import counters, note_step
from hyperpodrun.inprocess.session import update_section
from hyperpodrun.recovery import checks, keys, memory, placement, plan, private, reuse, rng, shard
from hyperpodrun.recovery.exchange import Exchange
from hyperpodrun.recovery.held import Held, blob
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Misused, Part, RecoveryError, expected_bytes, part_of
from hyperpodrun.recovery.restoring import Nothing, Restored, Restoring
from hyperpodrun.recovery.tiered import EVERY, Tiered
from hyperpodrun.recovery.tiered import found as stored_in
from hyperpodrun.recovery.transfer import new_token
from hyperpodrun.recovery.versions import Room, Versions, found_by
from hyperpodrun.recovery.where import Meeting, Where, look, ranks_of

CHECKS = 3
"""For so many updates it is looked whether something was changed outside of them."""


class RecoverableState:
    """What a step changes, and how it comes back.

    `model`, `optimizer`, `scheduler`, `scaler`: one each, or a list. `sampler` and anything else that is given by name must have
    state_dict and load_state_dict and is private to the rank; a further module or optimizer is shared like the model. What changes
    inside `update` and is equal on the ranks (averages of parameters) goes into the list of optimizers if it is large, into that of
    schedulers if it is small. A sampler whose state is the whole job's says so by `job_wide = True` (sampler.JobSampler). `rng`: True
    (random states are replicated each step), "counter" (every generator is seeded per step from (`seed`, rank, step)) or False.
    `replica_group`: the ranks that hold the same parameters (None: all; a process group, or a list of ranks); DTensors know by
    themselves. `copies`: below 2, live objects only; else versions in the node's shared memory too, and as many buddies for
    private state. `tiered`: a folder, best one that all nodes share, in which the state is stored every `tiered_every` steps (None:
    tiered.EVERY) and from which it comes where no memory holds it any more; None: stored checkpoints are the script's business, and
    `restore` gives 0. `name` tells several states of one program apart: they come back each by itself.

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
        tiered: str | os.PathLike[str] | None = None,
        tiered_every: int | None = None,
        seed: int = 0,
        name: str = "default",
        **others: Any,
    ) -> None:
        if copies < 0:
            raise ValueError(f"copies={copies}: a number of copies is expected")
        if tiered_every is not None and (tiered is None or tiered_every < 1):
            raise ValueError(f"tiered_every={tiered_every}: a number of steps is expected, and tiered=PATH with it")
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
        self._path = "" if tiered is None else node_state.of_state(os.path.abspath(tiered), name)
        self._tiered = Tiered(self._path, tiered_every or EVERY, self._say) if self._path else None
        self._stores: list[str] = []
        self._seed = seed
        self._name = name
        self._has_common = bool(self._common) or self._private.has_constants
        self._memory: Memory | None = None
        self._begin_life()
        self.restored_from = "fresh"
        """Where the state came from: "own", "peer", "copy", "shm", "tiered" or "fresh"."""
        self.why = ""
        """The last restore in a sentence."""
        self.took_s: dict[str, float] = {}
        """Its seconds on this rank, by phase: "offers", "fetch" (from others), "wait" (for others), "take over" (what is here)."""

    # --- a restart

    def _begin_life(self) -> None:
        """What belongs to one restore and the steps behind it."""
        self._where: Where | None = None
        self._meeting: Meeting | None = None
        self._exchange: Exchange | None = None
        self._versions: Versions | None = None
        self._writes_shard = False
        self._small: Sequence[placement.Place] = ()
        self._checks = CHECKS
        self._left: checks.Seen = {}
        self._swapped = b""
        self._common_digest = bytes(checks.DIGEST_BYTES)
        self._replicas: set[int] = set()
        self._constant = b""
        """What is constant on all ranks alike; `_constants`: by rank, where it differs."""
        self._constants: dict[int, bytes] = {}

    def restore(self) -> int:
        """Bring the state back, or begin afresh; the step to run next. All ranks call it, once the process group is there.

        Raises plan.Contradiction when ranks that should be replicas are not, RecoveryError when the objects are not those of before.
        """
        earlier = memory.of(self._name)
        if earlier is not None:
            earlier.stop()
        self._begin_life()
        self.restored_from = "fresh"
        where = self._where = self._look()
        mine = self._memory = Memory(self._key(where), self._shared)
        if not where.launched:
            self.why = "not started by hyperpodrun: there is nothing to recover from"
            if self._path:
                self._say(f"this process was not started by hyperpodrun: nothing is read from {self._path} or stored there")
            self._private.begin(where.world_size)
            self._seed_step(0)
            return 0
        meeting = Meeting(where, self._name)
        if earlier is not None:
            mine.heap = earlier.heap
        if self._copies >= 2:
            token = meeting.from_first("versions", new_token())
            self._versions = Versions(where, mine, self._copies, token, self._say)
            mine.part = self._versions.part
        mine.stop = self._close
        try:
            return self._restored(where, meeting, earlier, mine)
        except BaseException:
            self._close()  # the next one has its own
            raise

    def _restored(self, where: Where, meeting: Meeting, earlier: Memory | None, mine: Memory) -> int:
        attempt = self._attempt(where, meeting, earlier)
        found = attempt.restore(None if self._versions is None else self._room)
        self.why, self.took_s = found.why, attempt.took_s
        if isinstance(found, Nothing):
            step = -1
        else:
            step, self.restored_from = found.step, found.source
            self._install_small(attempt.blobs, step, found.world)
        mine.history = (*found.history, plan.restart(step, attempt.mark))
        if keys.is_of_one_state(self._models, ranks_of(self._group, where.world_size), where.world_size):
            mine.kin = shard.Kin(*keys.family_of(offer.needs[0] for offer in attempt.offers.values()), where.rank)
        if earlier is not None:
            mine.take_over(earlier, step)
            mine.before = earlier if isinstance(found, Restored) and found.anew else None
        if step >= 0 and self._has_common:
            self._note_common(mine, step, *memory.split(attempt.blobs[f"common {mine.key}"]))
        mine.committed(step)
        memory.remember(self._name, mine)
        self._settle(meeting, step, attempt)
        return step + 1

    def feasible(self) -> tuple[bool, str]:
        """Could `restore` bring the state back from what is held now, and why (not)? All ranks call it; nothing changes.

        Raises plan.Contradiction.
        """
        where = self._look()
        if not where.launched:
            return False, "not started by hyperpodrun: there is nothing to recover from"
        found = self._attempt(where, Meeting(where, f"{self._name} feasible"), memory.of(self._name)).look()
        return isinstance(found, plan.Plan), found.why

    def _attempt(self, where: Where, meeting: Meeting, earlier: Memory | None) -> Restoring:
        key = self._key(where)
        needs = [key, *([f"common {key}"] if self._has_common else [])]
        held = Held()
        if earlier is not None and reuse.written(self._shared, earlier):
            earlier.torn = True
            if reuse.sharing(self._shared, earlier):
                self._say(
                    "the objects of the run before are used again, and were written to since its last update (a checkpoint, new "
                    "initial values, a wrapper's broadcast): what they hold is not used. Build them inside of the function that is "
                    "run again"
                )
            else:
                self._say(
                    "other weights were in this rank's model when the run before ended (averages, for a validation?), so it is not "
                    "used. Those who keep such averages in a model of their own lose nothing to such a fault"
                )
        held.remembered(earlier)
        found = [] if self._copies < 2 else found_by(where, earlier)
        held.found(found, needs)
        if self._path:
            stored = stored_in(self._path, where.local_rank, where.local_world_size, needs)
            held.found(stored, (), "tiered")
            found += stored
        known = [version.history for version in found] + ([earlier.history] if earlier is not None else [])
        world = 0 if self._private.empty else where.world_size
        return Restoring(where, meeting, needs, world, self._shared, earlier, held, plan.longest(known), self._say)

    def _look(self) -> Where:
        return msgspec.structs.replace(look(), state=self._name)

    def _key(self, where: Where) -> str:
        return keys.shard_key(self._models, ranks_of(self._group, where.world_size), where.rank, where.world_size)

    def _room(self, host: str) -> Room:
        assert self._versions is not None
        return self._versions.room(host, expected_bytes(self._shared))

    def _install_small(self, blobs: dict[str, bytes], step: int, world: int) -> None:
        assert self._memory is not None and self._where is not None
        rank = self._where.rank
        if self._has_common:
            text, constant = memory.split(blobs[f"common {self._memory.key}"])
            layout, tensors = shard.unpack(text)
            shard.install(layout, self._common, tensors)
            self._private.install_constants(constant)
        if world:
            fresh = rng.seed_of(self._seed, rank, step + 1) if rank >= world else None
            text, constant = memory.split(blobs[plan.private(rank % world, world)])
            self._private.install_constants(constant)
            self._private.install(text, self._where.world_size, fresh)
            if fresh is not None and self._mode == "replicate":
                self._say(f"rank {rank} is new: its random numbers begin at a seed made of ({self._seed}, {rank}, {step + 1})")

    def _settle(self, meeting: Meeting, step: int, attempt: Restoring) -> None:
        """Everything is in place everywhere: what a step needs is made ready, and nobody depends on one rank's memory."""
        where, mine, versions = self._where, self._memory, self._versions
        assert where is not None and mine is not None
        if where.world_size > 1 and (versions is not None or not self._private.empty):
            nodes = [attempt.offers[rank].node for rank in range(where.world_size)]
            self._exchange = Exchange(where.rank, where.world_size, self._copies, nodes, _cpu_group())
        self._replicas = {rank for rank, offer in attempt.offers.items() if offer.needs[:1] == (mine.key,)}
        self._writes_shard = attempt.first_on_node()
        if versions is not None:
            rooms = {rank: card.room for rank, card in attempt.cards.items() if card.room is not None}
            if self._exchange is not None and not self._private.empty:
                self._small = placement.of_private(list(attempt.offers.values()), self._copies, self._exchange.keepers)
            versions.begin(step, self._names(), attempt.offers, rooms, self._small, attempt.version())
        if self._tiered is not None:
            self._begin_tiered(self._tiered, step, attempt.offers)
        self._meeting = meeting
        self._share_constants(meeting)
        self._private.begin(where.world_size)
        if step >= 0 and not self._private.empty:
            self._swap(step)
        before, mine.before = mine.before, None
        if before is not None:
            memory.loosen(before)
        counters.note_restored(step + 1)
        if versions is None:
            mine.only({plan.private(rank, where.world_size) for rank in range(where.world_size)})
        self._seed_step(step + 1)
        if where.rank == 0 and step >= 0:
            self._say(f"step {step + 1} is next: {self.why}")
        elif where.rank == 0 and (len(mine.history) > 1 or os.environ.get(names.JOB_RESTART_COUNT, "0") != "0"):
            self._say(f"step 0 is next, whatever was done before the restart is lost: {self.why}")

    def _share_constants(self, meeting: Meeting) -> None:
        """Once: what is constant is known to those who keep the states. A barrier, too."""
        mine = self._private.constants()
        if len({*meeting.share("constants", xxhash.xxh3_128(mine).digest())}) == 1:
            self._constant = mine
        elif self._exchange is not None and self._where is not None:
            others = self._exchange.once(mine)
            self._constants = {**others, self._where.rank: mine}

    def _begin_tiered(self, stored: Tiered, step: int, offers: Mapping[int, plan.Offer]) -> None:
        mine, where = self._memory, self._where
        assert mine is not None and where is not None
        of_rank: dict[int, list[str]] = {}
        for rank in sorted(offers):
            known = {name for names in of_rank.values() for name in names}
            of_rank[rank] = [*self._privates(rank), *(name for name in offers[rank].needs if name not in known)]
        of_node = [name for rank, names in of_rank.items() for name in names if offers[rank].node == where.node]
        self._stores = of_rank[where.rank]
        first = where.rank == min(rank for rank, offer in offers.items() if offer.node == where.node)
        stored.begin(step, mine.history, {name for names in of_rank.values() for name in names}, of_node, first)

    def _privates(self, rank: int) -> list[str]:
        assert self._where is not None
        return [] if self._private.empty else [plan.private(rank, self._where.world_size)]

    def _close(self) -> None:
        if self._versions is not None:
            self._versions.close()
        if self._tiered is not None:
            self._tiered.close()

    def _names(self) -> list[str]:
        """What this rank writes of a version."""
        mine, where = self._memory, self._where
        assert mine is not None and where is not None
        of_node = [mine.key, *([f"common {mine.key}"] if self._has_common else [])] if self._writes_shard else []
        of_others = (place.shard for place in self._small if place.buddy == where.rank)
        return [*self._privates(where.rank), *of_others, *of_node]

    # --- a step

    def update(self, step: int) -> "_Update":
        """The block in which a step's update is applied: `with state.update(step): optimizer.step(); scheduler.step()`."""
        return _Update(self, step)

    def _enter(self, step: int) -> None:
        mine = self._memory
        if mine is None:
            raise RecoveryError("update() before restore(): call restore() once, it gives the step to begin with")
        if self._meeting is not None and memory.of(self._name) is not mine:
            raise Misused(
                f"another state by the name of {self._name!r} was restored after this one: give each of them a name of its own, "
                "RecoverableState(name=...)"
            )
        if step <= mine.step:
            raise RecoveryError(f"update({step}): step {mine.step} is committed already; steps have to grow")
        if self._versions is not None:
            self._versions.settle()
        if self._tiered is not None:
            self._tiered.settle()
        self._private.drawn(step)
        if self._checks:
            checks.outside(self._common, mine.common.get(mine.step))
            checks.between(self._shared, self._left)
        if self._checks and self._meeting is not None and mine.step >= 0:
            checks.replicas(self._meeting, mine, self._shared, self._common, self._common_digest, self._models)
        if self._where is not None and self._where.launched:
            meets = self._versions is not None and self._versions.pace.meets(step)
            if meets or not self._private.empty:
                self._swap(step)

    def _swap(self, step: int) -> None:
        """This rank's private state to others, theirs to here; the pace of versions is agreed."""
        mine, where = self._memory, self._where
        assert mine is not None and where is not None
        text = b"" if self._private.empty else self._private.capture()
        said = (1, 0) if self._versions is None else self._versions.agree()
        if self._exchange is not None:
            kept, said = self._exchange.swap(self._common_digest + text, said)
            for rank, theirs in kept.items():
                digest, state = theirs[: checks.DIGEST_BYTES], theirs[checks.DIGEST_BYTES :]
                if rank in self._replicas and digest != self._common_digest:
                    raise checks.other_common(self._common, rank, mine.step)
                if not self._private.empty:
                    mine.state(plan.private(rank, where.world_size)).put(step, state, self._constants.get(rank, b""))
        if not self._private.empty:
            mine.state(plan.private(where.rank, where.world_size)).put(step, text, self._constants.get(where.rank, b""))
        self._swapped = text
        if self._versions is not None:
            self._versions.agreed(*said)

    def _committed(self, step: int) -> None:
        mine = self._memory
        assert mine is not None
        if self._checks and self._meeting is not None:
            checks.carriable(self._shared)
            checks.too_late(self._private, self._swapped)
        self._checks = max(0, self._checks - 1)
        self._left = checks.seen(self._shared) if self._checks else {}
        if self._has_common:
            self._note_common(mine, step, shard.pack(shard.of(self._common)), self._constant)
        mine.committed(step)
        if self._versions is not None:
            self._versions.stepped(step, lambda: self._made(step, self._names()))
        if self._tiered is not None and self._where is not None and self._where.launched and self._tiered.due(step):
            self._tiered.store(step, self._made(step, self._stores), lambda: mine.untouched)
        self._seed_step(step + 1)
        note_step(step)

    def _note_common(self, mine: Memory, step: int, text: bytes, constant: bytes) -> None:
        mine.common.put(step, text, constant)
        self._common_digest = checks.digest(text)

    def _made(self, step: int, names: Sequence[str]) -> dict[str, shard.Shard]:
        mine = self._memory
        assert mine is not None
        made = {}
        for name in names:
            if name == mine.key:
                made[name] = shard.of(self._shared, mine.kin)
            else:
                kept = mine.common if name.startswith("common ") else mine.state(name)
                made[name] = blob(name, kept.get(step) or b"")
        return made

    def _seed_step(self, step: int) -> None:
        if self._mode == "counter":
            rng.seed_all(self._seed, self._where.rank if self._where else 0, step)

    @staticmethod
    def _say(text: str) -> None:
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


def _cpu_group() -> Any:
    """A group of all ranks that takes CPU tensors: the default one, or one of its own beside NCCL's."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RecoveryError("restore() before init_process_group(): the ranks cannot speak with each other yet")
    return None if "gloo" in str(dist.get_backend_config()) else dist.new_group(backend="gloo")
