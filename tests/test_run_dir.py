"""The launcher's private folder: locked while its owner lives, removed by the next launcher when the owner was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpodrun.agent import run_dir

OWNER = """
import sys
from hyperpodrun.agent import run_dir
folder = run_dir.create()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only folder considered for run folders."""
    monkeypatch.setattr(run_dir, "bases", lambda: [str(tmp_path)])
    return str(tmp_path)


def test_folder_is_private_and_removed_with_all_in_it(base: str) -> None:
    folder = run_dir.create()
    assert os.path.dirname(folder.path) == base
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    Path(folder.path, "deep").mkdir()
    Path(folder.path, "deep", "file").write_text("x")
    folder.remove()
    assert os.listdir(base) == []
    os.close(folder.lock_fd)


def test_living_folder_is_listed_and_spared_dead_one_removed(base: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": base},
    )
    assert owner.stdin and owner.stdout
    path = owner.stdout.readline().strip()
    assert os.path.dirname(path) == base
    run_dir.remove_dead()
    assert run_dir.living(base) == [path], "a living launcher's folder was removed or is not seen"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    assert run_dir.living(base) == []
    run_dir.remove_dead()
    assert os.listdir(base) == []


def test_first_base_that_takes_a_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "bases", lambda: ["/proc", str(tmp_path)])
    folder = run_dir.create()
    assert os.path.dirname(folder.path) == str(tmp_path)
    folder.remove()
    os.close(folder.lock_fd)


def test_no_base_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_dir, "bases", lambda: ["/proc"])
    with pytest.raises(OSError, match=r"/proc: .*set TMPDIR"):
        run_dir.create()


def test_foreign_folders_are_left_alone(base: str) -> None:
    Path(base, f"{run_dir.PREFIX}-{os.getuid()}-no-lock").mkdir()
    Path(base, "something-else").mkdir()
    run_dir.remove_dead()
    assert sorted(os.listdir(base)) == sorted([f"{run_dir.PREFIX}-{os.getuid()}-no-lock", "something-else"])
