"""Jobs on one node that are brought back inside their processes: every kind of fault, in every phase."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hyperpodrun.agent.workers import stacks

pytestmark = pytest.mark.processes

# work() is the body of the wrapped function, run once all ranks have met in this generation.
WRAPPED = """
import ctypes, threading
from hyperpodrun.inprocess.wrap import HPWrapper
PHASES = {{}}
@HPWrapper({options})
def main(caller=None):
    global RANK, WORLD, ATTEMPT, GENERATION
    RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ATTEMPT, GENERATION = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["HYPERPODRUN_GENERATION"])
    assert (caller.generation, caller.restart_count) == (GENERATION, ATTEMPT)
{before}
    tell("up")
    while len(told("up")) < WORLD: time.sleep(0.005)
{work}
    while not os.path.exists(os.path.join(FOLDER, "finish")):
        caller.ping()
        time.sleep(0.01)
    return RANK
{behind}
print("returned", main(), flush=True)
"""


def script(work: str = "", before: str = "", options: str = "", behind: str = "") -> str:
    def indented(text: str) -> str:
        return "\n".join("    " + line for line in text.splitlines())

    return WRAPPED.format(options=options, before=indented(before), work=indented(work), behind=behind)


def once(fault: str, rank: int = 1, generation: int = 0) -> str:
    return f"if RANK == {rank} and GENERATION == {generation}:\n" + "\n".join("    " + line for line in fault.splitlines())


def pids(run: object, generation: int, world: int = 3) -> dict[int, int]:
    """Rank -> pid of those that have met in this generation."""
    return {row["rank"]: row["pid"] for row in run.until_told("up", world, generation=generation)}


def finish(run: object, generation: int, world: int = 3) -> None:
    """The job goes on to its end; all ranks have seen the same counts."""
    rows = run.notes("up", generation=generation)
    assert {row["attempt"] for row in rows} == {generation} and len(rows) == world, run.story()
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert run.out.count("returned") == world
    run.nothing_left()
    assert os.listdir(run.folder / "tmp") == []


OPTIONS = ("--nproc-per-node=3", "--max-restarts=9", "--inprocess-restart")

STAYS = {
    "exception": "raise ValueError('boom')",
    "exception that except Exception does not catch": "raise BaseException('boom')",
    "assertion": "assert False, 'boom'",
    "memory": "raise MemoryError()",
}
DIES = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(7)",
    "sys.exit": "sys.exit(3)",
    "segmentation fault": "ctypes.string_at(0)",
    "abort": "os.abort()",
}
HANGS = {
    "loop": "while True: sum(range(1000))",
    "sleep": "time.sleep(1e6)",
    "event": "threading.Event().wait()",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@pytest.mark.parametrize("fault", STAYS.values(), ids=STAYS)
def test_exception_costs_no_process(launch: Callable, fault: str) -> None:
    run = launch(*OPTIONS, script=script(once(fault)))
    before, after = pids(run, 0), pids(run, 1)
    assert after == before, "a process was lost"
    finish(run, 1)
    assert "rank 1 " in run.err and "restarting in place (generation 1, 3 processes kept), 8 of 9 restarts left" in run.err
    assert "back after" in run.err


@pytest.mark.parametrize("fault", DIES.values(), ids=DIES)
def test_death_costs_one_process(launch: Callable, fault: str) -> None:
    run = launch(*OPTIONS, script=script(once(fault)))
    before, after = pids(run, 0), pids(run, 1)
    assert {rank for rank in after if after[rank] == before[rank]} == {0, 2}
    finish(run, 1)
    assert "restarting in place (generation 1, 2 processes kept)" in run.err


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
def test_others_hang_when_one_fails(launch: Callable, hang: str) -> None:
    """What the interrupt has to break."""
    run = launch(
        *OPTIONS, script=script("if RANK == 1 and GENERATION == 0: raise ValueError('boom')\nif GENERATION == 0:\n    " + hang)
    )
    before, after = pids(run, 0), pids(run, 1)
    assert after == before
    finish(run, 1)


HOLDS_THE_LOCK = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); ctypes.PyDLL(None).sleep(10**6)"


@pytest.mark.parametrize(
    "stop", ["os.kill(os.getpid(), signal.SIGSTOP)", HOLDS_THE_LOCK], ids=["stopped", "holds the interpreter's lock"]
)
def test_silent_process_is_killed_and_replaced_alone(launch: Callable, stop: str) -> None:
    work = f"""
if GENERATION == 0:
    if RANK == 1:
        tell('still')
        {stop}
    while not told('still'): time.sleep(0.01)
    if RANK == 0: raise ValueError('boom')
"""
    run = launch(*OPTIONS, "--abort-timeout=2", script=script(work))
    before, after = pids(run, 0), pids(run, 1)
    assert {rank for rank in after if after[rank] == before[rank]} == {0, 2}
    finish(run, 1)
    assert "rank 1 (pid" in run.err and "stacks follow" in run.err


@pytest.mark.parametrize(
    ("hang", "kept"),
    [("time.sleep(1e6)", {0, 1, 2}), ("os.kill(os.getpid(), signal.SIGSTOP)", {0, 2}), (HOLDS_THE_LOCK, {0, 2})],
    ids=["sleep", "stopped", "holds the interpreter's lock"],
)
def test_hang_is_seen_and_healed(launch: Callable, hang: str, kept: set[int]) -> None:
    work = f"""
if GENERATION == 0:
    if RANK == 1:
        {hang}
    for _ in range(20):
        caller.ping()
        time.sleep(0.01)
"""
    run = launch(*OPTIONS, "--hang-timeout=4", "--abort-timeout=2", script=script(work))
    before, after = pids(run, 0), pids(run, 1)
    assert {rank for rank in after if after[rank] == before[rank]} == kept
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert "rank 1 (local rank 1, pid" in run.err.partition("was hung")[0], run.story()
    run.nothing_left()


def test_rank_that_hangs_and_lives_prints_its_stacks_by_itself(launch: Callable) -> None:
    """Looked at from a signal handler, a process can die of it."""
    work = "signal.signal(signal.SIGRTMAX - 2, lambda *_: os._exit(9))\n" + once("time.sleep(1e6)")
    run = launch(*OPTIONS, "--hang-timeout=4", script=script(work))
    assert pids(run, 0) == pids(run, 1), run.story()
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert "rank 1 (pid" in run.err and "in main" in run.err.partition("stacks follow")[2], run.story()


@pytest.mark.parametrize("fault", ["raise ValueError('boom')", "os._exit(7)"], ids=["exception", "exit"])
def test_fault_before_anybody_has_met(launch: Callable, fault: str) -> None:
    run = launch(*OPTIONS, script=script(before=once(fault)))
    pids(run, 1)
    finish(run, 1)


@pytest.mark.parametrize("part", ["abort", "finalize", "health_check"])
@pytest.mark.parametrize(
    "fault", ["raise ValueError('in the hook')", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["exception", "SIGKILL"]
)
def test_fault_on_the_way_to_the_barrier(launch: Callable, part: str, fault: str) -> None:
    head = f"""
def hook():
    if int(os.environ["RANK"]) == 2 and int(os.environ["HYPERPODRUN_GENERATION"]) == 0: {fault}
"""
    run = launch(*OPTIONS, script=head + script(once("raise ValueError('boom')"), options=f"{part}=hook"))
    before, after = pids(run, 0), pids(run, 1)
    assert {rank for rank in after if after[rank] == before[rank]} == {0, 1}
    finish(run, 1)
    assert "boom" in run.err.partition("restarting in place")[0], "the first failure is the one to tell"


def test_two_at_once(launch: Callable) -> None:
    run = launch(*OPTIONS, script=script("if GENERATION == 0: time.sleep(600)"))
    before = pids(run, 0)
    for rank in (1, 2):
        os.kill(before[rank], signal.SIGKILL)
    after = pids(run, 1)
    assert {rank for rank in after if after[rank] == before[rank]} == {0}
    finish(run, 1)


def test_faults_one_after_another(launch: Callable) -> None:
    work = "from hyperpodrun.inprocess.progress import note_step\nnote_step(GENERATION)\n"
    run = launch(*OPTIONS, script=script(work + "if GENERATION < 5 and GENERATION % 3 == RANK: raise ValueError('again')"))
    seen = [pids(run, generation) for generation in range(6)]
    assert seen == [seen[0]] * 6
    finish(run, 5)


def test_one_returns_while_another_fails(launch: Callable) -> None:
    run = launch(
        *OPTIONS,
        script=script(
            "if RANK == 0 and GENERATION == 0: return 'too early'\ntime.sleep(0.2)\n" + once("raise ValueError('boom')")
        ),
    )
    before, after = pids(run, 0), pids(run, 1)
    assert after == before
    finish(run, 1)
    assert "too early" not in run.out


def test_failure_behind_the_function_restarts_processes(launch: Callable) -> None:
    run = launch(
        *OPTIONS,
        script=script(
            "return 1",
            behind="import atexit\nif ATTEMPT == 0: atexit.register(lambda: os._exit(9) if RANK == 1 else time.sleep(60))",
        ),
    )
    before, after = pids(run, 0), pids(run, 1)
    assert not set(before.values()) & set(after.values())
    assert "restarting all ranks" in run.err


def test_descendants_of_the_dead_end_and_those_of_the_living_stay(launch: Callable) -> None:
    work = """
if GENERATION == 0:
    child = subprocess.Popen(["sleep", "300"])
    daemon = subprocess.Popen(["setsid", "-f", "sleep", "300"])
    tell("child", child=child.pid)
    while len(told("child")) < WORLD: time.sleep(0.01)
    if RANK == 1: os.kill(os.getpid(), signal.SIGKILL)
"""
    run = launch(*OPTIONS, script=script(work))
    pids(run, 1)
    children = {row["rank"]: row["child"] for row in run.notes("child")}
    sleeping = [pid for pid in run.family() if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep")]
    assert children[1] not in sleeping
    assert children[0] in sleeping and children[2] in sleeping
    assert len(sleeping) == 4, "a daemon of the dead lives, or one of the living was ended"
    finish(run, 1)


def test_budget_spent_ends_the_job_with_the_culprits_report(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--inprocess-restart",
        script=script("if RANK == 1: raise ValueError(f'boom {GENERATION}')"),
    )
    assert run.code() == 1, run.story()
    assert "boom 1" in run.err and "the one restart is spent" in run.err
    assert run.err.count("Traceback") <= 2, "one for each failure"
    run.nothing_left()


@pytest.mark.parametrize(("leaving", "code"), [("sys.exit(5)", 5), ("raise KeyboardInterrupt", 130)])
def test_a_rank_that_exits_is_the_first_failure_with_its_own_code(launch: Callable, leaving: str, code: int) -> None:
    """It is slow to go, and what it takes with it makes others fail before it is gone."""
    head = "import atexit\nif RANK == 1: atexit.register(lambda: (tell('going'), wait_for('finish')))"
    work = once(leaving) + "\nwhile not any(name.startswith('going.') for name in os.listdir(FOLDER)): time.sleep(0.01)"
    run = launch(
        "--nproc-per-node=3",
        "--inprocess-restart",
        "--max-restarts=0",
        script=head + script(work + "\nraise ConnectionError('peer lost')"),
    )
    run.until_told("going", 1)
    (run.folder / "finish").touch()
    assert run.code() == code, run.story()
    assert "first failure: rank 1 " in run.err, run.story()


def test_stop_during_a_recall(launch: Callable) -> None:
    still = "if RANK == 1 and GENERATION == 0:\n    tell('still')\n    ctypes.PyDLL(None).sleep(10**6)\n"
    work = still + "while not told('still'): time.sleep(0.01)\nif GENERATION == 0 and RANK == 0: raise ValueError('boom')"
    run = launch(*OPTIONS, "--shutdown-timeout=1", script=script(work))
    run.until(lambda: "waiting for rank" in run.err, "word of whom the recall waits for")
    os.kill(run.pid, signal.SIGTERM)
    assert run.code() == 143, run.story()
    run.nothing_left()


def test_without_the_option_processes_are_restarted(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=3",
        "--max-restarts=1",
        script=script(once("raise ValueError('boom')")).replace("    assert (caller", "    # "),
    )
    before, after = pids(run, 0), pids(run, 1)
    assert not set(before.values()) & set(after.values())


def test_without_the_option_a_rank_that_pings_no_more_is_ended(launch: Callable) -> None:
    work = once("caller.ping()\ntime.sleep(1000)")
    text = script(work, options="heartbeat_timeout=1").replace("    assert (caller", "    # ")
    run = launch("--nproc-per-node=3", "--max-restarts=1", script=text)
    pids(run, 1)
    finish(run, 1)
    assert "no ping() for " in run.err and "(heartbeat_timeout=1)" in run.err, run.story()


def test_log_files_go_on(launch: Callable, tmp_path: Path) -> None:
    printed = (
        "print('generation', GENERATION, flush=True)\ntell('printed')\nwhile len(told('printed')) < WORLD: time.sleep(0.005)\n"
    )
    work = printed + once("os._exit(7)")
    run = launch(*OPTIONS, f"--log-dir={tmp_path / 'logs'}", "--tee=3", script=script(work))
    pids(run, 1)
    finish(run, 1)
    for path in (tmp_path / "logs").rglob("stdout.log"):
        assert path.parts[-3] == "attempt_0"
        assert path.read_text().splitlines()[:2] == ["generation 0", "generation 1"], path


GLOO = """
import torch, torch.distributed as dist
"""
REDUCE = """
dist.init_process_group("gloo")
ones = torch.ones(1)
for step in range(30):
    ones.fill_(1)
    dist.all_reduce(ones)
    assert ones.item() == WORLD
    if GENERATION == 0 and RANK == 1 and step == {step}:
        {fault}
dist.destroy_process_group()
tell("reduced")
while len(told("reduced")) < WORLD: time.sleep(0.005)
"""
COLLECTIVE = {
    "exception": ("raise ValueError('boom')", 7, 3),
    "exception in the first step": ("raise ValueError('boom')", 0, 3),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 7, 2),
    "hang in a collective": ("dist.recv(torch.zeros(1), 2, tag=99)", 7, 3),
    "hang before the collective": ("time.sleep(1e6)", 7, 3),
}


@pytest.mark.torch
@pytest.mark.parametrize(("fault", "step", "kept"), COLLECTIVE.values(), ids=COLLECTIVE)
def test_gloo_group_is_left_and_made_again(launch: Callable, fault: str, step: int, kept: int) -> None:
    pytest.importorskip("torch")
    run = launch(*OPTIONS, "--hang-timeout=2", script=GLOO + script(REDUCE.format(fault=fault, step=step)))
    before, after = pids(run, 0), pids(run, 1)
    run.until_told("reduced", 3, generation=1)
    assert sum(after[rank] == before[rank] for rank in after) == kept, run.story()
    finish(run, 1)
    assert "rank 1 (local rank 1" in run.err.partition("restarting in place")[0], run.story()


@pytest.mark.torch
def test_fault_inside_the_first_init_frees_those_who_wait_in_it(launch: Callable) -> None:
    pytest.importorskip("torch")
    before_init = "if GENERATION == 0 and RANK == 1:\n    time.sleep(0.3)\n    raise ValueError('boom')\n"
    work = before_init + REDUCE.format(fault="pass", step=7)
    run = launch(*OPTIONS, script=GLOO + script(work))
    assert pids(run, 0) == pids(run, 1)
    run.until_told("reduced", 3, generation=1)
    finish(run, 1)
    assert "ValueError: boom" in run.err.partition("restarting in place")[0]


GROUPS = """
dist.init_process_group("gloo")
pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
for step in range(6):
    for pair in pairs:
        if RANK in dist.distributed_c10d._world.pg_group_ranks.get(pair, ()):
            dist.all_reduce(torch.ones(1), group=pair)
    if GENERATION == 0 and RANK == 1 and step == 4: time.sleep(1e6)
dist.destroy_process_group()
tell("reduced")
while len(told("reduced")) < WORLD: time.sleep(0.005)
"""


@pytest.mark.torch
def test_rank_that_hangs_in_more_groups_than_the_others_is_named(launch: Callable) -> None:
    pytest.importorskip("torch")
    run = launch(*OPTIONS, "--hang-timeout=2", script=GLOO + script(GROUPS))
    assert pids(run, 0) == pids(run, 1), run.story()
    run.until_told("reduced", 3, generation=1)
    finish(run, 1)
    assert "rank 1 (local rank 1" in run.err.partition("restarting in place")[0], run.story()
    shown = run.err.partition("stacks follow")[0].rpartition("hyperpodrun: ")[2]
    assert "rank 1 (pid" in shown and "rank 0" not in shown and "behind the others" in shown, run.story()


def test_hang_timeout_without_a_wrapped_function_says_that_nobody_is_watched(launch: Callable) -> None:
    run = launch(
        "--nproc-per-node=2",
        "--hang-timeout=1",
        script="finish = os.path.join(FOLDER, 'finish')\nwhile not os.path.exists(finish): time.sleep(0.01)",
    )
    run.until(lambda: "no rank here has come to a function under @HPWrapper in 5 s" in run.err, "the word that nobody is watched")
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert run.err.count("watches nobody") == 1


CHILD = """
from hyperpodrun.inprocess.wrap import HPWrapper
@HPWrapper
def evaluate(caller=None): print("evaluated", flush=True)
evaluate()
"""


def test_a_wrapped_function_in_a_child_of_a_rank_is_a_plain_call(launch: Callable) -> None:
    """It would wait for an order to begin that nobody ever gives."""
    work = f"if RANK == 1: subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"
    run = launch(*OPTIONS, script=script(work + "\n" + once("raise ValueError('boom')", rank=0)))
    before, after = pids(run, 0), pids(run, 1)
    assert after == before
    finish(run, 1)
    assert "evaluated" in run.out


def test_a_child_that_spoke_first_gives_way_to_its_rank(launch: Callable) -> None:
    start = f"""
if RANK == 1:
    child = subprocess.Popen([sys.executable, '-c', {CHILD!r}], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    child.stdout.readline()
"""
    end = "\nif RANK == 1: print('said', child.communicate()[1].splitlines()[-1], flush=True)"
    run = launch(*OPTIONS, script=start + script() + end)
    pids(run, 0)
    finish(run, 0)
    assert "has closed the link of this process" in run.out, run.story()
    assert "it spoke for its rank" in run.err


@pytest.mark.skipif(not stacks._may_trace("/proc"), reason="this user may not look into other processes")
def test_c_frames_of_a_rank_that_is_not_freed_are_printed_where_py_spy_is_there(launch: Callable, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    spy = folder / "py-spy"
    spy.write_text('#!/bin/sh\necho "C frames: $*"\n')
    spy.chmod(0o755)
    work = f"""
if GENERATION == 0:
    if RANK == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        tell('still')
        {HOLDS_THE_LOCK}
    while not told('still'): time.sleep(0.01)
    if RANK == 0: raise ValueError('boom')
"""
    run = launch(*OPTIONS, "--abort-timeout=2", script=script(work), env={"PATH": f"{folder}:{os.environ['PATH']}"})
    stuck = pids(run, 0)[1]
    pids(run, 1)
    finish(run, 1)
    said = run.out + run.err
    assert f"C frames: dump --native --pid {stuck}" in said, run.story()


def test_a_planted_fault_that_has_not_struck_is_told(launch: Callable) -> None:
    orders = "exception@rank=1,phase=return;exception@rank=1,phase=nowhere;exception@rank=7"
    run = launch(*OPTIONS, script=script("return 1"), env={"HYPERPODRUN_INJECT": orders})
    assert run.code() == 0, run.story()
    assert "'exception@rank=1,phase=nowhere' did not strike" in run.err
    assert "'exception@rank=7' can strike nobody, the ranks are 0 to 2" in run.err
    assert "phase=return' did not" not in run.err
    run.nothing_left()
