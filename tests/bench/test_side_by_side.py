"""The benchmarks' own machinery: it alternates, counts right, says what went wrong, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "bench"))

import footprint
import launch
import restart
import side_by_side as bench

PYTHON = bench.Launcher("python", {})  # starts a "worker" as a launcher would
OURS = bench.LAUNCHERS[1]


def test_launchers_take_turns_and_swap_who_goes_first() -> None:
    calls: list[str] = []

    def record(launcher: bench.Launcher) -> bench.Figures:
        calls.append(launcher.name)
        return {"calls": len(calls)}

    samples = bench.compare([record], repetitions=2)
    assert calls == ["torchrun", "hyperpodrun", "hyperpodrun", "torchrun"]
    assert samples == {"calls": {"torchrun": [1, 4], "hyperpodrun": [2, 3]}}


def test_ratio_is_of_medians() -> None:
    assert bench.ratio({"torchrun": [1, 10, 4], "hyperpodrun": [2, 1, 90]}) == 0.5
    assert bench.ratio({"torchrun": [0], "hyperpodrun": [1]}) is None
    assert bench.ratio({"torchrun": [1]}) is None


def test_json_has_every_value() -> None:
    figures = json.loads(bench.as_json("t", {"a": {"torchrun": [2.0, 4.0], "hyperpodrun": [1.0, 2.0]}}, 2))["figures"]
    assert figures["a"]["torchrun"] == {"median": 3.0, "min": 2.0, "max": 4.0, "values": [2.0, 4.0]}
    assert figures["a"]["ratio"] == 0.5


@pytest.mark.processes
def test_run_that_ends_too_early_shows_its_output() -> None:
    worker = "import sys; print('what went wrong'); sys.exit(3)"
    with (
        pytest.raises(bench.BenchmarkError, match=r"(?s)exit code 3 before ranks.*what went wrong"),
        bench.started(PYTHON, worker, []) as run,
    ):
        run.until(lambda: run.values("up", 1), "ranks")


@pytest.mark.processes
def test_run_that_hangs_ends_at_its_limit() -> None:
    with (
        pytest.raises(bench.BenchmarkError, match="not seen within the limit"),
        bench.started(PYTHON, "import signal; signal.pause()", [], limit_s=0.3) as run,
    ):
        run.until(lambda: run.values("up", 1), "ranks")


@pytest.mark.processes
def test_nothing_of_a_run_is_left_not_even_what_left_its_session() -> None:
    worker = "import subprocess; p = subprocess.Popen(['sleep', '300'], start_new_session=True); print(p.pid, flush=True)"
    with bench.started(PYTHON, worker, []) as run:
        run.success()
        sleeper = int(run.output_path.read_text())
        mark = run.mark
        run.process.wait()
    assert mark and not bench.marked(mark)
    assert not Path(f"/proc/{sleeper}/cmdline").exists() or b"sleep" not in Path(f"/proc/{sleeper}/cmdline").read_bytes()


@pytest.mark.processes
@pytest.mark.torch
def test_each_benchmark_measures_our_launcher() -> None:
    assert set(launch.trivial(OURS)) == {"first line of a trivial worker, s", "the same line on the console, s"}
    for figures in (launch.barrier(OURS, 2), restart.killed(OURS, 2), footprint.launcher_alone(OURS, 0.1)):
        assert all(value >= 0 for value in figures.values())


@pytest.mark.parametrize("name", ["launch", "restart", "footprint", "mesh"])
def test_help_is_there(name: str) -> None:
    path = Path(bench.__file__).with_name(f"{name}.py")
    run = subprocess.run([sys.executable, path, "--help"], capture_output=True, text=True, timeout=60, check=True)
    assert "--quick" in run.stdout
