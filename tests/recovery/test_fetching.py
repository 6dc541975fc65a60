"""What a rank fetches is what the plan says: of this timeline, as it was written, or a failure that is told."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from hyperpodrun.recovery import codec, fetching, plan, shard, shm
from hyperpodrun.recovery.fetching import Bad, Card, Fetching
from hyperpodrun.recovery.held import Held
from hyperpodrun.recovery.peer import Peer
from hyperpodrun.recovery.restoring import Restoring
from hyperpodrun.recovery.shm import Slots
from hyperpodrun.recovery.transfer import Server
from hyperpodrun.recovery.where import Where

TOKEN = b"t" * 16
HERE, THERE = plan.restart(3, 1), plan.restart(3, 2)


def filled(value: int, size: int = 1000) -> shard.Shard:
    tensor = torch.full((size,), value, dtype=torch.uint8)
    return shard.Shard(shard.Layout((shard.PartLayout("p", (codec.leaf_of("t", tensor),), b""),)), [tensor])


class Holders:
    """Ranks that hold what they are given, by sockets; what rank 9 fetches from them."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._cards: dict[int, Card] = {9: Card(plan.Offer(9, "there", ("model",)), "", 0)}
        self._open = ExitStack()

    def add(self, rank: int, kind: plan.Kind, held: shard.Shard | None, digest: str = "") -> None:
        server = self._open.enter_context(
            closing(Server(TOKEN, lambda *what: held if what == ("model", 5, kind, HERE) else None))
        )
        server.open()
        holding = plan.Holding("model", 5, kind, 1000, lineage=1, since=HERE, digest=digest)
        self._cards[rank] = Card(plan.Offer(rank, f"node{rank}", ("model",), (holding,)), "127.0.0.1", server.port)

    def fill(self, source: int, kind: plan.Kind, tried: list[Bad]) -> tuple[list[str] | None, int]:
        """Whence it came, and the value that did."""
        into = filled(0)
        fetch = plan.Fetch(9, "model", source, kind, 0, 1000, since=HERE)
        return self.fetching().fill([fetch], 5, into, (), tried), int(into.tensors[0].float().mean().item())

    def fetching(self) -> Fetching:
        return Fetching(9, self._cards, TOKEN, lambda *_: None, self.said.append)

    def close(self) -> None:
        self._open.close()


@pytest.fixture
def holders() -> Iterator[Holders]:
    with closing(Holders()) as holders:
        yield holders


def test_what_nobody_else_has_is_a_failure(holders: Holders) -> None:
    """The only holder's bytes arrived damaged by another way already: nothing was filled, which must not look like success."""
    holders.add(0, "live", filled(7))
    one: Bad = (0, "model", 5, "live", HERE)
    tried = [one]
    assert holders.fill(0, "live", tried) == (None, 0)
    assert tried == [one]


def test_a_version_that_is_not_what_was_written_is_had_from_elsewhere_or_not_at_all(holders: Holders) -> None:
    """Its holder has looked at it once, before its memory changed; each stream's checksum is one of the changed memory."""
    right = shm.digest_of(filled(7)).hex()
    holders.add(0, "shm", filled(8), right)
    tried: list[Bad] = []
    assert holders.fill(0, "shm", tried)[0] is None
    assert tried == [(0, "model", 5, "shm", HERE)] and "not what was written (digest)" in holders.said[0]
    holders.add(1, "shm", filled(7), right)
    assert holders.fill(1, "shm", []) == (["shm"], 7)
    holders.add(2, "shm", None, right)
    assert holders.fill(2, "shm", [*tried]) == (["shm"], 7), "rank 2 has lost it, rank 1 has the same"


def test_versions_with_other_digests_are_not_put_together(holders: Holders) -> None:
    holders.add(0, "shm", None, shm.digest_of(filled(7)).hex())
    holders.add(1, "shm", filled(8), shm.digest_of(filled(8)).hex())
    assert holders.fill(0, "shm", [])[0] is None


def test_of_two_timelines_versions_of_one_step_are_told_apart(tmp_path: Any) -> None:
    """A node that was away has a version of the other timeline, and what parting processes have left of this one."""
    Slots(str(tmp_path), "model").write(5, filled(1), (THERE,))
    Slots(str(tmp_path), "model", shm.PARTING).write(5, filled(2), (HERE,))
    held = Held()
    held.found(shm.scan(str(tmp_path)), ["model"])
    assert {(one.since, one.digest) for one in held.holdings()} == {
        (since, shm.digest_of(filled(value)).hex()) for since, value in ((THERE, 1), (HERE, 2))
    }
    for since, value in ((THERE, 1), (HERE, 2)):
        found = held.whole("model", 5, "shm", since)
        assert found is not None and found.tensors[0][0] == value
    assert held.whole("model", 5, "shm", plan.restart(3, 3)) is None


class Alone:
    """A meeting of this rank with what others are said to offer."""

    def __init__(self, *others: Card) -> None:
        self._others = others

    def share(self, _key: str, value: bytes) -> list[bytes]:
        import msgspec

        return [value, *map(msgspec.msgpack.encode, self._others)]


def test_what_is_void_is_nobodys_offer(tmp_path: Any) -> None:
    """A rank that makes its shard anew prefers what it has itself, and one that was let down asks everybody: of void steps nobody."""
    Slots(str(tmp_path), "model").write(5, filled(1), (THERE,))
    held = Held()
    held.found(shm.scan(str(tmp_path)), ["model"])
    newest = plan.restart(4, 7)
    now = plan.Holding("model", 5, "live", 1000, lineage=2, since=newest)
    other = Card(plan.Offer(1, "there", ("model",), (now,), histories=((HERE, newest),)), "", 0)
    where = Where(0, 2, 0, "here", "job", "0", True)
    attempt = Restoring(where, Alone(other), ["model"], 0, [], None, held, ((THERE,),), print)  # type: ignore[arg-type]  # a Meeting
    made = attempt.look()
    assert isinstance(made, plan.Plan) and made.step == 5
    assert [len(offer.holdings) for offer in attempt.offers.values()] == [0, 1]
    assert attempt._near("model", 5, ()).source == 1


def test_an_order_to_leave_that_breaks_into_the_beginning_leaves_nobody_at_work(
    holders: Holders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that fetched on would write into objects that the next attempt fills with another step's state."""
    into, begun, left = filled(0), list[threading.Thread](), threading.Event()
    start, connect = threading.Thread.start, fetching.Peer

    def broken_into(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "hyperpodrun-fetch":
            begun.append(thread)
            raise InterruptedError

    def late(address: tuple[str, int], token: bytes) -> Peer:
        assert left.wait(30)
        return connect(address, token)

    for rank in range(2):
        holders.add(rank, "live", filled(7))
    monkeypatch.setattr(threading.Thread, "start", broken_into)
    monkeypatch.setattr(fetching, "Peer", late)
    monkeypatch.setattr(fetching, "LEAVE_S", 0.0)
    pieces = [plan.Fetch(9, "model", rank, "live", 500 * rank, 500 * rank + 500, since=HERE) for rank in range(2)]
    with pytest.raises(InterruptedError):
        holders.fetching().fill(pieces, 5, into, (), [])
    left.set()
    for thread in begun:
        thread.join()
    assert len(begun) == 1 and not into.tensors[0].any()
