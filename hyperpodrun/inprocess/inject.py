"""Faults on order, so that people can rehearse their own jobs.

    HYPERPODRUN_INJECT="exception@rank=1,step=20; sigkill@rank=any,step=40-60,seed=7" hyperpodrun --inprocess-restart train.py
    HYPERPODRUN_INJECT=@faults.txt         # the same in a file: one fault a line or between semicolons, # starts a comment

A fault is KIND, or KIND@KEY=VALUE,KEY=VALUE... Kinds:

    exception      raise InjectedFault
    sigkill        end as by the kernel's out-of-memory killer
    exit           os._exit(code=)
    sigstop        stop the process; with for= somebody continues it after so many seconds
    hang           a loop of Python code
    hang-sleep     a wait in C that a signal can break
    hang-c         a wait in C that keeps the interpreter's lock: no thread of the process runs
    hang-collective  wait in a collective for a message that nobody sends
    balloon        allocate until MemoryError; mb= bounds the address space that is left first (default 256)

Keys, all optional:

    rank=2 | rank=0+3 | rank=any       any: one rank, drawn by seed; without it: every rank
    step=20 | step=10-30               10-30: one of them, drawn by seed; counted as hyperpodrun.recovery or `note_step` tell them
    phase=NAME                         where a script says point("NAME"); the wrapper's own: enter, return, aborting, finalizing,
                                       "health check"; step is the default when step= is given, enter otherwise
    generation=3                       only in this one
    seed=7                             for any and 10-30; the same seed draws the same
    times=2                            how often it fires in this job (1); each rank counts for itself
    for=5                              seconds that a hang or a stop lasts (without end)
    code=7, mb=256                     see above

Each fires `times` times in a job, whatever is restarted in between: a claim is kept in HYPERPODRUN_INJECT_DIR, else in the launcher's
own folder, which goes with the job. That folder is the node's: a rank that moves to another node may meet its fault again,
unless the named folder is shared. A forked replacement on the same node does not. The launcher reads the orders before it starts
anything, and says at the end of a job of one node which of them have not struck.
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from hyperpodrun.agent.wire import names

KINDS = ("exception", "sigkill", "exit", "sigstop", "hang", "hang-sleep", "hang-c", "hang-collective", "balloon")
_KEYS = ("rank", "step", "phase", "generation", "seed", "times", "for", "code", "mb")


class InjectedFault(RuntimeError):
    """The planted exception."""


class BadInjection(ValueError):
    """HYPERPODRUN_INJECT cannot be understood."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One order. `ranks`: None for every one. `number`: its place in the list, which names its claims."""

    number: int
    kind: str
    phase: str
    ranks: frozenset[int] | None = None
    any_rank: bool = False
    steps: tuple[int, int] | None = None
    generation: int | None = None
    seed: int = 0
    times: int = 1
    for_s: float = float("inf")
    code: int = 1
    mb: int = 256
    text: str = field(default="", compare=False)

    def meets(self, phase: str, step: int | None, rank: int, world_size: int, generation: int) -> bool:
        """Is this its place? Pure."""
        if phase != self.phase or self.generation not in (None, generation):
            return False
        drawn = random.Random(f"{self.seed} {self.number}")
        rank_drawn = drawn.randrange(world_size) if world_size > 0 else 0
        if self.any_rank and rank != rank_drawn:
            return False
        if self.ranks is not None and rank not in self.ranks:
            return False
        return self.steps is None or step == drawn.randint(*self.steps)


def parse(text: str) -> list[Fault]:
    """The faults of one HYPERPODRUN_INJECT. Raises BadInjection, OSError for a file that cannot be read."""
    if text.startswith("@"):
        with open(text[1:]) as file:
            text = ";".join(line.partition("#")[0] for line in file)
    orders = [order.strip() for order in text.replace("\n", ";").split(";")]
    return [_parse_one(number, order) for number, order in enumerate(order for order in orders if order)]


def _parse_one(number: int, order: str) -> Fault:
    kind, _, rest = order.partition("@")
    kind = kind.strip()
    if kind not in KINDS:
        raise BadInjection(f"{names.INJECT}: {kind!r} in {order!r} is no kind of fault; there are {', '.join(KINDS)}")
    given: dict[str, str] = {}
    for pair in filter(None, (pair.strip() for pair in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in _KEYS or not equals or not value:
            raise BadInjection(f"{names.INJECT}: {pair!r} in {order!r}; what can be said is KEY=VALUE with {', '.join(_KEYS)}")
        if key in given:
            raise BadInjection(f"{names.INJECT}: {key!r} is there twice in {order!r}")
        given[key] = value
    try:
        first, dash, last = given.get("step", "").partition("-")
        steps = (int(first), int(last) if dash else int(first)) if "step" in given else None
        rank = given.get("rank")
        fault = Fault(
            number=number,
            kind=kind,
            phase=given.get("phase", "step" if steps else "enter"),
            ranks=None if rank in (None, "any") else frozenset(int(one) for one in rank.split("+")),
            any_rank=rank == "any",
            steps=steps,
            generation=int(given["generation"]) if "generation" in given else None,
            seed=int(given.get("seed", "0")),
            times=int(given.get("times", "1")),
            for_s=float(given.get("for", "inf")),
            code=int(given.get("code", "1")),
            mb=int(given.get("mb", "256")),
            text=order,
        )
    except ValueError as error:
        raise BadInjection(f"{names.INJECT}: {order!r}: {error}") from None
    if steps and steps[0] > steps[1]:
        raise BadInjection(f"{names.INJECT}: {order!r}: the first step comes before the last")
    return fault


_plan: tuple[str, list[Fault]] = ("", [])


def point(phase: str, step: int | None = None) -> None:
    """A place where a planted fault may strike. Does nothing, quickly, when none is asked for. Raises BadInjection."""
    global _plan
    text = os.environ.get(names.INJECT, "")
    if not text:
        return
    if _plan[0] != text:
        _plan = (text, parse(text))
    rank, world_size = _number(names.RANK, 0), _number(names.WORLD_SIZE, 1)
    for fault in _plan[1]:
        if fault.meets(phase, step, rank, world_size, _number(names.GENERATION, 0)) and _claim(fault, rank):
            where = f"phase {phase!r}" if step is None else f"step {step}"
            sys.stderr.write(f"hyperpodrun: injected fault {fault.text!r} strikes rank {rank} at {where}\n")
            sys.stderr.flush()
            strike(fault)


_here: dict[tuple[str, int, int], int] = {}


def _claim(fault: Fault, rank: int) -> bool:
    """Is it still to fire? Claims are files, so that a process which takes a dead one's place knows of them."""
    folder = os.environ.get(names.INJECT_DIR) or os.path.dirname(os.environ.get(names.LINK, "").removeprefix("unix:"))
    job = "".join(letter if letter.isalnum() else "_" for letter in os.environ.get(names.JOB_ID, "job"))
    for turn in range(fault.times):
        if not folder:  # no launcher, no restarted processes
            key = (fault.text, fault.number, turn)
            if key not in _here:
                _here[key] = 1
                return True
            continue
        try:
            os.makedirs(folder, exist_ok=True)
            claim = os.path.join(folder, f"injected.{job}.{fault.number}.{rank}.{turn}")
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInjection(
                f"{folder} cannot keep which faults have fired ({error.strerror}); set {names.INJECT_DIR}"
            ) from error
        return True
    return False


def strike(fault: Fault) -> None:
    """Do it, here and now."""
    _STRIKES[fault.kind](fault)


def _exception(fault: Fault) -> None:
    raise InjectedFault(f"planted by {names.INJECT}: {fault.text}")


def _sigkill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def _exit(fault: Fault) -> None:
    os._exit(fault.code)


def _sigstop(fault: Fault) -> None:
    if fault.for_s < float("inf"):  # somebody has to be awake
        subprocess.Popen(["/bin/sh", "-c", f"sleep {fault.for_s}; kill -CONT {os.getpid()}"], close_fds=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(fault: Fault) -> None:
    until_s = time.monotonic() + fault.for_s
    while time.monotonic() < until_s:
        sum(range(1000))


def _hang_sleep(fault: Fault) -> None:
    threading.Event().wait(None if fault.for_s == float("inf") else fault.for_s)


def _hang_c(fault: Fault) -> None:
    seconds = 10**6 if fault.for_s == float("inf") else max(1, int(fault.for_s))
    ctypes.PyDLL(None).sleep(seconds)  # PyDLL: the interpreter's lock is kept


def _hang_collective(fault: Fault) -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() < 2:
        raise BadInjection(f"{names.INJECT}: {fault.text!r}: there is no process group of two ranks or more at this place")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    dist.recv(torch.zeros(1, device=device), (dist.get_rank() + 1) % dist.get_world_size(), tag=2**20 + fault.number)


def _balloon(fault: Fault) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now_bytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + (fault.mb << 20), hard))
    held: list[bytearray] = []
    try:
        while True:
            held.append(bytearray(8 << 20))
    finally:
        held.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_STRIKES: dict[str, Any] = {
    "exception": _exception,
    "sigkill": _sigkill,
    "exit": _exit,
    "sigstop": _sigstop,
    "hang": _hang,
    "hang-sleep": _hang_sleep,
    "hang-c": _hang_c,
    "hang-collective": _hang_collective,
    "balloon": _balloon,
}


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else default
