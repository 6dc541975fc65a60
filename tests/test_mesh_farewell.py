"""Leaving when the job is over: as soon as everyone near knows."""

from typing import Any

import pytest

from hyperpodrun.agent import mesh_farewell
from hyperpodrun.agent.mesh_farewell import Farewell


class Scene:
    def __init__(self, clock: Any, *neighbours: str) -> None:
        self.clock = clock
        self.told: list[str] = []
        self.gone = 0
        self.farewell = Farewell(clock, lambda: set(neighbours), self.told.append)

    def begin(self, awaits_report: bool = False) -> None:
        self.farewell.begin(awaits_report, self._gone)

    def _gone(self) -> None:
        self.gone += 1


def test_leaves_at_once_where_nobody_is_near(clock: Any) -> None:
    scene = Scene(clock)
    scene.begin()
    scene.clock.pass_time(mesh_farewell.LAST_WORD_S)
    assert scene.gone == 1


def test_stays_until_all_near_know_and_has_the_last_word(clock: Any) -> None:
    scene = Scene(clock, "a", "b")
    scene.farewell.knows("a")
    scene.begin()
    scene.clock.pass_time(0.35)
    assert scene.gone == 0
    assert scene.told == ["b"] * 4, "only those that have not answered are told again"
    scene.told.clear()
    scene.farewell.knows("b")
    assert scene.told == ["a", "b"], "they wait for this agent's word too"
    scene.clock.pass_time(mesh_farewell.LAST_WORD_S)
    assert scene.gone == 1
    scene.farewell.knows("b")
    scene.clock.pass_time(60)
    assert scene.gone == 1 and scene.told == ["a", "b"]


def test_silent_neighbours_are_not_waited_for_for_ever(clock: Any) -> None:
    scene = Scene(clock, "a")
    scene.begin()
    scene.clock.pass_time(mesh_farewell.LONGEST_S)
    assert scene.gone == 1


@pytest.mark.parametrize("comes", [True, False])
def test_rank_zeros_node_waits_a_moment_for_the_report(clock: Any, comes: bool) -> None:
    scene = Scene(clock, "a")
    scene.farewell.knows("a")
    scene.begin(awaits_report=True)
    scene.clock.pass_time(mesh_farewell.REPORT_S / 2)
    assert scene.gone == 0
    if comes:
        scene.farewell.report_came()
        scene.clock.pass_time(mesh_farewell.LAST_WORD_S)
    else:
        scene.clock.pass_time(mesh_farewell.REPORT_S / 2 + mesh_farewell.LAST_WORD_S)
    assert scene.gone == 1


def test_before_the_end_nothing_makes_it_leave(clock: Any) -> None:
    scene = Scene(clock, "a")
    scene.farewell.tell_all()
    scene.farewell.knows("a")
    scene.farewell.report_came()
    scene.clock.pass_time(60)
    assert (scene.gone, scene.told) == (0, ["a"])


def test_at_once(clock: Any) -> None:
    scene = Scene(clock, "a")
    scene.farewell.at_once(scene._gone)
    scene.clock.pass_time(mesh_farewell.LAST_WORD_S)
    assert (scene.gone, scene.told) == (1, [])
