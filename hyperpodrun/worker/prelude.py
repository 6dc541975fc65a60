"""What happens in a new worker process before its program starts; as a script it does so for `--start-method spawn`.

Run by path as `python -I -S prelude.py AGENT_PID CPUS PROGRAM ARGV...`: nothing but the standard library is there, the
environment is the worker's own, descriptor 3 is the gate. The steps: a session of its own; the gate (one byte: go; its end: the
start was called off); death with the agent; CPU affinity; execve. The process keeps its pid throughout, so that the agent knows
the worker from the first moment.

Invariants: nothing of the user's runs before the gate; only descriptors 0, 1 and 2 reach the program.
Source: prctl(2) PR_SET_PDEATHSIG (it counts the parent *thread*, and says nothing of a parent that is gone already: hence the
second look), POSIX shell exit codes 126 and 127.
"""

import os
import signal
import sys

GATE_FD = 3
_PR_SET_PDEATHSIG = 1
_CANNOT_EXECUTE, _NOT_FOUND = 126, 127


def die_with(parent_pid: int) -> None:
    """End with SIGKILL when the parent ends, also when it has ended already."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def close_all_but(kept: set[int]) -> None:
    """Close every other descriptor of this process."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the listing's own descriptor is gone by now


def pass_gate(gate: int) -> None:
    """Wait for the agent's go; end here when it closed the gate instead."""
    if not os.read(gate, 1):
        os._exit(0)
    os.close(gate)


def bind(cpus: list[int]) -> None:
    """Run on these CPUs only; a refusal (cpuset changed, CPU offline) is told and survived."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        os.write(2, f"hyperpodrun: this rank runs unbound, its CPUs {cpus} were refused: {error.strerror}\n".encode())


def execute(program: str, argv: list[str]) -> None:
    """Become the program. Never returns: an error is told on stderr with the exit code a shell would give."""
    try:
        os.execv(program, argv)
    except OSError as error:
        text, code = error.strerror, _CANNOT_EXECUTE
        if isinstance(error, FileNotFoundError):
            code = _NOT_FOUND
            if os.path.exists(program):
                text = "the interpreter in its first line does not exist"
        elif error.errno == 8:  # ENOEXEC
            text = "it is neither a binary for this machine nor a script with a #! line"
        os.write(2, f"hyperpodrun: cannot execute {program!r}: {text}\n".encode(errors="backslashreplace"))
        os._exit(code)


def main() -> None:
    """See the module's docstring."""
    agent_pid, cpus, program, *argv = sys.argv[1:]
    os.set_inheritable(GATE_FD, False)
    close_all_but({0, 1, 2, GATE_FD})
    os.setsid()
    pass_gate(GATE_FD)
    die_with(int(agent_pid))
    if cpus:
        bind([int(cpu) for cpu in cpus.split(",")])
    # Python ignores these two for itself, which exec would hand on.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    execute(program, argv)


if __name__ == "__main__":
    main()
