"""What can be on a simulated world's agenda. The numbers are part of every trace digest."""

from typing import Final

MESSAGE: Final = 0
WAKE: Final = 1
DRAIN: Final = 2
START: Final = 3
FAULT: Final = 4
EVENT: Final = 5
GONE: Final = 6
EXIT: Final = 7
POWER: Final = 8
THAW: Final = 9
MEND: Final = 10
CALM: Final = 11
RETURN: Final = 12
CALL: Final = 13
"""Something of a world that is more than this one: a function and what it takes."""
