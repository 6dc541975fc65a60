"""hyperpodctl: what it shows of running jobs, and what it refuses."""

import fcntl
import json
import os
import subprocess
import sys

import msgspec
import pytest

from hyperpodrun.agent import orders, run_dir
from hyperpodrun.agent.status import MeshStatus, Status, StatusFiles, WorkerStatus
from hyperpodrun.cli import ctl, jobs

FAULT = "generation 1: local rank 0 failed: restarted in place"
STATUS = Status(
    job_id="my job", pid=10, agent_pid=11, node="n1", generation=2, restart_count=1, state="running", world_size=2,
    workers=[WorkerStatus(0, 0, 20), WorkerStatus(1, 1, 21)], started_at=1000.0, run_dir="", command=["train.py", "\x1b[31m"],
    faults=[FAULT],
)  # fmt: skip


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "bases", lambda: [str(tmp_path), str(tmp_path), "/no/such/folder"])
    return tmp_path


def launcher_folder(base, status=None, locked=True):
    """A run folder as a launcher makes it; its lock lives as long as the returned descriptor."""
    folder = base / f"{run_dir.PREFIX}-{os.getuid()}-{os.urandom(4).hex()}"
    folder.mkdir()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    if locked:
        fcntl.flock(lock, fcntl.LOCK_EX)
    if status is not None:
        StatusFiles(str(folder), None, pytest.fail).write(msgspec.structs.replace(status, run_dir=str(folder)))
    return folder, lock


def test_no_job_is_no_error(base, capfd):
    assert ctl.run(["status"]) == 0
    assert "No job" in capfd.readouterr().out
    assert ctl.run(["status", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"jobs": []}


def test_living_launchers_are_shown_and_dead_ones_are_not(base, capfd):
    folder, lock = launcher_folder(base, STATUS)
    _, other = launcher_folder(base, msgspec.structs.replace(STATUS, job_id="dead"), locked=False)
    assert ctl.run(["--json", "status"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["jobs"]
    assert row == {
        "job_id": "my job", "pid": 10, "agent_pid": 11, "node": "n1", "generation": 2, "restart_count": 1, "state": "running",
        "world_size": 2, "workers": [{"rank": 0, "local_rank": 0, "pid": 20}, {"rank": 1, "local_rank": 1, "pid": 21}],
        "started_at": 1000.0, "run_dir": str(folder), "command": ["train.py", "\x1b[31m"], "exit_code": None, "mesh": None,
        "faults": [FAULT],
    }  # fmt: skip
    assert ctl.run(["status"]) == 0
    text = capfd.readouterr().out
    assert f"  fault     {FAULT}\n" in text
    assert "job my job: running, 2 rank(s), 1 restart(s)" in text and "pid 21" in text and "\x1b" not in text
    os.close(lock)
    os.close(other)
    assert ctl.run(["status", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"jobs": []}


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"job_id": 1}', b"\xff"])
def test_a_launcher_whose_state_cannot_be_read_is_starting(base, capfd, content):
    folder, lock = launcher_folder(base)
    if content is not None:
        (folder / run_dir.STATUS).write_bytes(content)
    assert ctl.run(["status", "--json"]) == 0
    (row,) = json.loads(capfd.readouterr().out)["jobs"]
    assert (row["state"], row["run_dir"], row["pid"]) == (jobs.STARTING, str(folder), None)
    assert ctl.run(["status"]) == 0
    assert "starting" in capfd.readouterr().out
    os.close(lock)


@pytest.mark.parametrize("command", sorted(ctl.LATER))
def test_commands_of_later_releases_say_so(base, capfd, command):
    assert ctl.run([command, "--json"]) == 69
    assert capfd.readouterr().err == (
        f"hyperpodctl: {command} is not active in this release (later it {ctl.LATER[command]}); use hyperpodctl status\n"
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [([], "no command"), (["stats"], "did you mean status?"), (["zz"], "--help"), (["status", "x"], "'x'"),
     (["status", "--jason"], "'--jason'"), (["status", "status"], "'status'"), (["--json"], "no command")],
)  # fmt: skip
def test_mistakes_get_a_sentence(base, capfd, words, part):
    assert ctl.run(words) == 2
    sentence = capfd.readouterr().err
    assert sentence.startswith("hyperpodctl: ") and sentence.count("\n") == 1 and part in sentence


def test_help_and_version(capfd):
    assert ctl.run(["--help"]) == ctl.run(["status", "-h"]) == ctl.run(["--version"]) == 0
    text = capfd.readouterr().out
    assert text.count("Usage") == 2 and "hyperpodctl 0" in text


@pytest.mark.processes
def test_the_command_survives_closed_and_full_outputs():
    command = [sys.executable, "-m", "hyperpodrun.cli.ctl"]
    assert subprocess.run([*command, "status"], stdout=None, preexec_fn=lambda: os.close(1)).returncode == 0
    help_closed = "import sys; sys.stdout = None; from hyperpodrun.cli import launch; sys.exit(launch.main(['--help'], None))"
    done = subprocess.run([sys.executable, "-c", help_closed], stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (78, "hyperpodctl: the output cannot be written: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command, "--help"], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


MESH = MeshStatus(slot="a:1", view=3, mode="run", members=["a:1", "b:1"], active=["a:1", "b:1"], view_at=1.0, counters={})


def test_a_lost_node_is_certified_to_the_agents_that_know_it(base, capfd):
    folder, lock = launcher_folder(base, msgspec.structs.replace(STATUS, mesh=MESH))
    other, other_lock = launcher_folder(base, STATUS)
    assert ctl.run(["certify-dead", "b:1"]) == 0
    assert capfd.readouterr().out == "told the agent of job my job: b:1 is gone for good\n"
    assert ctl.run(["certify-dead", "b:1"]) == 0
    assert orders.take(str(folder)) == ("b:1",)
    assert orders.take(str(folder)) == orders.take(str(other)) == ()
    for unknown in ("c:1", "a:1", "b"):
        capfd.readouterr()
        assert ctl.run(["certify-dead", unknown]) == 69
        assert f"'{unknown}'; they wait for or work with b:1\n" in capfd.readouterr().err
    for wrong in (["certify-dead"], ["certify-dead", "a", "b"], ["certify-dead", "b:1", "--json"]):
        assert ctl.run(wrong) == 2
    os.close(lock)
    os.close(other_lock)
    assert ctl.run(["certify-dead", "b:1"]) == 69
