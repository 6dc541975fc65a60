"""Process-group init: torch's store on rank 0 (classic) and the agents' own (rootless) in turn.

    scripts/bench/init.py [--ranks 2 8 16] [--agents 1] [--repeat 3] [--loss]

One launcher for each agent, all on this host, on loopback; gloo. Figures are from the moment at which the last rank calls
`init_process_group` to the one at which the last rank has it back: *first* in a fresh world, *again* after
`destroy_process_group` in the same one, *restarted* in the next generation. With --loss also (rootless): an agent is killed while the
ranks of the others wait in the store; until the last of them has its error, and until the next world has its group. Medians of all
rounds, ratios, one JSON line.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 300
AGAIN = 3
SCRIPT = """
import json, os, signal, sys, threading, time
import torch, torch.distributed as dist
torch.set_num_threads(1)
FOLDER, RANK, WORLD = os.environ["BENCH_DIR"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT, GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["HYPERPODRUN_GENERATION"])
LOSS, LOST = os.environ["LOSS"] == "1", os.environ["SIDE"] == os.environ["AGENTS"]

def leave(name, value):
    path = f"{FOLDER}/{name}.{RANK}"
    with open(path + ".new", "w") as file:
        json.dump(value, file)
    os.rename(path + ".new", path)

def meet(name):
    leave(name, 0)
    while sum(one.startswith(name + ".") and not one.endswith(".new") for one in os.listdir(FOLDER)) < WORLD:
        time.sleep(0.002)

def init(name):
    meet(f"before-{name}")
    began = time.monotonic()
    dist.init_process_group("gloo")
    leave(f"took-{name}", [began, time.monotonic()])
    meet(f"after-{name}")

FIRST = GENERATION == 0
init("first" if FIRST else "restarted")
if FIRST:
    for turn in range(int(os.environ["AGAIN"])):
        dist.destroy_process_group()
        meet(f"destroyed{turn}")
        init(f"again{turn}")
    if not LOSS:
        if RANK == 0: sys.exit(9)
        time.sleep(600)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    meet("loss")
    if LOST:
        time.sleep(0.3)
        if int(os.environ["LOCAL_RANK"]) == 0:
            leave("struck", time.monotonic())
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    try:
        dist.distributed_c10d._get_default_store().wait(["never"])
    except dist.DistError:
        leave("freed", time.monotonic())
    time.sleep(600)
"""


def free_ports() -> Iterator[int]:
    """Ports below the kernel's own range on which nobody listens."""
    port = 21000 + os.getpid() * 31 % 9000
    while True:
        port += 1
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        yield port


def run(ranks: int, agents: int, rootless: bool, loss: bool, ports: Iterator[int]) -> dict[str, float]:
    """One job; seconds by name."""
    with tempfile.TemporaryDirectory(prefix="init-bench-") as text:
        folder = Path(text)
        (folder / "worker.py").write_text(SCRIPT)
        mine = [next(ports) for _ in range(agents)]
        job = f"init-{uuid.uuid4().hex[:8]}"
        crew = []
        for side, port in enumerate(mine, 1):
            words = [f"--nproc-per-node={ranks // agents}", "--max-restarts=2", f"--job-id={job}", "--shutdown-timeout=1"]
            if agents > 1:
                peers = ",".join(f"127.0.0.1:{one}" for one in mine)
                words += [f"--nnodes={agents}", f"--peers={peers}", f"--mesh-port={port}"]
            environment = {
                **os.environ,
                "BENCH_DIR": text,
                "SIDE": str(side),
                "AGENTS": str(agents),
                "LOSS": str(int(loss)),
                "AGAIN": str(AGAIN),
                "HPCT_USE_ROOTLESS": str(int(rootless)),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            output = (folder / f"output{side}").open("wb")
            command = [sys.executable, "-m", "hyperpodrun", *words, str(folder / "worker.py")]
            crew.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=text))
        try:
            until_s = time.monotonic() + LIMIT_S
            codes = [one.wait(max(0.0, until_s - time.monotonic())) for one in crew]
        except subprocess.TimeoutExpired:
            codes = [-1]
        finally:
            for one in crew:
                one.terminate()
            for one in crew:
                one.wait()
        if any(codes):
            said = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("output*")))
            raise SystemExit(f"{ranks} ranks, {agents} agents, rootless={rootless}: exit codes {codes}\n{said}")

        def values(name: str) -> list[float | list[float]]:
            return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.*"))]

        def span(name: str) -> float:
            rows = [row for row in values(name) if isinstance(row, list)]
            return max(end for _, end in rows) - max(begin for begin, _ in rows)

        figures = {"first": span("took-first"), "restarted": span("took-restarted")}
        figures["again"] = statistics.median(span(f"took-again{turn}") for turn in range(AGAIN))
        if loss:
            struck = [one for one in values("struck") if isinstance(one, float)]
            freed = [one for one in values("freed") if isinstance(one, float)]
            rows = [row for row in values("took-restarted") if isinstance(row, list)]
            figures["agent killed -> last error"] = max(freed) - struck[0]
            figures["agent killed -> next group"] = max(end for _, end in rows) - struck[0]
        return figures


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--agents", type=int, nargs="+", default=[1])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--loss", action="store_true", help="kill an agent in the rootless jobs of several agents")
    chosen = parser.parse_args()
    ports = free_ports()
    report = []
    for agents in chosen.agents:
        for ranks in chosen.ranks:
            if ranks % agents:
                continue
            samples: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
            for turn in range(chosen.repeat):
                for rootless in (True, False) if turn % 2 else (False, True):
                    loss = chosen.loss and rootless and agents > 1
                    for name, figure in run(ranks, agents, rootless, loss, ports).items():
                        samples[rootless].setdefault(name, []).append(figure)
            medians = {kind: {name: statistics.median(rows) for name, rows in samples[kind].items()} for kind in (True, False)}
            title = f"{ranks} ranks, {agents} agent(s)"
            print(f"{title:32}{'rootless':>12}{'classic':>12}{'ratio':>8}")
            for name, figure in medians[True].items():
                classic = medians[False].get(name)
                rest = f"{classic:12.4f}{figure / classic:8.2f}" if classic else ""
                print(f"  {name + ', s':30}{figure:12.4f}{rest}", flush=True)
            report.append({"ranks": ranks, "agents": agents, "rootless": medians[True], "classic": medians[False]})
    print(json.dumps({"bench": "init", "rows": report}))


if __name__ == "__main__":
    main()
