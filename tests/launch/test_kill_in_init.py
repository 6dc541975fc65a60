"""An agent is killed while process groups form: whoever waits for its keys gets an error, and the next world forms (MESH S5).

The moment is a number of requests: the ranks of the victim's node talk to their agent through a relay of their own, which counts
what passes and kills the agent at the chosen one. HYPERPODRUN_KILL_SEEDS names further moments.
"""

import os
import random

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.torch, pytest.mark.slow]

SEEDS = [int(seed) for seed in os.environ.get("HYPERPODRUN_KILL_SEEDS", "1").split()]
REQUESTS = 24
"""A rank's part in an init of three takes about so many."""

SCRIPT = """
import socket, threading
import torch
import torch.distributed as dist
torch.set_num_threads(1)
FIRST = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0 and GENERATION == 0
VICTIM = FIRST and os.environ["SIDE"] == os.environ["VICTIM"]
passed = 0

def strike():
    while len(told("waits") - {str(RANK)}) < WORLD - 1:  # one that is not deaf yet would be ended without a word
        time.sleep(0.01)
    tell("struck", after=passed, when=time.monotonic())
    os.kill(os.getppid(), signal.SIGKILL)

def pump(source, sink, counts):
    global passed
    try:
        while data := source.recv(1 << 16):
            if counts:
                passed += 1
                if passed == int(os.environ["POINT"]):
                    strike()
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def relay(door):
    server = socket.create_server(("127.0.0.1", 0))
    os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    def accept():
        while True:
            client, _ = server.accept()
            agent = socket.create_connection(door)
            threading.Thread(target=pump, args=(client, agent, True), daemon=True).start()
            threading.Thread(target=pump, args=(agent, client, False), daemon=True).start()
    threading.Thread(target=accept, daemon=True).start()

if VICTIM:
    relay((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, wait_for_workers=False)
def bystander():
    # One more thread of every rank waits for a key that never comes.
    tell("waits")
    try:
        store.wait(["never"])
    except dist.DistError as error:
        tell("freed", error=type(error).__name__, when=time.monotonic())
if FIRST:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # deaf: only the store's word reaches it
    threading.Thread(target=bystander, daemon=True).start()
try:
    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.barrier()
except (dist.DistError, RuntimeError) as error:
    tell("failed", error=type(error).__name__, text=str(error)[:300], when=time.monotonic())
    time.sleep(600)  # the launcher's word is awaited, as by a rank that is deaf
if VICTIM:
    strike()
if FIRST:
    time.sleep(600)
tell("sum", value=value.item(), when=time.monotonic())
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_any_agent_may_be_killed_at_any_moment_of_init(nodes, victim, seed) -> None:
    point = random.Random(f"{seed} {victim}").randrange(1, REQUESTS)
    print(f"victim {victim}, seed {seed}: request {point}")
    nodes.contacts(0, 1, 2)
    nodes.start_all(
        "--nnodes=3", "--nproc-per-node=1", "--max-restarts=3", script=SCRIPT,
        env={"VICTIM": str(victim), "POINT": str(point)},
    )  # fmt: skip
    run = nodes.runs[0]
    try:
        run.until_told("sum", 3)
    except AssertionError:
        raise AssertionError(f"no world after the kill{nodes.story()}") from None
    assert nodes.codes() == [0, 0, 0], nodes.story()
    (struck,) = run.notes("struck")
    sums = run.notes("sum")
    assert [(row["rank"], row["value"]) for row in sorted(sums, key=lambda row: row["rank"])] == [(n, 3.0) for n in range(3)]
    assert len({row["generation"] for row in sums}) == 1 and sums[0]["generation"] > 0
    freed = [row for row in run.notes("freed", generation=0) if row["side"] != str(victim)]
    assert {row["error"] for row in freed} == {"DistStoreError"} and len(freed) == 2, nodes.story()
    assert all(struck["when"] < row["when"] < min(one["when"] for one in sums) for row in freed)
    for side in {0, 1, 2} - {victim}:
        told = nodes.runs[side].err
        assert f"world {sums[0]['generation']} on 3 nodes" in told and nodes.name(victim) in told, nodes.story()
