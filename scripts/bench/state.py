"""What it takes to bring a training state back from a peer's memory, and what keeping it safe costs a step.

    .venv/bin/python scripts/bench/state.py [--sizes 0.25,1] [--ranks 2,4] [--rounds 3] [--json FILE]

Restore: one rank of a gloo job has lost everything and gets the state of a peer into the memory of its new objects, whose pages are
there (in place). In the same run, in turn: as many bytes over one plain loopback socket into such memory; torch's DCP loading the same
state in one process, from a folder on disk (page cache warm) and from /dev/shm.

Steps: the update mark alone (random numbers from a counter, nothing private), the exchange of private state (random states, a
sampler), and a training step with copies=2 of states without replicas against one with copies=1: wall time, and processor time of
the whole process, which another load on the machine does not change. Medians throughout.
"""

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RANK, WORLD, OUT = int(os.environ.get("RANK", "-1")), int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("OUT", "")
LEAF_BYTES = 16 << 20


class Sampler:
    """Something private."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        """Its position."""
        return {"at": self.at}

    def load_state_dict(self, state):
        """Go there."""
        self.at = state["at"]


def group(number):
    """A new world."""
    import torch.distributed as dist

    from hyperpodrun.agent.wire import names

    os.environ[names.GENERATION] = str(number)
    os.environ[names.JOB_ID] = f"bench-state-{os.path.basename(OUT)}-{number}"
    os.environ[names.NODE] = f"node{RANK}"
    dist.init_process_group("gloo", init_method=f"file://{OUT}/meet{number}", rank=RANK, world_size=WORLD)


def model_of(nbytes):
    """Parameters of that many bytes, their pages touched."""
    import torch

    layers = [torch.nn.Linear(1024, LEAF_BYTES // 4096, bias=False) for _ in range(max(1, nbytes // LEAF_BYTES))]
    return torch.nn.ParameterList([layer.weight for layer in layers])


def restores(nbytes, rounds):
    """Seconds that the lost rank takes, by what it does."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from hyperpodrun.recovery import RecoverableState, memory

    took = {"restore": [], "raw socket": [], "DCP disk": [], "DCP /dev/shm": []}
    lost = WORLD - 1
    folders = {"DCP disk": f"{OUT}/dcp", "DCP /dev/shm": f"/dev/shm/bench-state-{os.getpid()}"}
    for turn in range(rounds):
        for life in range(2):
            group(2 * turn + life)
            model = model_of(nbytes)
            state = RecoverableState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), rng="counter", copies=1)
            dist.barrier()
            began = time.perf_counter()
            state.restore()
            if life and lost == RANK:
                took["restore"].append(time.perf_counter() - began)
                print(f"phases: {state.took_s}", file=sys.stderr, flush=True)
                assert state.restored_from == "peer", state.why
            if not life:
                with state.update(turn):
                    pass
                if lost == RANK:
                    memory.forget("default")
            dist.barrier()
            if life:
                raw(nbytes, took, lost, model)
                if lost == RANK:
                    for name, folder in folders.items():
                        if not os.path.exists(folder):
                            dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
                        began = time.perf_counter()
                        dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
                        took[name].append(time.perf_counter() - began)
            dist.barrier()
            dist.destroy_process_group()
        memory.forget("default")
    if lost == RANK:
        shutil.rmtree(folders["DCP /dev/shm"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        return {name: statistics.median(times) for name, times in took.items()} | {"peak MiB": peak}
    return {}


def raw(nbytes, took, lost, model):
    """The bytes over one socket, from rank 0's memory into the lost rank's."""
    import torch.distributed as dist

    from hyperpodrun.recovery import codec, shard

    views = [shard.view(codec.raw(parameter)) for parameter in model]
    port = f"{OUT}/port"
    if RANK == 0:
        with socket.create_server(("127.0.0.1", 0)) as server:
            Path(port + ".new").write_text(str(server.getsockname()[1]))
            os.rename(port + ".new", port)
            dist.barrier()
            with server.accept()[0] as peer:
                for view in views:
                    peer.sendall(view)
                peer.recv(1)
    else:
        dist.barrier()
        if lost == RANK:
            with socket.create_connection(("127.0.0.1", int(Path(port).read_text()))) as peer:
                began = time.perf_counter()
                for view in views:
                    at = 0
                    while at < len(view):
                        at += peer.recv_into(view[at:])
                took["raw socket"].append(time.perf_counter() - began)


def marks():
    """Microseconds of an update block, alone and with the exchange."""
    import torch
    import torch.distributed as dist

    from hyperpodrun.recovery import RecoverableState, memory

    found = {}
    for number, (name, options) in enumerate(
        {"mark us": {"rng": "counter"}, "exchange us": {"rng": True, "sampler": Sampler()}}.items()
    ):
        group(100 + number)
        model = torch.nn.Linear(64, 64)
        state = RecoverableState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), copies=1, **options)
        state.restore()
        times = []
        for step in range(600):
            began = time.perf_counter()
            with state.update(step):
                pass
            times.append(time.perf_counter() - began)
        found[name] = statistics.median(times[100:]) * 1e6
        memory.forget("default")
        dist.barrier()
        dist.destroy_process_group()
    return found


def steps():
    """A training step of states without replicas, with copies=2 against copies=1."""
    import torch
    import torch.distributed as dist

    from hyperpodrun.recovery import RecoverableState, memory

    wall, cpu, every = {1: [], 2: []}, {1: [], 2: []}, 0
    for turn in range(4):
        copies = 1 + turn % 2
        group(200 + turn)
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        state = RecoverableState(model=model, optimizer=optimizer, rng="counter", copies=copies, replica_group=[RANK])
        state.restore()
        x = torch.randn(64, 1024)
        for step in range(80):
            if step == 20:
                began, used = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with state.update(step):
                optimizer.step()
        dist.barrier()
        wall[copies].append((time.perf_counter() - began) / 60)
        cpu[copies].append((time.process_time() - used) / 60)
        if state._versions is not None:
            every = state._versions.pace.every()
        memory.of("default").stop()
        memory.forget("default")
        dist.destroy_process_group()
    return {
        "step ms": statistics.median(wall[1]) * 1e3,
        "copies=2 every": every,
        "copies=2 wall": statistics.median(wall[2]) / statistics.median(wall[1]),
        "copies=2 processor": statistics.median(cpu[2]) / statistics.median(cpu[1]),
    }


def job(ranks, *arguments):
    """What the last rank of such a job found."""
    folder = tempfile.mkdtemp(prefix="bench-state-", dir=os.environ.get("TMPDIR"))
    env = {**os.environ, "WORLD_SIZE": str(ranks), "OUT": folder, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([sys.executable, __file__, *map(str, arguments)], env={**env, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    limit = threading.Timer(900, lambda: [process.kill() for process in processes])
    limit.start()
    try:
        if sum(process.wait() != 0 for process in processes):
            raise SystemExit("a rank has failed")
        return json.loads(Path(folder, "found").read_text())
    finally:
        limit.cancel()
        shutil.rmtree(folder)
        for left in Path("/dev/shm").glob(f"hyperpodrun-state-*{os.path.basename(folder)}*"):
            shutil.rmtree(left)


def main():
    """The table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="0.25,1", help="GiB")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--restore-only", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("work", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        import torch

        torch.set_num_threads(1)
        kind, *numbers = options.work
        found = {"restores": restores, "marks": marks, "steps": steps}[kind](*map(int, numbers))
        if RANK == WORLD - 1:
            Path(OUT, "found").write_text(json.dumps(found))
        return
    results = {}

    def show(name, found):
        results[name] = found
        print(name, *(f"  {key:24} {value:10.3f}" for key, value in found.items()), sep="\n", flush=True)

    for ranks in map(int, options.ranks.split(",")):
        for size in map(float, options.sizes.split(",")):
            found = job(ranks, "restores", int(size * 2**30), options.rounds)
            times = {name: value for name, value in found.items() if name != "peak MiB"}
            ratios = {f"x {name}": times[name] / times["restore"] for name in times if name != "restore"}
            show(f"restore {size:g} GiB, {ranks} ranks", found | ratios)
    if not options.restore_only:
        show("update, 2 ranks", job(2, "marks"))
        show("step, 2 ranks", job(2, "steps"))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
