"""A buddy keeps what the owner wrote, or says that it has no copy; it never keeps a recovery waiting."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from hyperpodrun.recovery import codec, copies, shard, shm, transfer
from hyperpodrun.recovery.copies import Copies

TOKEN = b"t" * 16


def filled(value: int) -> shard.Shard:
    tensor = torch.full((100_000,), value, dtype=torch.uint8)
    return shard.Shard(shard.Layout((shard.PartLayout("p", (codec.leaf_of("t", tensor),), b""),)), [tensor])


class Pair:
    """An owner, whose versions lie in `owned`, and its buddy, which keeps them in `kept`."""

    def __init__(self) -> None:
        self.owned, self.kept = shm.HeapSlots("model"), shm.HeapSlots("model")
        self.said: list[str] = []
        self.owner = Copies(TOKEN, self._find, lambda _: self.owned, self.said.append)
        self.buddy = Copies(TOKEN, lambda *_: None, lambda _: self.kept, self.said.append)
        self.buddy.begin([("model", ("127.0.0.1", self.owner.listen()))], sends=False, history=())

    def _find(self, name: str, step: int, since: int, timeout_s: float) -> shard.Shard | None:
        return next((found.shard for found in self.owned.found() if (found.name, found.step, since) == (name, step, 0)), None)

    def fetch(self, step: int, keep: int | None = None) -> None:
        self.buddy.fetch(step, keep)
        assert self.buddy._thread is not None
        self.buddy._thread.join()

    def close(self) -> None:
        self.buddy.close()
        self.owner.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(copies, "DUTY", 1.0)
    with closing(Pair()) as pair:
        yield pair


def test_what_has_changed_since_it_was_written_gets_no_digest_of_its_own(pair: Pair) -> None:
    pair.owned.write(3, filled(3))
    pair.fetch(3)
    assert pair.buddy.held and [*pair.kept.versions()] == [3]
    pair.owned.write(4, filled(4))
    found = {one.step: one for one in pair.owned.found()}
    found[4].shard.tensors[0][500] ^= 4
    pair.fetch(4)
    assert [*pair.kept.versions()] == [3] and not pair.buddy.held
    assert "not what its owner wrote (digest)" in pair.said[0]


def test_the_version_that_is_whole_stays_until_another_one_is(pair: Pair) -> None:
    for step in (1, 2):
        pair.owned.write(step, filled(step))
        pair.fetch(step)
    pair.owned.write(3, filled(3))
    pair.fetch(3, keep=1)
    assert {*pair.kept.versions()} == {1, 3}
    for step in (8, 9):
        pair.fetch(step)
        assert not pair.buddy.held, "the owner has none"
    assert len(pair.said) == 1, "which is said once"


def ends(work: threading.Thread) -> bool:
    work.start()
    work.join(20)
    return not work.is_alive()


def test_closing_does_not_wait_for_a_node_that_says_nothing_any_more(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        pair.buddy.begin([("model", silent.getsockname())], sends=False, history=())
        pair.buddy.fetch(3)
        connection, _ = silent.accept()
        with connection:
            transfer.receive(connection, len(TOKEN) + 4)  # it has asked for something
            assert ends(threading.Thread(target=pair.buddy.close, daemon=True))


def test_closing_does_not_wait_for_a_connection_to_a_node_that_is_gone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    began, answers = threading.Event(), threading.Event()

    def connect(address: tuple[str, int], token: bytes) -> copies.Peer:
        began.set()
        answers.wait()
        return made(address, token)

    made = copies.Peer
    monkeypatch.setattr(copies, "Peer", connect)
    pair.owned.write(3, filled(3))
    pair.buddy.fetch(3)
    began.wait()
    try:
        assert ends(threading.Thread(target=pair.buddy.close, daemon=True))
    finally:
        answers.set()
    assert pair.buddy._thread is not None
    pair.buddy._thread.join()
    assert not pair.kept.versions(), "what comes too late is not used"


def test_a_way_that_stays_closed_is_told_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job trains on with its last version older and older, and nobody knows."""
    monkeypatch.setattr(copies, "RETRY_S", 0.0)
    told = threading.Event()
    monkeypatch.setattr(pair.buddy, "_say", lambda text: (pair.said.append(text), told.set()))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    pair.buddy.begin([("model", address)], sends=False, history=())
    pair.buddy.fetch(3)
    assert told.wait(30)
    pair.buddy.close()
    assert len(pair.said) == 1 and "no copy of 'model' after step 3" in pair.said[0] and "tried again" in pair.said[0]
