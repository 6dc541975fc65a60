"""Health checks, abort parts, exceptions as text."""

import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from hyperpodrun.inprocess import bounded, describe, loaders
from hyperpodrun.inprocess.abort import Abort, AbortAll, AbortAsyncCheckpoint, AbortFailed, AbortTransformerEngine
from hyperpodrun.inprocess.errors import HealthCheckError
from hyperpodrun.inprocess.health_check import All, CudaHealthCheck, DiskSpace, FaultCounter, SharedMemorySpace


def test_a_counter_of_faults() -> None:
    check = FaultCounter(max_faults=2, rung="replace")
    check()
    check()
    with pytest.raises(HealthCheckError, match=r"3 restarts \(FaultCounter: 2\)") as caught:
        check()
    assert caught.value.rung == "replace"
    for _ in range(10):
        FaultCounter()()
    windowed = FaultCounter(max_faults=1, window=1000.0)
    windowed()
    windowed._at_s[0] -= 2000.0  # long ago
    windowed()
    with pytest.raises(HealthCheckError):
        windowed()


def test_room_on_disks(tmp_path: Path) -> None:
    DiskSpace(tmp_path, free_bytes=1)()
    SharedMemorySpace(1)()
    with pytest.raises(HealthCheckError, match="MiB free"):
        DiskSpace(tmp_path, free_bytes=1 << 60)()
    with pytest.raises(HealthCheckError, match="inodes"):
        DiskSpace(tmp_path, 0, free_inodes=1 << 60)()
    with pytest.raises(HealthCheckError, match="cannot be read"):
        DiskSpace(tmp_path / "none")()


def test_checks_are_put_together() -> None:
    ran = []
    check = All([lambda: ran.append(1)], None, All(lambda: ran.append(2)))
    check()
    assert ran == [1, 2]
    with pytest.raises(TypeError, match="health_check"):
        All(3)  # type: ignore[arg-type]


class FakeTensor:
    def __init__(self, values: Any) -> None:
        self.values = values


@pytest.mark.torch
def test_cuda_is_asked_and_believed_only_when_right(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    CudaHealthCheck()()  # no CUDA: nothing

    class Cuda:
        is_available = is_initialized = staticmethod(lambda: True)
        current_device = staticmethod(lambda: "cpu")
        set_device = staticmethod(lambda device: None)
        synchronize = staticmethod(lambda device: None)

    fake = types.SimpleNamespace(cuda=Cuda, arange=torch.arange, float32=torch.float32)
    monkeypatch.setitem(sys.modules, "torch", fake)
    CudaHealthCheck()()

    Cuda.synchronize = staticmethod(lambda device: time.sleep(1000))
    with pytest.raises(HealthCheckError, match="does not answer"):
        CudaHealthCheck(timeout=0.05)()

    def broken(device: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    Cuda.synchronize = staticmethod(broken)
    with pytest.raises(HealthCheckError, match="illegal memory"):
        CudaHealthCheck()()

    Cuda.synchronize = staticmethod(lambda device: None)
    fake.arange = lambda *args, **options: torch.arange(*args, **options) + 0.0001
    with pytest.raises(HealthCheckError, match="computes wrongly") as caught:
        CudaHealthCheck()()
    assert caught.value.rung == "replace"


def test_all_parts_have_their_turn() -> None:
    ran = []

    class Slow(Abort):
        def __call__(self) -> None:
            time.sleep(1000)

    def fails() -> None:
        raise ValueError("no")

    parts = AbortAll(fails, [Slow(timeout_s=0.05)], AbortAll(lambda: ran.append("last")))
    with pytest.raises(AbortFailed, match=r"fails: ValueError: no; Slow: TookTooLong: Slow did not end within 0\.05 s"):
        parts()
    assert ran == ["last"]


def test_parts_that_free_are_asked_together() -> None:
    import threading

    both = threading.Barrier(2)

    class Frees(Abort):
        def free(self, left: Any) -> None:
            assert left(0.0)
            both.wait(20)

        def __call__(self) -> None:
            raise AssertionError("not asked for")

    AbortAll(Frees(), Frees(), lambda: None).free(lambda seconds: True)
    assert not both.broken


def test_parts_of_what_is_not_loaded_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.checkpoint._async_process_executor", raising=False)
    AbortAsyncCheckpoint()()
    AbortTransformerEngine()()
    destroyed = []
    module = types.SimpleNamespace(_ub_communicators={"x": 1}, destroy_ub=lambda: destroyed.append(1))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", module)
    AbortTransformerEngine()()
    assert destroyed == [1]


def test_the_background_writer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing

    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
    process.start()
    module = types.SimpleNamespace(_CHECKPOINT_PROCESS=types.SimpleNamespace(process=process))
    monkeypatch.setitem(sys.modules, "torch.distributed.checkpoint._async_process_executor", module)
    AbortAsyncCheckpoint()()
    assert process.exitcode == -9
    assert module._CHECKPOINT_PROCESS is None
    process.close()


class Stuck:
    """A dataset whose second item never comes."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index >= 8:
            time.sleep(1000)
        return index


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_of_this_process_end_and_nothing_else(persistent: bool) -> None:
    data = pytest.importorskip("torch.utils.data")
    import multiprocessing

    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,), daemon=True)
    other.start()
    loader = data.DataLoader(Stuck(), num_workers=2, batch_size=2, persistent_workers=persistent, multiprocessing_context="fork")
    iterator = iter(loader)
    next(iterator)
    workers = list(iterator._workers)
    loaders.shut_down()
    assert not any(worker.is_alive() for worker in workers)
    assert other.is_alive()
    assert next(iter(loader)).tolist() == [0, 1]  # a new iterator works
    loaders.shut_down()
    other.kill()
    other.join()
    other.close()


@pytest.mark.torch
def test_a_persistent_loader_whose_workers_are_all_dead_begins_anew() -> None:
    from torch.utils import data

    loader = data.DataLoader([0, 1, 2, 3], num_workers=2, batch_size=2, persistent_workers=True, multiprocessing_context="fork")
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    for worker in iterator._workers:
        worker.kill()
        worker.join()
    loaders.shut_down()
    assert next(iter(loader)).tolist() == [0, 1]
    loaders.shut_down()


def test_bounded_runs_hand_on_what_happened() -> None:
    assert bounded.run(lambda: 5, 10.0, "five") == 5
    with pytest.raises(KeyError):
        bounded.run(lambda: {}[1], 10.0, "fails")


def test_texts_are_cut_in_the_middle_and_are_utf8() -> None:
    assert describe.fit("short", 100) == "short"
    cut = describe.fit("a" * 1000 + "é" * 1000, 200)
    assert len(cut.encode()) <= 200 and cut.startswith("aa") and cut.endswith("é") and "[...]" in cut
    assert describe.fit("\udc80", 100) == "\\udc80"


def test_frames_of_a_whole_family_are_released() -> None:
    import weakref

    class Big:
        pass

    refs = []

    def fails(depth: int) -> None:
        big = Big()
        refs.append(weakref.ref(big))
        try:
            if depth:
                fails(depth - 1)
            raise KeyError(depth)
        except KeyError as error:
            raise ExceptionGroup("group", [ValueError(depth), error]) from error

    try:
        fails(3)
    except ExceptionGroup as error:
        caught = error
    describe.release(caught)
    assert [ref() for ref in refs] == [None] * 4
    assert os.getpid()


def test_connections_to_one_address_are_ended_and_no_others() -> None:
    import socket

    from hyperpodrun.inprocess import sockets

    with (
        socket.create_server(("127.0.0.1", 0)) as store,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.create_connection(store.getsockname()) as asking,
        socket.create_connection(other.getsockname()) as stays,
        store.accept()[0],
        other.accept()[0] as its,
    ):
        assert sockets.shut_connections_to("127.0.0.1", store.getsockname()[1]) == 1
        assert asking.recv(1) == b""
        its.sendall(b"x")
        assert stays.recv(1) == b"x"
