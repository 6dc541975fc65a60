"""M2, M3, M5: silence, refusals, and doubting oneself."""

from hyperpodrun.agent.mesh.config import MS, MeshConfig, S
from hyperpodrun.agent.mesh.detector import Detector
from hyperpodrun.agent.mesh.effects import Connect, Send
from hyperpodrun.agent.wire.mesh import NOWHERE, Probe

CONFIG = MeshConfig(slots=3, min_nodes=1, max_nodes=3)
PROBE = Probe(NOWHERE)
STEP = CONFIG.heartbeat_ns


def watching(*subjects: str) -> Detector:
    detector = Detector(CONFIG)
    detector.adopt(0, subjects)
    return detector


def rounds(detector: Detector, first: int, last: int, heard: tuple[str, ...] = ()) -> list[object]:
    asked: list[object] = []
    for step in range(first, last + 1):
        for node in heard:
            detector.heard(step * STEP, node)
        asked += detector.round(step * STEP, PROBE)
    return asked


def test_silence_of_two_intervals_asks_and_of_three_accuses() -> None:
    detector = watching("a", "b")
    assert rounds(detector, 1, 1, ("b",)) == []
    assert rounds(detector, 2, 2, ("b",)) == [Send("a", PROBE), Connect("a")]
    assert detector.verdicts() == ()
    rounds(detector, 3, 3, ("b",))
    assert detector.verdicts() == (("a", True, False),)


def test_an_accusation_is_taken_back_when_the_subject_is_heard() -> None:
    detector = watching("a")
    rounds(detector, 1, 3)
    detector.verdicts()
    assert detector.heard(4 * STEP, "a")
    assert detector.verdicts() == (("a", False, False),)


def test_a_refused_connection_accuses_at_once() -> None:
    detector = watching("a")
    detector.lost(10 * MS, "a")
    assert detector.loud(10 * MS, PROBE) == [Send("a", PROBE)]
    assert detector.loud(60 * MS, PROBE) == [Send("a", PROBE)]
    assert detector.loud(110 * MS, PROBE) == [Connect("a")]
    detector.connected(111 * MS, "a", True)
    assert detector.verdicts() == (("a", True, True),)


def test_a_lost_connection_that_comes_back_accuses_nobody() -> None:
    detector = watching("a")
    detector.lost(10 * MS, "a")
    detector.heard(40 * MS, "a")
    assert detector.loud_due() is None and detector.loud(60 * MS, PROBE) == []


def test_a_process_that_stands_still_gets_more_time_than_a_silent_host() -> None:
    """A peer stopped for 2 s is not accused."""
    detector = watching("a")
    for step in range(1, 12):
        detector.round(step * STEP, PROBE)
        detector.connected(step * STEP, "a", False)
    assert 11 * STEP > 2 * S and detector.verdicts() == ()
    rounds(detector, 12, 12)
    assert detector.verdicts() == (("a", True, False),)


def test_a_starved_agent_doubts_itself_first() -> None:
    detector = watching("a")
    detector.round(20 * STEP, PROBE)  # it slept through 20 rounds: nobody was listened to
    assert detector.score > 0 and detector.verdicts() == ()
    assert detector.patience_ns(20 * STEP, "a") > CONFIG.misses * STEP


def test_the_score_sinks_when_all_is_heard_and_stays_between_0_and_7() -> None:
    detector = watching("a")
    for _ in range(20):
        detector.refuted()
    assert detector.score == 7
    rounds(detector, 1, 10, ("a",))
    assert detector.score == 0
    detector.validate()
