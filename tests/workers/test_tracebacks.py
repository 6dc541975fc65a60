"""The exception is found in what real programs write when they end. Each case runs a real Python (or shell) program."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.workers.tracebacks import Found, last_exception, logged_errors

# program: (type, first line of the message, final, where the chain began)
PROGRAMS = {
    "plain": (
        "def f():\n    raise ValueError('reason-4711')\nf()",
        ("ValueError", "reason-4711", True, "ValueError: reason-4711"),
    ),
    "several lines": (
        "raise RuntimeError('first\\nsecond: x')",
        ("RuntimeError", "first\nsecond: x", True, "RuntimeError: first\nsecond: x"),
    ),
    "no message": ("raise AssertionError", ("AssertionError", "", True, "AssertionError: ")),
    "local class": (
        "def f():\n    class Odd(Exception): pass\n    raise Odd('boo')\nf()",
        ("f.<locals>.Odd", "boo", True, "f.<locals>.Odd: boo"),
    ),
    "during handling": (
        "try:\n    1/0\nexcept Exception:\n    raise KeyError('k')",
        ("KeyError", "'k'", True, "ZeroDivisionError: division by zero"),
    ),
    "direct cause": (
        "try:\n    raise ConnectionResetError(104, 'reset')\nexcept Exception as e:\n    raise SystemError('lost') from e",
        ("SystemError", "lost", True, "ConnectionResetError: [Errno 104] reset"),
    ),
    "group": (
        "raise ExceptionGroup('many', [ExceptionGroup('in', [TypeError('c')]), ValueError('a: b')])",
        ("ExceptionGroup", "many (2 sub-exceptions)", True, "TypeError: c"),
    ),
    "syntax error of the script": ("def f(:\n    pass", ("SyntaxError", "invalid syntax", True, "SyntaxError: invalid syntax")),
    "recursion": ("def f(): f()\nf()", ("RecursionError", "maximum recursion depth exceeded", True, None)),
    "missing module": ("import no_such_module", ("ModuleNotFoundError", "No module named 'no_such_module'", True, None)),
    "a thread before": (
        "import threading\nt = threading.Thread(target=lambda: 1/0); t.start(); t.join()\nraise KeyError('main')",
        ("KeyError", "'main'", True, None),
    ),
    "a thread after": (
        "import atexit, threading\ndef go():\n    t = threading.Thread(target=lambda: 1/0); t.start(); t.join()\n"
        "atexit.register(go)\nraise KeyError('main')",
        ("KeyError", "'main'", True, None),
    ),
    "a finalizer after": (
        "class A:\n    def __del__(self): raise ValueError('del')\na = A()\nraise KeyError('main')",
        ("KeyError", "'main'", True, None),
    ),
    "only a child process": (
        "import multiprocessing, os\np = multiprocessing.get_context('fork').Process(target=lambda: 1/0)\n"
        "p.start(); p.join()\nos._exit(3)",
        ("ZeroDivisionError", "division by zero", False, None),
    ),
    "handled long before": (
        "import logging, sys\ntry:\n    1/0\nexcept Exception:\n    logging.exception('handled')\n"
        "print('\\ngoing on', file=sys.stderr)",
        ("ZeroDivisionError", "division by zero", False, None),
    ),
    "faulthandler": (
        "import faulthandler, os, signal\nfaulthandler.enable()\nos.kill(os.getpid(), signal.SIGSEGV)",
        ("Fatal Python error", "Segmentation fault", True, None),
    ),
    "rich": (
        "import sys\nfrom rich.console import Console\nfrom rich.traceback import install\n"
        "install(console=Console(file=sys.stderr))\ndef f():\n    raise ValueError('boo')\nf()",
        ("ValueError", "boo", True, None),
    ),
}


def written_by(source: str, folder: Path) -> str:
    script = folder / "script.py"
    script.write_text(source)
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False).stderr


def found_in(text: str) -> Found:
    found = last_exception(text)
    assert found is not None, text
    return found


@pytest.mark.parametrize("source, expected", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("prefix", ["", "[rank3]: "], ids=["bare", "torch's prefix"])
def test_what_python_writes(source: str, expected: tuple[str, str, bool, str | None], prefix: str, tmp_path: Path) -> None:
    text = written_by(source, tmp_path)
    found = found_in("".join(f"{prefix}{line}" for line in ("starting up\n" + text).splitlines(keepends=True)))
    kind, message, final, origin = expected
    assert (found.raised.type, found.raised.message, found.raised.final) == (kind, message, final), text
    if origin is not None:
        assert found.origins[0] == origin


def test_the_whole_chain_is_kept(tmp_path: Path) -> None:
    text = written_by(PROGRAMS["during handling"][0], tmp_path)
    assert found_in(text).raised.traceback == text.rstrip()


def test_a_group_has_all_its_leaves(tmp_path: Path) -> None:
    assert found_in(written_by(PROGRAMS["group"][0], tmp_path)).origins == ("TypeError: c", "ValueError: a: b")


def test_two_tracebacks_in_a_row_are_no_chain() -> None:
    one = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: 1\n'
    found = found_in(one + "retrying\n" + one.replace("KeyError: 1", "ValueError: 2"))
    assert found.origins == ("ValueError: 2",)
    assert found.raised.traceback.count("Traceback") == 1


def test_a_tail_that_begins_in_the_middle_of_a_traceback(tmp_path: Path) -> None:
    text = written_by(PROGRAMS["plain"][0], tmp_path)
    found = found_in(text.split("\n", 1)[1])
    assert (found.raised.type, found.raised.message) == ("ValueError", "reason-4711")


def test_what_libstdcxx_writes() -> None:
    text = textwrap.dedent(
        """\
        [rank1]:[W1218 20:27:20.426415540 TCPStore.cpp:125] [c10d] recvValue failed
        [rank1]:[E1218 20:27:21.426415540 PGNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL
        terminate called after throwing an instance of 'c10::DistBackendError'
          what():  [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: NCCL error
        Last error: socket closed
        Exception raised from checkForNCCLErrorsInternal at ../ProcessGroupNCCL.cpp:1723 (most recent call first):
        frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f in libc10.so)

        """
    )
    raised = found_in(text).raised
    assert raised.type == "c10::DistBackendError"
    assert raised.message.startswith("[PG ID 0 Rank 1] Process group watchdog thread terminated")
    assert raised.message.endswith("Last error: socket closed")
    assert raised.final
    assert logged_errors(text) == ["[Rank 1] Watchdog caught collective operation timeout: WorkNCCL"]


def test_torchs_farewell_is_noise(tmp_path: Path) -> None:
    farewell = (
        "[rank0]:[W1129 17:20:43.114 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called\n"
        "/usr/lib/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked\n"
        "  warnings.warn('resource_tracker: There appear to be %d '\n"
    )
    raised = found_in(written_by(PROGRAMS["plain"][0], tmp_path) + farewell).raised
    assert raised.final
    assert raised.message == "reason-4711"


def test_a_program_that_says_nothing_of_the_kind() -> None:
    assert last_exception("") is None
    assert last_exception("epoch 1: loss 2.3\nAborted\n") is None


pieces = st.sampled_from(
    [
        "Traceback (most recent call last):",
        "  + Exception Group Traceback (most recent call last):",
        "  | ",
        "  +-+---------------- 1 ----------------",
        '  File "a.py", line 3, in f',
        '  File "a.py", line 3',
        "    f()",
        "ValueError: x",
        "SyntaxError: invalid syntax",
        "",
        "Exception in thread Thread-1 (g):",
        "During handling of the above exception, another exception occurred:",
        "terminate called after throwing an instance of 'E'",
        "Fatal Python error: Aborted",
        "╭─── Traceback (most recent call last) ───╮",
        "╰───╯",
        "[rank0]: ",
    ]
)


@given(st.lists(st.one_of(pieces, st.text(max_size=20)), max_size=25))
def test_any_text_is_survived(lines: list[str]) -> None:
    found = last_exception("\n".join(lines))
    if found is not None:
        assert found.raised.type
        assert found.origins
