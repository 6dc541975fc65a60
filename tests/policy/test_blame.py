"""Whom the report names: tables of what jobs do when they die, and properties that hold for any set of ends."""

import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.policy.blame import (
    PEER_LOSS_WINDOW_S,
    Evidence,
    Raised,
    Recorded,
    WorkerEnd,
    blames_a_peer,
    failures,
    root_cause,
)

TERM, KILL, ABRT, SEGV = signal.SIGTERM.value, signal.SIGKILL.value, signal.SIGABRT.value, signal.SIGSEGV.value
VICTIM = Evidence(raised=Raised("RuntimeError", "Connection closed by peer [127.0.0.1]:5", "Traceback"), victim=True)
OWN = Evidence(raised=Raised("ValueError", "reason", "Traceback"))


def code(number: int) -> int:
    return number << 8


def end(rank: int, status: int, at_s: float, **more: object) -> WorkerEnd:
    return WorkerEnd(rank, rank, 1000 + rank, status, at_s, **more)  # type: ignore[arg-type]


def recorded(text: str, raised_at_unix_s: int, victim: bool = False) -> Evidence:
    return Evidence(recorded=Recorded(text, "", raised_at_unix_s), victim=victim)


CASES = {
    "the only failure": ([end(0, 0, 1), end(1, code(7), 2), end(2, 0, 3)], {}, 1),
    "a success is not blamed though it ended first": ([end(0, 0, 0.1), end(1, KILL, 9)], {}, 1),
    "the first of two": ([end(0, code(3), 2.0), end(1, code(4), 1.0)], {}, 1),
    "an abort after our signal, SIGTERM having been ignored": (
        [end(1, code(9), 1.0), end(0, ABRT, 1.3, signalled=True), end(2, TERM, 1.1, signalled=True)],
        {},
        1,
    ),
    "ends after our signal though seen in the same moment": (
        [end(0, TERM, 1.0, signalled=True), end(1, code(9), 1.0), end(2, TERM, 1.0, signalled=True)],
        {},
        1,
    ),
    "a gloo victim seen before its culprit": ([end(0, code(1), 1.0), end(1, code(1), 1.4)], {0: VICTIM, 1: OWN}, 1),
    "two victims around the culprit": (
        [end(0, code(1), 1.0), end(1, SEGV, 1.2), end(2, code(1), 1.3)],
        {0: VICTIM, 2: VICTIM},
        1,
    ),
    "a culprit without words beats victims": ([end(0, code(1), 1.0), end(1, code(9), 4.0)], {0: VICTIM}, 1),
    "victims only: another node's fault; the first to see it": (
        [end(2, code(1), 1.2), end(0, code(1), 1.5)],
        {0: VICTIM, 2: VICTIM},
        2,
    ),
    "a victim, and a rank that took our signal before the victim was seen": (
        [end(0, code(1), 2.0), end(1, TERM, 1.0, signalled=True)],
        {0: VICTIM},
        0,
    ),
    "two victims, one of them met by our signal": (
        [end(0, code(1), 1.0), end(1, code(1), 1.2, signalled=True)],
        {0: VICTIM, 1: VICTIM},
        0,
    ),
    "a lost peer long before anybody failed was no peer of ours": (
        [end(0, code(1), 1.0), end(1, code(9), 1.5 + PEER_LOSS_WINDOW_S)],
        {0: VICTIM},
        0,
    ),
    "the culprit raised, its victim was quicker to leave, our SIGTERM met it at exit": (
        [end(0, code(1), 1.0), end(1, TERM, 1.3, signalled=True), end(2, TERM, 1.1, signalled=True)],
        {0: VICTIM, 1: OWN},
        1,
    ),
    "the same, but it left with its own code": (
        [end(0, code(1), 1.0), end(1, code(1), 1.3, signalled=True)],
        {0: VICTIM, 1: OWN},
        1,
    ),
    "the same, with torch's record": (
        [end(0, code(1), 1.0), end(1, code(1), 1.3, signalled=True)],
        {0: VICTIM, 1: recorded("ValueError: x", 17)},
        1,
    ),
    "an old traceback in a stopped rank's output is no cause": (
        [end(0, code(1), 1.0), end(1, TERM, 1.3, signalled=True)],
        {0: VICTIM, 1: Evidence(raised=Raised("ValueError", "handled", "", final=False))},
        0,
    ),
    "an exception that answers our signal is no cause": (
        [end(0, code(1), 1.0), end(1, code(1), 1.3, signalled=True)],
        {0: VICTIM, 1: Evidence(raised=Raised("RuntimeError", "got signal: 15", ""))},
        0,
    ),
    "KeyboardInterrupt is no cause either": (
        [end(0, code(1), 1.0), end(1, 2, 1.3, signalled=True)],
        {0: VICTIM, 1: Evidence(raised=Raised("KeyboardInterrupt", "", ""))},
        0,
    ),
    "SIGKILLed by somebody else while we had sent only SIGTERM": (
        [end(0, code(1), 1.0), end(1, KILL, 2.0, signalled=True, sent=(TERM,)), end(2, TERM, 1.1, signalled=True, sent=(TERM,))],
        {0: VICTIM},
        1,
    ),
    "SIGKILLed by us": (
        [end(0, code(1), 1.0), end(1, KILL, 2.0, signalled=True, sent=(TERM, KILL))],
        {0: VICTIM},
        0,
    ),
    "SIGKILLed, but what we sent is not known": ([end(0, code(1), 1.0), end(1, KILL, 2.0, signalled=True)], {0: VICTIM}, 0),
    "a segmentation fault among victims": (
        [end(0, code(1), 1.0), end(1, SEGV, 1.8, signalled=True)],
        {0: VICTIM},
        1,
    ),
    "an exception beats a crash at exit": (
        [end(0, code(1), 1.0), end(1, SEGV, 1.2, signalled=True), end(2, code(1), 1.4, signalled=True)],
        {0: VICTIM, 2: OWN},
        2,
    ),
    "a hung rank": ([end(0, 0, 1.0), end(1, KILL, 301.0, signalled=True, hung=True)], {}, 1),
    "a hung rank and the rank that gave up waiting for it": (
        [end(0, ABRT, 600.0), end(1, KILL, 610.0, signalled=True, hung=True)],
        {0: Evidence(victim=True)},
        1,
    ),
    "a failure beats a hang": ([end(0, code(5), 1.0), end(1, KILL, 301.0, signalled=True, hung=True)], {}, 0),
    "all hung: the lowest rank": (
        [end(r, KILL, 300.0 + (r == 1), signalled=True, hung=True) for r in (2, 1, 3)],
        {},
        1,
    ),
    "only ends after our signal: the first of them": (
        [end(0, KILL, 5.0, signalled=True), end(1, KILL, 4.0, signalled=True)],
        {},
        1,
    ),
    "who raised first, by torch's record": (
        [end(0, code(1), 1.0), end(1, code(1), 2.0)],
        {0: recorded("A", 101), 1: recorded("B", 100)},
        1,
    ),
    "the same second says nothing": (
        [end(0, code(1), 1.0), end(1, code(1), 2.0)],
        {0: recorded("A", 100), 1: recorded("B", 100)},
        0,
    ),
    "one record alone says nothing": ([end(0, code(1), 1.0), end(1, code(1), 2.0)], {1: recorded("B", 1)}, 0),
    "a recorded victim": (
        [end(0, code(1), 1.0), end(1, code(1), 2.0)],
        {0: recorded("connection reset by peer", 99, victim=True), 1: recorded("B", 101)},
        1,
    ),
}


@pytest.mark.parametrize("ends, evidence, blamed", CASES.values(), ids=CASES.keys())
def test_names_the_culprit(ends: list[WorkerEnd], evidence: dict[int, Evidence], blamed: int) -> None:
    assert root_cause(ends, evidence).rank == blamed


def test_failures_are_ordered_by_time() -> None:
    ends = [end(0, 0, 0.5), end(1, code(1), 3.0), end(2, KILL, 1.0), end(3, 0, 2.0, hung=True), end(4, TERM, 1.0)]
    assert [one.rank for one in failures(ends)] == [2, 4, 3, 1]


def test_no_failure_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rank failed"):
        root_cause([end(0, 0, 1.0)], {})


@pytest.mark.parametrize(
    "words",
    [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55016.",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7913: Connection reset by peer",
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils:219, remote process exited or there was a network error",
        "c10::DistBackendError: [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE)",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. "
        "Did the remote server shutdown or crash?",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients joined.",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_words_of_a_victim(words: str) -> None:
    assert blames_a_peer(words)


@pytest.mark.parametrize(
    "words",
    [
        "ValueError: reason-4711",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed.",
        "c10::DistBackendError: NCCL communicator was aborted on rank 1. Original reason for failure was: "
        "CUDA error: an illegal memory access was encountered",
    ],
)
def test_words_of_a_culprit(words: str) -> None:
    assert not blames_a_peer(words)


statuses = st.sampled_from([0, code(1), code(9), TERM, KILL, ABRT, SEGV])
evidences = st.sampled_from([Evidence(), VICTIM, OWN, recorded("A", 100), recorded("B", 101), recorded("peer", 99, victim=True)])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[WorkerEnd], dict[int, Evidence]]:
    count = draw(st.integers(1, 6))
    ends = []
    for rank in range(count):
        hung = draw(st.booleans())
        ends.append(
            end(
                rank,
                draw(statuses),
                draw(st.sampled_from([0.0, 1.0, 1.5, 20.0])),
                signalled=hung or draw(st.booleans()),
                hung=hung,
            )
        )
    return ends, {rank: draw(evidences) for rank in range(count) if draw(st.booleans())}


@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_the_ends_does_not_matter(job: tuple[list[WorkerEnd], dict[int, Evidence]], shuffler: random.Random) -> None:
    ends, evidence = job
    if not failures(ends):
        return
    shuffled = list(ends)
    shuffler.shuffle(shuffled)
    assert root_cause(shuffled, evidence) == root_cause(ends, evidence)


@given(jobs())
def test_a_success_is_never_blamed(job: tuple[list[WorkerEnd], dict[int, Evidence]]) -> None:
    ends, evidence = job
    if any(one.failed for one in ends):
        assert root_cause(ends, evidence).failed


@given(jobs())
def test_a_stopped_rank_is_not_blamed_while_one_failed_by_itself_and_blames_nobody(
    job: tuple[list[WorkerEnd], dict[int, Evidence]],
) -> None:
    ends, evidence = job
    if any(one.failed and not one.signalled and not evidence.get(one.local_rank, Evidence()).victim for one in ends):
        blamed = root_cause(ends, evidence)
        assert not blamed.signalled
        assert not blamed.hung


@given(jobs())
def test_more_successes_change_nothing(job: tuple[list[WorkerEnd], dict[int, Evidence]]) -> None:
    ends, evidence = job
    if any(one.failed for one in ends):
        assert root_cause([*ends, end(90, 0, 0.0), end(91, 0, 50.0)], evidence) == root_cause(ends, evidence)
