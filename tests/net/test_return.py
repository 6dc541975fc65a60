"""Hosts that come back: after a reboot, after all were lost at once, after they stood still."""

import time

import pytest
from conftest import Hosts


def test_host_reboots_and_gets_a_place(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("crash", "h3")
    new = hosts.until_world(["h1", "h2", "h4"], at)
    hosts.until_trains(new)
    at = hosts.rig("boot", "h3")
    hosts.start(on="h3")
    again = hosts.until_world(hosts.names, at)
    hosts.note("rebooted host starts again -> all four train", again.up_s - at)
    hosts.until_trains(again)
    hosts.finish()


def test_host_reboots_sooner_than_it_is_missed(hosts: Hosts) -> None:
    """Its old incarnation was never accused; the new one in its slot says that nothing of it runs."""
    hosts.start("--nnodes=4")
    hosts.until_trains(hosts.until_world(hosts.names))
    hosts.rig("crash", "h3")
    at = hosts.rig("boot", "h3")
    hosts.start(on="h3")
    again = hosts.until_world(hosts.names, at)
    hosts.note("host rebooted at once -> all four train", again.up_s - at)
    hosts.until_trains(again)
    hosts.finish()


def test_rebooted_host_stands_by_when_its_place_is_taken(hosts: Hosts) -> None:
    hosts.start("--nnodes=3", "--spares=1")
    world = hosts.until(lambda: [w for w in hosts.worlds.read() if w.is_complete], "a world of three")[-1]
    hosts.until_trains(world)
    victim = world.hosts[-1]
    at = hosts.rig("crash", victim)
    rest = [host for host in hosts.names if host != victim]
    new = hosts.until_world(rest, at)
    hosts.rig("boot", victim)
    hosts.start(on=victim)
    hosts.until_trains(new, 60)
    assert hosts.worlds.read()[-1].key == new.key, hosts.story()
    # It stands by: the next loss is made good by it.
    gone = next(host for host in rest if new.rank_of(host) == 2)
    at = hosts.rig("crash", gone)
    hosts.lost.add(gone)
    hosts.until_trains(hosts.until_world([host for host in hosts.names if host != gone], at))
    hosts.finish()


def test_all_hosts_crash_and_the_job_is_started_again(hosts: Hosts) -> None:
    hosts.start("--nnodes=4", "--job-id=phoenix")
    hosts.until_trains(hosts.until_world(hosts.names))
    hosts.rig("crash", *hosts.names)
    hosts.rig("boot", *hosts.names)
    at = time.monotonic()
    hosts.start()
    new = hosts.until_world(hosts.names, at)
    hosts.note("all hosts rebooted -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    hosts.finish()


def test_all_processes_are_killed_and_the_job_is_started_again(hosts: Hosts) -> None:
    """The hosts stay, so their vote files do: they come back as the members they were."""
    hosts.start("--nnodes=4", "--job-id=phoenix")
    hosts.until_trains(hosts.until_world(hosts.names))
    for host in hosts.names:
        hosts.kill_everything(host)
    at = time.monotonic()
    hosts.start()
    new = hosts.until_world(hosts.names, at)
    hosts.note("all launchers killed and started again -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    hosts.finish()


def test_host_that_stands_still_for_2_s_is_waited_for(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    hosts.rig("freeze", "h2")
    time.sleep(2)
    hosts.rig("thaw", "h2")
    hosts.until_trains(world, 60)
    assert hosts.worlds.generations() == [0], hosts.story()
    hosts.finish()


@pytest.mark.slow
def test_host_that_stands_still_for_20_s_is_dropped_and_rejoins(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    at = hosts.rig("freeze", "h2")
    hosts.worlds.excuse("h2", at)
    new = hosts.until_world(["h1", "h3", "h4"], at)
    hosts.note("host stands still -> all ranks of the others up", new.up_s - at)
    time.sleep(max(0.0, at + 20 - time.monotonic()))
    thawed = hosts.rig("thaw", "h2")
    again = hosts.until_world(hosts.names, thawed)
    old = hosts.worlds.read()[0]
    late = next(rank for rank in old.ranks.values() if rank.host == "h2")
    hosts.note("thawed -> last line of the old world's worker", late.last_s - thawed)
    hosts.note("thawed -> all four train", again.up_s - thawed)
    assert late.last_s - thawed < 1.0
    hosts.until_trains(again)
    hosts.finish()
