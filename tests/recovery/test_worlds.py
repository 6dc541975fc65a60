"""The world shrinks and grows: what comes out is what a plain computation of those worlds gives, and each sample is drawn once."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gloo_job import SAMPLER
from gloo_job import run as run_gloo

from hyperpodrun.agent.wire import node_state

JOB = (
    SAMPLER
    + r"""
import hashlib, os, random, sys
import torch, torch.distributed as dist
from torch import nn
from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import RecoverableState, memory, rng

me = int(os.environ["RANK"])  # of the process; its rank in a world is given by that world
os.environ[names.NODE] = f"node{me}"
os.environ[names.JOB_ID] = "test-" + os.path.basename(os.environ["OUT"])
torch.set_num_threads(1)
SEED, BATCH = 5, 2


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def gradients(model, samples):
    x = torch.stack([torch.arange(6.0) * s / 40 for s in samples]) + torch.rand(1)
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def apply(model, optimizer, parts):
    flat, at = sum(parts) / len(parts), 0
    for p in model.parameters():
        p.grad.copy_(flat[at:at + p.numel()].view_as(p)); at += p.numel()
    optimizer.step()


def life(generation, ranks, until, breaks=False, rng="counter"):
    "The processes `ranks` are a world and train to step `until`, where they break off before the update."
    if me not in ranks:
        return
    rank, world = ranks.index(me), len(ranks)
    os.environ |= {names.GENERATION: str(generation), names.RANK: str(rank), names.WORLD_SIZE: str(world)}
    dist.init_process_group("gloo", init_method=os.environ["MEET"] + str(generation), rank=rank, world_size=world)
    model, optimizer = build()
    torch.manual_seed(100 + rank); random.seed(rank)
    sampler = Sampler(rank, world)
    state = RecoverableState(model=model, optimizer=optimizer, sampler=sampler, rng=rng, seed=SEED)
    start = state.restore()
    print("restored", start, state.restored_from)
    for step in range(start, until + 1):
        samples = sampler.draw()
        mine = gradients(model, samples)
        if breaks and step == until: break
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        with state.update(step): apply(model, optimizer, parts)
        print("step", step, *samples)
    dist.barrier()
    dist.destroy_process_group()
    return model, optimizer


def digest(model, optimizer):
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def plainly(worlds):
    "The same in one process without anything: worlds = size of the world at each step."
    model, optimizer = build()
    position = 0
    for step, world in enumerate(worlds):
        parts = []
        for rank in range(world):
            rng.seed_all(SEED, rank, step)
            parts.append(gradients(model, range(position + rank * BATCH, position + (rank + 1) * BATCH)))
        apply(model, optimizer, parts)
        position += world * BATCH
    return digest(model, optimizer)


def lose():
    if memory.of("default"): memory.of("default").stop()
    memory.forget("default")


life(0, [0, 1, 2, 3], 5, breaks=True)
if me == 1: lose()
life(1, [0, 2, 3], 8, breaks=True)
print("end", digest(*life(2, [3, 0, 1, 2], 11)), plainly([4] * 5 + [3] * 3 + [4] * 4))
lose()
os.environ[names.JOB_ID] += "-streams"
life(3, [0, 1, 2], 3, rng="replicate")
life(4, [0, 1, 2, 3], 6, rng="replicate")
print("mine", random.random(), torch.rand(1).item())
lose()
"""
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What each process printed."""
    folder = tmp_path_factory.mktemp(f"worlds-{os.getpid()}")  # names of jobs are made of it
    yield run_gloo(folder, JOB, 4)
    for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
        shutil.rmtree(path)


@pytest.mark.torch
def test_four_ranks_then_three_then_four(said: list[str]) -> None:
    first = [text.partition("\nend ")[0].splitlines() for text in said]
    ends = [line.split()[1:] for text in said for line in text.splitlines() if line.startswith("end ")]
    assert len(ends) == 4 and len({*map(tuple, ends)}) == 1 and len({*ends[0]}) == 1, ends
    assert [[line for line in lines if line.startswith("restored ")] for lines in first] == [
        ["restored 0 fresh", "restored 5 own", "restored 8 own"],
        ["restored 0 fresh", "restored 8 peer"],
        ["restored 0 fresh", "restored 5 own", "restored 8 own"],
        ["restored 0 fresh", "restored 5 own", "restored 8 own"],
    ]
    drawn = [line.split()[2:] for lines in first for line in lines if line.startswith("step ")]
    assert sorted(int(sample) for some in drawn for sample in some) == list(range(2 * (4 * 5 + 3 * 3 + 4 * 4)))


@pytest.mark.torch
def test_a_new_rank_draws_its_own_random_numbers(said: list[str]) -> None:
    drawn = [line for text in said for line in text.splitlines() if line.startswith("mine ")]
    assert len({*drawn}) == 4
    assert sum("rank 3 is new" in text for text in said) == 1
