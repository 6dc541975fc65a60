"""What the first steps of a life look for: a loop that would lose state at a restart is told so while it still costs nothing.

Theory. What is common (schedulers) is noted on leaving an update, what is private on entering it, and what is shared is live. So
nothing common or shared may change between two updates, nothing private inside of one, and what is common or shared has to be equal
on the ranks that would take each other's place. All of that can be seen in one step or two; but a scheduler may be stepped seldom, so
its digest goes round with the private states at every step.

States: none. All raise parts.Misused or plan.Contradiction, with which the job ends: no restart helps.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch
import xxhash

from hyperpodrun.recovery import keys, memory, plan, shard
from hyperpodrun.recovery.parts import Misused, Part, PlainPart, following
from hyperpodrun.recovery.private import Private
from hyperpodrun.recovery.where import Meeting

DIGEST_BYTES = 8
Seen = dict[str, bytes]


def digest(common: bytes) -> bytes:
    """Of what is common, packed."""
    return xxhash.xxh3_64(common).digest()


def outside(common: Sequence[Part], kept: bytes | None) -> None:
    """On entering an update. `kept`: what was common on leaving the one before (None: that is not known)."""
    if kept is not None and shard.pack(shard.of(common)) != memory.split(kept)[0]:
        raise Misused(
            f"{_names(common)} changed outside of `with state.update(step):`, so a restart would lose the change: "
            "move scheduler.step() and scaler.update() into the block"
        )


def seen(shared: Iterable[Part]) -> Seen:
    """What is live, on leaving an update: a few bytes of each tensor, by path. Values of an optimizer's groups may be set anywhere."""
    found: Seen = {}
    for part in shared:
        leaves, skeleton = part.leaves()
        kept = [(path, tensor) for path, tensor in leaves if not path.startswith("groups.")]
        found |= {f"{part.name}.{path}": some for (path, _), some in zip(kept, keys.samples(kept), strict=True)}
        if isinstance(part, PlainPart):
            found[part.name] = skeleton
    return found


def between(shared: Iterable[Part], left: Seen) -> None:
    """On entering the next update. `left`: what was live on leaving the one before ({}: that is not known)."""
    now = seen(shared) if left else {}
    changed = [path for path, some in left.items() if now.get(path) != some]
    if changed:
        raise Misused(
            f"{', '.join(changed[:3])}{f' and {len(changed) - 3} more' * (len(changed) > 3)} changed outside of "
            "`with state.update(step):`, so a fault between that and the block would leave a model of two steps: move what steps an "
            "optimizer or updates an average into the block. What a forward pass changes belongs into buffers"
        )


def too_late(private: Private, saved: bytes) -> None:
    """On leaving an update. `saved`: what was private on entering it."""
    if appeared := private.appeared():
        raise Misused(
            f"the buffer {appeared[0]} was registered after RecoverableState was made, so a restart would not know of it: register it "
            "when the module is built (as None if need be)"
        )
    late = private.differs(saved) if saved else []
    if late:
        raise Misused(
            f"{', '.join(late)} changed inside `with state.update(step):`, and would be a step old after a restart: what is "
            "private to a rank is saved on entering the block. Move before the block what need not be in it. What is equal on the "
            "ranks (an average of parameters): give it in the list of optimizers, optimizer=[optimizer, thing], or in that of "
            "schedulers if it is small. Random numbers: rng='counter'"
        )


def carriable(shared: Iterable[Part]) -> None:
    """Behind a first step, when optimizers have made their state. Raises codec.CodecError, RecoveryError."""
    for part in shared:
        part.leaves()


def replicas(
    meeting: Meeting,
    mine: memory.Memory,
    shared: Sequence[Part],
    common: Sequence[Part],
    common_digest: bytes,
    models: Mapping[str, torch.nn.Module],
) -> None:
    """On entering an update; all ranks call it. Those with the same shard have the same."""
    sample = keys.sample(shard.of(shared)) if mine.whole else ""
    said = meeting.share(f"values after {mine.step}", msgspec.msgpack.encode((mine.key, common_digest, sample)))
    for rank, text in enumerate(said):
        key, its_common, its_sample = msgspec.msgpack.decode(text, type=tuple[str, bytes, str])
        if key == mine.key and its_common != common_digest:
            raise other_common(common, rank, mine.step)
        if key == mine.key and its_sample != sample:
            averaged = any(following(model) for model in models.values())
            raise plan.Contradiction(
                f"rank {rank} has other values of {mine.key!r} than this one after step {mine.step}: they are no replicas of each "
                "other. Say which ranks are with RecoverableState(replica_group=...)"
                + (", and let the buffers of averaged models be equal on them (SyncBatchNorm)" if averaged else "")
            )


def other_common(common: Sequence[Part], rank: int, step: int) -> Misused:
    """That rank, which has the same shard, has something else in common than this one."""
    return Misused(
        f"{_names(common)} have another state on rank {rank} than here after step {step}, and a restart would replace one by "
        "another: what they are stepped with has to be the same on all ranks (all-reduce a loss before ReduceLROnPlateau.step)"
    )


def _names(parts: Iterable[Part]) -> str:
    return ", ".join(part.name for part in parts)
