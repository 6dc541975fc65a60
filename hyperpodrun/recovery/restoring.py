"""From what the ranks of a new world have to one state on all of them.

Theory. Each rank offers what it holds, all make the same plan (plan.py), and each carries out its part: what it has itself is
taken over, the rest is fetched in place (transfer.py) while the others serve. Only when all have everything does anybody let go
of what it had, so that a fault during recovery finds at least as much as the one before it.

A holder that cannot give what it offered, or gives it damaged, is passed over for another one; where there is none, all ranks make a
new plan without what has failed.

States: none; `restore` either returns what was restored, or why there is nothing to restore, or raises.
Invariants: what was not read whole, with its checksums, is never said to be restored.
"""

import os
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from typing import TypeVar

import msgspec
import torch

from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import plan, reshard, shard
from hyperpodrun.recovery.held import Held
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Part, RecoveryError
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import TOKEN_BYTES, Peer, Server, TransferError
from hyperpodrun.recovery.versions import Room
from hyperpodrun.recovery.where import Meeting, Where, own_address

MAX_PLANS = 50
T = TypeVar("T")


class Restored(msgspec.Struct, frozen=True):
    """The state after `step` is in place. `source`: where the largest piece came from. `world`: see plan.Plan.

    `anew`: it was made of another world's shards.
    """

    step: int
    source: str
    why: str
    history: plan.History
    world: int
    anew: bool = False


class Nothing(msgspec.Struct, frozen=True):
    """There is nothing to restore."""

    why: str
    history: plan.History


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself."""

    offer: plan.Offer
    host: str
    port: int
    room: Room | None = None


Bad = tuple[int, str, int, str]
"""Rank, shard, step, kind: it could not give that."""


class Restoring:
    """One attempt. `needs`: this rank's, `world`: its size if private states are needed too. `blobs` gets the small shards by name."""

    def __init__(
        self,
        where: Where,
        meeting: Meeting,
        needs: Sequence[str],
        world: int,
        parts: Sequence[Part],
        earlier: Memory | None,
        held: Held,
        history: plan.History,
    ) -> None:
        self._where = where
        self._meeting = meeting
        self._key = needs[0]
        self._parts = parts
        self._earlier = earlier
        self._held = held
        self._offer = plan.Offer(where.rank, where.node, tuple(needs), tuple(held.holdings()), world=world, history=history)
        self._token = b""
        self._kinds: list[str] = []
        self._touched = self._spoilt = False
        self.cards: dict[int, Card] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def offers(self) -> dict[int, plan.Offer]:
        """Everybody's, by rank."""
        return {rank: card.offer for rank, card in self.cards.items()}

    def look(self) -> plan.Plan | plan.Infeasible:
        """What could be done: offers are exchanged, nothing changes."""
        self._meet(Card(self._offer, "", 0))
        return plan.make(list(self.offers.values()))

    def restore(self, room: Callable[[str], Room] | None) -> Restored | Nothing:
        """Do it. `room`: for the card, given this host's address. Raises plan.Contradiction, RecoveryError."""
        meeting = self._meeting
        self._token = meeting.from_first("token", os.urandom(TOKEN_BYTES))
        server = Server(self._token, self._find)
        with closing(server):
            host = own_address(os.environ.get(names.RANK0_ADDR, "127.0.0.1"))
            self._meet(Card(self._offer, host, server.port, None if room is None else room(host)))
            made = self._carried_out()
            if isinstance(made, plan.Plan):
                self._take_over(made)
            meeting.barrier()
        if isinstance(made, plan.Plan):
            return Restored(made.step, self._source(), made.why, made.history, made.world, bool(made.members))
        if self._spoilt:
            raise RecoveryError(
                f"what was to be restored is damaged, and the new objects with it; they have to be made again: {made.why}"
            )
        return Nothing(made.why, made.history)

    def _meet(self, card: Card) -> None:
        said = self._meeting.share("card", msgspec.msgpack.encode(card))
        self.cards = {card.offer.rank: card for card in (msgspec.msgpack.decode(text, type=Card) for text in said)}

    def _carried_out(self) -> plan.Plan | plan.Infeasible:
        """The plan that all ranks have done their parts of."""
        bad: set[Bad] = set()
        for attempt in range(MAX_PLANS):
            made = plan.make([_without(offer, bad) for offer in self.offers.values()])
            if isinstance(made, plan.Infeasible):
                return made
            failed: set[Bad] = set()
            if not made.members and self._key not in {fetch.shard for fetch in made.of(self._where.rank)}:
                assert self._earlier is not None, "the plan says that it is here"
                self._touched, self._kinds = True, []
                _take_live(self._earlier, self._parts)  # while others fetch from the same memory
            for wave in range(made.waves):
                mine = self._anew(made, bad) if made.members and wave == 0 else []
                mine += self._fetched([fetch for fetch in made.of(self._where.rank) if fetch.wave == wave], made.step, bad)
                said = self._meeting.share(f"done/{attempt}/{wave}", msgspec.msgpack.encode((self._touched, mine)))
                told = [msgspec.msgpack.decode(text, type=tuple[bool, list[Bad]]) for text in said]
                failed = {one for _, some in told for one in some}
                self._spoilt |= any(touched for touched, _ in told)
                if failed:
                    break
            if not failed:
                return made
            bad |= failed
        raise RecoveryError(f"{MAX_PLANS} plans have failed, the last one for want of {sorted(bad)[-1]}")

    def _find(self, name: str, step: int, kind: str) -> Shard | None:
        return self._held.whole(name, step, kind)

    def _fetched(self, fetches: Sequence[plan.Fetch], step: int, bad: Container[Bad]) -> list[Bad]:
        """Do these; what could not be had from anybody."""
        for name in dict.fromkeys(fetch.shard for fetch in fetches):
            pieces = [fetch for fetch in fetches if fetch.shard == name]
            tried: list[Bad] = []
            layout = self._from_any(pieces[0], step, bad, tried, self._layout)
            if layout is None:
                return tried
            if name == self._key:
                self._touched, self._kinds = True, []
                here, tensors = shard.place(layout, self._parts)
            else:
                tensors = [torch.empty(layout.nbytes, dtype=torch.uint8)]
                here = Shard(layout, tensors)
            for fetch in pieces:
                if self._from_any(fetch, step, bad, tried, partial(self._fill, here)) is None:
                    return tried
            if name == self._key:
                shard.install(layout, self._parts, tensors)
            else:
                self.blobs[name] = bytes(shard.view(tensors[0]))
        return []

    def _anew(self, made: plan.Plan, bad: Container[Bad]) -> list[Bad]:
        """Make this rank's shard of another world's; what could not be had from anybody. Raises plan.Contradiction, RecoveryError."""
        rank, tried = self._where.rank, list[Bad]()
        new: reshard.New | None = None
        with ExitStack() as stack:
            peers = cache(lambda source: stack.enter_context(closing(self._peer(source))))
            for member in reshard.nearest_first(made.members, rank, self._where.world_size):
                source, kind = self._near(member, made.step)
                fetch = plan.Fetch(rank, member, source, kind, 0, 0)
                layout = self._from_any(fetch, made.step, bad, tried, self._layout)
                if layout is None:
                    return tried
                if new is None:
                    self._touched, self._kinds = True, []
                    new = reshard.New(layout, self._parts, rank)
                for landing in new.landings(layout):
                    piece = msgspec.structs.replace(fetch, start=landing.start, stop=landing.stop)
                    if self._from_any(piece, made.step, bad, tried, partial(self._land, landing, peers)) is None:
                        return tried
                if new.whole:
                    break
        assert new is not None, "a family has members"
        new.install(self._parts)
        return []

    def _near(self, name: str, step: int) -> tuple[int, plan.Kind]:
        """Whom to ask first: this rank, its node, then others in turn."""
        here, size = self._where, self._where.world_size
        held = [(rank, h.kind) for rank, o in self.offers.items() for h in o.holdings if (h.shard, h.step) == (name, step)]
        return min(
            held,
            key=lambda one: (
                one[1] == "tiered",
                one[0] != here.rank,
                self.offers[one[0]].node != here.node,
                (one[0] - here.rank) % size,
            ),
        )

    def _land(self, landing: reshard.Landing, peers: Callable[[int], Peer], fetch: plan.Fetch, step: int) -> bool:
        if fetch.source == self._where.rank:
            landing.fill(self._own(fetch, step).range(fetch.start, fetch.stop))
        else:
            peers(fetch.source).fetch(fetch.shard, step, fetch.kind, fetch.start, fetch.stop, landing.into)
        landing.land()
        own = fetch.source == self._where.rank and fetch.kind == "live"
        self._kinds.append("own" if own else fetch.kind)
        return True

    def _from_any(
        self, fetch: plan.Fetch, step: int, bad: Container[Bad], tried: list[Bad], get: Callable[[plan.Fetch, int], T]
    ) -> T | None:
        """From the source of the plan; where that fails, from whoever else has it."""
        others = [
            (rank, holding.kind)
            for rank, offer in sorted(self.offers.items())
            for holding in offer.holdings
            if (holding.shard, holding.step) == (fetch.shard, step)
        ]
        for rank, kind in dict.fromkeys([(fetch.source, fetch.kind), *others]):
            one = rank, fetch.shard, step, kind
            if one in bad or one in tried:
                continue
            try:
                return get(msgspec.structs.replace(fetch, source=rank, kind=kind), step)
            except TransferError:
                tried.append(one)
        return None

    def _layout(self, fetch: plan.Fetch, step: int) -> shard.Layout:
        if fetch.source == self._where.rank:
            return self._own(fetch, step).layout
        with closing(self._peer(fetch.source)) as peer:
            return peer.layout(fetch.shard, step, fetch.kind)

    def _fill(self, here: Shard, fetch: plan.Fetch, step: int) -> bool:
        if fetch.source == self._where.rank:
            held = self._own(fetch, step)
            for into, out in zip(here.range(fetch.start, fetch.stop), held.range(fetch.start, fetch.stop), strict=True):
                into.copy_(out)
        else:
            with closing(self._peer(fetch.source)) as peer:
                _into(peer, fetch, step, here)
        if fetch.shard == self._key:
            self._kinds.append(fetch.kind)
        return True

    def _own(self, fetch: plan.Fetch, step: int) -> Shard:
        held = self._find(fetch.shard, step, fetch.kind)
        if held is None:
            raise TransferError(f"{fetch.shard!r} after step {step} is damaged here ({fetch.kind})", refused=True)
        return held

    def _peer(self, rank: int) -> Peer:
        return Peer((self.cards[rank].host, self.cards[rank].port), self._token)

    def _take_over(self, made: plan.Plan) -> None:
        """What this rank has itself at the plan's step."""
        fetched = {fetch.shard for fetch in made.of(self._where.rank)}
        for name in plan.needs(made.offer(self._offer), made.world):
            if name in fetched:
                continue
            if name == self._key:
                continue  # done while the others were fetching
            held = self._held.whole(name, made.step, "live")
            assert held is not None, "the plan says that it is here"
            self.blobs[name] = b"".join(bytes(shard.view(tensor)) for tensor in held.tensors)
        if made.common:
            self.blobs[f"common {self._key}"] = self.blobs[made.common]

    def _source(self) -> str:
        """Where most of the shard came from."""
        kind = max(self._kinds, key=self._kinds.count, default="own")
        return "peer" if kind == "live" else kind

    def first_on_node(self) -> bool:
        """Is this the lowest rank of its node that has its shard?"""
        same = [rank for rank, offer in self.offers.items() if offer.node == self._where.node and self._key in offer.needs]
        return self._where.rank == min(same)


def _without(offer: plan.Offer, bad: Container[Bad]) -> plan.Offer:
    holdings = tuple(held for held in offer.holdings if (offer.rank, held.shard, held.step, held.kind) not in bad)
    return msgspec.structs.replace(offer, holdings=holdings)


def _into(peer: Peer, fetch: plan.Fetch, step: int, here: Shard) -> None:
    places = here.range(fetch.start, fetch.stop)
    staged = [place if place.device.type == "cpu" else torch.empty(place.numel(), dtype=torch.uint8) for place in places]
    peer.fetch(fetch.shard, step, fetch.kind, fetch.start, fetch.stop, staged)
    for place, stage in zip(places, staged, strict=True):
        if stage is not place:
            place.copy_(stage)


def _take_live(earlier: Memory, parts: Sequence[Part]) -> None:
    """Give the new objects what the earlier ones hold."""
    for old, new in zip(earlier.parts, parts, strict=True):
        found, skeleton = old.leaves()
        new.install([tensor for _, tensor in found], skeleton)
