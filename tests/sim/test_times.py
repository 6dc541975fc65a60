"""How long until the next view (issue: must show; I7, I8)."""

import pytest

from hyperpodrun.agent.mesh.config import MeshConfig, S
from hyperpodrun.agent.sim.faults import Fault, Kind, Schedule, names
from hyperpodrun.agent.sim.world import World


def job(nodes: int, *faults: Fault, seed: int = 0, end_ms: int = 9000) -> World:
    everyone = names(nodes)
    config = MeshConfig(
        slots=nodes, min_nodes=nodes // 2 + 1 if nodes > 2 else 1, max_nodes=nodes, roster=everyone, first_contact=everyone[0],
        lease_ns=4 * S, fence_ns=5 * S,
    )  # fmt: skip
    return World(Schedule(seed, config, tuple((node, 0) for node in everyone), faults, end_ms))


def decided_s(world: World, number: int) -> float:
    """When view `number` was decided first."""
    return min(at for digest, at in world.invariants.decided_at.items() if world.invariants.views[digest].number == number) / S


def accused_s(world: World) -> float:
    """When somebody was accused first."""
    return min(
        host.true(at) for host in world.hosts.values() if host.node is not None
        for at, _, text in host.node.story() if text.startswith("accuses")
    ) / S  # fmt: skip


@pytest.mark.parametrize("nodes", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("kind", "within_s"), [("fail", 0.150), ("crash", 0.8), ("power", 2.0), ("restart", 0.150), ("leave", 1.0)]
)
def test_one_fault_is_decided_in_time(nodes: int, kind: Kind, within_s: float) -> None:
    """Worker failure 150 ms, agent killed 0.8 s, silent host 2 s; and 1 s after the first accusation (I8)."""
    for seed in range(5):
        victim = names(nodes)[-1]
        world = job(nodes, Fault(3000, kind, (victim,), 4000 if kind == "crash" else 0), seed=seed)
        world.run(6000)
        assert decided_s(world, 1) - 3.0 <= within_s, seed
        if kind in ("crash", "power"):
            assert decided_s(world, 1) - accused_s(world) <= 1.0, seed


@pytest.mark.parametrize("nodes", [3, 5, 8])
def test_after_a_partition_heals_there_is_one_view_within_two_seconds(nodes: int) -> None:
    """I7."""
    for seed in range(5):
        side = names(nodes)[: (nodes - 1) // 2]
        world = job(nodes, Fault(3000, "partition", side, 6500), seed=seed, end_ms=20_000)
        world.run(9500 + 2000)
        views = {host.node.view for host in world.hosts.values() if host.node is not None}
        assert len(views) == 1 and None not in views, seed


def test_a_host_that_stands_still_for_two_seconds_changes_nothing() -> None:
    """A false kick costs a restart (M2)."""
    for seed in range(10):
        world = job(4, Fault(3000 + 77 * seed, "freeze", ("n02",), 2000), seed=seed)
        world.run()
        assert {host.node.view.number for host in world.hosts.values() if host.node and host.node.view} == {0}


def test_half_of_the_messages_lost_for_a_second_drops_nobody_for_good() -> None:
    world = job(5, Fault(3000, "loss", (), 1000, 50), end_ms=15_000)
    world.run()
    members = {len(host.node.view.members) for host in world.hosts.values() if host.node and host.node.view}
    assert members == {5}


def test_an_idle_mesh_sends_at_most_fifty_messages_a_second_and_node() -> None:
    """Whatever its size (M1: K observers at most)."""
    for nodes in (2, 16):
        world = job(nodes)
        world.run(4000)
        before = world.messages
        world.run(8000)
        assert (world.messages - before) / nodes / 4 <= 50


def test_clocks_that_run_apart_change_nothing() -> None:
    """Leases compare no two clocks; their rates differ by 300 ppm here."""
    world = job(3, end_ms=60_000)
    for index, host in enumerate(world.hosts.values()):
        host.ppm = (-300, 0, 300)[index]
    world.run()
    assert all(host.works is not None for host in world.hosts.values())
