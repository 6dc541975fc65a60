"""The agent's loop: descriptors, timers, signals."""

import os
import signal

import pytest

from hyperpodrun.agent.reactor import Reactor


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


def test_timers_fire_in_the_order_of_their_times(reactor: Reactor) -> None:
    seen: list[str] = []
    reactor.call_later(0.02, lambda: (seen.append("second"), reactor.stop()))
    reactor.call_later(0.01, lambda: seen.append("first"))
    reactor.call_later(0.015, lambda: seen.append("never")).cancel()
    reactor.run()
    assert seen == ["first", "second"]


def test_cancelled_timer_does_not_end_the_wait(reactor: Reactor) -> None:
    seen: list[str] = []
    reactor.call_later(0.001, lambda: seen.append("never")).cancel()
    reactor.call_later(0.05, lambda: seen.append("next"))
    reactor.turn()
    assert seen == ["next"]


def test_readable_descriptor_is_served_until_forgotten(reactor: Reactor) -> None:
    read, write = os.pipe()
    os.write(write, b"ab")
    seen: list[bytes] = []

    def take() -> None:
        seen.append(os.read(read, 1))
        if len(seen) == 2:
            reactor.forget(read)
            os.write(write, b"c")
            reactor.call_later(0, reactor.stop)

    reactor.on_readable(read, take)
    reactor.run()
    assert seen == [b"a", b"b"]
    os.close(read)
    os.close(write)


def test_forgotten_descriptor_is_not_served_by_an_event_of_the_same_turn(reactor: Reactor) -> None:
    pipes = [os.pipe(), os.pipe()]
    seen: list[int] = []

    def take(own: int, other: int) -> None:
        seen.append(own)
        reactor.forget(other)

    for (read, write), (other, _) in zip(pipes, reversed(pipes), strict=True):
        os.write(write, b"x")
        reactor.on_readable(read, lambda own=read, other=other: take(own, other))
    reactor.turn()
    assert len(seen) == 1
    for read, write in pipes:
        os.close(read)
        os.close(write)


def test_reader_and_writer_of_one_descriptor_are_told_apart(reactor: Reactor) -> None:
    import socket

    left, right = socket.socketpair()
    seen: list[str] = []
    reactor.on_readable(left.fileno(), lambda: seen.append("read"))
    reactor.on_writable(left.fileno(), lambda: (seen.append("write"), reactor.forget_writable(left.fileno())))
    reactor.turn()
    right.send(b"x")
    reactor.turn()
    assert seen == ["write", "read"]
    reactor.forget(left.fileno())
    reactor.forget(left.fileno())
    left.close()
    right.close()


def test_regular_file_is_refused_and_not_remembered(reactor: Reactor, tmp_path) -> None:
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(PermissionError):
            reactor.on_writable(file.fileno(), lambda: None)
        reactor.forget(file.fileno())


def test_signals_come_as_events_in_the_loop(reactor: Reactor) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    seen: list[int] = []
    try:
        reactor.handle_signals([signal.SIGUSR2], lambda number: (seen.append(number), reactor.stop()))
        os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == []
        reactor.run()
        assert seen == [signal.SIGUSR2]
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, before)
