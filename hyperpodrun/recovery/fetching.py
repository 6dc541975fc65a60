"""One rank's part of a plan: getting shards from those who have them, several streams at a time.

Theory. What is fetched of a shard is cut into streams: as many as the plan has holders, and more where a holder's range is large,
since one stream keeps one processor busy and no more. Each stream has a connection of its own and writes where its bytes belong. A
holder that cannot give what it offered, or gives it damaged, is passed over: the stream begins again with another one. What was a
version has a digest over all of it, which what arrived is compared with: the checksums of a stream know only what the holder had in
its memory then, and a copy within a node has none.

States: none. Invariants: `fill` has filled everything, with its checksums, when it says whence; no stream is left at work when
it returns or raises.
"""

import os
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

import msgspec
import torch

from hyperpodrun.recovery import plan, reshard, shard, shm
from hyperpodrun.recovery.peer import Peer
from hyperpodrun.recovery.shard import Shard
from hyperpodrun.recovery.transfer import TransferError
from hyperpodrun.recovery.versions import Room

STREAM_BYTES = 32 << 20
"""A stream is worth its thread and its connection from here on."""
MAX_STREAMS = 4
STAGE_BYTES = 64 << 20
LEAVE_S = 5.0
T = TypeVar("T")

Bad = tuple[int, str, int, str, int]
"""Rank, shard, step, kind, since (plan.Holding): it could not give that."""


class Card(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says of itself. `device`: the kind of device that its process group brings its shard's tensors to ("": none).

    `used`: its parameters have been trained in an earlier life of the function (reuse.py).
    """

    offer: plan.Offer
    host: str
    port: int
    room: Room | None = None
    device: str = ""
    used: bool = False


class Fetching:
    """For `rank`. `own` gives what it holds itself, `say` tells people what went another way than planned."""

    def __init__(
        self,
        rank: int,
        cards: Mapping[int, Card],
        token: bytes,
        own: Callable[[str, int, str, int], Shard | None],
        say: Callable[[str], None],
    ) -> None:
        self._rank = rank
        self._cards = cards
        self._token = token
        self._own = own
        self._say = say
        self._lock = threading.Lock()
        self._open: set[Peer] = set()
        self._leaving = False
        self._said: set[str] = set()

    def layout(self, fetch: plan.Fetch, step: int, bad: Container[Bad], tried: list[Bad]) -> shard.Layout | None:
        """What the shard looks like; None: nobody says so any more. `tried` gets who failed."""
        return self._from_any(fetch, step, bad, tried, self._layout)

    def fill(
        self, fetches: Sequence[plan.Fetch], step: int, here: Shard, bad: Container[Bad], tried: list[Bad]
    ) -> list[str] | None:
        """Carry out these, all of one shard, into `here`: whence it came; None: something could not be had.

        `tried` gets who failed, then at least one.
        """
        if not fetches:
            return []
        streams = [part for fetch in fetches for part in _streams(fetch, len(fetches), self._local(fetch))]
        done: list[plan.Fetch | None] = [None] * len(streams)
        raised: list[Exception] = []

        def fetched(place: int) -> None:
            done[place] = self._from_any(streams[place], step, bad, tried, partial(self._fill, here))

        def in_thread(place: int) -> None:
            try:
                fetched(place)
            except Exception as error:  # noqa: BLE001  # raised by the caller's thread
                raised.append(error)

        names = range(1, len(streams))
        threads = [threading.Thread(target=in_thread, args=(n,), name="hyperpodrun-fetch", daemon=True) for n in names]
        try:
            for thread in threads:
                thread.start()
            fetched(0)
            for thread in threads:
                thread.join()
        except BaseException:
            self._leave(threads)
            raise
        if raised:
            raise raised[0]
        came = [fetch for fetch in done if fetch is not None]
        if len(came) < len(streams) or not self._as_written(came, step, here, tried):
            return None
        return [fetch.kind for fetch in came]

    def _as_written(self, came: Sequence[plan.Fetch], step: int, here: Shard, tried: list[Bad]) -> bool:
        """Is it the version that was written, where all of one has come? `tried` gets everybody it came from, if not."""
        expected = next((digest for fetch in came if (digest := self._digest(fetch, step))), "")
        if not expected or sum(fetch.stop - fetch.start for fetch in came) != here.nbytes:
            return True
        if shm.digest_of(here).hex() == expected:
            return True
        tried += {_bad(fetch, step) for fetch in came}
        ranks = ", ".join(str(rank) for rank in sorted({fetch.source for fetch in came}))
        self.once(f"rank {self._rank} cannot use {came[0].shard!r} from rank {ranks}: it is not what was written (digest)")
        return False

    def _digest(self, fetch: plan.Fetch, step: int) -> str:
        held = self._cards[fetch.source].offer.holdings
        return next((one.digest for one in held if _bad(fetch, step)[1:] == (one.shard, one.step, one.kind, one.since)), "")

    def land(
        self, landings: Sequence[reshard.Landing], fetch: plan.Fetch, step: int, bad: Container[Bad], tried: list[Bad]
    ) -> str | None:
        """Fill these of a member of another world; whence it came ("own": this process), None: nobody has it any more."""
        return self._from_any(fetch, step, bad, tried, partial(self._land, landings))

    def _land(self, landings: Sequence[reshard.Landing], fetch: plan.Fetch, step: int) -> str:
        if self._local(fetch):
            held = self._held(fetch, step)
            for landing in landings:
                landing.fill(held.range(landing.start, landing.stop))
        else:
            with self._reading(fetch.source) as peer:
                for landing in landings:
                    peer.fetch(fetch.shard, step, fetch.kind, fetch.since, landing.start, landing.stop, landing.into)
        for landing in landings:
            landing.land()
        return "own" if self._local(fetch) and fetch.kind == "live" else fetch.kind

    def _leave(self, threads: Sequence[threading.Thread]) -> None:
        """An error, or a restart that interrupts: what is still at work ends, and what is only about to begin does not."""
        with self._lock:
            self._leaving = True
            peers = list(self._open)
        for peer in peers:
            peer.cut()
        for thread in threads:
            if thread.is_alive():
                thread.join(LEAVE_S)

    def _from_any(
        self, fetch: plan.Fetch, step: int, bad: Container[Bad], tried: list[Bad], get: Callable[[plan.Fetch, int], T]
    ) -> T | None:
        """From the source of the plan; where that fails, from whoever else has it. None: `tried` has the plan's source, at least."""
        digest = self._digest(fetch, step)
        others = [
            msgspec.structs.replace(fetch, source=rank, kind=held.kind, since=held.since)
            for rank, card in sorted(self._cards.items())
            for held in card.offer.holdings
            if (held.shard, held.step) == (fetch.shard, step) and (not held.digest or not digest or held.digest == digest)
        ]
        others.sort(key=lambda other: plan.KINDS.index(other.kind))
        for one in (fetch, *others):
            if _bad(one, step) in bad or _bad(one, step) in tried or self._leaving:
                continue
            try:
                return get(one, step)
            except TransferError as error:
                if _bad(one, step) not in tried:
                    tried.append(_bad(one, step))
                self.once(f"rank {self._rank} passes over rank {one.source} ({one.kind}): {error}")
        if _bad(fetch, step) not in tried:
            tried.append(_bad(fetch, step))
        return None

    def _layout(self, fetch: plan.Fetch, step: int) -> shard.Layout:
        if self._local(fetch):
            return self._held(fetch, step).layout
        with closing(self._peer(fetch.source)) as peer:
            return peer.layout(fetch.shard, step, fetch.kind, fetch.since)[0]

    def _fill(self, here: Shard, fetch: plan.Fetch, step: int) -> plan.Fetch:
        if self._local(fetch):
            held = self._held(fetch, step).range(fetch.start, fetch.stop)
            for into, out in zip(here.range(fetch.start, fetch.stop), held, strict=True):
                into.copy_(out)
            return fetch
        with self._reading(fetch.source) as peer:
            _receive(peer, fetch, step, here)
        return fetch

    @contextmanager
    def _reading(self, rank: int) -> Iterator[Peer]:
        """A connection for much, which ends when this rank leaves; it reads memory where the node is the same."""
        peer = self._peer(rank)
        try:
            with self._lock:
                self._open.add(peer)
            if self._leaving:
                raise TransferError("it is not wanted any more")
            if self._cards[rank].offer.node == self._cards[self._rank].offer.node:
                refusal = peer.come_near()
                if refusal:
                    self.once(f"rank {self._rank} gets the state through sockets, memory of rank {rank} is closed: {refusal}")
            yield peer
        finally:
            with self._lock:
                self._open.discard(peer)
                peer.close()

    def _local(self, fetch: plan.Fetch) -> bool:
        return fetch.source == self._rank

    def _held(self, fetch: plan.Fetch, step: int) -> Shard:
        held = self._own(fetch.shard, step, fetch.kind, fetch.since)
        if held is None:
            raise TransferError(f"{fetch.shard!r} after step {step} is damaged here ({fetch.kind})", refused=True)
        return held

    def _peer(self, rank: int) -> Peer:
        return Peer((self._cards[rank].host, self._cards[rank].port), self._token)

    def once(self, text: str) -> None:
        """Say that, unless it was said."""
        with self._lock:
            new = text not in self._said
            self._said.add(text)
        if new:
            self._say(text)


def _bad(fetch: plan.Fetch, step: int) -> Bad:
    return fetch.source, fetch.shard, step, fetch.kind, fetch.since


def _receive(peer: Peer, fetch: plan.Fetch, step: int, here: Shard) -> None:
    """All of it at once into memory of the CPU, piece by piece over a stage onto another device."""
    places = here.range(fetch.start, fetch.stop)
    if all(place.device.type == "cpu" for place in places):
        peer.fetch(fetch.shard, step, fetch.kind, fetch.since, fetch.start, fetch.stop, places)
        return
    stage = torch.empty(min(STAGE_BYTES, fetch.stop - fetch.start), dtype=torch.uint8)
    for start in range(fetch.start, fetch.stop, STAGE_BYTES):
        stop = min(start + STAGE_BYTES, fetch.stop)
        peer.fetch(fetch.shard, step, fetch.kind, fetch.since, start, stop, [stage[: stop - start]])
        at = 0
        for place in here.range(start, stop):
            place.copy_(stage[at : at + place.numel()])
            at += place.numel()


def _streams(fetch: plan.Fetch, holders: int, local: bool) -> list[plan.Fetch]:
    """The fetch in parts that are carried out at once."""
    size = fetch.stop - fetch.start
    at_once = max(1, min(MAX_STREAMS, len(os.sched_getaffinity(0))) // holders)
    count = 1 if local else max(1, min(at_once, size // STREAM_BYTES))
    cuts = [fetch.start + size * place // count // plan.ALIGN_BYTES * plan.ALIGN_BYTES for place in range(count)]
    return [
        msgspec.structs.replace(fetch, start=start, stop=stop) for start, stop in zip(cuts, [*cuts[1:], fetch.stop], strict=True)
    ]
