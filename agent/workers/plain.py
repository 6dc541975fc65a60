"""A worker's text without what a terminal would act on: it is shown inside the launcher's own messages.

Pure. Sources: ECMA-48 (CSI, OSC), and the C0, DEL and C1 control characters of Unicode; tabs stay.
"""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def plain(line: str) -> str:
    """One line without colours and control characters; of a line redrawn with carriage returns, its last state."""
    return _CONTROLS.sub("", _ESCAPES.sub("", line).rstrip("\r").rpartition("\r")[2])


def plain_text(text: str) -> str:
    """The same for several lines, which only newlines divide."""
    return "\n".join(plain(line) for line in text.split("\n"))
