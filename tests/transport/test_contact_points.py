"""What `--peers` may say, and what becomes of it."""

import os
import stat

import pytest

from hyperpodrun.agent.transport.addresses import Address, BadAddressError
from hyperpodrun.agent.transport.contact_points import (
    ContactPoints,
    Dns,
    Listed,
    Slurm,
    parse_contact,
    parse_endpoint,
    parse_file,
)


def parse(text, environ=None, files=None):
    return parse_contact(text, environ or {}, (files or {}).__getitem__)


def test_a_list_keeps_its_order_and_names_each_once():
    assert parse("b:1, a,[::1]:3,b:1") == Listed((Address("b", 1), Address("a"), Address("::1", 3)))


def test_a_file_has_lines_and_comments():
    content = "# the mesh\r\nn1:5, n2\n\n n3 # spare\n"
    expected = Listed((Address("n1", 5), Address("n2"), Address("n3")))
    assert parse_file(content) == expected == parse("@hosts", files={"hosts": content})
    with pytest.raises(BadAddressError, match="names no host"):
        parse_file("# nothing\n")


def test_slurm_prefers_the_step_to_the_job():
    job = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NODELIST": "n[1-3]"}
    assert parse("slurm:", job | {"SLURM_STEP_NODELIST": "n[2-3]"}) == Slurm("n[2-3]")
    assert parse("slurm:", job) == Slurm("n[1-3]")
    with pytest.raises(BadAddressError, match="this is no Slurm job"):
        parse("slurm:")
    with pytest.raises(BadAddressError, match="nothing may follow"):
        parse("slurm:x", job)


def test_dns_names_have_a_port():
    assert parse("dns:mesh.ns.svc:29400") == Dns("mesh.ns.svc", 29400)
    for wrong in ("dns:mesh", "dns::1", "dns:mesh:0"):
        with pytest.raises(BadAddressError):
            parse(wrong)


def test_rendezvous_endpoints_are_contact_points():
    assert parse_endpoint("head:29400") == Listed((Address("head", 29400),))
    assert parse_endpoint("head") == Listed((Address("head"),))
    assert parse_endpoint("") == parse_endpoint("localhost:0") == Listed(())


class World:
    """A name server and a reaper by hand."""

    def __init__(self, reactor):
        self.reactor = reactor
        self.answers = []
        self.questions = []
        self.children = {}
        self.told = []
        self.said = []

    def ask(self, host, found):
        self.questions.append(host)
        found(*(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]))

    def points(self, *contacts):
        return ContactPoints(
            self.reactor, self.ask, self.children.__setitem__, contacts, 29400, self.told.append, self.said.append
        )

    def reap(self):
        for pid, on_exit in list(self.children.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self.children[pid]
                on_exit(status)


@pytest.fixture
def world(net):
    return World(net.reactor)


def at(*hosts, port=29400):
    return tuple(Address(host, port) for host in hosts)


def test_lists_and_slurm_are_known_at_once_with_the_default_port(world):
    world.points(Listed((Address("a"), Address("b", 7))), Slurm("n[1-2],a"), Listed(())).start()
    assert world.told == [(Address("a", 29400), Address("b", 7), *at("n1", "n2"))]


def test_a_dns_name_is_asked_again_and_changes_are_told(world, net, monkeypatch):
    monkeypatch.setattr("hyperpodrun.agent.transport.contact_points.ASK_AGAIN_S", 0.001)
    nothing = ([], "Name or service not known")
    world.answers = [nothing, nothing, (["10.0.0.2"], ""), (["10.0.0.2"], ""), nothing, (["fd00::1", "10.0.0.2"], "")]
    points = world.points(Dns("mesh", 5))
    points.start()
    net.until(lambda: len(world.told) == 2)
    assert world.told == [at("10.0.0.2", port=5), at("10.0.0.2", "fd00::1", port=5)]
    # Once before the first answer, and once when the name was lost again.
    assert len(world.said) == 2 and world.said[0].startswith("no addresses behind mesh yet (Name or service not known)")
    points.close()
    asked = len(world.questions)
    net.serve(20)
    assert len(world.questions) == asked


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    def install(script):
        path = tmp_path / "scontrol"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


STRANGE = "bgl[000x133]"


def test_scontrol_is_asked_about_forms_unknown_here(world, net, scontrol):
    scontrol('[ "$*" = "show hostnames bgl[000x133]" ] && printf "bgl000\\nbgl001\\n"')
    world.points(Slurm(STRANGE)).start()
    assert not world.told
    net.until(lambda: world.reap() or world.told)
    assert world.told == [at("bgl000", "bgl001")] and not world.said


def test_scontrol_that_fails_hangs_or_is_missing_is_told(world, net, scontrol, monkeypatch, tmp_path):
    scontrol("exit 3")
    world.points(Slurm(STRANGE)).start()
    net.until(lambda: world.reap() or world.said)
    assert "did not expand Slurm's node list 'bgl[000x133]'" in world.said.pop()
    monkeypatch.setattr("hyperpodrun.agent.transport.contact_points.SCONTROL_LIMIT_S", 0.05)
    scontrol("exec sleep 1000")
    world.points(Slurm(STRANGE)).start()
    net.until(lambda: world.reap() or world.said)
    assert "wait status 9" in world.said.pop()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    world.points(Slurm(STRANGE)).start()
    assert "scontrol cannot be run (No such file or directory): name the nodes with --peers" in world.said.pop()
    assert not world.told
