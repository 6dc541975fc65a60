"""`init_process_group` over the agents' store, under names that no earlier group of this generation has used.

Every rank counts its calls; the n-th of one rank meets the n-th of the others. A call that fails on one rank only therefore has to be
repeated by all.
"""

import os
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hyperpodrun.agent.wire import names
from hyperpodrun.rootless.store import MeshStore

_calls: dict[str, int] = {}


def new_store(prefix: str) -> PrefixStore:
    """A store of this generation whose keys nobody else meets. Raises NoLauncher."""
    return PrefixStore(prefix, MeshStore.current())


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """As `torch.distributed.init_process_group`, whose `options` it takes, but for those that say where to meet.

    Raises NoLauncher, and whatever torch raises.
    """
    for given in ("store", "init_method", "rank", "world_size"):
        if given in options:
            raise TypeError(f"init_process_group: {given!r} is the launcher's to give; use torch.distributed for another one")
    generation = os.environ.get(names.GENERATION, "")
    call = _calls[generation] = _calls.get(generation, 0) + 1
    store = new_store(f"rootless/{call}")
    rank, world_size = int(os.environ[names.RANK]), int(os.environ[names.WORLD_SIZE])
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
    except Exception:
        # torch counts a group that was never made, and the next one's keys would differ from the other ranks'.
        world = getattr(dist.distributed_c10d, "_world", None)
        if world is not None and not dist.is_initialized():
            world.group_count = 0
        raise
