"""Refusals: the one way in which the command line says no.

A refusal is one sentence for a person (what was given, what it means, what to do) and an exit code. Nothing else leaves the
parsing code: no traceback, no SystemExit.
"""

from collections.abc import Iterable

from hyperpodrun.agent.wire import exit_codes


class Refusal(Exception):
    """The job is not started. `code` is the exit code, the text the sentence."""

    def __init__(self, sentence: str, code: int = exit_codes.USAGE) -> None:
        super().__init__(sentence)
        self.code = code


class MachineRefusal(Refusal):
    """The command line is right, but this machine or its set-up cannot run the job (exit 78)."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, exit_codes.CONFIG)


def printable(text: str) -> str:
    """The text with control characters and undecodable bytes escaped, so that any terminal or file can take it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python carries a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def quoted(text: str) -> str:
    """A user's text as shown in a sentence: quoted, printable, cut when it is very long."""
    shown = printable(text)
    return f"'{shown}'" if len(shown) <= 200 else f"'{shown[:197]}...'"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant by `word` (neither with leading dashes), or None."""
    import difflib

    names = list(known)
    begun = [name for name in names if word and name.startswith(word)]
    if begun:
        return min(begun, key=len)
    close = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.6)
    return close[0] if close else None
