"""A training loop goes on bit for bit after faults, whoever was lost."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gloo_job import run as run_gloo

from hyperpodrun.agent.wire import node_state

JOB = r"""
import hashlib, json, os, random, sys
import torch, torch.distributed as dist
from torch import nn
from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import RecoverableState, memory, nodestate, pace

pace.BUDGET = nodestate.INLINE = 1e9  # a version of each step, whatever it costs

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ[names.NODE] = f"node{rank // 2}"
torch.set_num_threads(1)


meets = iter(range(1000))


def job(name): os.environ[names.JOB_ID] = "test-" + os.path.basename(os.environ["OUT"]) + "-" + name


def forget(): memory.forget("default")


class Sampler:
    def __init__(self): self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def draw(self):
        self.at += 1
        return torch.full((2, 6), float(self.at * world + rank))


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = Sampler()
    torch.manual_seed(100 + rank)
    random.seed(rank)
    return model, optimizer, scheduler, sampler


def life(generation, until, at="", copies=2, **options):
    "One entry of the function: from wherever restore() says to `until`; `at`: where to break off in that step."
    os.environ[names.GENERATION] = str(generation)
    dist.init_process_group("gloo", init_method=os.environ["MEET"] + str(next(meets)), rank=rank, world_size=world)
    model, optimizer, scheduler, sampler = build()
    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, copies=copies, **options)
    start = state.restore()
    print("restored", start, state.restored_from, flush=True)
    try:
        for step in range(start, until + 1):
            if at == "begin" and step == until: raise RuntimeError(at)
            x = sampler.draw() + random.random()
            loss = model(x).square().mean()
            optimizer.zero_grad(); loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad); p.grad /= world
            if at == "reduced" and step == until: raise RuntimeError(at)
            with state.update(step):
                if at == "torn" and step == until:
                    next(model.parameters()).data += 1
                    raise RuntimeError(at)
                optimizer.step(); scheduler.step()
                if at == "update" and step == until: raise RuntimeError(at)
    except RuntimeError as error:
        if str(error) != at: raise
    # buffers are per rank and not averaged: they are part of what must come back
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values()), torch.get_rng_state()]
    values = (sampler.at, scheduler.last_epoch, optimizer.param_groups[0]["lr"], random.getstate())
    text = b"".join(t.detach().numpy().tobytes() for t in tensors) + repr(values).encode()
    if "DEBUG" in os.environ:
        print("debug", [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest()[:6] for t in tensors], values[:3], hash(values[3]))
    dist.barrier()
    dist.destroy_process_group()
    return hashlib.sha256(text).hexdigest()
"""

SCENARIOS: dict[str, tuple[str, int, list[str]]] = {
    # name: what happens before the last life, where that begins, where each rank's state comes from
    "undisturbed": ("", 0, ["fresh"] * 3),
    "rank 1 is a new process": ("life(0, 4)\nif rank == 1: forget()", 5, ["own", "peer", "own"]),
    "a fault in the middle of a step": ("life(0, 5, 'reduced')", 5, ["own"] * 3),
    "one was killed in the middle of a step": ("life(0, 5, 'reduced')\nif rank == 2: forget()", 5, ["own", "own", "shm"]),
    "one is torn": ("life(0, 5, 'torn' if rank == 0 else '')", 6, ["peer", "own", "own"]),
    "one was killed in its update": (
        "life(0, 5, 'torn' if rank == 2 else '')\nif rank == 2: forget()",
        6,
        ["own", "own", "peer"],
    ),
    "all were killed": ("life(0, 4)\nforget()", 5, ["shm"] * 3),
    "two restarts": ("life(0, 3)\nlife(1, 4)\nif rank == 0: forget()", 5, ["peer", "own", "own"]),
    "without versions": ("life(0, 4, copies=1)\nif rank == 0: forget()", 5, ["peer", "own", "own"]),
    "all lost without versions": ("life(0, 4, copies=1)\nforget()", 0, ["fresh"] * 3),
}

RUN = """
for number, (name, text) in enumerate(json.loads(sys.argv[1]).items()):
    job(f"{number}")
    exec(text)
    print("scenario", name, flush=True)
    print("end", life(9, 9), flush=True)
    forget()
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[tuple[int, str, str]]]]:
    """(step, source, end) of each rank by scenario, all run one after another by the same three processes."""
    folder = tmp_path_factory.mktemp(f"jobs-{os.getpid()}")  # names of jobs are made of it
    said = run_gloo(folder, JOB + RUN, 3, json.dumps({name: text for name, (text, *_) in SCENARIOS.items()}))
    found: dict[str, list[tuple[int, str, str]]] = {name: [] for name in SCENARIOS}
    for text in said:
        name, step, source = "", -1, ""
        for line in text.splitlines():
            match line.split(" ", 1):
                case "scenario", name:
                    pass
                case "restored", rest:
                    step, source = int(rest.split()[0]), rest.split()[1]
                case "end", end:
                    found[name].append((step, source, end))
    yield found
    for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
        shutil.rmtree(path)


@pytest.mark.torch
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_run_goes_on_bit_for_bit(outcome: dict[str, list[tuple[int, str, str]]], name: str) -> None:
    _, step, sources = SCENARIOS[name]
    assert [end for *_, end in outcome[name]] == [end for *_, end in outcome["undisturbed"]]
    assert [at for at, *_ in outcome[name]] == [step] * 3
    assert [source for _, source, _ in outcome[name]] == sources
