"""Jobs of several nodes that are brought back inside their processes; real agents on this host."""

import os
import signal
from pathlib import Path

import pytest

from tests.launch.test_inplace import once, script

pytestmark = pytest.mark.processes

OPTIONS = ("--nproc-per-node=2", "--inprocess-restart", "--max-restarts=9")


def pids(nodes: object, generation: int, world: int = 4) -> dict[int, int]:
    """Rank -> pid of those that have met in this generation."""
    return {row["rank"]: row["pid"] for row in nodes.up(world, generation=generation)}


def finish(nodes: object, tmp_path: Path, generation: int) -> None:
    rows = nodes.up(4, generation=generation)
    assert len({row["attempt"] for row in rows}) == 1, rows
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0] * len(nodes.runs), nodes.story()
    assert sum(run.out.count("returned") for run in nodes.runs.values()) == 4
    nodes.nothing_left()


@pytest.mark.parametrize(
    "fault", ["raise ValueError('boom')", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exception", "SIGKILL"]
)
def test_fault_of_one_rank_keeps_all_other_processes(nodes, tmp_path: Path, fault: str) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", *OPTIONS, script=script(once(fault, rank=2)))
    before, after = pids(nodes, 0), pids(nodes, 1)
    kept = {rank for rank in after if after[rank] == before[rank]}
    assert kept == ({0, 1, 2, 3} if "boom" in fault else {0, 1, 3}), nodes.story()
    finish(nodes, tmp_path, 1)
    assert any("rank 2 " in run.err for run in nodes.runs.values())
    assert all("back after" in run.err for run in nodes.runs.values()), nodes.story()


def test_killed_agent_costs_its_node_its_processes_and_the_other_none(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", *OPTIONS, script=script())
    before = nodes.up(4, generation=0)
    os.kill(runs[1].agent(), signal.SIGKILL)
    after = {row["rank"]: row["pid"] for row in nodes.up(4, generation=1)}
    for row in before:
        assert (after[row["rank"]] == row["pid"]) == (row["side"] == "0"), nodes.story()
    finish(nodes, tmp_path, 1)


def test_lost_node_is_replaced_by_a_spare_and_the_others_stay_in_process(nodes, tmp_path: Path) -> None:
    from tests.launch.test_nodes import kill_node, vote_path

    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2", "--spares=1", *OPTIONS, script=script())
    before = nodes.up(4, generation=0)
    sides = {row["side"] for row in before}
    victim, other = sorted(sides)
    kill_node(runs[int(victim)])
    after = {row["rank"]: row for row in nodes.up(4, generation=1)}
    for row in before:
        if row["side"] == other:
            assert after[row["rank"]]["pid"] == row["pid"], nodes.story()
    (tmp_path / "finish").touch()
    assert sorted(nodes.codes()) == [-9, 0, 0], nodes.story()
    os.path.exists(vote := vote_path(nodes, int(victim))) and os.unlink(vote)
    for run in runs:
        run.nothing_left()


def test_one_node_returns_while_another_fails(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    work = "if GENERATION == 0:\n    if RANK < 2: return 'too early'\n    time.sleep(0.3)\n    if RANK == 2: raise ValueError('boom')"
    nodes.start_all("--nnodes=2", *OPTIONS, script=script(work))
    assert pids(nodes, 0) == pids(nodes, 1), nodes.story()
    finish(nodes, tmp_path, 1)
    assert all("too early" not in run.out for run in nodes.runs.values())


def test_one_node_exits_inside_the_function_and_the_other_returns(nodes, tmp_path: Path) -> None:
    """Nobody there has returned, and nobody there is waited for any more."""
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", *OPTIONS, script=script("if RANK < 2: sys.exit(0)"))
    pids(nodes, 0)
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0], nodes.story()
    assert sum(run.out.count("returned") for run in nodes.runs.values()) == 2
    nodes.nothing_left()


def test_classic_store_follows_the_generations(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    before = "tell('store', port=os.environ['MASTER_PORT'])"
    nodes.start_all(
        "--nnodes=2", *OPTIONS, script=script(once("raise ValueError('boom')"), before=before), env={"HPCT_USE_ROOTLESS": "0"}
    )
    assert pids(nodes, 0) == pids(nodes, 1), nodes.story()
    ports = [{row["port"] for row in nodes.runs[0].notes("store", generation=generation)} for generation in (0, 1)]
    assert len(ports[0]) == len(ports[1]) == 1 and ports[0] != ports[1]
    finish(nodes, tmp_path, 1)


def test_fault_on_each_node_in_the_same_moment(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    work = "if GENERATION == 0 and RANK in (1, 2): raise ValueError('boom')"
    nodes.start_all("--nnodes=2", *OPTIONS, script=script(work))
    assert pids(nodes, 0) == pids(nodes, 1), nodes.story()
    finish(nodes, tmp_path, 1)


def test_faults_one_after_another_on_both_nodes(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", *OPTIONS, script=script("if GENERATION < 4 and GENERATION == RANK: raise ValueError('again')"))
    seen = [pids(nodes, generation) for generation in range(5)]
    assert seen == [seen[0]] * 5, nodes.story()
    finish(nodes, tmp_path, 4)


def test_world_that_gets_smaller_keeps_the_other_processes(nodes, tmp_path: Path) -> None:
    from tests.launch.test_nodes import kill_node, vote_path

    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2:3", *OPTIONS, script=script())
    before = nodes.up(6, generation=0)
    victim = next(int(row["side"]) for row in before if row["rank"] == 2)
    kill_node(runs[victim])
    after = nodes.up(4, generation=1)
    kept = {row["pid"] for row in before if row["side"] != str(victim)}
    assert {row["pid"] for row in after} == kept, nodes.story()
    assert sorted(row["rank"] for row in after) == [0, 1, 2, 3] and {row["world"] for row in after} == {4}
    (tmp_path / "finish").touch()
    assert sorted(nodes.codes()) == [-9, 0, 0], nodes.story()
    os.path.exists(vote := vote_path(nodes, victim)) and os.unlink(vote)
    for run in runs:
        run.nothing_left()


@pytest.mark.torch
def test_spare_has_torch_imported_while_it_stands_by(nodes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2", "--spares=1", *OPTIONS, script="import torch\n" + script())
    sides = {row["side"] for row in nodes.up(4, generation=0)}
    spare = next(run for index, run in enumerate(runs) if str(index) not in sides)

    def loaded() -> bool:
        return any("libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in spare.family())

    spare.until(loaded, "torch in the spare's forkserver")
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0, 0], nodes.story()
