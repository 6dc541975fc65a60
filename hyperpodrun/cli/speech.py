"""What the commands say: results on stdout, refusals on stderr, and neither ever ends in a traceback."""

import os
import sys

from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.cli.refusal import MachineRefusal, Refusal


def refuse(program: str, refusal: Refusal) -> int:
    """Print the sentence on stderr; the exit code."""
    remark(program, str(refusal))  # where nobody is left to tell, the exit code still says it
    return refusal.code


def remark(program: str, sentence: str) -> None:
    """Print the sentence on stderr."""
    if sys.stderr is None:  # its descriptor was closed when the program started
        return
    try:
        sys.stderr.write(f"{program}: {sentence}\n")
        sys.stderr.flush()
    except OSError:
        pass


def show(program: str, text: str) -> int:
    """Print on stdout; the exit code. A reader that has gone away (`| head`) is no error."""
    if sys.stdout is None:
        return exit_codes.SUCCESS
    data = text.encode(sys.stdout.encoding or "utf-8", "backslashreplace")
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _forget_stdout()
    except OSError as error:
        _forget_stdout()
        return refuse(program, MachineRefusal(f"the output cannot be written: {error.strerror}"))
    return exit_codes.SUCCESS


def _forget_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter does not complain about it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
