"""The failure report, word for word where people and programs look for words."""

import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.health.shm import ShmFigures
from hyperpodrun.agent.policy.blame import NO_EVIDENCE, Evidence, Raised, Recorded, WorkerEnd
from hyperpodrun.agent.workers.lines import Tail
from hyperpodrun.agent.workers.report import Circumstances, FailedRank, ending, exception_line, headline, hints, render

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in deep\nValueError: reason-4711'
RAISED = Evidence(raised=Raised("ValueError", "reason-4711", TRACEBACK))
GIB = 1 << 30


def failed(status: int, rank: int = 2, at_s: float = 112.4, evidence: Evidence = NO_EVIDENCE, **more: object) -> FailedRank:
    ended = {key: more.pop(key) for key in ("signalled", "hung", "sent", "unkillable") if key in more}
    end = WorkerEnd(rank % 8, rank, 4711 + rank, status, at_s, **ended)  # type: ignore[arg-type]
    return FailedRank(end=end, evidence=evidence, **more)  # type: ignore[arg-type]


def about(**more: object) -> Circumstances:
    known = {
        "host": "nodeA",
        "started_at_s": 100.0,
        "restart_count": 0,
        "next_step": "the job ends with exit code 5",
    }
    return Circumstances(**(known | more))  # type: ignore[arg-type]


def test_the_whole_report() -> None:
    root = failed(
        1 << 8,
        evidence=RAISED,
        tail=Tail(stderr=("loading data", *TRACEBACK.split("\n"))),
        log_files=("/logs/2/stdout.log", "/logs/2/stderr.log"),
    )
    other = failed(signal.SIGABRT, rank=0, at_s=112.7, signalled=True)
    assert render(root, [other], about(restart_count=1, next_step="restarting, 2 of 3 restarts left")) == (
        "first failure: rank 2 (local rank 2, pid 4713) on nodeA exited with code 1, 12 s after the start "
        "(restart 1): ValueError: reason-4711\n"
        "traceback of rank 2:\n"
        "  | Traceback (most recent call last):\n"
        '  |   File "train.py", line 3, in deep\n'
        "  | ValueError: reason-4711\n"
        "last line of rank 2's stderr, beside the traceback:\n"
        "  | loading data\n"
        "log files: /logs/2/stdout.log, /logs/2/stderr.log\n"
        "rank 0 aborted by SIGABRT (signal 6), 0.3 s later: a consequence, it was being stopped\n"
        "restarting, 2 of 3 restarts left"
    )


def test_the_shortest_report() -> None:
    assert render(failed(5 << 8), [], about()) == (
        "rank 2 (local rank 2, pid 4713) on nodeA exited with code 5, 12 s after the start\n"
        "rank 2 wrote nothing before it ended\n"
        "the job ends with exit code 5"
    )


@pytest.mark.parametrize(
    "status, words",
    [
        (5 << 8, "exited with code 5"),
        (signal.SIGKILL, "killed by SIGKILL (signal 9)"),
        (signal.SIGSEGV | 0x80, "killed by SIGSEGV (signal 11)"),
        (signal.SIGABRT, "aborted by SIGABRT (signal 6)"),
        (signal.SIGRTMIN + 3, f"killed by SIGRTMIN+3 (signal {signal.SIGRTMIN + 3})"),
    ],
)
def test_how_it_ended(status: int, words: str) -> None:
    assert ending(status) == words
    assert words in headline(failed(status), about())


def test_what_acceptance_looks_for() -> None:
    text = render(failed(5 << 8), [], about())
    assert re.search(r"(?i)\brank\W{0,14}2\b", text)
    assert re.search(r"(?i)exit\s*-?(ed|code|status)?\W{0,14}(with\W{1,4})?(code\W{1,4})?5\b", text)


def test_what_happens_next_comes_last() -> None:
    assert render(failed(5 << 8), [], about(next_step="trying another port")).split("\n")[-1] == "trying another port"


@pytest.mark.parametrize(
    "took_s, words", [(0.04, "0.0 s"), (1.26, "1.3 s"), (75, "75 s"), (150, "2 min 30 s"), (7300, "2 h 1 min")]
)
def test_when(took_s: float, words: str) -> None:
    assert f", {words} after the start" in headline(failed(9, at_s=100.0 + took_s), about())


def test_stdout_stands_in_for_an_empty_stderr() -> None:
    text = render(failed(5 << 8, tail=Tail(stdout=("step 1", "step 2"), stderr=("", " "))), [], about())
    assert "last 2 lines of rank 2's stdout:\n  | step 1\n  | step 2\n" in text


def test_fifty_lines_at_most_and_long_ones_cut() -> None:
    text = render(failed(5 << 8, tail=Tail(stderr=(*(f"line {n}" for n in range(60)), "x" * 5000))), [], about())
    assert "last 50 lines of" in text
    assert "line 10\n" not in text
    assert "line 11\n" in text
    assert f"| {'x' * 2000}… (3000 more characters)" in text


def test_a_traceback_is_not_shown_twice_behind_torchs_prefix() -> None:
    stderr = ("before", *(f"[rank2]: {line}" for line in TRACEBACK.split("\n")), "after")
    text = render(failed(1 << 8, evidence=RAISED, tail=Tail(stderr=stderr)), [], about())
    assert text.count("Traceback") == 1
    assert "  | before\n  | after\n" in text


def test_colours_are_taken_out() -> None:
    assert "\x1b" not in render(failed(5 << 8, tail=Tail(stderr=("\x1b[31mred\x1b[0m",))), [], about())


def test_the_error_file_speaks_first() -> None:
    evidence = Evidence(recorded=Recorded("KeyError: 'mine'", "Traceback …\nKeyError: 'mine'", 1), raised=RAISED.raised)
    text = render(failed(1 << 8, evidence=evidence), [], about())
    assert ": KeyError: 'mine'\n" in text
    assert "  | Traceback …\n  | KeyError: 'mine'\n" in text


def test_an_exception_is_not_blamed_for_a_sigkill() -> None:
    root = failed(signal.SIGKILL, evidence=RAISED, tail=Tail(stderr=tuple(TRACEBACK.split("\n"))))
    assert exception_line(root) == ""
    assert "traceback of" not in render(root, [], about())
    assert "  | ValueError: reason-4711" in render(root, [], about())


def test_an_exception_before_another_code_is_said_with_care() -> None:
    assert headline(failed(9 << 8, evidence=RAISED), about()).endswith(
        "; the last exception in its output is ValueError: reason-4711"
    )
    unsure = Evidence(raised=Raised("ValueError", "x", TRACEBACK, final=False))
    assert "ValueError" not in headline(failed(9 << 8, evidence=unsure), about())
    assert "ValueError" in headline(failed(1 << 8, evidence=unsure), about())


def test_the_other_ranks_in_a_line_each() -> None:
    others = [
        failed(1 << 8, rank=3, at_s=112.1, evidence=Evidence(victim=True)),
        failed(7 << 8, rank=1, at_s=113.4),
        failed(0, rank=5, at_s=110.0),
        failed(signal.SIGKILL, rank=4, at_s=120.0, hung=True, signalled=True),
        failed(1 << 8, rank=6, at_s=114.0, evidence=RAISED),
        failed(8 << 8, rank=7, at_s=112.41),
    ]
    lines = render(failed(9 << 8), others, about()).split("\n")
    assert [line for line in lines if re.match(r"rank \d (exited|killed)", line)] == [
        "rank 3 exited with code 1, seen 0.3 s earlier: a consequence, it lost its peer",
        "rank 7 exited with code 8, at the same time",
        "rank 1 exited with code 7, 1.0 s later",
        "rank 6 exited with code 1, 1.6 s later: ValueError: reason-4711",
        "rank 4 killed by SIGKILL (signal 9), 7.6 s later: it was hung",
    ]


def test_very_many_other_ranks_are_counted() -> None:
    text = render(failed(9 << 8), [failed(15, rank=r, at_s=113.0, signalled=True) for r in range(3, 128)], about())
    assert "and 109 more ranks ended after it" in text
    assert len(text.split("\n")) < 30


def test_a_hung_rank() -> None:
    root = failed(signal.SIGKILL, hung=True, signalled=True)
    text = render(root, [], about())
    assert "rank 2 (local rank 2, pid 4713) on nodeA was hung and had to be stopped (killed by SIGKILL (signal 9))" in text
    assert "hint" not in text


def test_a_rank_that_cannot_be_killed_is_not_said_to_have_been() -> None:
    stuck = failed(signal.SIGKILL, signalled=True, unkillable=True)
    assert "could not be killed: the kernel holds it" in headline(stuck, about())
    assert "rank 2 could not be killed" in render(failed(5 << 8, rank=1), [stuck], about())
    assert "killed by SIGKILL" not in render(failed(5 << 8, rank=1), [stuck], about())


def told(root: FailedRank, **more: object) -> str:
    return " / ".join(hints(root, about(**more)))


def test_an_oom_kill_is_named_only_when_the_counter_rose() -> None:
    killed = failed(signal.SIGKILL)
    assert "OOM killer struck in this cgroup once" in told(killed, oom_kills=1)
    assert "memory limit 4.0 GiB" in told(killed, oom_kills=2, memory_limit_bytes=4 * GIB)
    for count in (0, None):
        assert "OOM killer" not in told(killed, oom_kills=count)
        assert "this launcher sent no SIGKILL" in told(killed, oom_kills=count)
    assert "counter did not rise" in told(killed, oom_kills=0)
    assert "counter" not in told(killed, oom_kills=None)


def test_our_own_sigkill_needs_no_hint() -> None:
    assert told(failed(signal.SIGKILL, signalled=True), oom_kills=0) == ""


def test_a_bus_error_comes_with_the_figures_of_shared_memory() -> None:
    shm = ShmFigures(64 << 20, 63 << 20)
    assert "/dev/shm holds 63 MiB of 64 MiB" in told(failed(signal.SIGBUS), shm=shm)
    words = Tail(stderr=("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",))
    assert "/dev/shm holds" in told(failed(1 << 8, tail=words), shm=shm)
    assert "/dev/shm" not in told(failed(1 << 8), shm=shm)
    assert "/dev/shm" not in told(failed(signal.SIGBUS), shm=None)


@pytest.mark.parametrize(
    "root, words",
    [
        (failed(signal.SIGSEGV), "PYTHONFAULTHANDLER=1"),
        (failed(signal.SIGILL), "an instruction this CPU does not have"),
        (failed(signal.SIGABRT), "abort()"),
        (failed(signal.SIGTERM), "this launcher sent no SIGTERM"),
        (failed(127 << 8), "a command was not found (the program is train.sh)"),
        (failed(126 << 8), "cannot be executed (the program is train.sh)"),
        (failed(137 << 8), "killed by SIGKILL"),
        (failed(1 << 8, evidence=Evidence(victim=True)), "look at the other nodes' reports"),
    ],
)
def test_hints(root: FailedRank, words: str) -> None:
    assert words in told(root, program="train.sh")
    assert words not in told(failed(3 << 8), program="train.sh")


def test_no_advice_to_turn_on_what_has_spoken() -> None:
    fatal = Evidence(raised=Raised("Fatal Python error", "Segmentation fault", "Fatal Python error: Segmentation fault"))
    assert "PYTHONFAULTHANDLER" not in told(failed(signal.SIGSEGV, evidence=fatal))
    assert "Fatal Python error: Segmentation fault" in headline(failed(signal.SIGSEGV, evidence=fatal), about())


lines = st.lists(st.text(max_size=30), max_size=60).map(tuple)


@given(st.integers(0, 0xFFFF), lines, lines, st.text(max_size=50), st.text(max_size=200), st.booleans())
def test_any_output_gives_a_report_that_is_safe_to_print(
    status: int, stdout: tuple[str, ...], stderr: tuple[str, ...], message: str, traceback: str, signalled: bool
) -> None:
    evidence = Evidence(raised=Raised("E", message, traceback))
    root = failed(status, evidence=evidence, tail=Tail(stdout=stdout, stderr=stderr), signalled=signalled)
    text = render(root, [root], about())
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    assert "\n" not in headline(root, about())
