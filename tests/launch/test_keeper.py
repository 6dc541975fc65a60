"""Keeper and agent: who dies, who clears up, who goes on."""

import os
import signal
import subprocess
import sys
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
wait_for("finish")
"""


def test_killed_agent_starts_again_and_the_job_goes_on(launch: Callable, tmp_path: Path) -> None:
    run = launch("--nproc-per-node=2", script=FAMILY)
    first = run.until_told("up", 2)
    old_family = set(run.family()) - {run.pid}
    agent = run.agent()
    os.kill(agent, signal.SIGKILL)
    second = run.until_told("up", 2, attempt=1)
    assert {row["pid"] for row in first}.isdisjoint(row["pid"] for row in second)
    assert not old_family & set(run.family()), "the next agent started before all of the old attempt was ended"
    (tmp_path / "finish").touch()
    assert run.code() == 0, run.story()
    assert f"the agent (pid {agent}) was killed by SIGKILL" in run.err, run.story()
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


def test_interrupt_while_the_keeper_is_still_being_imported_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "hyperpodrun", "none.py"], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("option", "limit", "words"), [("-n", "6", "open files is 6"), ("-f", "1", "bytes in a file is ")])
def test_limits_too_low_for_the_keeper_itself_are_told(option: str, limit: str, words: str) -> None:
    line = f'ulimit {option} {limit} && exec "$@"'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "hyperpodrun", "none.py"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (exit_codes.CONFIG, "")
    assert words in done.stderr and "ulimit" in done.stderr and done.stderr.count("\n") == 1


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


def _ignore() -> None:
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD, signal.SIGTERM])


@pytest.mark.parametrize("before", [_ignore, _block])
def test_signals_ignored_or_blocked_by_the_parent_are_not_missed(launch: Callable, before: Callable) -> None:
    run = launch("--nproc-per-node=2", script="meet()", preexec_fn=before)
    assert run.code() == 0, run.story()
    run = launch("--nproc-per-node=1", script="tell('waits')\nsignal.pause()", preexec_fn=before)
    run.until_told("waits", 1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 143, run.story()


def lone_keeper(tmp_path: Path, code: str) -> "subprocess.CompletedProcess[str]":
    """A keeper with an agent that is this code."""
    program = f"import os\nfrom hyperpodrun.agent import keeper\n{code}\nkeeper.main(agent)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert os.listdir(tmp_path) == [], "the run folder was left behind"
    return run


def test_agent_that_fails_before_it_begins_is_not_started_again(tmp_path: Path) -> None:
    run = lone_keeper(tmp_path, "def agent(link): raise ImportError('msgspec is hidden')")
    assert run.returncode == exit_codes.INTERNAL
    assert run.stderr.count("msgspec is hidden") == 1, "it was tried again"
    assert "before it began" in run.stderr


def test_system_without_room_for_an_agent_is_one_sentence(tmp_path: Path) -> None:
    run = lone_keeper(tmp_path, "def agent(): raise BlockingIOError(11, os.strerror(11))\nos.fork = agent")
    assert run.returncode == exit_codes.CONFIG
    assert "ulimit -u" in run.stderr and "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_process_table_of_others_is_refused(tmp_path: Path) -> None:
    """The numbers in another pid namespace's /proc mean other processes: nothing may be looked up, let alone killed, by them."""
    run = lone_keeper(tmp_path, "os.readlink = lambda path: '1'\ndef agent(link): return 0")
    assert run.returncode == exit_codes.CONFIG
    assert "--mount-proc" in run.stderr and len(run.stderr.splitlines()) == 1


def test_node_failure_budget_counts_the_deaths_of_all_agents_before(launch: Callable) -> None:
    run = launch("--nproc-per-node=1", "--max-node-failures=1", script="tell('up')\nsignal.pause()")
    for attempt in range(2):
        run.until_told("up", 1, attempt=attempt)
        os.kill(run.agent(), signal.SIGKILL)
    assert run.code() == exit_codes.INTERNAL, run.story()
    assert "--max-node-failures" in run.err
    run.nothing_left()
