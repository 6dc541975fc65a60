"""From settings to a job: everything looked up, contradictions told, what is not active yet put into notes.

`resolve` is the only maker of a `JobConfig`. It looks at the machine (processors, GPUs, limits, folders) but starts nothing.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import Literal, cast

from hyperpodrun.agent.config import JobConfig, MeshConfig, NumaBinding, StartMethod, Streams
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.workers.command import NotExecutable
from hyperpodrun.cli import machine, places
from hyperpodrun.cli.kinds import NAME, BadValueError, Nodes, StreamChoice, boolean
from hyperpodrun.cli.options import BY_NAME, OPTIONS
from hyperpodrun.cli.parse import CommandLine, Settings
from hyperpodrun.cli.planted import planted
from hyperpodrun.cli.program import find_executable, program
from hyperpodrun.cli.refusal import MachineRefusal, Refusal, quoted

# Variable of the job's number, variable of a part of it that runs by itself (a step, an array's task).
SCHEDULERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PBS_JOBID", ""),
    ("LSB_JOBID", "LSB_JOBINDEX"),
    ("FLUX_JOB_ID", ""),
    ("COBALT_JOBID", ""),
    ("OAR_JOB_ID", ""),
    ("AWS_BATCH_JOB_ID", ""),
)


def resolve(line: CommandLine, settings: Settings, environment: Mapping[str, str], chance_id: str) -> JobConfig:
    """The job that was asked for; `chance_id` is its name when nobody gives one.

    Raises Refusal for contradictions (2) and for what this machine cannot do (78).
    """
    what = program(settings, line.script, environment)
    nodes = _nodes(settings)
    _check_contradictions(settings, nodes)
    rootless = _rootless(environment)
    mesh = _mesh(settings, nodes, environment)
    notes = _notes(settings, alone=mesh is None)
    start_method = _start_method(settings, what, notes)
    if mesh is None:
        _check_network(settings, notes)
    workers = _workers(settings, environment, notes)
    machine.check_limits(workers)
    redirects, tee = _streams(settings, "redirects", workers), _streams(settings, "tee", workers)
    _check_ranks_filter(settings, workers)
    log_dir = settings.find("log-dir", str)
    if log_dir is not None:
        machine.check_log_dir(log_dir, settings.source("log-dir"), create=not settings.on("dry-run"))
    orders = planted(environment, workers * nodes.maximum, notes)
    named, origin = job_id(settings, environment, _common_id(mesh) if mesh else chance_id)
    return JobConfig(
        program=what,
        job_id=named,
        job_id_by_chance=origin == "chance" and mesh is None,
        min_nodes=nodes.minimum,
        max_nodes=nodes.maximum,
        nproc_per_node=workers,
        role=settings.get("role", str),
        max_restarts=settings.get("max-restarts", int),
        max_restarts_given="max-restarts" in settings.given,
        restart_window_s=settings.get("restart-window", float),
        max_node_failures=settings.find("max-node-failures", int),
        max_rank_faults=settings.get("max-rank-faults", int),
        start_method=start_method,
        preload=settings.find("preload", tuple) or (),
        python=_python(environment),
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=settings.find("local-ranks-filter", frozenset),
        duplicate_stdout_filters=settings.get("duplicate-stdout-filters", tuple),
        duplicate_stderr_filters=settings.get("duplicate-stderr-filters", tuple),
        log_line_prefix_template=environment.get(names.LOG_LINE_PREFIX_TEMPLATE) or None,
        node_rank=settings.find("node-rank", int),
        master_addr=settings.find("master-addr", str),
        master_port=settings.find("master-port", int) or None,
        local_addr=settings.find("local-addr", str),
        virtual_local_rank=settings.on("virtual-local-rank"),
        numa_binding=_numa_binding(settings),
        signals_to_handle=settings.get("signals-to-handle", tuple),
        shutdown_signal=settings.get("shutdown-signal", int),
        shutdown_timeout_s=settings.get("shutdown-timeout", float),
        exit_skew_timeout_s=settings.get("exit-skew-timeout", float),
        inprocess_restart=settings.on("inprocess-restart"),
        inprocess_timeout_s=settings.get("inprocess-timeout", float),
        abort_timeout_s=settings.get("abort-timeout", float),
        hang_timeout_s=settings.find("hang-timeout", float),
        pre_train_script=settings.find("pre-train-script", str),
        pre_train_args=settings.find("pre-train-args", tuple) or (),
        post_train_script=settings.find("post-train-script", str),
        post_train_args=settings.find("post-train-args", tuple) or (),
        rootless=rootless,
        data_port=settings.get("data-port", int),
        planted=orders,
        notes=tuple(notes),
        mesh=mesh,
    )


def _nodes(settings: Settings) -> Nodes:
    """How many nodes; with --standalone this one, which an elastic range allows."""
    nodes = settings.get("nnodes", Nodes)
    if not settings.on("standalone"):
        return nodes
    if nodes.minimum > 1 or settings.get("spares", int):
        other = settings.source("nnodes" if nodes.minimum > 1 else "spares")
        raise Refusal(
            f"{settings.source('standalone')} and {other} exclude each other: one means this node alone, one further nodes"
        )
    return Nodes(1, 1)


def _mesh(settings: Settings, nodes: Nodes, environment: Mapping[str, str]) -> MeshConfig | None:
    """How to find the other nodes; None for a job of one."""
    spares = settings.get("spares", int)
    if nodes.maximum + spares == 1:
        return None
    peers = settings.given.get("peers")
    endpoints = [settings.given[name].text for name in ("rdzv-endpoint", "master-addr") if settings.find(name, str)]
    endpoints = [text for text in endpoints if not text.endswith(":0")]
    if (
        peers is None
        and not endpoints
        and not any(environment.get(name) for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"))
    ):
        source = settings.source("nnodes") if "nnodes" in settings.given else settings.source("spares")
        raise Refusal(
            f"{source}: the agents of several nodes need contact points; "
            "give --peers HOST,HOST,… (or @FILE, slurm:, dns:NAME:PORT), or --rdzv-endpoint HOST:PORT"
        )
    secret = settings.find("job-secret-file", str)
    in_variable = environment.get(names.JOB_SECRET, "")
    if secret is None and 0 < len(in_variable.encode(errors="surrogateescape")) < places.SECRET_BYTES:
        raise MachineRefusal(
            f"{names.JOB_SECRET} holds {len(in_variable.encode(errors='surrogateescape'))} bytes, and a secret needs "
            f"{places.SECRET_BYTES} or more; take more random ones, or use --job-secret-file"
        )
    mesh = MeshConfig(
        peers=peers.text if peers else None if endpoints else "slurm:",
        endpoints=tuple(endpoints),
        port=settings.get("mesh-port", int),
        secret_file=secret,
        insecure=settings.on("insecure-mesh"),
        spares=spares,
        elastic_join_now=settings.get("elastic-join", str) == "now",
        failure_detector=cast("Literal['fast', 'default', 'lax']", settings.get("failure-detector", str)),
        quorum_loss_s=settings.get("on-quorum-loss", float),
        join_timeout_s=_rdzv_seconds(settings, "join_timeout", 600.0),
        join_window_s=_rdzv_seconds(settings, "last_call_timeout", 2.0),
        port_given="mesh-port" in settings.given,
    )
    if secret is None and not in_variable and not mesh.insecure and _leaves_this_host(settings, mesh):
        raise MachineRefusal(
            "the contact points are on other hosts, and without a job secret the mesh stays on this one: "
            "give all nodes the same --job-secret-file (head -c 32 /dev/urandom > FILE), or --insecure-mesh in a closed network"
        )
    return mesh


def _leaves_this_host(settings: Settings, mesh: MeshConfig) -> bool:
    from hyperpodrun.agent.transport.addresses import is_loopback, parse_address
    from hyperpodrun.agent.transport.contact_points import Listed

    listed = settings.find("peers", object)
    if mesh.peers is not None and not isinstance(listed, Listed):
        return True  # slurm: and dns: name other hosts
    hosts = [address.host for address in listed.addresses] if isinstance(listed, Listed) else []
    hosts += [parse_address(text, 0).host for text in mesh.endpoints]
    return any(not is_loopback(host) for host in hosts)


def _common_id(mesh: MeshConfig) -> str:
    """A job id that all nodes of a job without one arrive at: they are given the same contact points."""
    text = "\0".join([mesh.peers or "", *mesh.endpoints])
    return f"mesh-{hashlib.blake2b(text.encode('utf-8', 'surrogateescape'), digest_size=6).hexdigest()}"


def _rdzv_seconds(settings: Settings, key: str, default_s: float) -> float:
    text = (settings.find("rdzv-conf", dict) or {}).get(key)
    if text is None:
        return default_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise Refusal(f"{settings.source('rdzv-conf')}: {key}={quoted(text)} is not allowed; allowed: a number of seconds")
    return seconds


def _check_contradictions(settings: Settings, nodes: Nodes) -> None:
    for when in ("pre", "post"):
        script, arguments = f"{when}-train-script", f"{when}-train-args"
        if arguments in settings.given and script not in settings.given:
            raise Refusal(f"{settings.source(arguments)} is given without --{script}; name the script, or leave them out")
    node_rank = settings.find("node-rank", int)
    slots = nodes.maximum + settings.get("spares", int)
    if node_rank is not None and node_rank >= slots:
        raise Refusal(
            f"{settings.source('node-rank')}: rank {node_rank} does not exist in a job of {slots} node(s); "
            f"allowed: 0{f' to {slots - 1}' if slots > 1 else ''}"
        )
    host, port = settings.get("server-host", str), settings.get("server-port", int)
    if port >= 0 and not places.is_loopback(host) and "job-secret-file" not in settings.given:
        raise Refusal(
            f"{settings.source('server-host')}: a server on {quoted(host)} is open to other machines and needs "
            "--job-secret-file; give one, or use 127.0.0.1"
        )
    if settings.on("insecure-mesh") and "job-secret-file" in settings.given:
        both = f"{settings.source('insecure-mesh')} and {settings.source('job-secret-file')}"
        raise Refusal(f"{both} exclude each other; give one of them")


def _notes(settings: Settings, alone: bool) -> list[str]:
    notes = []
    for option in OPTIONS:
        setting = settings.given.get(option.name)
        note = option.note or (option.note_alone if alone else option.note_several)
        if setting is None or note is None or setting.value is False:
            continue
        if any(setting.value == option.kind.parse(text) for text in option.quiet):
            continue
        notes.append(f"{setting.source}: {note}")
    return notes


def _check_network(settings: Settings, notes: list[str]) -> None:
    """Of a job on this node alone: what becomes MASTER_ADDR must lead somewhere, or its ranks wait for half an hour."""
    name = next((name for name in ("master-addr", "local-addr") if name in settings.given), None)
    if name is not None:
        machine.check_host(settings.get(name, str), settings.source(name))
    elif not machine.loopback_works():
        notes.append(
            "the loopback network of this machine is down, so ranks cannot reach each other; bring it up (ip link set lo up)"
        )


def _start_method(settings: Settings, what: Program, notes: list[str]) -> StartMethod:
    asked = settings.find("start-method", str)
    method: StartMethod = "spawn" if asked == "spawn" or what.run_as == "program" else "forkserver"
    if asked == "fork":
        notes.append(f"{settings.source('start-method')} fork: taken as {method}, since forking the launcher itself is not safe")
    elif asked == "forkserver" and method == "spawn":
        notes.append(f"{settings.source('start-method')} forkserver: a program that is not Python is always started by spawn")
    if method == "spawn" and "preload" in settings.given:
        notes.append(f"{settings.source('preload')}: workers are started by spawn, so there is nothing to import modules into")
    return method


def _numa_binding(settings: Settings) -> NumaBinding | None:
    return cast("NumaBinding | None", settings.find("numa-binding", str))


def _workers(settings: Settings, environment: Mapping[str, str], notes: list[str]) -> int:
    asked = settings.get("nproc-per-node", object)
    if isinstance(asked, int):
        return asked
    source = settings.source("nproc-per-node")
    if asked == "xpu":
        raise MachineRefusal(f"{source} xpu: Intel GPUs cannot be counted without torch; give the number of workers")
    if asked == "cpu":
        return machine.usable_processors()
    gpus, trouble = machine.count_gpus(environment)
    if gpus:
        return gpus
    if asked == "gpu":
        reason = f"the GPU driver cannot be asked ({trouble})" if trouble else "no GPU is visible"
        raise MachineRefusal(f"{source} gpu: {reason}; give the number of workers, or cpu")
    processors = machine.usable_processors()
    reason = "no GPU driver answers" if trouble else "no GPU is visible"
    notes.append(f"{source} auto: {reason}, so one worker for each of {processors} processor(s)")
    return processors


def _streams(settings: Settings, name: str, workers: int) -> tuple[Streams, ...]:
    chosen = settings.get(name, StreamChoice)
    beyond = sorted(rank for rank in chosen.by_local_rank or () if rank >= workers)
    if beyond:
        raise _no_such_local_rank(settings, name, beyond[0], workers)
    return tuple(chosen.of(rank) for rank in range(workers))


def _check_ranks_filter(settings: Settings, workers: int) -> None:
    chosen = settings.find("local-ranks-filter", frozenset)
    if chosen is not None and max(chosen) >= workers:
        raise _no_such_local_rank(settings, "local-ranks-filter", max(chosen), workers)


def _no_such_local_rank(settings: Settings, name: str, rank: int, workers: int) -> Refusal:
    setting = settings.given[name]
    return Refusal(
        f"{setting.source}: {quoted(setting.text)} names local rank {rank}, and this node has {workers} worker(s); "
        f"allowed: 0{f' to {workers - 1}' if workers > 1 else ''}"
    )


def job_id(settings: Settings, environment: Mapping[str, str], chance_id: str) -> tuple[str, str]:
    """(the job's id, where it came from)."""
    for name in ("job-id", "rdzv-id"):
        given = settings.find(name, str)
        if given:
            return given, settings.source(name)
    # Inside a worker of another job the scheduler's id is that job's too.
    if not settings.on("standalone") and not environment.get(names.GENERATION):
        from_scheduler = _scheduler_job_id(environment)
        if from_scheduler:
            return from_scheduler
    return chance_id, "chance"


def _scheduler_job_id(environment: Mapping[str, str]) -> tuple[str, str] | None:
    for variable, part_variable in SCHEDULERS:
        number, part = environment.get(variable, ""), environment.get(part_variable, "") if part_variable else ""
        # Slurm numbers its special steps (batch, extern) from 4294967290 up: those are the whole job.
        name = f"{number}.{part}" if part.isdecimal() and len(part) < 10 else number
        try:
            if number:
                return str(NAME.parse(name)), variable
        except BadValueError:
            continue  # not an id that can be shown: as if there were none
    return None


def _rootless(environment: Mapping[str, str]) -> bool:
    text = environment.get(names.USE_ROOTLESS, "")
    try:
        return boolean(text) if text else True
    except BadValueError:
        raise Refusal(f"{names.USE_ROOTLESS}: {quoted(text)} is not allowed; allowed: {BY_NAME['help'].kind.allowed}") from None


def _python(environment: Mapping[str, str]) -> str:
    name = environment.get(names.PYTHON_EXEC, "")
    if not name or name == sys.executable:
        return ""
    try:
        return find_executable(name, environment)
    except NotExecutable as error:
        raise MachineRefusal(f"{names.PYTHON_EXEC}: {error}; unset it, or name an interpreter") from None
