"""Keeper and agent: who dies, who clears up, who goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpodrun.agent.wire import exit_codes

pytestmark = pytest.mark.processes

FAMILY = """
for apart in (False, True):
    subprocess.Popen(["sleep", "300"], start_new_session=apart)
meet()
if ATTEMPT == 0:
    signal.pause()
"""


def test_killed_agent_starts_again_and_the_job_goes_on(launch: Callable, tmp_path: Path) -> None:
    run = launch("--nproc-per-node=2", script=FAMILY)
    first = run.until_told("up", 2)
    old_family = set(run.family()) - {run.pid}
    agent = run.agent()
    os.kill(agent, signal.SIGKILL)
    second = run.until_told("up", 2, attempt=1)
    assert {row["pid"] for row in first}.isdisjoint(row["pid"] for row in second)
    assert run.code() == 0, run.story()
    assert f"the agent (pid {agent}) was killed by SIGKILL" in run.err, run.story()
    assert not old_family & set(run.family()), "processes of the killed agent's attempt live on"
    run.nothing_left()
    assert os.listdir(tmp_path / "tmp") == []


def test_killed_keeper_leaves_nothing(launch: Callable, tmp_path: Path) -> None:
    run = launch("--nproc-per-node=2", script=FAMILY)
    run.until_told("up", 2)
    os.kill(run.pid, signal.SIGKILL)
    run.nothing_left()
    assert os.listdir(tmp_path / "tmp") == [], "the run folder was left behind"


def test_agent_that_dies_again_and_again_is_given_up(launch: Callable, tmp_path: Path) -> None:
    run = launch("--nproc-per-node=1", script="tell('up')\nsignal.pause()")
    for attempt in range(5):
        run.until_told("up", 1, attempt=attempt)
        os.kill(run.agent(), signal.SIGKILL)
    assert run.code() == exit_codes.INTERNAL, run.story()
    assert "5 deaths" in run.err
    run.nothing_left()
    assert os.listdir(tmp_path / "tmp") == []


def test_stop_between_two_agents_is_not_lost(launch: Callable) -> None:
    run = launch("--nproc-per-node=1", script="tell('up')\nsignal.pause()")
    run.until_told("up", 1)
    agent = run.agent()
    os.kill(agent, signal.SIGSTOP)  # it cannot take the signal itself
    os.kill(run.pid, signal.SIGTERM)
    os.kill(agent, signal.SIGKILL)
    assert run.code() == 143, run.story()
    run.nothing_left()


def test_dead_agents_are_limited_by_the_node_failure_budget(launch: Callable) -> None:
    run = launch("--nproc-per-node=1", "--max-node-failures=0", script="tell('up')\nsignal.pause()")
    run.until_told("up", 1)
    os.kill(run.agent(), signal.SIGKILL)
    assert run.code() == exit_codes.INTERNAL
    assert "--max-node-failures" in run.err
    run.nothing_left()


def test_run_folder_of_a_job_killed_whole_is_removed_by_the_next(launch: Callable, tmp_path: Path) -> None:
    run = launch("--nproc-per-node=1", script="tell('up')\nsignal.pause()")
    run.until_told("up", 1)
    agent = run.agent()
    os.kill(run.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGSTOP)
    os.kill(run.pid, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    run.nothing_left()
    assert len(os.listdir(tmp_path / "tmp")) == 1, "nobody was left to remove it"
    assert launch("--nproc-per-node=1", script="tell('again')").code() == 0
    assert os.listdir(tmp_path / "tmp") == []


def test_launcher_process_is_small_and_its_agent_loads_no_torch(launch: Callable) -> None:
    run = launch("--nproc-per-node=1", script="import torch\ntell('up')\nwait_for('finish')")
    run.until_told("up", 1)
    for pid in (run.pid, run.agent()):
        mapped = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in mapped, f"torch is loaded in pid {pid}"
    (run.folder / "finish").touch()
    assert run.code() == 0
