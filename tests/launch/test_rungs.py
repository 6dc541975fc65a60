"""Every rung is reached, costs the processes that it says and no others, and stands in the job's state for people."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launch.test_inplace import once, pids, script

pytestmark = pytest.mark.processes

STEP = "from hyperpodrun.inprocess.progress import note_step\n"


def faults(path: Path) -> list[str]:
    """As `hyperpodctl status` shows them."""
    return json.loads(path.read_text())["faults"]


def test_rank_that_never_gets_anywhere_climbs_all_rungs(launch: Callable, tmp_path: Path) -> None:
    state = tmp_path / "state"
    # Counted in this job, so the next generations could have counted some.
    work = """
if RANK == 0 and GENERATION == 0:
    note_step(0)
    tell('stepped')
while GENERATION == 0 and not told('stepped'): time.sleep(0.005)
if RANK == 1: raise ValueError('boom')
"""
    run = launch(
        "--nproc-per-node=2",
        "--inprocess-restart",
        script=STEP + script(work),
        env={"HYPERPODRUN_STATUS_FILE": str(state)},
    )
    assert run.code() == 1, run.story()
    seen = [pids(run, generation, 2) for generation in range(5)]
    assert seen[0] == seen[1], "in place"
    for before, after in pairwise(seen[1:]):
        assert not set(before.values()) & set(after.values()), "new processes"
    done = [line.partition(" failed")[2].rpartition(": ")[2] for line in faults(state)]
    assert done == [
        "restarted in place",
        "new processes on that node",
        "all processes replaced",
        "the node replaced, or all processes where nobody could take its place",
    ]
    assert faults(state)[0] == "generation 0: local rank 1 failed: restarted in place"
    assert faults(state)[1] == "generation 1: local rank 1 failed, before any step was completed: new processes on that node"
    assert "local rank 1 fails again and again, and nothing helps: the job ends with exit code 1" in run.err
    run.nothing_left()


FIRST_STEP = "from hyperpodrun.inprocess.wrap import HPWrapper\n@HPWrapper\ndef main():\n    {fault}\nmain()\n"
NOWHERE = {
    "import": "import nosuchmodule",
    "in the function": FIRST_STEP.format(fault="raise ValueError('boom')"),
    "behind the function": FIRST_STEP.format(fault="pass"),
}


@pytest.mark.parametrize("work", NOWHERE.values(), ids=NOWHERE)
def test_program_that_gets_nowhere_is_not_started_for_ever(launch: Callable, work: str) -> None:
    """Nothing there counts steps, and it ends soon."""
    run = launch("--nproc-per-node=2", "--inprocess-restart", script=f"tell('begun')\n{work}\nsys.exit(3)")
    assert run.code() == (3 if "pass" in work else 1), run.story()
    assert run.err.count("restarting") in range(3, 6), run.story()
    assert ("nothing here can be restarted in place" in run.err) == ("nosuchmodule" in work), run.story()
    assert "local rank" in run.err and "the job ends with exit code" in run.err
    run.nothing_left()


def test_without_restarts_in_place_the_number_alone_decides(launch: Callable) -> None:
    run = launch("--nproc-per-node=1", "--max-restarts=8", script="tell('begun')\nsys.exit(3)")
    assert run.code() == 3, run.story()
    assert len(run.notes("begun")) == 9, run.story()


def test_end_can_be_asked_for(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=2", "--inprocess-restart", script=script("if RANK == 1: caller.report_fault('no', rung='end')")
    )
    assert run.code() == 1, run.story()
    assert "that rung was asked for: the job ends with exit code 1" in run.err
    run.nothing_left()


RUNGS = {
    "node": ("new processes on that node", "new processes on {node}"),
    "all": ("all processes replaced", "all processes are replaced"),
    "replace": ("the node replaced, or all processes where nobody could take its place", "{node} is replaced"),
}


@pytest.mark.parametrize("rung", RUNGS)
def test_rung_that_is_asked_for_costs_what_it_says(nodes, tmp_path: Path, rung: str) -> None:
    """Two nodes and a spare; rank 3 asks."""
    nodes.contacts(0, 1, 2)
    for index in nodes.listed:
        options = ("--nnodes=2", "--spares=1", "--nproc-per-node=2", "--inprocess-restart")
        work = once(f"caller.report_fault('planted', rung={rung!r})", rank=3)
        nodes.start(index, *options, script=script(work), env={"HYPERPODRUN_STATUS_FILE": str(tmp_path / f"state{index}")})
    before = {row["rank"]: row for row in nodes.up(4, generation=0)}
    after = {row["rank"]: row for row in nodes.up(4, generation=1)}
    kept = {rank for rank in after if after[rank]["pid"] == before[rank]["pid"]}
    assert kept == (set() if rung == "all" else {0, 1}), nodes.story()
    moved = {rank for rank in after if after[rank]["side"] != before[rank]["side"]}
    assert moved == ({2, 3} if rung == "replace" else set()), nodes.story()
    node = nodes.name(int(before[3]["side"]))
    done, said = RUNGS[rung]
    assert faults(tmp_path / f"state{before[0]['side']}") == [
        f"generation 0: local rank 1 of {node} failed, before any step was completed: {done}"
    ]
    assert said.format(node=node) in nodes.runs[int(before[0]["side"])].err, nodes.story()
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0, 0], nodes.story()
    nodes.nothing_left()
