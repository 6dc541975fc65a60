"""The thread that runs the function is made to leave it, whatever it is doing there."""

import ctypes
import faulthandler
import functools
import operator
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hyperpodrun.inprocess import interrupt
from hyperpodrun.inprocess.errors import RestartRequested
from hyperpodrun.inprocess.interrupt import Interrupter


@pytest.fixture(params=["main thread", "another thread"])
def within(request: pytest.FixtureRequest) -> Callable[[Callable[[], Any]], Any]:
    """Run something in the main thread, or in another one."""
    if request.param == "main thread":
        return lambda action: action()

    def elsewhere(action: Callable[[], Any]) -> Any:
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.append(action()))
        thread.start()
        thread.join()
        return outcome[0]

    return elsewhere


class Region:
    """An armed region that somebody is told to leave once `entered` is set."""

    def __init__(self) -> None:
        self.interrupter = Interrupter()
        self.entered = threading.Event()
        self.unblocked = threading.Event()
        self.stopper = threading.Thread(target=self._stop)

    def _stop(self) -> None:
        self.entered.wait()
        self.interrupter.stop("asked to", self.unblocked.set)

    def run(self, body: Callable[[], Any]) -> str:
        """What became of it: "left" by our raise, "returned", or the name of another exception."""
        self.stopper.start()
        try:
            self.interrupter.run(body)
        except RestartRequested as error:
            assert str(error) in ("asked to", "")
            return "left"
        except BaseException as error:  # noqa: BLE001
            return type(error).__name__
        else:
            return "returned"
        finally:
            self.entered.set()
            self.stopper.join()


@pytest.fixture
def region() -> Iterator[Region]:
    region = Region()
    yield region
    assert not region.stopper.is_alive()


def test_an_exception_of_c_code_comes_before_the_raise(region: Region) -> None:
    """The signal arrives in C code that raises: it is looked at when the next function is entered."""
    libc = ctypes.CDLL(None)
    region.interrupter.stop = lambda *_: None  # type: ignore[method-assign]  # told by hand, at one moment

    def body() -> None:
        region.interrupter._reason = "asked to"
        numbers = map(libc["raise"], [region.interrupter._signal])
        functools.reduce(operator.truediv, numbers, 1)  # 1 / 0, within one call

    assert region.run(body) == "ZeroDivisionError"
    assert region.interrupter.left.is_set()


def spin(region: Region) -> None:
    region.entered.set()
    while True:
        pass


def test_a_loop_is_left(region: Region, within: Callable[..., Any]) -> None:
    assert within(lambda: region.run(lambda: spin(region))) == "left"


@pytest.mark.parametrize("what", ["sleep", "event", "lock", "queue", "socket", "join"])
def test_waits_of_the_main_thread_are_broken(region: Region, what: str) -> None:
    held = threading.Lock()
    held.acquire()
    ours, theirs = socket.socketpair()
    sleeper = threading.Thread(target=region.stopper.join, daemon=True)
    waits: dict[str, Callable[[], Any]] = {
        "sleep": lambda: time.sleep(1000),
        "event": threading.Event().wait,
        "lock": held.acquire,
        "queue": queue.Queue().get,
        "socket": lambda: ours.recv(1),
        "join": sleeper.join,
    }

    def body() -> None:
        if what == "join":
            sleeper.start()
        region.entered.set()
        waits[what]()

    with ours, theirs:
        assert region.run(body) == "left"


def test_what_swallows_the_raise_gets_it_again(region: Region, within: Callable[..., Any]) -> None:
    caught = []

    def body() -> None:
        region.entered.set()
        while len(caught) < 3:
            try:
                while True:
                    pass
            except BaseException as error:  # noqa: BLE001
                caught.append(type(error))

    outcome = within(lambda: region.run(body))
    assert caught == [RestartRequested] * 3
    assert outcome in ("returned", "left")


def test_a_destructor_swallows_it_and_nobody_reads_of_it(region: Region, capfd: pytest.CaptureFixture[str]) -> None:
    class Slow:
        swallowed = False

        def __del__(self) -> None:
            region.entered.set()
            try:
                while True:
                    pass
            except RestartRequested:
                Slow.swallowed = True
                raise

    def body() -> None:
        slow = Slow()
        del slow
        while True:
            pass

    assert region.run(body) == "left"
    assert Slow.swallowed
    assert capfd.readouterr().err == ""


def test_a_finally_is_not_broken(region: Region, within: Callable[..., Any]) -> None:
    done = []

    def body() -> None:
        try:
            spin(region)
        finally:
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                try:
                    raise ValueError  # handled inside: ours stays the one that is on its way
                except ValueError:
                    pass
            done.append(True)

    assert within(lambda: region.run(body)) == "left"
    assert done


def test_a_handler_that_never_ends_is_broken_in_the_end(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt, "CLEANUP_S", 0.2)

    def body() -> None:
        try:
            spin(region)
        except BaseException:  # noqa: BLE001
            time.sleep(1000)

    assert region.run(body) == "left"


@pytest.mark.parametrize("kind", ["critical", "update"])
def test_sections_are_finished_first(region: Region, within: Callable[..., Any], kind: str) -> None:
    done = []

    def body() -> None:
        with getattr(region.interrupter, kind)():
            region.entered.set()
            while not region.interrupter.asked:
                pass
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                pass
            done.append("section")
        done.append("behind it")

    assert within(lambda: region.run(body)) == "left"
    assert done == ["section"]


def test_a_section_inside_another_one(region: Region) -> None:
    done = []

    def body() -> None:
        with region.interrupter.critical():
            with region.interrupter.update():
                region.entered.set()
                while not region.interrupter.asked:
                    pass
            done.append("outer")
        done.append("behind")

    assert region.run(body) == "left"
    assert done == ["outer"]


def test_an_update_that_hangs_is_broken_and_a_critical_section_is_only_unblocked(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "UPDATE_S", 0.2)
    monkeypatch.setattr(interrupt, "SECTION_S", 0.05)

    def body() -> None:
        with region.interrupter.update():
            region.entered.set()
            time.sleep(1000)

    assert region.run(body) == "left"

    second = Region()

    def critical() -> None:
        with second.interrupter.critical():
            second.entered.set()
            assert second.unblocked.wait(30)  # what it waits for is torn, but nothing is raised in it
            second.done = True  # type: ignore[attr-defined]

    assert second.run(critical) == "left"
    assert second.done  # type: ignore[attr-defined]


def test_what_waits_in_a_library_is_unblocked(region: Region) -> None:
    import ctypes

    read, write = os.pipe()
    threading.Thread(target=lambda: (region.unblocked.wait(30), os.write(write, b"x")), daemon=True).start()

    def body() -> None:
        libc = ctypes.CDLL(None)
        buffer = ctypes.create_string_buffer(1)
        region.entered.set()
        while libc.read(read, buffer, 1) < 0:
            pass  # as C++ does with EINTR; Python's handlers do not run inside ctypes

    assert region.run(body) == "left"
    os.close(read)
    os.close(write)


def test_nothing_is_raised_outside(region: Region, within: Callable[..., Any]) -> None:
    def whole() -> str:
        outcome = region.run(lambda: None)
        region.interrupter._reason = "late"
        region.interrupter._kick()
        if region.interrupter._on_main:
            signal.raise_signal(region.interrupter._signal)
        for _ in range(10_000):
            pass
        return outcome

    assert within(whole) == "returned"


def test_a_child_is_not_concerned(region: Region) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("forking beside threads warns")

    def body() -> None:
        pid = os.fork()
        if pid == 0:
            region.interrupter._reason = "x"
            code = 1
            try:
                signal.raise_signal(region.interrupter._signal)
                with region.interrupter.critical():
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    assert region.run(body) == "returned"


def test_users_handlers_stay(region: Region) -> None:
    seen = []
    free = interrupt.unused_signal()
    before = signal.signal(free, lambda *_: seen.append(1))
    try:
        other = Interrupter()
        other.run(int)
        assert other._signal != free
        signal.raise_signal(free)
        assert seen == [1]
    finally:
        signal.signal(free, before)


def test_a_handler_that_python_does_not_know_of_stays(tmp_path: Path) -> None:
    free = interrupt.unused_signal()
    with (tmp_path / "stacks").open("w") as file:
        faulthandler.register(free, file)
        try:
            assert signal.getsignal(free) == signal.SIG_DFL and interrupt.unused_signal() != free
        finally:
            faulthandler.unregister(free)
    assert interrupt.unused_signal() == free


def test_a_blocked_signal_is_let_through(region: Region) -> None:
    region.interrupter.run(int)
    signal.pthread_sigmask(signal.SIG_BLOCK, [region.interrupter._signal])
    assert region.run(lambda: spin(region)) == "left"
