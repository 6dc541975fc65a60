"""A job as the command line resolved it: plain values, checked, nothing left to look up.

`hyperpodrun.cli` makes one of these; the agent reads it and never the command line.
"""

import math
from typing import Literal

import msgspec

from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.wire.rungs import Rules

StartMethod = Literal["forkserver", "spawn"]
NumaBinding = Literal["node", "socket", "exclusive", "core-complex"]


class Streams(msgspec.Struct, frozen=True):
    """Which of one rank's two streams something applies to."""

    stdout: bool = False
    stderr: bool = False


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How this node's agent finds the others; only for jobs of several nodes. `peers` is `--peers` as typed, each entry once."""

    peers: str | None = None
    endpoints: tuple[str, ...] = ()
    """Further contact points: --rdzv-endpoint, --master-addr (host or host:port)."""
    port: int = 29400
    port_given: bool = False
    secret_file: str | None = None
    insecure: bool = False
    spares: int = 0
    elastic_join_now: bool = True
    failure_detector: Literal["fast", "default", "lax"] = "default"
    quorum_loss_s: float = math.inf
    """Without a quorum, nodes that were silent for so long are taken for dead (unsafe): --on-quorum-loss."""
    join_timeout_s: float = 600.0
    """Longest wait for a first world: --rdzv-conf join_timeout."""
    join_window_s: float = 2.0
    """Joiners are collected so long, unless the roster is complete: --rdzv-conf last_call_timeout."""


class JobConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Units are in the names; tuples are ordered by local rank where they hold one entry a rank."""

    program: Program
    job_id: str
    job_id_by_chance: bool = False
    """Nobody named the job, so it cannot be started again under this id."""
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 1
    role: str = "default"
    max_restarts: int = 0
    max_restarts_given: bool = False
    """False: nobody named a number. With `inprocess_restart` other limits hold then (policy/escalation.py)."""
    restart_window_s: float = 3600.0
    max_node_failures: int | None = None
    max_rank_faults: int = 16
    start_method: StartMethod = "forkserver"
    preload: tuple[str, ...] = ()
    python: str = ""
    """Interpreter of the workers; "" means the launcher's own."""
    log_dir: str | None = None
    redirects: tuple[Streams, ...] = ()
    """One entry a local rank: these streams go to files only."""
    tee: tuple[Streams, ...] = ()
    """One entry a local rank: these streams go to files and to the console."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks shown on the console; None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    log_line_prefix_template: str | None = None
    """With ${role_name}, ${rank}, ${local_rank}; None: "[${role_name}${rank}]:" when there is more than one rank."""
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    local_addr: str | None = None
    virtual_local_rank: bool = False
    numa_binding: NumaBinding | None = None
    signals_to_handle: tuple[int, ...] = (15, 2, 1, 3)
    shutdown_signal: int = 15
    shutdown_timeout_s: float = 30.0
    exit_skew_timeout_s: float = 300.0
    inprocess_restart: bool = False
    """Workers with a wrapped function are restarted inside their processes."""
    inprocess_timeout_s: float = 120.0
    """So long after a fault all ranks of the node must be at the restart barrier."""
    abort_timeout_s: float = 60.0
    """So long one rank may take from the interrupt to the barrier."""
    hang_timeout_s: float | None = None
    """No progress for so long is a fault; None: nobody looks."""
    pre_train_script: str | None = None
    pre_train_args: tuple[str, ...] = ()
    post_train_script: str | None = None
    post_train_args: tuple[str, ...] = ()
    rootless: bool = True
    data_port: int = 18000
    """From here on ports are looked for on which the ranks of this node listen for each other's data."""
    mesh: MeshConfig | None = None
    """None: this node alone is the job."""
    planted: tuple[str, ...] = ()
    """Faults that are to strike in this job (HYPERPODRUN_INJECT)."""
    notes: tuple[str, ...] = ()
    """Sentences to tell the user once at the start (options that are not active yet, or cannot be honoured)."""

    def rules(self) -> Rules:
        """What faults may cost, and how they may be healed."""
        return Rules(
            inprocess=self.inprocess_restart,
            max_restarts=self.max_restarts if self.max_restarts_given or not self.inprocess_restart else None,
            max_node_failures=self.max_node_failures,
            window_s=self.restart_window_s,
            max_rank_faults=self.max_rank_faults,
        )
