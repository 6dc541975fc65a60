"""`hyperpodrun --dry-run`: what would be started, as text for people.

It shows the resolved job: the command, the ranks with their streams, what their environment has beyond the launcher's, log files,
and where each value came from.
"""

import shlex
import sys
from collections.abc import Iterable, Mapping

from hyperpodrun.agent.config import JobConfig, Streams
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.workers.logfiles import folder_name
from hyperpodrun.cli.parse import Settings
from hyperpodrun.cli.refusal import printable
from hyperpodrun.cli.resolve import job_id


def plan(config: JobConfig, settings: Settings, environment: Mapping[str, str]) -> str:
    """The whole text."""
    parts = [
        f"Job {printable(config.job_id)}: {config.nproc_per_node} worker(s) on this node, {config.max_restarts} restart(s), "
        f"start method {config.start_method}. Nothing is started.\n",
        _section("Command of each worker", [_command(config)]),
        _section("Ranks", (_rank(config, rank) for rank in range(config.nproc_per_node))),
        _section("Environment of each worker, beyond the launcher's own", _environment(config, environment)),
        _section("Log files", _log_files(config)),
        _section("Values and their sources (all others have their defaults)", _sources(config, settings, environment)),
        _section("Notes", config.notes),
    ]
    return "\n".join(part for part in parts if part)


def _section(title: str, lines: Iterable[str]) -> str:
    body = "".join(f"  {printable(line)}\n" for line in lines)
    return f"{title}\n{body}" if body else ""


def _command(config: JobConfig) -> str:
    what = config.program
    words = [what.target, *what.args]
    if what.run_as == "module":
        words.insert(0, "-m")
    if what.run_as == "run-path":
        words[:0] = ["-m", "runpy"]
    if what.run_as != "program":
        words.insert(0, config.python or sys.executable)
    return shlex.join(words)


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


def _environment(config: JobConfig, environment: Mapping[str, str]) -> list[str]:
    last = config.nproc_per_node - 1
    ranks = f"0..{last}" if last else "0"
    size = config.nproc_per_node
    lines = [
        f"{names.RANK}={ranks} {names.LOCAL_RANK}={'0' if config.virtual_local_rank else ranks} {names.ROLE_RANK}={ranks}",
        f"{names.WORLD_SIZE}={size} {names.LOCAL_WORLD_SIZE}={size} {names.ROLE_WORLD_SIZE}={size}",
        f"{names.GROUP_RANK}=0 {names.GROUP_WORLD_SIZE}=1 {names.ROLE_NAME}={config.role}",
        f"{names.MASTER_ADDR}={config.master_addr or config.local_addr or '(this host)'} "
        f"{names.MASTER_PORT}={config.master_port or '(a free port)'}",
        f"{names.RUN_ID}={config.job_id} {names.JOB_ID}={config.job_id}",
        f"{names.RESTART_COUNT}=0 {names.MAX_RESTARTS}={config.max_restarts}",
    ]
    if size > 1 and names.OMP_NUM_THREADS not in environment:
        lines.append(f"{names.OMP_NUM_THREADS}=1 (not set, and there are several workers)")
    if config.virtual_local_rank:
        lines.append(f"{names.CUDA_VISIBLE_DEVICES}=(the worker's own GPU)")
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
        rows["job-id"] = (config.job_id, job_id(settings, environment)[1])
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
