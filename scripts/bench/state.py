"""What it takes to bring a training state back from a peer's memory, and what keeping it safe costs a step.

    .venv/bin/python scripts/bench/state.py [--sizes 0.25,1,4] [--ranks 2,4] [--rounds 3] [--torchft-python PATH] [--json FILE]
    .venv/bin/python scripts/bench/state.py --quick

Restore: one rank of a gloo job has lost everything and gets the state of its peers into the memory of its new objects, whose pages are
there (in place): "near" when all ranks are of one node, "far" through sockets when each is a node of its own. The whole of `restore()`
counts, and its phases are shown, and processor time, which another load on the machine does not change much. In the same run, in
turn: as many bytes over one plain loopback socket into such memory; torch's DCP loading the same state in one process, from a folder
on disk (page cache warm) and from /dev/shm; and, with an interpreter that has torchft, its HTTP transport between two processes, with
the copy into the model. What does not fit into memory is left out.

Memory: what `restore()` took at its peak beyond what the process had before, on the rank that was lost and on one that was not.

Steps: the update mark alone (random numbers from a counter, nothing private), the exchange of private state (random states, a
sampler), and a training step with copies=2 of states without replicas against one with copies=1, over several versions: wall time, and
processor time of the whole process, which another load on the machine does not change. Medians; the best of each as well, which other
load changes less.
"""

import argparse
import json
import os
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


def group(number, node=RANK):
    """A new world."""
    import torch.distributed as dist

    from hyperpodrun.agent.wire import names

    os.environ[names.GENERATION] = str(number)
    os.environ[names.JOB_ID] = f"bench-state-{os.path.basename(OUT)}-{number}"
    os.environ[names.NODE] = f"node{node}"
    dist.init_process_group("gloo", init_method=f"file://{OUT}/meet{number}", rank=RANK, world_size=WORLD)


def model_of(nbytes):
    """Parameters of that many bytes, their pages touched."""
    import torch

    leaf_bytes = min(LEAF_BYTES, nbytes)
    return torch.nn.ParameterList([torch.full((leaf_bytes // 4096, 1024), 0.5) for _ in range(nbytes // leaf_bytes)])


def memory_kib(name, reset=False):
    """A line of /proc/self/status. `reset`: let the peak begin here."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def restored(number, node, nbytes):
    """One entry of the function: its model, its state, and what `restore` took."""
    import torch
    import torch.distributed as dist

    from hyperpodrun.recovery import RecoverableState

    group(number, node)
    model = model_of(nbytes)
    state = RecoverableState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), rng="counter", copies=1)
    dist.barrier()
    before = memory_kib("VmRSS", reset=True)
    began, used = time.perf_counter(), time.process_time()
    state.restore()
    took = {"": time.perf_counter() - began, " processor": time.process_time() - used}
    took |= {f" {phase}": seconds for phase, seconds in state.took_s.items()} | {" MiB": (memory_kib("VmHWM") - before) / 1024}
    return model, state, took


def restores(nbytes, rounds):
    """Seconds that the lost rank takes, by what it does."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from hyperpodrun.recovery import memory

    took = {}
    lost = WORLD - 1
    folders = {"DCP disk": f"{OUT}/dcp", "DCP /dev/shm": f"/dev/shm/bench-state-{os.path.basename(OUT)}"}

    def note(name, seconds):
        took.setdefault(name, []).append(seconds)

    for turn in range(rounds):
        for life, way in enumerate(("", "near", "far")):
            model, state, times = restored(3 * turn + life, 0 if way == "near" else RANK, nbytes)
            if way:
                for name, value in times.items():
                    note(way + name, value)
                assert state.restored_from == ("peer" if lost == RANK else "own"), state.why
            with state.update(3 * turn + life):
                pass
            if lost == RANK:
                memory.forget("default")
            dist.barrier()
            if life:
                raw(nbytes, note, lost, model)
                if lost == RANK:
                    for name, folder in folders.items():
                        if not os.path.exists(folder):
                            dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
                        began, used = time.perf_counter(), time.process_time()
                        dcp.load({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
                        note(name, time.perf_counter() - began)
                        note(f"{name} processor", time.process_time() - used)
            dist.barrier()
            dist.destroy_process_group()
            del model, state
        memory.forget("default")
    found = {name: statistics.median(times) for name, times in took.items()}
    found |= {f"{name}, best": min(took[name]) for name in ("near", "far", "raw socket", *folders) if name in took}
    if RANK == 0:
        kept = ("near MiB", "far MiB", "near processor", "far processor", "raw socket processor")
        Path(OUT, "kept").write_text(json.dumps({f"{name}, rank 0": found[name] for name in kept}))
    return found


def raw(nbytes, note, lost, model):
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
                used = time.process_time()
                for view in views:
                    peer.sendall(view)
                peer.recv(1)
                note("raw socket processor", time.process_time() - used)
    else:
        dist.barrier()
        if lost == RANK:
            with socket.create_connection(("127.0.0.1", int(Path(port).read_text()))) as peer:
                began, used = time.perf_counter(), time.process_time()
                for view in views:
                    at = 0
                    while at < len(view):
                        at += peer.recv_into(view[at:])
                note("raw socket", time.perf_counter() - began)
                note("raw socket processor", time.process_time() - used)
                peer.sendall(b"1")


def torchft(role, nbytes, rounds):
    """The same bytes by torchft's HTTP transport, between two processes of an interpreter that has it."""
    from datetime import timedelta

    from torchft.checkpointing.http_transport import HTTPTransport

    limit = timedelta(seconds=300)
    model = [tensor.detach() for tensor in model_of(nbytes)]
    transport = HTTPTransport(limit, num_chunks=0)
    if role == "send":
        for turn in range(rounds):
            transport.send_checkpoint([1], turn, dict(enumerate(model)), limit)
            print(transport.metadata(), flush=True)
            sys.stdin.readline()
            transport.disallow_checkpoint()
        transport.shutdown(wait=False)
        os._exit(0)
    times = []
    for turn in range(rounds):
        address = sys.stdin.readline().strip()
        began = time.perf_counter()
        for place, tensor in transport.recv_checkpoint(0, address, turn, limit).items():
            model[place].copy_(tensor)
        times.append(time.perf_counter() - began)
        print("done", flush=True)
    print(statistics.median(times), flush=True)
    os._exit(0)


def torchft_seconds(python, nbytes, rounds):
    """Its median; what it is about its failure otherwise."""
    ends = {
        role: subprocess.Popen(
            [python, __file__, "torchft", role, str(nbytes), str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for role in ("send", "receive")
    }
    limit = threading.Timer(600, lambda: [end.kill() for end in ends.values()])
    limit.start()
    try:
        for _ in range(rounds):
            ends["receive"].stdin.write(ends["send"].stdout.readline())
            ends["receive"].stdin.flush()
            ends["send"].stdin.write(ends["receive"].stdout.readline())
            ends["send"].stdin.flush()
        return float(ends["receive"].stdout.readline())
    except (ValueError, BrokenPipeError):
        raise SystemExit(f"torchft failed under {python}") from None
    finally:
        limit.cancel()
        for end in ends.values():
            end.kill()
            end.wait()


def marks(count):
    """Microseconds of an update block, alone and with the exchange."""
    import torch
    import torch.distributed as dist

    from hyperpodrun.recovery import RecoverableState, memory

    found = {}
    for number, (name, options) in enumerate(
        {"mark us": {"rng": "counter"}, "exchange us": {"rng": True, "sampler": Sampler()}}.items()
    ):
        group(100 + number)
        torch.manual_seed(0)  # replicas are equal
        model = torch.nn.Linear(64, 64)
        state = RecoverableState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), copies=1, **options)
        state.restore()
        times = []
        for step in range(count):
            began = time.perf_counter()
            with state.update(step):
                pass
            times.append(time.perf_counter() - began)
        found[name] = statistics.median(times[count // 6 :]) * 1e6
        memory.forget("default")
        dist.barrier()
        dist.destroy_process_group()
    return found


def steps(turns, count, width):
    """A training step of states without replicas, with copies=2 against copies=1."""
    import torch
    import torch.distributed as dist

    from hyperpodrun.recovery import RecoverableState, memory

    wall, cpu, every = {1: [], 2: []}, {1: [], 2: []}, 0
    for turn in range(turns):
        copies = 1 + turn % 2
        group(200 + turn)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters())
        state = RecoverableState(model=model, optimizer=optimizer, rng="counter", copies=copies, replica_group=[RANK])
        state.restore()
        x = torch.randn(64, width)
        for step in range(20 + count):
            if step == 20:
                began, used = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            with state.update(step):
                optimizer.step()
        dist.barrier()
        wall[copies].append((time.perf_counter() - began) / count)
        cpu[copies].append((time.process_time() - used) / count)
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
        kept = Path(folder, "kept")
        return json.loads(Path(folder, "found").read_text()) | (json.loads(kept.read_text()) if kept.exists() else {})
    finally:
        limit.cancel()
        shutil.rmtree(folder)
        shutil.rmtree(f"/dev/shm/bench-state-{os.path.basename(folder)}", ignore_errors=True)
        for left in Path("/dev/shm").glob(f"hyperpodrun-state-*{os.path.basename(folder)}*"):
            shutil.rmtree(left)


def fits(nbytes, ranks):
    """Is there memory for it? Each rank has a model, those that were not lost an earlier one too, and /dev/shm has one."""
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return 2 * ranks * nbytes < 0.9 * 1024 * int(free.split()[1])


def main():
    """The table and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help="GiB (0.25,1,4)")
    parser.add_argument("--ranks", help="how many (2,4)")
    parser.add_argument("--rounds", type=int, help="of each (3)")
    parser.add_argument("--quick", action="store_true", help="small and once: does it run?")
    parser.add_argument("--restore-only", action="store_true")
    parser.add_argument("--torchft-python", metavar="PATH", help="an interpreter that has torchft")
    parser.add_argument("--json")
    parser.add_argument("work", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    sizes = [float(size) for size in (options.sizes or ("0.03125" if options.quick else "0.25,1,4")).split(",")]
    numbers = [int(number) for number in (options.ranks or ("2" if options.quick else "2,4")).split(",")]
    rounds = options.rounds or (1 if options.quick else 3)
    results = {}

    def show(name, found):
        results[name] = found
        print(name, *(f"  {key:28} {value:10.3f}" for key, value in found.items()), sep="\n", flush=True)

    peer = {}
    for ranks, size in ((ranks, size) for ranks in numbers for size in sizes):
        nbytes = int(size * 2**30)
        if not fits(nbytes, ranks):
            print(f"restore {size:g} GiB, {ranks} ranks: left out, there is not enough memory free", flush=True)
            continue
        found = job(ranks, "restores", nbytes, rounds)
        if options.torchft_python:
            found["torchft HTTP"] = peer[size] = peer.get(size) or torchft_seconds(options.torchft_python, nbytes, rounds)
        others = [name for name in ("raw socket", "DCP disk", "DCP /dev/shm", "torchft HTTP") if name in found]
        ratios = {f"{way}: x {name}": found[name] / found[way] for way in ("near", "far") for name in others}
        bests = [(way, name) for way in ("near", "far") for name in others if f"{name}, best" in found]
        ratios |= {f"{way}: x {name}, best": found[f"{name}, best"] / found[f"{way}, best"] for way, name in bests}
        show(f"restore {size:g} GiB, {ranks} ranks", found | ratios)
    if not options.restore_only:
        show("update, 2 ranks", job(2, "marks", 120 if options.quick else 600))
        show("step, 2 ranks", job(2, "steps", *((2, 20, 128) if options.quick else (4, 300, 1024))))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


def work(kind, *arguments):
    """What one process of a measurement does."""
    import torch

    torch.set_num_threads(1)
    if kind == "torchft":
        role, *numbers = arguments
        torchft(role, *map(int, numbers))
        return
    found = {"restores": restores, "marks": marks, "steps": steps}[kind](*map(int, arguments))
    if RANK == WORLD - 1:
        Path(OUT, "found").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
