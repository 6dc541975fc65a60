"""The console command `hyperpodrun`: becomes the keeper at once; its child, the agent, reads the command line.

Nothing but the keeper's few standard modules is imported here: the keeper stays small for the whole life of the job.
"""

import signal
import sys

TYPE_CHECKING = False  # not typing's: importing that takes most of the time in which a Ctrl-C would still print a traceback
if TYPE_CHECKING:
    from typing import NoReturn

    from hyperpodrun.agent.keeper import KeeperLink


def main() -> "NoReturn":
    """Run `hyperpodrun` with the arguments of this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Nothing is there yet that a Ctrl-C would have to end: a traceback of imports would tell nobody anything.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from hyperpodrun.agent import keeper

    keeper.main(_run_agent)


def _run_agent(link: "KeeperLink") -> int:
    from hyperpodrun.cli import launch

    return launch.main(sys.argv[1:], link)
