"""Reaping: every child's end is told once, also when it came before anybody asked."""

import os

import pytest

from hyperpodrun.agent.children import Children
from hyperpodrun.agent.reactor import Reactor


@pytest.fixture
def reactor() -> Reactor:
    return Reactor()


def leave(code: int) -> int:
    """A child that has ended with this code and waits to be reaped."""
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", f"exit {code}"], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_watched_child_is_told_when_it_is_reaped(reactor: Reactor) -> None:
    children, told = Children(reactor), []
    children.watch(leave(3), told.append)
    children.reap()
    children.reap()
    assert told == [3 << 8]


def test_child_reaped_before_anybody_asked_is_told_from_the_loop(reactor: Reactor) -> None:
    children, told = Children(reactor), []
    pid = leave(4)
    children.reap()
    children.watch(pid, told.append)
    assert told == []
    reactor.turn()
    assert told == [4 << 8]


def test_forgotten_end_is_not_taken_for_a_later_childs(reactor: Reactor) -> None:
    children, told = Children(reactor), []
    pid = leave(5)
    children.reap()
    children.forget()
    children.watch(pid, told.append)
    reactor.turn(0)
    assert told == []
