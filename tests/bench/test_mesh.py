"""The benchmark of jobs of several nodes: it starts, kills and cleans up what it says, and its targets are figures it has."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import mesh
import mesh_job
import mesh_simulated
import side_by_side as bench

OURS = bench.LAUNCHERS[1]


@pytest.mark.processes
def test_a_lost_node_is_seen_and_nothing_is_left_of_the_job() -> None:
    arguments = mesh_job.Mesh(2, nnodes="1:2")
    with mesh_job.job(OURS, 2, arguments) as running:
        began_s = time.monotonic()
        running.start_all()
        up_s, ranks = running.up((2,), began_s, 60)
        assert [word.rank for word in ranks] == [0, 1]
        assert began_s < up_s
        assert len(arguments.votes()) == 2
        marks = [run.mark for run in running.nodes.values()]
        lost_s = running.kill(ranks[1].node)
        again_s, _ = running.up((1,), lost_s, 60)
        assert lost_s < running.decided(lost_s) < again_s + 1
        assert running.until(lambda: running.status(ranks[0].node), "its state", 10)[1]["mesh"]
    assert [bench.marked(mark) for mark in marks] == [[], []]
    assert not running.folder.exists() and not arguments.votes()


@pytest.mark.processes
def test_what_does_not_happen_is_an_error_with_the_outputs() -> None:
    with (
        pytest.raises(bench.BenchmarkError, match=r"(?s)a world of 2 ranks was not seen within 0\.3 s.*node 0:"),
        mesh_job.job(OURS, 2, mesh_job.Mesh(2)) as running,
    ):
        running.up((2,), running.start(0), 0.3)


def test_simulated_figures_are_one_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["mesh_simulated.py", "--nodes", "4,6", "--received-us", "20"])
    mesh_simulated.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]] == ["nodes", "4", "6"]
    names = [row[0].strip() for row in rows[2:]]
    assert "one lost -> decided, s after detection" in names and len(names) == len(set(names)) == 13
    assert all(float(cell) > 0 for row in rows[2:] for cell in row[1:])


def test_simulated_figures_have_the_names_of_their_targets() -> None:
    figures = mesh_simulated.measure(6, received_us=20)
    for what in ("one lost", "a third lost"):
        decided_s = figures[f"simulated, 6 nodes: {what} -> decided, s"]
        assert 0 < figures[f"simulated, 6 nodes: {what} -> decided, s after detection"] < decided_s < 4
    assert figures["simulated, 6 nodes: idle messages of a node, median per s"] > 5
    wanted = {what.replace("1024", "6") for what in mesh.TARGETS if what.startswith("simulated")}
    assert wanted and wanted <= figures.keys()
