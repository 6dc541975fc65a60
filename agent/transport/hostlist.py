"""Slurm's short form of host names: `gpu-[001-003,007],login1`, `ip-10-1-[2-3]-[15,99]`. Pure.

    list   = item {"," item}                 commas inside brackets belong to the brackets
    item   = {text | "[" range {"," range} "]"}    several brackets: cross product, the last one fastest
    range  = number ["-" number]             as wide as the first number is written: 08-11 is 08 09 10 11

Source: hostlist(3) of Slurm, `scontrol show hostnames`.
"""

import itertools

MOST_HOSTS = 1 << 16


class HostlistError(ValueError):
    """The text is no host list; its own text is the reason."""


def expand(text: str) -> list[str]:
    """All hosts, in order, as often as they are named. Raises HostlistError."""
    hosts: list[str] = []
    for item in _split(text):
        pieces = _pieces(item)
        count = 1
        for piece in pieces:
            count *= len(piece)
        if len(hosts) + count > MOST_HOSTS:
            raise HostlistError(f"it names more than {MOST_HOSTS} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*pieces)]
    return hosts


def _split(text: str) -> list[str]:
    items: list[str] = []
    begin, inside = 0, False
    for at, character in enumerate(text):
        if character == "[":
            if inside:
                raise HostlistError("a bracket opens within brackets")
            inside = True
        elif character == "]":
            if not inside:
                raise HostlistError("a bracket closes that was never opened")
            inside = False
        elif character == "," and not inside:
            items.append(text[begin:at])
            begin = at + 1
    if inside:
        raise HostlistError("a bracket is never closed")
    items.append(text[begin:])
    if not all(items):
        raise HostlistError("a host is missing")
    return items


def _pieces(item: str) -> list[list[str]]:
    """The item as a sequence of alternatives."""
    pieces: list[list[str]] = []
    for part in item.replace("]", "[").split("["):
        bracketed = len(pieces) % 2 == 1
        if not bracketed and not (part.isascii() and all(c.isalnum() or c in "-._" for c in part)):
            raise HostlistError(f"{part[:100]!r} is no part of a host name")
        pieces.append(_ranges(part) if bracketed else [part])
    return pieces


def _ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(n.isascii() and n.isdigit() and len(n) <= 18 for n in (first, last)) or int(first) > int(last):
            raise HostlistError(f"{part[:100]!r} is no range of numbers")
        if int(last) - int(first) >= MOST_HOSTS or len(numbers) > MOST_HOSTS:
            raise HostlistError(f"it names more than {MOST_HOSTS} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
