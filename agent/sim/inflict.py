"""Carries out the faults of a schedule, and what ends them. One function a kind (`faults` has their meaning)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hyperpodrun.agent.mesh.config import MS
from hyperpodrun.agent.mesh.effects import CertifyDead, LeaveAsked, RestartAsked, WorkersFailed, WorkersFinished
from hyperpodrun.agent.mesh.inbox import NEVER
from hyperpodrun.agent.sim.faults import LEAVING_MS, SYMPTOMS, Fault
from hyperpodrun.agent.sim.happenings import CALM, DRAIN, MEND, POWER, RETURN, START, THAW
from hyperpodrun.agent.sim.hosts import Host

if TYPE_CHECKING:
    from hyperpodrun.agent.sim.world import World


def inflict(world: World, fault: Fault) -> None:
    """This goes wrong now."""
    span = f" for {fault.for_ms} ms" if fault.for_ms else ""
    value = f" {fault.value}" if fault.value else ""
    world.say("", f"fault: {fault.kind} {' '.join(fault.nodes)}{value}{span}")
    _FAULTS[fault.kind](world, fault)


def _later(world: World, fault: Fault, kind: int, event: tuple[object, ...]) -> None:
    if fault.for_ms:
        world.push(world.now + fault.for_ms * MS, kind, event)


# --- agents and hosts


def _crash(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        host = world.hosts[name]
        if host.node is None:
            continue
        host.crash_after, host.crash_for_ns = fault.value, fault.for_ms * MS
        if not fault.value:
            crash_now(world, host)


def crash_now(world: World, host: Host) -> None:
    """The agent dies; its keeper starts it again after `crash_for_ns`."""
    host.crash_after = None
    world.say(host.name, "crashes")
    world.agent_dies(host)
    world.push(world.now + host.crash_for_ns, START, (host.name,))


def _falter(world: World, fault: Fault) -> None:
    world.falter, world.falter_ns = fault.value, fault.for_ms * MS
    _later(world, fault, CALM, (fault.kind,))


def _power(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        host = world.hosts[name]
        host.power = False
        host.disk = None
        host.crash_after = None
        host.agent_is_gone()
        _later(world, fault, POWER, (host,))


def power_back(world: World, host: Host) -> None:
    """The host boots."""
    if not host.power:
        host.power = True
        world.start(host.name)


def _freeze(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        host = world.hosts[name]
        if host.node is not None and not host.frozen:
            host.frozen = True
            _later(world, fault, THAW, (host, host.life))


def thaw(world: World, host: Host, life: int) -> None:
    """It goes on as if nothing had been, but for its clock and its watchdog."""
    if host.life != life or host.node is None:
        return
    host.frozen = False
    if host.works is not None and host.clock(world.now) >= host.lease_ns:
        host.has_no_workers()  # the watchdog was first
    world.carry_out(host, host.node.tick(host.clock(world.now)))
    while host.events and host.life == life:
        world.tell(host, host.events.popleft())
    if host.inbox and not host.draining:
        host.draining = True
        world.push(world.now, DRAIN, (host, host.life))
    host.wake_ns = NEVER
    world.wake(host)


def _leave(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        world.tell(world.hosts[name], LeaveAsked())
        if fault.for_ms:
            world.push(world.now + (fault.for_ms + LEAVING_MS) * MS, RETURN, (world.hosts[name],))


def come_back(world: World, host: Host) -> None:
    """An agent that had left is started anew."""
    if host.ended is not None and host.node is None:
        host.ended = None
        world.start(host.name)


def _join(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        world.start(name)


# --- the network


def _sever(world: World, pairs: list[tuple[str, str]], fault: Fault) -> None:
    world.links.cut(pairs)
    _later(world, fault, MEND, (pairs,))


def mend(world: World, pairs: list[tuple[str, str]]) -> None:
    """A cut is over."""
    world.links.mend(pairs)


def _cut(world: World, fault: Fault) -> None:
    _sever(world, [(fault.nodes[0], fault.nodes[1])], fault)


def _partition(world: World, fault: Fault) -> None:
    side = set(fault.nodes)
    _sever(world, [(a, b) for a in world.hosts for b in world.hosts if (a in side) != (b in side)], fault)


def _weather(world: World, fault: Fault) -> None:
    if fault.kind == "loss":
        world.links.set_loss(fault.value)
    else:
        world.links.delay_ns = fault.value * MS
    _later(world, fault, CALM, (fault.kind,))


def calm(world: World, kind: str) -> None:
    """No more of this kind."""
    if kind == "loss":
        world.links.set_loss(0)
    elif kind == "falter":
        world.falter = None
    else:
        world.links.delay_ns = 0


# --- workers and people


def _fail(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        host = world.hosts[name]
        symptoms = SYMPTOMS[fault.value]
        if host.works is not None and not host.stopping:
            world.workers_end(host, "a worker failed")
            world.tell(host, WorkersFailed(host.works[1], 1, "exit code 1", symptoms))
        elif host.node is not None and host.node.view is not None and (host.stopping or host.parked):
            world.tell(host, WorkersFailed(host.node.view.generation, 1, "exit code 1 on the way", symptoms))


def _finish(world: World, fault: Fault) -> None:
    for host in world.hosts.values():
        if host.works is not None and not host.stopping:
            world.tell(host, WorkersFinished(host.works[1]))


def _stuck(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        world.hosts[name].stuck_ns = world.now + fault.for_ms * MS


def _certify(world: World, fault: Fault) -> None:
    told, *dead = fault.nodes
    for name in dead:
        if world.hosts[name].power and not fault.value:
            raise ValueError(f"{name} is certified dead and is not")
        world.certified.add(name)
        world.tell(world.hosts[told], CertifyDead(name))


def _restart(world: World, fault: Fault) -> None:
    for name in fault.nodes:
        world.tell(world.hosts[name], RestartAsked("asked for"))


_FAULTS: dict[str, Callable[[World, Fault], None]] = {
    "crash": _crash, "power": _power, "freeze": _freeze, "cut": _cut, "isolate": _partition, "partition": _partition,
    "loss": _weather, "delay": _weather, "fail": _fail, "finish": _finish, "leave": _leave, "join": _join,
    "restart": _restart, "falter": _falter, "certify": _certify, "stuck": _stuck,
}  # fmt: skip
