"""Random kills of workers, agents and keepers, one after another: nothing hangs, nothing is left."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]

KILLS = 200
LIMIT_S = 120.0
WORKER = """
import random
subprocess.Popen(["sleep", "300"], start_new_session=RANK == 0)
meet()
# Deaf now and then, as training code is.
if RANK == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pause()
"""
RANKS = 3


def orphans(marks: set[str]) -> list[str]:
    """Processes that carry the mark of one of this test's launchers. (A zombie has lost its: see `zombies`.)"""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
                marked = any(mark.encode() in Path(f"/proc/{entry}/environ").read_bytes() for mark in marks)
            except OSError:
                continue
            if marked:
                found.append(text)
    return found


def zombies(keeper: int) -> list[str]:
    """Dead children that the keeper or its agent has not taken leave of."""
    rows = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            state, parent = text.rpartition(")")[2].split()[:2]
            rows[int(entry)] = (state, int(parent), text)
    parents = {keeper, *(pid for pid, (_, parent, _) in rows.items() if parent == keeper)}
    return [text for state, parent, text in rows.values() if state == "Z" and parent in parents]


@pytest.mark.timeout(900)
def test_two_hundred_random_kills(launch: Callable, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"CHAOS_SEED={seed}")
    chooser = random.Random(seed)
    shm_before, marks = set(os.listdir("/dev/shm")), set()
    run, attempt, agents_killed = None, 0, 0
    for number in range(KILLS):
        if run is None:
            for note in tmp_path.glob("up.*.json"):
                note.unlink()
            run = launch(f"--nproc-per-node={RANKS}", "--max-restarts=1000", "--shutdown-timeout=0.2", script=WORKER)
            marks.add(run.mark)
            attempt, agents_killed = 0, 0
        # Half of the kills come when all is calm, half as soon as the first rank of the attempt is seen.
        calm = chooser.random() < 0.5
        rows = run.until_told("up", RANKS if calm else 1, attempt=attempt)
        keeper = run.pid
        run.until(lambda keeper=keeper: not zombies(keeper), "the end of all zombies")
        victim = chooser.choice(["worker"] * 3 + (["agent"] if agents_killed < 3 else []) + ["keeper"])
        pid = {"worker": chooser.choice(rows)["pid"], "agent": run.agent(), "keeper": run.pid}[victim]
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it had just been ended
        if victim == "keeper":
            run.nothing_left()
            run.code()
            run = None
            assert os.listdir(tmp_path / "tmp") == [], f"kill {number} (keeper), seed {seed}: run folder left"
        else:
            agents_killed += victim == "agent"
            attempt += 1
    if run is not None:
        run.until_told("up", RANKS, attempt=attempt)
        os.kill(run.pid, signal.SIGTERM)
        assert run.code() == 143, run.story()
        run.nothing_left()
    assert os.listdir(tmp_path / "tmp") == []
    # Other tests may use /dev/shm at this moment, but what they have there goes away. Only jobs of several nodes have vote files.
    new, end_s = set(os.listdir("/dev/shm")) - shm_before, time.monotonic() + LIMIT_S
    new = {name for name in new if not name.endswith(".vote")}
    while left := new & set(os.listdir("/dev/shm")):
        assert time.monotonic() < end_s, f"left in /dev/shm: {left}"
        time.sleep(0.1)
    assert orphans(marks) == []
