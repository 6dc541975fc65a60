"""Packets are lost: for a while, for some, for all. Never two worlds, and a world again when the rules allow one."""

import time

import pytest
from conftest import Hosts
from net_worlds import FENCE_S


def test_cut_cable(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("cut", "h2")
    new = hosts.until_world(["h1", "h3", "h4"], at)
    hosts.note("cut cable -> decided", hosts.decided(at) - at)
    hosts.note("cut cable -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    healed = hosts.rig("heal", "h2")
    again = hosts.until_world(hosts.names, healed)
    hosts.note("cable plugged in -> all four train", again.up_s - healed)
    hosts.until_trains(again)
    hosts.finish()


def test_three_against_one(hosts: Hosts) -> None:
    """The one is rank 0's host, the tiebreak and the first contact point."""
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("partition", "h1", "h2 h3 h4")
    new = hosts.until_world(["h2", "h3", "h4"], at)
    hosts.note("partition 3|1 -> all ranks of the three up", new.up_s - at)
    healed = hosts.rig("heal")
    again = hosts.until_world(hosts.names, healed)
    hosts.note("heal -> all four train", again.up_s - healed)
    hosts.until_trains(again)
    hosts.finish()


def test_two_against_two_goes_on_where_the_tiebreak_is(hosts: Hosts) -> None:
    hosts.start("--nnodes=2:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("partition", "h1 h2", "h3 h4")
    new = hosts.until_world(["h1", "h2"], at)
    hosts.note("partition 2|2 -> the tiebreak's side up", new.up_s - at)
    healed = hosts.rig("heal")
    again = hosts.until_world(hosts.names, healed)
    hosts.note("heal -> all four train", again.up_s - healed)
    hosts.until_trains(again)
    hosts.finish()


@pytest.mark.slow
def test_minority_is_stopped_by_the_fence(hosts: Hosts) -> None:
    """Nobody tells the two that they were dropped: their workers end when their lease does."""
    hosts.start("--nnodes=2:4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    at = hosts.rig("partition", "h1 h2", "h3 h4")
    hosts.until_world(["h1", "h2"], at)
    lone = [number for number, rank in world.ranks.items() if rank.host in ("h3", "h4")]
    old = hosts.until(lambda: (w := hosts.worlds.read()[0]).last_s < time.monotonic() - 1 and w, "the fence")
    for number in lone:
        hosts.note(f"partition -> fence of rank {number}", old.ranks[number].last_s - at)
        assert 5 < old.ranks[number].last_s - at < FENCE_S
    healed = hosts.rig("heal")
    hosts.until_trains(hosts.until_world(hosts.names, healed))
    hosts.finish()


def test_one_way_loss_between_two(hosts: Hosts) -> None:
    """What one host sends never arrives at another: one of them goes, and only one, or none."""
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("oneway", "h4", "h2")
    new = hosts.until(lambda: (w := hosts.worlds.read()[-1]).is_complete and w.first_s > at and w, "a new world")
    hosts.note("one way h4 -> h2 lost -> all ranks up", new.up_s - at)
    assert new.size == 3 and {"h1", "h3"} < set(new.hosts), hosts.story()
    hosts.until_trains(new, 60)
    healed = hosts.rig("heal")
    hosts.until_trains(hosts.until_world(hosts.names, healed))
    assert len(hosts.worlds.generations()) <= 4, f"one of the two came and went{hosts.story()}"
    hosts.finish()


def test_host_that_hears_but_is_not_heard(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = time.monotonic()
    for other in ("h1", "h2", "h4"):
        hosts.rig("oneway", "h3", other)
    new = hosts.until_world(["h1", "h2", "h4"], at)
    hosts.note("one host is not heard -> all ranks of the others up", new.up_s - at)
    healed = hosts.rig("heal")
    hosts.until_trains(hosts.until_world(hosts.names, healed))
    hosts.finish()


@pytest.mark.slow
@pytest.mark.slow_network
@pytest.mark.parametrize("percent", ["5", "30"])
def test_packet_loss(hosts: Hosts, percent: str) -> None:
    hosts.start("--nnodes=3:4", "--max-restarts=99")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = time.monotonic()
    for host in hosts.names:
        hosts.rig("loss", host, percent)
    time.sleep(15)  # so long the loss lasts
    worlds = hosts.worlds.read()
    trained_s = sum(world.last_s - max(world.first_s, at) for world in worlds)
    hosts.note(f"{percent} % loss for 15 s: restarts {len(worlds) - 1}; trained for", trained_s)
    healed = hosts.rig("heal")

    def calm() -> bool:
        """Whoever was dropped is back, and it stays so."""
        world = hosts.worlds.read()[-1]
        return world.size == 4 and world.is_complete and hosts.worlds.steps_since(world.key, healed) > 60

    hosts.until(calm, "calm")
    hosts.finish()


@pytest.mark.parametrize("hosts", [(4, "tap")], indirect=True)
def test_20_ms_each_way(hosts: Hosts) -> None:
    for host in hosts.names:
        hosts.rig("delay", host, "10", "2")  # the sender's and the receiver's add up
    hosts.start("--nnodes=3:4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world, 60)
    assert hosts.worlds.generations() == [0]
    hosts.fail(1)
    new = hosts.until_world(hosts.names, world.up_s)
    failed_s = hosts.worlds.read()[0].ranks[1].last_s
    hosts.note("20 ms each way: worker failure -> decided", hosts.decided(failed_s) - failed_s)
    hosts.note("20 ms each way: worker failure -> all ranks up", new.up_s - failed_s)
    at = hosts.rig("crash", "h2")
    hosts.lost.add("h2")
    new = hosts.until_world(["h1", "h3", "h4"], at)
    hosts.note("20 ms each way: host crash -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    hosts.finish()
