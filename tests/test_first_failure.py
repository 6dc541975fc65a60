"""A node's first failure is told once, in the right words, and not before the culprit's own."""

from typing import Any

import msgspec
import pytest

from hyperpodrun.agent.failure import Verdict
from hyperpodrun.agent.first_failure import DOUBT_S, LOOK_AGAIN_S, READ_S, VICTIM_WAIT_S, FirstFailure
from hyperpodrun.agent.wire.link import Fault
from hyperpodrun.agent.workers.group_words import End

FAILED = End(local_rank=1, pid=7, status=256, at_s=0.0)
CULPRIT = End(local_rank=0, pid=6, status=9, at_s=0.1)
WORDS = Verdict(3, headline="rank 1 said why")
OVER = Verdict(3, headline="rank 1 said why, in the end")
VICTIMS = Verdict(3, headline="rank 1 said why", victim=True)
BEATEN = Verdict(3, headline="rank 1 said why, in the end", victim=True)


RAISED = End(local_rank=1, pid=7, status=None, at_s=0.0, fault=Fault(0, "ValueError", "ValueError: boom"))


class Desk:
    victim = False

    def first_words(self, end: End) -> Verdict:
        return msgspec.structs.replace(WORDS, victim=self.victim and end is not CULPRIT)

    def first_report(self, end: End) -> str:
        return "the whole report"


class Scene:
    """What happened, in order."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.desk = Desk()
        self.events: list[object] = []
        self.is_missed = False
        self.first = FirstFailure(
            clock, self.desk, self.events.append, self.events.append, lambda: self.is_missed
        )  # type: ignore[arg-type]  # fmt: skip

    def over(self, verdict: Verdict) -> None:
        self.first.over(verdict, lambda: self.events.append(("over", verdict)))


@pytest.fixture
def scene(clock: Any) -> Scene:
    return Scene(clock)


def test_told_and_shipped_once_the_last_words_are_read(scene: Scene) -> None:
    scene.first.failed(FAILED)
    scene.first.drained(0)
    scene.clock.pass_time(0)
    assert scene.events == []
    scene.first.drained(1)
    scene.clock.pass_time(0)
    assert scene.events == [WORDS, "the whole report"]
    scene.first.drained(1)
    scene.over(OVER)
    scene.clock.pass_time(60)
    assert scene.events[2:] == [("over", OVER)]


def test_told_without_them_when_they_take_long_and_shipped_when_they_come(scene: Scene) -> None:
    scene.first.failed(FAILED)
    scene.clock.pass_time(READ_S)
    assert scene.events == [WORDS]
    scene.first.drained(1)
    assert scene.events == [WORDS, "the whole report"]


def test_attempt_that_is_over_at_once_is_passed_on_after_the_word(scene: Scene) -> None:
    scene.first.failed(FAILED)
    scene.over(OVER)
    assert scene.events == [WORDS, "the whole report", ("over", OVER)]


def test_failure_without_a_failed_rank_is_told_in_the_end(scene: Scene) -> None:
    scene.over(OVER)
    assert scene.events == [OVER, ("over", OVER)]


def test_success_needs_no_word(scene: Scene) -> None:
    scene.over(Verdict(0))
    assert scene.events == [("over", Verdict(0))]


def test_likely_victim_waits_for_the_culprits_word(scene: Scene) -> None:
    scene.desk.victim = True
    scene.first.failed(FAILED)
    scene.first.drained(1)
    scene.clock.pass_time(0)
    scene.over(BEATEN)
    scene.clock.pass_time(VICTIM_WAIT_S / 2)
    assert scene.events == []
    scene.first.settle()
    assert scene.events == [("over", BEATEN)], "the culprit's node told already"
    scene.clock.pass_time(60)
    assert scene.events == [("over", BEATEN)]


def test_victim_is_told_when_nobody_else_speaks(scene: Scene) -> None:
    scene.desk.victim = True
    scene.first.failed(FAILED)
    scene.over(BEATEN)
    scene.clock.pass_time(VICTIM_WAIT_S)
    assert scene.events == [VICTIMS, "the whole report", ("over", BEATEN)]


def test_victim_waits_for_the_decision_about_a_node_that_is_missed(scene: Scene) -> None:
    scene.desk.victim = scene.is_missed = True
    scene.first.failed(FAILED)
    scene.over(OVER)
    scene.clock.pass_time(DOUBT_S / 2)
    assert scene.events == []
    scene.first.settle()
    scene.clock.pass_time(60)
    assert scene.events == [("over", OVER)], "the loss of a node is no failure of the workers that noticed it"


def test_victim_is_told_once_the_node_is_there_or_has_been_missed_for_long(scene: Scene) -> None:
    scene.desk.victim = scene.is_missed = True
    scene.first.failed(FAILED)
    scene.clock.pass_time(READ_S)
    scene.clock.pass_time(VICTIM_WAIT_S)
    assert scene.events == []
    scene.is_missed = False
    scene.clock.pass_time(LOOK_AGAIN_S)
    assert scene.events == [VICTIMS]
    scene.first.begin()
    scene.is_missed = True
    scene.first.failed(FAILED)
    scene.clock.pass_time(READ_S + DOUBT_S)
    assert scene.events == [VICTIMS, VICTIMS]


def test_settled_elsewhere_before_the_words_are_read(scene: Scene) -> None:
    scene.first.failed(FAILED)
    scene.first.settle()
    scene.clock.pass_time(60)
    assert scene.events == []
    scene.over(OVER)
    assert scene.events == [("over", OVER)]


def test_next_attempt_starts_from_nothing(scene: Scene) -> None:
    scene.desk.victim = True
    scene.first.failed(FAILED)
    scene.clock.pass_time(READ_S)
    scene.first.begin()
    scene.clock.pass_time(60)
    assert scene.events == []
    scene.desk.victim = False
    scene.first.failed(FAILED)
    scene.first.failed(FAILED)
    scene.clock.pass_time(READ_S)
    assert scene.events == [WORDS]


def test_rank_that_said_itself_what_failed_is_told_at_once(scene: Scene) -> None:
    scene.first.failed(RAISED)
    assert scene.events == [WORDS, "the whole report"]


def test_culprit_on_the_same_node_is_told_in_its_victims_place(scene: Scene) -> None:
    scene.desk.victim = True
    scene.first.failed(RAISED)
    scene.clock.pass_time(VICTIM_WAIT_S / 3)
    assert scene.events == []
    scene.first.further(CULPRIT)
    scene.first.drained(0)
    scene.clock.pass_time(0)
    assert scene.events == [WORDS, "the whole report"]
    scene.first.further(FAILED)
    scene.clock.pass_time(60)
    assert scene.events == [WORDS, "the whole report"]


def test_verdict_over_all_that_failed_here_ends_the_wait(scene: Scene) -> None:
    scene.desk.victim = True
    scene.first.failed(RAISED)
    scene.over(OVER)
    assert scene.events[0] == OVER and scene.events[-1] == ("over", OVER)
