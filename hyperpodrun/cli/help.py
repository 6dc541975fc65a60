"""`hyperpodrun --help`: the table of options for reading, in groups.

rich lays it out: at the terminal's width with bold and dim text, and as plain text of 80 columns when piped.
"""

import io
import os
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hyperpodrun.cli.options import GROUPS, OPTIONS, Option

NAME_COLUMNS = 27
SMALLEST_COLUMNS = 50
LARGEST_COLUMNS = 110

SYNOPSIS = (
    "hyperpodrun [options] script.py [script args]",
    "hyperpodrun [options] -m package.module [args]",
    "hyperpodrun [options] --no-python ./program [args]",
)
INTRODUCTION = (
    "Starts the workers of a distributed PyTorch job on this node, supervises them, and starts them again after a fault. "
    "Everything after the script belongs to the script."
)
FOOTNOTE = (
    "Each option is also the variable HYPERPODRUN_<NAME> or PET_<NAME>, such as PET_NPROC_PER_NODE=4; an option beats a "
    "variable. Dashes and underscores in names are the same. Times are in seconds. Options marked * are checked now and take "
    "effect with a later release, or ask for something that this launcher does not need; it says so when they are given."
)


def help_text(stream: TextIO | None) -> str:
    """The help as it suits that stream (None: it is closed): escape codes only for a terminal."""
    terminal = stream is not None and stream.isatty()
    sink = io.StringIO()
    console = Console(
        file=sink, force_terminal=terminal, width=_columns(stream, terminal), highlight=False, emoji=False, markup=False
    )
    console.print(Text("Usage", style="bold"))
    for line in SYNOPSIS:
        console.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2)))
    console.print()
    console.print(Text(INTRODUCTION))
    for group in GROUPS:
        console.print()
        console.print(Text(group, style="bold"))
        for option in OPTIONS:
            if option.group == group:
                console.print(_entry(option))
    console.print()
    console.print(Text(FOOTNOTE))
    return "\n".join(line.rstrip() for line in sink.getvalue().split("\n"))


def _columns(stream: TextIO | None, terminal: bool) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and len(columns) < 5:
        width = int(columns)
    elif stream is not None and terminal:
        try:
            width = os.get_terminal_size(stream.fileno()).columns
        except (OSError, ValueError):
            width = 80
    else:
        width = 80
    return max(SMALLEST_COLUMNS, min(width or 80, LARGEST_COLUMNS))


def names_of(option: Option) -> str:
    """Its forms and what stands for its value: `-t, --tee 0-3|RANK:0-3,...`."""
    forms = f"{option.short}, {option.flag}" if option.short else option.flag
    return f"{forms} {option.kind.metavar}".rstrip()


def default_of(option: Option) -> str:
    """What holds when the option is not given, in words; empty for switches and where it goes without saying."""
    return "" if option.is_switch else option.default or option.unset


def _entry(option: Option) -> RenderableType:
    text = Text(option.help)
    if default_of(option):
        text.append(f" [default: {default_of(option)}]", style="dim")
    if option.note:
        text.append(" *", style="dim")
    name = names_of(option)
    fits = len(name) <= NAME_COLUMNS
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=NAME_COLUMNS, no_wrap=True)
    row.add_column()
    row.add_row(Text(name if fits else "", style="cyan"), text)
    indented = Padding(row, (0, 0, 0, 2))
    return indented if fits else Group(Padding(Text(name, style="cyan", overflow="fold"), (0, 0, 0, 2)), indented)
