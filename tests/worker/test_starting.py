"""From the order to running ranks: forking, spawning, and every way in which it can go wrong on the way."""

import json
import os
import select
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.processes

WHO = """
import json, os, sys
print(json.dumps(dict(pid=os.getpid(), parent=os.getppid(), rank=os.environ["RANK"], argv=sys.argv,
    attempt=os.environ["TORCHELASTIC_RESTART_COUNT"], title=open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
    modules=sorted(sys.modules), cuda=os.environ.get("CUDA_VISIBLE_DEVICES"),
    local=os.environ["LOCAL_RANK"], sid=os.getsid(0), threads=os.listdir("/proc/self/task"))))
"""


def script(work, text, name="script.py"):
    (work / name).write_text(textwrap.dedent(text))
    return name


def rows(outcome, rank=0):
    return [json.loads(line) for line in outcome.text(f"{rank}.out").splitlines()]


def test_workers_are_children_of_the_agent_with_sessions_of_their_own(work, launch, method):
    seen = launch(script(work, WHO), "x", "${local_rank}", ranks=3, config=method)
    assert seen.attempts == [{"0": 0, "1": 0, "2": 0}] and not seen.said
    for rank in range(3):
        (row,) = rows(seen, rank)
        assert (row["parent"], row["rank"], row["sid"]) == (seen.pid, str(rank), row["pid"])
        assert row["argv"] == ["script.py", "x", str(rank)]
        assert row["title"][1:] == ["-u", "script.py", "x", str(rank)]


def test_a_restart_forks_from_the_same_process(work, launch):
    seen = launch(script(work, WHO), ranks=2, attempts=3)
    assert seen.servers == 1
    assert [row["attempt"] for row in rows(seen, 1)] == ["0", "1", "2"]


def test_more_descriptors_than_a_packet_takes(work, launch):
    seen = launch(script(work, "pass"), ranks=130)
    assert set(seen.attempts[0].values()) == {0} and not seen.said


def test_environments_larger_than_a_packet(work, launch, method):
    seen = launch(
        script(work, "import os; print(len(os.environ['BIG0']), len(os.environ['BIG9']))"),
        ranks=4,
        config=method,
        env={f"BIG{i}": "x" * 100_000 for i in range(10)},
    )
    assert seen.text("3.out") == "100000 100000\n"


def test_a_script_that_does_not_name_torch_loads_nothing(work, launch):
    seen = launch(script(work, WHO))
    assert not {"torch", "numpy"} & set(rows(seen)[0]["modules"])


def test_preloaded_modules_are_imported_once(work, launch):
    script(work, "import os; print('imported in', os.getpid(), flush=True); HERE = os.getpid()", "early.py")
    seen = launch(script(work, "import early, os; print(early.HERE == os.getpid())"), ranks=2, config={"preload": ["early"]})
    assert seen.text("0.out") == seen.text("1.out") == "False\n"
    assert seen.text("forkserver.out").count("imported in") == 1


@pytest.mark.parametrize(
    "text, told",
    [
        (
            "import threading; threading.Thread(target=threading.Event().wait, daemon=True, name='busy').start()",
            "has started threads (busy)",
        ),
        ("import _thread, time; _thread.start_new_thread(time.sleep, (1000,))", "has started 1 native thread"),
        ("raise RuntimeError('not today')", "importing early failed (RuntimeError: not today)"),
        ("import missing_one", "failed (ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(9)", "exited with code 9"),
        ("import os; os.kill(os.getpid(), 11)", "was ended by SIGSEGV"),
        ("import sys; sys.settrace(lambda *a: None)", "tracer or profiler"),
        ("import os; os.open('/dev/null', 0)", ""),
    ],
)
def test_an_unfit_preload_is_told_and_workers_are_spawned(work, launch, text, told):
    script(work, text, "early.py")
    seen = launch(script(work, WHO), ranks=2, attempts=2, config={"preload": ["early"]})
    assert [set(ends.values()) for ends in seen.attempts] == [{0}, {0}]
    if told:
        assert len(seen.said) == 1 and told in seen.said[0] and "spawn" in seen.said[0]
        assert "early" not in rows(seen)[0]["modules"]
    else:
        assert not seen.said and "early" in rows(seen)[0]["modules"]


def test_a_users_module_with_the_name_of_one_of_ours_wins(work, launch):
    script(work, "MINE = True", "signal.py")
    seen = launch(script(work, "import signal; print(signal.MINE)"))
    assert seen.text("0.out") == "True\n" and seen.code() == 0
    assert len(seen.said) == 1 and "signal.py" in seen.said[0]


@pytest.mark.parametrize("moment, told", [("loading", "spawn"), ("between", "started again")])
def test_a_dead_forkserver(work, launch, moment, told):
    seen = launch(script(work, WHO), ranks=2, attempts=2, **{"kill-server": moment})
    assert [set(ends.values()) for ends in seen.attempts] == [{0}, {0}]
    assert len(seen.said) == 1 and "SIGKILL" in seen.said[0] and told in seen.said[0]


def test_a_forkserver_that_dies_of_each_start(work, launch):
    script(work, "import os; os.fork = lambda: os.kill(os.getpid(), 9)", "early.py")
    seen = launch(script(work, "print('ran')"), ranks=2, config={"preload": ["early"]})
    assert seen.text("0.out") == seen.text("1.out") == "ran\n"
    assert len(seen.said) == 2 and "started again" in seen.said[0] and "spawn" in seen.said[1]


def test_coverage_gets_interpreters_of_their_own(work, launch):
    seen = launch(script(work, WHO), popen={"env": {**os.environ, "COVERAGE_PROCESS_START": "/dev/null"}})
    assert seen.servers == 0 and seen.code() == 0


def test_another_interpreter(work, launch):
    other = work / "python"
    other.write_text('#!/bin/sh\necho "other $@"\n')
    other.chmod(0o755)
    seen = launch(script(work, WHO), "a", config={"python": str(other)})
    assert seen.text("0.out") == "other -u script.py a\n" and seen.servers == 0 and not seen.said
    seen = launch(script(work, WHO), "a", config={"python": str(other), "preload": ["numpy"]})
    assert len(seen.said) == 1 and "--preload: nothing is imported early" in seen.said[0] and "PYTHON_EXEC" in seen.said[0]


def test_a_program(work, launch):
    program = work / "prog"
    program.write_text('#!/bin/sh\nfor a in "$@"; do printf "<%s>" "$a"; done; echo "$RANK"; grep SigIgn /proc/self/status\n')
    program.chmod(0o755)
    seen = launch("./prog", "a b", "--", "", run_as="program", ranks=2)
    assert seen.text("1.out").splitlines()[0] == "<a b><--><>1"
    ignored = int(seen.text("1.out").split()[-1], 16)
    assert not ignored & (1 << 12), "SIGPIPE is ignored"


def test_a_program_is_found_on_the_path(work, launch):
    (work / "bin").mkdir()
    program = work / "bin" / "prog"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    seen = launch("prog", run_as="program", env={"PATH": f"{work}/none:{work}/bin:/bin"})
    assert seen.text("0.out") == "found\n"


@pytest.mark.parametrize(
    "make, code, told", [("nothing", 127, "no such file"), ("plain", 126, "not executable"), ("folder", 126, "is a folder")]
)
def test_a_program_that_cannot_be_run(work, launch, make, code, told):
    if make == "plain":
        (work / "prog").write_text("x")
    if make == "folder":
        (work / "prog").mkdir()
    seen = launch("./prog", run_as="program", ranks=2)
    assert seen.codes == [code] and told in seen.attempts[0] and "./prog" in seen.attempts[0]


@pytest.mark.parametrize(
    "text, code, told", [(b"\x7fELFgarbage", 126, "neither a binary"), (b"#!/no/such/interpreter\n", 127, "first line")]
)
def test_what_the_kernel_refuses_to_execute(work, launch, text, code, told):
    (work / "prog").write_bytes(text)
    (work / "prog").chmod(stat.S_IRWXU)
    seen = launch("./prog", run_as="program")
    assert seen.code() == code and told in seen.text("0.err")


def test_affinity(work, launch, method):
    cpu = min(os.sched_getaffinity(0))
    seen = launch(script(work, "import os; print(os.sched_getaffinity(0))"), cpus=[cpu], config=method)
    assert seen.text("0.out") == f"{{{cpu}}}\n"


def test_a_refused_affinity_is_told_and_survived(work, launch, method):
    seen = launch(script(work, "print('ran')"), cpus=[4000], config=method)
    assert seen.text("0.out") == "ran\n" and "unbound" in seen.text("0.err")


def test_virtual_local_rank(work, launch, method):
    seen = launch(script(work, WHO), ranks=2, devices=["GPU-a", "GPU-b"], config={"virtual_local_rank": True, **method})
    assert [(rows(seen, r)[0]["local"], rows(seen, r)[0]["cuda"]) for r in range(2)] == [("0", "GPU-a"), ("0", "GPU-b")]


@pytest.mark.parametrize(
    "how, moment", [("spawn", "at-once"), ("forkserver", "at-once"), ("forkserver", "loading"), ("forkserver", "asked")]
)
def test_cancelled_starts_run_nothing(work, launch, how, moment):
    seen = launch(script(work, "open('ran', 'a').write('x')"), ranks=2, cancel=moment, config={"start_method": how})
    assert not (work / "ran").exists()
    assert seen.attempts == [] and not seen.said


NO_MORE_FORKS = """
import errno, os
real, left = os.fork, 3
def fork():
    global left
    left -= 1
    if left == 0 and os.path.exists("scarce"):
        os.unlink("scarce")
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
"""


def test_no_processes_left_to_fork(work, launch):
    """One worker can be made of two: it must end having run nothing, and the next attempt succeed."""
    script(work, NO_MORE_FORKS, "limits.py")
    (work / "scarce").touch()
    seen = launch(script(work, "print('ran')"), ranks=2, attempts=2, config={"preload": ["limits"]})
    assert "ulimit -u" in seen.attempts[0] and seen.codes == [78] and seen.left == 0
    assert seen.text("0.out") == seen.text("1.out") == "ran\n"
    assert set(seen.attempts[1].values()) == {0} and not seen.said


def test_no_processes_left_to_spawn(work, launch):
    seen = launch(script(work, "print('ran')"), ranks=3, config={"start_method": "spawn"}, **{"fail-spawn-after": 2})
    assert "ulimit -u" in seen.attempts[0] and seen.codes == [78] and seen.left == 0
    assert seen.text("0.out") == ""


def test_no_forkserver_to_be_had(work, launch):
    seen = launch(script(work, "print('ran')"), ranks=3, **{"fail-spawn-after": 0})
    assert "ulimit -u" in seen.attempts[0] and len(seen.said) == 1 and "spawn" in seen.said[0]


def test_a_worker_whose_agent_died_before_it_asked_to_die_with_it_ends_as_well():
    text = "import os; from hyperpodrun.worker import prelude; prelude.die_with({parent}); print('lives')"
    for parent, seen in ((os.getpid(), (0, "lives\n")), (os.getppid(), (-signal.SIGKILL, ""))):
        done = subprocess.run([sys.executable, "-c", text.format(parent=parent)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == seen


def test_everything_ends_with_the_agent(work, launch, method):
    """Killed without warning while its workers run."""
    text = """
        import os, signal, time
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(100)
        """
    token = f"ends-with-agent-{os.getpid()}-{method['start_method']}"
    with pytest.raises(subprocess.CalledProcessError) as killed:
        launch(script(work, text), ranks=2, config=method, popen={"env": {**os.environ, "TOKEN": token}})
    assert killed.value.returncode == -9
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        try:
            watch = os.pidfd_open(pid)
            with open(f"/proc/{pid}/environ", "rb") as file:
                ours = token.encode() in file.read()
        except OSError:
            continue
        if ours:
            assert select.select([watch], [], [], 30)[0], f"process {pid} outlives its agent"
        os.close(watch)


def test_openblas_threads_do_not_stand_in_the_way(work, launch):
    """One rank: OMP_NUM_THREADS is not set, and numpy's OpenBLAS starts its threads at import."""
    text = """
        import os, numpy
        a = numpy.ones((600, 600))
        print((a @ a)[0, 0], len(os.listdir("/proc/self/task")))
        """
    seen = launch(script(work, text), attempts=2, config={"preload": ["numpy"]})
    assert not seen.said
    assert [line.split()[0] for line in seen.text("0.out").splitlines()] == ["600.0", "600.0"]


def test_the_stack_dump_signal(work, launch):
    seen = launch(
        script(
            work,
            """
            import os, signal, sys
            def waiting():
                os.kill(os.getpid(), signal.SIGRTMAX - 2)
                print("alive")
            waiting()
            """,
        )
    )
    assert seen.text("0.out") == "alive\n"
    assert "Current thread" in seen.text("0.err") and "in waiting" in seen.text("0.err")


@pytest.mark.torch
def test_random_numbers_differ_between_ranks_and_attempts(work, launch):
    text = """
        import random, numpy, os, torch
        print(random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(), os.urandom(4).hex(),
            torch.multiprocessing.current_process().authkey.hex())
        """
    seen = launch(script(work, text), ranks=2, attempts=2, config={"preload": ["random", "numpy.random"]})
    assert not seen.said
    drawn = [line.split() for rank in range(2) for line in seen.text(f"{rank}.out").splitlines()]
    assert len(drawn) == 4
    for same in zip(*drawn, strict=True):
        assert len(set(same)) == 4


@pytest.mark.torch
def test_torch_is_imported_once_and_collectives_work(work, launch):
    seen = launch(
        script(
            work,
            """
            import sys
            early = "torch" in sys.modules
            import torch
            import torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.ones(4) * (dist.get_rank() + 1)
            dist.all_reduce(x)
            print(early, x.tolist(), torch.get_num_threads())
            y = torch.randn(200, 200, requires_grad=True)
            (y @ y).sum().backward()
            loader = torch.utils.data.DataLoader(torch.arange(6), num_workers=1, batch_size=3)
            print([batch.tolist() for batch in loader])
            dist.destroy_process_group()
            """,
        ),
        ranks=4,
        port=29641,
        env={"TORCH_SKIP_TCPSTORE": "0"},
    )
    assert not seen.said, seen.said
    for rank in range(4):
        assert seen.text(f"{rank}.err") == ""
        assert seen.text(f"{rank}.out").splitlines() == ["True [10.0, 10.0, 10.0, 10.0] 1", "[[0, 1, 2], [3, 4, 5]]"]
    assert set(seen.attempts[0].values()) == {0}


@pytest.mark.torch
def test_torch_is_left_to_a_script_that_prepares_its_import(work, launch):
    seen = launch(
        script(
            work,
            "import os, sys\nos.environ['OMP_NUM_THREADS'] = str(2)\nprint('torch' in sys.modules)\n"
            "import torch\nprint(torch.get_num_threads())",
        )
    )
    assert seen.text("0.out") == "False\n2\n"
    assert len(seen.said) == 1 and "line 2 changes os.environ" in seen.said[0]


def test_a_users_module_called_torch_runs_in_the_ranks_only(work, launch):
    script(work, "print('mine')", "torch.py")
    seen = launch(script(work, "import torch"))
    assert seen.text("0.out") == "mine\n" and seen.code() == 0
    assert len(seen.said) == 1 and "torch.py is imported in its place" in seen.said[0]
