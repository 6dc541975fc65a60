"""Jobs of several nodes: real agents on this host, each on a port of its own."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ENV = "MASTER_ADDR MASTER_PORT GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE TORCHELASTIC_RESTART_COUNT HYPERPODRUN_GENERATION"
WORK = f"""
tell("up", **{{name: os.environ[name] for name in {ENV.split()!r}}})
while len(told("up")) < WORLD: time.sleep(0.01)
wait_for("finish")
"""


def finish(folder: Path) -> None:
    (folder / "finish").touch()


def test_three_nodes_are_one_world_and_end_together(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    nodes.start_all("--nnodes=3", "--nproc-per-node=2", script=WORK)
    rows = nodes.up(6)
    assert sorted(row["rank"] for row in rows) == list(range(6))
    for row in rows:
        assert row["rank"] == 2 * int(row["GROUP_RANK"]) + int(row["LOCAL_RANK"]), "ranks of a node are no block"
        assert (row["world"], row["GROUP_WORLD_SIZE"], row["LOCAL_WORLD_SIZE"]) == (6, "3", "2")
    assert len({(row["MASTER_ADDR"], row["MASTER_PORT"]) for row in rows}) == 1
    began_s = time.monotonic()
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()
    print("ended in", time.monotonic() - began_s)
    nodes.nothing_left()
