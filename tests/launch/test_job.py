"""Jobs from start to end: restarts, scripts, signals, state files."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes


def test_scripts_run_before_every_attempt_and_after_success(launch: Callable, tmp_path: Path) -> None:
    pre, post = tmp_path / "pre.sh", tmp_path / "post.sh"
    pre.write_text('echo "pre $1 $TORCHELASTIC_RESTART_COUNT" >> order\n')
    post.write_text("#!/bin/sh\necho post >> order\n")
    post.chmod(0o755)
    run = launch(
        "--max-restarts=1", f"--pre-train-script={pre}", "--pre-train-args=word", f"--post-train-script={post}",
        script="open('order', 'a').write(f'train {ATTEMPT}\\n')\nsys.exit(4 if ATTEMPT == 0 else 0)",
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert (tmp_path / "order").read_text().splitlines() == ["pre word 0", "train 0", "pre word 1", "train 1", "post"]


def test_failing_pre_train_script_ends_the_job_before_any_worker(launch: Callable, tmp_path: Path) -> None:
    pre = tmp_path / "pre.sh"
    pre.write_text("echo no licence server; exit 7\n")
    run = launch("--max-restarts=3", f"--pre-train-script={pre}", script="tell('up')")
    assert run.code() == 7, run.story()
    assert not run.notes("up")
    assert "pre-train" in run.err
    assert "no licence server" in run.out + run.err


def test_stop_during_the_pre_train_script(launch: Callable, tmp_path: Path) -> None:
    pre = tmp_path / "pre.sh"
    pre.write_text("touch began; sleep 300\n")
    run = launch(f"--pre-train-script={pre}", script="tell('up')")
    run.until(lambda: (tmp_path / "began").exists(), "the script")
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 143, run.story()
    assert not run.notes("up")
    run.nothing_left()


def test_second_ctrl_c_ends_workers_that_ignore_the_first(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=2", script="signal.signal(signal.SIGTERM, lambda *a: tell('asked'))\nmeet()\nwhile True: signal.pause()"
    )
    run.until_told("up", 2)
    os.kill(run.pid, signal.SIGINT)
    run.until_told("asked", 2)

    def press() -> bool:
        os.kill(run.pid, signal.SIGINT)
        return run.process.poll() is not None

    run.until(press, "the end after a further Ctrl-C")
    assert run.code() == 130, run.story()
    run.nothing_left()


def test_children_of_a_worker_live_through_its_last_save(launch: Callable) -> None:
    run = launch(
        script="""
        child = subprocess.Popen(["sleep", "300"])
        def save(*_):
            tell("saved", child_lived=child.poll() is None)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        tell("up")
        signal.pause()
        """
    )
    run.until_told("up", 1)
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 143
    assert [row["child_lived"] for row in run.notes("saved")] == [True], "the shutdown signal reached the worker's own child"
    run.nothing_left()


def test_unlisted_signal_ends_the_job_without_the_grace_but_without_leftovers(launch: Callable) -> None:
    run = launch(
        "--signals-to-handle=SIGTERM",
        script="signal.signal(signal.SIGTERM, lambda *a: tell('asked'))\ntell('up')\nsignal.pause()",
    )
    run.until_told("up", 1)
    os.kill(run.pid, signal.SIGHUP)
    assert run.code() == 129, run.story()
    assert not run.notes("asked")
    run.nothing_left()


def test_listed_user_signal_stops_the_job_and_is_what_asks_the_ranks(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGUSR1",
        script="""
        def save(number, frame):
            tell("saved")
            sys.exit(0)
        signal.signal(signal.SIGUSR1, save)
        tell("up")
        signal.pause()
        """,
    )  # fmt: skip
    run.until_told("up", 2)
    os.kill(run.pid, signal.SIGUSR1)
    assert run.code() == 128 + signal.SIGUSR1, run.story()
    assert len(run.notes("saved")) == 2, run.story()
    assert "stopped by SIGUSR1" in run.err
    run.nothing_left()


def test_exception_before_the_first_line_counts_as_any_failure(launch: Callable, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def f(:\n")
    run = launch("--max-restarts=1", str(broken))
    assert run.code() == 1, run.story()
    assert "SyntaxError" in run.err
    assert "0 of 1 restarts left" in run.err


def test_status_file_tells_pids_and_follows_restarts(launch: Callable, tmp_path: Path) -> None:
    status = tmp_path / "status.json"
    run = launch(
        "--nproc-per-node=2", "--max-restarts=1", "--job-id=told",
        script="meet()\nif ATTEMPT == 0:\n    sys.exit(RANK)\nwait_for('finish')", env={"HYPERPODRUN_STATUS_FILE": str(status)},
    )  # fmt: skip
    run.until_told("up", 2, attempt=1)
    told = run.until(
        lambda: (s := json.loads(status.read_text()))["restart_count"] == 1 and len(s["workers"]) == 2 and s, "both workers"
    )
    assert (told["job_id"], told["pid"], told["agent_pid"], told["world_size"]) == ("told", run.pid, run.agent(), 2)
    assert {w["pid"] for w in told["workers"]} == {row["pid"] for row in run.notes("up", attempt=1)}
    (tmp_path / "finish").touch()
    assert run.code() == 0
    assert json.loads(status.read_text())["exit_code"] == 0


def test_unwritable_status_file_is_told_and_harmless(launch: Callable) -> None:
    run = launch(script="tell('up')", env={"HYPERPODRUN_STATUS_FILE": "/proc/none/status.json"})
    assert run.code() == 0
    assert run.err.count("/proc/none/status.json") == 1, run.story()


def test_port_taken_in_between_costs_no_restart(launch: Callable) -> None:
    run = launch(
        "--max-restarts=0",
        script="""
        import socket
        tell("port", port=os.environ["MASTER_PORT"])
        if ATTEMPT < 2:
            print(f"port: {os.environ['MASTER_PORT']}, code: -98, name: EADDRINUSE, message: address already in use", file=sys.stderr)
            sys.exit(1)
        """,
        env={"HPCT_USE_ROOTLESS": "0"},
    )
    assert run.code() == 0, run.story()
    ports = [row["port"] for row in run.notes("port")]
    assert len(ports) == len(set(ports)) == 3, f"a fresh port for each attempt expected: {ports}"


def test_script_that_cannot_be_executed_is_no_reason_to_try_again(launch: Callable, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o755)
    run = launch("--no-python", "--max-restarts=3", "--nproc-per-node=2", str(program))
    assert run.code() == 126, run.story()
    assert str(program) in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_both_start_methods_restart(launch: Callable, method: str) -> None:
    run = launch(
        "--nproc-per-node=3",
        "--max-restarts=2",
        f"--start-method={method}",
        script="meet()\nsys.exit(3 if ATTEMPT < 2 and RANK == 1 else 0)",
    )
    assert run.code() == 0, run.story()
    assert sorted((row["attempt"], row["rank"]) for row in run.notes("up")) == [(a, r) for a in range(3) for r in range(3)]
    run.nothing_left()


def test_nested_launcher_has_a_world_of_its_own(launch: Callable, tmp_path: Path) -> None:
    inner = tmp_path / "inner.py"
    inner.write_text("import os\nprint('inner', os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['HYPERPODRUN_JOB_ID'])")
    run = launch(
        "--nproc-per-node=2", "--job-id=outer",
        script=f"""
        if RANK == 1:
            sys.exit(subprocess.run([sys.executable, '-m', 'hyperpodrun', '--nproc-per-node=1', {str(inner)!r}]).returncode)
        """,
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert "inner 0 1 " in run.out
    assert "inner 0 1 outer" not in run.out


def test_interpreter_of_a_worker_is_the_launchers(launch: Callable) -> None:
    run = launch(script="tell('exe', exe=sys.executable)")
    assert run.code() == 0
    assert [row["exe"] for row in run.notes("exe")] == [sys.executable]


def test_a_hung_rank_that_our_own_signal_ended_gives_no_code_of_a_signal(launch: Callable) -> None:
    run = launch("--nproc-per-node=2", "--exit-skew-timeout=0.2", script="meet()\nwhile RANK:\n    time.sleep(1)")
    assert run.code() == 1, run.story()
    assert "killed by SIGTERM" in run.err


def test_two_jobs_of_one_name_at_once_do_not_share_their_state(launch: Callable) -> None:
    script = "tell('up', job=os.environ['HYPERPODRUN_JOB_ID'])\nwait_for(f'finish-{os.getppid()}')"
    env = {"SLURM_JOB_ID": "5"}
    first = launch(script=script, env=env)
    first.until_told("up", 1)
    second = launch(script=script, env=env)
    rows = second.until_told("up", 2)
    names = {row["job"] for row in rows}
    assert "5" in names and len(names) == 2, "both would keep their training state in one folder"
    assert "another job with the id 5 runs on this node" in second.err
    os.kill(second.agent(), signal.SIGKILL)
    assert {row["job"] for row in second.until_told("up", 3)} == names, "the agent's successor has another name"
    for run in (first, second):
        os.kill(run.pid, signal.SIGTERM)
        assert run.code() == 143, run.story()


def test_a_job_that_comes_back_while_it_is_still_being_stopped_keeps_its_name(launch: Callable) -> None:
    script = """
    signal.signal(signal.SIGTERM, lambda *a: (tell("asked"), wait_for("saved"), sys.exit(0)))
    tell("up", job=os.environ["HYPERPODRUN_JOB_ID"])
    wait_for("finish")
    """
    first = launch("--job-id=again", script=script)
    first.until_told("up", 1)
    os.kill(first.pid, signal.SIGTERM)
    first.until_told("asked", 1)
    second = launch("--job-id=again", script=script)
    second.until(lambda: "waiting for the job with the id again" in second.err, "the wait")
    assert len(second.notes("up")) == 1
    (second.folder / "saved").touch()
    assert [row["job"] for row in second.until_told("up", 2)] == ["again", "again"]
    (second.folder / "finish").touch()
    assert (first.code(), second.code()) == (143, 0), second.story()
