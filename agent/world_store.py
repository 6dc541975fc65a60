"""The store of each world as the workers of this node find it: the agents' own, or the classic one that rank 0 opens.

The agents' own store is there, for the agents themselves, also where workers use the classic one and are restarted in place on several
nodes: ranks whose function has returned are released by it (`when_all_returned`), not before it has on all nodes, so that any of them
can still be made to run it again.

States: *closed*, *open* (a world runs). Invariants: a generation that has ended releases nobody.
"""

from collections.abc import Callable
from typing import Any

from hyperpodrun.agent import data_ports
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.store import Store
from hyperpodrun.agent.wire import store as op
from hyperpodrun.agent.wire.facts import Place
from hyperpodrun.agent.workers import rendezvous

RETURNED, ALL_IN = b"\0hyperpodrun/returned", b"\0hyperpodrun/in"
"""No client's keys: torch and scripts put their prefixes in front of theirs."""
AGENT = 0
"""The agent's own number among the clients of its key space; processes are counted from 1."""
PORT_OF_THE_STORE = (
    "a rank wanted to listen on MASTER_PORT, where the launcher's own store listens: connect there, take another port, "
    "or set HPCT_USE_ROOTLESS=0, which leaves that port to rank 0"
)


class WorldStore:
    """`send(node, payload)` is the way to the other agents, `facts_path` the file of the job's facts; `warn`: say what is wrong with
    planned ports. Raises OSError when there is no port for the agents' own store."""

    def __init__(
        self,
        reactor: Reactor,
        config: JobConfig,
        say: Callable[[str], None],
        send: Callable[[str, bytes], object],
        facts_path: str,
        warn: bool,
    ) -> None:
        self._config = config
        self._say = say
        self._own: Store | None = None
        self._tried: set[int] = set()
        self._data_ports: data_ports.DataPorts | None = None
        if config.rootless or (config.mesh is not None and config.inprocess_restart):
            port = config.master_port if config.rootless else None
            self._plan_data_ports(warn)
            self._own = Store(reactor, say, send if config.mesh is not None else None, port, facts_path)

    @property
    def address(self) -> tuple[str, int] | None:
        """Where workers of this node find the agents' own store; None: rank 0 opens one."""
        return self._own.address if self._own is not None and self._config.rootless else None

    def choose_port(self) -> int:
        """MASTER_PORT of this node's next world where rank 0's store is to be; 0 where it does not matter. Raises OSError."""
        port = self._config.master_port or (0 if self._config.rootless else rendezvous.choose_port(frozenset(self._tried)))
        self._tried.add(port)
        return port

    def open(self, world: World, slot: str, host: str) -> None:
        """A world begins; this node is `slot` in it, its ranks can be reached at `host`."""
        if self._own is not None:
            first = self._data_ports.first if self._data_ports else 0
            place = Place(slot, host, first, self._config.nproc_per_node)
            self._own.open(world.generation, slot, world.nodes or (slot,), place)

    def _plan_data_ports(self, warn: bool) -> None:
        """Where ranks listen for data. Without such ports only what needs them does not work."""
        config = self._config
        try:
            self._data_ports = data_ports.plan(config.nproc_per_node, config.data_port)
        except OSError as error:
            self._say(str(error))
            return
        if config.mesh is not None and warn:
            planned = [*self._data_ports.ports, *((config.mesh.port,) if config.mesh.port else ())]
            warning = data_ports.exposed(planned, rendezvous.ephemeral_range(), data_ports.reserved_ports())
            if warning:
                self._say(warning)

    def end(self, reason: str) -> None:
        """This world's keys are of no use any more: whoever waits for one is told."""
        if self._own is not None:
            self._own.end(reason)

    def heard(self, node: str, payload: bytes) -> None:
        """Another node's store has something for this one."""
        if self._own is not None:
            self._own.received(node, payload)

    def close(self) -> None:
        """No more worlds."""
        if self._own is not None:
            self._own.close()

    def when_all_returned(self, world: World, then: Callable[[], None]) -> None:
        """The function has returned on all ranks of this node; call `then` once it has on those of all nodes."""
        self._when_all(RETURNED, world, then)

    def when_all_in(self, world: World, then: Callable[[], None]) -> None:
        """All ranks of this node are inside their function; call `then` once those of all nodes are."""
        self._when_all(ALL_IN, world, then)

    def _when_all(self, key: bytes, world: World, then: Callable[[], None]) -> None:
        if len(world.nodes) < 2:
            then()
            return
        space = self._own.space if self._own is not None else None
        if space is None:
            return  # the generation has ended: an interrupt follows

        def answered(answer: Any) -> None:
            if answer is True:
                then()

        answered(space.call(space.client(AGENT), op.Arrive(key, len(world.nodes)), answered))

    def explain(self, last_words: str) -> None:
        """A rank has failed: was it because the launcher's own store has the port that it wanted?"""
        if (address := self.address) is not None and rendezvous.names_taken_port(last_words, address[1]):
            self._say(PORT_OF_THE_STORE)

    def was_taken(self, last_words: str, world: World | None) -> bool:
        """Do a rank's last words say that another program took the port that was chosen for its store?"""
        chosen = world is not None and not self._config.rootless and self._config.master_port is None
        return chosen and world is not None and rendezvous.names_taken_port(last_words, world.master_port)
