import os
import signal
import time

from conftest import Hosts


def test_crash(hosts: Hosts) -> None:
    hosts.start("--nnodes=2:4", "--job-id=a")
    world = hosts.until_world(hosts.names)
    hosts.until_trains(world)
    at = hosts.rig("crash", "h4")
    new = hosts.until_world(["h1", "h2", "h3"], at)
    hosts.note("crash decided", hosts.decided(at) - at)
    hosts.note("crash all up", new.up_s - at)
    print(hosts.story())
