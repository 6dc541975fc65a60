"""scripts/setup does nothing when nothing has changed, and says in a sentence what is missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what setup reads, and no .venv."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "scripts/constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script there with a clean environment."""
    environment = {"HOME": str(checkout), "PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        [checkout / "scripts" / "setup"], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def program(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_environment_that_is_up_to_date_is_left_alone() -> None:
    before = (ROOT / ".venv" / "setup.stamp").stat().st_mtime_ns
    run = subprocess.run([ROOT / "scripts" / "setup"], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout == ""
    assert (ROOT / ".venv" / "setup.stamp").stat().st_mtime_ns == before


def test_python_that_is_too_old_is_named(checkout: Path) -> None:
    old = program(checkout / "bin" / "python2", "exit 1")
    run = setup(checkout, PYTHON=str(old))
    assert run.returncode == 1
    assert run.stderr == f"setup: PYTHON={old} is older than 3.11 or does not start.\n"


def test_python_without_venv_tells_what_to_install(checkout: Path) -> None:
    # As on a Debian without python3-venv: the interpreter is there, its ensurepip is not.
    bare = program(checkout / "bin" / "python3", f'case "$2" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"')
    for name in ("env", "bash", "dirname", "cat", "sha256sum", "awk", "grep"):
        os.symlink(shutil.which(name) or "", bare.parent / name)
    run = setup(checkout, PATH=str(bare.parent))
    assert run.returncode == 1
    assert "apt-get install python3-venv" in run.stderr
    assert f"{bare} cannot make virtual environments" in run.stderr
    assert not (checkout / ".venv").exists()


def test_torch_is_pinned_to_a_build_without_cuda() -> None:
    pins = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0+cpu"]
    assert not [pin for pin in pins if pin.startswith(("nvidia-c", "triton"))]
