"""Door 2: MeshStore against the agent's store, in this process."""

import gc
import weakref

import pytest

from hyperpodrun.agent.wire import names

dist = pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.torch


@pytest.fixture
def store(served, monkeypatch):
    from hyperpodrun.rootless.store import MeshStore

    monkeypatch.setenv(names.GENERATION, "0")
    return MeshStore(served.store.address)


def test_a_connection_that_broke_is_made_again_and_nothing_is_lost(store, served):
    store.set("text", "abc")
    with pytest.raises(dist.DistNetworkError):
        store.add("text", 1)
    assert store.get("text") == b"abc"
    assert store.add("number", 1) == 1
    assert len(served.said) == 1 and "is no number" in served.said[0]


def test_a_store_of_an_ended_generation_never_meets_the_next_one(store, served, monkeypatch):
    store.set("key", "old")
    served.do(lambda: served.store.open(1, "n", ["n"]))
    monkeypatch.setenv(names.GENERATION, "1")
    with pytest.raises(dist.DistNetworkError):
        store.set("key", "from yesterday")
    with pytest.raises(dist.DistStoreError, match="generation 0 ended"):
        store.set("key", "from yesterday")
    with served.connect() as client:
        client.sendall(b"\7")
        assert client.recv(8) == bytes(8)


def test_stores_of_past_generations_are_let_go(served, monkeypatch):
    from hyperpodrun.rootless.store import MeshStore

    host, port = served.store.address
    monkeypatch.setenv(names.STORE, f"tcp://{host}:{port}")
    seen = []
    for generation in range(4):
        monkeypatch.setenv(names.GENERATION, str(generation))
        if generation:
            served.do(lambda generation=generation: served.store.open(generation, "n", ["n"]))
        store = MeshStore.current()
        store.set("key", str(generation))
        assert MeshStore.current() is store and store.get("key") == b"%d" % generation
        seen.append(weakref.ref(store))
    del store
    gc.collect()
    # The one before may still be used by groups that are on their way out.
    assert [one() is not None for one in seen] == [False, False, True, True]
