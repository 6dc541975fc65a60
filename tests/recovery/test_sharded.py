"""States without natural replicas: FSDP2, HSDP and tensor parallel models come back from copies, bit for bit."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gloo_job import run as run_gloo

from hyperpodrun.agent.wire import node_state

JOB = r"""
import hashlib, json, os, random, shutil, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.recovery import RecoverableState, RecoveryError, memory, nodestate, pace

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ[names.NODE] = f"node{rank}"
torch.set_num_threads(1)
pace.Pace.every = lambda self: 3  # versions after steps 0, 3, 6, ...
meets = iter(range(1000))
layout = "fsdp"


def job(name):
    global layout
    layout = name.split()[0]
    os.environ[names.JOB_ID] = "test-" + os.path.basename(os.environ["OUT"]) + "-" + name.replace(" ", "-")


def folder(): return node_state.folder_of(os.environ[names.JOB_ID], os.environ[names.NODE])


def lose(node=True):
    "This process is gone, and its node's memory with it."
    if memory.of("default"): memory.of("default").stop()
    memory.forget("default")
    if node: shutil.rmtree(folder(), ignore_errors=True)


def flip(suffixes=(".0", ".1"), name=None):
    "One bit of the versions of the shard on this node changes."
    for entry in os.scandir(folder()):
        if entry.name.endswith(suffixes) and entry.stat().st_size > 6000:
            with open(entry.path, "r+b") as file:
                file.seek(-100, 2); byte = file.read(1); file.seek(-100, 2); file.write(bytes([byte[0] ^ 4]))


class Sampler:
    def __init__(self): self.at = 0
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def draw(self):
        self.at += 1
        return torch.full((2, 16), (self.at * world + rank) / 50)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 34), nn.Tanh(), nn.Dropout(0.3), nn.Linear(34, 16), nn.Linear(16, 5))
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        for layer in (model[0], model[3]): fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[3]): fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(100 + rank)
    random.seed(rank)
    return model, optimizer, scheduler, Sampler()


def local(t): return t.to_local() if hasattr(t, "to_local") else t


def fail(*_):
    "Between two layers: FSDP2 has put whole parameters in the place of pieces."
    raise RuntimeError("forward")


def life(generation, until, at="", copies=2):
    os.environ[names.GENERATION] = str(generation)
    dist.init_process_group("gloo", init_method=os.environ["MEET"] + str(next(meets)), rank=rank, world_size=world)
    model, optimizer, scheduler, sampler = build()
    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, copies=copies)
    asked = state.feasible()
    start = state.restore()
    assert asked[0] == (start > 0), asked
    print("restored", start, state.restored_from, flush=True)
    try:
        for step in range(start, until + 1):
            x = sampler.draw() + random.random()
            if at == "forward" and step == until: model[2].register_forward_hook(fail)
            loss = model(x).square().mean()
            optimizer.zero_grad(); loss.backward()
            if at == "backward" and step == until: raise RuntimeError(at)
            with state.update(step):
                if at == "torn" and step == until:
                    local(next(model.parameters()).data).add_(1)
                    raise RuntimeError(at)
                optimizer.step(); scheduler.step()
            fetching = state._versions and state._versions._copies._thread
            if fetching: fetching.join()
    except RuntimeError as error:
        if str(error) != at: raise
    if at == "forward":  # model.state_dict() would put the pieces back
        dist.barrier()
        return dist.destroy_process_group()
    tensors = [local(t) for t in (*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values()))]
    values = (sampler.at, scheduler.last_epoch, optimizer.param_groups[0]["lr"], random.getstate(), torch.get_rng_state().tolist())
    text = b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors) + repr(values).encode()
    dist.barrier()
    dist.destroy_process_group()
    return hashlib.sha256(text).hexdigest()


def twice(generation):
    "Objects that were half filled from damaged versions are not trained: the function has to be entered again."
    try: life(generation, 8)
    except RecoveryError as error: assert "damaged" in str(error); dist.destroy_process_group()
    else: raise AssertionError("what is damaged was loaded")
"""

SCENARIOS: dict[str, tuple[str, int, list[str]]] = {
    # name (its first word is the layout): what happens before the last life, where that begins, where each rank's state comes from
    "fsdp undisturbed": ("", 0, ["fresh"] * 4),
    "fsdp a node is lost": ("life(0, 8, 'backward')\nif rank == 1: lose()", 7, ["shm", "copy", "shm", "shm"]),
    "fsdp a fault in the forward pass": ("life(0, 8, 'forward')", 8, ["own"] * 4),
    "fsdp a node is lost right behind a version": ("life(0, 6)\nif rank == 2: lose()", 7, ["own", "own", "copy", "own"]),
    "fsdp a process is lost": ("life(0, 8)\nif rank == 3: lose(node=False)", 7, ["shm"] * 4),
    "fsdp one is torn": ("life(0, 8, 'torn' if rank == 0 else '')", 7, ["shm"] * 4),
    "fsdp nodes are lost one after another": (
        "life(0, 7)\nif rank == 0: lose()\nlife(1, 9)\nif rank == 1: lose()", 8, ["shm", "copy", "shm", "shm"]),
    "fsdp owner and buddy are lost": ("life(0, 8)\nif rank in (1, 2): lose()", 0, ["fresh"] * 4),
    "fsdp the owner's version is damaged": (
        "life(0, 8)\nif rank == 1: lose(node=False)\nif rank == 1: flip()", 7, ["shm", "copy", "shm", "shm"]),
    "fsdp all of the newest are damaged": (
        "life(0, 5)\nif rank in (1, 2): flip()\nif rank == 1: lose(node=False)\ntwice(1)", 0, ["fresh"] * 4),
    "hsdp undisturbed": ("", 0, ["fresh"] * 4),
    "hsdp a node is lost": ("life(0, 8, 'backward')\nif rank == 1: lose()", 8, ["own", "peer", "own", "own"]),
    "hsdp a node is lost in the forward pass": (
        "life(0, 8, 'forward')\nif rank == 1: lose()", 8, ["own", "peer", "own", "own"]),
    "tp undisturbed": ("", 0, ["fresh"] * 4),
    "tp a node is lost": ("life(0, 8, 'backward')\nif rank == 1: lose()", 7, ["shm", "copy", "shm", "shm"]),
    "hsdp both replicas are lost": ("life(0, 8)\nif rank in (1, 3): lose()", 0, ["fresh"] * 4),
}  # fmt: skip

RUN = """
for name, text in json.loads(sys.argv[1]).items():
    job(name)
    try:
        exec(text)
        print("scenario", name, flush=True)
        print("end", life(9, 12), flush=True)
    finally:
        lose()
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[tuple[int, str, str]]]]:
    """(step, source, end) of each rank by scenario, all run one after another by the same four processes."""
    folder = tmp_path_factory.mktemp(f"sharded-{os.getpid()}")  # names of jobs are made of it
    said = run_gloo(folder, JOB + RUN, 4, json.dumps({name: text for name, (text, *_) in SCENARIOS.items()}))
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
    undisturbed = outcome[f"{name.split()[0]} undisturbed"]
    assert [at for at, *_ in outcome[name]] == [step] * 4
    assert [source for _, source, _ in outcome[name]] == sources
    assert [end for *_, end in outcome[name]] == [end for *_, end in undisturbed]
