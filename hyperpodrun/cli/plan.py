"""`hyperpodrun --dry-run`: what would be started, as text for people.

It shows the resolved job: the command, the ranks with their streams, what their environment has beyond the launcher's, log files,
and where each value came from.
"""

import math
import os
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping

from hyperpodrun.agent.config import JobConfig, Streams
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.workers import command, placement
from hyperpodrun.agent.workers.environment import worker_env
from hyperpodrun.agent.workers.logfiles import folder_name
from hyperpodrun.agent.workers.rendezvous import loopback
from hyperpodrun.cli import places
from hyperpodrun.cli.parse import Settings
from hyperpodrun.cli.refusal import MachineRefusal, printable
from hyperpodrun.cli.resolve import job_id


def plan(config: JobConfig, settings: Settings, environment: Mapping[str, str]) -> str:
    """The whole text."""
    parts = [
        f"Job {printable(config.job_id)}: {config.nproc_per_node} worker(s) on this node, {_restarts(config)}, "
        f"start method {config.start_method}. Nothing is started.\n",
        _section("Nodes", _nodes(config, environment)),
        _section("Command of each worker", [_command(config)]),
        _section("Ranks", (_rank(config, rank) for rank in range(config.nproc_per_node))),
        _section("Environment of the workers, where it differs from the launcher's", _environment(config, environment)),
        _section("Log files", _log_files(config)),
        _section("Values and their sources (all others have their defaults)", _sources(config, settings, environment)),
        _section("Notes", config.notes),
    ]
    return "\n".join(part for part in parts if part)


def _restarts(config: JobConfig) -> str:
    if config.inprocess_restart and not config.max_restarts_given:
        return f"up to 32 restarts within {config.restart_window_s:g} s"
    return f"{config.max_restarts} restart(s)"


def _section(title: str, lines: Iterable[str]) -> str:
    body = "".join(f"  {printable(line)}\n" for line in lines)
    return f"{title}\n{body}" if body else ""


def _nodes(config: JobConfig, environment: Mapping[str, str]) -> list[str]:
    mesh = config.mesh
    if mesh is None:
        return []
    from hyperpodrun.agent.mesh_start import DEFAULT_PORT, choose_place
    from hyperpodrun.agent.transport.addresses import parse_address
    from hyperpodrun.agent.transport.contact_points import Listed, parse_contact

    active = f"{config.min_nodes}" if config.min_nodes == config.max_nodes else f"{config.min_nodes} to {config.max_nodes}"
    contacts = [parse_contact(mesh.peers, environment, _read)] if mesh.peers else []
    contacts += [Listed((parse_address(text),)) for text in mesh.endpoints]
    known = [
        a.with_port(mesh.port or DEFAULT_PORT) for contact in contacts if isinstance(contact, Listed) for a in contact.addresses
    ]
    later = [mesh.peers] if mesh.peers and not isinstance(contacts[0], Listed) else []
    if mesh.port_given and not mesh.port:
        here = "its mesh port is any free one"
    elif later:
        here = f"mesh port {mesh.port or DEFAULT_PORT}; its name is its contact point's"
    else:
        place = choose_place(mesh, known, {})
        here = f"called {place.slot}, mesh port {place.port}"
    if mesh.secret_file or environment.get(names.JOB_SECRET):
        wall = f"encrypted, only for agents with the job secret (from {mesh.secret_file or names.JOB_SECRET})"
    elif mesh.insecure:
        wall = "not encrypted, open to whoever reaches the port (--insecure-mesh)"
    else:
        wall = "not encrypted, within this host only (no job secret was given)"
    return [
        f"{active} nodes train, {mesh.spares} more stand by; the first world is waited for up to {mesh.join_timeout_s:g} s",
        f"this node: {here}",
        f"contact points: {', '.join([*later, *map(str, known)])}",
        f"mesh: {wall}",
        "without a majority of the nodes: wait"
        if mesh.quorum_loss_s == math.inf
        else f"without a majority of the nodes: after {mesh.quorum_loss_s:g} s go on without the silent ones (UNSAFE)",
        f"nodes that come later are taken in {'at once' if mesh.elastic_join_now else 'at the next restart'}",
        "ranks below are those of the first of as many nodes as may train, each like this one",
    ]


def _read(path: str) -> str:
    return places.read_small(path).decode(errors="replace")


def _command(config: JobConfig) -> str:
    flags = command.interpreter_flags(sys.orig_argv)
    words = command.command(
        config.program, config.python or sys.executable, flags, [os.fsencode(word) for word in config.program.args]
    )
    return shlex.join(os.fsdecode(word) for word in words)


def _rank(config: JobConfig, rank: int) -> str:
    shown = config.local_ranks_filter is None or rank in config.local_ranks_filter
    tee, redirect = config.tee[rank], config.redirects[rank]
    out = _where(tee.stdout, redirect.stdout, shown)
    err = _where(tee.stderr, redirect.stderr, shown)
    return f"rank {rank} (local rank {rank}): stdout to {out}, stderr to {err}"


def _where(tee: bool, redirect: bool, shown: bool) -> str:
    console = "the console" if shown else "nowhere"
    if tee:
        return f"{console} and a file" if shown else "a file"
    return "a file" if redirect else console


def _environments(config: JobConfig, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank, with words where only a start can tell the value."""
    own = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
    try:
        devices = placement.places(config, own)
    except ValueError as error:
        raise MachineRefusal(str(error)) from None
    ranks = []
    rank0 = config.master_addr or config.local_addr or loopback()
    for rank, place in enumerate(devices):
        env = worker_env(
            config, own, local_rank=rank, rank=rank, world_size=config.nproc_per_node * config.max_nodes,
            group_rank=0, group_world_size=config.max_nodes,
            restart_count=0, generation=0, node=socket.gethostname(),
            master_addr=loopback() if config.rootless else rank0, rank0_addr=rank0,
            master_port=config.master_port or 0, error_file="(a private file)", family="(a mark of this launcher)",
            use_agent_store=config.rootless, link="" if config.program.run_as == "program" else "unix:(a private socket)",
            visible_device=place.visible_device,
        )  # fmt: skip
        ranks.append({os.fsdecode(name): os.fsdecode(value) for name, value in env})
        if config.master_port is None:
            ranks[-1][names.MASTER_PORT] = "(a free port)"
            if config.rootless:
                ranks[-1][names.STORE] = "tcp://127.0.0.1:(a free port)"
        if config.mesh is not None:
            ranks[-1][names.RANK0_ADDR if config.rootless else names.MASTER_ADDR] = "(rank 0's node)"
    return ranks


def _environment(config: JobConfig, environment: Mapping[str, str]) -> list[str]:
    ranks = _environments(config, environment)
    changed = [name for name in ranks[0] if any(env[name] != environment.get(name) for env in ranks)]
    single = [name for name in changed if any(env[name] != ranks[0][name] for env in ranks)]
    lines = [f"{name}={ranks[0][name]}" for name in changed if name not in single]
    lines += [f"rank {rank}: {' '.join(f'{name}={env[name]}' for name in single)}" for rank, env in enumerate(ranks) if single]
    lines += [f"{name} is unset" for name in sorted(environment) if name not in ranks[0]]
    return lines


def _log_files(config: JobConfig) -> list[str]:
    folder = f"{config.log_dir or '(a temporary folder)'}/{folder_name(config.job_id)}_(random)/attempt_0"
    lines = []
    for rank, (tee, redirect) in enumerate(zip(config.tee, config.redirects, strict=True)):
        chosen = Streams(tee.stdout or redirect.stdout, tee.stderr or redirect.stderr)
        lines += [f"{folder}/{rank}/{name}.log" for name in ("stdout", "stderr") if getattr(chosen, name)]
    for name, filters in (("stdout", config.duplicate_stdout_filters), ("stderr", config.duplicate_stderr_filters)):
        if filters:
            lines.append(f"{folder}/filtered_{name}.log: lines of {name} with {' or '.join(filters)}")
    return lines


def _sources(config: JobConfig, settings: Settings, environment: Mapping[str, str]) -> list[str]:
    rows = {name: (setting.text, setting.source) for name, setting in settings.given.items()}
    if "job-id" not in rows:
        source = job_id(settings, environment, "")[1]
        rows["job-id"] = (config.job_id, "the contact points" if config.mesh and source == "chance" else source)
    workers = str(config.nproc_per_node)
    if rows.get("nproc-per-node", (workers,))[0] != workers:
        text, source = rows["nproc-per-node"]
        rows["nproc-per-node"] = (f"{text}, here {workers}", source)
    for variable in (names.PYTHON_EXEC, names.LOG_LINE_PREFIX_TEMPLATE, names.USE_ROOTLESS):
        if environment.get(variable):
            rows[variable] = (environment[variable], "environment")
    names_wide = max(len(name) for name in rows)
    texts_wide = min(40, max(len(text) for text, _ in rows.values()))
    return [f"{name:<{names_wide}}  {text or '(empty)':<{texts_wide}}  from {source}" for name, (text, source) in rows.items()]
