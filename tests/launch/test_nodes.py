"""Jobs of several nodes: real agents on this host, each on a port of its own."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hyperpodrun.agent import vote_file

pytestmark = pytest.mark.processes

ENV = "MASTER_ADDR MASTER_PORT GROUP_RANK GROUP_WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE HYPERPODRUN_RANK0_ADDR"
WORK = f"""
tell("up", **{{name: os.environ[name] for name in {ENV.split()!r}}})
while len(told("up")) < WORLD: time.sleep(0.01)
wait_for("finish")
"""


def finish(folder: Path) -> None:
    (folder / "finish").touch()


def test_three_nodes_are_one_world_and_end_together(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    nodes.start_all("--nnodes=3", "--nproc-per-node=2", script=WORK)
    rows = nodes.up(6)
    assert sorted(row["rank"] for row in rows) == list(range(6))
    for row in rows:
        assert row["rank"] == 2 * int(row["GROUP_RANK"]) + int(row["LOCAL_RANK"]), "ranks of a node are no block"
        assert (row["world"], row["GROUP_WORLD_SIZE"], row["LOCAL_WORLD_SIZE"]) == (6, "3", "2")
    assert len({(row["GROUP_RANK"], row["MASTER_PORT"]) for row in rows}) == 3, "one door a node, for all its ranks"
    assert {row["MASTER_ADDR"] for row in rows} == {"127.0.0.1"} and len({row["HYPERPODRUN_RANK0_ADDR"] for row in rows}) == 1
    began_s = time.monotonic()
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()
    assert time.monotonic() - began_s < 4, "an exit barrier"
    nodes.nothing_left()


def test_failure_anywhere_restarts_the_world_once_and_everyone_counts_the_same(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all(
        "--nnodes=2", "--nproc-per-node=2", "--max-restarts=2",
        script=WORK.replace("wait_for", "if ATTEMPT < 2 and RANK == 3: sys.exit(9)\nwait_for"),
        env={"HPCT_USE_ROOTLESS": "0"},
    )  # fmt: skip
    first, last = nodes.up(4, generation=0), nodes.up(4, generation=2)
    assert [row["attempt"] for row in last] == [2] * 4
    stores = [{(row["MASTER_ADDR"], row["MASTER_PORT"]) for row in rows} for rows in (first, last)]
    assert len(stores[0]) == len(stores[1]) == 1 and stores[0] != stores[1], "one store a world, a fresh one each time"
    assert nodes.world(first) == nodes.world(last), "ranks moved between nodes"
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()
    assert sorted({row["generation"] for row in nodes.up(12)}) == [0, 1, 2]
    nodes.nothing_left()


def test_spent_budget_ends_the_job_with_the_first_failing_ranks_code_everywhere(nodes) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all(
        "--nnodes=3", "--max-restarts=1",
        script=WORK.replace("wait_for", "if RANK == 1:\n    print('the last words', file=sys.stderr)\n    sys.exit(5)\nwait_for"),
    )  # fmt: skip
    rows = nodes.up(6)
    assert nodes.codes() == [5, 5, 5], nodes.story()
    assert {row["attempt"] for row in rows} == {0, 1}
    sides = nodes.world(nodes.up(3, attempt=1))
    for index, run in enumerate(runs):
        assert "rank 1 " in run.err, f"node {index} does not name the culprit{nodes.story()}"
        full = run.err.count("the last words")
        assert (full > 0) == (str(index) in (sides[0], sides[1])), f"node {index} of {sides}: {full}{nodes.story()}"
    nodes.nothing_left()


def test_failures_of_one_moment_cost_one_restart(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    nodes.start_all(
        "--nnodes=3", "--nproc-per-node=2", "--max-restarts=1",
        script=WORK.replace("wait_for", "meet('doomed')\nif ATTEMPT == 0: sys.exit(3 + RANK)\nwait_for"),
    )  # fmt: skip
    nodes.up(6, attempt=1)
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()


def test_killed_agent_costs_its_node_nothing_but_a_restart_of_the_world(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", script=WORK)
    rows = nodes.up(2, generation=0)
    for index in (1, 0):
        began_s, last = time.monotonic(), rows[0]["generation"]
        os.kill(runs[index].agent(), signal.SIGKILL)
        again = nodes.up_after(2, last)
        print("agent of node", index, "killed, world again after", time.monotonic() - began_s)
        # An agent that comes back after more than a second finds the other one, which needs it, asking all slots (A11).
        assert again[0]["generation"] in (last + 1, 1 << 20), nodes.story()
        assert nodes.world(again) == nodes.world(rows)
        assert {row["attempt"] for row in again} == {0}, "the death of an agent is no failure of the training"
        rows = again
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()
    nodes.nothing_left()


@pytest.mark.parametrize("rank", [0, 1])
def test_workers_that_fail_because_an_agent_was_killed_cost_no_restart(nodes, tmp_path: Path, rank: int) -> None:
    """As in a collective: the ranks of the killed agent's node are gone, so the connections of all others break."""
    nodes.contacts(0, 1)
    script = f"""
    import socket
    if GENERATION == 0 and RANK == {rank}:
        server = socket.create_server(("127.0.0.1", 0))
        tell("port", port=server.getsockname()[1])
        peer, _ = server.accept()
        tell("up")
        signal.pause()
    if GENERATION == 0:
        while not told("port"): time.sleep(0.01)
        [name] = [name for name in os.listdir(FOLDER) if name.startswith("port.")]
        peer = socket.create_connection(("127.0.0.1", json.load(open(os.path.join(FOLDER, name)))["port"]))
        tell("up")
        peer.recv(1)
        raise ConnectionResetError("Connection reset by peer")
    """
    runs = nodes.start_all("--nnodes=2", "--max-restarts=0", script=textwrap.dedent(script) + WORK)
    before = nodes.world(nodes.up(2, generation=0))
    os.kill(runs[int(before[rank])].agent(), signal.SIGKILL)
    runs[0].until(lambda: {row["rank"] for row in runs[0].notes("up") if row["generation"]} == {0, 1}, "the next world")
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()


def kill_node(run: object) -> None:
    """All processes of a launcher at once, as when its host dies."""
    for pid in [run.pid, *run.family()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    run.process.wait()


def test_lost_node_is_done_without_when_that_is_allowed(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2:3", script=WORK)
    before = nodes.up(3, generation=0)
    victim = next(run for index, run in enumerate(runs) if str(index) == nodes.world(before)[1])
    began_s = time.monotonic()
    kill_node(victim)
    after = nodes.up(2, world=2)
    print("node killed, world again after", time.monotonic() - began_s)
    assert nodes.world(after) == [nodes.world(before)[i] for i in (0, 2)]
    finish(tmp_path)
    assert sorted(nodes.codes()) == [-9, 0, 0], nodes.story()
    for index, run in nodes.runs.items():
        run.nothing_left()
        os.path.exists(vote := vote_path(nodes, index)) and os.unlink(vote)


def vote_path(nodes: object, index: int) -> str:
    return vote_file.path_for(nodes.job, nodes.name(index))


def test_too_few_nodes_hold_and_say_for_whom_until_it_returns(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", script=WORK)
    sides = nodes.world(nodes.up(2, generation=0))
    keeps, leaves = (int(side) for side in sides)
    kill_node(runs[leaves])
    runs[keeps].until(lambda: "waiting for" in runs[keeps].err, "a line that says what it waits for")
    assert nodes.name(leaves) in runs[keeps].err.split("waiting for")[1]
    assert not runs[keeps].notes("up", world=1)
    nodes.start(leaves, "--nnodes=2", script=WORK)
    assert nodes.world(nodes.up(2, generation=1)) == sides
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()


def test_tiebreaks_host_lost_the_other_says_what_it_waits_for(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=1:2", script=WORK)
    leaves, keeps = (int(side) for side in nodes.world(nodes.up(2, generation=0)))
    kill_node(runs[leaves])
    runs[keeps].until(lambda: "waiting for" in runs[keeps].err, "a line that says what it waits for")
    assert nodes.name(leaves) in runs[keeps].err.split("waiting for")[1]
    nodes.start(leaves, "--nnodes=1:2", script=WORK)
    again = {row["generation"] for row in nodes.up(4)} - {0}
    # Which roll call it answers first is chance; a recovery's generations follow all that the lost ones may have used.
    assert again in ({1}, {1 << 20}), nodes.story()
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()


def test_lost_node_may_be_certified_dead(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=1:2", script=WORK)
    leaves, keeps = (int(side) for side in nodes.world(nodes.up(2, generation=0)))
    kill_node(runs[leaves])
    runs[keeps].until(lambda: "hyperpodctl certify-dead" in runs[keeps].err, "word of how to certify the loss")
    assert not runs[keeps].notes("up", world=1)
    command = [sys.executable, "-m", "hyperpodrun.cli.ctl", "certify-dead", nodes.name(leaves)]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    nodes.up(1, world=1)
    finish(tmp_path)
    assert runs[keeps].code() == 0, nodes.story()
    os.unlink(vote_path(nodes, leaves))
    runs[leaves].nothing_left()


def test_one_of_three_goes_on_after_the_loss_of_two_when_it_was_told_to(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=1:3", "--on-quorum-loss=continue:2", script=WORK)
    first, second, keeps = (int(side) for side in nodes.world(nodes.up(3, generation=0)))
    assert all("UNSAFE: should most nodes fall silent" in run.err for run in runs), nodes.story()
    for index in (first, second):
        kill_node(runs[index])
    (alone,) = nodes.up(1, world=1)
    assert alone["side"] == str(keeps)
    said = [line for line in runs[keeps].err.splitlines() if "UNSAFE: nothing was heard of" in line]
    assert len(said) == 1 and nodes.name(first) in said[0] and nodes.name(second) in said[0], nodes.story()
    finish(tmp_path)
    assert runs[keeps].code() == 0, nodes.story()
    for index in (first, second):
        os.unlink(vote_path(nodes, index))


def test_node_that_leaves_in_order_is_done_without(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=1:2", "--nproc-per-node=2", script=WORK)
    leaver = int(nodes.world(nodes.up(4, world=4))[0])
    began_s = time.monotonic()
    os.kill(runs[leaver].pid, signal.SIGTERM)
    assert runs[leaver].code() == 143, nodes.story()
    nodes.up(2, world=2)
    print("left, world again after", time.monotonic() - began_s)
    runs[leaver].nothing_left()
    finish(tmp_path)
    assert runs[1 - leaver].code() == 0, nodes.story()
    nodes.nothing_left()


def test_stop_of_all_at_once_is_prompt_and_leaves_nothing(nodes) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=3", "--max-restarts=3", script=WORK)
    nodes.up(3)
    began_s = time.monotonic()
    for run in runs:
        os.kill(run.pid, signal.SIGTERM)
    assert nodes.codes() == [143, 143, 143], nodes.story()
    assert time.monotonic() - began_s < 3, "they waited for each other's word"
    nodes.nothing_left()


def test_spare_takes_over_the_ranks_of_a_lost_node(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2", "--spares=1", "--nproc-per-node=2", script=WORK)
    before = nodes.world(nodes.up(4, generation=0))
    spare = next(side for side in "012" if side not in before)
    victim = int(before[0])
    kill_node(runs[victim])
    after = nodes.world(nodes.up(4, generation=1))
    assert after == [spare, spare, *before[2:]], "the survivor's ranks moved"
    nodes.start(victim, "--nnodes=2", "--spares=1", "--nproc-per-node=2", script=WORK)
    nodes.runs[victim].until(lambda: "standing by" in nodes.runs[victim].err, "word that the returned node stands by")
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()
    assert {row["generation"] for row in nodes.up(8)} == {0, 1}, "the returning node disturbed the world"
    nodes.nothing_left()


def test_surplus_node_stands_by_and_ends_with_the_others(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", script=WORK)
    nodes.up(2, generation=0)
    extra = nodes.start(2, "--nnodes=2", script=WORK)
    extra.until(lambda: "standing by" in extra.err, "word that it stands by")
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()
    assert {row["generation"] for row in nodes.up(2)} == {0}
    nodes.nothing_left()


def test_node_ranks_are_preferences_that_are_kept(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    for index, rank in ((0, 2), (1, 0), (2, 1)):
        nodes.start(index, "--nnodes=3", f"--node-rank={rank}", script=WORK)
    assert nodes.world(nodes.up(3)) == ["1", "2", "0"]
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()


def test_two_nodes_that_insist_on_one_rank_end_and_are_named(nodes) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", "--node-rank=1", script=WORK)
    assert nodes.codes() == [78, 78], nodes.story()
    for run in runs:
        assert nodes.name(0) in run.err and nodes.name(1) in run.err and "--node-rank" in run.err
        assert "Traceback" not in run.err
    assert not runs[0].notes("up")
    nodes.nothing_left()


@pytest.mark.parametrize("when", ["now", "restart"])
def test_node_that_comes_later_joins(nodes, tmp_path: Path, when: str) -> None:
    nodes.contacts(0)
    options = ("--nnodes=1:2", "--max-restarts=1", f"--elastic-join={when}", "--rdzv-conf=last_call_timeout=0.5")
    script = WORK.replace("wait_for", "if ATTEMPT == 0 and WORLD == 1:\n    wait_for('fail')\n    sys.exit(4)\nwait_for")
    nodes.start(0, *options, script=script)
    nodes.up(1, world=1)
    late = nodes.start(1, *options, script=script)
    if when == "restart":
        late.until(lambda: "standing by" in late.err, "word that it stands by")
        assert not late.notes("up", world=2)
        (tmp_path / "fail").touch()
    nodes.up(2, world=2)
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()
    nodes.nothing_left()


def test_contact_points_may_come_in_any_order(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    for index in (2, 0, 1):
        run = nodes.start(index, "--nnodes=3", script=WORK)
        run.until(run.agent, "its agent")
        if index != 1:
            run.until(lambda run=run: "looking for" in run.err, "word of what it looks for")
    nodes.up(3)
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()


def test_missing_nodes_are_named_when_the_time_is_over(nodes) -> None:
    nodes.contacts(0, 1, 2)
    for index in (0, 1):
        nodes.start(index, "--nnodes=3", "--rdzv-conf=join_timeout=2", script=WORK)
    assert nodes.codes() == [69, 69], nodes.story()
    for run in nodes.runs.values():
        line = next(line for line in run.err.splitlines() if "join_timeout" in line)
        assert nodes.name(2) in line.partition("not reached")[2] and nodes.name(0) not in line.partition("not reached")[2], line
    nodes.nothing_left()


def test_scripts_run_on_each_node(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    pre, post = tmp_path / "pre.sh", tmp_path / "post.sh"
    pre.write_text('echo "pre $SIDE $TORCHELASTIC_RESTART_COUNT" >> order\n')
    post.write_text('echo "post $SIDE" >> order\n')
    nodes.start_all(
        "--nnodes=2", "--max-restarts=1", f"--pre-train-script={pre}", f"--post-train-script={post}",
        script="meet()\nsys.exit(3 if ATTEMPT == 0 and RANK == 1 else 0)",
    )  # fmt: skip
    assert nodes.codes() == [0, 0], nodes.story()
    order = (tmp_path / "order").read_text().splitlines()
    assert sorted(order[:2]) == ["pre 0 0", "pre 1 0"]
    assert sorted(order[2:4]) == ["pre 0 1", "pre 1 1"]
    assert sorted(order[4:]) == ["post 0", "post 1"]


def test_failing_pre_train_script_is_a_failure_of_the_job(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    pre = tmp_path / "pre.sh"
    pre.write_text('[ "$SIDE" = 0 ] || exit 7\nsleep 300\n')
    nodes.start_all("--nnodes=2", f"--pre-train-script={pre}", script="tell('up')")
    assert nodes.codes() == [7, 7], nodes.story()
    assert "pre-train script ended with code 7" in nodes.runs[0].err
    assert not nodes.runs[0].notes("up")
    nodes.nothing_left()


def test_port_of_the_store_taken_in_between_costs_no_restart(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    script = """
    import socket
    if GENERATION < 2 and RANK == 0:
        print(f"port: {os.environ['MASTER_PORT']}, code: -98, name: EADDRINUSE, message: address already in use", file=sys.stderr)
        sys.exit(1)
    if GENERATION < 2:
        signal.pause()
    meet()
    """
    nodes.start_all("--nnodes=2", "--max-restarts=0", script=script, env={"HPCT_USE_ROOTLESS": "0"})
    assert nodes.codes() == [0, 0], nodes.story()
    assert {row["attempt"] for row in nodes.up(2, generation=2)} == {0}


def test_victims_on_other_nodes_are_not_blamed(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    script = """
    import socket
    if RANK == 1:  # dies without a word while the other node's rank is connected to it
        server = socket.create_server(("127.0.0.1", 0))
        tell("port", port=server.getsockname()[1])
        peer, _ = server.accept()
        os.kill(os.getpid(), signal.SIGKILL)
    while not told("port"): time.sleep(0.01)
    [name] = [name for name in os.listdir(FOLDER) if name.startswith("port.")]
    peer = socket.create_connection(("127.0.0.1", json.load(open(os.path.join(FOLDER, name)))["port"]))
    peer.recv(1)
    raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:7777")
    """
    nodes.start_all("--nnodes=2", script=script)
    assert nodes.codes() == [137, 137], nodes.story()
    for run in nodes.runs.values():
        assert "rank 1 " in run.err and "SIGKILL" in run.err
    nodes.nothing_left()


def test_two_nodes_without_given_ports_find_free_ones(nodes, launch, tmp_path: Path) -> None:
    """As torchrun is used by hand: one endpoint for all; the first agent gets its port."""
    port = next(nodes.ports)
    for index in (0, 1):
        nodes.runs[index] = launch(
            "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", f"--job-id={nodes.job}", script=WORK, env={"SIDE": str(index)}
        )
    nodes.up(2)
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()
    nodes.nothing_left()


def test_standalone_is_alone(nodes, launch, tmp_path: Path) -> None:
    run = launch("--standalone", "--nnodes=1:4", script=WORK)
    assert [row["world"] for row in run.until_told("up", 1)] == [1]
    finish(tmp_path)
    assert run.code() == 0, run.story()


def test_stop_of_a_node_that_still_looks_for_the_others(nodes) -> None:
    nodes.contacts(0, 1)
    run = nodes.start(0, "--nnodes=2", script=WORK)
    run.until(lambda: "looking for" in run.err, "word of what it looks for")
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 143, run.story()
    nodes.nothing_left()


def test_killed_keeper_of_one_node_ends_that_node_only(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2:3", script=WORK)
    sides = nodes.world(nodes.up(3, generation=0))
    victim = int(sides[2])
    os.kill(runs[victim].pid, signal.SIGKILL)
    nodes.up(2, world=2)
    runs[victim].nothing_left()
    finish(tmp_path)
    assert sorted(nodes.codes()) == [-9, 0, 0], nodes.story()
    nodes.nothing_left()


def test_many_restarts_leave_no_memory_or_descriptors_behind(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", "--max-restarts=60", script="if ATTEMPT < 60: sys.exit(RANK)\n" + WORK)

    def held(run: object) -> tuple[int, int]:
        agent = run.agent()
        pages = int(Path(f"/proc/{agent}/statm").read_text().split()[1])
        return pages * 4, len(os.listdir(f"/proc/{agent}/fd"))

    runs[0].until(lambda: "restart 10 of 60" in runs[0].err and "restart 10 of 60" in runs[1].err, "the tenth restart")
    before = [held(run) for run in runs]
    nodes.up(2, attempt=60)
    after = [held(run) for run in runs]
    for (kib, fds), (kib_after, fds_after) in zip(before, after, strict=True):
        assert fds_after <= fds + 8, f"descriptors: {before} -> {after}"
        assert kib_after < kib + 4096, f"KiB: {before} -> {after}"
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()


@pytest.mark.torch
def test_gloo_job_on_two_nodes_survives_a_killed_rank(nodes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    tell("up")
    total = torch.ones(1)
    while not os.path.exists(os.path.join(FOLDER, "finish")):
        total.fill_(1)
        dist.all_reduce(total)
        assert total.item() == WORLD
        tell("reduced")
        time.sleep(0.01)
        if ATTEMPT == 0 and RANK == 3 and len(told("reduced")) == WORLD:
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)  # ranks see the file in different rounds
    """
    nodes.contacts(0, 1)
    env = {"HPCT_USE_ROOTLESS": "0", "TORCH_SKIP_TCPSTORE": "0"}
    nodes.start_all("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", script=script, env=env)
    nodes.up(4, attempt=1)
    nodes.runs[0].until_told("reduced", 4, attempt=1)
    for run in nodes.runs.values():
        assert "rank 3 " in run.err and "SIGKILL" in run.err, nodes.story()
    finish(tmp_path)
    nodes.codes()


def test_rank_that_hangs_while_another_node_is_done_is_found(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all(
        "--nnodes=2", "--exit-skew-timeout=1", "--max-restarts=1", script="meet()\nif ATTEMPT == 0 and RANK == 1: signal.pause()"
    )
    assert nodes.codes() == [0, 0], nodes.story()
    assert {row["attempt"] for row in nodes.up(4)} == {0, 1}
    assert "not done 1 s after the first rank" in "".join(run.err for run in nodes.runs.values())


def test_node_whose_agent_dies_again_and_again_leaves_no_vote_behind(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=2:3", script=WORK)
    sides = nodes.world(nodes.up(3, generation=0))
    victim = runs[int(sides[2])]

    def kill() -> bool:
        if victim.process.poll() is None and (
            agents := Path(f"/proc/{victim.pid}/task/{victim.pid}/children").read_text().split()
        ):
            os.kill(int(agents[0]), signal.SIGKILL)
        return victim.process.poll() is not None

    victim.until(kill, "the launcher that gives up")
    assert victim.code() == 70, nodes.story()
    nodes.up(2, world=2)
    finish(tmp_path)
    assert sorted(nodes.codes()) == [0, 0, 70], nodes.story()
    nodes.nothing_left()


def test_all_launchers_lost_and_started_again_are_the_same_job(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1, 2)
    runs = nodes.start_all("--nnodes=3", script=WORK)
    before = nodes.world(nodes.up(3, generation=0))
    for run in runs:
        kill_node(run)
    nodes.start_all("--nnodes=3", script=WORK)
    assert nodes.world(nodes.up(3, generation=1)) == before
    finish(tmp_path)
    assert nodes.codes() == [0, 0, 0], nodes.story()
    nodes.nothing_left()


def test_worlds_that_cost_no_restart_have_log_folders_of_their_own(nodes, tmp_path: Path) -> None:
    nodes.contacts(0)
    options = ("--nnodes=1:2", "--rdzv-conf=last_call_timeout=0.1", f"--log-dir={tmp_path / 'logs'}", "--tee=3")
    script = "print('world of', WORLD, flush=True)\n" + WORK
    nodes.start(0, *options, script=script)
    nodes.up(1, world=1)
    nodes.start(1, *options, script=script)
    nodes.up(2, world=2)
    finish(tmp_path)
    assert nodes.codes() == [0, 0], nodes.story()
    logs = [(path.parts[-3], path.read_text()) for path in (tmp_path / "logs").rglob("stdout.log")]
    assert sorted(logs) == [("attempt_0", "world of 1\n"), ("attempt_0", "world of 2\n"), ("attempt_0_1", "world of 2\n")]


def test_agent_killed_while_it_takes_leave_is_not_started_again(nodes, tmp_path: Path) -> None:
    """An agent takes 50 ms or more to leave; when another one asks the others may be gone, and it would look for them for long."""
    nodes.contacts(0, 1)
    status = tmp_path / "status"
    for index in nodes.listed:
        nodes.start(index, "--nnodes=2", script=WORK, env={"HYPERPODRUN_STATUS_FILE": str(status)} if index == 0 else None)
    nodes.up(2)
    agent = nodes.runs[0].agent()
    finish(tmp_path)
    nodes.runs[0].until(lambda: json.loads(status.read_text())["state"] == "ended", "the end of the job at node 0")
    os.kill(agent, signal.SIGKILL)
    assert nodes.codes() == [0, 0], nodes.story()
    assert "starts again" not in nodes.runs[0].err, nodes.story()
    nodes.nothing_left()


def test_agent_killed_after_the_job_was_over_runs_the_post_train_script_once_more_and_leaves(nodes, tmp_path: Path) -> None:
    post = tmp_path / "post.sh"
    post.write_text(
        f'cd {tmp_path}\necho run >> "posts-$SIDE"\n[ "$SIDE" = 0 ] || [ $(wc -l < "posts-$SIDE") -ge 2 ] || sleep 600\n'
    )
    nodes.contacts(0, 1)
    runs = nodes.start_all("--nnodes=2", f"--post-train-script={post}", script=WORK)
    nodes.up(2)
    finish(tmp_path)
    runs[1].until(lambda: (tmp_path / "posts-1").exists(), "the post-train script")
    assert runs[0].code() == 0, nodes.story()  # nobody is left who could tell that the job is over
    os.kill(runs[1].agent(), signal.SIGKILL)
    assert runs[1].code() == 0, nodes.story()
    assert [len((tmp_path / f"posts-{side}").read_text().split()) for side in (0, 1)] == [1, 2]
    nodes.nothing_left()


def test_votes_of_jobs_that_died_long_ago_are_cleared_away_by_the_next_job(nodes, tmp_path: Path) -> None:
    """Those of this job are not, however old: a launcher that is started again finds its own."""
    old = Path(vote_file.path_for(f"dead-{nodes.job}", "x:1"))
    nodes.contacts(0, 1)
    mine = Path(vote_path(nodes, 0))
    try:
        for path in (old, mine):
            path.write_bytes(b"\xc1")
            os.utime(path, (1, 1))
        runs = nodes.start_all("--nnodes=2", script=WORK)
        nodes.up(2)
        runs[0].until(lambda: not old.exists(), "the old vote's end")
        assert mine.stat().st_mtime > 1
        finish(tmp_path)
        assert nodes.codes() == [0, 0], nodes.story()
    finally:
        old.unlink(missing_ok=True)
