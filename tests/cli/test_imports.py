"""What the way to the first worker loads: click and msgspec, nothing that is only for help, errors or other commands."""

import subprocess
import sys

import pytest

# "socket" is not among them: the agent needs it in any case.
LATER = ["rich", "shlex", "subprocess", "logging", "tempfile", "shutil", "dataclasses", "argparse", "psutil",
         "torch", "json", "asyncio", "hyperpodrun.cli.help", "hyperpodrun.cli.plan"]  # fmt: skip


@pytest.mark.processes
def test_the_start_path_loads_little():
    text = f"""
import sys, types
before = set(sys.modules)
import hyperpodrun.agent
agent = types.ModuleType("hyperpodrun.agent.agent")
agent.run = lambda config, keeper: 0
sys.modules[agent.__name__] = hyperpodrun.agent.agent = agent
from hyperpodrun.cli import launch
assert launch.main(["--nproc-per-node=2", "--max-restarts=1", "-m", "this"], types.SimpleNamespace(family="x")) == 0
print(*sorted((set(sys.modules) - before) & set({LATER!r})))
"""
    done = subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
