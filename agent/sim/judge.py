"""Liveness (I7, I8): once nothing goes wrong any more and a quorum can talk, the job must get on.

Looked at after the run, when `calm_ms` have passed since the last fault was over. What is asked depends on what is
left: if no quorum of the newest view is alive with its vote files, the mesh must *not* get on, and safety is all
there is to check.
"""

from hyperpodrun.agent.sim import oracle
from hyperpodrun.agent.sim.hosts import Host
from hyperpodrun.agent.sim.world import World
from hyperpodrun.agent.wire.mesh import View

CALM_MS = 6000
"""Detection, eviction, the join window, one more roll call."""


def newest(world: World) -> dict[str, View]:
    """The newest view of each chain that somebody who is there stands at. One that only the dead knew of does not count."""
    table: dict[str, View] = {}
    for host in world.hosts.values():
        view = host.node.view if host.node is not None else None
        if view is not None and (view.chain not in table or view.number > table[view.chain].number):
            table[view.chain] = view
    return table


def able(world: World, view: View) -> bool:
    """Whether a quorum of the view's members is alive, tiebreak unspent where it matters."""
    alive = {}
    for member in view.members:
        host = world.hosts[member.node]
        if host.node is not None and not host.frozen and host.disk is not None and host.disk.incarnation == member.incarnation:
            alive[member.node] = host
    if 2 * len(alive) == len(view.members):
        tie = alive.get(view.tiebreak)
        if tie is None or tie.node is None or tie.node.agreement.spent:
            return False
    return oracle.quorum(view, set(alive))


def complaint(world: World) -> str | None:
    """What is wrong with the job at the end of its schedule; None: nothing."""
    up = [host for host in world.hosts.values() if host.node is not None and host.ended is None]
    if not up or world.schedule.end_ms < world.schedule.healed_ms() + CALM_MS:
        return None
    if any(host.ended is not None for host in world.hosts.values()):
        return _closing(world, up)
    chains = newest(world)
    if not chains:
        return _unformed(world, up)
    leading = [view for view in chains.values() if able(world, view)]
    if not leading:
        return _unrecovered(world, up)
    if len(leading) > 1:
        return None if any(view.mode == "run" for view in leading) else "two histories hold and neither gives way"
    view = leading[0]
    contact = world.hosts.get(world.config.first_contact)
    unreachable = not world.config.roster and (contact is None or contact.node is None)
    for host in up:
        if unreachable and host.node is not None and host.node.view is None:
            continue  # the only name it knows is not there
        if host.node is None or host.node.view is None or host.node.view != view:
            where = None if host.node is None or host.node.view is None else host.node.view.number
            return f"{host.name} is in view {where}, the newest is {view.number}"
    met = [host for host in up if host.node is not None and host.node.view is not None]
    if len(met) >= world.config.min_nodes and view.mode != "run":
        return f"{len(met)} nodes are there and the job holds"
    calm = world.schedule.end_ms - world.schedule.healed_ms() > world.config.fence_ns // 1_000_000 + CALM_MS
    if view.mode == "run" and (calm or not view.ghosts):
        idle = [name for name in view.order if world.hosts[name].works != (view.chain, view.generation)]
        if idle:
            return f"no workers of generation {view.generation} on {idle}"
    return None


def _unformed(world: World, up: list[Host]) -> str | None:
    config = world.config
    names = {host.name for host in up}
    powered = all(host.power for host in world.hosts.values())  # silence is no evidence (A10 b)
    if powered and not oracle.genesis_quorum(config, names):
        return None
    first = world.hosts.get(config.first_contact)
    if not config.roster and first is not None and first.starts > 1 and len(up) < config.slots:
        return None  # nobody can tell whether it forgot (A10 b)
    return f"{len(up)} nodes are there and no view was formed" if powered else None


def _unrecovered(world: World, up: list[Host]) -> str | None:
    """No quorum is left. With every slot of a closed roster there the job must have gone on all the same (A11)."""
    calm_ms = world.schedule.end_ms - world.schedule.healed_ms()
    if len(up) < world.config.slots or not world.config.roster or calm_ms < world.config.fence_ns // 1_000_000 + CALM_MS:
        return None
    return "every slot is there and nobody recovers"


def _closing(world: World, up: list[Host]) -> str | None:
    closed = [view for view in newest(world).values() if view.mode == "closed"]
    if closed and up:
        return f"{up[0].name} goes on in a closed job"
    return None
