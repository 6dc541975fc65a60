"""The environment and arguments of one rank, and of the process that its workers are forked from. Pure.

Facts about torchrun's variables: torch.distributed.elastic, `LocalElasticAgent._start_workers` and `run.config_from_args`
(torch 2.13). Whatever an outer job or a shell left of the variables that describe a rank is replaced, never merged.
"""

import os
from collections.abc import Mapping

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.wire import names

MANY_RANKS = 64
"""Above it gloo's and NCCL's ways of meeting, made for few ranks, are too slow: n² reads of the store (MESH S8)."""
FOR_MANY_RANKS = {
    # One number instead of one address for each pair of ranks, read with one multi-get a rank.
    "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1",
    "GLOO_ENABLE_STORE_V2_API": "1",
    # Connections when they are first used instead of n² at the start.
    "TORCH_GLOO_LAZY_INIT": "1",
}
_LOCAL_RANK_MACRO = "${local_rank}"


def worker_argv(config: JobConfig, local_rank: int) -> list[bytes]:
    """The arguments behind the program's name; `${local_rank}` in them becomes the local rank, as under torchrun."""
    return [os.fsencode(word.replace(_LOCAL_RANK_MACRO, str(local_rank))) for word in config.program.args]


def common_env(config: JobConfig, base_env: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What is the same in all ranks: the environment for modules that are imported once for all of them.

    The launcher's mark (HYPERPODRUN_FAMILY) is kept as `base_env` has it.
    """
    dropped = (names.PER_RANK - {names.FAMILY}) | names.NEVER_IN_WORKERS
    env = {name: value for name, value in base_env.items() if os.fsdecode(name) not in dropped}

    def default(name: str, value: str) -> None:
        env.setdefault(name.encode(), value.encode())

    default(names.NCCL_ASYNC_ERROR_HANDLING, "1")
    if config.nproc_per_node > 1:
        default(names.OMP_NUM_THREADS, "1")
    if config.rootless:
        default(names.USE_ROOTLESS, "1")
        default(names.SKIP_TCPSTORE, "1")
    else:
        default(names.USE_ROOTLESS, "0")
    return env


def worker_env(
    config: JobConfig,
    base_env: Mapping[bytes, bytes],
    *,
    local_rank: int,
    rank: int,
    world_size: int,
    group_rank: int,
    group_world_size: int,
    restart_count: int,
    generation: int,
    node: str,
    master_addr: str,
    master_port: int,
    error_file: str,
    family: str,
    use_agent_store: bool,
    rank0_addr: str,
    link: str,
    visible_device: str | None,
    many_ranks: int = MANY_RANKS,
) -> list[tuple[bytes, bytes]]:
    """The whole environment of one rank.

    `group_rank` is the node's rank, `group_world_size` the number of nodes; `visible_device` becomes CUDA_VISIBLE_DEVICES
    (None: as inherited), `rank0_addr` is rank 0's host, `link` where the agent listens for its workers ("": nowhere). There is one
    role, so the rank within it is the rank. In a world of more than `many_ranks` ranks FOR_MANY_RANKS is set, each where the user
    has not set it.
    """
    env = common_env(config, base_env)
    if world_size > many_ranks:
        for name, setting in FOR_MANY_RANKS.items():
            env.setdefault(name.encode(), setting.encode())
    own: dict[str, str | int | bool] = {
        names.RANK: rank,
        names.LOCAL_RANK: 0 if config.virtual_local_rank else local_rank,
        names.WORLD_SIZE: world_size,
        names.LOCAL_WORLD_SIZE: config.nproc_per_node,
        names.GROUP_RANK: group_rank,
        names.GROUP_WORLD_SIZE: group_world_size,
        names.ROLE_RANK: rank,
        names.ROLE_WORLD_SIZE: world_size,
        names.ROLE_NAME: config.role,
        names.MASTER_ADDR: master_addr,
        names.MASTER_PORT: master_port,
        names.RESTART_COUNT: restart_count,
        names.MAX_RESTARTS: config.max_restarts,
        names.RUN_ID: config.job_id,
        names.ERROR_FILE: error_file,
        names.USE_AGENT_STORE: use_agent_store,
        names.JOB_RESTART_COUNT: restart_count,
        names.SPARE: 0,
        names.JOB_ID: config.job_id,
        names.GENERATION: generation,
        names.NODE: node,
        names.RANK0_ADDR: rank0_addr,
        names.FAMILY: family,
        names.STATE_OWNER: family if config.mesh is None else "",
    }
    if use_agent_store:
        host = f"[{master_addr}]" if ":" in master_addr else master_addr
        own[names.STORE] = f"tcp://{host}:{master_port}"
    if link:
        own[names.LINK] = link
    if visible_device is not None:
        own[names.CUDA_VISIBLE_DEVICES] = visible_device
    for name, value in own.items():
        env[name.encode()] = os.fsencode(str(value))
    return list(env.items())
