"""The container's entry point hands everything to hyperpodrun, except a program called by its name."""

import os
import subprocess
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "entrypoint.sh"


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ([], "hyperpodrun"),
        (["--nproc-per-node", "8", "train.py"], "hyperpodrun --nproc-per-node 8 train.py"),
        (["train.py", "two words"], "hyperpodrun train.py two words"),
        (["./train", "--lr", "1"], "hyperpodrun ./train --lr 1"),
        (["no-such-program"], "hyperpodrun no-such-program"),
        (["echo", "hello"], "hello"),
    ],
)
def test_what_runs(arguments: list[str], ran: str, tmp_path: Path) -> None:
    stub = tmp_path / "hyperpodrun"
    stub.write_text('#!/bin/sh\necho hyperpodrun "$@"\n')
    stub.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run([ENTRYPOINT, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert run.stdout == f"{ran}\n"
