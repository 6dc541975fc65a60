"""Who this process is in the present world, and the store over which the ranks of a world agree.

Theory. Everything about a world may change with a restart, so it is looked up at each `restore`, in the environment that the
launcher keeps current. The n-th `restore` of one rank in a generation meets the n-th of the others: keys are named by it.
"""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec

from hyperpodrun.agent.wire import names, node_state

_calls: dict[tuple[str, str], int] = {}


class Where(msgspec.Struct, frozen=True):
    """`launched`: by hyperpodrun. `node` is this node's name among the job's. `state`: which of the program's states is meant."""

    rank: int
    world_size: int
    local_rank: int
    node: str
    job_id: str
    generation: str
    launched: bool
    local_world_size: int = 1
    state: str = "default"

    @property
    def folder(self) -> str:
        """Where the state's versions lie on this node."""
        return node_state.of_state(node_state.folder_of(self.job_id, self.node), self.state)


def look() -> Where:
    """As the environment says now."""
    return Where(
        rank=_number(names.RANK, 0),
        world_size=_number(names.WORLD_SIZE, 1),
        local_rank=_number(names.LOCAL_RANK, 0),
        node=os.environ.get(names.NODE, socket.gethostname()),
        job_id=os.environ.get(names.JOB_ID, ""),
        generation=os.environ.get(names.GENERATION, ""),
        launched=names.GENERATION in os.environ,
        local_world_size=max(1, _number(names.LOCAL_WORLD_SIZE, 1)),
    )


class Meeting:
    """One `restore` of all ranks. `timeout_s`: longest wait for the others."""

    def __init__(self, where: Where, name: str, timeout_s: float = 600.0) -> None:
        call = _calls[name, where.generation] = _calls.get((name, where.generation), 0) + 1
        self._where = where
        self._store = _store(f"recovery/{name}/{call}")
        self._timeout = timedelta(seconds=timeout_s)
        self._barriers = 0

    def share(self, key: str, value: bytes) -> list[bytes]:
        """Everybody's value, by rank."""
        keys = [f"{key}/{rank}" for rank in range(self._where.world_size)]
        self._store.set(keys[self._where.rank], value)
        self._store.wait(keys, self._timeout)
        return [bytes(value) for value in self._store.multi_get(keys)]

    def from_first(self, key: str, value: bytes) -> bytes:
        """Rank 0's value, for all."""
        if self._where.rank == 0:
            self._store.set(key, value)
            return value
        self._store.wait([key], self._timeout)
        return bytes(self._store.get(key))

    def barrier(self) -> None:
        """Until all ranks are here."""
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self._store.add(key, 1) == self._where.world_size:
            self._store.set(f"{key}/over", b"1")
        self._store.wait([f"{key}/over"], self._timeout)


def own_address(towards: str) -> str:
    """The address of this host as seen from the one named: what the kernel would send from."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def ranks_of(group: Any, world_size: int) -> Sequence[int]:
    """The ranks that hold the same parameters: a process group, a sequence of ranks, or None for all. Raises ValueError."""
    if group is None:
        return range(world_size)
    if isinstance(group, list | tuple | range):
        ranks = sorted(int(rank) for rank in group)
    else:
        import torch.distributed as dist

        ranks = sorted(dist.get_process_group_ranks(group))
    if not ranks or ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"replica_group={group!r}: ranks of a world of {world_size} are expected")
    return ranks


def _store(prefix: str) -> Any:
    """The agents' store where there is one, else the one that torch's default group was made with."""
    if os.environ.get(names.STORE):
        from hyperpodrun.rootless import new_store

        return new_store(prefix)
    import torch.distributed as dist

    if not dist.is_initialized():
        raise RuntimeError("restore() needs to speak with the other ranks: call init_process_group first")
    return dist.distributed_c10d.PrefixStore(prefix, dist.distributed_c10d._get_default_store())


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
