"""Random deaths in a job of three nodes, one after another: a world comes back each time, never two, and nothing is left."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import LIMIT_S, alive

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EVENTS = int(os.environ.get("CHAOS_EVENTS", "60"))
WORKER = """
subprocess.Popen(["sleep", "300"], start_new_session=RANK == 0)
if RANK == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)
meet()
signal.pause()
"""
OPTIONS = (
    "--nnodes=2:3",
    "--nproc-per-node=2",
    "--max-restarts=1000",
    "--max-rank-faults=1000",  # or a node that is lost for the third time gets no new place
    "--shutdown-timeout=0.3",
    "--rdzv-conf=last_call_timeout=0.3",
)


def kill(pid: int) -> None:
    """SIGKILL, where another death has not ended it already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def newest_world(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the highest generation that is complete."""
    for generation in sorted({row["generation"] for row in rows}, reverse=True):
        world = [row for row in rows if row["generation"] == generation]
        if len({row["rank"] for row in world}) == world[0]["world"]:
            return world
    return []


@pytest.mark.timeout(900)
def test_random_deaths_on_three_nodes(nodes, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"CHAOS_SEED={seed}")
    chooser = random.Random(seed)
    nodes.contacts(0, 1, 2)
    nodes.start_all(*OPTIONS, script=WORKER)
    story, slowest_s, agents_killed_s = [], 0.0, {0: [], 1: [], 2: []}

    def steady(after: int) -> list[dict[str, Any]]:
        """Wait for a world of three nodes that all run, newer than `after`."""
        end_s = time.monotonic() + LIMIT_S
        while True:
            rows = nodes.runs[0].notes("up")
            world = newest_world(rows)
            if world and world[0]["generation"] > after and world[0]["world"] == 6 and all(alive(row["pid"]) for row in world):
                older = [row for row in rows if row["generation"] < world[0]["generation"] and alive(row["pid"])]
                assert not older, f"two worlds at once: {older} beside {world}, seed {seed}\n{story}{nodes.story()}"
                return world
            assert time.monotonic() < end_s, f"no world came back, seed {seed}, {story}{nodes.story()}"
            time.sleep(0.02)

    world = steady(-1)
    for number in range(EVENTS):
        index = chooser.randrange(3)
        run = nodes.runs[index]
        kinds = ["worker", "worker", "two workers", "agent", "keeper", "node", "leave", "freeze"]
        kind = chooser.choice(kinds)
        now_s = time.monotonic()
        if kind == "agent" and len([at_s for at_s in agents_killed_s[index] if at_s > now_s - 61]) >= 3:
            kind = "worker"
        story.append((number, kind, index))
        generation = world[0]["generation"]
        pids = [row["pid"] for row in world if row["side"] == str(index)]
        if kind == "worker":
            os.kill(chooser.choice(pids), signal.SIGKILL)
        elif kind == "two workers":
            for pid in chooser.sample([row["pid"] for row in world], 2):
                kill(pid)
        elif kind == "agent":
            agents_killed_s[index].append(now_s)
            os.kill(run.agent(), signal.SIGKILL)
        elif kind == "freeze":  # shorter than any detector's patience: nothing may come of it
            agent = run.agent()
            os.kill(agent, signal.SIGSTOP)
            end_s = time.monotonic() + 1
            while time.monotonic() < end_s:
                assert all(alive(row["pid"]) for row in world), (
                    f"a frozen agent cost a world, seed {seed}, {story}{nodes.story()}"
                )
                time.sleep(0.05)
            os.kill(agent, signal.SIGCONT)
            continue
        else:
            doomed = {"keeper": [run.pid], "leave": [], "node": [run.pid, *run.family()]}[kind]
            if kind == "leave":
                os.kill(run.pid, signal.SIGTERM)
            for pid in doomed:
                kill(pid)
            run.process.wait(LIMIT_S)
            run.nothing_left()
            agents_killed_s[index].clear()
            nodes.start(index, *OPTIONS, script=WORKER)
        world = steady(generation)
        slowest_s = max(slowest_s, time.monotonic() - now_s)
    print(f"slowest return of all three nodes: {slowest_s:.1f} s")
    for run in nodes.runs.values():
        os.kill(run.pid, signal.SIGTERM)
    assert nodes.codes() == [143, 143, 143], nodes.story()
    nodes.nothing_left()
