"""Where the time of a recovery goes, and its picture (SVG, no library).

Phases of a restart in place, in the order in which they come, from the trace that HPWrapper writes:

- seen: fault -> the first rank says so (its own exception) or is told; for a kill the kernel's word to the agent lies in here;
- told: -> the last living rank has the order to leave, or has failed itself;
- stopped: -> the last one waits at the barrier;
- decided: -> the first one enters the next generation: the agents' verdict, a new store;
- restarted: -> all have entered (a process that is new: forked, started) and the all-reduce is done on all.

Restarts by process have no such trace: "ended" is until the first new process runs, then "restarted".
"""

import statistics
from typing import Any
from xml.sax.saxutils import escape

IN_PLACE = ("seen", "told", "stopped", "decided", "restarted")
BY_PROCESS = ("ended", "restarted")
COLOURS = {"seen": "#4e79a7", "told": "#76b7b2", "stopped": "#f28e2b", "decided": "#e15759", "restarted": "#59a14f"}
COLOURS["ended"] = "#9c755f"

Phases = dict[str, dict[str, dict[str, float]]]  # kind -> contestant -> phase -> median, s


def phases(measured: dict[str, dict[str, list[Any]]]) -> Phases:
    """Medians of each phase, where they are known."""
    found: Phases = {}
    for kind, by in measured.items():
        for name, samples in by.items():
            split = [parts for sample in samples if (parts := _split(sample, name))]
            if split:
                names = [phase for phase in (*IN_PLACE[:-1], *BY_PROCESS) if phase in split[0]]
                medians = {phase: statistics.median(parts[phase] for parts in split if phase in parts) for phase in names}
                found.setdefault(kind, {})[name] = medians
    return found


def _split(sample: Any, name: str) -> dict[str, float] | None:
    struck_s, again_s = sample.struck_s, sample.again_s
    inside = [line for line in sample.trace if struck_s <= line["at_s"] <= again_s]
    marks: dict[str, float] = {}
    if name == "in place":
        heard = [line["at_s"] for line in inside if line["stage"] in ("fault", "told")]
        back = [line["at_s"] for line in inside if line["stage"] == "waiting"]
        entered = [line["at_s"] for line in inside if line["stage"] == "function"]
        if not heard or not back or not entered:
            return None
        marks = {"seen": min(heard), "told": max(heard), "stopped": max(back), "decided": min(entered), "restarted": again_s}
    elif sample.born_s is not None:
        marks = {"ended": sample.born_s, "restarted": again_s}
    before_s, parts = struck_s, {}
    for phase, at_s in marks.items():
        parts[phase] = max(0.0, at_s - before_s)
        before_s = max(before_s, at_s)
    return parts or None


def show(found: Phases) -> None:
    """The table people read."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Where the time goes, ms", caption="medians")
    table.add_column("fault")
    table.add_column("restart")
    for phase in (*IN_PLACE[:-1], *BY_PROCESS):
        table.add_column(phase, justify="right")
    for kind, by in found.items():
        for name, parts in by.items():
            cells = (f"{1000 * parts[phase]:.1f}" if phase in parts else "" for phase in (*IN_PLACE[:-1], *BY_PROCESS))
            table.add_row(kind, name, *cells)
    Console(width=160).print(table)


# --- the picture

LEFT, WIDTH, BAR, GAP = 330, 620, 14, 5


def draw(figures: dict[str, dict[str, list[float]]], found: Phases) -> str:
    """Above: the phases of our restarts in place. Below: everybody, on a scale of its own. Both are linear, in seconds."""
    ours = [(kind, "in place", by["in place"]) for kind, by in found.items() if "in place" in by]
    all_rows = [
        (kind, name, found.get(kind, {}).get(name) or {"": statistics.median(values)})
        for kind, by in figures.items()
        for name, values in by.items()
    ]
    body: list[str] = []
    y = _panel(body, 10, "In place: fault -> next all-reduce on all ranks", [row for row in ours if sum(row[2].values()) < 1.0])
    y = _panel(body, y + 20, "The same beside process restarts and peers (medians)", all_rows)
    x = LEFT
    for phase, colour in COLOURS.items():
        body.append(f'<rect x="{x}" y="{y + 6}" width="12" height="12" fill="{colour}"/>{_text(x + 16, y + 16, phase)}')
        x += 90
    height = y + 30
    size = f'width="{LEFT + WIDTH + 90}" height="{height}"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([start, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>"]) + "\n"


def _panel(body: list[str], y: int, title: str, rows: list[tuple[str, str, dict[str, float]]]) -> int:
    body.append(f'<text x="10" y="{y + 14}" font-weight="bold">{escape(title)}</text>')
    y += 24
    most_s = max((sum(parts.values()) for *_, parts in rows), default=0.0) or 1.0
    last = ""
    for kind, name, parts in rows:
        if kind != last and last:
            y += GAP
        body.append(_text(10, y + BAR - 3, kind if kind != last else "") + _text(200, y + BAR - 3, name))
        last, x = kind, float(LEFT)
        for phase, value_s in parts.items():
            width, colour = WIDTH * value_s / most_s, COLOURS.get(phase, "#bab0ac")
            tip = f"<title>{escape(phase or 'total')}: {value_s:.3f} s</title>"
            size = f'width="{max(width, 0.3):.1f}" height="{BAR}"'
            body.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{colour}">{tip}</rect>')
            x += width
        total_s = sum(parts.values())
        body.append(_text(x + 6, y + BAR - 3, f"{total_s:.3f} s" if total_s < 1 else f"{total_s:.1f} s"))
        y += BAR + GAP
    return y


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(words)}</text>'
