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
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b

import msgspec
import torch

from hyperpodrun import ending
from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import bygroup, plan, reshard, reuse, shard
from hyperpodrun.recovery.fetching import Bad, Card, Fetching
from hyperpodrun.recovery.held import Held
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Part, RecoveryError, hand_over
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import Server, new_token
from hyperpodrun.recovery.versions import Room
from hyperpodrun.recovery.where import Meeting, Where, own_address

MAX_PLANS = 50


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
        histories: tuple[plan.History, ...],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._where = where
        self._meeting = meeting
        self._key = needs[0]
        self._parts = parts
        self._earlier = earlier
        self._shared = reuse.sharing(parts, earlier)
        self._held = held
        self._offer = plan.Offer(where.rank, where.node, tuple(needs), tuple(held.holdings()), world=world, histories=histories)
        self._token = b""
        self._device: torch.device | None = None
        self._kinds: list[str] = []
        self._touched = self._spoilt = False
        self._left: list[torch.Tensor] = []
        self._gone: list[Bad] = []
        self._bad: set[Bad] = set()
        self.cards: dict[int, Card] = {}
        self.blobs: dict[str, bytes] = {}
        self.took_s: dict[str, float] = {}

    @property
    def offers(self) -> dict[int, plan.Offer]:
        """Everybody's, by rank, without what is void."""
        return {rank: card.offer for rank, card in self.cards.items()}

    @property
    def mark(self) -> int:
        """A number that all ranks have, and no other attempt."""
        return int.from_bytes(blake2b(self._token, digest_size=8).digest())

    def look(self) -> plan.Plan | plan.Infeasible:
        """What could be done: offers are exchanged, nothing changes."""
        self._meet(Card(self._offer, "", 0))
        return plan.make(list(self.offers.values()))

    def restore(self, room: Callable[[str], Room] | None) -> Restored | Nothing:
        """Do it. `room`: for the card, given this host's address. Raises plan.Contradiction, RecoveryError."""
        meeting = self._meeting
        self._token = meeting.from_first("token", new_token())
        server = Server(self._token, self._find, readable=True)
        with closing(server), closing(server):  # a raise may break into the first
            server.open()
            host = own_address(os.environ.get(names.RANK0_ADDR, "127.0.0.1"))
            with self._timed("offers"):
                self._device = bygroup.device_for(tensor for part in self._parts for _, tensor in part.leaves()[0])
                kind = "" if self._device is None else self._device.type
                used = reuse.trained(self._parts, self._earlier)
                self._meet(Card(self._offer, host, server.port, None if room is None else room(host), kind, used))
            made = self._carried_out()
            if isinstance(made, plan.Plan):
                with self._timed("take over"):
                    self._take_over(made)
            with self._timed("wait"):
                meeting.barrier()
        if isinstance(made, plan.Plan):
            if self._left:
                ending.thread(_free, self._left, name="free", stop=ending.by_itself)
            return Restored(made.step, self._source(), made.why, made.history, made.world, bool(made.members))
        trained = [rank for rank, card in self.cards.items() if card.used]
        if trained:
            raise reuse.Reused(
                f"a new beginning, but the parameters of rank {trained[0]} have been trained already (a model that is built outside "
                f"of the function that is run again): they have to be made again, by new processes: {made.why}"
            )
        if self._spoilt:
            raise RecoveryError(
                f"what was to be restored is damaged, and the new objects with it; they have to be made again: {made.why}"
            )
        return Nothing(made.why, made.history)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.took_s[phase] = self.took_s.get(phase, 0.0) + time.perf_counter() - began_s

    def _meet(self, card: Card) -> None:
        said = self._meeting.share("card", msgspec.msgpack.encode(card))
        cards = [msgspec.msgpack.decode(text, type=Card) for text in said]
        _, offers = plan.valid([card.offer for card in cards])
        self.cards = {offer.rank: msgspec.structs.replace(card, offer=offer) for card, offer in zip(cards, offers, strict=True)}

    def _carried_out(self) -> plan.Plan | plan.Infeasible:
        """The plan that all ranks have done their parts of."""
        bad = self._bad
        fetching = Fetching(self._where.rank, self.cards, self._token, self._find, self._say)
        for attempt in range(MAX_PLANS):
            made = plan.make([_without(offer, bad) for offer in self.offers.values()])
            if isinstance(made, plan.Infeasible):
                return made
            failed: set[Bad] = set()
            for wave in range(made.waves):
                with self._timed("fetch"):
                    mine = self._anew(fetching, made, bad) if made.members and wave == 0 else []
                    mine += self._fetched(fetching, made, wave, bad, f"group/{attempt}/{wave}")
                with self._timed("wait"):
                    said = self._meeting.share(
                        f"done/{attempt}/{wave}", msgspec.msgpack.encode((self._touched, mine, self._gone))
                    )
                told = [msgspec.msgpack.decode(text, type=tuple[bool, list[Bad], list[Bad]]) for text in said]
                failed = {one for _, some, _ in told for one in some}
                bad |= {one for _, _, gone in told for one in gone}
                self._spoilt |= any(touched for touched, _, _ in told)
                if failed:
                    break
            if not failed:
                return made
            bad |= failed
        raise RecoveryError(f"{MAX_PLANS} plans have failed, the last one for want of {sorted(bad)[-1]}")

    def version(self) -> int | None:
        """The newest step that is whole without anybody's live objects: what new versions must not replace before they are whole."""
        kept = [
            msgspec.structs.replace(offer, holdings=tuple(held for held in offer.holdings if held.kind in ("copy", "shm")))
            for offer in self.offers.values()
        ]
        try:
            made = plan.make([_without(offer, self._bad) for offer in kept])
        except plan.Contradiction:
            return None
        return made.step if isinstance(made, plan.Plan) else None

    def _find(self, name: str, step: int, kind: str, since: int) -> Shard | None:
        return self._held.whole(name, step, kind, since)

    def _touch(self) -> None:
        """The new objects are about to be written to; the earlier ones, where they are the same, hold no state any more."""
        self._touched = True
        for memory in self._shared:
            if memory.whole:
                memory.torn = True
                since = plan.last(memory.history)
                self._held.drop(memory.key, memory.step, "live", since)
                self._gone.append((self._where.rank, memory.key, memory.step, "live", since))

    def _fetched(self, fetching: Fetching, made: plan.Plan, wave: int, bad: set[Bad], key: str) -> list[Bad]:
        """This rank's part of a wave; what could not be had from anybody. `key`: to agree under."""
        mine = [fetch for fetch in made.of(self._where.rank) if fetch.wave == wave]
        failed = self._fetched_shard(fetching, made, wave, bad, key)
        for name in dict.fromkeys(fetch.shard for fetch in mine if fetch.shard != self._key):
            pieces = [fetch for fetch in mine if fetch.shard == name]
            tried: list[Bad] = []
            layout = fetching.layout(pieces[0], made.step, bad, tried) if not failed else None
            if layout is None:
                return [*failed, *tried]
            row = torch.empty(layout.nbytes, dtype=torch.uint8)
            if fetching.fill(pieces, made.step, Shard(layout, [row]), bad, tried) is None:
                return tried
            self.blobs[name] = bytes(shard.view(row))
        return failed

    def _fetched_shard(self, fetching: Fetching, made: plan.Plan, wave: int, bad: set[Bad], key: str) -> list[Bad]:
        """The large one: through the group what it can bring, the rest by sockets. All ranks take part."""
        pieces = [fetch for fetch in made.of(self._where.rank) if fetch.wave == wave and fetch.shard == self._key]
        tried: list[Bad] = []
        layout = fetching.layout(pieces[0], made.step, bad, tried) if pieces else None
        here: Shard | None = None
        tensors: list[torch.Tensor] = []
        if layout is not None:
            self._touch()
            here, tensors = shard.place(layout, self._parts)
        came = self._by_group(made, wave, here, key)
        for fetch in pieces:
            if came.get(fetch) is False:
                tried.append((fetch.source, fetch.shard, made.step, fetch.kind, fetch.since))
                fetching.once(
                    f"rank {self._where.rank} passes over rank {fetch.source}: {fetch.shard!r} arrived damaged (checksum)"
                )
        if here is None or layout is None:
            return tried
        left = [fetch for fetch in pieces if not came.get(fetch)]
        kinds = fetching.fill(left, made.step, here, bad, tried)
        if kinds is None:
            return tried
        shard.install(layout, self._parts, tensors)
        self._kinds = [*kinds, *("live" for fetch in pieces if came.get(fetch))]
        return []

    def _anew(self, fetching: Fetching, made: plan.Plan, bad: Container[Bad]) -> list[Bad]:
        """Make this rank's shard of another world's; what could not be had from anybody. Raises plan.Contradiction, RecoveryError."""
        rank, tried = self._where.rank, list[Bad]()
        new: reshard.New | None = None
        for member in reshard.nearest_first(made.members, rank, self._where.world_size):
            fetch = self._near(member, made.step, bad)
            layout = fetching.layout(fetch, made.step, bad, tried)
            if layout is None:
                return tried
            if new is None:
                self._touch()
                self._kinds = []
                new = reshard.New(layout, self._parts, rank)
            landings = new.landings(layout)
            came = fetching.land(landings, fetch, made.step, bad, tried) if landings else "nothing"
            if came is None:
                return tried
            self._kinds += [came] * len(landings)
            if new.whole:
                break
        assert new is not None, "a family has members"
        new.install(self._parts)
        return []

    def _near(self, name: str, step: int, bad: Container[Bad]) -> plan.Fetch:
        """Whom to ask first: this rank, its node, then others in turn."""
        here, size = self._where, self._where.world_size
        held = [
            plan.Fetch(here.rank, name, rank, one.kind, 0, 0, since=one.since)
            for rank, offer in self.offers.items()
            for one in _without(offer, bad).holdings
            if (one.shard, one.step) == (name, step)
        ]

        def far(fetch: plan.Fetch) -> tuple[bool, bool, bool, int]:
            rank = fetch.source
            return fetch.kind == "tiered", rank != here.rank, self.offers[rank].node != here.node, (rank - here.rank) % size

        return min(held, key=far)

    def _by_group(self, made: plan.Plan, wave: int, here: Shard | None, key: str) -> dict[plan.Fetch, bool]:
        """Which of a wave's fetches came through the process group, and did they come whole? All ranks call it."""
        device = self._device
        if device is None or any(card.device != device.type for card in self.cards.values()):
            return {}
        shards = {rank: offer.needs[0] for rank, offer in self.offers.items()}
        live = [fetch for fetch in made.fetches if (fetch.wave, fetch.kind) == (wave, "live") and fetch.source != fetch.rank]
        fetches = [fetch for fetch in live if fetch.shard == shards[fetch.rank]]
        if not fetches:
            return {}
        rank = self._where.rank
        held = {fetch.shard: self._find(fetch.shard, made.step, "live", fetch.since) for fetch in fetches if fetch.source == rank}
        unready = [
            number
            for number, fetch in enumerate(fetches)
            if (fetch.rank == rank and here is None) or (fetch.source == rank and held[fetch.shard] is None)
        ]
        said = self._meeting.share(key, msgspec.msgpack.encode(unready))
        without = {number for text in said for number in msgspec.msgpack.decode(text, type=list[int])}
        going = [fetch for number, fetch in enumerate(fetches) if number not in without]
        damaged = bygroup.exchange(rank, going, held, here, device)
        return {fetch: fetch not in damaged for fetch in going}

    def _take_over(self, made: plan.Plan) -> None:
        """What this rank has itself at the plan's step."""
        fetched = {fetch.shard for fetch in made.of(self._where.rank)}
        for name in plan.needs(made.offer(self._offer), made.world):
            if name in fetched:
                continue
            if name == self._key:
                assert self._earlier is not None, "the plan says that it is here"
                self._kinds = []
                for old, new in zip(self._earlier.parts, self._parts, strict=True):
                    self._left += hand_over(old, new)
                continue
            held = self._live(name, made.step)
            assert held is not None, "the plan says that it is here"
            self.blobs[name] = b"".join(bytes(shard.view(tensor)) for tensor in held.tensors)
        if made.common:
            self.blobs[f"common {self._key}"] = self.blobs[made.common]

    def _live(self, name: str, step: int) -> Shard | None:
        mine = self.offers[self._where.rank].holdings
        since = [held.since for held in mine if (held.shard, held.step, held.kind) == (name, step, "live")]
        return self._find(name, step, "live", since[0]) if since else None

    def _source(self) -> str:
        """Where most of the shard came from."""
        kind = max(self._kinds, key=self._kinds.count, default="own")
        return "peer" if kind == "live" else kind

    def first_on_node(self) -> bool:
        """Is this the lowest rank of its node that has its shard?"""
        same = [rank for rank, offer in self.offers.items() if offer.node == self._where.node and self._key in offer.needs]
        return self._where.rank == min(same)


def _free(left: list[torch.Tensor]) -> None:
    """Give memory back to the system: 60 ms for a GiB, for which nobody should wait."""
    while left:
        left.pop()


def _without(offer: plan.Offer, bad: Container[Bad]) -> plan.Offer:
    holdings = tuple(held for held in offer.holdings if (offer.rank, held.shard, held.step, held.kind, held.since) not in bad)
    return msgspec.structs.replace(offer, holdings=holdings)
