"""Planned ports: no two agents of a host plan the same, and the kernel is not to give them away."""

import socket
import subprocess
import sys

import pytest

from hyperpodrun.agent import data_ports
from hyperpodrun.agent.workers import rendezvous

FIRST = 18000


def test_two_agents_of_a_host_plan_different_ports():
    one, other = data_ports.plan(8, FIRST), data_ports.plan(20, FIRST + 5)
    third = data_ports.plan(1, FIRST)
    try:
        planned = [*one.ports, *other.ports, *third.ports]
        assert len(set(planned)) == len(planned) == 29
    finally:
        for ports in (one, other, third):
            ports.close()
    again = data_ports.plan(8, FIRST)
    again.close()
    assert again.first == one.first


def test_the_ports_of_an_agent_that_was_killed_are_free_again():
    code = (
        f"import time; from hyperpodrun.agent import data_ports; ports = data_ports.plan(4, {FIRST});"
        "print(ports.first, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as agent:
        theirs = int(agent.stdout.readline())
        mine = data_ports.plan(4, theirs)
        assert mine.first != theirs
        mine.close()
        agent.kill()
    mine = data_ports.plan(4, theirs)
    assert mine.first == theirs
    mine.close()


def test_a_port_that_somebody_listens_on_is_not_planned():
    ports = data_ports.plan(4, FIRST)
    ports.close()
    with socket.create_server(("127.0.0.1", ports.first + 2)):
        mine = data_ports.plan(4, ports.first)
    mine.close()
    assert mine.first > ports.first + 2


def test_stores_do_not_listen_on_planned_ports(monkeypatch):
    monkeypatch.setattr(rendezvous, "FIRST_PORT", rendezvous.DATA_PORTS.start)
    monkeypatch.setattr(rendezvous, "ephemeral_range", lambda: (rendezvous.DATA_PORTS.stop + 1, 60999))
    assert rendezvous.choose_port() not in rendezvous.DATA_PORTS


@pytest.mark.parametrize(
    "planned, ephemeral, reserved, command",
    [
        (range(18000, 18004), (32768, 60999), "", ""),
        (range(18000, 18004), (20000, 65535), "", ""),
        ([*range(18000, 18004), 29400], (20000, 65535), "", "ip_local_reserved_ports=29400"),
        (range(18000, 18004), (1024, 65535), "", "ip_local_reserved_ports=18000-18003"),
        (range(18000, 18004), (1024, 65535), "18000-18001,18003", "ip_local_reserved_ports=18000-18003"),
        (range(18000, 18004), (1024, 65535), "80,17000-19000", ""),
        (range(18000, 18004), (18002, 65535), "8080", "ip_local_reserved_ports=8080,18002-18003"),
    ],
)
def test_ports_that_the_kernel_may_give_away_are_told_with_what_keeps_them(planned, ephemeral, reserved, command):
    said = data_ports.exposed(planned, ephemeral, reserved)
    assert said.endswith(command) if command else not said
