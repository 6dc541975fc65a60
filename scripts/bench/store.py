"""The agents' store beside torch's own server: operations a second, latency, wake-up, barrier.

    scripts/bench/store.py [--clients 1 8 32] [--agents 1 4 16] [--seconds 1.0] [--doors tcp mesh]

Clients are processes with torch's C++ client (door tcp) or `MeshStore` (door mesh), all on this host; client n asks agent n modulo the
number of agents, which keep the keys together, over the mesh's real transport. torch's one server is measured by the same clients in
the same run. `counter` is one key for all, every other key is its client's own. Prints a table for each combination, then one line
of JSON.
"""

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

LIMIT = timedelta(seconds=120)
OPERATIONS = ("set+get", "get", "add", "counter", "check")
WAKE_UPS = 100
BARRIERS = 10
BARRIER_SIZE = 64


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


def work(number: int, clients: int, door: str, port: int, seconds: float, meet: Barrier, results: Any) -> None:
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
        results.put((name, count / (time.monotonic() - began)))
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
    server: Callable[[Connection, int, int], None], door: str, agents: int, clients: int, seconds: float
) -> dict[str, float]:
    """The figures of one kind of server with so many clients."""
    context = multiprocessing.get_context("spawn")
    lines, crew = [], []
    for number in range(agents):
        here, there = context.Pipe()
        serving = context.Process(target=server, args=(there, number, agents), daemon=True)
        serving.start()
        crew.append(serving)
        lines.append(here)
    ports = [line.recv() for line in lines]
    if agents > 1:
        for line in lines:
            line.send([mesh for _, mesh in ports])
    meet, results = context.Barrier(clients), context.Queue()
    workers = [
        context.Process(target=work, args=(n, clients, door, ports[n % agents][0], seconds, meet, results))
        for n in range(clients)
    ]
    for worker in workers:
        worker.start()
    rates: dict[str, float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in range(BARRIERS)]
    for _ in range(clients * (len(OPERATIONS) + 1) + (clients > 1)):
        name, got = results.get(timeout=600)
        if name == "barriers":
            for i, one in enumerate(got):
                spans[i] += one
        elif name == "wake-up":
            rates["wake-up p50, us"], rates["wake-up p99, us"] = got[len(got) // 2] * 1e6, got[len(got) * 99 // 100] * 1e6
        else:
            rates[f"{name}/s"] = rates.get(f"{name}/s", 0.0) + got
    for worker in workers:
        worker.join()
    for serving in crew:
        serving.kill()
        serving.join()
    bars = sorted(max(out for _, out in span) - max(begin for begin, _ in span) for span in spans)
    rates[f"{BARRIER_SIZE}-way barrier p50, us"] = bars[len(bars) // 2] * 1e6
    rates[f"{BARRIER_SIZE}-way barrier max, us"] = bars[-1] * 1e6
    return {name: round(rate, 1) for name, rate in rates.items()}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--agents", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of operation")
    parser.add_argument("--doors", choices=("tcp", "mesh"), nargs="+", default=["tcp"], help="of the agents' side")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = []
    for clients in options.clients:
        stock = measure(serve_stock, "tcp", 1, clients, options.seconds)
        report.append({"clients": clients, "agents": 0, "door": "stock", "figures": stock})
        for door in options.doors:
            for agents in options.agents:
                got = measure(serve_agent, door, agents, clients, options.seconds)
                title = f"{clients} clients, {agents} agents, {door}"
                print(f"{title:32}{'agents':>12}{'TCPStore':>12}{'ratio':>8}")
                for name, figure in got.items():
                    print(f"  {name:30}{figure:12,.0f}{stock[name]:12,.0f}{figure / stock[name]:8.2f}", flush=True)
                report.append({"clients": clients, "agents": agents, "door": door, "figures": got})
    print(json.dumps({"bench": "store", "rows": report}))


if __name__ == "__main__":
    main()
