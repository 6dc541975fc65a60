"""`hyperpodctl`: looks at the jobs of this user that run on this node, and tells their agents what only a person can know.

A running launcher keeps its state in a file of its run folder, which it holds locked while it lives; it takes orders from there too.
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
  hyperpodctl certify-dead NODE

Looks at your hyperpodrun jobs on this node, and tells them what only a person can know.

Commands
  status           The running jobs: state, workers, restarts; --json for programs.
  certify-dead     The lost NODE (as the launcher names it) is gone for good and runs nothing any more: the others need not wait
                   for it. Where that is not true, two worlds may train at once.

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
        raise Refusal(f"no command given; allowed: status, certify-dead (see {PROGRAM} --help)")
    if command in LATER:
        sentence = f"{command} is not active in this release (later it {LATER[command]}); use {PROGRAM} status"
        raise Refusal(sentence, exit_codes.UNAVAILABLE)
    if command == "certify-dead":
        return _certify_dead(words)
    if command != "status":
        meant = nearest(command, ["status", "certify-dead", *LATER])
        hint = f"did you mean {meant}?" if meant else f"see {PROGRAM} --help"
        raise Refusal(f"no such command: {quoted(command)}; {hint}")
    surplus = [word for at, word in enumerate(words) if word not in ("status", "--json") or word in words[:at]]
    if surplus:
        raise Refusal(f"{quoted(surplus[0])} is not allowed here; allowed: {PROGRAM} status [--json]")
    from hyperpodrun.cli import jobs

    running = jobs.running()
    return show(PROGRAM, jobs.as_json(running) if "--json" in options else jobs.as_table(running))


def _certify_dead(words: list[str]) -> int:
    from hyperpodrun.agent import orders
    from hyperpodrun.cli import jobs

    if len(words) != 2 or words[0] != "certify-dead":
        raise Refusal(f"exactly one node is to be named; allowed: {PROGRAM} certify-dead NODE")
    node = words[1]
    told, known = [], set()
    for job in jobs.running():
        mesh = job.status.mesh if job.status else None
        if mesh is None:
            continue
        others = set(mesh.members) - {mesh.slot}
        known |= others
        if node in others:
            try:
                orders.certify(job.run_dir, node)
            except OSError as error:
                raise Refusal(f"{job.run_dir}: {error.strerror}, so the agent cannot be told", exit_codes.CONFIG) from None
            told.append(job.status.job_id if job.status else "?")
    if not told:
        names = (
            f"they wait for or work with {', '.join(sorted(known))}" if known else "no job of yours on this node has other nodes"
        )
        raise Refusal(f"no job of yours on this node knows of a node {quoted(node)}; {names}", exit_codes.UNAVAILABLE)
    return show(PROGRAM, f"told the agent of job {', '.join(told)}: {node} is gone for good\n")


if __name__ == "__main__":
    main()
