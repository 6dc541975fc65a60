"""`hyperpodrun`: from the words of the command line to a running job.

    words, variables --parse--> Settings --resolve--> JobConfig --> agent.run(config, keeper)

`main` prints whatever it has to say and returns the exit code; it raises nothing. Help, dry run and the agent are imported only
when it comes to them, since the time to a worker's first line is a promise.
"""

import os
import sys
from typing import TYPE_CHECKING

from hyperpodrun.cli import parse
from hyperpodrun.cli.refusal import Refusal
from hyperpodrun.cli.resolve import resolve
from hyperpodrun.cli.speech import refuse, show

if TYPE_CHECKING:
    from hyperpodrun.agent.config import JobConfig
    from hyperpodrun.agent.keeper import KeeperLink


def main(argv: list[str], keeper: "KeeperLink") -> int:
    """Run the job that `argv` (without the program's name) and the environment describe; return the exit code.

    A job without a name is called after the keeper's mark: an agent that replaces a dead one then finds the same name.
    """
    try:
        line = parse.split(argv)
        if "help" in line.given:
            from hyperpodrun.cli.help import help_text

            return show("hyperpodrun", help_text(sys.stdout))
        if "version" in line.given:
            from hyperpodrun import __version__

            return show("hyperpodrun", f"hyperpodrun {__version__}\n")
        settings = parse.settle(line, os.environ)
        config = resolve(line, settings, os.environ, keeper.family[:12])
        if settings.on("dry-run"):
            from hyperpodrun.cli.plan import plan

            return show("hyperpodrun", plan(config, settings, os.environ))
    except Refusal as refusal:
        return refuse("hyperpodrun", refusal)
    if config.mesh is None and not config.job_id_by_chance:
        config = _with_own_name(config, keeper)
    from hyperpodrun.agent import agent

    return agent.run(config, keeper)


def _with_own_name(config: "JobConfig", keeper: "KeeperLink") -> "JobConfig":
    import msgspec

    from hyperpodrun.cli import namesake

    name, note = namesake.settle(config.job_id, keeper.run_dir.path, keeper.family[:12])
    if name == config.job_id:
        return config
    notes = (*config.notes, note) if note else config.notes
    return msgspec.structs.replace(config, job_id=name, job_id_by_chance=True, notes=notes)
