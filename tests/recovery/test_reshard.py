"""Shards of one world, cut anew for another one, are exactly those that the whole tensors would be cut into."""

import random
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hyperpodrun.recovery import boxes, plan, reshard, shard
from hyperpodrun.recovery.boxes import Box
from hyperpodrun.recovery.parts import Part, RecoveryError, part_of


def mesh_of(shape: Sequence[int], rank: int) -> DeviceMesh:
    """A mesh without any process group, as the rank of that place sees it.

    The names make the meshes of ranks unequal: torch keeps specifications of results by mesh, for a process has but one rank.
    """
    ranks, names = torch.arange(prod(shape)).reshape(*shape), tuple(f"{rank}.{dim}" for dim in range(len(shape)))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def placed(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut by torch's own rules."""
    shape, start = compute_local_shape_and_global_offset(tuple(whole.shape), mesh, placements)
    piece = whole[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))].clone()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


meshes = st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (3, 2), (1, 3)])
kinds = st.sampled_from([Replicate(), Shard(0), Shard(1), Shard(2)])


@given(st.tuples(*[st.integers(0, 9)] * 3), meshes, st.lists(kinds, min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_a_piece_is_where_torch_cuts_it(whole: tuple[int, ...], shape: tuple[int, ...], spread: list[Placement]) -> None:
    for rank in range(prod(shape)):
        mesh = mesh_of(shape, rank)
        placements = spread[: len(shape)]
        size, start = compute_local_shape_and_global_offset(whole, mesh, placements)
        box = boxes.of(placed(torch.zeros(whole), mesh, placements), rank)
        assert box is not None and box.shape == tuple(size)
        assert not box.elements or box.start == tuple(start)


def test_a_strided_piece_is_where_torch_cuts_it() -> None:
    """FSDP2 over tensor parallelism: the mesh's second dimension has cut first."""
    for rank in range(6):
        mesh, placements = mesh_of((3, 2), rank), [_StridedShard(0, split_factor=2), Shard(0)]
        size, start = compute_local_shape_and_global_offset((12, 5), mesh, placements)
        assert boxes.of(mesh_tensor(mesh, placements, (12, 5)), rank) == Box(tuple(start), tuple(size))
        assert boxes.of(mesh_tensor(mesh, [_StridedShard(0, split_factor=3), Shard(0)], (12, 5)), rank) is None


class mesh_tensor:
    """What `boxes.of` looks at of a DTensor."""

    def __init__(self, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> None:
        self.device_mesh, self.placements, self.shape = mesh, placements, shape


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 4)), max_size=3))
def test_a_box_without_another(dims: list[tuple[int, int, int, int]]) -> None:
    one, other = Box(*zip(*[d[:2] for d in dims], strict=True)) if dims else Box((), ()), Box((), ())
    other = Box(*zip(*[d[2:] for d in dims], strict=True)) if dims else other
    part = boxes.overlap(one, other)
    pieces = [one] if part is None else [part, *boxes.minus(one, part)]
    seen = torch.zeros([8] * len(dims), dtype=torch.int64)
    for piece in pieces:
        seen[boxes.within(piece, boxes.all_of(seen.shape))] += 1
    assert seen.max() == 1 and seen.sum() == one.elements
    assert seen[boxes.within(one, boxes.all_of(seen.shape))].sum() == one.elements


class Model(nn.Module):
    """`tensors` by name, cut for a place in a mesh; one is tied, one is the same on all ranks."""

    def __init__(self, tensors: dict[str, torch.Tensor], mesh: DeviceMesh, spread: dict[str, list[Placement]]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            cut = tensor.clone() if name == "plain" else placed(tensor, mesh, spread[name])
            self.register_parameter(name, nn.Parameter(cut))
        self.tied = next(iter(self.parameters()))


def parts_of(
    tensors: dict[str, torch.Tensor], state: dict[str, torch.Tensor] | None, shape: Sequence[int], rank: int, spread: Any
) -> list[Part]:
    """Of the rank at that place; `state`: momentum of the parameters that have made a step (None: none has)."""
    mesh = mesh_of(shape, rank)
    model = Model(tensors, mesh, spread)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if state is None else 0.05)
    for name, parameter in model.named_parameters():
        if state is not None and name in state:
            moment = state[name] if name == "plain" else placed(state[name], mesh, spread[name])
            optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": moment}
    return [part_of("model", model), part_of("optimizer", optimizer)]


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@given(st.randoms(use_true_random=False), meshes, meshes)
@settings(max_examples=25, deadline=None)
def test_any_cut_of_any_state_becomes_any_other(chance: random.Random, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    torch.manual_seed(chance.randrange(1000))
    sizes = {name: [chance.randrange(1, 9) for _ in range(chance.randrange(1, 4))] for name in ("a", "b", "c", "plain")}
    tensors = {name: torch.randn(size).to(chance.choice(DTYPES)) for name, size in sizes.items()}
    state = {name: torch.randn(size).to(tensors[name].dtype) for name, size in sizes.items() if chance.random() < 0.8}

    def cut(shape: Sequence[int]) -> dict[str, list[Placement]]:
        return {n: [chance.choice([Replicate(), *map(Shard, range(len(s)))]) for _ in shape] for n, s in sizes.items()}

    before, after = cut(old), cut(new)
    ranks, count = range(prod(old)), prod(new)
    shards = {
        f"shard {rank} of many": shard.of(parts_of(tensors, state, old, rank, before), shard.Kin("f", len(ranks), rank))
        for rank in ranks
    }
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for rank in range(count):
        here = parts_of(zeros, None, new, rank, after)
        fill(here, shards, rank, count)
        kin = shard.Kin("f", count, rank)
        assert shard.pack(shard.of(here, kin)) == shard.pack(shard.of(parts_of(tensors, state, new, rank, after), kin))


def fill(here: list[Part], shards: dict[str, shard.Shard], rank: int = 0, count: int = 1) -> int:
    """As `restore` does it; how many members were asked."""
    made, asked = None, 0
    for name in reshard.nearest_first(list(shards), rank, count):
        asked += 1
        made = made or reshard.New(shards[name].layout, here, rank)
        for landing in made.landings(shards[name].layout):
            landing.fill(shards[name].range(landing.start, landing.stop))
            landing.land()
        if made.whole:
            break
    assert made is not None
    made.install(here)
    return asked


def test_only_the_members_that_are_met_are_asked_and_runs_go_together() -> None:
    tensors = {name: torch.arange(240.0).reshape(24, 10) for name in "ab"}
    spread = {name: [Shard(0)] for name in "ab"}
    shards = {
        f"shard {rank}": shard.of(parts_of(tensors, tensors, (12,), rank, spread), shard.Kin("f", 3, rank)) for rank in range(12)
    }
    assert [fill(parts_of(tensors, None, (4,), rank, spread), shards, rank, 4) for rank in range(4)] == [3] * 4
    here = parts_of(tensors, None, (4,), 1, spread)
    made = reshard.New(shards["shard 4"].layout, here, 1)
    assert len(made.landings(shards["shard 4"].layout)) == 1


def test_what_does_not_cover_is_not_installed() -> None:
    tensors = {"a": torch.arange(12.0)}
    shards = {str(rank): shard.of(parts_of(tensors, tensors, (3,), rank, {"a": [Shard(0)]})) for rank in (0, 2)}
    with pytest.raises(plan.Contradiction, match=r"no shard of the earlier layout has all of model\.a"):
        fill(parts_of(tensors, None, (1,), 0, {"a": [Shard(0)]}), shards)


def test_members_of_two_states_are_refused() -> None:
    tensors, spread = {"a": torch.arange(12.0)}, {"a": [Shard(0)]}
    shards = {
        str(rank): shard.of(parts_of(tensors, tensors if rank else None, (3,), rank, spread), shard.Kin("f", 3, rank))
        for rank in range(3)
    }
    with pytest.raises(plan.Contradiction, match="values of optimizer"):
        fill(parts_of(tensors, None, (1,), 0, spread), shards)


def test_another_model_is_refused() -> None:
    tensors, spread = {"a": torch.arange(12.0)}, {"a": [Shard(0)]}
    shards = {str(rank): shard.of(parts_of(tensors, tensors, (3,), rank, spread), shard.Kin("f", 3, rank)) for rank in range(3)}
    with pytest.raises(RecoveryError, match=r"model\.a is \(13,\), it was \(12,\)"):
        fill(parts_of({"a": torch.arange(13.0)}, None, (1,), 0, spread), shards)
    with pytest.raises(RecoveryError, match="other parameters"):
        fill(parts_of({"b": torch.arange(12.0)}, None, (1,), 0, {"b": [Shard(0)]}), shards)
