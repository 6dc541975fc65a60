"""How long a job stands still after a fault: fault -> next all-reduce done on all ranks, this launcher and its peers in turn.

    .venv/bin/python scripts/bench/recovery.py [--quick] [--only KIND;KIND] [--peers DIR] [--json FILE] [--svg FILE]

Four workers all-reduce over gloo without pause; in the middle of it something strikes one of them, several times in a job.

- in place: hyperpodrun --inprocess-restart; by process: without it;
- torchrun; ft_launcher and the in-process Wrapper of NVIDIA's nvidia-resiliency-ext, this one with its defaults and tuned, its
  workers started bare. It cannot break a gloo collective, so its abort is helped: gloo's sockets are shut down as ours are,
  without which it does not come back at all. What it loses to a kill it goes on without.

NVIDIA's package is installed into --peers DIR (a virtual environment, made if it is not there; without the option a temporary one);
where it cannot be had, that is said and the rest is measured. Hangs are given HANG_S: --hang-timeout here, the collectives' own
timeout for torchrun, the soft timeout of NVIDIA's wrapper. --quick: one job each with two faults, hangs and losses of ours alone.
"""

import json
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import recovery_picture
from recovery_job import BY_PROCESS, HANG_S, IN_PLACE, KINDS, NODE, PLAIN, REPORTED, Contestant, Sample, measure, nvidia
from side_by_side import BenchmarkError, Samples, as_json, options, spread

FAULTS = 3
"""In one job, one after another."""
GOALS_S = {"exception": 0.25, "SIGKILL": 0.6, REPORTED: 0.3}
AHEAD = 3.0
"""How far ahead of the best peer."""

Measured = dict[str, dict[str, list[Sample]]]  # kind -> contestant -> one a fault
Troubles = list[str]


def compare(contestants: list[Contestant], kinds: list[str], repetitions: int, quick: bool) -> tuple[Measured, Troubles]:
    """Each kind for all contestants in turn; whoever does not come back once is not asked again."""
    measured: Measured = {}
    troubles: Troubles = []
    out: set[tuple[str, str]] = set()
    for repetition in range(repetitions):
        order = contestants if repetition % 2 == 0 else contestants[::-1]
        for kind in kinds:
            for who in order:
                ours = who in (IN_PLACE, BY_PROCESS)
                if kind not in who.kinds or (kind, who.name) in out or (quick and not ours and kind not in KINDS[:2]):
                    continue
                try:
                    samples = measure(who, kind, 2 if quick else FAULTS)
                except BenchmarkError as error:
                    out.add((kind, who.name))
                    troubles.append(f"{who.name}, {kind}: {error}")
                    print(f"  {troubles[-1]}", file=sys.stderr, flush=True)
                    continue
                shown = "  ".join(f"{sample.took_s:.3g}" for sample in samples)
                print(f"  {repetition + 1}/{repetitions} {kind}, {who.name}: {shown} s", file=sys.stderr, flush=True)
                measured.setdefault(kind, {}).setdefault(who.name, []).extend(samples)
    return measured, troubles


def seconds(measured: Measured) -> Samples:
    """The figures alone."""
    return {kind: {name: [s.took_s for s in samples] for name, samples in by.items()} for kind, by in measured.items()}


def show(figures: Samples, contestants: list[Contestant]) -> None:
    """The table people read."""
    from rich.console import Console
    from rich.table import Table

    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    caption = f"median (smallest-largest); hangs are given {HANG_S:g} s; {os.cpu_count()} CPUs, load {load}"
    table = Table(title="Fault -> next all-reduce on all ranks, s", caption=caption)
    table.add_column("fault")
    for who in contestants:
        table.add_column(who.name, justify="right")
    for kind, by in figures.items():
        table.add_row(kind, *(spread(by.get(who.name)) for who in contestants))
    Console(width=max(160, 30 * len(contestants))).print(table)


def verdicts(figures: Samples) -> list[str]:
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
    parser.set_defaults(repetitions=2)
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
        measured, more = compare(contestants, kinds, 1 if chosen.quick else chosen.repetitions, chosen.quick)
    figures = seconds(measured)
    phases = recovery_picture.phases(measured)
    show(figures, contestants)
    recovery_picture.show(phases)
    for sentence in [*verdicts(figures), *(trouble.partition(". Its output ends")[0] for trouble in troubles + more)]:
        print(sentence)
    if chosen.json:
        whole = json.loads(as_json("Recovery", figures, chosen.repetitions))
        for row in whole["figures"].values():
            row.pop("ratio")
        chosen.json.write_text(json.dumps(whole | {"phases": phases, "troubles": troubles + more}, indent=2) + "\n")
    if chosen.svg:
        chosen.svg.write_text(recovery_picture.draw(figures, phases))


if __name__ == "__main__":
    main()
