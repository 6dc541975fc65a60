"""What may differ between ranks comes back to each as it was; what may not is seen in the first steps, not by the first restart."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gloo_job import run as run_gloo

from hyperpodrun.agent.wire import node_state

JOB = r"""
import json, os, random, sys
import torch, torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import Contradiction, JobSampler, RecoverableState, RecoveryError, memory

me = int(os.environ["RANK"])
os.environ[names.NODE] = f"node{me}"
torch.set_num_threads(1)
meets = iter(range(1000))


def forget():
    if memory.of("default"): memory.of("default").stop()
    memory.forget("default")


def begin(generation, ranks):
    meet = os.environ["MEET"] + str(next(meets))
    os.environ |= {names.GENERATION: str(generation), names.RANK: str(ranks.index(me)), names.WORLD_SIZE: str(len(ranks))}
    dist.init_process_group("gloo", init_method=meet, rank=ranks.index(me), world_size=len(ranks))


class Net(nn.Module):
    "Its features are drawn: by each rank for itself, or alike."
    def __init__(self, norm, alike):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        random.seed(alike or random.random() + me)
        self.register_buffer("freqs", torch.tensor([random.random() for _ in range(4)]))
    def forward(self, x): return self.norm(self.linear(x * self.freqs))


class Counter:
    "Of `by` samples a step."
    def __init__(self, by, **attributes): self.at, self.by = 0, by; self.__dict__ |= attributes
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]
    def draw(self): self.at += self.by


def made(norm=False, alike=0, average=False, plateau=False, seldom=0, drift=0.0, sampler=None, **options):
    net = Net(norm, alike)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average = AveragedModel(net) if average else None
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if plateau else None
    more = {"average": average} if average else {}
    state = RecoverableState(
        model=net, optimizer=optimizer, scheduler=scheduler, sampler=sampler, **{"rng": "counter", "copies": 1, **options}, **more)
    return net, optimizer, average, scheduler, seldom, drift, sampler, state


def train(parts, until):
    net, optimizer, average, scheduler, seldom, drift, sampler, state = parts
    start = state.restore()
    print("told", start, state.restored_from, flush=True)
    for step in range(start, until + 1):
        if isinstance(sampler, Counter): sampler.draw()
        optimizer.zero_grad()
        loss = net(torch.full((3, 4), float(me)) + torch.arange(3)[:, None]).square().mean()
        loss.backward()
        for p in net.parameters(): dist.all_reduce(p.grad)
        with state.update(step):
            optimizer.step()
            if drift and dist.get_rank(): net.linear.weight.data.add_(drift)
            if average: average.update_parameters(net)
            if scheduler and step >= seldom: scheduler.step(loss.item())


def life(generation, ranks, until, parts=None, **options):
    "The ranks of a world train to that step; what is told: where they began, how they ended, what they then have for features."
    if me not in ranks:
        next(meets)
        return
    begin(generation, ranks)
    parts = parts or made(**options)
    try:
        train(parts, until)
    except (RecoveryError, Contradiction) as error:
        print("told", type(error).__name__, getattr(error, "rung", ""), error, flush=True)
    print("told", *(round(x, 6) for x in parts[0].freqs.tolist()), flush=True)
    if dist.get_world_size() > 1: dist.barrier()
    dist.destroy_process_group()
    return parts


for name, text in json.loads(sys.argv[1]).items():
    os.environ[names.JOB_ID] = "test-" + os.path.basename(os.environ["OUT"]) + "-" + name.replace(" ", "-")
    print("scenario", name, flush=True)
    exec(text)
    forget()
"""
SCENARIOS = {
    "features of its own": "life(0, [0, 1], 2)\nif me: forget()\nlife(1, [0, 1], 2)",
    "features alike": "life(0, [0, 1], 2, alike=3)\nif me: forget()\nlife(1, [0, 1], 2, alike=4)",
    "schedulers differ": "life(0, [0, 1], 5, plateau=True)",
    "schedulers differ later": "life(0, [0, 1], 9, plateau=True, alike=3, seldom=6)",
    "replicas differ": "life(0, [0, 1], 5, drift=0.1)",
    "an average of local buffers": "life(0, [0, 1], 5, average=True, norm=True)",
    "an average": "life(0, [0, 1], 5, average=True, alike=3)",
    "one state, a smaller world": "parts = life(0, [0, 1], 2)\nlife(1, [0], 4, parts=parts)",
    "own draws, a smaller world": "life(0, [0, 1], 2, sampler=Counter(1))\nlife(1, [0], 4, sampler=Counter(1))",
    "the job's draws, a smaller world": "life(0, [0, 1], 2, sampler=Counter(2))\nlife(1, [0], 4, sampler=Counter(1))",
    "declared": "life(0, [0, 1], 2, sampler=Counter(1, job_wide=True))\nlife(1, [0], 4, sampler=Counter(1, job_wide=True))",
    "a JobSampler": "life(0, [0, 1], 2, sampler=JobSampler(9, 1))\ns = JobSampler(9, 1)\nlife(1, [0], 4, sampler=s)\n"
    "if not me: print('told', s.consumed)",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[list[str]]]]:
    """What each process told, by scenario."""
    folder = tmp_path_factory.mktemp(f"ranks-{os.getpid()}")  # names of jobs are made of it
    found: dict[str, list[list[str]]] = {}
    for text in run_gloo(folder, JOB, 2, json.dumps(SCENARIOS)):
        for part in text.split("scenario ")[1:]:
            name, *lines = part.splitlines()
            found.setdefault(name, []).append([line[5:] for line in lines if line.startswith("told ")])
    yield found
    for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
        shutil.rmtree(path)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "same"), [("features of its own", False), ("features alike", True)])
def test_constants_of_a_lost_rank_come_back_from_a_peer(told: dict[str, list[list[str]]], name: str, same: bool) -> None:
    for rank, (began, drawn, again, had) in enumerate(told[name]):
        assert began == "0 fresh" and again == ("3 peer" if rank else "3 own")
        assert had == drawn
    assert (told[name][0][1] == told[name][1][1]) == same


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("schedulers differ", "Misused", "scheduler have another state on rank {} than here after step 0"),
        ("schedulers differ later", "Misused", "scheduler have another state on rank {} than here after step 6"),
        ("replicas differ", "Contradiction", "rank {} has other values of 'model' than this one after step 0"),
        ("an average of local buffers", "Contradiction", "rank {} has other values of 'model' than this one after step 0"),
    ],
)
def test_what_should_be_equal_and_is_not_is_refused_in_the_next_step(
    told: dict[str, list[list[str]]], name: str, error: str, why: str
) -> None:
    for rank, (began, refused, _) in enumerate(told[name]):
        assert began == "0 fresh" and refused.startswith(f"{error} end {why.format(1 - rank)}"), refused
        assert ("SyncBatchNorm" in refused) == (name == "an average of local buffers")


@pytest.mark.torch
def test_an_average_without_local_buffers_is_none_of_them(told: dict[str, list[list[str]]]) -> None:
    assert [len(lines) for lines in told["an average"]] == [2, 2]


@pytest.mark.torch
def test_a_state_that_is_restored_again_belongs_to_its_new_world(told: dict[str, list[list[str]]]) -> None:
    lines = told["one state, a smaller world"][0]
    assert lines[0] == "0 fresh" and lines[2].startswith("3 ") and len(lines) == 4, lines


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("own draws, a smaller world", True),
        ("the job's draws, a smaller world", False),
        ("declared", False),
        ("a JobSampler", False),
    ],
)
def test_a_sampler_goes_on_in_another_world_if_it_counts_the_jobs_samples(
    told: dict[str, list[list[str]]], name: str, refused: bool
) -> None:
    lines = told[name][0]
    assert lines[2] == "3 own"
    assert any(line.startswith("Contradiction end the world has 1 ranks instead of 2") for line in lines) == refused
    if name == "a JobSampler":
        assert lines[-1] == "8"  # three steps of two ranks, two of one
