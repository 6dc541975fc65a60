"""Real gloo groups: what blocks in them is freed, exactly their connections are ended, nothing grows."""

import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_agent import FakeAgent

from hyperpodrun.agent.wire import link
from hyperpodrun.inprocess import groups

pytestmark = [pytest.mark.processes, pytest.mark.torch]

HEAD = """
import os, socket, sys, threading, time
import torch, torch.distributed as dist
from hyperpodrun.inprocess.wrap import *
def say(*words): print(*words, flush=True)
"""


def script(body: str, head: str = "") -> str:
    """A wrapped main in which g is the generation, r the rank, x a tensor; it starts with a group and an all-reduce."""
    return (
        HEAD
        + textwrap.dedent(head)
        + "\n@HPWrapper\ndef main(caller=None):\n    g, r, n = caller.generation, caller.rank, caller.world_size\n"
        + "    x = torch.ones(1)\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + '\nsay("value", main())\n'
    )


UP = """
dist.init_process_group("gloo")
dist.all_reduce(x)
assert x.item() == n
say("up", g)
"""
DOWN = """
dist.barrier()
dist.destroy_process_group()
return g
"""


def faults(agent: FakeAgent) -> list[link.Fault]:
    return [message for _, message in agent.history if isinstance(message, link.Fault)]


def ended_well(agent: FakeAgent, generation: int) -> None:
    for rank in range(agent.ranks):
        assert agent.lines(rank)[-1] == f"value {generation}", agent.story()


def test_faults_of_each_kind_in_one_job(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(3, store=True)
    body = """
    if g == 1 and r == 2: os._exit(7)
    if g == 2 and r == 1: os.kill(os.getpid(), 9)
    if g == 3: raise ValueError  # all at once
    if g == 4 and r == 0: raise ValueError
    if g < 5: dist.all_reduce(x)
    """
    agent.start(script("if g == 0 and r == 0: raise ValueError('before the group')\n" + UP + textwrap.dedent(body) + DOWN))
    kept = agent.workers[0].pid
    agent.play()
    ended_well(agent, 5)
    assert agent.workers[0].pid == kept
    assert len(agent.all_pids) == 5  # three, and two in the place of dead ones


HANGS = {
    "recv": "dist.recv(x, 1, tag=99)",
    "all_reduce": "dist.all_reduce(x)",
    "barrier": "dist.barrier()",
    "async wait": "dist.all_reduce(x, async_op=True).wait()",
    "async outstanding": "work = dist.all_reduce(x, async_op=True)\n    time.sleep(1000)",
    "another group": "dist.all_reduce(x, group=group)",
    "object": "dist.broadcast_object_list([1], 1)",
    "monitored": "dist.monitored_barrier()",
    "the store": "dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), is_master=False).wait(['never'])",
}


@pytest.mark.parametrize("what", list(HANGS))
def test_a_hang_in_a_collective_is_freed(agent_of: Callable[..., FakeAgent], what: str) -> None:
    agent = agent_of(2, store=True)
    group = 'group = dist.new_group([0, 1], backend="gloo")\n'
    body = f"if g == 0 and r == 0:\n    say('hangs')\n    {HANGS[what]}\nif g == 0:\n    time.sleep(1000)\n"
    agent.start(script(UP + group + body + DOWN))
    agent.play(until_generation=0)
    agent.await_line("hangs")
    agent.interrupt()
    agent.ending = 0
    agent.play()
    ended_well(agent, 1)
    assert not faults(agent), agent.story()
    assert len(agent.all_pids) == 2, agent.story()


def test_a_group_that_is_never_made_is_left(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(2, store=True)
    late = "if g == 0 and r == 1:\n    time.sleep(1000)\n"
    agent.start(script(late + "say('makes', g)\n" + UP + DOWN))
    agent.play(until_generation=0)
    agent.await_line("makes")
    agent.interrupt()
    agent.ending = 0
    agent.play()
    ended_well(agent, 1)


def test_a_peer_that_dies_between_its_address_and_its_connection_is_not_waited_for(agent_of: Callable[..., FakeAgent]) -> None:
    """Rank 1's process plays four ranks that publish their addresses and go no further: some pairs of rank 0 wait for connections."""
    agent = agent_of(2, store=True)
    head = """
    import datetime
    inner = None
    class Halting(dist.Store):
        def set(self, key, value): inner.set(key, value)
        def add(self, key, number): return inner.add(key, number)
        def check(self, keys): return inner.check(keys)
        def wait(self, *_):
            say("published")
            threading.Event().wait()
        get = multi_get = wait
    """
    body = """
    if g == 0:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
        if r == 0:
            os.environ["WORLD_SIZE"] = "5"
            dist.init_process_group("gloo", store=store, rank=0, world_size=5)
            threading.Event().wait()
        inner = store
        for phantom in range(1, 5):
            halting = Halting()
            kept = dist.PrefixStore("0//cpu/", halting)
            made = lambda rank, kept=kept, halting=halting: dist.ProcessGroupGloo(kept, rank, 5, datetime.timedelta(seconds=60))
            threading.Thread(target=made, args=(phantom,), daemon=True).start()
        threading.Event().wait()
    """
    agent.start(script(textwrap.dedent(body).replace("inner = store", "globals()['inner'] = store") + UP + DOWN, head=head))
    agent.play(0)
    agent.await_line("published", 1, 4)
    waits = Path(f"/proc/{agent.workers[0].pid}/wchan")
    # "0" where the kernel does not tell.
    agent.until_polled(lambda: waits.read_text().startswith(("futex", "0")), "rank 0 to wait for a connection, not for the store")
    agent.kill(1)
    agent.play()
    ended_well(agent, 1)
    assert len(set(agent.all_pids)) == 3, "rank 0 keeps its process"


@pytest.mark.parametrize("told_by", ["its thread", "its contents"])
def test_connections_of_the_user_survive(agent_of: Callable[..., FakeAgent], told_by: str) -> None:
    agent = agent_of(2, store=True)
    head = """
    def pair():
        server = socket.create_server(("127.0.0.1", 0))
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
        return ours, theirs, server
    import selectors
    before = pair()
    pairs = [before]
    loop = selectors.EpollSelector()
    def works(ours, theirs, server):
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        theirs.sendall(b"y")
        assert ours.recv(1) == b"y"
        again = socket.create_connection(server.getsockname())
        again.close()
        server.accept()[0].close()
    """
    body = """
    if g < 3:
        pairs.append(pair())
        for one in pairs[-1]: loop.register(one, selectors.EVENT_READ)
    for one in pairs: works(*one)
    if g == 0:
        say("hangs")
        if r == 0: dist.recv(x, 1, tag=99)
        else: time.sleep(1000)
    if g in (1, 2) and r == g - 1: raise ValueError
    if g < 3: dist.all_reduce(x)
    """
    if told_by == "its contents":  # as where threads have no names
        head = "\n    from hyperpodrun.inprocess import sockets\n    sockets._LOOP_THREAD = 'unknown'" + head
    agent.start(script("if g < 3: pairs.append(pair())\n" + UP + textwrap.dedent(body) + DOWN, head))
    agent.play(until_generation=0)
    agent.await_line("hangs", 0)
    agent.await_line("hangs", 1)
    agent.interrupt()
    agent.ending = 0
    agent.play()
    ended_well(agent, 3)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nothing_grows(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(2, store=True)
    body = """
    loader = torch.utils.data.DataLoader([1, 2, 3, 4], num_workers=1 if g % 20 == 0 else 0)
    next(iter(loader))
    big = torch.ones(1 << 20)
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    say("counted", g, files, threads, allocated() >> 20, len(gc.get_objects()), len(os.listdir("/dev/shm")))
    if g < 200:
        if r == g % 2: raise ValueError
        dist.all_reduce(x)
    below = inspect.getclosurevars(sys.excepthook).nonlocals["old_hook"]
    say("hooked", sys.excepthook.__name__, below.__name__)
    """
    head = """
    import ctypes, gc, inspect
    import torch.utils.data
    class Heap(ctypes.Structure):  # mallinfo2(3)
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    def allocated():
        heap = mallinfo2()
        return heap.uordblks + heap.hblkhd
    """
    agent.start(script(UP + textwrap.dedent(body) + DOWN, head=textwrap.dedent(head)))
    agent.play(patience_s=250)
    ended_well(agent, 200)
    for rank in range(2):
        *_, hooks, _ = agent.lines(rank)
        assert hooks == "hooked _distributed_excepthook excepthook"  # torch's, once
        rows = [line.split()[1:] for line in agent.lines(rank) if line.startswith("counted")]
        whole = [
            row for row in rows if len(row) == 6 and all(map(str.isdigit, row))
        ]  # it may be told of the other's fault in mid-line
        counted = [list(map(int, row)) for row in whole]
        assert counted[-1][0] == 200 and len(counted) > 100  # or before it counts
        early, late = counted[30:50], counted[-20:]
        # What grows has grown in most of the late ones; a single one may still see the end of the groups before it. Objects: what a
        # rare way (a loader's worker that has to be killed) makes once is some 200; three a restart would be 450.
        for column, slack in ((1, 0), (2, 0), (3, 1), (4, 400)):
            usual = statistics.median(one[column] for one in late)
            assert usual <= max(one[column] for one in early) + slack, (column, early, late)


def test_nccl_groups_are_aborted_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    c10d = pytest.importorskip("torch.distributed.distributed_c10d")
    from hyperpodrun.inprocess import groups

    together = threading.Barrier(3)  # broken unless all three are inside at once
    aborted = []

    class FakeNCCL:
        def abort(self) -> None:
            together.wait(20)
            aborted.append(self)
            raise RuntimeError("was aborted already")

    class FakeGroup:
        def __init__(self) -> None:
            self.backend = FakeNCCL()

        def _get_backend(self, device: object) -> FakeNCCL:
            return self.backend

    made = [FakeGroup() for _ in range(3)]
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", FakeNCCL, raising=False)
    for group in made:
        c10d._world.pg_map[group] = ("nccl", None)
    c10d._world.group_count = 5
    groups.forget(10.0)
    assert len(aborted) == 3
    assert not c10d._world.pg_map
    assert c10d._world.group_count == 0


def test_dtensors_of_a_process_that_is_another_rank_now_lie_where_that_is() -> None:
    """Meshes of the same ranks are equal to torch, whoever made them, and it remembers results with the first."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    for rank in (0, 1):
        groups.forget_meshes()
        mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("renumbered",), _init_backend=False, _rank=rank)
        made = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False, shape=torch.Size((2,)), stride=(1,))
        assert made.detach().device_mesh.get_coordinate() == (rank,)
