"""Every exit code of `hyperpodrun`, in one table.

| code | meaning |
|---|---|
| 0 | success |
| 2 | the command line is wrong (`sysexits.h` EX_USAGE is 64; shells, click and torchrun use 2) |
| 69 | peers not reachable in time, or quorum lost (EX_UNAVAILABLE) |
| 70 | the launcher itself failed: a bug, or it was killed too often (EX_SOFTWARE) |
| 75 | preempted and saved: queue this job again (EX_TEMPFAIL) |
| 78 | the configuration or this machine cannot run the job (EX_CONFIG) |
| 128 + N | stopped by signal N, or the first failing rank died of signal N |
| else | the first failing rank's own code |
"""

import signal

SUCCESS = 0
USAGE = 2
UNAVAILABLE = 69
INTERNAL = 70
REQUEUE = 75
CONFIG = 78


def for_signal(number: int) -> int:
    """The code by which a shell reports death by this signal: 128 + N."""
    return 128 + number


def from_wait_status(status: int) -> int:
    """Turn a wait(2) status into an exit code: the process's own, or 128 + N when signal N ended it."""
    if status & 0x7F:
        return for_signal(status & 0x7F)
    return (status >> 8) & 0xFF


def signal_of_wait_status(status: int) -> int | None:
    """Number of the signal that ended the process; None when it exited by itself."""
    return (status & 0x7F) or None


def signal_name(number: int) -> str:
    """SIGKILL for 9, and so on; real-time signals become SIGRTMIN+n."""
    try:
        return signal.Signals(number).name
    except ValueError:
        if signal.SIGRTMIN <= number <= signal.SIGRTMAX:
            return f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return f"signal {number}"
