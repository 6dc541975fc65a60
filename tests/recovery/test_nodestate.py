"""What writes a node's versions beside the training leaves nothing half done, at the end of the process either."""

import subprocess
import sys
from pathlib import Path

from hyperpodrun.recovery import shm

ENDS = """
import sys

import torch

from hyperpodrun.recovery import shard
from hyperpodrun.recovery.nodestate import NodeState
from hyperpodrun.recovery.parts import part_of

layer = torch.nn.Linear(1 << 24, 2)
node = NodeState(sys.argv[1], {}, print)
node.begin(-1, (), ["model"], [], True)
node.took_s = 1.0  # so much longer than a step that it is written beside the next one
node.write(7, {"model": shard.of([part_of("model", layer)])}, 1.0)
"""


def test_a_process_that_ends_finishes_the_version_under_way(tmp_path: Path) -> None:
    """A thread in torch's code when the interpreter goes away would take the process with it: SIGABRT, after all was done."""
    run = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert [version.step for version in shm.scan(str(tmp_path)) if version.check()] == [7]
