"""The wrapper from outside: real processes against a scripted agent. No process groups here (test_groups.py)."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
from fake_agent import FakeAgent

from hyperpodrun.agent.wire import link

pytestmark = pytest.mark.processes


def script(body: str, options: str = "", head: str = "", tail: str = 'say("value", main())') -> str:
    """A wrapped `main(caller)` with this body; g is its generation."""
    return (
        "import os, sys, threading, time\n"
        "from hyperpodrun.inprocess.wrap import *\n"
        "def say(*words): print(*words, flush=True)\n"
        + textwrap.dedent(head)
        + f"\n@HPWrapper({options})\ndef main(caller=None):\n    g = caller.generation\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\n"
        + textwrap.dedent(tail)
        + "\n"
    )


def round_trip(agent: FakeAgent) -> None:
    """From the barrier into the next generation."""
    agent.until(lambda: agent.workers[0].barrier == agent.generation, "the barrier")
    agent.enter("start" if agent.generation < 0 else "inplace")


def finish(agent: FakeAgent, value: str | None = None) -> None:
    """The function returns, is released, and the process ends well."""
    agent.until(lambda: agent.workers[0].returned == agent.generation, "Returned")
    agent.release()
    assert agent.code() == 0, agent.story()
    if value is not None:
        assert agent.lines()[-1] == f"value {value}"


def test_a_function_with_arguments_and_a_value(agent: FakeAgent) -> None:
    agent.start(
        """
from hyperpodrun.inprocess.wrap import HPWrapper
class Job:
    @HPWrapper()
    def run(self, first, *rest, key, caller=None, **more):
        return (self.name, first, rest, key, more, caller.rank, caller.world_size, caller.generation, caller.restart_mode)
job = Job()
job.name = "job"
print("value", job.run(1, 2, 3, key="k", other=4), flush=True)
"""
    )
    round_trip(agent)
    finish(agent, "('job', 1, (2, 3), 'k', {'other': 4}, 0, 1, 0, 'start')")


def test_an_exception_is_told_and_the_function_runs_again(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g < 2:
                raise ValueError(f"number {g}")
            return (g, os.getpid(), caller.restart_count, caller.restart_mode, caller.restart_reason, os.environ.get("EXTRA"))
            """
        )
    )
    round_trip(agent)
    fault = agent.await_message(link.Fault)
    assert (fault.generation, fault.kind, fault.headline, fault.rung) == (0, "ValueError", "ValueError: number 0", "")
    assert 'raise ValueError(f"number {g}")' in fault.text or "in main" in fault.text
    round_trip(agent)
    agent.until(lambda: agent.workers[0].barrier == 1, "the barrier")
    agent.generation += 1
    agent.restarts += 1
    entry = agent.entry(0, "inplace", "because")
    agent.send(0, link.Enter(entry.generation, entry.restart_count, {**entry.env, "EXTRA": "new"}, entry.mode, entry.reason))
    finish(agent, f"(2, {agent.workers[0].pid}, 2, 'inplace', 'because', 'new')")
    stages = [one.stage for one in agent.workers[0].said if isinstance(one, link.StageChanged) and one.generation == 0]
    assert stages == ["function", "aborting", "finalizing", "health check"]


def test_an_order_breaks_a_wait_and_is_no_fault(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                try:
                    with open(os.devnull) as file:
                        say("waits")
                        threading.Event().wait()
                except Exception:
                    say("an Exception")
                finally:
                    say("finally", file.closed)
            return g
            """
        )
    )
    round_trip(agent)
    agent.await_line("waits")
    agent.interrupt()
    agent.interrupt()  # once more, on the way: ignored
    round_trip(agent)
    finish(agent, "1")
    assert agent.lines()[-2] == "finally True"
    assert not [one for one in agent.workers[0].said if isinstance(one, link.Fault)]


def test_an_order_that_comes_before_the_function_counts(agent: FakeAgent) -> None:
    agent.start(script("if g == 0: time.sleep(1000)\nreturn g"))
    agent.await_message(link.AtBarrier)
    agent.generation = 0
    agent.send(0, link.Interrupt(0, "nobody is there any more"))
    agent.send(0, agent.entry(0, "start"))
    round_trip(agent)
    finish(agent, "1")


def test_an_order_of_an_older_generation_is_ignored(agent: FakeAgent) -> None:
    agent.start(script('if g == 0: raise ValueError\nsay("here")\nsys.stdin.read()\ntime.sleep(0.2)\nreturn g'))
    round_trip(agent)
    round_trip(agent)
    agent.await_line("here")
    agent.send(0, link.Interrupt(0, "late"))
    finish(agent, "1")


def test_one_that_has_returned_runs_again_when_others_fault(agent: FakeAgent) -> None:
    agent.start(script('say("runs", g)\nreturn g'))
    round_trip(agent)
    agent.await_message(link.Returned)
    agent.interrupt()
    round_trip(agent)
    finish(agent, "1")
    assert agent.lines()[:2] == ["runs 0", "runs 1"]


@pytest.mark.parametrize(
    ("raising", "code", "status"),
    [
        ("sys.exit(5)", 5, 5 << 8),
        ("sys.exit('words')", 1, 1 << 8),
        ("sys.exit()", 0, None),
        ("raise KeyboardInterrupt", 130, signal.SIGINT),
    ],
)
def test_exits_pass_through_and_are_told(agent: FakeAgent, raising: str, code: int, status: int | None) -> None:
    agent.start(script(raising))
    round_trip(agent)
    assert agent.code() == code
    told = [one.exit_status for _, one in agent.history if isinstance(one, link.Fault)]
    assert told == ([] if status is None else [status])


@pytest.mark.parametrize("leaving", ["raise ValueError", "return 5", "sys.exit(3)"])
def test_a_child_that_the_function_forks_speaks_for_itself(agent: FakeAgent, leaving: str) -> None:
    body = f"pid = os.fork()\nif pid == 0: {leaving}\nsay('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nreturn g"
    agent.start(script(body))
    round_trip(agent)
    finish(agent)
    assert not [one for _, one in agent.history if isinstance(one, link.Fault)]
    assert f"child {({'raise ValueError': 1, 'return 5': 0, 'sys.exit(3)': 3})[leaving]}" in agent.output()


def test_an_exit_that_user_code_makes_of_our_order_is_ours(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                try:
                    say("waits")
                    time.sleep(1000)
                except BaseException:
                    sys.exit(3)
            return g
            """
        )
    )
    round_trip(agent)
    agent.await_line("waits")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "1")


@pytest.mark.parametrize(
    ("raising", "kind", "headline"),
    [
        ("raise ValueError('x' * 50_000_000)", "ValueError", "ValueError: xxx"),
        ("raise ValueError('\\udc80\\0')", "ValueError", "ValueError: "),
        ("raise Mute()", "Mute", "Mute: <str() raised RuntimeError>"),
        ("f = lambda: f()\nf()", "RecursionError", "RecursionError: maximum"),
        ("raise Odd()", "Odd", "Odd"),
        (
            "raise RestartRequested('please', rung='node')",
            "RestartRequested",
            "hyperpodrun.inprocess.errors.RestartRequested: please",
        ),
        ("caller.report_fault('bad', rung='all')", "RestartRequested", "hyperpodrun.inprocess.errors.RestartRequested: bad"),
        ("raise ExceptionGroup('many', [ValueError(1), KeyError(2)])", "ExceptionGroup", "ExceptionGroup: many"),
        ("raise GeneratorExit", "GeneratorExit", "GeneratorExit"),
    ],
)
def test_any_exception_can_be_told(agent: FakeAgent, raising: str, kind: str, headline: str) -> None:
    head = """
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError
    class Odd(BaseException):
        pass
    """
    agent.start(script(f"if g:\n    return g\n{raising}", head=head))
    round_trip(agent)
    fault = agent.await_message(link.Fault)
    assert fault.kind == kind
    assert fault.headline.startswith(headline)
    assert len(fault.headline.encode()) <= 2100
    assert len(fault.text.encode()) <= link.TEXT_BYTES
    assert fault.rung == ("node" if "node" in raising else "all" if "'all'" in raising else "")
    round_trip(agent)
    finish(agent, "1")


def test_a_process_out_of_memory_tells_and_goes_on(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            from hyperpodrun.inprocess import inject
            if g == 0:
                inject.strike(inject.parse("balloon@mb=64")[0])
            return g
            """
        )
    )
    round_trip(agent)
    assert agent.await_message(link.Fault).kind == "MemoryError"
    round_trip(agent)
    finish(agent, "1")


def test_nothing_of_the_last_call_is_kept_alive(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            class Big: pass
            big = Big()
            seen.append(weakref.ref(big))
            if g == 0:
                try:
                    raise KeyError("inner")
                except KeyError as error:
                    raise ValueError(error) from error
            if g == 1:
                say("waits")
                time.sleep(1000)
            return [one() for one in seen[:2]]
            """,
            head="import weakref, gc\ngc.disable()\nseen = []\n",
        )
    )
    round_trip(agent)
    round_trip(agent)
    agent.await_line("waits")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "[None, None]")


def test_wrapped_inside_wrapped_is_a_plain_call(agent: FakeAgent) -> None:
    agent.start(
        script(
            "return (g, inner(3), inner(4, None), second(1))",
            head="""
            @HPWrapper
            def inner(x, caller=None):
                return x, caller.generation
            @HPWrapper
            def second(x, mine: HPCallWrapper = None):
                return type(mine).__name__
            """,
        )
    )
    round_trip(agent)
    finish(agent, "(0, (3, 0), (4, 0), 'HPCallWrapper')")


def test_a_second_wrapped_call_runs_and_says_that_it_is_unprotected(agent: FakeAgent) -> None:
    agent.start(script("return g", tail='main()\nsay("value", main())'))
    round_trip(agent)
    agent.until(lambda: agent.workers[0].returned == agent.generation, "Returned")
    agent.release()
    assert agent.code() == 0
    assert "a second wrapped call of this process runs unprotected" in agent.output()
    assert agent.lines()[-1] == "value 0"


def test_a_wrapped_function_in_another_thread(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                raise ValueError
            if g == 1:
                say("loops")
                while True: pass
            return g
            """,
            tail="""
            thread = threading.Thread(target=lambda: say("value", main()))
            thread.start()
            thread.join()
            """,
        )
    )
    round_trip(agent)
    round_trip(agent)
    agent.await_line("loops")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "2")


def test_initialize_runs_before_each_call_and_its_failure_is_a_fault(agent: FakeAgent) -> None:
    head = """
    count = [0]
    def prepare():
        count[0] += 1
        if count[0] == 1: raise OSError("not yet")
        if count[0] == 2:
            say("waits")
            time.sleep(1000)
    """
    agent.start(script("return (g, count)", "initialize=prepare", head))
    round_trip(agent)
    assert agent.await_message(link.Fault).kind == "OSError"
    round_trip(agent)
    agent.await_line("waits")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "(2, [3])")


@pytest.mark.parametrize(
    ("option", "rung", "reason"),
    [
        ("finalize=fail", "inplace", "RuntimeError: broken"),
        ("finalize=[fine, fail]", "inplace", "RuntimeError: broken"),
        ("health_check=[fine, fail]", "inplace", "RuntimeError: broken"),
        ("health_check=unhealthy", "replace", "HealthCheckError: sick"),
        ("health_check=asks", "replace", "RestartRequested: sick"),
        ("finalize=exits", "inplace", "SystemExit: 1"),
        ("abort=[fail, fine]", "inplace", "AbortFailed: fail: RuntimeError: broken"),
        ("abort=slow", "inplace", "AbortFailed: slow: TookTooLong: slow did not end within 0.1 s"),
    ],
)
def test_what_cannot_be_cleared_up_is_replaced(agent: FakeAgent, option: str, rung: str, reason: str) -> None:
    head = """
    from hyperpodrun.inprocess.abort import AbortAll
    def fine(): say("fine")
    def fail(): raise RuntimeError("broken")
    def unhealthy(): raise HealthCheckError("sick", rung="replace")
    def asks(): raise RestartRequested("sick", rung="replace")
    def exits(): sys.exit(1)
    def slow(): time.sleep(1000)
    """
    if "slow" in option:
        option += ", abort_timeout=0.1"
    agent.start(script("raise ValueError", option, head))
    round_trip(agent)
    unfit = agent.await_message(link.Unfit)
    assert unfit.rung == rung
    assert unfit.reason.endswith(reason)
    assert ("fine" in agent.output()) == ("fine" in option)
    assert agent.code() == 1


def test_parts_run_in_order_and_two_faults_at_once_are_one_way_back(agent: FakeAgent) -> None:
    head = """
    def part(name):
        def act():
            say(name)
            if name == "abort 1": time.sleep(0.2)
        return act
    """
    options = (
        'abort=[part("abort 1"), part("abort 2")], finalize=[part("final 1"), part("final 2")], '
        'health_check=[part("health")], initialize=[part("init")]'
    )
    agent.start(script("if g == 0: raise ValueError\nreturn g", options, head))
    round_trip(agent)
    agent.await_line("abort 1")
    agent.interrupt()  # another rank has failed as well
    round_trip(agent)
    finish(agent, "1")
    assert agent.lines()[:-1] == ["init", "abort 1", "abort 2", "final 1", "final 2", "health", "init"]


def test_a_critical_section_is_finished(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                with caller.critical_section():
                    say("inside")
                    end = time.monotonic() + 0.2
                    while time.monotonic() < end: pass
                    say("done")
                say("not reached")
                time.sleep(1000)
            return g
            """
        )
    )
    round_trip(agent)
    agent.await_line("inside")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "1")
    assert agent.lines() == ["inside", "done", "value 1"]


def test_an_update_of_the_state_is_finished(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                with update_section():
                    say("inside")
                    end = time.monotonic() + 0.2
                    while time.monotonic() < end: pass
                    say("done")
                say("not reached")
                time.sleep(1000)
            return g
            """,
            head="from hyperpodrun.inprocess.session import update_section\nwith update_section(): pass\n",
        )
    )
    round_trip(agent)
    agent.await_line("inside")
    agent.interrupt()
    round_trip(agent)
    finish(agent, "1")
    assert agent.lines() == ["inside", "done", "value 1"]


def test_a_fault_reported_from_another_thread(agent: FakeAgent) -> None:
    agent.start(
        script(
            """
            if g == 0:
                threading.Thread(target=caller.report_fault, args=("the watchdog's view",)).start()
                time.sleep(1000)
            return g
            """
        )
    )
    round_trip(agent)
    assert agent.await_message(link.Fault).headline == "the watchdog's view"
    round_trip(agent)
    finish(agent, "1")


def test_no_ping_for_too_long_is_a_fault(agent: FakeAgent) -> None:
    agent.start(script("if g == 0:\n    caller.ping()\n    time.sleep(1000)\ntime.sleep(1)\nreturn g", "heartbeat_timeout=0.2"))
    round_trip(agent)
    assert agent.await_message(link.Fault).kind == "HeartbeatTimeout"
    round_trip(agent)
    finish(agent, "1")


def test_beats_tell_how_far(agent: FakeAgent) -> None:
    agent.welcome = link.Welcome(inplace=True, abort_timeout_s=20.0, hang_timeout_s=60.0)
    agent.start(
        script(
            """
            from hyperpodrun.inprocess import progress
            progress.note_step(0)
            progress.note_step(1)
            caller.ping()
            say("still")
            sys.stdin.read()
            time.sleep(2.5)
            return caller.step_upon_restart
            """
        )
    )
    round_trip(agent)
    agent.await_line("still")
    agent.workers[0].said.clear()
    first, second = agent.await_message(link.Beat), agent.await_message(link.Beat, count=2)
    assert (second.stage, second.steps, second.calls) == ("function", 2, 1)
    assert second.still_s is not None and first.still_s is not None and second.still_s > first.still_s
    finish(agent)


def test_an_agent_that_restarts_processes_only(agent: FakeAgent) -> None:
    agent.welcome = link.Welcome(inplace=False, abort_timeout_s=20.0)
    agent.start(script('say(caller.rank)\nraise ValueError("plain")'))
    assert agent.code() == 1
    assert "ValueError: plain" in agent.output()
    assert not [one for one in agent.workers[0].said if isinstance(one, (link.Fault, link.AtBarrier))]


def test_where_processes_are_restarted_the_outermost_call_is_watched(agent: FakeAgent) -> None:
    agent.welcome = link.Welcome(inplace=False, abort_timeout_s=20.0, hang_timeout_s=60.0)
    body = """
    inner = HPWrapper(lambda caller: len(threading.enumerate()))
    say("threads", inner() - inner(), inner() - inner())
    while not os.path.exists(os.environ["OUT"] + "/seen"): time.sleep(0.01)
    """
    agent.start(script(body))
    agent.await_line("threads 0 0")
    agent.workers[0].said.clear()
    assert agent.await_message(link.Beat).stage == "function"
    (agent.folder / "seen").touch()
    assert agent.code() == 0
    assert len([one for _, one in agent.history if isinstance(one, link.Hello)]) == 1


def test_the_agents_end_ends_the_wait_at_the_barrier(agent: FakeAgent) -> None:
    agent.start(script("return g"))
    agent.await_message(link.AtBarrier)
    agent.read_rest(agent.workers[0])
    assert agent.code() == 1
    assert "InternalError: the launcher's agent has ended" in agent.output()


def test_where_no_world_follows_the_process_leaves_also_if_it_is_deaf_to_signals(agent: FakeAgent) -> None:
    agent.start(script("import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\nreturn g"))
    round_trip(agent)
    agent.await_message(link.Returned)
    agent.send(0, link.End(3, "no restarts are left"))
    assert agent.code() == 3


def test_no_world_at_the_barrier(agent: FakeAgent) -> None:
    agent.start(script("return g"))
    agent.await_message(link.AtBarrier)
    agent.send(0, link.End(0, "stopped"))
    assert agent.code() == 0


def test_a_trace_file(agent: FakeAgent) -> None:
    agent.start(script("if g == 0: raise ValueError\nreturn g", "trace_file_path=os.environ['OUT'] + '/trace'"))
    round_trip(agent)
    round_trip(agent)
    finish(agent)
    import json

    stages = [json.loads(line)["stage"] for line in (agent.folder / "trace").read_text().splitlines()]
    assert stages == ["function", "fault", "aborting", "finalizing", "health check", "waiting", "function", "returned"]


def test_the_trace_says_when_the_order_came(agent: FakeAgent) -> None:
    agent.start(script("say('in')\nif g == 0: time.sleep(1000)\nreturn g", "trace_file_path=os.environ['OUT'] + '/trace'"))
    round_trip(agent)
    agent.await_line("in")
    before_s = time.time()
    agent.interrupt("another rank failed")
    round_trip(agent)
    finish(agent)
    import json

    lines = [json.loads(line) for line in (agent.folder / "trace").read_text().splitlines()]
    assert [line["stage"] for line in lines[:3]] == ["function", "told", "aborting"]
    assert before_s <= lines[1]["t"] <= lines[2]["t"]


def test_the_first_step_is_told_before_the_next_beat(agent: FakeAgent) -> None:
    agent.start(script("from hyperpodrun.inprocess import progress\nprogress.note_step(0)\nprogress.note_step(1)\nreturn g"))
    round_trip(agent)
    finish(agent)
    told = [one for one in agent.workers[0].said if isinstance(one, link.Returned) or (isinstance(one, link.Beat) and one.steps)]
    assert told[0] == link.Beat(0, "function", 1)


def test_signals_of_the_user_are_served_at_the_barrier(agent: FakeAgent) -> None:
    agent.start(
        script(
            "return g", tail='signal.signal(signal.SIGUSR1, lambda *_: say("served"))\nsay("value", main())', head="import signal"
        )
    )
    agent.await_message(link.AtBarrier)
    agent.kill(0, signal.SIGUSR1)
    agent.await_line("served")
    round_trip(agent)
    finish(agent, "0")


# --- without an agent


def plain(source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", source], capture_output=True, text=True, timeout=60)


def test_without_an_agent_it_is_the_function_and_one_warning() -> None:
    source = """
import sys
from hyperpodrun.inprocess.wrap import HPWrapper
@HPWrapper
def first(caller=None):
    with caller.critical_section():
        caller.ping()
    return caller.rank, caller.world_size
@HPWrapper(enabled=True)
def second(x, caller=None):
    raise KeyError(x)
print(first(), first(), "torch" in sys.modules)
second(3)
"""
    done = plain(source)
    assert done.stdout == "(0, 1) (0, 1) False\n"
    assert done.stderr.count("HPWrapper does nothing here") == 1
    assert done.stderr.rstrip().endswith("KeyError: 3")
    assert plain(source.replace("enabled=True", "enabled=False")).stdout == done.stdout


def test_the_documented_names_are_there() -> None:
    source = """
from hyperpodrun.inprocess.wrap import HPWrapper, HPCallWrapper, RestartRequested, RankShouldRestart, HealthCheckError, InternalError
from hyperpodrun.inprocess.health_check import CudaHealthCheck, FaultCounter
from hyperpodrun.inprocess.train_utils import HPAgentK8sAPIFactory, wait_rank
from hyperpodrun.inprocess.abort import (Abort, AbortTorchDistributed, AbortDataLoaders,
    AbortAsyncCheckpoint, CheckpointlessAbortManager, CheckpointlessFinalizeCleanup)
@HPWrapper(health_check=CudaHealthCheck(), hp_api_factory=HPAgentK8sAPIFactory(),
           abort_timeout=60.0, abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
           finalize=CheckpointlessFinalizeCleanup(), checkpoint_manager="mine", heartbeat_timeout=None, trace_file_path=None)
def run_main(cfg, caller=None):
    return cfg, caller.checkpoint_manager
print(run_main(1), issubclass(RestartRequested, Exception), RankShouldRestart is RestartRequested)
print(issubclass(HealthCheckError, Exception), issubclass(InternalError, Exception))
"""
    assert plain(source).stdout == "(1, 'mine') False True\nTrue True\n"


def _generator():  # type: ignore[no-untyped-def]
    yield 1


async def _async() -> None: ...


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (_generator, "is a generator function"),
        (_async, "is an async function"),
        (int, "wraps functions"),
        (3, "wraps functions"),
        (staticmethod(len), "belongs under @staticmethod"),
    ],
)
def test_what_cannot_run_again_is_refused(what: object, words: str) -> None:
    from hyperpodrun.inprocess.wrap import HPWrapper

    with pytest.raises(TypeError, match=words):
        HPWrapper(what)
    with pytest.raises(TypeError, match=words):
        HPWrapper()(what)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["abort", "finalize", "initialize", "health_check"])
def test_options_that_cannot_be_called_are_refused(option: str) -> None:
    from hyperpodrun.inprocess.wrap import HPWrapper

    with pytest.raises(TypeError, match=option):
        HPWrapper(**{option: [3]})


def test_wait_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperpodrun.inprocess.train_utils import wait_rank

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TimeoutError, match="no rank"):
        wait_rank(0.01)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert wait_rank() == (3, 4)


def test_many_callers_are_found() -> None:
    from hyperpodrun.inprocess.wrap import HPCallWrapper, HPWrapper

    checks: list[Callable[..., object]] = [
        lambda caller: caller,
        lambda *, caller: caller,
        lambda caller=None: caller,
    ]
    for check in checks:
        assert isinstance(HPWrapper(enabled=False)(check)(), HPCallWrapper)
    assert HPWrapper(enabled=False)(lambda caller: caller)("given") == "given"
    assert HPWrapper(enabled=False)(lambda: "none wanted")() == "none wanted"


def test_stacks_can_be_asked_for_at_any_moment(agent: FakeAgent) -> None:
    """Also while threads begin and end: read from a signal handler, without the interpreter's lock, their frames would be gone."""
    agent.start(
        script(
            """
            def deep(n): return deep(n - 1) if n else time.sleep(0)
            def churn():
                while g == 0:
                    thread = threading.Thread(target=deep, args=(5,))
                    thread.start()
                    thread.join()
            if g == 0:
                for _ in range(3): threading.Thread(target=churn, daemon=True).start()
                say("churning")
                threading.Event().wait()
            return g
            """
        )
    )
    agent.await_message(link.AtBarrier)
    agent.enter()
    agent.await_line("churning")
    for _ in range(300):
        agent.send(0, link.Dump())
    agent.interrupt()
    agent.await_message(link.Dumped, count=300)
    agent.enter("inplace")
    finish(agent, "1")
    assert agent.output().count("in churn") >= 300 and "in main" in agent.output()
