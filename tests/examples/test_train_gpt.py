"""The real job: it learns, and whatever happens to it on the way, its losses stay the same to the last bit."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
HYPERPODRUN = Path(sys.executable).parent / "hyperpodrun"
TINY = ["--layers", "1", "--width", "32", "--block", "16", "--batch-size", "2", "--sample", "0", "--dropout", "0.1"]
LIMIT_S = 120

pytestmark = [pytest.mark.processes, pytest.mark.torch]

Losses = dict[int, str]


def command(*arguments: str | Path, ranks: int = 0) -> list[str]:
    """The job's command line: under the launcher, or under Python alone where `ranks` is 0."""
    launched = [str(HYPERPODRUN), "--nproc-per-node", str(ranks), "--max-restarts", "1"] if ranks else [sys.executable]
    return [*launched, str(SCRIPT), *TINY, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Ours, with one thread a rank in every run: with other sums of threads come other roundings."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train(*arguments: str | Path, ranks: int = 0, fault: str = "") -> subprocess.CompletedProcess[str]:
    """Run the job to its end, with a planted fault."""
    env = environment() | ({"HYPERPODRUN_INJECT": fault} if fault else {})
    return subprocess.run(command(*arguments, ranks=ranks), capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)


def finished(run: subprocess.CompletedProcess[str]) -> str:
    """Standard output of a job that ended well."""
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    return run.stdout


def losses(file: Path) -> Losses:
    """Loss by step; a step that was taken twice must have come to the same loss both times."""
    found: Losses = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        assert found.setdefault(row["step"], row["loss"]) == row["loss"], f"step {row['step']} had two losses"
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Losses]:
    """The losses of the first steps of the job when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    known: dict[int, Losses] = {}

    def first(steps: int, ranks: int = 0) -> Losses:
        if len(known.get(ranks, {})) < steps:
            file = folder / f"{ranks}-ranks-{steps}-steps"
            finished(train("--steps", str(steps), "--losses", file, ranks=ranks))
            known[ranks] = losses(file)
        return {step: loss for step, loss in known[ranks].items() if step <= steps}

    return first


def test_one_process_learns_and_shows_what_it_learnt(tmp_path: Path) -> None:
    out = finished(train("--steps", "40", "--sample", "20", "--losses", tmp_path / "losses"))
    seen = losses(tmp_path / "losses")
    assert list(seen) == list(range(1, 41))
    assert float.fromhex(seen[40]) < float.fromhex(seen[1]) - 0.5
    assert "step    40/40" in out
    assert "validation loss" in out
    assert "the model writes: The " in out


@pytest.mark.parametrize(("ranks", "how"), [(1, "sigkill"), (2, "exit"), (2, "exception")])
def test_job_that_loses_a_rank_goes_on_to_the_same_losses(
    ranks: int, how: str, tmp_path: Path, undisturbed: Callable[..., Losses]
) -> None:
    fault = f"{how}@rank={ranks - 1},phase=backward,step=8"
    state = ["--checkpoint", tmp_path / "saved", "--checkpoint-every", "5", "--losses", tmp_path / "losses"]
    job = train("--steps", "12", *state, ranks=ranks, fault=fault)
    out = finished(job)
    assert f"injected fault {fault!r} strikes rank {ranks - 1} at step 8" in job.stderr
    assert "resumed from the checkpoint" not in out, "memory has a newer state"
    assert losses(tmp_path / "losses") == undisturbed(12, ranks)
    assert not list((tmp_path / "saved").glob("*.tmp"))


@pytest.mark.slow
def test_order_of_sums_over_four_ranks_survives_a_restart(tmp_path: Path) -> None:
    """With more than two ranks and one gradient bucket the order of additions shows in the last bits (`settle`)."""
    size = ["--layers", "2", "--width", "128"]
    state = ["--checkpoint", tmp_path / "saved", "--checkpoint-every", "2", "--losses", tmp_path / "losses"]
    finished(train("--steps", "5", *size, *state, ranks=4, fault="sigkill@rank=0,phase=backward,step=3"))
    finished(train("--steps", "5", *size, "--losses", tmp_path / "undisturbed", ranks=4))
    assert losses(tmp_path / "losses") == losses(tmp_path / "undisturbed")


def test_sigterm_saves_and_the_next_run_goes_on_where_it_stopped(tmp_path: Path, undisturbed: Callable[..., Losses]) -> None:
    state = ["--checkpoint", tmp_path / "saved", "--checkpoint-every", "1000000", "--losses", tmp_path / "losses"]
    with subprocess.Popen(
        command("--steps", "1000000", "--log-every", "1", *state), stdout=subprocess.PIPE, text=True, env=environment()
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if line.startswith("step"):
                break
        job.send_signal(signal.SIGTERM)
        said = job.stdout.read()
        assert job.wait(LIMIT_S) == 0
    stopped = max(losses(tmp_path / "losses"))
    assert f"the same command goes on from step {stopped}" in said

    out = finished(train("--steps", str(stopped + 3), *state))
    assert f"resumed from the checkpoint of step {stopped}" in out
    assert losses(tmp_path / "losses") == undisturbed(stopped + 3)


def test_damaged_checkpoint_and_half_written_draft_are_told_and_passed_over(
    tmp_path: Path, undisturbed: Callable[..., Losses]
) -> None:
    saved = tmp_path / "saved"
    state = ["--checkpoint", saved, "--checkpoint-every", "3", "--losses", tmp_path / "losses"]
    finished(train("--steps", "6", *state))
    newest = saved / "step-00000006.pt"
    whole = newest.read_bytes()
    newest.write_bytes(whole[: len(whole) // 2])
    draft = saved / "step-00000009.pt.77.tmp"
    draft.write_bytes(whole[:1000])

    out = finished(train("--steps", "9", *state))
    assert "ignoring step-00000006.pt: the file is damaged" in out
    assert f"removing {draft.name}" in out
    assert "resumed from the checkpoint of step 3" in out
    assert not draft.exists()
    assert losses(tmp_path / "losses") == undisturbed(9)


def test_one_changed_bit_in_the_only_checkpoint_means_a_fresh_start(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    finished(train("--steps", "3", "--checkpoint", saved))
    (only,) = saved.iterdir()
    data = bytearray(only.read_bytes())
    data[len(data) // 2] ^= 1
    only.write_bytes(data)
    out = finished(train("--steps", "3", "--checkpoint", saved))
    assert f"ignoring {only.name}" in out
    assert "resumed" not in out


def test_impossible_size_is_refused_in_one_sentence() -> None:
    run = train("--width", "33")
    assert run.returncode == 2
    assert "--width must be a multiple of 32" in run.stderr
    assert "Traceback" not in run.stderr
