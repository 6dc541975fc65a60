"""Several hosts on one machine, and agents started in them. A host has its own network, address, hostname, pids and /dev/shm.

The rig (`netns_hosts.sh`) makes the hosts; its folder is $HYPERPODRUN_RIGS or `../shared/rigs` beside the repository. Without a rig,
root or namespaces these tests are skipped. Faults are real: cables are cut, packets dropped, hosts killed or stopped.

`pytest tests/net` runs what a change must hold, one test at a time (under xdist they compete for the processors, and only the times
suffer); `pytest tests/net -m slow_network` runs the long ones, `-s` shows what was measured.

All clocks are CLOCK_MONOTONIC, which is one for all hosts here. Workers leave a line every 50 ms; `net_worlds` reads them.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from net_worlds import TRAINING, Worlds

ROOT = Path(__file__).resolve().parents[2]
RIGS = Path(os.environ.get("HYPERPODRUN_RIGS", ROOT.parent / "shared" / "rigs"))
SCRIPT = RIGS / "netns_hosts.sh"
STATE = Path("/run/netrig")
SLOW_COMMAND = "pytest tests/net -m slow_network"
LIMIT_S = 60.0
"""For anything that must come; nothing here takes long by itself, but the machine may be busy."""

_rigs = count()


def _why_not() -> str:
    if not SCRIPT.exists():
        return f"no rig at {SCRIPT} (HYPERPODRUN_RIGS names its folder)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"probe{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    except FileNotFoundError:
        return "no ip command (iproute2)"
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests with hosts are of the network, skipped where there is none to play with; the long ones run when they are asked for."""
    mine = [item for item in items if "hosts" in getattr(item, "fixturenames", ())]
    why = _why_not() if mine else ""
    asked = "slow_network" in str(config.option.markexpr)
    for item in mine:
        item.add_marker(pytest.mark.network)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))
        elif not asked and item.get_closest_marker("slow_network"):
            item.add_marker(pytest.mark.skip(reason=f"long: {SLOW_COMMAND}"))


def _is_in(pid: int, netns: str) -> bool:
    """Is this process in that network namespace? Pids come round, so a pid from a file alone is nobody's name."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/{netns}").st_ino
    except OSError:
        return False


def _take_down(rig: str) -> None:
    """Remove a rig. Its script kills by the pids that it wrote down: those that mean somebody else by now are forgotten first."""
    for noted in (STATE / rig).glob("*.init"):
        if not _is_in(int(noted.read_text() or 0), f"{rig}-{noted.stem}"):
            noted.unlink()
    subprocess.run([SCRIPT, "down"], env={**os.environ, "RIG": rig}, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)


@pytest.fixture(scope="session", autouse=True)
def _leftovers() -> None:
    """Rigs of test runs that were killed themselves."""
    for rig in STATE.glob("net*-*"):
        owner = rig.name.removeprefix("net").partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _take_down(rig.name)


class Agent:
    """One started launcher on one host. Its output is read as it comes, each line with the time at which it came."""

    def __init__(self, host: str, argv: list[str], env: dict[str, str], cwd: Path) -> None:
        self.host = host
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip("\n")))

    def said(self, text: str, since_s: float = 0.0) -> float | None:
        """When it first said so."""
        return next((at for at, line in list(self.lines) if at >= since_s and text in line), None)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def close(self) -> None:
        if not self.ended():
            self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Hosts:
    """The hosts h1..hN of one rig and the agents in them."""

    def __init__(self, size: int, folder: Path, mode: str) -> None:
        self.names = [f"h{i + 1}" for i in range(size)]
        self.folder = folder
        self.agents: dict[str, Agent] = {}
        self.worlds = Worlds(folder)
        self.started_s = time.monotonic()
        self.facts: list[str] = []
        self.lost: set[str] = set()
        """Hosts whose launcher was killed from outside and is not expected to end well."""
        self._all: list[Agent] = []
        number = next(_rigs)
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "HYPERPODRUN_", "TORCHELASTIC_", "SLURM_"))}
        self._env |= {
            "RIG": f"net{os.getpid()}-{number}",
            "NET": f"10.{64 + os.getpid() % 64}.{number % 256}",
            "MODE": mode,
            "HX_CWD": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self._state = STATE / self._env["RIG"]
        self.script = folder / "train.py"
        self.script.write_text(f"FOLDER = {str(folder)!r}\n{TRAINING}")
        self._options: tuple[str, ...] = ()
        self._starts = 0

    # --- the machines

    def rig(self, *verb: str) -> float:
        """Do something to the hosts; when that was (just before)."""
        at = time.monotonic()
        done = subprocess.run(
            [SCRIPT, *verb], env=self._env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{verb}: {done.stderr}{done.stdout}"
        return at

    def init_pid(self, host: str) -> int:
        """Process 1 of a host that is up, as seen from outside."""
        pid = int((self._state / f"{host}.init").read_text())
        assert _is_in(pid, f"{self._env['RIG']}-{host}"), f"{host} is down{self.story()}"
        return pid

    def down(self) -> None:
        """Away with everything, whatever state it is in."""
        _take_down(self._env["RIG"])
        for agent in self._all:
            agent.close()

    def pids(self, host: str, word: str = "") -> list[int]:
        """Processes of that host, but its first, whose command line holds `word`, as seen from outside."""
        init = self.init_pid(host)
        home = os.readlink(f"/proc/{init}/ns/pid")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != init:
                try:
                    if os.readlink(f"/proc/{entry}/ns/pid") == home and word in Path(f"/proc/{entry}/cmdline").read_text():
                        found.append(int(entry))
                except OSError:
                    continue  # gone meanwhile
        return found

    # --- the job

    def start(self, *options: str, on: str | None = None) -> None:
        """Start the launcher with these options (or the last ones) on one host, or on all."""
        self._options = options or self._options
        self._starts += on is None
        for host in [on] if on else self.names:
            argv = [sys.executable, str(RIGS / "hostexec.py"), str(self.init_pid(host))]
            argv += [sys.executable, "-m", "hyperpodrun", "--insecure-mesh", "--peers", ",".join(self.names)]
            argv += ["--max-restarts=9", "--shutdown-timeout=2", *self._options, str(self.script)]
            env = self._env | {"TMPDIR": str(self._tmp(host)), "NET_START": str(self._starts)}
            self.agents[host] = Agent(host, argv, env, self.folder)
            self._all.append(self.agents[host])

    def _tmp(self, host: str) -> Path:
        path = self.folder / f"tmp-{host}"
        path.mkdir(exist_ok=True)
        return path

    def until(self, check: Callable[[], Any], what: str, limit_s: float = LIMIT_S, may_end: bool = False) -> Any:
        """Wait for something that must come, while agents run."""
        end_s = time.monotonic() + limit_s
        while not (value := check()):
            assert time.monotonic() < end_s, f"no sign of {what}{self.story()}"
            assert may_end or not all(agent.ended() for agent in self.agents.values()), f"all ended before {what}{self.story()}"
            time.sleep(0.05)
        return value

    def until_world(self, on: list[str], after_s: float = 0.0, limit_s: float = LIMIT_S) -> Any:
        """A whole world of exactly these hosts that started after that moment."""
        return self.until(lambda: self.worlds.complete(on, after_s), f"a world on {on}", limit_s)

    def until_trains(self, world: Any, steps: int = 10) -> None:
        """Every rank of this world goes on by so many steps from now on."""
        now_s = time.monotonic()
        self.until(lambda: self.worlds.steps_since(world.key, now_s) >= steps, f"progress of {world.key}")

    def kill_everything(self, host: str) -> float:
        """SIGKILL to every process of the host but its init: the network stays, its kernel closes the connections."""
        at = time.monotonic()
        while victims := self.pids(host):
            for pid in victims:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if self.pids(host, "sleep") == self.pids(host):
                break  # the init's own, which it starts again
        return at

    def kill_agent(self, host: str) -> float:
        """SIGKILL to the agent alone; its keeper and its workers stay."""
        pid = self.agent_pid(host)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        return at

    def fail(self, rank: int) -> float:
        """Make a worker end with code 3."""
        at = time.monotonic()
        (self.folder / f"fail-{rank}").touch()
        return at

    def finish(self) -> None:
        """Let the workers end well; every agent still there must end with 0."""
        (self.folder / "finish").touch()
        for host, agent in self.agents.items():
            self.until(agent.ended, f"the end on {host}", may_end=True)
        codes = {host: agent.process.returncode for host, agent in self.agents.items() if host not in self.lost}
        assert set(codes.values()) == {0}, f"{codes}{self.story()}"

    def agent_pid(self, host: str) -> int:
        """The agent process: child of the keeper."""
        for pid in self.pids(host, "hyperpodrun"):
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent in self.pids(host, "hyperpodrun") and "forkserver" not in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        raise AssertionError(f"no agent on {host}{self.story()}")

    def note(self, what: str, seconds: float) -> None:
        """A figure, shown with -s and in the report of a failure; nothing depends on it."""
        self.facts.append(f"{what}: {seconds:.3f} s")
        print(f"\n[net] {what}: {seconds:.3f} s")

    def decided(self, after_s: float) -> float:
        """When the first agent told of a new world."""
        return min((at for a in self.agents.values() if (at := a.said(": world ", after_s)) is not None), default=float("nan"))

    def story(self) -> str:
        zero = self.started_s
        text = [f"\n--- facts {self.facts}\n--- worlds\n{self.worlds.story(zero)}"]
        lines = sorted((at, f"{a.host} {line}") for a in self._all for at, line in list(a.lines))
        text += [f"{at - zero:8.3f} {line}" for at, line in lines[-120:]]
        text += [f"--- {host}: code {agent.process.poll()}" for host, agent in self.agents.items()]
        return "\n".join(text)


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Four hosts, or as many as `@pytest.mark.parametrize("hosts", [(n, mode)], indirect=True)` says; always taken down."""
    size, mode = getattr(request, "param", (4, "veth"))
    made = Hosts(size, tmp_path, mode)
    try:
        made.rig("up", str(size))
        yield made
        made.worlds.validate()
    finally:
        made.down()
