"""The launcher's private folder: locked while its owner lives, removed by the next launcher when the owner was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyperpodrun.agent import run_dir

NOBODY = 65534
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


def test_folder_with_unreadable_parts_is_removed(base: str) -> None:
    folder = run_dir.create()
    Path(folder.path, "deep", "deeper").mkdir(parents=True)
    Path(folder.path, "deep", "deeper", "file").write_text("x")
    Path(folder.path, "deep", "link").symlink_to(base)
    if os.getuid() == 0:  # rights do not bind root: let another user own and remove it
        for path in (base, folder.path, *(os.path.join(folder.path, part) for part in ("deep", "deep/deeper"))):
            os.chown(path, NOBODY, NOBODY)
    for part in ("deep/deeper", "deep", "."):
        os.chmod(os.path.join(folder.path, part), 0)
    child = os.fork()
    if child == 0:
        os.chdir(base)  # the folders above may be closed to that user
        if os.getuid() == 0:
            os.setresuid(NOBODY, NOBODY, NOBODY)
        run_dir.RunDir(os.path.basename(folder.path), -1).remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.listdir(base) == []
    os.close(folder.lock_fd)


def test_folders_of_other_users_are_left_alone(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    another = os.getuid() + 1
    path = Path(base, f"{run_dir.PREFIX}-{another}-made-by-us")
    path.mkdir()
    path.joinpath("lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: another)
    run_dir.remove_dead()
    assert path.exists() and run_dir.living(base) == []


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
