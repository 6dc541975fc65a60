"""Which rank failed first: the one to name in the report and whose code the job ends with.

The ends of a job's ranks come in an order that is not the order of their faults. A rank that loses a peer notices within
microseconds and may be gone before the peer that raised has printed its traceback; and as soon as the first end is seen the
agent signals the others, whose ends then say nothing. So ends fall into tiers, and only within a tier time decides:

| tier | what ended | blamed |
|---|---|---|
| CULPRIT | failed by itself, and its words do not point to a peer | first |
| HUNG | never ended, was stopped for that | if no culprit |
| SLOW CULPRIT | our signal met it leaving: after its own exception, or dying of a signal not ours | if the others are victims |
| VICTIM | failed by itself, but its words say that a peer was lost | if nobody in the tiers above |
| STOPPED | ended after our signal | if nothing else failed |

A victim is acquitted only when somebody in a better tier failed before it or within `PEER_LOSS_WINDOW_S` after it; otherwise the
lost "peer" was something else (a data server, another node), and the earliest end counts.

Invariants: the answer does not depend on the order of `ends`; an end with code 0 is never blamed; an end that only got our
signal is never blamed while another failed by itself.
"""

import signal
from collections.abc import Iterable, Mapping

import msgspec

from hyperpodrun.agent.wire.exit_codes import signal_of_wait_status

PEER_LOSS_WINDOW_S = 10.0
"""How much later than its victim a culprit may be seen.

It prints a traceback, runs exit handlers and gives up device memory, all after its sockets were closed or its threads stopped.
"""

# Words by which a rank says that it failed because a peer went away, lower case. Each stands where its source stands.
VICTIM_PHRASES = (
    # errno texts (strerror of ECONNRESET, EPIPE, ECONNREFUSED), hence Python's, gloo's, TCPStore's and NCCL's socket errors
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    # gloo: transport/tcp/pair.cc, transport/tcp/unbound_buffer.cc, rendezvous/context.cc
    "connection closed by peer",
    "application timeout caused pair closure",
    "socket closed",
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "gloo connectfullmesh failed",
    # torch: c10d/ProcessGroupGloo.cpp
    "failed to pass monitoredbarrier",
    "but received errors while waiting for send/recv from rank",
    # torch: c10d/TCPStore.cpp, socket.cpp, TCPStoreLibUvBackend.cpp
    "connection was likely closed. did the remote server shutdown or crash",
    "the client socket has failed to connect to",
    "the client socket has timed out",
    "remote peer closed the connection",
    "seconds waiting for clients",
    "wait timeout after",
    # torch: c10d/NCCLUtils.hpp, ProcessGroupNCCL.cpp
    "ncclremoteerror",
    "watchdog caught collective operation timeout",
    "nccl communicator was aborted on rank",
    "some nccl operations have failed or timed out",
    "dump signal from another rank",
    # nccl: init.cc (ncclGetErrorString), misc/socket.cc, transport/net_ib.cc
    "remote process exited or there was a network error",
    "connection closed by remote peer",
    "got completion from peer",
    # CPython: multiprocessing/connection.py, http/client.py
    "connectionreseterror",
    "connectionabortederror",
    "remote end closed connection",
)

# Stronger than any of the above: the same message names a fault of this rank's own device.
OWN_FAULT_PHRASES = ("cuda error:", "cuda out of memory", "device-side assert", "cuda failure", "uncorrectable ecc error")

FAULT_SIGNALS = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})

# Exceptions by which Python programs answer the agent's own signal: no cause of anything.
ANSWERS_TO_A_SIGNAL = ("KeyboardInterrupt", "SystemExit", "SignalException")
ANSWER_PHRASES = ("sigterm", "sigint", "got signal:", "signal 15", "signal 2")


class WorkerEnd(msgspec.Struct, frozen=True):
    """How one rank's process ended.

    `status` is its wait(2) status, `at_s` the monotonic time at which the end was seen. `signalled`: the agent had sent it a
    signal before; `sent` says which ones (empty: not known). `hung`: it had not ended by itself and was stopped for that (skew or
    hang timeout), not for another's failure.
    """

    local_rank: int
    rank: int
    pid: int
    status: int
    at_s: float
    signalled: bool = False
    hung: bool = False
    sent: tuple[int, ...] = ()
    unkillable: bool = False
    """SIGKILL had no effect: the kernel holds it, and `status` is only what it will end of."""
    left: bool = False
    """It has not ended: it left its function by an exception, and `status` is what it would have ended with."""
    why: str = ""
    """In words, where the status says nothing: how it hangs, why it is not fit to go on."""

    @property
    def failed(self) -> bool:
        """Anything but a voluntary exit with code 0."""
        return self.status != 0 or self.hung


class Raised(msgspec.Struct, frozen=True):
    """An exception that a rank's stderr shows. `final`: only noise of the runtime came after it, so it ended the process."""

    type: str
    message: str
    traceback: str
    final: bool = True


class Recorded(msgspec.Struct, frozen=True):
    """What torch's `record` left in the rank's error file. `raised_at_unix_s` has whole seconds."""

    text: str
    traceback: str = ""
    raised_at_unix_s: int | None = None


class Evidence(msgspec.Struct, frozen=True):
    """What one rank left about its end. `victim`: its words or signal say that a peer was lost."""

    recorded: Recorded | None = None
    raised: Raised | None = None
    victim: bool = False


NO_EVIDENCE = Evidence()


def blames_a_peer(text: str) -> bool:
    """Does this message (an exception's type and text) say that the cause is a lost peer?"""
    lower = text.lower()
    return any(phrase in lower for phrase in VICTIM_PHRASES) and not any(phrase in lower for phrase in OWN_FAULT_PHRASES)


def failures(ends: Iterable[WorkerEnd]) -> list[WorkerEnd]:
    """The ends that are failures, ordered by time."""
    return sorted((end for end in ends if end.failed), key=_when)


def root_cause(ends: Iterable[WorkerEnd], evidence: Mapping[int, Evidence]) -> WorkerEnd:
    """The first failing rank, not one of its victims. `evidence` is keyed by local rank and may lack ranks.

    Raises ValueError when no end is a failure.
    """
    failed = failures(ends)
    if not failed:
        raise ValueError("no rank failed")

    def told(end: WorkerEnd) -> Evidence:
        return evidence.get(end.local_rank, NO_EVIDENCE)

    by_themselves = [end for end in failed if not end.signalled and not end.hung]
    victims = [end for end in by_themselves if told(end).victim]
    culprits = [end for end in by_themselves if not told(end).victim]
    hung = [end for end in failed if end.hung]
    first_victim_s = victims[0].at_s if victims else None
    if first_victim_s is not None and not culprits and not hung:
        stopped = [end for end in failed if end.signalled]
        culprits = [end for end in stopped if _had_raised(told(end))] or [end for end in stopped if _was_struck(end)]
    if culprits:
        in_time = first_victim_s is None or min(end.at_s for end in culprits) <= first_victim_s + PEER_LOSS_WINDOW_S
        return _first(culprits if in_time else [*victims, *culprits], evidence)
    # Hung ranks were all stopped at the same moment: the time says nothing, the lowest rank stands for them.
    if hung:
        return min(hung, key=lambda end: (told(end).victim, end.rank, end.local_rank, end.pid))
    return _first(victims or failed, evidence)


def _had_raised(told: Evidence) -> bool:
    """Was an exception of its own ending it when our signal came?"""
    if told.victim:
        return False
    if told.recorded is not None:
        return not _answers_a_signal(told.recorded.text.split(":", 1)[0], told.recorded.text)
    return told.raised is not None and told.raised.final and not _answers_a_signal(told.raised.type, told.raised.message)


def _was_struck(end: WorkerEnd) -> bool:
    """Did it die of a signal that the agent does not send, or had not sent? (Not SIGABRT: a normal answer of C++ to SIGTERM.)"""
    number = signal_of_wait_status(end.status)
    return number in FAULT_SIGNALS or (number == signal.SIGKILL and bool(end.sent) and number not in end.sent)


def _answers_a_signal(kind: str, message: str) -> bool:
    lower = message.lower()
    return kind.rsplit(".", 1)[-1] in ANSWERS_TO_A_SIGNAL or any(phrase in lower for phrase in ANSWER_PHRASES)


def _first(ends: list[WorkerEnd], evidence: Mapping[int, Evidence]) -> WorkerEnd:
    """The earliest end; where it and others recorded when they raised, the earliest of these.

    Recorded times are whole seconds, cut off: a smaller second is certainly earlier, equal ones say nothing and leave it to the
    times of the ends. Times of ends and of records are never compared with each other: their clocks differ.
    """
    earliest = min(ends, key=_when)
    if _raised_at(earliest, evidence) is None:
        return earliest
    timed = [(at_s, end) for end in ends if (at_s := _raised_at(end, evidence)) is not None]
    return min(timed, key=lambda pair: (pair[0], _when(pair[1])))[1]


def _raised_at(end: WorkerEnd, evidence: Mapping[int, Evidence]) -> int | None:
    recorded = evidence.get(end.local_rank, NO_EVIDENCE).recorded
    return recorded.raised_at_unix_s if recorded is not None else None


def _when(end: WorkerEnd) -> tuple[float, int, int, int]:
    return end.at_s, end.rank, end.local_rank, end.pid
