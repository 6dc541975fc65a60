"""The workers' own cgroup: made where it is delegated, ended in one write, nothing done elsewhere."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyperpodrun.agent.workers.cgroup import WorkerCgroup


@pytest.fixture
def cgroup2(tmp_path: Path) -> Iterator[Path]:
    """A real cgroup v2 hierarchy, mounted for this test."""
    mounted = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    if mounted:
        yield Path("/sys/fs/cgroup")
        return
    folder = tmp_path / "cgroup2"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "cgroup2", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("no cgroup v2 here and no right to mount it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_all_of_the_group_die_at_once_children_included(cgroup2: Path) -> None:
    parent = cgroup2 / "hyperpodrun-test"
    parent.mkdir()
    shell = subprocess.Popen(["sh", "-c", "read x; sleep 300 & sleep 300"], stdin=subprocess.PIPE)
    cgroup = WorkerCgroup("mark", root=str(cgroup2), membership="1:cpu:/\n0::/hyperpodrun-test\n")
    try:
        assert (parent / "hyperpodrun-mark").is_dir()
        cgroup.add([shell.pid, 2**22 - 1])  # the second one does not exist
        assert str(shell.pid) in (parent / "hyperpodrun-mark" / "cgroup.procs").read_text().split()
        assert shell.stdin
        shell.stdin.write(b"\n")
        shell.stdin.close()
        cgroup.kill()
        assert shell.wait() == -9
        while (parent / "hyperpodrun-mark" / "cgroup.procs").read_text():
            pass  # the kernel ends them; reaping is init's
        cgroup.remove()
        assert not (parent / "hyperpodrun-mark").exists()
    finally:
        shell.kill()
        shell.wait()
        cgroup.remove()
        parent.rmdir()


@pytest.mark.parametrize("membership", ["", "5:memory:/x\n", "0::/../outside\n"])
def test_without_a_delegated_group_nothing_is_done(tmp_path: Path, membership: str) -> None:
    for controllers in (False, True):
        if controllers:
            (tmp_path / "cgroup.controllers").touch()
        cgroup = WorkerCgroup("mark", root=str(tmp_path), membership=membership)
        cgroup.add([1])
        cgroup.kill()
        cgroup.remove()
        assert not [p for p in tmp_path.iterdir() if p.is_dir()]
