"""torchrun and hyperpodrun measured in turn: the part that all benchmarks share.

A benchmark is a function that starts one launcher once and returns figures by name. `compare` calls it for each launcher
in turn, as often as asked, and swaps who goes first each time, so that a slow minute of the machine hits both. The
median of each is shown beside its smallest and largest value; a ratio below 1 means that hyperpodrun needs less.

Every run has a time limit, and whatever it started is found by a mark in its environment and ended by pid.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

MARK = "HYPERPODRUN_BENCH_MARK"
POLL_S = 0.005

T = TypeVar("T")


class Launcher(NamedTuple):
    """A command that starts distributed jobs; both stand beside the Python that runs the benchmark."""

    name: str
    environment: dict[str, str]

    @property
    def path(self) -> Path:
        """The launcher's executable."""
        return Path(sys.executable).parent / self.name


# torchrun shares its own store with the workers unless told otherwise; after a restart they then find addresses of the dead.
LAUNCHERS = (Launcher("torchrun", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}), Launcher("hyperpodrun", {}))

Figures = dict[str, float]
Samples = dict[str, dict[str, list[float]]]  # figure -> launcher -> one value a repetition


class BenchmarkError(Exception):
    """A run did not do what it had to; the message has the end of its output."""


class Run:
    """One started launcher with a folder in which its workers leave files (their variable BENCH_DIR)."""

    def __init__(self, launcher: Launcher, folder: Path, arguments: list[str], limit_s: float) -> None:
        self.launcher, self.folder = launcher, folder
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, **launcher.environment, MARK: self.mark, "BENCH_DIR": str(folder)}
        self.output_path = folder / "output"
        with self.output_path.open("wb") as output:
            self.started_s = time.monotonic()
            self.process = subprocess.Popen(
                [str(launcher.path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        self.deadline_s = self.started_s + limit_s

    @property
    def pid(self) -> int:
        """The launcher's process."""
        return self.process.pid

    def fail(self, what: str) -> BenchmarkError:
        """An error that shows the end of the output."""
        tail = self.output_path.read_text(errors="replace")[-2000:]
        return BenchmarkError(f"{self.launcher.name}: {what}. Its output ends:\n{tail}")

    def until(self, look: Callable[[], T | None], what: str) -> T:
        """Wait until `look` returns something; the run's end or its limit is an error."""
        while True:
            ended = self.process.poll() is not None
            found = look()
            if found is not None:
                return found
            if ended:
                raise self.fail(f"ended with exit code {self.process.returncode} before {what}")
            if time.monotonic() > self.deadline_s:
                raise self.fail(f"{what} was not seen within the limit")
            time.sleep(POLL_S)

    def values(self, name: str, count: int) -> list[float] | None:
        """What ranks 0 to `count` - 1 have left under this name, by rank; None until all have. See `LEAVE`."""
        files = [self.folder / f"{name}.{rank}" for rank in range(count)]
        return [float(file.read_text()) for file in files] if all(file.exists() for file in files) else None

    def success(self) -> None:
        """Wait for the launcher's end, which must be a good one."""
        try:
            code = self.process.wait(max(0.0, self.deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.fail("did not end within the limit") from None
        if code != 0:
            raise self.fail(f"ended with exit code {code}")

    def sweep(self) -> None:
        """End everything that carries this run's mark."""
        end_s = time.monotonic() + 10
        while left := marked(self.mark):
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            self.process.poll()
            if time.monotonic() > end_s:
                raise BenchmarkError(f"{self.launcher.name}: processes {left} outlive SIGKILL")
            time.sleep(POLL_S)
        self.process.wait()


# First lines of a worker: `leave(name, number)` writes a file for `Run.values`, in one piece.
LEAVE = """\
import os
def leave(name, number):
    folder, name = os.environ["BENCH_DIR"], f"{name}.{os.environ['RANK']}"
    with open(f"{folder}/.{name}", "w") as file:
        file.write(repr(number))
    os.rename(f"{folder}/.{name}", f"{folder}/{name}")
"""


def marked(*marks: str) -> list[int]:
    """Live processes with one of these marks in their environment."""
    wanted, found = [f"{MARK}={mark}".encode() for mark in marks], []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:  # it has ended, or it is not ours
            continue
        if any(word in environment for word in wanted):
            found.append(int(entry))
    return found


@contextmanager
def started(launcher: Launcher, worker: str, arguments: list[str], limit_s: float = 90) -> Iterator[Run]:
    """Run this worker text under the launcher; nothing is left of it afterwards."""
    with tempfile.TemporaryDirectory(prefix="hyperpodrun-bench-") as name:
        folder = Path(name)
        script = folder / "worker.py"
        script.write_text(worker)
        run = Run(launcher, folder, [*arguments, str(script)], limit_s)
        try:
            yield run
        finally:
            run.sweep()


def compare(benchmarks: list[Callable[[Launcher], Figures]], repetitions: int) -> Samples:
    """Call each benchmark for both launchers in turn, `repetitions` times."""
    samples: Samples = {}
    for repetition in range(repetitions):
        order = LAUNCHERS if repetition % 2 == 0 else LAUNCHERS[::-1]
        for benchmark in benchmarks:
            for launcher in order:
                figures = benchmark(launcher)
                shown = "  ".join(f"{what} {value:.3g}" for what, value in figures.items())
                print(f"  {repetition + 1}/{repetitions} {launcher.name}: {shown}", file=sys.stderr, flush=True)
                for what, value in figures.items():
                    samples.setdefault(what, {}).setdefault(launcher.name, []).append(value)
    return samples


def ratio(samples: dict[str, list[float]]) -> float | None:
    """hyperpodrun's median in torchrun's; None where torchrun's is zero or one of them has no figure."""
    theirs, ours = (samples.get(launcher.name) for launcher in LAUNCHERS)
    if not theirs or not ours or statistics.median(theirs) == 0:
        return None
    return statistics.median(ours) / statistics.median(theirs)


def spread(values: list[float] | None) -> str:
    """Median and range in three digits."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


def as_json(title: str, samples: Samples, repetitions: int) -> str:
    """All values, medians and ratios, and what they were measured on."""
    import torch

    rows = {
        what: {
            **{
                name: {"median": statistics.median(values), "min": min(values), "max": max(values), "values": values}
                for name, values in by_launcher.items()
            },
            "ratio": ratio(by_launcher),
        }
        for what, by_launcher in samples.items()
    }
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernel": platform.release(),
    }
    return json.dumps({"title": title, "repetitions": repetitions, "machine": machine, "figures": rows}, indent=2)


def show(title: str, samples: Samples) -> None:
    """The table people read."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="median (smallest-largest); ratio: hyperpodrun / torchrun")
    table.add_column("figure")
    for launcher in LAUNCHERS:
        table.add_column(launcher.name, justify="right")
    table.add_column("ratio", justify="right")
    for what, by_launcher in samples.items():
        quotient = ratio(by_launcher)
        cells = [spread(by_launcher.get(launcher.name)) for launcher in LAUNCHERS]
        table.add_row(what, *cells, "-" if quotient is None else f"{quotient:.2f}")
    Console().print(table)


def options(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="runs of each launcher (5)")
    parser.add_argument("--quick", action="store_true", help="two runs of each")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all values here too")
    return parser


def main(title: str, chosen: argparse.Namespace, benchmarks: list[Callable[[Launcher], Figures]]) -> None:
    """Measure, show, and write."""
    for launcher in LAUNCHERS:
        if not launcher.path.exists():
            sys.exit(f"no {launcher.name} beside {sys.executable}: run scripts/setup, then use .venv/bin/python")
    repetitions = 2 if chosen.quick else chosen.repetitions
    try:
        samples = compare(benchmarks, repetitions)
    except BenchmarkError as error:
        sys.exit(str(error))
    show(title, samples)
    if chosen.json:
        chosen.json.write_text(as_json(title, samples, repetitions) + "\n")
