"""The agent's store beside torch's own server: operations a second, latency, wake-up, barrier.

    scripts/bench/store.py [--clients 1 8 32] [--seconds 1.0] [--door tcp|mesh]

Clients are processes with torch's C++ client (or `MeshStore`), all on this host; both servers are measured in turn by the same clients
in the same run. Prints a table, then one JSON line.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

LIMIT = timedelta(seconds=60)


def serve_agent(ready: Any) -> None:
    """The agent's store and door on a loop of their own, without the rest of the agent."""
    from hyperpodrun.agent.reactor import Reactor
    from hyperpodrun.agent.store import Store

    reactor = Reactor()
    store = Store(reactor, lambda sentence: print(sentence, file=sys.stderr))
    store.open(0, "here", ["here"])
    ready.send(store.address[1])
    reactor.run()


def serve_stock(ready: Any) -> None:
    """torch's own server."""
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=LIMIT)
    ready.send(server.port)
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
    calls: dict[str, Callable[[], object]] = {
        "set+get": lambda: (store.set(own, value), store.get(own)),
        "get": lambda: store.get(own),
        "add": lambda: store.add("counter", 1),
        "check": lambda: store.check([own]),
    }
    for name, call in calls.items():
        meet.wait()
        began, count = time.monotonic(), 0
        while time.monotonic() - began < seconds:
            call()
            count += 1
        results.put((name, count / (time.monotonic() - began)))
    rounds = 100
    if clients > 1 and number < 2:
        times = []
        for i in range(rounds):
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
    for i in range(20):
        meet.wait()
        began = time.monotonic()
        if store.add(f"barrier{i}", 1) == clients:
            store.set(f"open{i}", b"")
        store.wait([f"open{i}"])
        results.put(("barrier", (i, began, time.monotonic())))


def measure(server: Callable[[Any], None], door: str, clients: int, seconds: float) -> dict[str, float]:
    """The figures of one server with so many clients."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    serving = context.Process(target=server, args=(there,), daemon=True)
    serving.start()
    port = here.recv()
    meet, results = context.Barrier(clients), context.Queue()
    crew = [context.Process(target=work, args=(n, clients, door, port, seconds, meet, results)) for n in range(clients)]
    for one in crew:
        one.start()
    rates: dict[str, float] = {}
    spans: dict[int, list[tuple[float, float]]] = {}
    for _ in range(clients * (4 + 20) + (clients > 1)):
        name, got = results.get(timeout=300)
        if name == "barrier":
            spans.setdefault(got[0], []).append(got[1:])
        elif name == "wake-up":
            rates["wake-up p50, us"], rates["wake-up p99, us"] = got[len(got) // 2] * 1e6, got[len(got) * 99 // 100] * 1e6
        else:
            rates[f"{name}/s"] = rates.get(f"{name}/s", 0.0) + got
    for one in crew:
        one.join()
    serving.kill()
    serving.join()
    bars = sorted(max(out for _, out in span) - max(begin for begin, _ in span) for span in spans.values())
    rates["barrier p50, us"] = bars[len(bars) // 2] * 1e6
    return {name: round(rate, 1) for name, rate in rates.items()}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each kind of operation")
    parser.add_argument("--door", choices=("tcp", "mesh"), default="tcp", help="of the agent's side")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report = []
    for clients in options.clients:
        agent = measure(serve_agent, options.door, clients, options.seconds)
        stock = measure(serve_stock, "tcp", clients, options.seconds)
        print(f"{clients} clients{'':14}{'agent':>12}{'TCPStore':>12}{'ratio':>8}")
        for name, figure in agent.items():
            print(f"  {name:22}{figure:12,.0f}{stock[name]:12,.0f}{figure / stock[name]:8.2f}", flush=True)
        report.append({"clients": clients, "agent": agent, "stock": stock})
    print(json.dumps({"bench": "store", "door": options.door, "rows": report}))


if __name__ == "__main__":
    main()
