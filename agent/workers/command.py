"""The command line of a worker: which interpreter, with which of its options, in front of which program.

The interpreter's options are those the launcher itself was started with (`python -X dev -W error -m hyperpodrun ...`), read
from the command line as typed: sys.warnoptions also holds what PYTHONWARNINGS says, and the worker would get that twice.
Source: CPython Python/getopt.c (SHORT_OPTS), POSIX exit codes 126 and 127.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from hyperpodrun.agent.wire.launch import Program

_WITH_VALUE = frozenset("WX")
# How the launcher finds its own modules is not how the training script finds its: distributions put -s, -P, -E or -I in the
# first line of installed commands. The others left out only make sense for the launcher itself.
_LAUNCHERS_OWN = frozenset("IEsSPixuchmV?")
_RUN_PATH = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def interpreter_flags(orig_argv: Sequence[str]) -> list[str]:
    """The interpreter options of this launcher's command line that its workers get too, "-u" at the end."""
    flags: list[str] = []
    words = iter(orig_argv[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            flags += [word, next(words, "")]
            continue
        if not word.startswith("-") or word in ("-", "--"):
            break
        for place, letter in enumerate(word[1:], 2):
            if letter in _WITH_VALUE:
                flags.append(f"-{letter}{word[place:] or next(words, '')}")
                break
            if letter in "cm":
                return [*flags, "-u"]
            if letter not in _LAUNCHERS_OWN:
                flags.append(f"-{letter}")
    return [*flags, "-u"]


def command(program: Program, python: str, flags: Sequence[str], args: Sequence[bytes]) -> list[bytes]:
    """The whole command line of one worker."""
    match program.run_as:
        case "program":
            words = [program.target]
        case "module":
            words = [python, *flags, "-m", program.target]
        case "run-path":
            words = [python, *flags, "-c", _RUN_PATH, program.target]
        case _:
            words = [python, *flags, program.target]
    return [*map(os.fsencode, words), *args]


class NotExecutable(Exception):
    """The program cannot be run; str() is the sentence, `code` the exit code of a shell (126, 127)."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def find_program(name: bytes, env: Mapping[bytes, bytes]) -> bytes:
    """The file that execvp(3) would run. Raises NotExecutable."""
    if b"/" in name:
        places = [name]
    else:
        path = env.get(b"PATH") or os.fsencode(os.defpath)
        places = [os.path.join(folder or b".", name) for folder in path.split(b":")]
    there = [place for place in places if os.path.exists(place)]
    for place in there:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return place
    shown = os.fsdecode(name)
    if there:
        what = "is a folder" if os.path.isdir(there[0]) else "is not executable (chmod +x)"
        raise NotExecutable(f"the program {shown!r} cannot be run: {os.fsdecode(there[0])} {what}", 126)
    where = "" if b"/" in name else " in any folder of PATH"
    raise NotExecutable(f"the program {shown!r} cannot be run: there is no such file{where}", 127)


def wants_own_interpreter(flags: Sequence[str], env: Mapping[bytes, bytes]) -> str:
    """Why forked workers would not behave like `python script.py` here, as half a sentence; "" when they would."""
    if env.get(b"COVERAGE_PROCESS_START") or env.get(b"COVERAGE_PROCESS_CONFIG"):
        return "coverage measures each interpreter from its start"
    if "-v" in flags or env.get(b"PYTHONVERBOSE"):
        return "-v shows the imports of each interpreter"
    if any(flag.startswith("-Ximporttime") for flag in flags) or env.get(b"PYTHONPROFILEIMPORTTIME"):
        return "-X importtime shows the imports of each interpreter"
    return ""


def same_interpreter(python: str) -> bool:
    """True when workers run under the interpreter of this very process."""
    return python in ("", sys.executable)
