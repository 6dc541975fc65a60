"""The console command `hyperpodrun`: becomes the keeper at once; its child, the agent, reads the command line.

Nothing but the keeper's few standard modules is imported here: the keeper stays small for the whole life of the job.
"""

import sys
from typing import NoReturn

from hyperpodrun.agent import keeper


def main() -> NoReturn:
    """Run `hyperpodrun` with the arguments of this process."""
    keeper.main(_run_agent)


def _run_agent(link: keeper.KeeperLink) -> int:
    from hyperpodrun.cli import launch

    return launch.main(sys.argv[1:], link)
