"""What a job of several nodes costs while nothing happens, and how long it stands still when something does.

    .venv/bin/python scripts/bench/mesh.py [--quick] [--full] [--only idle,times,pair,cost,simulator] [--json FILE]

Every node is a launcher of its own on this machine's loopback; but for `pair` its workers import nothing.

- idle: N agents (2, 4, 8, 16; with --full 32 and 64 too) while their workers sleep. CPU time is the kernel's, of keeper and
  agent with all threads; messages are those that the agent's state file counts, so ZeroMQ's own heartbeats are not in it;
- times: one job of four nodes, `--nnodes 2:4`. A worker fails; an agent gets SIGKILL and its keeper starts it again; a node is
  lost with all its processes, and comes back; a node leaves on SIGTERM, and comes back. "decided" is the first view line on
  any node, "trains again" the first time that all ranks of a world are up;
- pair: two nodes, `--nnodes 1:2`, whose workers all-reduce over gloo without pause; torchrun beside it (c10d; bounded at 70 s
  a case, left out with --quick). "trains again" is the first all-reduce done on all ranks;
- cost: CPU time of one heartbeat through the real codec, transport and loop, sender and receiver with all their threads;
- simulator: the same protocol in virtual time at 16 and 128 nodes, with --full 1,024 and 4,096 (minutes); what a message costs
  its receiver in a burst is taken from `cost`. `mesh_simulated.py` alone prints all four sizes as one table.

A figure above its target (issue 3's "must show") is named at the end. The load of the machine is printed with each part:
on a busy one the times say little.
"""

import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import mesh_cost
import mesh_simulated
from footprint import MIB, cpu_s, memory_bytes
from mesh_job import FAIL, TRAINER, Job, Mesh, free_ports, job
from side_by_side import LAUNCHERS, BenchmarkError, Figures, Samples, as_json, options, show

TORCHRUN, OURS = LAUNCHERS
PARTS = ("idle", "times", "pair", "cost", "simulator")
SETTLE_S = 6.0
"""Start-up work is not idling; longer than the agent takes to renew its state file."""
PAUSE_S = 1.5
"""Between two faults: a view older than this has no alerts or reports left in flight."""
NODES = 4
TORCHRUN_LIMIT_S = 70.0

TARGETS: dict[str, float] = {
    "idle, 16 agents: CPU, % of a core": 1.0,
    "idle, 16 agents: keeper + agent, resident MiB": 60.0,
    "idle, 16 agents: messages sent per agent and second": 50.0,
    "idle, 64 agents: messages sent per agent and second": 50.0,
    "worker fails -> decided, s": 0.150,
    "agent SIGKILL -> decided, s": 0.8,
    "1:2, the other node lost -> trains again, s": 2.0,
    "1:2, second agent SIGKILL -> both train again, s": 2.0,
    "1:2, first agent SIGKILL -> both train again, s": 2.0,
    "simulated, 1024 nodes: one lost -> decided, s after detection": 0.5,
    "simulated, 1024 nodes: a third lost -> decided, s after detection": 1.5,
    "simulated, 1024 nodes: idle messages of a node, median per s": 50.0,
}


def note(text: str) -> None:
    """Progress, and under which load."""
    print(f"  {text}  (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)


# --- idle


def idle(count: int, seconds: float) -> Figures:
    """Mean over all agents; the busiest one's CPU time too."""
    with job(OURS, count, Mesh(count), limit_s=120 + seconds + 3 * count) as running:
        began_s = time.monotonic()
        running.start_all()
        up_s, _ = running.up((count,), began_s, 60 + 3 * count)
        time.sleep(SETTLE_S)
        pairs = [(running.nodes[node].pid, running.agent(node)) for node in range(count)]
        first = [counted(running, node) for node in range(count)]
        started_s, before = time.monotonic(), [cpu_s(keeper) + cpu_s(agent) for keeper, agent in pairs]
        time.sleep(seconds)
        spent = [
            100 * (cpu_s(keeper) + cpu_s(agent) - was) / (time.monotonic() - started_s)
            for (keeper, agent), was in zip(pairs, before, strict=True)
        ]
        last = [counted(running, node) for node in range(count)]
        rates = [
            {what: (b[1][what] - a[1][what]) / (b[0] - a[0]) for what in b[1]}
            for a, b in zip(first, last, strict=True)
            if b[0] > a[0]
        ]
        resident = [(memory_bytes(keeper, "Rss") + memory_bytes(agent, "Rss")) / MIB for keeper, agent in pairs]
        shared = [(memory_bytes(keeper, "Pss") + memory_bytes(agent, "Pss")) / MIB for keeper, agent in pairs]
    name = f"idle, {count} agents"
    return {
        f"{name}: all started -> all ranks up, s": up_s - began_s,
        f"{name}: CPU, % of a core": statistics.fmean(spent),
        f"{name}: CPU of the busiest, % of a core": max(spent),
        f"{name}: keeper + agent, resident MiB": max(resident),
        f"{name}: keeper + agent, proportional MiB": statistics.fmean(shared),
        f"{name}: messages sent per agent and second": statistics.fmean(rate["sent"] for rate in rates),
        f"{name}: messages of the busiest (sent + received) per second": max(rate["sent"] + rate["received"] for rate in rates),
        f"{name}: bytes sent per agent and second": statistics.fmean(rate["sent_bytes"] for rate in rates),
    }


def counted(running: Job, node: int) -> tuple[float, dict[str, int]]:
    """The transport's counters and when they were written down."""
    written, status = running.until(lambda: running.status(node), f"state file of node {node}", 10)
    mesh_status = status["mesh"]
    assert isinstance(mesh_status, dict)
    return written, mesh_status["counters"]


# --- times


def times(repetitions: int) -> Samples:
    """One job, one fault after the other."""
    samples: Samples = {}

    def add(figures: Figures) -> None:
        note("  ".join(f"{what} {value:.3f}" for what, value in figures.items()))
        for what, value in figures.items():
            samples.setdefault(what, {}).setdefault(OURS.name, []).append(value)

    with job(OURS, NODES, Mesh(NODES, nnodes=f"2:{NODES}"), limit_s=120 + 60 * repetitions) as running:
        began_s = time.monotonic()
        running.start_all()
        running.up((NODES,), began_s, 60)
        for turn in range(repetitions):
            node = NODES - 1 - turn % (NODES - 1)  # not always the same; the first one stays to the end
            for fault in (worker_fails, agent_killed, node_lost, node_leaves):
                time.sleep(PAUSE_S)
                add(fault(running, node))
    return samples


def worker_fails(running: Job, node: int) -> Figures:
    """One worker ends with code 3."""
    _, ranks = running.up((NODES,), last_start_s(running), 30)
    victim = next(word for word in ranks if word.node == node)
    os.kill(victim.pid, FAIL)
    failed_s = running.until(
        lambda: next((w.at_s for w in running.words() if w.what == "fails" and w.pid == victim.pid), None), "a worker failing", 10
    )
    up_s, _ = running.up((NODES,), failed_s, 30)
    return {
        "worker fails -> decided, s": running.decided(failed_s) - failed_s,
        "worker fails -> all trains again, s": up_s - failed_s,
    }


def agent_killed(running: Job, node: int) -> Figures:
    """The keeper starts the agent again, which comes back into the world."""
    pid, killed_s = running.agent(node), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    up_s, ranks = running.up(tuple(range(2, NODES + 1)), killed_s, 30)
    full_s = up_s if len(ranks) == NODES else running.up((NODES,), killed_s, 30)[0]
    return {
        "agent SIGKILL -> decided, s": running.decided(killed_s) - killed_s,
        "agent SIGKILL -> a world trains again, s": up_s - killed_s,
        "agent SIGKILL -> all nodes train again, s": full_s - killed_s,
    }


def node_lost(running: Job, node: int) -> Figures:
    """All its processes at once; then a new launcher in its place."""
    killed_s = running.kill(node)
    up_s, _ = running.up((NODES - 1,), killed_s, 60)
    figures = {
        "node lost -> decided, s": running.decided(killed_s) - killed_s,
        "node lost -> the others train again, s": up_s - killed_s,
    }
    return figures | joined(running, node)


def node_leaves(running: Job, node: int) -> Figures:
    """SIGTERM to its launcher; then a new one in its place."""
    asked_s = time.monotonic()
    running.nodes[node].process.send_signal(signal.SIGTERM)
    up_s, _ = running.up((NODES - 1,), asked_s, 60)
    figures = {
        "node leaves (SIGTERM) -> decided, s": running.decided(asked_s) - asked_s,
        "node leaves (SIGTERM) -> the others train again, s": up_s - asked_s,
    }
    left = running.nodes.pop(node)
    left.until(left.process.poll, "its end after SIGTERM")
    left.sweep()
    return figures | joined(running, node)


def joined(running: Job, node: int) -> Figures:
    """From the start of the command on."""
    time.sleep(PAUSE_S)
    started_s = running.start(node)
    up_s, _ = running.up((NODES,), started_s, 60)
    return {
        "node joins: command started -> decided, s": running.decided(started_s) - started_s,
        "node joins: command started -> all train again, s": up_s - started_s,
    }


def last_start_s(running: Job) -> float:
    """A time before the newest world and after all earlier ones."""
    words = [word for word in running.words() if word.what == "up"]
    newest = max(words, key=lambda word: word.at_s).world
    return min(word.at_s for word in words if word.world == newest) - 1e-6


# --- two nodes, beside torchrun

LOST = "1:2, the other node lost -> trains again, s"
FIRST, SECOND = "1:2, first agent SIGKILL", "1:2, second agent SIGKILL"


def pair(quick: bool, repetitions: int) -> tuple[Samples, list[str]]:
    """hyperpodrun, then torchrun; sentences about what has no figure."""
    agents = {f"{what} -> {who} again, s": {} for what in (SECOND, FIRST) for who in ("trains", "both train")}
    samples: Samples = {LOST: {}, **agents}
    sentences: list[str] = []
    for _ in range(repetitions):
        with job(OURS, 2, Mesh(2, nnodes="1:2"), TRAINER) as running:
            began_s = time.monotonic()
            running.start_all()
            running.up((2,), began_s, 90)
            for what, node in ((SECOND, 1), (FIRST, 0)):
                time.sleep(PAUSE_S)
                pid, killed_s = running.agent(node), time.monotonic()
                os.kill(pid, signal.SIGKILL)
                up_s, _ = running.up((1, 2), killed_s, 60)
                samples[f"{what} -> trains again, s"].setdefault(OURS.name, []).append(up_s - killed_s)
                up_s, _ = running.up((2,), killed_s, 60)
                samples[f"{what} -> both train again, s"].setdefault(OURS.name, []).append(up_s - killed_s)
            time.sleep(PAUSE_S)
            # Of two nodes the one without the tiebreak is lost; the tiebreak is rank 0's node.
            _, ranks = running.up((2,), last_start_s(running), 30)
            killed_s = running.kill(ranks[1].node)
            up_s, _ = running.up((1,), killed_s, 30)
            samples[LOST].setdefault(OURS.name, []).append(up_s - killed_s)
            note("; ".join(f"{what} {by[OURS.name][-1]:.2f}" for what, by in samples.items()))
    if not quick:
        for host_of_store in (False, True):
            torchrun_pair(host_of_store, samples, sentences)
    return samples, sentences


def torchrun_pair(host_of_store: bool, samples: Samples, sentences: list[str]) -> None:
    """One node of two is lost; with `host_of_store` the one whose agent serves the c10d store."""
    (port,) = free_ports(1)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "bench"]
    arguments = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "100", "--local-addr", "127.0.0.1", *rendezvous]
    with job(TORCHRUN, 2, lambda _node: arguments, TRAINER, limit_s=60 + 2 * TORCHRUN_LIMIT_S) as running:
        began_s = time.monotonic()
        running.start(0)  # whoever is first serves the store
        running.until(lambda: listening(port), "torchrun's store", 40)
        running.start(1)
        running.up((2,), began_s, 90)
        time.sleep(PAUSE_S)
        other = running.nodes[1 if host_of_store else 0]
        killed_s = running.kill(0 if host_of_store else 1)

        def ended_or_up() -> float | int | None:
            again = [word.at_s for word in running.words() if word.what == "up" and word.at_s > killed_s]
            return min(again) if again else other.process.poll()

        what = "the node whose agent serves the store" if host_of_store else "the other node"
        try:
            outcome = running.until(ended_or_up, f"anything of torchrun after {what} was lost", TORCHRUN_LIMIT_S)
        except BenchmarkError:
            sentences.append(f"torchrun 1:2, {what} lost: nothing within {TORCHRUN_LIMIT_S:g} s")
            return
        after_s = time.monotonic() - killed_s
        if isinstance(outcome, float):
            sentences.append(f"torchrun 1:2, {what} lost: trains again after {outcome - killed_s:.1f} s")
            figure = f"{FIRST} -> trains again, s" if host_of_store else LOST
            samples[figure].setdefault(TORCHRUN.name, []).append(outcome - killed_s)
        else:
            sentences.append(f"torchrun 1:2, {what} lost: the job ends with exit code {outcome} after {after_s:.1f} s")
        note(sentences[-1])


def listening(port: int) -> bool | None:
    """Whether this port is in use on loopback or everywhere, from the kernel's tables."""
    wanted = f":{port:04X} "
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if f"{fields[1]} ".endswith(wanted) and fields[3] == "0A":
                return True
    return None


# --- simulator


def simulated(count: int, received_us: float) -> Samples:
    """Several runs while they are short: who is lost, and whose turn it then is, are luck."""
    samples: Samples = {}
    for seed in range(5 if count <= 128 else 1):
        for what, value in mesh_simulated.measure(count, received_us, seed).items():
            samples.setdefault(what, {}).setdefault(OURS.name, []).append(value)
    return samples


# --- all of it


def main() -> None:
    """Measure, show, write."""
    parser = options(__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=15, help="how long CPU time is counted (15)")
    parser.add_argument("--full", action="store_true", help="32 and 64 agents, 1,024 and 4,096 simulated nodes too")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PART,...", help="which parts (all)")
    chosen = parser.parse_args()
    wanted = chosen.only.split(",")
    if unknown := sorted(set(wanted) - set(PARTS)):
        parser.error(f"--only {unknown[0]}: the parts are {', '.join(PARTS)}")
    for launcher in LAUNCHERS:
        if not launcher.path.exists():
            sys.exit(f"no {launcher.name} beside {sys.executable}: run scripts/setup, then use .venv/bin/python")
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", "130")  # figures' names are long
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signum, _frame: sys.exit(128 + signum))  # through the ends of all jobs
    repetitions = 2 if chosen.quick else chosen.repetitions
    counts = (2, 4, 16) if chosen.quick else (2, 4, 8, 16, 32, 64) if chosen.full else (2, 4, 8, 16)
    everything: Samples = {}
    sentences: list[str] = []
    failures: list[str] = []
    loads: dict[str, float] = {}

    def part(name: str, title: str, measure: Callable[[], Samples]) -> None:
        if name not in wanted:
            return
        note(title)
        try:
            samples = measure()
        except BenchmarkError as error:
            failures.append(f"{title}: {error}")
        except Exception:  # noqa: BLE001 - whatever breaks one part must not cost the figures of the others
            failures.append(f"{title}: {traceback.format_exc()}")
        else:
            loads[title] = os.getloadavg()[0]
            everything.update(samples)
            show(f"{title} (load {loads[title]:.1f} on {os.cpu_count()} CPUs)", samples)

    def pairs() -> Samples:
        samples, said = pair(chosen.quick, min(repetitions, 3))
        sentences.extend(said)
        return samples

    for count in counts:
        part("idle", f"Idle, {count} agents", lambda count=count: ours(idle(count, 8 if chosen.quick else chosen.seconds)))  # type: ignore[misc]
    part("times", f"Faults in a job of {NODES} nodes", lambda: times(repetitions))
    part("pair", "Two nodes", pairs)
    part("cost", "One heartbeat", lambda: ours(mesh_cost.measure(2000 if chosen.quick else 10000)))
    received_us = everything.get(mesh_cost.BURST, {}).get(OURS.name, [mesh_cost.ASSUMED_US])[0]
    for count in (16, 128, 1024, 4096) if chosen.full else (16, 128):
        part("simulator", f"Simulated, {count} nodes", lambda count=count: simulated(count, received_us))  # type: ignore[misc]
    for sentence in sentences:
        print(sentence)
    for what, most in TARGETS.items():
        values = everything.get(what, {}).get(OURS.name)
        if values and statistics.median(values) > most:
            sentences.append(f"misses its target of {most:g}: {what}: {statistics.median(values):.3g}")
            print(sentences[-1])
    if chosen.json:
        told = {
            **json.loads(as_json("Mesh", everything, repetitions)),
            "load": loads,
            "sentences": sentences,
            "failures": failures,
        }
        chosen.json.write_text(json.dumps(told, indent=2) + "\n")
    if failures:
        sys.exit("\n".join(failures))


def ours(figures: Figures) -> Samples:
    """As samples with one value each."""
    return {what: {OURS.name: [value]} for what, value in figures.items()}


if __name__ == "__main__":
    main()
