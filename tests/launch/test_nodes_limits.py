"""What the mesh needs for itself is not handed down to what it starts."""

import resource
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

FOUND = 300
WORK = """
import resource
tell("limit", files=resource.getrlimit(resource.RLIMIT_NOFILE))
meet()
wait_for("finish")
"""


def tighten() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FOUND, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_workers_and_scripts_have_the_limit_on_open_files_that_the_launcher_was_given(nodes, tmp_path: Path, method: str) -> None:
    script = tmp_path / "pre.sh"
    script.write_text(f"#!/bin/sh\nsleep 0.1\nulimit -n >> {tmp_path}/pre-limit\n")
    script.chmod(0o755)
    nodes.contacts(0, 1)
    options = ("--nnodes=2", "--nproc-per-node=2", f"--start-method={method}", f"--pre-train-script={script}", "--max-restarts=3")
    runs = nodes.start_all(*options, script=WORK, preexec_fn=tighten)
    nodes.up(4)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    agent = resource.prlimit(runs[0].agent(), resource.RLIMIT_NOFILE)
    assert agent[0] > FOUND, f"the agent itself has no room for its connections: {agent}"
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0], nodes.story()
    assert [row["files"] for row in runs[0].notes("limit")] == [[FOUND, hard]] * 4
    assert (tmp_path / "pre-limit").read_text().split() == [str(FOUND)] * 2
