"""Where each local rank runs: the GPU it sees (--virtual-local-rank) and the CPUs it may use (--numa-binding)."""

from collections.abc import Mapping

import msgspec

from hyperpodrun.agent.config import JobConfig


class Place(msgspec.Struct, frozen=True):
    """`visible_device` is the rank's entry for CUDA_VISIBLE_DEVICES; `cpus` its CPU affinity. None: as the launcher's own."""

    visible_device: str | None = None
    cpus: list[int] | None = None


def places(config: JobConfig, env: Mapping[bytes, bytes]) -> list[Place]:
    """One place a local rank. Raises ValueError with a sentence when this machine cannot do what was asked."""
    count = config.nproc_per_node
    if not config.virtual_local_rank and config.numa_binding is None:
        return [Place()] * count
    from hyperpodrun.agent.health import gpus, numa  # only here: most jobs need neither

    text_env = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in env.items()}
    tokens: list[str] | list[None] = [None] * count
    cpus: list[list[int]] | list[None] = [None] * count
    if config.virtual_local_rank:
        tokens = gpus.visible_tokens(text_env, count)
    if config.numa_binding is not None:
        bus_ids = [gpu.pci_bus_id for gpu in gpus.visible_gpus(text_env)]
        cpus = numa.cpus_of_ranks(config.numa_binding, count, bus_ids)
    return [Place(token, cpu_list) for token, cpu_list in zip(tokens, cpus, strict=True)]
