"""`hyperpodctl`: looks at the jobs of this user that run on this node.

Read-only in this release: a running launcher keeps its state in a file of its run folder, which it holds locked while it lives.
"""

import sys
from typing import NoReturn

from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.cli.refusal import Refusal, nearest, quoted
from hyperpodrun.cli.speech import refuse, show

PROGRAM = "hyperpodctl"
LATER = {
    "top": "shows the load of all nodes",
    "events": "follows what happens to the job",
    "explain": "tells the story of a fault",
    "restart": "restarts the workers",
    "drain": "takes a node out of the job",
    "stacks": "shows where each rank is",
    "logs": "shows the ranks' output",
}
HELP = f"""\
Usage
  hyperpodctl status [--json]

Looks at your hyperpodrun jobs on this node.

Commands
  status           The running jobs: state, workers, restarts; --json for programs.

Options
  --version        Print the version and end.
  -h, --help       Print this help and end.

With a later release: {", ".join(LATER)}.
"""


def main() -> NoReturn:
    """The console command."""
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Do what the words say; the exit code."""
    try:
        return _run(words)
    except Refusal as refusal:
        return refuse(PROGRAM, refusal)


def _run(words: list[str]) -> int:
    command = next((word for word in words if not word.startswith("-")), None)
    options = [word for word in words if word.startswith("-")]
    if "-h" in options or "--help" in options:
        return show(PROGRAM, HELP)
    if command is None and "--version" in options:
        from hyperpodrun import __version__

        return show(PROGRAM, f"{PROGRAM} {__version__}\n")
    if command is None:
        raise Refusal(f"no command given; allowed: status (see {PROGRAM} --help)")
    if command in LATER:
        sentence = f"{command} is not active in this release (later it {LATER[command]}); use {PROGRAM} status"
        raise Refusal(sentence, exit_codes.UNAVAILABLE)
    if command != "status":
        meant = nearest(command, ["status", *LATER])
        hint = f"did you mean {meant}?" if meant else f"see {PROGRAM} --help"
        raise Refusal(f"no such command: {quoted(command)}; {hint}")
    surplus = [word for at, word in enumerate(words) if word not in ("status", "--json") or word in words[:at]]
    if surplus:
        raise Refusal(f"{quoted(surplus[0])} is not allowed here; allowed: {PROGRAM} status [--json]")
    from hyperpodrun.cli import jobs

    running = jobs.running()
    return show(PROGRAM, jobs.as_json(running) if "--json" in options else jobs.as_table(running))


if __name__ == "__main__":
    main()
