"""Process groups of unmodified scripts whose store is the agent: no rank is special, nothing stale is left."""

import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.torch]

GROUP = """
import torch
import torch.distributed as dist
torch.set_num_threads(1)
def threads():
    return [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
def total():
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()
"""


def listens(port: int) -> list[int]:
    """Pids of processes that listen on this TCP port."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if any(os.readlink(f"/proc/{entry}/fd/{fd}") in inodes for fd in os.listdir(f"/proc/{entry}/fd")):
                found.add(int(entry))
        except OSError:
            continue
    return sorted(found)


def test_a_rank_is_killed_and_the_next_world_forms_with_no_server_in_any_rank(launch) -> None:
    run = launch(
        "--nproc-per-node=4", "--max-restarts=1",
        script=GROUP + """
        dist.init_process_group("gloo")
        tell("sum", value=total(), servers=[t for t in threads() if t.startswith("pt_tcpstore")], port=int(os.environ["MASTER_PORT"]))
        if ATTEMPT == 0:
            if RANK == 0:
                while len(told("sum")) < WORLD: time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            total()
        wait_for("finish")
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    rows = run.until_told("sum", 4, generation=1)
    agent = run.agent()
    assert listens(rows[0]["port"]) == [agent], "the store's port is not the agent's alone"
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert {row["value"] for row in run.notes("sum")} == {4.0}
    assert [row["servers"] for row in run.notes("sum")] == [[]] * 8


def test_a_group_is_made_again_in_one_generation_though_the_old_one_is_still_held(launch) -> None:
    run = launch(
        "--nproc-per-node=2",
        script=GROUP + """
        held = []
        for turn in range(4):
            dist.init_process_group("gloo")
            held.append((dist.distributed_c10d._get_default_store(), dist.new_group([0, 1])) if turn % 2 else None)
            tell(f"sum{turn}", value=total())
            if turn % 2 and RANK == 1: time.sleep(0.2)  # the other one is back first
            dist.destroy_process_group()
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert [row["value"] for turn in range(4) for row in run.notes(f"sum{turn}")] == [2.0] * 8


def test_who_waits_for_a_key_of_a_failed_rank_is_freed_at_once(launch) -> None:
    run = launch(
        "--nproc-per-node=2", "--shutdown-timeout=20",
        script=GROUP + """
        from datetime import timedelta
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, False)
        signal.signal(signal.SIGTERM, lambda *_: tell("asked"))  # Python code, deaf while C++ waits
        if RANK == 0:
            store.wait(["up"])
            sys.exit(7)
        store.set("up", b"")
        try:
            store.wait(["never"], timedelta(seconds=300))
        except dist.DistError as error:
            tell("freed", error=type(error).__name__)
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert run.code() == 7, run.story()
    assert [row["error"] for row in run.notes("freed")] == ["DistStoreError"], run.story()


def test_rank_0_opens_the_store_where_the_user_says_so(launch) -> None:
    run = launch(
        "--nproc-per-node=2",
        script=GROUP + """
        dist.init_process_group("gloo")
        tell("sum", value=total(), servers=[t for t in threads() if t.startswith("pt_tcpstore")])
        dist.barrier()
        """.replace("\n        ", "\n"),
        env={"HPCT_USE_ROOTLESS": "0"},
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert [bool(row["servers"]) for row in run.notes("sum")] == [True, False]


def test_a_rank_that_would_open_the_store_itself_finds_the_agents(launch) -> None:
    run = launch(
        "--nproc-per-node=2",
        script=GROUP + """
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), WORLD, RANK == 0)
        tell("sum", value=store.add("n", 1), servers=[t for t in threads() if t.startswith("pt_tcpstore")])
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert sorted((row["value"], row["servers"]) for row in run.notes("sum")) == [(1, []), (2, [])]


def test_a_script_that_listens_on_the_port_itself_is_told_what_to_do(launch) -> None:
    run = launch(
        "--nproc-per-node=1", "--max-restarts=1",
        script="""
        import socket
        port = int(os.environ["MASTER_PORT"])
        try:
            socket.create_server(("", port))
        except OSError as error:
            raise OSError(f"port {port}: {error}")
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert run.code() == 1, run.story()
    assert "another port" in run.err and "HPCT_USE_ROOTLESS=0" in run.err, run.story()
    assert "0 of 1 restarts left" in run.err, run.story()


def test_nodes_share_one_store(nodes) -> None:
    nodes.contacts(0, 1)
    nodes.start_all(
        "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1",
        script=GROUP + """
        dist.init_process_group("gloo")
        tell("sum", value=total())
        if ATTEMPT == 0 and RANK == 0:
            while len(told("sum")) < WORLD: time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        total()
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert nodes.codes() == [0, 0], nodes.story()
    rows = [row for run in list(nodes.runs.values())[:1] for row in run.notes("sum")]
    assert sorted((row["generation"], row["value"]) for row in rows) == [(0, 4.0)] * 4 + [(1, 4.0)] * 4
