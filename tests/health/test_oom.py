"""The OOM counter is found wherever cgroups are mounted, and counts only what it should."""

from pathlib import Path

import pytest

from hyperpodrun.agent.health.oom import OomWatch
from hyperpodrun.agent.health.shm import shm_figures


def events(root: Path, folder: str, kills: int, name: str = "memory.events") -> Path:
    path = root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = "low 0\nhigh 0\nmax 7\noom 5\n" if name == "memory.events" else "oom_kill_disable 0\nunder_oom 0\n"
    path.write_text(f"{before}oom_kill {kills}\noom_group_kill 3\n")
    return path


def watch(root: Path, membership: str) -> OomWatch:
    return OomWatch(str(root), membership)


def test_kills_since_the_snapshot_are_counted(tmp_path: Path) -> None:
    events(tmp_path, "job/agent", 4)
    watching = watch(tmp_path, "0::/job/agent\n")
    assert watching.killed_since() == 0
    events(tmp_path, "job/agent", 6)
    assert watching.killed_since() == 2
    watching.snapshot()
    assert watching.killed_since() == 0


def test_neighbours_do_not_count_where_our_own_group_can(tmp_path: Path) -> None:
    events(tmp_path, "job", 4)
    events(tmp_path, "job/agent", 0)
    watching = watch(tmp_path, "0::/job/agent\n")
    events(tmp_path, "job", 9)
    assert watching.killed_since() == 0


@pytest.mark.parametrize("membership", ["0::/job/agent\n", "0::/elsewhere/on/the/host\n", "0::/../../sibling\n"])
def test_the_nearest_group_that_counts_is_taken(membership: str, tmp_path: Path) -> None:
    events(tmp_path, ".", 1)
    watching = watch(tmp_path, membership)
    events(tmp_path, ".", 2)
    assert watching.killed_since() == 1


def test_a_path_out_of_our_namespace_is_not_followed(tmp_path: Path) -> None:
    events(tmp_path, "sibling", 1)
    events(tmp_path, "ours", 1)
    watching = watch(tmp_path / "ours", "0::/../sibling\n")
    events(tmp_path, "sibling", 2)
    assert watching.killed_since() == 0


def test_version_1(tmp_path: Path) -> None:
    membership = "5:devices:/x\n4:cpu,memory:/slice/job\n0::/slice/job\n"
    events(tmp_path, "memory/slice/job", 0, "memory.oom_control")
    watching = watch(tmp_path, membership)
    events(tmp_path, "memory/slice/job", 3, "memory.oom_control")
    assert watching.killed_since() == 3


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    events(tmp_path, "unified/job", 0)
    watching = watch(tmp_path, "1:name=systemd:/job\n0::/job\n")
    events(tmp_path, "unified/job", 1)
    assert watching.killed_since() == 1


@pytest.mark.parametrize("text", ["", "oom 3\n", "oom_kill many\n", "oom_kill\n"])
def test_a_counter_that_cannot_be_read_is_not_known(text: str, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text(text)
    assert watch(tmp_path, "0::/\n").killed_since() is None


def test_no_cgroups_at_all_is_not_known(tmp_path: Path) -> None:
    watching = watch(tmp_path, "")
    assert watching.killed_since() is None
    assert watching.limit_bytes() is None


def test_a_counter_that_vanishes_is_not_known(tmp_path: Path) -> None:
    path = events(tmp_path, "job", 1)
    watching = watch(tmp_path, "0::/job\n")
    path.unlink()
    assert watching.killed_since() is None


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    for folder, limit in (("job/agent", "max"), ("job", "4000"), (".", "9000")):
        events(tmp_path, folder, 0)
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
    assert watch(tmp_path, "0::/job/agent\n").limit_bytes() == 4000


def test_version_1s_way_to_say_no_limit(tmp_path: Path) -> None:
    events(tmp_path, "memory/job", 0, "memory.oom_control")
    (tmp_path / "memory/job/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert watch(tmp_path, "4:memory:/job\n").limit_bytes() is None


def test_the_real_machine_is_asked_without_harm() -> None:
    assert OomWatch().killed_since() in (None, 0)


def test_shared_memory_figures(tmp_path: Path) -> None:
    figures = shm_figures(str(tmp_path))
    assert figures is not None
    assert 0 < figures.used_bytes < figures.size_bytes
    assert shm_figures(str(tmp_path / "missing")) is None
