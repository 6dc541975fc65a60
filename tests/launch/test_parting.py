"""Processes that are replaced by decision lose no step that was finished, however far apart the versions are."""

from collections.abc import Callable, Iterable

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.torch]

STEPS, STRUCK = 30, 19
# No version but the first one is ever due by itself. Sums of whole numbers: the same in whatever order they are added.
TRAINING = """
import torch
import torch.distributed as dist
from hyperpodrun.inprocess.wrap import HPWrapper
from hyperpodrun.recovery import RecoverableState
from hyperpodrun.recovery import pace
pace.Pace.every = lambda self: 10_000

@HPWrapper
def main(caller=None):
    dist.init_process_group("gloo")
    rank, generation = caller.rank, caller.generation
    model = torch.nn.Linear(64, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    torch.manual_seed(rank)
    state = RecoverableState(model=model)
    start = state.restore()
    globals().update(GENERATION=generation)
    tell("up", start=start, source=state.restored_from)
    for step in range(start, STEPS):
        drawn = torch.randint(1000, (64,), dtype=torch.float64)
        dist.all_reduce(drawn)
        with state.update(step), torch.no_grad():
            model.weight += drawn * (step + 1)
        if step == STRUCK and generation == 0:
            FAULT
    tell("done", weight=model.weight.flatten().tolist())
    dist.destroy_process_group()

main()
"""
OPTIONS = ("--nproc-per-node=2", "--inprocess-restart", "--max-restarts=9", "--server-port=-1")


DIES_ON_ITS_WAY = """if rank == 1:
                try: time.sleep(1000)
                finally: os.kill(os.getpid(), signal.SIGKILL)
            """


def training(fault: str) -> str:
    return TRAINING.replace("STEPS", str(STEPS)).replace("STRUCK", str(STRUCK)).replace("FAULT", fault)


def judge(rows: Iterable[dict], done: Iterable[dict], world: int, before: set[int], story: str) -> None:
    """New processes, which have gone on with the step after the fault, and come where undisturbed ones would."""
    import torch

    assert not before & {row["pid"] for row in rows}, "all processes were to be replaced"
    assert {(row["start"], row["source"]) for row in rows} == {(STRUCK + 1, "shm")}, story
    weight = torch.zeros(64, dtype=torch.float64)
    drawing = [torch.Generator().manual_seed(rank) for rank in range(world)]
    for step in range(STEPS):
        weight += sum(torch.randint(1000, (64,), dtype=torch.float64, generator=one) for one in drawing) * (step + 1)
    assert [row["weight"] for row in done] == [weight.tolist()] * world, story


@pytest.mark.parametrize(
    ("fault", "shutdown_signal"),
    [
        ("if rank == 1: caller.report_fault('planted', rung='all')", "SIGTERM"),
        # On its way out. What was its alone lives on in its neighbour, and its parameters are those of all.
        (DIES_ON_ITS_WAY + "caller.report_fault('planted', rung='all')", "SIGKILL"),
    ],
    ids=["all are there", "one of them has died"],
)
def test_new_processes_go_on_where_the_old_ones_were(launch: Callable, fault: str, shutdown_signal: str) -> None:
    pytest.importorskip("torch")
    run = launch(*OPTIONS, f"--shutdown-signal={shutdown_signal}", script=training(fault))
    before = {row["pid"] for row in run.until_told("up", 2, generation=0)}
    assert run.code() == 0, run.story()
    judge(run.notes("up", generation=1), run.notes("done"), 2, before, run.story())
    assert "restarting all ranks" in run.err
    run.nothing_left()


def test_those_of_all_nodes_part_when_all_are_replaced(nodes: object) -> None:
    pytest.importorskip("torch")
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", *OPTIONS, script=training("if rank == 3: caller.report_fault('planted', rung='all')"))
    before = {row["pid"] for row in nodes.up(4, generation=0)}
    assert nodes.codes() == [0, 0], nodes.story()
    judge(nodes.up(4, generation=1), runs[0].notes("done"), 4, before, nodes.story())
    for run in runs:
        run.nothing_left()
