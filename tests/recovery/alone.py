"""A job of one rank inside the test's process: its lives, and what is lost between them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.recovery import memory, nodestate, pace, where

JOB = f"test-alone-{os.getpid()}"


def all_processes_are_lost(*states: str) -> None:
    """What processes remember; the node's shared memory stays."""
    for state in states or ("default",):
        known = memory.of(state)
        if known is not None:
            known.stop()
        memory.forget(state)


def folder() -> str:
    return node_state.folder_of(JOB, "node")


def the_node_is_lost(*states: str) -> None:
    all_processes_are_lost(*states)
    shutil.rmtree(folder(), ignore_errors=True)


@contextmanager
def job(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of its one rank, and a process group. A version is made of each step, at once."""
    given = {names.RANK: "0", names.WORLD_SIZE: "1", names.LOCAL_RANK: "0", names.LOCAL_WORLD_SIZE: "1"}
    given |= {names.NODE: "node", names.JOB_ID: JOB, names.GENERATION: "0"}
    for name, value in given.items():
        patch.setenv(name, value)
    for name in (names.STORE, names.JOB_RESTART_COUNT):
        patch.delenv(name, raising=False)
    patch.setattr(where, "_calls", {})
    patch.setattr(memory, "_remembered", {})
    patch.setattr(pace, "BUDGET", 1e9)
    patch.setattr(nodestate, "INLINE", 1e9)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        the_node_is_lost(*memory._remembered)
