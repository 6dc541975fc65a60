"""Sharded states in smaller and larger worlds: the whole tensors are the old ones, and training goes on as plain torch does."""

import json
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
import hashlib, json, os, shutil, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.inprocess import groups
from hyperpodrun.recovery import RecoverableState, memory, pace, rng

me, out = int(os.environ["RANK"]), os.environ["OUT"]  # of the process; its rank in a world is given by that world
os.environ[names.NODE] = f"node{me}"
torch.set_num_threads(1)
pace.Pace.every = lambda self: 3  # versions after steps 0, 3, 6, ...
SEED, BATCH = 5, 2
meets = iter(range(1000))
layout = ""


def begin(ranks):
    groups.forget_meshes()
    os.environ |= {names.RANK: str(ranks.index(me)), names.WORLD_SIZE: str(len(ranks))}
    dist.init_process_group("gloo", init_method=os.environ["MEET"] + str(next(meets)), rank=ranks.index(me), world_size=len(ranks))
    return build(len(ranks))


def build(world):
    torch.manual_seed(0)
    wide = 36 if layout == "tp" else 34  # tensor parallelism has to divide
    model = nn.Sequential(nn.Linear(16, wide), nn.Tanh(), nn.Dropout(0.3), nn.Linear(wide, 16), nn.Linear(16, 5))
    if layout == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        parallelize_module(model, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "3": RowwiseParallel()})
    else:
        sizes = (2, world // 2) if layout == "hsdp" and world % 2 == 0 else (world,)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes):])
        for layer in (model[0], model[3]): fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler


def forward(model, samples):
    rank = 0 if layout == "tp" else dist.get_rank()
    x = torch.stack([torch.linspace(0, 1, 16) * s / 40 for s in samples])
    torch.manual_seed(SEED + rank + 100 * samples[0])  # tensor parallel ranks draw alike
    model(x + torch.rand(1)).square().mean().backward()


def whole(model, optimizer):
    "All tensors in one piece."
    def full(t): return t.full_tensor() if hasattr(t, "full_tensor") else t
    state = [[full(optimizer.state[p][key]).detach() for key in sorted(optimizer.state[p])] for p in model.parameters()]
    return [full(p).detach() for p in model.parameters()], state


def digest(model, optimizer):
    tensors, state = whole(model, optimizer)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for some in (tensors, *state) for t in some)).hexdigest()[:16]


def life(generation, ranks, until, breaks=False):
    "The processes `ranks` are a world and train to step `until`, where they break off before the update."
    os.environ[names.GENERATION] = f"{name} {generation}"
    if me not in ranks:
        next(meets)
        return
    model, optimizer, scheduler = begin(ranks)
    sampler = Sampler(0 if layout == "tp" else dist.get_rank(), 1 if layout == "tp" else len(ranks))
    sampler.job_wide = layout == "tp"  # there a step takes as many samples in any world
    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, rng="counter", seed=SEED)
    asked = state.feasible()
    start = state.restore()
    assert asked == (start > 0, state.why), (asked, state.why)
    print("restored", start, state.restored_from, digest(model, optimizer) if start else "", flush=True)
    print("why", state.why, flush=True)
    for step in range(start, until + 1):
        samples = sampler.draw()
        optimizer.zero_grad()
        forward(model, samples)
        if breaks and step == until: break
        with state.update(step):
            optimizer.step(); scheduler.step()
        fetching = state._versions._copies._thread
        if fetching: fetching.join()
        print("step", step, digest(model, optimizer), *samples, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def plainly(worlds):
    "The same worlds by torch alone, the whole tensors handed over in a file: (ranks, last step) of each."
    step = position = 0
    for number, (ranks, last) in enumerate(worlds):
        if me not in ranks:
            next(meets)
            step, position = last + 1, position + (last + 1 - step) * BATCH * (1 if layout == "tp" else len(ranks))
            continue
        model, optimizer, scheduler = begin(ranks)
        sampler = Sampler(0 if layout == "tp" else dist.get_rank(), 1 if layout == "tp" else len(ranks))
        sampler.position = position
        if number:
            tensors, state, lr = torch.load(f"{out}/whole-{layout}-{number - 1}")
            optimizer.param_groups[0]["lr"], scheduler.last_epoch = lr, step
            def cut(t, p): return distribute_tensor(t, p.device_mesh, p.placements) if hasattr(p, "device_mesh") else t
            for p, t, values in zip(model.parameters(), tensors, state):
                p.data.copy_(cut(t, p))
                optimizer.state[p] = dict(zip(("exp_avg", "exp_avg_sq", "step"), [*(cut(v, p) for v in values[:2]), values[2]]))
        while step <= last:
            rng.seed_all(SEED, dist.get_rank(), step)
            optimizer.zero_grad()
            forward(model, sampler.draw())
            optimizer.step(); scheduler.step()
            step += 1
        position = sampler.position
        saved = (*whole(model, optimizer), optimizer.param_groups[0]["lr"])
        if dist.get_rank() == 0: torch.save(saved, f"{out}/whole-{layout}-{number}")
        print("plain", last, digest(model, optimizer), flush=True)
        dist.barrier()
        dist.destroy_process_group()


def folder(): return node_state.folder_of(os.environ[names.JOB_ID], os.environ[names.NODE])


def lose(*processes):
    "These processes are gone, and their nodes' memory with them."
    if me not in processes: return
    if memory.of("default"): memory.of("default").stop()
    memory.forget("default")
    shutil.rmtree(folder(), ignore_errors=True)


def left():
    "What the node still has."
    from hyperpodrun.recovery import shm
    print("left", json.dumps(sorted({version.name for version in shm.scan(folder())})), flush=True)


for name, text in json.loads(sys.argv[1]).items():
    layout = name.split()[0]
    os.environ[names.JOB_ID] = "test-" + os.path.basename(out) + "-" + name.replace(" ", "-")
    print("scenario", name, flush=True)
    try: exec(text)
    finally: lose(0, 1, 2, 3)
"""
)

FOUR_THREE_FOUR = """
life(0, [0, 1, 2, 3], 8, breaks=True)
lose(1)
life(1, [0, 2, 3], 13, breaks=True)
if me != 1: left()
life(2, [3, 0, 1, 2], 14)
plainly([([0, 1, 2, 3], SINCE), ([0, 2, 3], 12), ([3, 0, 1, 2], 14)])
"""

SCENARIOS = {
    "fsdp 4-3-4": FOUR_THREE_FOUR.replace("SINCE", "6"),
    "hsdp 4-3-4": FOUR_THREE_FOUR.replace("SINCE", "7"),
    "tp 4-2": """
life(0, [0, 1, 2, 3], 5, breaks=True)
lose(1)
life(1, [0, 2], 6)
plainly([([0, 1, 2, 3], 3), ([0, 2], 6)])
""",
    "fsdp too much is lost": """
life(0, [0, 1, 2, 3], 5, breaks=True)
lose(1); lose(2)
life(1, [0, 3], 0)
""",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[list[list[str]]]]]:
    """The words of each line that each process printed, by scenario."""
    folder = tmp_path_factory.mktemp(f"sharded-worlds-{os.getpid()}")  # names of jobs are made of it
    found: dict[str, list[list[list[str]]]] = {}
    for text in run_gloo(folder, JOB, 4, json.dumps(SCENARIOS)):
        for part in text.split("scenario ")[1:]:
            name, _, lines = part.partition("\n")
            found.setdefault(name, []).append([line.split() for line in lines.splitlines()])
    yield found
    for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
        shutil.rmtree(path)


def of(lines: list[list[str]], word: str) -> list[list[str]]:
    return [rest for first, *rest in lines if first == word]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "since", "sources"),
    [("fsdp 4-3-4", 6, {"shm", "copy"}), ("hsdp 4-3-4", 7, {"own", "peer"}), ("tp 4-2", 3, {"shm", "copy"})],
)
def test_training_goes_on_as_it_would_have(
    said: dict[str, list[list[list[str]]]], name: str, since: int, sources: set[str]
) -> None:
    """The whole tensors after each world are those of plain torch, and so are those that a restore gives."""
    plain = {step: digest for lines in said[name] for step, digest in of(lines, "plain")}
    steps = {step: digest for lines in said[name] for step, digest, *_ in of(lines, "step")}
    assert len(plain) in (2, 3) and plain == {step: steps[step] for step in plain}
    restored = [words for lines in said[name] for words in of(lines, "restored") if words[0] != "0"]
    assert len(restored) == (2 if name == "tp 4-2" else 7)
    assert all(plain[str(int(start) - 1)] == digest for start, _, digest in restored)
    assert {source for start, source, _ in restored if int(start) == since + 1} <= sources
    assert {source for start, source, _ in restored if int(start) != since + 1} <= {"own", "peer"}


@pytest.mark.torch
@pytest.mark.parametrize("name", ["fsdp 4-3-4", "hsdp 4-3-4"])
def test_each_sample_is_drawn_once(said: dict[str, list[list[list[str]]]], name: str) -> None:
    """Of the steps that count: what a restart went back behind is drawn again."""
    drawn: dict[int, list[int]] = {}
    worlds = {len(of(lines, "step")) for lines in said[name]}
    assert len(worlds) == 2  # process 1 was away
    for lines in said[name]:
        mine: dict[int, list[int]] = {}
        for step, _, *samples in of(lines, "step"):
            mine[int(step)] = list(map(int, samples))
        away = range(7 if name.startswith("fsdp") else 8, 13) if len(of(lines, "restored")) == 2 else ()
        for step, samples in mine.items():
            if step not in away:
                drawn.setdefault(step, []).extend(samples)
    assert sorted(drawn) == list(range(15))
    assert sorted(sample for some in drawn.values() for sample in some) == list(range(sum(len(some) for some in drawn.values())))


@pytest.mark.torch
def test_the_shards_of_the_earlier_world_are_let_go(said: dict[str, list[list[list[str]]]]) -> None:
    left = [" ".join(words) for lines in said["fsdp 4-3-4"] for words in of(lines, "left")]
    assert len(left) == 3 and all("of 3 ranks" in words and "of 4" not in words for words in left), left


@pytest.mark.torch
def test_it_says_what_is_missing(said: dict[str, list[list[list[str]]]]) -> None:
    whys = [" ".join(of(lines, "why")[-1]) for lines in said["fsdp too much is lost"] if len(of(lines, "why")) == 2]
    assert whys == ["no step has all 4 shards of the earlier layout (after step 3 there are 3)"] * 2
