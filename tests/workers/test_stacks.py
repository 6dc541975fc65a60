"""How the stacks of a hung rank are got: the signal only where it is caught, a tool only where it may look."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpodrun.agent.workers import stacks
from hyperpodrun.agent.workers.stacks import DUMP_SIGNAL, THREAD_LINES, DumpPlan, catches, kernel_facts, plan

PID = 4711
STAT = "{tid} (pt main) thread) {state} 1 4711 4711 0 -1 4194560 100 0 0 0"


class Proc:
    """A made-up /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def thread(self, tid: int, state: str = "S", wchan: str = "futex_do_wait", call: str = "202 0x7f 0x80") -> None:
        folder = f"{PID}/task/{tid}"
        self.write(f"{folder}/stat", STAT.format(tid=tid, state=state))
        self.write(f"{folder}/wchan", wchan)
        self.write(f"{folder}/syscall", call)

    def caught(self, *numbers: int) -> None:
        self.write(
            f"{PID}/status", f"Name:\tpython\nSigIgn:\t0000000000001000\nSigCgt:\t{sum(1 << (n - 1) for n in numbers):016x}\n"
        )

    def plan(self, **env: str) -> DumpPlan:
        return plan(PID, env, str(self.root))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "n", "6.1", "1", "x86_64")))
    made = Proc(tmp_path / "proc")
    made.thread(PID)
    made.caught(signal.SIGINT)
    return made


@pytest.fixture
def py_spy(tmp_path: Path) -> str:
    path = tmp_path / "bin" / "py-spy"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def test_the_worker_prints_its_stacks_itself(proc: Proc) -> None:
    proc.caught(signal.SIGINT, DUMP_SIGNAL)
    made = proc.plan()
    assert (made.signal, made.command) == (DUMP_SIGNAL, ())


def test_the_signal_is_not_sent_where_it_would_kill(proc: Proc) -> None:
    assert proc.plan().signal is None
    proc.caught(DUMP_SIGNAL - 1, DUMP_SIGNAL + 1)
    assert proc.plan().signal is None


def test_py_spy_is_used_where_it_is_installed(proc: Proc, py_spy: str) -> None:
    made = proc.plan(PATH=f"/nowhere:{os.path.dirname(py_spy)}")
    assert made.command == (py_spy, "dump", "--native", "--pid", str(PID))


@pytest.mark.parametrize(
    "scope, capabilities, may",
    [
        ("0", "0", True),
        ("1", "0", False),
        ("1", "1ffffffffff", True),
        ("2", "80000", True),
        ("2", "40000", False),
        ("3", "80000", False),
    ],
)
def test_py_spy_is_not_run_where_it_may_not_look(proc: Proc, py_spy: str, scope: str, capabilities: str, may: bool) -> None:
    proc.write("sys/kernel/yama/ptrace_scope", f"{scope}\n")
    proc.write("self/status", f"CapPrm:\tffffffff\nCapEff:\t{capabilities.zfill(16)}\n")
    assert bool(proc.plan(PATH=os.path.dirname(py_spy)).command) is may


def test_a_file_that_is_no_program_is_not_py_spy(proc: Proc, py_spy: str) -> None:
    os.chmod(py_spy, 0o644)
    if os.access(py_spy, os.X_OK):
        pytest.skip("here everything is executable")
    assert proc.plan(PATH=os.path.dirname(py_spy)).command == ()


def test_the_kernel_always_has_a_word(proc: Proc) -> None:
    assert (
        kernel_facts(PID, str(proc.root))
        == "main thread: pt main) thread, sleeping, kernel function futex_do_wait, system call futex"
    )


def test_a_process_that_is_gone_gets_no_plan(proc: Proc, py_spy: str) -> None:
    assert plan(1234, {"PATH": os.path.dirname(py_spy)}, str(proc.root)) == DumpPlan(1234)


def test_equal_threads_are_counted_together(proc: Proc) -> None:
    for tid in range(PID + 1, PID + 65):
        proc.thread(tid, wchan="ep_poll", call="232 0x5")
    proc.thread(PID + 70, "D", wchan="uvm_map", call="16 0x9")
    proc.thread(PID + 71, "R", wchan="0", call="running")
    assert kernel_facts(PID, str(proc.root)).split("\n") == [
        "main thread: pt main) thread, sleeping, kernel function futex_do_wait, system call futex",
        f"thread {PID + 1} and 63 more: pt main) thread, sleeping, kernel function ep_poll, system call epoll_wait",
        f"thread {PID + 70}: pt main) thread, in uninterruptible sleep (a driver or a file system does not answer), "
        "kernel function uvm_map, system call ioctl",
        f"thread {PID + 71}: pt main) thread, running",
    ]


def test_the_facts_are_short(proc: Proc) -> None:
    for tid in range(PID + 1, PID + 300):
        proc.thread(tid, call=f"{tid} 0x0")
    lines = kernel_facts(PID, str(proc.root)).split("\n")
    assert len(lines) == THREAD_LINES + 1
    assert lines[-1] == f"... {300 - THREAD_LINES} other kinds of threads"


def test_files_that_may_not_be_read_are_left_out(proc: Proc) -> None:
    for name in ("wchan", "syscall"):
        (proc.root / f"{PID}/task/{PID}/{name}").unlink()
    assert kernel_facts(PID, str(proc.root)) == "main thread: pt main) thread, sleeping"


@pytest.fixture
def waiting_python() -> Iterator[subprocess.Popen[str]]:
    source = (
        "import faulthandler, signal, sys, time\n"
        f"if sys.argv[1:] == ['dumps']: faulthandler.register({int(DUMP_SIGNAL)}, file=2, all_threads=True, chain=False)\n"
        "def stuck_here():\n    print('up', flush=True)\n    sys.stdin.read()\nstuck_here()\n"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", source, "dumps"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "up\n"
    yield started
    started.kill()
    started.communicate()


@pytest.mark.processes
def test_a_real_worker_answers_the_plan(waiting_python: subprocess.Popen[str]) -> None:
    made = plan(waiting_python.pid, os.environ)
    assert made.signal == DUMP_SIGNAL
    os.kill(waiting_python.pid, made.signal)
    assert waiting_python.stderr is not None
    assert "most recent call first" in waiting_python.stderr.readline()
    assert "stuck_here" in waiting_python.stderr.readline()
    assert waiting_python.poll() is None


@pytest.mark.processes
def test_real_handlers_are_seen(waiting_python: subprocess.Popen[str]) -> None:
    assert catches(waiting_python.pid, signal.SIGINT)
    assert not catches(waiting_python.pid, signal.SIGTERM)
    assert kernel_facts(waiting_python.pid).startswith("main thread: ")


@pytest.mark.processes
def test_the_real_machine_is_asked_without_harm() -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        assert kernel_facts(other.pid) and stacks.plan(other.pid, {"PATH": "/nonexistent"}) == DumpPlan(other.pid)
        assert other.poll() is None
        other.kill()
