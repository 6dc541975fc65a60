"""Finds the exception that ended a program in the last part of what it wrote to stderr.

Four shapes are known, all from their writers' own code:

- Python's traceback (`traceback` module): a header, indented frames, `Type: message`, the message perhaps of several lines;
  chains joined by "During handling of …" or "The above exception was …"; "Exception Group Traceback" with its "| " margin; a
  SyntaxError of the script itself, which has no header; `rich`'s box around the frames. torch sets "[rank3]: " before each line.
- C++: "terminate called after throwing an instance of 'T'" and "  what():  message" (libstdc++, vterminate.cc).
- "Fatal Python error: Segmentation fault" and thread stacks (faulthandler.c).
- "Exception in thread …", "Exception ignored in …", "Process Worker-1:" announce a traceback that does not end the process.

A tail may begin in the middle of a traceback: frames at its very start count as one without its header.

Pure: text (without colours) in, `Found` out. The last shape in the text counts, but one that ends the process before others.
"""

import re
from collections.abc import Iterator

import msgspec

from hyperpodrun.agent.policy.blame import Raised

MESSAGE_LINES = 40

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
_HEADER = re.compile(r"(?:╭─+ )?Traceback \(most recent call last\)|  \+ Exception Group Traceback \(most recent call last\):")
_LONE_FRAME = re.compile(r'  File "[^"]+", line \d+$')
_FRAME = re.compile(r'  File "[^"]+", line \d+, in ')
_ENDING = re.compile(r"([A-Za-z_][\w.<>]{0,200})(?::(?: (.*)|$)|$)")
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): ")
_TERMINATE = re.compile(r"terminate called after throwing an instance of '([^']+)'")
_FATAL = re.compile(r"Fatal Python error: (.*)")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ELSEWHERE = re.compile(r"Exception in (?:thread |atexit)|Exception ignored |Process \S+:$|Error in (?:atexit|sys\.excepthook)")
# glog's lines, written by torch's own logger: [rank0]:[W1129 17:20:43.123456789 ProcessGroupNCCL.cpp:629] text
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[([WEIF])\d{4} [\d:.]+ [^\]]*\] ?(.*)")
_NOISE = re.compile(r"\s*$|frame #\d+|Exception raised from |\S+: UserWarning: resource_tracker|  warnings\.warn\(")
_OF_A_FATAL_ERROR = re.compile(r"$| |Current thread |Thread 0x|Extension modules|Python runtime state")
_MARGIN = re.compile(r"[ |]*(?:\+-.*|\| ?)")
_GROUP_SIZE = re.compile(r"\(\d+ sub-exceptions?\)$")


class Found(msgspec.Struct, frozen=True):
    """`origins`: where the chain of exceptions began, one "Type: message" for each (several in an exception group)."""

    raised: Raised
    origins: tuple[str, ...]


class _Block(msgspec.Struct):
    """One shape in the text: lines `start` to `end` (exclusive), the end of the frames at `ending`."""

    start: int
    ending: int
    end: int
    type: str
    message: str
    final: bool
    elsewhere: bool = False
    chained: bool = False
    leaves: tuple[str, ...] = ()


def last_exception(text: str) -> Found | None:
    """The exception to which the text's end belongs, as far as the text tells; None when it shows none."""
    lines = [_without_rank(line) for line in text.split("\n")]
    blocks = list(_blocks(lines))
    own = [block for block in blocks if not block.elsewhere] or blocks
    if not own:
        return None
    last = own[-1]
    first = last
    for block in reversed(blocks[: blocks.index(last)]):
        if not first.chained:
            break
        first = block
    raised = Raised(
        type=last.type,
        message=last.message,
        traceback="\n".join(lines[first.start : last.end]).rstrip(),
        final=last.final and not last.elsewhere,
    )
    return Found(raised, first.leaves or (f"{first.type}: {first.message}",))


def logged_errors(text: str) -> list[str]:
    """The messages of torch's own logger at level ERROR or FATAL, oldest first."""
    found = (_GLOG.match(line) for line in text.split("\n"))
    return [match.group(2) for match in found if match and match.group(1) in "EF"]


def _without_rank(line: str) -> str:
    return _RANK_PREFIX.sub("", line, count=1) if line.startswith("[rank") and not _GLOG.match(line) else line


def _blocks(lines: list[str]) -> Iterator[_Block]:
    at = 0
    chained = False
    while at < len(lines):
        block = _block_at(lines, at)
        if block is None:
            chained = chained or lines[at].strip(" |") in _CHAINED
            at += 1
            continue
        block.chained, chained = chained, False
        block.elsewhere = at > 0 and _ELSEWHERE.match(lines[at - 1]) is not None
        yield block
        at = block.end


def _block_at(lines: list[str], at: int) -> _Block | None:
    line = lines[at]
    if match := _HEADER.match(line):
        return _group(lines, at) if "Group" in match.group() else _python(lines, at, boxed=line.startswith("╭"))
    if _LONE_FRAME.match(line) and (block := _syntax_error(lines, at)):
        return block
    if at == 0 and line.startswith("  ") and any(_FRAME.match(line) for line in lines[:8]):
        return _python(lines, -1, boxed=False)
    if match := _TERMINATE.match(line):
        return _terminate(lines, at, match.group(1))
    if match := _FATAL.match(line):
        final = all(_OF_A_FATAL_ERROR.match(line) for line in lines[at + 1 :])
        end = len(lines) if final else _next_start(lines, at + 1)
        return _Block(at, at, end, "Fatal Python error", match.group(1), final)
    return None


def _python(lines: list[str], at: int, *, boxed: bool) -> _Block | None:
    ending = at + 1
    while ending < len(lines) and lines[ending].startswith(("│", "╰") if boxed else (" ", "\t")):
        ending += 1
    if ending == len(lines) or not (match := _ENDING.match(lines[ending])):
        return None
    return _with_message(lines, at, ending, match)


def _syntax_error(lines: list[str], at: int) -> _Block | None:
    for ending in range(at + 1, min(at + 5, len(lines))):
        if _SYNTAX.match(lines[ending]) and (match := _ENDING.match(lines[ending])):
            return _with_message(lines, at, ending, match)
        if not lines[ending].startswith(" "):
            return None
    return None


def _with_message(lines: list[str], at: int, ending: int, match: re.Match[str]) -> _Block:
    """A message has no end mark: it goes on to the next blank line, structure or runtime noise."""
    end = _next_start(lines, ending + 1)
    stop = ending + 1
    while stop < end and not _NOISE.match(lines[stop]) and not _GLOG.match(lines[stop]) and stop - ending <= MESSAGE_LINES:
        stop += 1
    first = match.group(2) or ""
    message = "\n".join([first, *lines[ending + 1 : stop]]).strip()
    return _Block(max(at, 0), ending, stop, match.group(1), message, _only_noise(lines, stop))


def _group(lines: list[str], at: int) -> _Block | None:
    end = at + 1
    while end < len(lines) and lines[end].lstrip().startswith(("|", "+-")):
        end += 1
    inside = [_MARGIN.sub("", line) for line in lines[at + 1 : end]]
    endings = [(i, match) for i, line in enumerate(inside) if (match := _ENDING.match(line))]
    if not endings:
        return None
    top = endings[0][1]
    leaves = tuple(inside[i] for i, match in endings if not _GROUP_SIZE.search(match.group(2) or ""))
    return _Block(at, end - 1, end, top.group(1), top.group(2) or "", _only_noise(lines, end), leaves=leaves)


def _terminate(lines: list[str], at: int, kind: str) -> _Block:
    end = _next_start(lines, at + 1)
    stop = at + 1
    while stop < end and not _NOISE.match(lines[stop]) and not _GLOG.match(lines[stop]) and stop - at <= MESSAGE_LINES:
        stop += 1
    message = re.sub(r"^\s*what\(\):\s*", "", "\n".join(lines[at + 1 : stop])).strip()
    return _Block(at, at, stop, kind, message, _only_noise(lines, stop))


def _next_start(lines: list[str], at: int) -> int:
    while at < len(lines):
        line = lines[at]
        if _HEADER.match(line) or _TERMINATE.match(line) or _FATAL.match(line) or _ELSEWHERE.match(line) or line in _CHAINED:
            break
        at += 1
    return at


def _only_noise(lines: list[str], at: int) -> bool:
    """Is all that follows the runtime's own farewell? A traceback of another thread or child is no sign of life either."""
    while at < len(lines):
        line = lines[at]
        if _ELSEWHERE.match(line):
            at += 1
            block = _block_at(lines, at) if at < len(lines) else None
            at = block.end if block is not None else at
        elif _NOISE.match(line) or _GLOG.match(line):
            at += 1
        else:
            return False
    return True
