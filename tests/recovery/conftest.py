"""Plain gloo jobs on this host, without a launcher."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def gloo(tmp_path: Path) -> Callable[..., list[str]]:
    """Run a script as that many ranks (RANK, WORLD_SIZE, MEET for init_method); what each printed. All must succeed."""

    def run(script: str, world: int, *arguments: str) -> list[str]:
        meet = f"file://{tmp_path}/meet"
        base = {**os.environ, "WORLD_SIZE": str(world), "MEET": meet, "OMP_NUM_THREADS": "1", "OUT": str(tmp_path)}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", script, *arguments],
                env={**base, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
        return said

    return run
