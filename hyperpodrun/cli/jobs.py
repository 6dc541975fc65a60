"""Running jobs of this user on this node, read from their launchers' state files."""

import os
import time

import msgspec

from hyperpodrun.agent import run_dir
from hyperpodrun.agent.status import Status
from hyperpodrun.cli.refusal import printable

STARTING = "starting"


class Job(msgspec.Struct, frozen=True):
    """`status` is None while the launcher has not written its state yet, or wrote it in another release's form."""

    run_dir: str
    status: Status | None


def running() -> list[Job]:
    """Jobs whose launcher lives, the oldest first."""
    folders = dict.fromkeys(path for base in run_dir.bases() for path in run_dir.living(base))
    jobs = [Job(path, _status(path)) for path in folders]
    return sorted(jobs, key=lambda job: job.status.started_at if job.status else float("inf"))


def _status(folder: str) -> Status | None:
    try:
        with open(os.path.join(folder, run_dir.STATUS), "rb") as file:
            return msgspec.json.decode(file.read(), type=Status)
    except (OSError, msgspec.MsgspecError, UnicodeError):
        return None


def as_json(jobs: list[Job]) -> str:
    """{"jobs": [...]}, each with the keys of `Status`; those not known yet are null."""
    rows = [
        msgspec.to_builtins(job.status)
        if job.status
        else {**dict.fromkeys(Status.__struct_fields__), "run_dir": printable(job.run_dir), "state": STARTING}
        for job in jobs
    ]
    return msgspec.json.format(msgspec.json.encode({"jobs": rows}), indent=2).decode() + "\n"


def as_table(jobs: list[Job]) -> str:
    """One line a job, and one a worker below it."""
    if not jobs:
        return "No job of yours runs on this node.\n"
    return "\n".join(_story(job) for job in jobs)


def _story(job: Job) -> str:
    status = job.status
    if status is None:
        return f"job ?: {STARTING}, in {printable(job.run_dir)}\n"
    command = printable(" ".join(status.command))
    lines = [
        f"job {printable(status.job_id)}: {status.state}, {status.world_size} rank(s), {status.restart_count} restart(s), "
        f"for {_duration(time.time() - status.started_at)}",
        f"  command   {command if len(command) <= 160 else command[:157] + '...'}",
        f"  launcher  pid {status.pid}, agent pid {status.agent_pid}",
        f"  node      {printable(status.node)}, generation {status.generation}",
        f"  folder    {printable(status.run_dir)}",
    ]
    lines += [f"  rank {worker.rank:<4} pid {worker.pid}, local rank {worker.local_rank}" for worker in status.workers]
    lines += [f"  fault     {printable(fault)}" for fault in status.faults]
    return "\n".join(lines) + "\n"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
