"""A damaged transfer is never loaded, whichever way it went; what is held is not given up before everybody has everything."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from gloo_job import run as run_gloo
from test_state import JOB

from hyperpodrun.agent.wire import node_state

FAULTS = r"""
import ctypes, errno, gc
from contextlib import contextmanager
from hyperpodrun.recovery import bygroup, near, pace, parts, restoring, shard, transfer
from hyperpodrun.recovery.parts import RecoveryError


@contextmanager
def patched(where, name, value):
    before = getattr(where, name)
    setattr(where, name, value)
    try: yield
    finally: setattr(where, name, before)


def closed(): return patched(near, "_readv", lambda *_: (ctypes.set_errno(errno.EPERM), -1)[1])


def others_memory():
    "While this rank reads it the holder lets go of its memory."
    read = near.read
    def changed(pid, there, here):
        read(pid, there, here)
        if len(here) > 1 or here[0][1] != transfer.TOKEN_BYTES: started.append(1)
        elif started: ctypes.c_ubyte.from_address(here[0][0]).value ^= 4
    started = []
    return patched(near, "read", changed)


@contextmanager
def flipped_sends():
    "What this rank sends has one wrong bit, and its memory cannot be read."
    send = transfer.send_views
    def flip(connection, views):
        copies = [bytearray(view) for view in views]
        copies[0][0] ^= 4
        send(connection, [memoryview(copy) for copy in copies])
    with patched(transfer, "send_views", flip), patched(transfer.Server, "_process", lambda self: transfer.Refused("closed")): yield


def sometimes(): return patched(pace.Pace, "every", lambda self: 3)  # versions after steps 0, 3, ...


@contextmanager
def by_group(flip=False):
    "The CPU is a device that the group serves; what this rank receives first has one wrong bit."
    batch, rounds = dist.batch_isend_irecv, []
    def counted(operations):
        for work in batch(operations): work.wait()
        if flip and not rounds: operations[0].tensor.view(-1)[0] ^= 4
        rounds.append(1)
        return []
    with patched(bygroup, "BY_SOCKET", set()), patched(dist, "batch_isend_irecv", counted): yield
    print("told rounds", len(rounds), flush=True)


@contextmanager
def nothing(): yield


def count():
    "Models that are there without the garbage collector's help: that of the last life, which is remembered."
    models = sum(type(thing) is nn.Sequential for thing in gc.get_objects())
    gc.enable()
    print("told", "one model" if models == 1 else f"LEAK: {models} models", flush=True)


def live(): return hash(shard.pack(shard.of(memory.of("default").parts)))


@contextmanager
def again():
    "The function uses the same objects each time."
    made = build()
    with patched(sys.modules["__main__"], "build", lambda: made): yield made[0]


def behind():
    "Rank 0 is told to leave before it changes anything in step 5, which the others commit."
    swap = RecoverableState._swap
    def swapped(self, step):
        swap(self, step)
        if (rank, step) == (0, 5): raise RuntimeError("swapped")
    return patched(RecoverableState, "_swap", swapped)


def second_fault():
    def fault(self, made): raise RuntimeError(f"second fault after step {made.step} was fetched")
    with patched(restoring.Restoring, "_take_over", fault):
        try: life(8, 9)
        except RuntimeError as error: print("told", error, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def refused():
    "Nothing is left of what is needed: no objects that are half filled are trained."
    try: life(8, 9, copies=1)
    except RecoveryError as error: print("told", error, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def interrupted():
    "A second fault, just before what was fetched would be taken for good, leaves everything that was held."
    before = rank < 2 and live()
    def fault(self, made): raise RuntimeError(f"second fault after step {made.step} was fetched")
    with patched(restoring.Restoring, "_take_over", fault):
        try: life(8, 9)
        except RuntimeError as error: print("told", error, flush=True)
    if rank < 2: print("told", "unharmed" if live() == before else "HARMED", flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""

SCENARIOS: dict[str, tuple[str, str, int, list[str], list[str]]] = {
    # name: what happens before the last life, what is broken in it, where it begins, where each rank's state comes from, what is told
    "undisturbed": ("", "nothing()", 0, ["fresh"] * 3, []),
    "memory is read": ("life(0, 4)\nif rank == 1: forget()", "nothing()", 5, ["own", "peer", "own"], []),
    "memory is let go of": (
        "life(0, 4)\nif rank == 1: forget()",
        "others_memory()",
        5,
        ["own", "peer", "own"],
        ["rank 1 passes over rank 0 (live)", "it let go of its memory while that was read"],
    ),
    "memory is closed": (
        "life(0, 4)\nif rank == 1: forget()",
        "closed()",
        5,
        ["own", "peer", "own"],
        ["rank 1 gets the state through sockets, memory of rank 0 is closed: Operation not permitted"],
    ),
    "a stream is damaged": (
        "life(0, 4, copies=1)\nif rank == 2: forget()",
        "flipped_sends() if rank == 0 else nothing()",
        5,
        ["own", "own", "peer"],
        ["rank 2 passes over rank 0 (live)", "arrived damaged (checksum)"],
    ),
    "all streams are damaged": (
        "with sometimes(): life(0, 4)\nif rank == 2: forget()",
        "flipped_sends()",
        4,
        ["shm"] * 3,
        [
            "rank 2 passes over rank 0 (live)",
            "rank 2 passes over rank 1 (live)",
            "get the state after step 3 from shared memory",
        ],
    ),
    "all is damaged and there is nothing else": (
        "life(0, 4, copies=1)\nif rank == 2: forget()\nwith flipped_sends(): refused()",
        "nothing()",
        5,
        ["own", "own", "peer"],
        ["what was to be restored is damaged, and the new objects with it"],
    ),
    "by the group": ("life(0, 4, copies=1)\nif rank: forget()", "by_group()", 5, ["own", "peer", "peer"], ["rounds 1"]),
    "by the group, damaged": (
        "life(0, 4, copies=1)\nif rank == 2: forget()",
        "by_group(rank == 2)",
        5,
        ["own", "own", "peer"],
        ["rank 2 passes over rank 1: 'model' arrived damaged (checksum)", "rounds 1"],
    ),
    "by the group, damaged, from the only one who has it": (
        "life(0, 4, copies=1)\nif rank: forget()\nwith by_group(rank == 1): refused()",
        "nothing()",
        5,
        ["own", "peer", "peer"],
        ["rank 1 passes over rank 0: 'model' arrived damaged (checksum)", "what was to be restored is damaged"],
    ),
    "objects are used again": ("with again():\n life(0, 3)\n life(1, 4)", "nothing()", 5, ["own"] * 3, []),
    "objects are used again and were written to": (
        "with again() as model, sometimes():\n life(0, 3)\n if rank == 0: nn.init.zeros_(model[0].weight)\n del model\n life(1, 4)",
        "nothing()",
        5,
        ["own"] * 3,
        ["the objects of the run before are used again, and were written to", "rank 0 gets the state after step 3"],
    ),
    "objects are used again, a second fault comes when they are half another step's": (
        "with again(), sometimes():\n with behind(): life(0, 5, 'swapped' * (rank == 0))\n second_fault()\nif rank: forget()",
        "nothing()",
        4,
        ["shm"] * 3,
        ["second fault after step 5 was fetched"],
    ),
    "objects are used again and nothing is held": (
        "with again():\n life(0, 5, 'torn', copies=1)\n refused()",
        "nothing()",
        0,
        ["fresh"] * 3,
        ["have been trained already"],
    ),
    "earlier objects go at once": (
        "gc.collect(); gc.disable()\nlife(0, 2)\nlife(1, 4)\ncount()",
        "nothing()",
        5,
        ["own"] * 3,
        ["one model"],
    ),
    "a plan has failed": (
        "with sometimes():\n life(0, 4)\n if rank == 2: forget()\n with flipped_sends(): interrupted()",
        "nothing()",
        5,
        ["own", "own", "peer"],
        ["second fault after step 3 was fetched", "unharmed"],
    ),
}

RUN = """
for number, (name, text, broken) in enumerate(json.loads(sys.argv[1])):
    job(f"{number}")
    print("scenario", name, flush=True)
    exec(text)
    with eval(broken): print("end", life(9, 9), flush=True)
    forget()
"""

Outcome = dict[str, list[tuple[int, str, str, str]]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """(step, source, end, all that was said) of each rank by scenario, all run one after another by the same three processes."""
    folder = tmp_path_factory.mktemp(f"jobs-{os.getpid()}")  # names of jobs are made of it
    work = [(name, before, broken) for name, (before, broken, *_) in SCENARIOS.items()]
    try:
        yield _told(run_gloo(folder, JOB + FAULTS + RUN, 3, json.dumps(work)))
    finally:
        for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
            shutil.rmtree(path)


def _told(said: list[str]) -> Outcome:
    found: Outcome = {name: [] for name in SCENARIOS}
    for text in said:
        for part in text.split("scenario ")[1:]:
            name, step, source = part.splitlines()[0], -1, ""
            for line in part.splitlines():
                match line.split(" ", 1):
                    case "restored", rest:
                        step, source = int(rest.split()[0]), rest.split()[1]
                    case "end", end:
                        found[name].append((step, source, end, part))
    return found


@pytest.mark.torch
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_is_damaged_is_had_from_elsewhere(outcome: Outcome, name: str) -> None:
    _, _, step, sources, told = SCENARIOS[name]
    assert [end for _, _, end, _ in outcome[name]] == [outcome["undisturbed"][rank][2] for rank in range(3)]
    assert [at for at, *_ in outcome[name]] == [step] * 3
    assert [source for _, source, *_ in outcome[name]] == sources
    said = "".join(part for *_, part in outcome[name])
    assert all(text in said for text in told), said
    assert "HARMED" not in said and "LEAK" not in said
    if not told:
        assert "passes over" not in said and "sockets" not in said
