"""Process groups of unmodified scripts whose store is the agent: no rank is special, nothing stale is left."""

import os
import signal
from pathlib import Path

import pytest

from hyperpodrun.agent.workers import environment

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


def test_groups_form_in_the_way_of_large_worlds(launch) -> None:
    run = launch(
        "--nproc-per-node=4", "--max-restarts=1",
        script=GROUP + """
        for turn in range(2):
            dist.init_process_group("gloo")
            half = dist.new_group([0, 1])
            pair = torch.ones(1)
            if RANK < 2: dist.all_reduce(pair, group=half)
            tell(f"sum{turn}", value=total(), pair=pair.item())
            dist.barrier()
            dist.destroy_process_group()
        if ATTEMPT == 0 and RANK == 0: os.kill(os.getpid(), signal.SIGKILL)
        """.replace("\n        ", "\n"),
        env=environment.FOR_MANY_RANKS,
    )  # fmt: skip
    assert run.code() == 0, run.story()
    for turn in range(2):
        rows = run.notes(f"sum{turn}", generation=1)
        assert [(row["value"], row["pair"]) for row in rows] == [(4.0, 2.0)] * 2 + [(4.0, 1.0)] * 2, run.story()


FACTS = """
from hyperpodrun import rootless
facts = rootless.job_facts()
"""


def test_facts_outlive_the_world_and_the_agent(launch) -> None:
    run = launch(
        "--nproc-per-node=2", "--max-restarts=3",
        script=FACTS + """
        tell("found", facts=dict(facts))
        meet("read")
        if RANK == 1: facts["step"] = facts.get("step", 0) + 1
        if RANK == 1: facts["checkpoints"] = [f"step-{facts['step']}", {"whole": True}]
        meet("set")
        tell("seen", facts=dict(facts))
        if ATTEMPT == 0 and RANK == 0: sys.exit(3)
        wait_for(f"go{ATTEMPT}")
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    run.until_told("seen", 2, generation=1)
    os.kill(run.agent(), 9)
    run.until_told("seen", 2, attempt=2)
    for attempt in range(1, 4):
        (run.folder / f"go{attempt}").touch()
    assert run.code() == 0, run.story()
    shown = [[row["facts"] for row in run.notes("found", attempt=attempt)] for attempt in range(3)]
    after = [{"step": n, "checkpoints": [f"step-{n}", {"whole": True}]} for n in (1, 2)]
    assert shown == [[{}, {}], [after[0]] * 2, [after[1]] * 2], run.story()
    assert len({row["facts"]["step"] for row in run.notes("seen", attempt=0)}) == 1


def test_facts_behave_as_a_dictionary_of_limited_size(launch) -> None:
    run = launch(
        "--nproc-per-node=1",
        script=FACTS + """
        facts["a"], facts["ü"] = 1, None
        del facts["a"]
        tell("facts", names=list(facts), there="a" in facts, none=facts["ü"], shown=repr(facts))
        for change in (lambda: facts["gone"], lambda: facts.pop("gone"), lambda: facts.update(big="x" * 70000),
                       lambda: facts.update(odd=object()), lambda: facts.__setitem__(7, 7), lambda: rootless.data_address(1)):
            try:
                change()
            except (KeyError, ValueError, TypeError, LookupError) as error:
                count = len([1 for name in os.listdir(FOLDER) if name.startswith("error")])
                tell(f"error{count}", text=f"{type(error).__name__} {error}")
        tell("after", names=list(facts))
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    assert run.code() == 0, run.story()
    assert [(row["names"], row["there"], row["none"]) for row in run.notes("facts")] == [(["ü"], False, None)]
    texts = [run.notes(f"error{n}")[0]["text"] for n in range(6)]
    assert [text.split()[0] for text in texts] == ["KeyError", "KeyError", "ValueError", "TypeError", "TypeError", "LookupError"]
    assert "the limit is 65536" in texts[2] and "the world has 1" in texts[5]
    assert run.notes("after")[0]["names"] == ["ü"]


def test_facts_and_data_addresses_are_the_same_on_every_node_also_when_one_is_lost(nodes) -> None:
    nodes.contacts(0, 1, 2)
    nodes.start_all(
        "--nnodes=2:3", "--nproc-per-node=2", "--max-restarts=3",
        script=FACTS + """
        import socket
        addresses = [rootless.data_address(rank) for rank in range(WORLD)]
        held = socket.create_server(addresses[RANK])  # ours, and nobody else's
        meet("bound")
        others = [socket.create_connection(address).getpeername()[1] for address in addresses]
        tell("found", facts=dict(facts), addresses=addresses)
        meet("read")
        if RANK == WORLD - 1: facts["committed"] = [GENERATION, WORLD]
        meet("set")
        tell("up", facts=dict(facts))
        wait_for("finish")
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    rows = nodes.up(6)
    generation = rows[0]["generation"]
    assert [row["facts"] for row in rows] == [{"committed": [generation, 6]}] * 6
    run = nodes.runs[0]
    addresses = [row["addresses"] for row in run.notes("found", generation=generation)]
    assert addresses == [addresses[0]] * 6 and len({tuple(address) for address in addresses[0]}) == 6
    lost = nodes.runs[2]
    for pid in sorted({*lost.family(), lost.pid}):  # the host dies: keeper first or last, nothing says goodbye
        os.kill(pid, signal.SIGKILL)
    later = run.until_told("up", 4, world=4)
    found = run.notes("found", world=4)
    assert [row["facts"] for row in found] == [{"committed": [generation, 6]}] * 4, nodes.story()
    assert [row["facts"] for row in later] == [{"committed": [later[0]["generation"], 4]}] * 4
    assert len({tuple(map(tuple, row["addresses"])) for row in found}) == 1 and len(found[0]["addresses"]) == 4
    (run.folder / "finish").touch()
    assert [nodes.runs[index].code() for index in (0, 1)] == [0, 0], nodes.story()
