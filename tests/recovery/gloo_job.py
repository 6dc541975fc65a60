"""Plain gloo jobs on this host, without a launcher."""

import os
import subprocess
import sys
from pathlib import Path

SAMPLER = r"""
class Sampler:
    "Counts the samples of the whole job, so any rank of any world can go on with it."
    def __init__(self, rank, world): self.rank, self.world, self.position = rank, world, 0
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
    def draw(self):
        first = self.position + self.rank * BATCH
        self.position += self.world * BATCH
        return list(range(first, first + BATCH))
"""
"""For scripts that set BATCH."""


def run(folder: Path, script: str, world: int, *arguments: str) -> list[str]:
    """Run a script as that many ranks (RANK, WORLD_SIZE, MEET for init_method); what each printed. All must succeed."""
    base = {**os.environ, "WORLD_SIZE": str(world), "MEET": f"file://{folder}/meet", "OMP_NUM_THREADS": "1", "OUT": str(folder)}
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
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    return said
