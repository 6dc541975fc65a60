"""Readable transcripts of whole runs: `python -m hyperpodrun.agent.sim.transcript [--rewrite] FILE…`.

A file is a head, a line of dashes, and what happened. The head:

    # what the run shows, with rule numbers
    job slots=3 min=2 max=3 [open] [inprocess] [elastic=restart] [lease=4000] [barrier=120000]
    starts n00@0 n01@10 n02@20
    fault 3000 power n01 for=2000 value=1
    end 9000

Times are milliseconds. Without `--rewrite` a run that differs from its file is shown as a diff, exit code 1. Only commit a
changed transcript if you understand the change.
"""

import difflib
import sys

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.sim.faults import Fault, Schedule, names
from hyperpodrun.agent.sim.judge import complaint
from hyperpodrun.agent.sim.world import World
from hyperpodrun.agent.wire.rungs import Rules

DASHES = "-" * 70


def parse(head: str) -> Schedule:
    """The schedule of a head. Raises ValueError for a line it does not know."""
    config = MeshConfig(slots=1, min_nodes=1, max_nodes=1)
    starts: list[tuple[str, int]] = []
    faults: list[Fault] = []
    end_ms = 0
    for line in head.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        match words[0]:
            case "job":
                config = _config(words[1:])
            case "starts":
                starts = [(node, int(at)) for node, _, at in (word.partition("@") for word in words[1:])]
            case "fault":
                faults.append(_fault(words[1:]))
            case "end":
                end_ms = int(words[1])
            case _:
                raise ValueError(f"unknown line in a scenario: {line}")
    return Schedule(0, config, tuple(starts), tuple(faults), end_ms)


def _config(words: list[str]) -> MeshConfig:
    values = dict(word.split("=") for word in words if "=" in word)
    slots = int(values["slots"])
    lease_ms = int(values.get("lease", "15000"))
    return MeshConfig(
        slots=slots, min_nodes=int(values["min"]), max_nodes=int(values["max"]), first_contact=names(1)[0],
        roster=() if "open" in words else names(slots), elastic_now=values.get("elastic", "now") == "now",
        barrier_ns=int(values.get("barrier", "120000")) * MS, lease_ns=lease_ms * MS, fence_ns=(lease_ms + 1000) * MS,
        rules=Rules(inprocess="inprocess" in words),
    )  # fmt: skip


def _fault(words: list[str]) -> Fault:
    options = {key: int(value) for key, value in (word.split("=") for word in words if "=" in word)}
    nodes = tuple(word for word in words[2:] if "=" not in word)
    kind = words[1]
    return Fault(int(words[0]), kind, nodes, options.get("for", 0), options.get("value", 0))  # type: ignore[arg-type]


def play(head: str) -> str:
    """The transcript of a head: one line an event, then what is wrong, if anything."""
    lines: list[str] = []

    def write(now: int, host: str, text: str) -> None:
        lines.append(f"{now / 1e9:9.3f} {host or '--':4} {text}")

    world = World(parse(head), write)
    try:
        world.run()
    except (AssertionError, ValueError) as error:
        lines.append(f"VIOLATION {error}")
    else:
        if (wrong := complaint(world)) is not None:
            lines.append(f"STUCK {wrong}")
    return "\n".join(lines) + "\n"


def check(path: str, rewrite: bool) -> str:
    """'' when the file holds what happens (or now does, after `rewrite`), else a diff."""
    with open(path, encoding="utf-8") as file:
        head, _, told = file.read().partition(DASHES + "\n")
    happened = play(head)
    if told == happened:
        return ""
    if rewrite:
        with open(path, "w", encoding="utf-8") as file:
            file.write(head + DASHES + "\n" + happened)
        return ""
    return "".join(difflib.unified_diff(told.splitlines(True), happened.splitlines(True), path, "what happens now"))


def main() -> int:
    """The command."""
    rewrite = "--rewrite" in sys.argv[1:]
    diffs = [diff for path in sys.argv[1:] if path != "--rewrite" and (diff := check(path, rewrite))]
    print("".join(diffs), end="")
    return 1 if diffs else 0


if __name__ == "__main__":
    sys.exit(main())
