"""M6, M7: what is told, and until when."""

import msgspec

from hyperpodrun.agent.mesh.config import MS, MeshConfig
from hyperpodrun.agent.mesh.gossip import Gossip
from hyperpodrun.agent.mesh.history import History, follows, linked
from hyperpodrun.agent.mesh.reports import Reports
from hyperpodrun.agent.mesh.view import digest_of, incarnations
from hyperpodrun.agent.wire.mesh import Alert, Member, Report, View

CONFIG = MeshConfig(slots=4, min_nodes=1, max_nodes=4)
VIEW = View("c", 0, 1, 3, "p", tuple(Member(n, 1, "active") for n in "abc"), "a", ("a", "b", "c"), "run")


def table(view: View = VIEW) -> Reports:
    made = Reports(CONFIG)
    made.adopt(view, incarnations(tuple(member.source for member in view.members)))
    return made


def test_a_report_is_news_once_and_only_about_this_generation() -> None:
    reports = table()
    assert reports.apply(5, Report("failed", ("a", 1), 3)) and not reports.apply(6, Report("failed", ("a", 1), 3))
    assert not reports.apply(5, Report("failed", ("b", 1), 2))
    assert not reports.apply(5, Report("failed", ("b", 9), 3))
    assert reports.convene_at(6) == 5 + CONFIG.report_quiet_ns


def test_a_view_that_dealt_with_a_report_forgets_it() -> None:
    reports = table()
    reports.apply(5, Report("failed", ("a", 1), 3))
    reports.apply(5, Report("leaving", ("b", 1), 3))
    reports.adopt(msgspec.structs.replace(VIEW, generation=4), dict.fromkeys("abc", 1))
    assert reports.of("failed") == () and reports.nodes("leaving") == {"b"}


def test_a_report_about_another_incarnation_is_about_nobody_here_but_for_a_slot_that_is_gone_for_good() -> None:
    reports = table()
    assert not reports.apply(5, Report("leaving", ("b", 2), 3))
    assert not reports.apply(5, Report("dead", ("b", 2)))
    assert reports.apply(5, Report("dead", ("z", 2)))
    assert not reports.apply(5, Report("join", ("b", 1), member=Member("b", 1)))


def test_some_finished_ask_for_nothing_and_all_do() -> None:
    reports = table()
    for node in "ab":
        reports.apply(5, Report("finished", (node, 1), 3))
    assert reports.convene_at(6) is None
    reports.apply(9, Report("finished", ("c", 1), 3))
    assert reports.convene_at(9) == 9 + CONFIG.report_quiet_ns


def test_joins_wait_for_their_window_unless_all_slots_are_there() -> None:
    reports = table(msgspec.structs.replace(VIEW, members=VIEW.members[:2], order=("a", "b")))
    reports.apply(5, Report("join", ("x", 1), member=Member("x", 1)))
    assert reports.convene_at(6) == 5 + CONFIG.join_window_ns
    reports.apply(8, Report("join", ("y", 1), member=Member("y", 1)))
    assert reports.convene_at(9) == 5 + CONFIG.report_quiet_ns


def test_a_slot_that_comes_back_does_not_wait_and_a_join_that_is_not_repeated_is_forgotten() -> None:
    reports = table()
    reports.apply(5, Report("join", ("b", 2), member=Member("b", 2)))
    assert reports.convene_at(6) == 5 + CONFIG.report_quiet_ns
    later = 6 + reports.join_fresh_ns
    assert reports.joiners(later) == () and reports.convene_at(later) is None


def test_a_certificate_for_a_member_asks_for_a_view_and_one_for_an_empty_slot_does_not() -> None:
    reports = table()
    reports.apply(5, Report("dead", ("z", 0)))
    assert reports.convene_at(6) is None and reports.nodes("dead") == {"z"}
    reports.apply(7, Report("dead", ("a", 1)))
    assert reports.convene_at(8) == 7 + CONFIG.report_quiet_ns


def test_gossip_tells_each_item_for_a_few_rounds_the_newest_first() -> None:
    gossip = Gossip(most=1)
    gossip.adopt(3)
    one, two = Alert("d", "a", "b", 1, True), Alert("d", "a", "c", 1, True)
    gossip.put(one)
    first = gossip.take()
    gossip.put(two)
    assert first == (one,) and gossip.take() == (two,)
    rounds = 0
    while gossip.take():
        rounds += 1
    assert rounds < 20 and CONFIG.heartbeat_ns == 250 * MS


def test_history_gives_what_somebody_lacks() -> None:
    second = msgspec.structs.replace(VIEW, number=2, parent=digest_of(VIEW))
    history = History()
    history.add(VIEW, False)
    history.add(second, False)
    assert history.after(0) == (VIEW, second) and history.after(1) == (second,) and history.after(2) == ()
    assert linked((VIEW, second)) and not linked((second, VIEW))
    assert not follows(VIEW, "another digest", second)
