"""Evidence from error files, which belong to the user's program, and from the last output."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.policy.blame import Recorded
from hyperpodrun.agent.workers import evidence
from hyperpodrun.agent.workers.evidence import gather, read_error_file
from hyperpodrun.agent.workers.lines import Tail

UNCAUGHT = 1 << 8
LOST_PEER = (
    "Traceback (most recent call last):",
    '  File "train.py", line 10, in <module>',
    "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:55016.",
)


def error_file(folder: Path, content: object) -> str:
    path = folder / "error.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_form_with_details(tmp_path: Path) -> None:
    extra = {"py_callstack": "Traceback (most recent call last):\n  …\nValueError: x\n", "timestamp": "1700000000"}
    path = error_file(tmp_path, {"message": {"message": "ValueError: x", "extraInfo": extra, "errorCode": 1}})
    assert read_error_file(path) == Recorded(
        "ValueError: x", "Traceback (most recent call last):\n  …\nValueError: x", 1_700_000_000
    )


def test_the_form_with_text_only(tmp_path: Path) -> None:
    assert read_error_file(error_file(tmp_path, {"message": "out of luck"})) == Recorded("out of luck")


@pytest.mark.torch
def test_what_torchs_record_writes(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\ndef main(): raise ValueError('reason-4711')\nmain()"
    )
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TORCHELASTIC_ERROR_FILE": str(path)}, capture_output=True, check=False
    )
    recorded = read_error_file(str(path))
    assert recorded is not None
    assert recorded.text == "ValueError: reason-4711"
    assert recorded.traceback.endswith("ValueError: reason-4711")
    assert recorded.raised_at_unix_s is not None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "[]",
        "17",
        '{"message": null}',
        '{"message": {}}',
        '{"message": " "}',
        '{"other": 1}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_a_broken_file_says_nothing(content: str, tmp_path: Path) -> None:
    assert read_error_file(error_file(tmp_path, content)) is None


@pytest.mark.parametrize("stamp", ["soon", "", "1e999", "nan", None, [], True, -3])
def test_a_broken_timestamp_is_left_out(stamp: object, tmp_path: Path) -> None:
    content = {"message": {"message": "E", "extraInfo": {"timestamp": stamp}}}
    assert read_error_file(error_file(tmp_path, content)) == Recorded("E")


def test_no_file(tmp_path: Path) -> None:
    assert read_error_file(str(tmp_path / "missing")) is None
    assert read_error_file(str(tmp_path)) is None
    assert read_error_file("a\0b") is None


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    assert read_error_file(str(tmp_path / "error.json")) is None


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "ERROR_FILE_LIMIT_BYTES", 1000)
    assert read_error_file(error_file(tmp_path, {"message": "x" * 900})) is not None
    assert read_error_file(error_file(tmp_path, {"message": "x" * 1000})) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_survived(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(raw)
    read_error_file(str(path))


def test_colours_and_control_characters_are_taken_out(tmp_path: Path) -> None:
    assert read_error_file(error_file(tmp_path, {"message": "\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07alert"})) == Recorded(
        "red alert"
    )
    found = gather(
        None,
        Tail(stderr=("Traceback (most recent call last):", '  File "a.py", line 1', "\x1b[1mValueError\x1b[0m: x")),
        UNCAUGHT,
    )
    assert found.raised is not None
    assert found.raised.type == "ValueError"


def test_a_lost_peer_makes_a_victim() -> None:
    assert gather(None, Tail(stderr=LOST_PEER), UNCAUGHT).victim


def test_torchs_prefix_is_seen_through() -> None:
    assert gather(None, Tail(stderr=tuple(f"[rank3]: {line}" for line in LOST_PEER)), UNCAUGHT).victim


def test_a_lost_peer_met_while_failing_makes_no_victim() -> None:
    chain = (
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "ValueError: bad batch",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *LOST_PEER,
    )
    assert not gather(None, Tail(stderr=chain), UNCAUGHT).victim


@pytest.mark.parametrize("other, victim", [("BrokenPipeError: [Errno 32] Broken pipe", True), ("ValueError: bad batch", False)])
def test_a_group_is_a_victims_only_when_all_of_it_is(other: str, victim: bool) -> None:
    group = (
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "train.py", line 3, in <module>',
        "  | ExceptionGroup: many (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------",
        "    | ConnectionResetError: [Errno 104] Connection reset by peer",
        "    +---------------- 2 ----------------",
        f"    | {other}",
        "    +------------------------------------",
    )
    assert gather(None, Tail(stderr=group), UNCAUGHT).victim is victim


def test_a_lost_peer_that_was_survived_makes_no_victim() -> None:
    assert not gather(None, Tail(stderr=(*LOST_PEER, "", "retrying", "")), 9 << 8).victim


def test_the_error_file_beats_the_output(tmp_path: Path) -> None:
    path = error_file(tmp_path, {"message": {"message": "ValueError: mine", "extraInfo": {}}})
    found = gather(path, Tail(stderr=LOST_PEER), UNCAUGHT)
    assert not found.victim
    assert found.recorded == Recorded("ValueError: mine")


def test_a_recorded_chain_is_judged_by_its_beginning(tmp_path: Path) -> None:
    stack = "\n".join(
        [
            *LOST_PEER,
            "",
            "The above exception was the direct cause of the following exception:",
            "",
            "Traceback (most recent call last):",
            '  File "t.py", line 2, in f',
            "TrainingError: stopped",
        ]
    )
    path = error_file(tmp_path, {"message": {"message": "TrainingError: stopped", "extraInfo": {"py_callstack": stack}}})
    assert gather(path, Tail(), UNCAUGHT).victim


def test_an_abort_is_judged_by_torchs_log() -> None:
    line = "[rank1]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: W"
    assert gather(None, Tail(stderr=(line, "Aborted")), signal.SIGABRT).victim
    assert not gather(None, Tail(stderr=(line, "Aborted")), 3 << 8).victim
    assert not gather(None, Tail(stderr=("Aborted",)), signal.SIGABRT).victim


def test_sigpipe_makes_a_victim() -> None:
    assert gather(None, Tail(), signal.SIGPIPE).victim


def test_nothing_known_is_no_victim() -> None:
    found = gather(None, Tail(), signal.SIGKILL)
    assert (found.recorded, found.raised, found.victim) == (None, None, False)
