"""A worker, an agent, all processes of a host, a host or its cable are lost: the others train on."""

import pytest
from conftest import Hosts

TWO = pytest.mark.parametrize("hosts", [(2, "veth")], indirect=True)


def without(names: list[str], *lost: str) -> list[str]:
    return [name for name in names if name not in lost]


def test_worker_fails_and_all_four_hosts_restart_once(hosts: Hosts) -> None:
    hosts.start("--nnodes=4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    hosts.fail(2)
    new = hosts.until_world(hosts.names, world.up_s)
    failed_s = hosts.worlds.read()[0].ranks[2].last_s
    hosts.note("worker failure -> decided", hosts.decided(failed_s) - failed_s)
    hosts.note("worker failure -> all ranks up", new.up_s - failed_s)
    assert [new.rank_of(host) for host in hosts.names] == [world.rank_of(host) for host in hosts.names]
    hosts.until_trains(new, 40)
    assert hosts.worlds.generations() == [0, 1]
    assert not any(agent.said("to end, at most") for agent in hosts.agents.values()), hosts.story()  # of a stop that was over
    hosts.finish()


def test_agent_killed_and_its_keeper_brings_it_back_as_the_same_member(hosts: Hosts) -> None:
    hosts.start("--nnodes=4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world, 40)  # longer than the keeper's shortest life of an agent
    at = hosts.kill_agent("h3")
    again = hosts.until(lambda: hosts.agents["h3"].said("starts again", at), "the keeper's word")
    hosts.note("agent SIGKILL -> keeper starts another", again - at)
    new = hosts.until_world(hosts.names, at)
    hosts.note("agent SIGKILL -> decided", hosts.decided(at) - at)
    hosts.note("agent SIGKILL -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    assert hosts.worlds.generations() == [0, 1]
    hosts.finish()


def test_all_processes_of_a_host_are_killed(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.kill_everything("h2")
    hosts.lost.add("h2")
    new = hosts.until_world(without(hosts.names, "h2"), at)
    hosts.note("all processes of one of 4 hosts killed -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    hosts.finish()


def test_host_crashes(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    hosts.until_trains(hosts.until_world(hosts.names))
    at = hosts.rig("crash", "h4")
    hosts.lost.add("h4")
    new = hosts.until_world(without(hosts.names, "h4"), at)
    hosts.note("host crash -> decided", hosts.decided(at) - at)
    hosts.note("host crash -> all ranks up", new.up_s - at)
    hosts.until_trains(new)
    hosts.finish()


def test_contact_point_crashes_and_one_that_comes_later_joins_by_the_others(hosts: Hosts) -> None:
    """Also the host of rank 0 and of the tiebreak: nothing of it is special once there is a view."""
    hosts.start("--nnodes=2:4", "--elastic-join=now")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    assert world.rank_of("h1") == 0
    at = hosts.rig("crash", "h1")
    new = hosts.until_world(["h2", "h3", "h4"], at)
    hosts.note("contact point crashes -> all ranks up", new.up_s - at)
    hosts.rig("crash", "h4")
    newer = hosts.until_world(["h2", "h3"], new.up_s)
    hosts.rig("boot", "h4")
    hosts.start(on="h4")
    hosts.until_trains(hosts.until_world(["h2", "h3", "h4"], newer.up_s))
    hosts.lost.add("h1")
    hosts.finish()


def test_contact_point_crashes_while_the_world_starts_anew(hosts: Hosts) -> None:
    hosts.start("--nnodes=3:4")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    hosts.fail(3)
    hosts.until(lambda: hosts.worlds.complete(hosts.names) is None or hosts.decided(world.up_s) > 0, "the restart")
    at = hosts.rig("crash", "h1")
    hosts.lost.add("h1")
    hosts.until_trains(hosts.until_world(["h2", "h3", "h4"], at))
    hosts.finish()


def test_contact_point_crashes_before_there_is_a_world(hosts: Hosts) -> None:
    """min_nodes is more than half of the listed slots: any three may begin (A10 a)."""
    hosts.start("--nnodes=3:4", on="h1")
    hosts.until(lambda: hosts.pids("h1", "hyperpodrun"), "h1's agent")
    hosts.rig("crash", "h1")
    hosts.lost.add("h1")
    for host in ("h2", "h3", "h4"):
        hosts.start(on=host)
    hosts.until_trains(hosts.until_world(["h2", "h3", "h4"]))
    hosts.finish()


def test_spare_takes_the_place_of_a_crashed_host(hosts: Hosts) -> None:
    hosts.start("--nnodes=3", "--spares=1")
    worlds = hosts.until(lambda: [w for w in hosts.worlds.read() if w.is_complete], "a world of three")
    world = worlds[-1]
    hosts.until_trains(world)
    (spare,) = without(hosts.names, *world.hosts)
    victim = next(host for host in world.hosts if world.rank_of(host) == 1)
    at = hosts.rig("crash", victim)
    hosts.lost.add(victim)
    new = hosts.until_world(without(hosts.names, victim), at)
    hosts.note("host crash -> spare in its place, all ranks up", new.up_s - at)
    assert new.rank_of(spare) == 1
    hosts.until_trains(new)
    hosts.finish()


@TWO
def test_second_of_two_is_killed_and_the_first_goes_on_alone(hosts: Hosts) -> None:
    hosts.start("--nnodes=1:2")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    assert world.rank_of("h1") == 0
    at = hosts.kill_everything("h2")
    new = hosts.until_world(["h1"], at)
    hosts.note("nnodes 1:2, one killed with all its processes -> the other trains", new.up_s - at)
    hosts.lost.add("h2")
    hosts.until_trains(new)
    hosts.finish()


@TWO
@pytest.mark.parametrize("victim", ["h1", "h2"])
def test_either_agent_of_two_is_killed_and_both_train_again(hosts: Hosts, victim: str) -> None:
    hosts.start("--nnodes=1:2")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world, 40)
    at = hosts.kill_agent(victim)
    new = hosts.until_world(hosts.names, at)
    hosts.note(f"nnodes 1:2, agent of {victim} killed -> both train", new.up_s - at)
    hosts.until_trains(new)
    # Whether the other trained alone for the moment that the agent needed to come back is a matter of speed.
    assert hosts.worlds.generations() in ([0, 1], [0, 1, 2])
    hosts.finish()


@pytest.mark.slow
@TWO
def test_host_of_the_tiebreak_is_lost_and_the_other_says_what_it_waits_for(hosts: Hosts) -> None:
    hosts.start("--nnodes=1:2")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    at = hosts.rig("crash", "h1")
    said = hosts.until(lambda: hosts.agents["h2"].said("waiting for h1:29400", at), "what h2 waits for")
    hosts.note("the tiebreak's host lost -> the other says what it waits for", said - at)
    # It comes back with nothing in its memory, in its old slot: that says that nothing of it runs.
    hosts.rig("boot", "h1")
    hosts.start(on="h1")
    hosts.until_trains(hosts.until_world(hosts.names, said))
    hosts.finish()
