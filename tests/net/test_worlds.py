"""The checker itself: what it must let pass and what it must not."""

from pathlib import Path

import pytest
from net_worlds import Worlds


def wrote(folder: Path, generation: int, rank: int, size: int, host: str, first_s: float, last_s: float, step: int = 1) -> None:
    """As if a rank had written two lines."""
    name = f"steps--1--{generation}--{rank}--{size}--{host}"
    (folder / name).write_text(f"{first_s:.6f} {step}\n{last_s:.6f} {step + 1}\n")


def test_one_world_after_another_passes(tmp_path: Path) -> None:
    for rank in (0, 1):
        wrote(tmp_path, 0, rank, 2, f"h{rank + 1}", 1, 5)
    wrote(tmp_path, 1, 0, 1, "h1", 6, 9, step=2)
    worlds = Worlds(tmp_path)
    worlds.validate()
    found = worlds.complete(["h1"], after_s=5)
    assert found is not None and found.key[1] == 1
    assert worlds.complete(["h1", "h2"]) is None


def test_two_whole_worlds_at_once_are_found(tmp_path: Path) -> None:
    wrote(tmp_path, 0, 0, 1, "h1", 1, 5)
    wrote(tmp_path, 1, 0, 1, "h2", 4, 9, step=2)
    with pytest.raises(AssertionError, match=r"two whole worlds at once for 1\.000 s"):
        Worlds(tmp_path).validate()


def test_remnant_of_a_world_may_live_until_the_fence_and_no_longer(tmp_path: Path) -> None:
    for last_s, passes in ((18.0, True), (23.0, False)):
        wrote(tmp_path, 0, 0, 2, "h1", 1, 4)
        wrote(tmp_path, 0, 1, 2, "h2", 1, last_s)
        wrote(tmp_path, 1, 0, 1, "h1", 5, 30, step=2)
        if passes:
            Worlds(tmp_path).validate()
        else:
            with pytest.raises(AssertionError, match="outlives the fence"):
                Worlds(tmp_path).validate()
            worlds = Worlds(tmp_path)
            worlds.excuse("h2", 4)
            worlds.validate()


def test_host_in_two_worlds_at_once_is_found(tmp_path: Path) -> None:
    wrote(tmp_path, 0, 0, 2, "h1", 1, 6)
    wrote(tmp_path, 0, 1, 2, "h2", 1, 2)
    wrote(tmp_path, 1, 0, 2, "h1", 5, 9, step=2)
    with pytest.raises(AssertionError, match="h1 was in two worlds at once"):
        Worlds(tmp_path).validate()


def test_survivors_that_change_places_and_work_that_begins_anew_are_found(tmp_path: Path) -> None:
    for rank in (0, 1):
        wrote(tmp_path, 0, rank, 2, f"h{rank + 1}", 1, 5)
    for rank in (0, 1):
        wrote(tmp_path, 1, rank, 2, f"h{2 - rank}", 6, 9, step=2)
    with pytest.raises(AssertionError, match="survivors changed places"):
        Worlds(tmp_path).validate()
    for rank in (0, 1):
        (tmp_path / f"steps--1--1--{rank}--2--h{2 - rank}").unlink()
        wrote(tmp_path, 1, rank, 2, f"h{rank + 1}", 6, 9, step=1)
    with pytest.raises(AssertionError, match="rank 0 began anew"):
        Worlds(tmp_path).validate()
