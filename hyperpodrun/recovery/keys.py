"""What a rank's shard is called, and what tells at a glance that two shards differ.

Theory. Ranks whose tensors are equal by construction share a key. A DTensor says by itself where it is replicated: its key is the set
of ranks it is spread over and the coordinates along the dimensions of the mesh in which it is not replicated. Other tensors are
equal within the replica group. A key does not name the size of the world where the group is the whole of it, so that a smaller or
larger world still knows it.

`sample` reads a few bytes of each tensor: replicas agree in them, and pipeline stages or experts that were taken for replicas do not.

States: none. Source: torch.distributed.tensor.DTensor, torch.distributed.device_mesh.DeviceMesh.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

import torch
import xxhash

from hyperpodrun.recovery import boxes, codec
from hyperpodrun.recovery.shard import Shard

SAMPLE_BYTES = 64


def shard_key(models: Mapping[str, torch.nn.Module], group: Sequence[int], rank: int, world_size: int) -> str:
    """What this rank holds in common with others. Raises ValueError when it is not of the group."""
    if rank not in group:
        raise ValueError(f"replica_group: rank {rank} is not in it ({list(group)[:8]})")
    places = sorted({place for model in models.values() for place in _spread(model.parameters(), rank)})
    words = [f"model {place}" for place in places] or ["model"]
    if len(group) < world_size:
        words.append(f"of ranks {_listed(group)}")
    return " ".join(words)


def family_of(keys: Iterable[str]) -> tuple[str, int]:
    """The name of the family of shards that has these keys, and how many there are (shard.Layout)."""
    members = sorted({*keys})
    return blake2b(repr(members).encode(), digest_size=9).hexdigest(), len(members)


def is_of_one_state(models: Mapping[str, torch.nn.Module], group: Sequence[int], world_size: int) -> bool:
    """Are tensors of one name the same tensor on all ranks: no other replica group, and each DTensor's mesh spans the world?"""
    meshes = (getattr(parameter, "device_mesh", None) for model in models.values() for parameter in model.parameters())
    return len(group) == world_size and all(mesh is None or mesh.size() == world_size for mesh in meshes)


def _spread(parameters: Iterable[torch.Tensor], rank: int) -> Iterable[str]:
    for parameter in parameters:
        placements = getattr(parameter, "placements", None)
        if placements is None:
            continue
        mesh = parameter.device_mesh  # type: ignore[attr-defined]  # a DTensor
        coordinate = boxes.coordinate_of(mesh, rank)
        names = mesh.mesh_dim_names or range(mesh.ndim)
        spread = [(names[dim], coordinate[dim]) for dim, kind in enumerate(placements) if not kind.is_replicate()]
        ranks = mesh.mesh.flatten().tolist()
        at = ", ".join(f"{name} {place}" for name, place in spread)
        yield f"shard ({at or 'whole'}) of {'x'.join(map(str, mesh.mesh.shape))} ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 8:
        return ",".join(map(str, ranks))
    return f"{ranks[0]}…{ranks[-1]} #{blake2b(repr(list(ranks)).encode(), digest_size=6).hexdigest()}"


def samples(leaves: Sequence[tuple[str, torch.Tensor]]) -> list[bytes]:
    """A few bytes of each tensor."""
    found = []
    for _, tensor in leaves:
        raw = codec.raw(codec.dense(tensor))
        middle = max(0, raw.numel() - SAMPLE_BYTES) // 2
        found.append(bytes(raw[middle : middle + SAMPLE_BYTES].tolist()))
    return found


def sample(shard: Shard) -> str:
    """A digest of a few bytes of each tensor."""
    pieces: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in shard.tensors:
        middle = max(0, tensor.numel() - SAMPLE_BYTES) // 2
        pieces.setdefault(tensor.device, []).append(tensor[middle : middle + SAMPLE_BYTES])
    state = xxhash.xxh3_64()
    for some in pieces.values():
        state.update(bytes(torch.cat(some).cpu().tolist()))
    return state.hexdigest()
