"""Who gets what from whom after a restart: a pure function that every rank computes for itself.

Theory. After a restart each rank of the new world publishes an `Offer`: which shards it needs, and which versions of which shards it
can give, from its own live memory, from a copy that it keeps for others, or from its node's shared memory. A *version* is the state
after one step was committed; holders of a version of a shard hold the same bytes. The plan takes the newest version that is *whole*:
each shard that anybody needs has a holder of it. All offers in, the same plan out, on every rank: nobody has to decide for the others.

A rank that must fetch overwrites what it has. As long as only one rank holds the version chosen, the last live holder of the newest
whole version before it waits (wave 1) until another one has it (wave 0): a second fault meanwhile then finds a whole version still.

Timelines. A restart to step v makes what came after v void, though it may still lie about (a node that was away comes back with it).
So everything held knows its *history*, the steps that the job has been restored to: what was made after `n` restarts (its lineage)
counts only if none of the later ones went back behind it. The longest history offered is the job's. Each restart has a *mark* of its
own: nodes that were apart and have each gone on by themselves have histories that differ, and only one of them is continued: of
equally long ones that which comes to the newest step.

Changed worlds. Private states carry the size of their world in their names. In a world of another size rank r goes on with the
private state of rank r modulo the old size, and that is right only if the samplers' states are equal on all ranks (counted in
samples of the whole job): they are compared.

A state that is cut among the ranks comes back in another world too: where all members of a *family* (the shards of one world) are held
after a step, each rank can make its new shard of them (reshard.py); which bytes of which, it finds out by itself.

Invariants: nothing is fetched at another step than the plan's; the byte ranges that a rank fetches of a shard cover it once; a rank
that holds the version live fetches nothing of that shard; nobody fetches from itself but out of shared memory or a copy.

States: none. Source: DESIGN "A fault, end to end", SEED part 5.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

Kind = Literal["live", "copy", "shm", "tiered"]
KINDS: tuple[Kind, ...] = ("live", "copy", "shm", "tiered")
History = tuple[int, ...]
STRIPE_BYTES = 32 << 20
"""Shards larger than this are fetched from several holders at once."""
MAX_STRIPES = 4
_MARK_BITS = 32
ALIGN_BYTES = 64


class Holding(msgspec.Struct, frozen=True, array_like=True):
    """One version of one shard. `layout` is the digest of its names, types and shapes, `content` one of values ("": unknown).

    `lineage`: how many restarts came before it, `since`: what its history ends with. `family`, `members`: see shard.Layout.
    `digest`: of all of it as it was written ("": unknown).
    """

    shard: str
    step: int
    kind: Kind
    nbytes: int
    layout: str = ""
    content: str = ""
    lineage: int = 0
    family: str = ""
    members: int = 0
    since: int = 0
    digest: str = ""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs and has. `world`: the size of the world, when it needs a private state too. `histories`: the longest that it
    knows of."""

    rank: int
    node: str
    needs: tuple[str, ...]
    holdings: tuple[Holding, ...] = ()
    world: int = 0
    histories: tuple[History, ...] = ()


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """`rank` gets bytes `start` to `stop` of `shard` from what `source` has in `kind`, made `since` that restart (see Holding)."""

    rank: int
    shard: str
    source: int
    kind: Kind
    start: int
    stop: int
    wave: int = 0
    since: int = 0


class Plan(msgspec.Struct, frozen=True):
    """Restore the state after `step`. `why`: one line for people. `world`: the size of the one that the private states are of.

    `members`: every rank's shard is to be made of these (none: it is had as it is), `common`: what replaces the common state needed.
    """

    step: int
    fetches: tuple[Fetch, ...]
    why: str
    history: History = ()
    world: int = 0
    members: tuple[str, ...] = ()
    common: str = ""

    def of(self, rank: int) -> tuple[Fetch, ...]:
        """What this rank fetches."""
        return tuple(fetch for fetch in self.fetches if fetch.rank == rank)

    def offer(self, offer: Offer) -> Offer:
        """With what that rank needs by this plan, but for its private state."""
        if not self.members:
            return offer
        return msgspec.structs.replace(offer, needs=(self.common,) if self.common else ())

    def from_rank(self, rank: int) -> tuple[Fetch, ...]:
        """What others fetch from this rank."""
        return tuple(fetch for fetch in self.fetches if fetch.source == rank and fetch.rank != rank)

    @property
    def waves(self) -> int:
        """How many there are."""
        return 1 + max((fetch.wave for fetch in self.fetches), default=0)


class Infeasible(msgspec.Struct, frozen=True):
    """Nothing holds a whole version: a new beginning."""

    why: str
    history: History = ()


class Contradiction(ValueError):
    """Holders of one version differ: they are no replicas of each other, and restoring would mix two models. Restarts do not help."""

    rung = "end"


def restart(step: int, mark: int) -> int:
    """For a history: a restart that went to that step (-1: a new beginning), with a number that no other has."""
    return step << _MARK_BITS | mark & ((1 << _MARK_BITS) - 1)


def went_to(restart: int) -> int:
    """The step that this restart went to."""
    return restart >> _MARK_BITS


def last(history: History) -> int:
    """What a history ends with (0: there was no restart yet). See Holding.since."""
    return history[-1] if history else 0


def private(rank: int, world: int) -> str:
    """The name of a private state."""
    return f"rank {rank} of {world}"


def needs(offer: Offer, world: int) -> tuple[str, ...]:
    """All that a rank needs when the private states are those of a world of that size."""
    return (*offer.needs, private(offer.rank % world, world)) if offer.world else offer.needs


def make(offers: Sequence[Offer]) -> Plan | Infeasible:
    """The plan for these offers, one of each rank. Raises Contradiction."""
    history, offers = valid(offers)
    holders = _holders(offers)
    ways = _ways(offers, holders)
    whole = [way for way in ways if way.steps]
    if not whole:
        return Infeasible(_why_not(ways[0].needed, holders), history)
    best = max(whole, key=lambda way: way.steps[0])  # the first of equals: as it is, in this world
    return msgspec.structs.replace(_carried_out(best, holders), history=history)


def _ways(offers: Sequence[Offer], holders: "_Holders") -> "list[_Way]":
    """All there are, as it is first."""
    return [way for world in _worlds(offers) for way in (_Way(world, offers, holders), *_anew(world, offers, holders))]


class _Way:
    """One way to have a whole state: private states of a world of that size, shards as they are or made of `members`."""

    def __init__(self, world: int, offers: Sequence[Offer], holders: "_Holders", members: tuple[str, ...] = ()) -> None:
        self.world, self.members, self.common = world, members, ""
        commons = sorted(f"common {shard}" for shard in members) if any(len(offer.needs) > 1 for offer in offers) else []
        if members:
            offers = [msgspec.structs.replace(offer, needs=()) for offer in offers]
        self.needed = sorted({shard for offer in offers for shard in needs(offer, world)} | {*members})
        names = {*self.needed}
        steps = {step for shard, step in holders if shard in names}
        whole = [step for step in sorted(steps, reverse=True) if all((shard, step) in holders for shard in self.needed)]
        self.steps = [step for step in whole if not commons or any((common, step) in holders for common in commons)]
        if commons and self.steps:
            self.common = next(common for common in commons if (common, self.steps[0]) in holders)
            self.needed.append(self.common)
            offers = [msgspec.structs.replace(offer, needs=(self.common,)) for offer in offers]
        self.offers = [msgspec.structs.replace(offer, needs=needs(offer, world)) for offer in offers]


def _anew(world: int, offers: Sequence[Offer], holders: "_Holders") -> list[_Way]:
    """With shards made of those of a family that is held; the one that is what is needed anyway does not count."""
    families: dict[tuple[str, int], set[str]] = defaultdict(set)
    for held in (held for offer in offers for held in offer.holdings if held.family):
        families[held.family, held.members].add(held.shard)
    needed = {offer.needs[0] for offer in offers if offer.needs}
    return [
        _Way(world, offers, holders, tuple(sorted(members)))
        for (_, count), members in sorted(families.items())
        if len(members) == count and members != needed
    ]


def valid(offers: Sequence[Offer]) -> tuple[History, list[Offer]]:
    """The job's history, and the offers without what is not of it. Nothing else may be used, by whichever way it is had."""
    known = longest([history for offer in offers for history in offer.histories])
    ways = [(history, _of(history, offers)) for history in known or [()]]
    return max(ways, key=lambda way: (_newest(way[1]), way[0])) if len(ways) > 1 else ways[0]


def _of(history: History, offers: Sequence[Offer]) -> list[Offer]:
    """What counts if that is the job's history."""

    def counted(offer: Offer) -> tuple[Holding, ...]:
        return tuple(held for held in offer.holdings if counts(history, held.lineage, held.since, held.step))

    return [msgspec.structs.replace(offer, holdings=counted(offer), histories=(history,)) for offer in offers]


def _newest(offers: Sequence[Offer]) -> int:
    """The newest step that is whole (-1: none is)."""
    return max((way.steps[0] for way in _ways(offers, _holders(offers)) if way.steps), default=-1)


def longest(histories: Iterable[History]) -> tuple[History, ...]:
    """Those of them, in order."""
    known = {*histories}
    return tuple(sorted(history for history in known if len(history) == max(map(len, known))))


def counts(history: History, lineage: int, since: int, step: int) -> bool:
    """Is what was made then (see Holding) of this timeline, and was it not made void by a later restart?"""
    if lineage > len(history) or since != (history[lineage - 1] if lineage else 0):
        return False
    return all(step <= went_to(back) for back in history[lineage:])


def _worlds(offers: Sequence[Offer]) -> list[int]:
    """Sizes of worlds whose private states are to be tried, this one first."""
    now = max((offer.world for offer in offers), default=0)
    if not now:
        return [0]
    names = {held.shard.rpartition(" of ") for offer in offers for held in offer.holdings if held.shard.startswith("rank ")}
    others = {int(size) for _, _, size in names if size.isdigit() and int(size) > 0}
    return [now, *sorted(others - {now}, reverse=True)]


def _carried_out(way: _Way, holders: "_Holders") -> Plan:
    by_rank, step = {offer.rank: offer for offer in way.offers}, way.steps[0]
    for shard in way.needed:
        _agree(shard, step, holders[shard, step])
    if way.world != max((offer.world for offer in way.offers), default=0):
        _portable(step, [(shard, holders[shard, step][0][1]) for shard in way.needed if shard.startswith("rank ")])
    fetches = _fetches(by_rank, holders, step)
    if len(way.steps) > 1:
        fetches = _held_back(fetches, holders, step, way.steps[1])
    newest = max(at for shard, at in holders if shard in way.needed)
    why = _why(step, newest, fetches, {held.kind for shard in way.members for _, held in holders[shard, step]}, len(way.members))
    return Plan(step, tuple(fetches), why, world=way.world, members=way.members, common=way.common)


def _portable(step: int, states: Sequence[tuple[str, Holding]]) -> None:
    """Can ranks of another world go on with these private states?"""
    first, one = states[0]
    for shard, held in states[1:]:
        if held.content != one.content:
            raise Contradiction(
                f"the world's size has changed and the samplers' states after step {step} differ ({first}, {shard}): samples would be "
                "lost or repeated. A sampler whose state counts the samples of the whole job, equal on all ranks, can be taken over"
            )


def feasible(offers: Sequence[Offer]) -> tuple[bool, str]:
    """Can memory alone bring the job back, and why (not)?"""
    made = make(offers)
    return isinstance(made, Plan), made.why


_Holders = Mapping[tuple[str, int], list[tuple[int, Holding]]]


def _holders(offers: Sequence[Offer]) -> _Holders:
    found: dict[tuple[str, int], list[tuple[int, Holding]]] = defaultdict(list)
    for offer in sorted(offers, key=lambda offer: offer.rank):
        for holding in offer.holdings:
            found[holding.shard, holding.step].append((offer.rank, holding))
    return found


def _agree(shard: str, step: int, held: Sequence[tuple[int, Holding]]) -> None:
    first_rank, first = held[0]
    for rank, holding in held[1:]:
        same = holding.layout == first.layout and holding.nbytes == first.nbytes
        if not same or (holding.content and first.content and holding.content != first.content):
            what = "parameters of other shapes" if not same else "other values"
            raise Contradiction(
                f"ranks {first_rank} and {rank} hold {what} for {shard!r} after step {step}: they are no replicas of each other. "
                "Say which ranks are with RecoverableState(replica_group=...)"
            )


def _fetches(by_rank: Mapping[int, Offer], holders: _Holders, step: int) -> list[Fetch]:
    load: dict[int, int] = defaultdict(int)
    fetches: list[Fetch] = []
    for rank in sorted(by_rank):
        offer = by_rank[rank]
        for shard in sorted(offer.needs):
            held = holders[shard, step]
            if any(source == rank and holding.kind == "live" for source, holding in held):
                continue
            fetches += _fetch(offer, shard, held, by_rank, load)
    return fetches


def _fetch(
    offer: Offer, shard: str, held: Sequence[tuple[int, Holding]], by_rank: Mapping[int, Offer], load: dict[int, int]
) -> list[Fetch]:
    def distance(source: int, holding: Holding) -> tuple[int, int]:
        other = by_rank[source]
        if holding.kind == "tiered":
            return 3, 0 if source == offer.rank else 1
        return 1 if other.node == offer.node else 2, KINDS.index(holding.kind)

    nearest = min(distance(source, holding)[0] for source, holding in held)
    near = [(source, holding) for source, holding in held if distance(source, holding)[0] == nearest]
    best: dict[int, Holding] = {}
    near.sort(key=lambda pair: (distance(*pair)[1], load[pair[0]], pair[0]))
    digest = near[0][1].digest
    for source, holding in near:
        if holding.digest == digest:  # what is put together can be compared with one
            best.setdefault(source, holding)
    nbytes = held[0][1].nbytes
    count = min(len(best), MAX_STRIPES, max(1, nbytes // STRIPE_BYTES))
    fetches = []
    for place, (source, holding) in enumerate(list(best.items())[:count]):
        start, stop = _cut(nbytes, place, count), _cut(nbytes, place + 1, count)
        load[source] += stop - start
        fetches.append(Fetch(offer.rank, shard, source, holding.kind, start, stop, since=holding.since))
    return fetches


def _cut(nbytes: int, place: int, count: int) -> int:
    return nbytes if place == count else nbytes * place // count // ALIGN_BYTES * ALIGN_BYTES


def _held_back(fetches: list[Fetch], holders: _Holders, step: int, before: int) -> list[Fetch]:
    """Put the last live holder of `before` into wave 1 where losing one rank could lose the version chosen."""
    late = set()
    for shard in {fetch.shard for fetch in fetches}:
        sources = {source for source, _ in holders[shard, step]}
        takers = {fetch.rank for fetch in fetches if fetch.shard == shard}
        old = holders.get((shard, before), ())
        kept = {rank for rank, holding in old if holding.kind != "live" or rank not in takers}
        losers = sorted({rank for rank, holding in old if holding.kind == "live"} & takers)
        if len(sources) == 1 and losers and not kept and len(takers) > 1:
            late.add((losers[-1], shard))
    return [
        msgspec.structs.replace(fetch, wave=1) if (fetch.rank, fetch.shard) in late else fetch for fetch in fetches
    ]  # fmt: skip


def _why(step: int, newest: int, fetches: Sequence[Fetch], member_kinds: Collection[str], members: int) -> str:
    words = {
        "live": "peers' memory",
        "copy": "copies in peers' memory",
        "shm": "shared memory",
        "tiered": "the stored checkpoint",
    }
    newer = f"; step {newest} is not whole" if newest > step else ""
    if members:
        places = " and ".join(words[kind] for kind in KINDS if kind in member_kinds)
        whole = "the whole state" if members == 1 else f"all {members} shards of the earlier layout"
        return f"each rank makes its shard of the state after step {step} of {whole}, from {places}{newer}"
    if not fetches:
        return f"every rank has the state after step {step} itself"
    ranks = sorted({fetch.rank for fetch in fetches})
    kinds = [kind for kind in KINDS if any(fetch.kind == kind for fetch in fetches)]
    return f"{_ranks(ranks)} the state after step {step} from {' and '.join(words[kind] for kind in kinds)}{newer}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} gets"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''} get"


def _why_not(needed: Sequence[str], holders: _Holders) -> str:
    steps = sorted({step for shard, step in holders if shard in needed}, reverse=True)
    others = {
        held.family: held.members for every in holders.values() for _, held in every if held.family and held.shard not in needed
    }
    if others and not any(
        (shard, step) in holders for shard in needed if not shard.startswith(("rank ", "common ")) for step in steps
    ):
        return _why_not_anew(others, holders)
    if not steps:
        return "no memory holds a state (the job is new, or all copies were lost at once)"
    lost = [shard for shard in needed if not any((shard, step) in holders for step in steps)]
    if lost:
        names = ", ".join(lost[:4]) + (" and others" if len(lost) > 4 else "")
        return f"no memory holds {names} any more: all its copies were lost at once"
    return f"each shard is held after some step, but no step has all of them (newest: step {steps[0]})"


def _why_not_anew(others: Mapping[str, int], holders: _Holders) -> str:
    counts: dict[tuple[str, int], set[str]] = defaultdict(set)
    for (shard, step), every in holders.items():
        for family in {held.family for _, held in every} & others.keys():
            counts[family, step].add(shard)
    (family, step), shards = max(counts.items(), key=lambda item: (len(item[1]), item[0][1], item[0]))
    if len(shards) == others[family]:
        return (
            f"the shards of the earlier layout are held after step {step}, but not what else is needed (private or common states)"
        )
    return f"no step has all {others[family]} shards of the earlier layout (after step {step} there are {len(shards)})"
