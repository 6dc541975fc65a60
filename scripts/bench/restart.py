"""How long a job stands still when one of its workers is killed, torchrun and hyperpodrun in turn.

    .venv/bin/python scripts/bench/restart.py [--quick] [--ranks 4] [--json FILE]

Workers all-reduce over gloo without pause. Once all are at it, one gets SIGKILL from outside; the figure is the time from
the kill until the first all-reduce after the restart has completed on every rank. Both launchers run with --max-restarts 3.
"""

import os
import signal
import time

from side_by_side import LEAVE, Figures, Launcher, main, options, started

WORKER = (
    LEAVE
    + """
import time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step = 0
while attempt == 0 or step < 3:
    dist.all_reduce(torch.ones(1))
    step += 1
    if attempt > 0 and step == 1:
        leave("again", time.monotonic())
    if attempt == 0 and step == 20:
        leave("at-it", os.getpid())
dist.destroy_process_group()
"""
)


def killed(launcher: Launcher, ranks: int) -> Figures:
    """SIGKILL of one worker -> next all-reduce completed on all."""
    arguments = ["--nproc-per-node", str(ranks), "--max-restarts", "3"]
    with started(launcher, WORKER, arguments) as run:
        pids = run.until(lambda: run.values("at-it", ranks), f"{ranks} ranks at work")
        killed_s = time.monotonic()
        os.kill(int(pids[-1]), signal.SIGKILL)
        again = run.until(lambda: run.values("again", ranks), f"an all-reduce on {ranks} ranks after the kill")
        run.success()
    return {f"SIGKILL of 1 of {ranks} -> next all-reduce on all, s": max(again) - killed_s}


if __name__ == "__main__":
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="workers (4)")
    chosen = parser.parse_args()
    main("Restart", chosen, [lambda launcher: killed(launcher, chosen.ranks)])
