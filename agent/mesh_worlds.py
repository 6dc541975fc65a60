"""The worlds that this agent has heard of: who is in them, and where rank 0's store of each is.

Rank 0's node chooses the store's port at the moment its world may start, and tells the others together with Go. A fresh port for each
world: one that an earlier world had may still be held by what is left of it elsewhere.

States: none. Invariant: a generation's store never changes once it was told or chosen.
"""

from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.wire.mesh import View
from hyperpodrun.agent.workers import rendezvous


class Worlds:
    """`slot` is this node, `host` where the others reach it; `wanted_port` is --master-port."""

    def __init__(self, slot: str, host: str, wanted_port: int | None) -> None:
        self._slot = slot
        self._host = host
        self._wanted_port = wanted_port
        self._stores: dict[int, str] = {}
        self._leaders: dict[int, str] = {}

    def adopt(self, view: View) -> None:
        """Remember who leads this world."""
        if view.mode == "run":
            self._leaders[view.generation] = view.order[0]

    def leader(self, generation: int) -> str:
        """The node of rank 0; "" where that is not known."""
        return self._leaders.get(generation, "")

    def told(self, generation: int, store: str) -> None:
        """Rank 0's node says where its store is."""
        self._stores.setdefault(generation, store)

    def store(self, generation: int) -> str:
        """Where the store of this generation is; chosen here where nobody told. Raises OSError when no port is free."""
        if generation not in self._stores:
            used = frozenset(int(store.rpartition(":")[2]) for store in self._stores.values())
            wanted = self._wanted_port
            port = wanted if wanted and rendezvous.is_free(wanted) else rendezvous.choose_port(used)
            self._stores[generation] = f"{self._host}:{port}"
            for old in sorted(self._stores)[:-8]:
                del self._stores[old]
        return self._stores[generation]

    def world(self, view: View) -> World:
        """The view's world as this node's workers see it."""
        nproc = {member.node: member.nproc for member in view.members}
        place = view.order.index(self._slot)
        host, _, port = self.store(view.generation).rpartition(":")
        return World(
            generation=view.generation,
            restart_count=view.restarts,
            first_rank=sum(nproc[node] for node in view.order[:place]),
            world_size=sum(nproc[node] for node in view.order),
            group_rank=place,
            group_world_size=len(view.order),
            master_addr=host,
            master_port=int(port),
            nodes=view.order,
        )
