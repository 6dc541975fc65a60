"""The measurement of state recovery still runs: what the checks of a state refuse has broken it before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def test_the_measurement_runs(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "scripts/bench/state.py"), "--quick", "--json", str(found)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads(found.read_text())
    assert list(results) == ["restore 0.03125 GiB, 2 ranks", "update, 2 ranks", "step, 2 ranks"]
    assert all(value > 0 for value in (results["update, 2 ranks"] | results["step, 2 ranks"]).values())
