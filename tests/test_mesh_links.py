"""Who keeps a connection to whom: enough for the watch and the roll call, and few."""

import pytest

from hyperpodrun.agent.mesh.rings import rings
from hyperpodrun.agent.mesh.view import candidates
from hyperpodrun.agent.mesh_links import near
from hyperpodrun.agent.wire.mesh import Member, View

MOST_RINGS = 10


def links(count: int, mode: str = "run") -> tuple[View, dict[str, set[str]], tuple[str, ...]]:
    nodes = tuple(f"n{index:04d}" for index in range(count))
    members = tuple(Member(node, 1, "active") for node in nodes)
    view = View("c", 0, 3, 1, "", members, nodes[0], nodes[::-1] if mode == "run" else (), mode)
    order = candidates("digest", nodes)
    return view, {node: near(node, view, rings(nodes, MOST_RINGS), order) for node in nodes}, order


@pytest.mark.parametrize("count", [2, 5, 16, 200])
def test_watchers_and_watched_are_connected_both_ways(count: int) -> None:
    view, kept, _ = links(count)
    wheel = rings(tuple(member.node for member in view.members), MOST_RINGS)
    for node, others in kept.items():
        assert node not in others
        for subject in wheel.subjects[node]:
            assert subject in others and node in kept[subject]


def test_those_who_speak_to_all_at_once_are_connected_to_all() -> None:
    view, kept, order = links(200)
    for node in (order[0], view.order[0]):
        assert len(kept[node]) == 199
    assert all({*order[:3], view.order[0]} - {node} <= others for node, others in kept.items())


def test_a_large_job_has_a_number_of_connections_that_grows_with_its_nodes_only() -> None:
    for count in (256, 1024):
        view, kept, order = links(count)
        special = {order[0], view.order[0]}
        assert max(len(others) for node, others in kept.items() if node not in special) <= 2 * MOST_RINGS + 4
        assert sum(map(len, kept.values())) < (2 * MOST_RINGS + 6) * count


def test_a_view_without_a_world_has_no_rank_0() -> None:
    view, kept, order = links(40, "hold")
    assert view.order == () and len(kept[order[0]]) == 39
