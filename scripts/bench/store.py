"""The agents' store beside torch's own server: operations a second, latency, wake-up, barrier.

    scripts/bench/store.py [--clients 1 8 32] [--agents 1 4 16] [--seconds 1.0] [--doors tcp mesh] [--per-agent] [--agent-cpu 0.05]

Clients are processes with torch's C++ client (door tcp) or `MeshStore` (door mesh), all on this host; client n asks agent n modulo the
number of agents, which keep the keys together, over the mesh's real transport. torch's one server is measured by the same clients in
the same run. `counter` is one key for all, every other key is its client's own. "CPU us" is what all agents together (or the server)
spend on one operation, "busy" how much of their cores. Prints a table for each combination, then one line of JSON.

How throughput grows with the agents cannot be seen where all of them share two cores with the clients. `--agent-cpu` gives each agent,
and the server, so much of a core and no more (a CPU cgroup each; root): as if each had a small machine of its own. "Busy" then tells
whether the agents were what it waited for. Wake-ups and barriers are left out: they would show the periods of the kernel's throttling.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

LIMIT = timedelta(seconds=120)
OPERATIONS = ("set+get", "get", "add", "counter", "check")
WAKE_UPS = 100
BARRIERS = 10
BARRIER_SIZE = 64
SILENCE_S = 300
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))
LEAST_QUOTA_US = 1000


def serve_agent(line: Connection, number: int, agents: int) -> None:
    """One agent's store and door on a loop of their own, without the rest of the agent."""
    from hyperpodrun.agent.reactor import Reactor
    from hyperpodrun.agent.store import Store

    reactor = Reactor()

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr)

    if agents == 1:
        store = Store(reactor, say)
        line.send((store.address[1], 0))
        store.open(0, "0", ["0"])
    else:
        from hyperpodrun.agent.transport.addresses import Address
        from hyperpodrun.agent.transport.frames import Identity, job_label
        from hyperpodrun.agent.transport.transport import Transport

        transport = Transport(
            reactor,
            identity=Identity(str(number), number + 1),
            label=job_label(f"bench-{os.getppid()}"),
            version=1,
            on_message=lambda who, payload, _link: store.received(who.node, payload),
            on_lost=lambda _who: None,
            say=say,
        )
        store = Store(reactor, say, transport.send)
        line.send((store.address[1], transport.port))
        ports = line.recv()
        for other, port in enumerate(ports):
            if other != number:
                transport.connect(str(other), [Address("127.0.0.1", port)])
        store.open(0, str(number), [str(other) for other in range(agents)])
    reactor.run()


def serve_stock(line: Connection, _number: int, _agents: int) -> None:
    """torch's own server."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=LIMIT)
    line.send((server.port, 0))
    while True:
        time.sleep(3600)


def client(door: str, port: int) -> Any:
    """A client of that server."""
    if door == "mesh":
        from hyperpodrun.rootless.store import MeshStore

        return MeshStore(("127.0.0.1", port), LIMIT)
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", port, None, False, timeout=LIMIT, wait_for_workers=False)


def work(number: int, clients: int, door: str, port: int, seconds: float, rates_only: bool, meet: Barrier, results: Any) -> None:
    """What each client does: rates, then wake-ups (client 0 wakes client 1), then barriers."""
    store = client(door, port)
    own, value = f"own{number}", b"v" * 16
    store.set(own, value)
    store.add(f"{own}n", 0)
    calls: dict[str, Callable[[], object]] = {
        "set+get": lambda: (store.set(own, value), store.get(own)),
        "get": lambda: store.get(own),
        "add": lambda: store.add(f"{own}n", 1),
        "counter": lambda: store.add("counter", 1),
        "check": lambda: store.check([own]),
    }
    for name in OPERATIONS:
        call = calls[name]
        call()
        meet.wait()
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            call()
            count += 1
        results.put((name, (count, time.monotonic() - began)))
    if rates_only:
        return
    if clients > 1 and number < 2:
        times = []
        for i in range(WAKE_UPS):
            if number == 0:
                store.wait([f"ready{i}"])
                time.sleep(0.002)
                store.set(f"go{i}", repr(time.monotonic()))
            else:
                store.set(f"ready{i}", b"")
                store.wait([f"go{i}"])
                woken = time.monotonic()
                times.append(woken - float(store.get(f"go{i}")))
        if times:
            results.put(("wake-up", sorted(times)))
    meet.wait()
    _barriers(clients, lambda: client(door, port), meet, results)


def _barriers(clients: int, new: Callable[[], Any], meet: Barrier, results: Any) -> None:
    """64 participants, spread over the clients as threads with connections of their own: from the last one in to the last one out."""
    lanes = max(1, BARRIER_SIZE // clients)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(BARRIERS)]

    def lane() -> None:
        store = new()
        store.check([])
        for i in range(BARRIERS):
            began = time.monotonic()
            if store.add(f"barrier{i}", 1) == lanes * clients:
                store.set(f"open{i}", b"")
            store.wait([f"open{i}"])
            spans[i].append((began, time.monotonic()))

    crew = [threading.Thread(target=lane) for _ in range(lanes)]
    meet.wait()
    for one in crew:
        one.start()
    for one in crew:
        one.join()
    results.put(("barriers", spans))


def measure(
    server: Callable[[Connection, int, int], None], door: str, agents: int, clients: int, seconds: float, share: float | None
) -> dict[str, float]:
    """The figures of one kind of server with so many clients."""
    spawn, fork = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
    fork.set_forkserver_preload(["torch.distributed", "hyperpodrun.rootless.store"])  # seconds for each client else
    with contextlib.ExitStack() as over:
        lines, crew = [], []
        for number in range(agents):
            here, there = spawn.Pipe()
            serving = spawn.Process(target=server, args=(there, number, agents), daemon=True)
            serving.start()
            over.callback(_end, serving)
            crew.append(serving)
            lines.append(here)
        ports = [_heard(line) for line in lines]
        for line in lines if agents > 1 else ():
            line.send([mesh for _, mesh in ports])
        pids = [serving.pid or 0 for serving in crew]
        if share is not None:
            for pid in pids:
                over.enter_context(limited(pid, share))
        meet, results = fork.Barrier(clients + 1), fork.Queue()
        workers = []
        for n in range(clients):
            words = (n, clients, door, ports[n % agents][0], seconds, share is not None, meet, results)
            worker = fork.Process(target=work, args=words, daemon=True)
            worker.start()
            over.callback(_end, worker)
            workers.append(worker)

        def gather(count: int) -> list[tuple[str, Any]]:
            return [_next(results, workers) for _ in range(count)]

        figures: dict[str, float] = {}
        for name in OPERATIONS:
            meet.wait(SILENCE_S)
            before_s, began_s = cpu_s(pids), time.monotonic()
            got = [rate for _, rate in gather(clients)]
            spent_s, took_s = cpu_s(pids) - before_s, time.monotonic() - began_s
            figures[f"{name}/s"] = sum(count / lasted_s for count, lasted_s in got)
            figures[f"{name}, CPU us"] = 1e6 * spent_s / max(1, sum(count for count, _ in got))
            figures[f"{name}, busy %"] = 100 * spent_s / took_s / agents / (share or 1.0)
        if share is None:
            times = gather(1)[0][1] if clients > 1 else []
            if times:
                figures["wake-up p50, us"], figures["wake-up p99, us"] = (times[len(times) * n // 100] * 1e6 for n in (50, 99))
            meet.wait(SILENCE_S)
            meet.wait(SILENCE_S)
            rounds = zip(*(spans for _, spans in gather(clients)), strict=True)
            bars = sorted(_width([span for spans in one for span in spans]) for one in rounds)
            figures[f"{BARRIER_SIZE}-way barrier p50, us"] = bars[len(bars) // 2] * 1e6
            figures[f"{BARRIER_SIZE}-way barrier max, us"] = bars[-1] * 1e6
        return {name: round(figure, 1) for name, figure in figures.items()}


def _width(spans: list[tuple[float, float]]) -> float:
    return max(out for _, out in spans) - max(begin for begin, _ in spans)


def _heard(line: Connection) -> Any:
    if not line.poll(SILENCE_S):
        raise SystemExit("a server did not start")
    return line.recv()


def _next(results: Any, workers: list[Any]) -> tuple[str, Any]:
    """What a client has to say; no client may have failed."""
    until_s = time.monotonic() + SILENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(queue.Empty):
            got: tuple[str, Any] = results.get(timeout=1)
            return got
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a client failed")
    raise SystemExit(f"no client has said anything for {SILENCE_S} s")


def _end(process: Any) -> None:
    process.kill()
    process.join()


def cpu_s(pids: list[int]) -> float:
    """CPU time of all threads of these processes that still live, in seconds."""
    total_ns = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total_ns += int(path.read_text().split()[0])
    return total_ns / 1e9


@contextlib.contextmanager
def limited(pid: int, share: float) -> Iterator[None]:
    """This process has so much of a core, until it is gone."""
    second = CGROUPS[0] / "cgroup.controllers"
    modern = second.exists() and "cpu" in second.read_text().split()
    group = CGROUPS[0 if modern else 1] / f"hyperpodrun-bench-{pid}"
    period_us = max(10_000, round(LEAST_QUOTA_US / share))
    quota_us = round(share * period_us)
    try:
        group.mkdir()
        if modern:
            (group / "cpu.max").write_text(f"{quota_us} {period_us}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise SystemExit(f"--agent-cpu needs root and a CPU cgroup: {error}") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.kill(pid, 9)
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--per-agent", action="store_true", help="so many clients for each agent, as ranks on nodes")
    parser.add_argument("--agents", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of operation")
    parser.add_argument("--doors", choices=("tcp", "mesh"), nargs="+", default=["tcp"], help="of the agents' side")
    parser.add_argument("--agent-cpu", type=float, metavar="CORES", help="so much of a core for each agent, and for the server")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = []
    stock: dict[int, dict[str, float]] = {}
    for count, agents in itertools.product(options.clients, options.agents):
        clients = count * agents if options.per_agent else count
        if clients not in stock:
            stock[clients] = measure(serve_stock, "tcp", 1, clients, options.seconds, options.agent_cpu)
            report.append({"clients": clients, "agents": 0, "door": "stock", "figures": stock[clients]})
        for door in options.doors:
            got = measure(serve_agent, door, agents, clients, options.seconds, options.agent_cpu)
            title = f"{clients} clients, {agents} agents, {door}"
            print(f"{title:32}{'agents':>12}{'TCPStore':>12}{'ratio':>8}")
            for name, figure in got.items():
                beside = stock[clients][name]
                print(f"  {name:30}{figure:12,.0f}{beside:12,.0f}{figure / beside:8.2f}", flush=True)
            report.append({"clients": clients, "agents": agents, "door": door, "figures": got})
    print(json.dumps({"bench": "store", "agent_cpu": options.agent_cpu, "rows": report}))


if __name__ == "__main__":
    main()
