"""M4: when accusations are enough."""

from hyperpodrun.agent.mesh.alerts import Alerts
from hyperpodrun.agent.mesh.rings import rings
from hyperpodrun.agent.wire.mesh import Alert

NODES = tuple(f"n{i}" for i in range(8))  # K = 7, L = 3, H = 6


def table(*accusers: str, subject: str = "n7") -> Alerts:
    alerts = Alerts("d", rings(NODES, 10))
    for seq, observer in enumerate(accusers):
        alerts.apply(seq, Alert("d", observer, subject, 1, True))
    alerts.settle(100, must=True)
    return alerts


def test_fewer_than_l_is_noise() -> None:
    assert table("n0", "n1").suspects() == ()
    assert table("n0", "n1", "n2").suspects() == ("n7",)


def test_h_alerts_for_long_are_beyond_doubt() -> None:
    alerts = table(*NODES[:6])
    assert alerts.certain(100 + 5, 10) == frozenset()
    assert alerts.certain(100 + 10, 10) == {"n7"}
    assert table(*NODES[:5]).certain(10**9, 10) == frozenset()


def test_an_alert_is_taken_back_and_never_by_an_older_one() -> None:
    alerts = table("n0", "n1", "n2")
    assert not alerts.apply(5, Alert("d", "n0", "n7", 1, False))
    assert alerts.apply(5, Alert("d", "n0", "n7", 2, False))
    alerts.settle(6, must=True)
    assert alerts.suspects() == () and alerts.first_ns is None


def test_an_alert_of_another_view_or_a_stranger_counts_nothing() -> None:
    alerts = table()
    assert not alerts.apply(0, Alert("other", "n0", "n7", 1, True))
    assert not alerts.apply(0, Alert("d", "stranger", "n7", 1, True))
    assert not alerts.apply(0, Alert("d", "n7", "n7", 1, True))


def test_the_alert_of_a_suspected_observer_is_implied() -> None:
    alerts = table("n0", "n1", "n2")
    for observer in ("n0", "n1", "n2"):
        alerts.apply(7, Alert("d", observer, "n6", 1, True))
    alerts.settle(8, must=True)
    assert alerts.count("n7") == 4 and alerts.count("n6") == 4


def test_nobody_is_accused_by_implication_alone() -> None:
    alerts = table("n0", "n1", "n2")
    assert alerts.count("n5") == 0


def test_who_is_not_heard_by_one_member_is_not_taken_in() -> None:
    """M8: an alert about somebody outside bars the door until it is taken back, unless whoever says so is itself suspected."""
    alerts = table()
    assert alerts.apply(0, Alert("d", "n0", "outside", 0, True))
    assert alerts.barred() == {"outside"} and alerts.suspects() == () and alerts.is_quiet
    for seq, observer in enumerate(NODES[1:5]):
        alerts.apply(seq, Alert("d", observer, "n0", 1, True))
    alerts.settle(100, must=True)
    assert alerts.suspects() == ("n0",) and alerts.barred() == frozenset()
    alerts = table()
    alerts.apply(0, Alert("d", "n0", "outside", 0, True))
    alerts.apply(1, Alert("d", "n0", "outside", 1, False))
    assert alerts.barred() == frozenset()
