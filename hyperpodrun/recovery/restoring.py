"""From what the ranks of a new world have to one state on all of them.

Theory. Each rank offers what it holds, all make the same plan (plan.py), and each carries out its part: what it has itself is
taken over, the rest is fetched in place (transfer.py) while the others serve. Only when all have everything does anybody let go
of what it had, so that a fault during recovery finds at least as much as the one before it.

States: none; `restore` either returns what was restored, or None (nothing to restore), or raises and has changed nothing that counts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

import msgspec
import torch

from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import plan, shard
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Part, RecoveryError
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import TOKEN_BYTES, Peer, Server, TransferError
from hyperpodrun.recovery.where import Meeting, Where, own_address

Held = Mapping[tuple[str, int, plan.Kind], Callable[[], Shard]]
"""What this rank can give: (shard, step, kind) -> the shard."""


class Restored(msgspec.Struct, frozen=True):
    """The state after `step` is in place. `source`: where the largest piece came from."""

    step: int
    source: str
    why: str


class _Card(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself."""

    offer: plan.Offer
    host: str
    port: int


class Restoring:
    """One attempt. `blobs` gets the small shards (bytes) by key when they are fetched or held."""

    def __init__(
        self, where: Where, meeting: Meeting, key: str, parts: Sequence[Part], earlier: Memory | None, held: Held
    ) -> None:
        self._where = where
        self._meeting = meeting
        self._key = key
        self._parts = parts
        self._earlier = earlier
        self._cards: dict[int, _Card] = {}
        self._made: dict[tuple[str, int, str], Shard] = {}
        self._held = held
        self.blobs: dict[str, bytes] = {}

    def restore(self, needs: Sequence[str], stored: int = -1) -> Restored | str:
        """What was restored, or why there is nothing (left). Raises plan.Contradiction, RecoveryError, TransferError."""
        where, meeting = self._where, self._meeting
        token = meeting.from_first("token", os.urandom(TOKEN_BYTES))
        offer = plan.Offer(where.rank, where.node, tuple(needs), tuple(self._holdings()), stored=stored)
        server = Server(token, self._find)
        with closing(server):
            host = own_address(os.environ.get(names.RANK0_ADDR, "127.0.0.1"))
            said = meeting.share("card", msgspec.msgpack.encode(_Card(offer, host, server.port)))
            cards = {card.offer.rank: card for card in (msgspec.msgpack.decode(text, type=_Card) for text in said)}
            self._cards = cards
            made = plan.make([card.offer for card in cards.values()])
            if isinstance(made, plan.Infeasible):
                meeting.barrier()
                return made.why
            for wave in range(made.waves):
                self._carry_out([fetch for fetch in made.of(where.rank) if fetch.wave == wave], made.step, cards, token)
                meeting.barrier()
        self._take_over(needs, made)
        return Restored(made.step, _source(made.of(where.rank)), made.why)

    def _holdings(self) -> list[plan.Holding]:
        holdings = []
        for (name, step, kind), _ in self._held.items():
            made = self._shard((name, step, kind))
            if made is not None:
                holdings.append(plan.Holding(name, step, kind, made.nbytes, made.layout.digest() if name == self._key else ""))
        return holdings

    def _find(self, name: str, step: int, kind: str) -> Shard | None:
        return self._shard((name, step, kind)) if kind in ("live", "copy", "shm") else None

    def _shard(self, key: tuple[str, int, plan.Kind]) -> Shard | None:
        if key not in self._made and key in self._held:
            self._made[key] = self._held[key]()
        return self._made.get(key)

    def _carry_out(self, fetches: Sequence[plan.Fetch], step: int, cards: Mapping[int, _Card], token: bytes) -> None:
        for name in dict.fromkeys(fetch.shard for fetch in fetches):
            pieces = [fetch for fetch in fetches if fetch.shard == name]
            own = [fetch for fetch in pieces if fetch.source == self._where.rank]
            layout = self._layout(pieces[0], step, cards, token)
            if name == self._key:
                here, tensors = shard.place(layout, self._parts)
            else:
                tensors = [torch.empty(layout.nbytes, dtype=torch.uint8)]
                here = Shard(layout, tensors)
            for fetch in own:
                held = self._shard((name, step, fetch.kind))
                assert held is not None
                for into, out in zip(here.range(fetch.start, fetch.stop), held.range(fetch.start, fetch.stop), strict=True):
                    into.copy_(out)
            for fetch in pieces:
                if fetch.source != self._where.rank:
                    self._fetch(fetch, step, here, cards, token)
            if name == self._key:
                shard.install(layout, self._parts, tensors)
            else:
                self.blobs[name] = bytes(shard.view(tensors[0]))

    def _layout(self, fetch: plan.Fetch, step: int, cards: Mapping[int, _Card], token: bytes) -> shard.Layout:
        if fetch.source == self._where.rank:
            held = self._shard((fetch.shard, step, fetch.kind))
            assert held is not None
            return held.layout
        card = cards[fetch.source]
        with closing(Peer((card.host, card.port), token)) as peer:
            return peer.layout(fetch.shard, step, fetch.kind)

    def _fetch(self, fetch: plan.Fetch, step: int, here: Shard, cards: Mapping[int, _Card], token: bytes) -> None:
        """From the source of the plan; where that fails, from whoever else has it."""
        others = [
            (rank, holding.kind)
            for rank, card in sorted(cards.items())
            for holding in card.offer.holdings
            if (holding.shard, holding.step) == (fetch.shard, step) and rank not in (fetch.source, self._where.rank)
        ]
        reasons = []
        for rank, kind in [(fetch.source, fetch.kind), *others]:
            card = cards[rank]
            try:
                with closing(Peer((card.host, card.port), token)) as peer:
                    _into(peer, fetch, step, kind, here)
                return
            except TransferError as error:
                reasons.append(f"rank {rank}: {error}")
        raise RecoveryError(f"nobody could give {fetch.shard!r} after step {step} ({'; '.join(reasons)})")

    def _take_over(self, needs: Sequence[str], made: plan.Plan) -> None:
        """What this rank has itself at the plan's step."""
        fetched = {fetch.shard for fetch in made.of(self._where.rank)}
        for name in needs:
            if name in fetched:
                continue
            if name == self._key:
                assert self._earlier is not None, "the plan says that it is here"
                _take_live(self._earlier, self._parts)
                continue
            held = self._shard((name, made.step, "live"))
            assert held is not None, "the plan says that it is here"
            self.blobs[name] = b"".join(bytes(shard.view(tensor)) for tensor in held.tensors)

    def first_on_node(self, key: str) -> bool:
        """Is this the lowest rank of its node that needs that shard?"""
        same = [rank for rank, card in self._cards.items() if card.offer.node == self._where.node and key in card.offer.needs]
        return self._where.rank == min(same)


def _into(peer: Peer, fetch: plan.Fetch, step: int, kind: str, here: Shard) -> None:
    places = here.range(fetch.start, fetch.stop)
    staged = [place if place.device.type == "cpu" else torch.empty(place.numel(), dtype=torch.uint8) for place in places]
    peer.fetch(fetch.shard, step, kind, fetch.start, fetch.stop, staged)
    for place, stage in zip(places, staged, strict=True):
        if stage is not place:
            place.copy_(stage)


def _take_live(earlier: Memory, parts: Sequence[Part]) -> None:
    """Give the new objects what the earlier ones hold."""
    for old, new in zip(earlier.parts, parts, strict=True):
        found, skeleton = old.leaves()
        new.install([tensor for _, tensor in found], skeleton)


def held_by(earlier: Memory | None) -> Held:
    """What this process remembers and can give: its live parts when they are whole, and the small states it keeps."""
    if earlier is None:
        return {}
    held: dict[tuple[str, int, plan.Kind], Callable[[], Shard]] = {}
    if earlier.whole:
        held[earlier.key, earlier.step, "live"] = lambda: shard.of(earlier.parts)
    for step in earlier.common.steps():
        name = f"common {earlier.key}"
        held[name, step, "live"] = partial(blob, name, earlier.common.get(step) or b"")
    for rank, kept in sorted(earlier.private.items()):
        for step in kept.steps():
            held[f"rank {rank}", step, "live"] = partial(blob, f"rank {rank}", kept.get(step) or b"")
    return held


def blob(name: str, text: bytes) -> Shard:
    """Bytes as a shard."""
    from hyperpodrun.recovery.codec import Leaf

    layout = shard.Layout((shard.PartLayout(name, (Leaf("bytes", "uint8", (len(text),)),), b""),))
    return Shard(layout, [torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)])


def _source(fetches: Sequence[plan.Fetch]) -> str:
    if not fetches:
        return "own"
    largest = max(fetches, key=lambda fetch: fetch.stop - fetch.start)
    return {"live": "peer", "copy": "copy", "shm": "shm"}[largest.kind]
