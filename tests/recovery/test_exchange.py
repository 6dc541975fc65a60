"""Everybody's private state is with somebody else when `swap` returns."""

from pathlib import Path

import pytest
from gloo_job import run
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.recovery.exchange import GATHER_RANKS, buddies

SWAPS = """
import os, sys
import torch.distributed as dist
from hyperpodrun.recovery import exchange
exchange.GATHER_RANKS = int(sys.argv[1])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=world)
assert (rank, world) == (dist.get_rank(), dist.get_world_size())
made = exchange.Exchange(rank, world, copies=2)
for size in (0, 10, 5000, 200_000, 30):
    kept, numbers = made.swap(bytes([rank]) * (size + rank), (10 * rank + size, size - rank + world))
    wards = [r for r in range(world) if r != rank and (world <= exchange.GATHER_RANKS or rank in exchange.buddies(r, world, 2))]
    assert kept == {r: bytes([r]) * (size + r) for r in wards}, (rank, size, sorted(kept))
    assert numbers == (10 * (world - 1) + size, size + world), numbers
dist.barrier()
print("swapped", rank)
dist.destroy_process_group()  # torch's own threads, left to the interpreter's end, have ended a process by SIGABRT
"""


@pytest.mark.torch
@pytest.mark.parametrize("gather", [GATHER_RANKS, 1])
def test_states_of_any_size_reach_the_others(tmp_path: Path, gather: int) -> None:
    assert sorted(line.splitlines()[-1] for line in run(tmp_path, SWAPS, 4, str(gather))) == [
        f"swapped {rank}" for rank in range(4)
    ]


@given(st.integers(2, 300), st.integers(1, 4))
def test_buddies_are_others_and_everybody_has_as_many(world: int, copies: int) -> None:
    of = [buddies(rank, world, copies) for rank in range(world)]
    assert all(rank not in of[rank] and len(set(of[rank])) == min(copies, world - 1) for rank in range(world))


@given(st.lists(st.integers(1, 24), min_size=2, max_size=5), st.integers(1, 4), st.booleans())
def test_buddies_are_on_other_nodes_however_many_ranks_each_has(sizes: list[int], copies: int, mixed: bool) -> None:
    """Else a node is lost with all that was known of a rank's samples and random numbers."""
    nodes = [f"n{number}" for number, size in enumerate(sizes) for _ in range(size)]
    nodes = nodes[::2] + nodes[1::2] if mixed else nodes
    for rank, node in enumerate(nodes):
        found = buddies(rank, len(nodes), copies, nodes)
        assert rank not in found and len(set(found)) == min(copies, len(nodes) - 1)
        assert len({nodes[other] for other in found} - {node}) == min(copies, len(sizes) - 1)
