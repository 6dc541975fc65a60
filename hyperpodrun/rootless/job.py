"""What all ranks of a job share beside their process group: facts that outlive it, and where each rank listens for data.

Both are answered by this node's agent, over the same connection as the store (`hyperpodrun.agent.wire.facts`). Facts are read from
this node; a change comes back when every node of the world keeps it.
"""

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec

from hyperpodrun.agent.wire import facts as wire
from hyperpodrun.rootless.store import MeshStore

_OUTCOME = msgspec.msgpack.Decoder(wire.Outcome)
_places: dict[MeshStore, tuple[wire.Place, ...]] = {}


class JobFacts(MutableMapping[str, Any]):
    """Facts of the job, as a dictionary: names to values that JSON knows (None, bool, int, float, str, list, dict).

    All together may have 64 KB. A change is done when the call returns: every rank sees it from then on, also ranks of later
    generations, as long as one node of this world goes on. When the generation ends meanwhile, `torch.distributed.DistError` is
    raised, and all ranks of the next one find either the old value or the new one. Of two ranks that set one name at the same
    time, the later one wins. Raises ValueError when there is no room, TypeError when JSON does not know the value.
    """

    def __init__(self, store: MeshStore) -> None:
        self._store = store

    def __getitem__(self, name: str) -> Any:
        outcome = _ask(self._store, "get", name)
        if outcome.missing:
            raise KeyError(name)
        return json.loads(outcome.value)

    def __setitem__(self, name: str, value: Any) -> None:
        _ask(self._store, "set", (_checked(name), json.dumps(value, separators=(",", ":")).encode()))

    def __delitem__(self, name: str) -> None:
        if _ask(self._store, "set", (_checked(name), None)).missing:
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ask(self._store, "names", None).names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"JobFacts({dict(self)!r})"


def job_facts() -> JobFacts:
    """The facts of this job. Raises NoLauncher."""
    return JobFacts(MeshStore.current())


def data_address(rank: int) -> tuple[str, int]:
    """(host, port) where this rank of the present world is to listen for data of other ranks; the same answer on every rank.

    Ports are planned, not held: who listens there is up to the program. Raises NoLauncher; LookupError when the world has no such
    rank, or its node found no free ports.
    """
    store = MeshStore.current()
    places = _places.get(store)
    if places is None:
        places = _places[store] = tuple(_ask(store, "places", None).places)
    first = 0
    for place in places:
        if 0 <= rank - first < place.nproc:
            if not place.port:
                raise LookupError(f"{place.node} has planned no ports for data: its launcher said why")
            return place.host, place.port + rank - first
        first += place.nproc
    raise LookupError(f"there is no rank {rank}: the world has {first}")


def _ask(store: MeshStore, verb: wire.Verb, argument: object) -> wire.Outcome:
    answer = store.compare_set(wire.KEY, verb, msgspec.msgpack.encode(argument))
    outcome = _OUTCOME.decode(answer)
    if outcome.error:
        raise ValueError(outcome.error)
    return outcome


def _checked(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"a fact's name is a text, not {type(name).__name__}")
    return name
