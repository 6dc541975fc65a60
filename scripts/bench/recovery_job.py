"""One job in which faults strike, for `recovery.py`: who runs it, what the workers do, and what their events say.

A job is struck by a list of faults, one after another, the next one once all ranks have gone on. Workers write an event when something
is about to strike, and one when the first all-reduce of a generation is done; the time stamps are of one clock (monotonic), also for
strikes from outside.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from mesh_job import Mesh, free_ports, job
from side_by_side import LAUNCHERS, BenchmarkError, Launcher, Run

RANKS = 4
HANG_S = 2.0
LIMIT_S = 60.0
"""For the first all-reduce."""
GIVE_UP_S = 30.0
"""Who has not gone on by then does not."""
NVIDIA = ("nvidia-resiliency-ext==0.4.1", "pyyaml", "defusedxml", "nvidia-ml-py", "pynvml", "psutil", "packaging")

COMMON = """\
import ctypes, datetime, json, os, signal, sys, threading, time
born_s = time.monotonic()
import torch
import torch.distributed as dist

folder, kinds = os.environ["BENCH_DIR"], json.loads(os.environ["BENCH_KINDS"])
timeout_s = float(os.environ["BENCH_TIMEOUT"])  # of collectives; 0: torch's own


def say(what, generation):
    rank, world = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "0"))
    at_s = born_s if what == "born" else time.monotonic()
    line = {"what": what, "at_s": at_s, "rank": rank, "generation": generation, "world": world, "pid": os.getpid()}
    fd = os.open(folder + "/events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(line).encode() + b"\\n")
    os.close(fd)


say("born", -1)


def struck():
    with open(folder + "/events") as file:
        return sum('"struck"' in line for line in file)


def strike(kind, generation, report):
    if kind == "hang in a collective, reported":
        threading.Timer(0.3, lambda: (say("struck", generation), report("it hangs"))).start()
    else:
        say("struck", generation)
    if kind == "exception":
        raise RuntimeError("planted")
    if kind == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "os._exit":
        os._exit(3)
    if kind == "SIGSTOP":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind.startswith("hang in a collective"):
        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size(), tag=7)
    if kind == "hang in C":  # with the interpreter's lock, deaf to all but the signals that end it
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTERM, signal.SIGINT})
        ctypes.PyDLL(None).sleep(10**6)
    while True:  # hang in Python
        sum(range(1000))


def train(generation, report=None, ping=lambda: None, **store):
    dist.init_process_group("gloo", **({"timeout": datetime.timedelta(seconds=timeout_s)} if timeout_s else {}), **store)
    dist.all_reduce(torch.ones(1))
    say("again", generation)
    world, step = dist.get_world_size(), 0
    while True:
        dist.all_reduce(torch.ones(1))
        ping()
        step += 1
        if step == 100 and dist.get_rank() == world - 1 and (number := struck()) < len(kinds):
            strike(kinds[number], generation, report)


"""
OURS = (
    COMMON
    + """
from hyperpodrun.inprocess.progress import note_step
from hyperpodrun.inprocess.wrap import HPWrapper

@HPWrapper(trace_file_path=folder + "/trace")
def main(caller=None):
    train(int(os.environ["HYPERPODRUN_GENERATION"]), caller.report_fault, lambda: note_step(0))
main()
"""
)
TORCH = COMMON + 'train(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))\n'
WRAPPER = (
    COMMON
    + """
import importlib.util
import nvidia_resiliency_ext.inprocess as inprocess

place = importlib.util.spec_from_file_location("sockets", os.environ["BENCH_SOCKETS"])
sockets = importlib.util.module_from_spec(place)
sys.modules["sockets"] = sockets
place.loader.exec_module(sockets)

class Helped(inprocess.abort.Abort):
    def __call__(self, state):
        sockets.shut_gloo()
        if dist.is_initialized():
            dist.destroy_process_group()
        return state

def seconds(number):
    return datetime.timedelta(seconds=number)

options = {"soft_timeout": seconds(HANG_S), "hard_timeout": seconds(HANG_S + 1)}
if os.environ["BENCH_TUNED"]:
    names = ("monitor_thread_interval", "monitor_process_interval", "heartbeat_interval", "progress_watchdog_interval")
    options |= {name: seconds(0.1) for name in names} | {"last_call_wait": seconds(0.1), "heartbeat_timeout": seconds(5)}
    options |= {"termination_grace_time": seconds(0.1)}

port = int(os.environ["MASTER_PORT"])  # the wrapper's own store has the next one

@inprocess.Wrapper(abort=Helped(), store_kwargs={"port": port + 1}, **options)
def main(call_wrapper: inprocess.CallWrapper = None):
    rank, world, generation = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), call_wrapper.iteration
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, multi_tenant=True, wait_for_workers=False)
    ping = call_wrapper.ping
    train(generation, ping=ping, store=dist.PrefixStore(str(generation), store), rank=rank, world_size=world)
main()
""".replace("HANG_S", str(HANG_S))
)
BARE = """\
import os, subprocess, sys
ranks, script = int(sys.argv[1]), sys.argv[2]
run = [subprocess.Popen([sys.executable, script], env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank),
       "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}) for rank in range(ranks)]
for one in run:
    one.wait()
"""
KINDS = (
    "exception", "SIGKILL", "os._exit", "hang in a collective, reported", "hang in a collective", "hang in Python", "hang in C",
    "SIGSTOP", "agent lost", "node lost, a spare there",
)  # fmt: skip
REPORTED, HANGS, AGENT, NODE = KINDS[3], KINDS[4:8], KINDS[8], KINDS[9]
OUTSIDE = (AGENT, NODE)


class Elsewhere(NamedTuple):
    """A launcher that does not stand beside this Python."""

    name: str
    environment: dict[str, str]
    path: Path


@dataclass(frozen=True)
class Contestant:
    """Somebody to measure. `arguments` stand before the script; `shrinks`: what is lost to a kill stays lost."""

    name: str
    launcher: Launcher | Elsewhere
    worker: str
    arguments: tuple[str, ...]
    kinds: tuple[str, ...] = KINDS
    times_out: bool = False
    """Hangs are found by the collectives' own timeout."""
    shrinks: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def starting(self, kinds: Sequence[str], folder: Path | None = None) -> Launcher:
        """The launcher with what the workers have to know."""
        inside = {
            "BENCH_KINDS": json.dumps([kind for kind in kinds if kind not in OUTSIDE]),
            "BENCH_TIMEOUT": str(HANG_S if self.times_out and set(kinds) & set(HANGS) else 0.0),
            "OMP_NUM_THREADS": "1",
        }
        if folder is not None:
            inside["HYPERPODRUN_STATUS_FILE"] = str(folder / "status")
        return self.launcher._replace(environment={**self.launcher.environment, **inside, **self.environment})  # type: ignore[return-value]


TORCHRUN, HYPERPODRUN = LAUNCHERS
_OURS = ("--nproc-per-node", str(RANKS), "--max-restarts", "1000", "--max-rank-faults", "1000", "--hang-timeout", str(HANG_S))
IN_PLACE = Contestant("in place", HYPERPODRUN, OURS, (*_OURS, "--inprocess-restart"))
# The hang watch knows when a function was entered only where it is restarted in place.
BY_PROCESS = Contestant("by process", HYPERPODRUN, OURS, _OURS, tuple(kind for kind in KINDS if kind not in (REPORTED, *HANGS)))
_TORCH = ("--nproc-per-node", str(RANKS), "--max-restarts", "1000")
_QUICK = ("--shutdown-timeout", str(int(HANG_S)))  # a stopped process answers no SIGTERM
_THEIRS = tuple(kind for kind in KINDS if kind not in (REPORTED, AGENT))
PLAIN = Contestant("torchrun", TORCHRUN, TORCH, (*_TORCH, *_QUICK), _THEIRS, times_out=True)


def nvidia(folder: Path) -> list[Contestant]:
    """NVIDIA's launcher and wrapper, from a virtual environment in `folder`, made if it is not there. Raises BenchmarkError."""
    python = folder / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
            # torch is the one that we are measured with; the package alone would pull in another with all of CUDA.
            (site,) = folder.glob("lib/python3*/site-packages")
            (site / "shared.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
            install = [str(python), "-m", "pip", "install", "-q", "--no-deps", *NVIDIA]
            subprocess.run(install, check=True, capture_output=True, timeout=300)
        look = [str(python), "-W", "ignore", "-c", "import nvidia_resiliency_ext.inprocess"]
        subprocess.run(look, check=True, capture_output=True, timeout=60)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        words = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip().splitlines()
        raise BenchmarkError(f"{NVIDIA[0]} cannot be had: {words[-1] if words else error}") from error
    (folder / "bare.py").write_text(BARE)
    launcher = Elsewhere("ft_launcher", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, folder / "bin" / "ft_launcher")
    quick = ("--workers-stop-timeout", str(int(HANG_S)))
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--ignore-missing-fault-tol-cfg")
    found = [Contestant("ft_launcher", launcher, TORCH, (*_TORCH, *quick, *rendezvous), _THEIRS[:-1], times_out=True)]
    sockets = Path(__file__).parents[2] / "hyperpodrun" / "inprocess" / "sockets.py"
    for name, tuned in (("NVIDIA wrapper", ""), ("NVIDIA wrapper, tuned", "yes")):
        environment = {"BENCH_SOCKETS": str(sockets), "BENCH_TUNED": tuned, "PYTHONWARNINGS": "ignore"}
        bare = Elsewhere(name, environment, python)
        found.append(Contestant(name, bare, WRAPPER, (str(folder / "bare.py"), str(RANKS)), _THEIRS[:-1], shrinks=True))
    return found


class Sample(NamedTuple):
    """One fault: seconds until the next all-reduce was done on all ranks, and what the job's folder held for `recovery_picture`."""

    took_s: float
    struck_s: float
    again_s: float
    born_s: float | None
    trace: list[dict[str, Any]]


def measure(who: Contestant, kinds: Sequence[str]) -> Iterator[Sample | None]:
    """One job, these faults in it; None, and nothing after it, when it is not back within GIVE_UP_S. Raises BenchmarkError."""
    if kinds[0] == NODE:
        yield _node_lost(who)
        return
    with _started(who, kinds) as run:
        run.until(lambda: _again(run.folder, 0.0), "the first all-reduce")
        for number, kind in enumerate(kinds):
            run.deadline_s = time.monotonic() + GIVE_UP_S
            if kind == AGENT:
                status = run.until(lambda: _status(run.folder), "the state file")
                struck_s = time.monotonic()
                os.kill(status["agent_pid"], signal.SIGKILL)
            else:
                struck_s = run.until(lambda number=number: _strike(run.folder, number), f"fault {number}, {kind}")  # type: ignore[misc]
            run.deadline_s = struck_s + GIVE_UP_S
            try:
                run.until(lambda struck_s=struck_s: _again(run.folder, struck_s), "an all-reduce")  # type: ignore[misc]
            except BenchmarkError:
                yield None
                return
            yield _sample(run.folder, struck_s)


@contextmanager
def _started(who: Contestant, kinds: Sequence[str]) -> Iterator[Run]:
    with TemporaryDirectory(prefix="hyperpodrun-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "worker.py").write_text(who.worker)
        launcher = who.starting(kinds, folder)
        if who.shrinks:
            launcher.environment["MASTER_PORT"] = str(free_ports(1)[0])
        run = Run(launcher, folder, [*who.arguments, str(folder / "worker.py")], LIMIT_S)
        try:
            yield run
        finally:
            run.sweep()


def _node_lost(who: Contestant) -> Sample | None:
    """Two nodes with half of the ranks each, and a spare; the second node goes with everything on it."""
    half = str(RANKS // 2)
    arguments: Callable[[int], list[str]]
    if who.worker is OURS:
        place = ("--inprocess-restart",) if who is IN_PLACE else ()
        arguments = Mesh(3, "--nproc-per-node", half, "--spares", "1", "--hang-timeout", "60", *place, nnodes="2")
    else:
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        common = ["--nnodes", "2:2", "--nproc-per-node", half, "--max-restarts", "10", "--rdzv-id", "bench"]
        common += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
        arguments = lambda _node: common  # noqa: E731
    with job(who.starting((NODE,)), 3, arguments, who.worker, LIMIT_S) as running:
        running.start_all()
        running.until(lambda: _again(running.folder, 0.0), "the first all-reduce", LIMIT_S)
        nodes = {event["node_folder"] for event in _events(running.folder) if event["rank"] >= RANKS // 2}
        lost = next(int(node) for node in sorted(nodes) if node != "0") if nodes != {"0"} else 0
        struck_s = running.kill(lost)
        try:
            running.until(lambda: _again(running.folder, struck_s), "an all-reduce", GIVE_UP_S)
        except BenchmarkError:
            return None
        return _sample(running.folder, struck_s)


def _sample(folder: Path, struck_s: float) -> Sample:
    again_s = _again(folder, struck_s)
    assert again_s is not None
    offset_s = time.time() - time.monotonic()
    trace = [line | {"at_s": line["t"] - offset_s} for path in folder.rglob("trace") for line in _lines(path)]
    born = [event["at_s"] for event in _events(folder) if event["what"] == "born" and struck_s < event["at_s"] < again_s]
    return Sample(again_s - struck_s, struck_s, again_s, min(born, default=None), trace)


def _again(folder: Path, since_s: float) -> float | None:
    """When the first all-reduce of a generation that began after `since_s` was done on all of its ranks."""
    worlds: dict[tuple[int, int], dict[int, float]] = {}
    for event in _events(folder):
        if event["what"] == "again" and event["at_s"] > since_s:
            worlds.setdefault((event["generation"], event["world"]), {})[event["rank"]] = event["at_s"]
    return min((max(ranks.values()) for (_, world), ranks in worlds.items() if len(ranks) == world), default=None)


def _strike(folder: Path, number: int) -> float | None:
    found = sorted(event["at_s"] for event in _events(folder) if event["what"] == "struck")
    return found[number] if len(found) > number else None


def _events(folder: Path) -> list[dict[str, Any]]:
    return [
        line | {"node_folder": path.parent.name.partition(".")[0]} for path in folder.rglob("events") for line in _lines(path)
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # its writer was killed in the middle of it
    return found


def _status(folder: Path) -> dict[str, Any] | None:
    try:
        return json.loads((folder / "status").read_text())  # type: ignore[no-any-return]
    except (OSError, json.JSONDecodeError):
        return None
