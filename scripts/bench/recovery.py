"""How long a job stands still after a fault: fault -> next all-reduce done on all ranks, this launcher and its peers in turn.

    .venv/bin/python scripts/bench/recovery.py [--quick] [--only KIND;KIND] [--peers DIR] [--json FILE] [--svg FILE]

Four workers all-reduce over gloo without pause; in the middle of it something strikes one of them, one fault after another in the same
job. Who is not back within GIVE_UP_S has not come back, and goes on with the other kinds in a job of its own.

- in place: hyperpodrun --inprocess-restart; by process: without it;
- torchrun; ft_launcher and the in-process Wrapper of NVIDIA's nvidia-resiliency-ext, this one with its defaults and tuned, its
  workers started bare. It cannot break a gloo collective, so its abort is helped: gloo's sockets are shut down as ours are,
  without which it does not come back at all. What it loses to a kill it goes on without.

NVIDIA's package is installed into --peers DIR (a virtual environment, made if it is not there; without the option a temporary one);
where it cannot be had, that is said and the rest is measured. Hangs are given HANG_S: --hang-timeout here, the collectives' own
timeout for torchrun and ft_launcher, which are told to wait as long for a worker that ignores SIGTERM (30 s by default), the soft
timeout of NVIDIA's wrapper, and a second more as its hard one. --quick: each kind once, of others than our restarts in place
only the first two.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import recovery_picture
from recovery_job import (
    BY_PROCESS,
    GIVE_UP_S,
    HANG_S,
    HANGS,
    IN_PLACE,
    KINDS,
    NODE,
    OUTSIDE,
    PLAIN,
    REPORTED,
    Contestant,
    Sample,
    measure,
    nvidia,
)  # fmt: skip
from side_by_side import BenchmarkError, Samples, as_json, options, spread

FAULTS = {"exception": 3, "SIGKILL": 3, "os._exit": 2, REPORTED: 3}
"""Of a kind in one job; of others one."""
GOALS_S = {"exception": 0.25, "SIGKILL": 0.6, REPORTED: 0.3}
AHEAD = 3.0
"""How far ahead of the best peer."""

Measured = dict[str, dict[str, list[Sample]]]  # kind -> contestant -> one a fault
Lost = set[tuple[str, str]]  # kind, contestant: not back within GIVE_UP_S
Troubles = list[str]


def jobs(who: Contestant, kinds: list[str], quick: bool) -> list[list[str]]:
    """Which faults strike together in one job of this contestant, in order."""
    mine = [kind for kind in kinds if kind in who.kinds]
    if quick and who is not IN_PLACE:
        mine = [kind for kind in mine if kind in KINDS[:2]]
    alone = [kind for kind in mine if kind in OUTSIDE or (who.shrinks and kind != "exception")]
    most = 1 if quick else 3 if who in (IN_PLACE, BY_PROCESS) else 2  # theirs take their time
    times = {kind: 1 if kind in alone else min(most, FAULTS.get(kind, 1)) for kind in mine}
    together = [kind for kind in mine if kind not in alone]
    timed = [kind for kind in together if who.times_out and kind in HANGS]  # their collectives have another timeout then
    batches = [[kind for kind in part for _ in range(times[kind])] for part in ([k for k in together if k not in timed], timed)]
    return [batch for batch in (*batches, *([kind] for kind in alone)) if batch]


def compare(contestants: list[Contestant], kinds: list[str], repetitions: int, quick: bool) -> tuple[Measured, Lost, Troubles]:
    """All kinds for all contestants in turn; whoever does not come back once is not asked again."""
    measured: Measured = {}
    lost: Lost = set()
    troubles: Troubles = []
    for repetition in range(repetitions):
        for who in contestants if repetition % 2 == 0 else contestants[::-1]:
            print(f"  {repetition + 1}/{repetitions} {who.name}", file=sys.stderr, flush=True)
            for batch in jobs(who, kinds, quick):
                while left := [kind for kind in batch if (kind, who.name) not in lost]:
                    done = _one_job(who, left, measured, lost, troubles)
                    batch = left[done:]
    return measured, lost, troubles


def _one_job(who: Contestant, kinds: list[str], measured: Measured, lost: Lost, troubles: Troubles) -> int:
    """How many of the faults have been dealt with."""
    done = 0
    try:
        for sample in measure(who, kinds):
            kind, done = kinds[done], done + 1
            shown = f"> {GIVE_UP_S:g}" if sample is None else f"{sample.took_s:.3g}"
            print(f"    {kind}: {shown} s", file=sys.stderr, flush=True)
            if sample is None:
                lost.add((kind, who.name))
            else:
                measured.setdefault(kind, {}).setdefault(who.name, []).append(sample)
    except BenchmarkError as error:
        lost.add((kinds[done], who.name))
        troubles.append(f"{who.name}, {kinds[done]}: {error}")
        print(f"    {troubles[-1]}", file=sys.stderr, flush=True)
        done += 1
    return done


def seconds(measured: Measured) -> Samples:
    """The figures alone."""
    return {kind: {name: [s.took_s for s in samples] for name, samples in by.items()} for kind, by in measured.items()}


def show(figures: Samples, lost: Lost, contestants: list[Contestant]) -> None:
    """The table people read."""
    from rich.console import Console
    from rich.table import Table

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    caption = f"median (smallest-largest); hangs are given {HANG_S:g} s; {os.cpu_count()} CPUs, load {load}"
    table = Table(title="Fault -> next all-reduce on all ranks, s", caption=caption)
    table.add_column("fault")
    for who in contestants:
        table.add_column(who.name, justify="right")
    for kind in KINDS:
        by = figures.get(kind, {})
        cells = [f"> {GIVE_UP_S:g}" if (kind, who.name) in lost else spread(by.get(who.name)) for who in contestants]
        if any(cell != "-" for cell in cells):
            table.add_row(kind, *cells)
    Console(width=max(160, 30 * len(contestants))).print(table)


def verdicts(figures: Samples, lost: Lost) -> list[str]:
    """What was aimed at, and what was reached."""
    found = []
    for kind, by in figures.items():
        mine = by.get(IN_PLACE.name)
        if not mine:
            continue
        if kind in GOALS_S:
            reached = statistics.median(mine) <= GOALS_S[kind]
            found.append(
                f"{kind}: {statistics.median(mine):.3g} s, goal {GOALS_S[kind]:g} s: {'reached' if reached else 'MISSED'}"
            )
        theirs = {name: statistics.median(v) for name, v in by.items() if name not in (IN_PLACE.name, BY_PROCESS.name)}
        theirs |= {name: GIVE_UP_S for where, name in lost if where == kind and name not in (IN_PLACE.name, BY_PROCESS.name)}
        if theirs and kind != NODE:
            best = min(theirs, key=lambda name: theirs[name])
            ahead = theirs[best] / statistics.median(mine)
            found.append(
                f"{kind}: {ahead:.1f} times as fast as {best}, goal {AHEAD:g}: {'reached' if ahead >= AHEAD else 'MISSED'}"
            )
    return found


def terminated(*_: object) -> None:
    """What was started is ended; a second signal does not break that off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> None:
    """The command line."""
    parser = options(__doc__.split("\n")[0])
    parser.set_defaults(repetitions=1)
    parser.add_argument("--only", default=";".join(KINDS), metavar="KIND;KIND", help="these kinds of fault alone")
    parser.add_argument("--ours", action="store_true", help="no peers")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="where NVIDIA's package is, or is to be")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the picture")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, terminated)
    kinds = [kind for kind in KINDS if kind in [word.strip() for word in chosen.only.split(";")]]
    with tempfile.TemporaryDirectory(prefix="hyperpodrun-bench-peers-") as scratch:
        contestants = [IN_PLACE, BY_PROCESS]
        troubles = []
        if not chosen.ours:
            contestants.append(PLAIN)
            try:
                contestants += nvidia(chosen.peers or Path(scratch))
            except BenchmarkError as error:
                troubles.append(str(error))
        measured, lost, more = compare(contestants, kinds, 1 if chosen.quick else chosen.repetitions, chosen.quick)
    figures = seconds(measured)
    phases = recovery_picture.phases(measured)
    show(figures, lost, contestants)
    recovery_picture.show(phases)
    for sentence in [*verdicts(figures, lost), *(trouble.partition(". Its output ends")[0] for trouble in troubles + more)]:
        print(sentence)
    if chosen.json:
        whole = json.loads(as_json("Recovery", figures, chosen.repetitions))
        for row in whole["figures"].values():
            row.pop("ratio")
        chosen.json.write_text(
            json.dumps(whole | {"phases": phases, "not back": sorted(lost), "troubles": troubles + more}, indent=2) + "\n"
        )
    if chosen.svg:
        chosen.svg.write_text(recovery_picture.draw(figures, phases))


if __name__ == "__main__":
    main()
