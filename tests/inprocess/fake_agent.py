"""The agent's end of the line, for tests: says what a test tells it to, or plays a simple job by itself (`play`).

`play`: when all ranks are at the barrier they enter the next generation, with a TCPStore of its own when `store` is set; the first
fault or death interrupts the others; a dead rank is started anew; when all have returned they are released.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from hyperpodrun.agent.wire import link

HERE = Path(__file__).parent
PATIENCE_S = 20.0


class Nursery:
    """Forks workers; one for all tests of a session."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(HERE / "nursery.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline())["ready"]
        os.set_blocking(self.process.stdout.fileno(), False)
        self.codes: dict[int, int] = {}
        self.started: list[int] = []
        self._rest = b""

    def fork(self, script: Path, env: dict[str, str], out: Path) -> int:
        assert self.process.stdin is not None
        order = {"script": str(script), "env": env, "out": str(out)}
        self.process.stdin.write((json.dumps(order) + "\n").encode())
        self.process.stdin.flush()
        deadline = time.monotonic() + PATIENCE_S
        while not self.started:
            self.read(deadline - time.monotonic())
        return self.started.pop()

    def read(self, timeout_s: float = 0.0) -> None:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as wait:
            wait.register(self.process.stdout, selectors.EVENT_READ)
            assert wait.select(max(0.0, timeout_s)) or timeout_s <= 0, "the nursery said nothing"
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "code" in message:
                self.codes[message["pid"]] = message["code"]
            else:
                self.started.append(message["pid"])

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


class Worker:
    """One process and what it has said."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank = rank
        self.pid = pid
        self.line: socket.socket | None = None
        self.said: list[link.FromWorker] = []
        self.barrier: int | None = None
        self.returned = -1
        self.gone = False


class FakeAgent:
    def __init__(self, folder: Path, nursery: Nursery, ranks: int = 1, store: bool = False) -> None:
        self.folder = folder
        self.nursery = nursery
        self.ranks = ranks
        self.with_store = store
        self.stores: dict[int, Any] = {}
        self.welcome = link.Welcome(inplace=True, abort_timeout_s=20.0)
        self.path = folder / "link"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(self.path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.wait = selectors.DefaultSelector()
        self.wait.register(self.listener, selectors.EVENT_READ)
        self.wait.register(nursery.process.stdout, selectors.EVENT_READ)
        self.workers: dict[int, Worker] = {}
        self.decoder = msgspec.msgpack.Decoder(link.FromWorker)
        self.generation = -1
        self.restarts = 0
        self.history: list[tuple[int, link.FromWorker]] = []
        self.times: list[tuple[str, int, float]] = []
        self.env: dict[str, str] = {}
        self.playing = False
        self.ending: int | None = None
        self.released = -1
        self.replace_dead = True
        self.all_pids: list[int] = []

    # --- processes

    def start(self, script: str, **env: str) -> None:
        (self.folder / "script.py").write_text(script)
        self.env.update(env)
        for rank in range(self.ranks):
            self.fork(rank)

    def fork(self, rank: int) -> Worker:
        env = {
            "HYPERPODRUN_LINK": f"unix:{self.path}",
            "HYPERPODRUN_JOB_ID": "test",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "HYPERPODRUN_GENERATION": str(self.generation + 1),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RES_OPTIONS": "timeout:1 attempts:1",  # torch looks the store's name up at each connection, in DNS
            "OUT": str(self.folder),
            **self.env,
        }
        pid = self.nursery.fork(self.folder / "script.py", env, self.folder / f"rank{rank}.txt")
        self.workers[rank] = Worker(rank, pid)
        self.all_pids.append(pid)
        return self.workers[rank]

    def output(self, rank: int = 0) -> str:
        path = self.folder / f"rank{rank}.txt"
        return path.read_text() if path.exists() else ""

    def lines(self, rank: int = 0) -> list[str]:
        return self.output(rank).splitlines()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.workers[rank].pid, number)

    def code(self, rank: int = 0) -> int:
        """Exit code of the present worker of a rank, once it has ended."""
        pid = self.workers[rank].pid
        self.until(lambda: pid in self.nursery.codes, f"rank {rank}'s end")
        return self.nursery.codes[pid]

    # --- talking

    def until(self, done: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + patience_s
        while not done():
            left = deadline - time.monotonic()
            if left < 0:
                raise AssertionError(f"waited in vain for {what}\n" + self.story())
            self.turn(left)

    def story(self) -> str:
        text = "\n".join(f"{rank}: {str(message)[:300]}" for rank, message in self.history[-40:])
        return text + "".join(f"\n--- output {rank}\n{self.output(rank)[-3000:]}" for rank in range(self.ranks))

    def turn(self, timeout_s: float) -> None:
        for key, _ in self.wait.select(timeout_s):
            if key.fileobj is self.listener:
                self.accept()
            elif key.data is None:
                self.nursery.read()
                if self.playing:
                    self.look()
            else:
                self.read(key.data)

    def accept(self) -> None:
        line, _ = self.listener.accept()
        pid = int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        worker = next((one for one in self.workers.values() if one.pid == pid), None)
        if worker is None:
            line.close()
            return
        worker.line = line
        self.wait.register(line, selectors.EVENT_READ, worker)

    def read(self, worker: Worker) -> None:
        assert worker.line is not None
        try:
            data = worker.line.recv(link.PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            self.wait.unregister(worker.line)
            worker.line.close()
            worker.line = None
            worker.gone = True
        else:
            message = self.decoder.decode(data)
            worker.said.append(message)
            if not isinstance(message, link.Beat):
                self.history.append((worker.rank, message))
            if isinstance(message, link.Hello):
                self.send(worker.rank, self.welcome)
            elif isinstance(message, link.AtBarrier):
                worker.barrier = message.generation
            elif isinstance(message, link.Returned):
                worker.returned = message.generation
            elif isinstance(message, link.Fault):
                self.times.append(("fault", worker.rank, time.monotonic()))
        if self.playing:
            self.look()

    def send(self, rank: int, message: link.ToWorker) -> None:
        line = self.workers[rank].line
        if line is None:
            return  # it has ended
        try:
            line.send(msgspec.msgpack.encode(message))
        except OSError:
            pass

    def await_message(self, kind: type, rank: int = 0, count: int = 1) -> Any:
        """The `count`-th message of a kind from a rank's present worker."""
        found: list[Any] = []

        def look() -> bool:
            found[:] = [one for one in self.workers[rank].said if isinstance(one, kind)]
            return len(found) >= count

        self.until(look, f"{kind.__name__} number {count} of rank {rank}")
        return found[count - 1]

    def await_line(self, text: str, rank: int = 0, count: int = 1) -> None:
        self.until_polled(lambda: self.output(rank).count(text) >= count, f"{text!r} from rank {rank}")

    def until_polled(self, done: Callable[[], object], what: str) -> None:
        """For what comes as a file: looked at each few milliseconds."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n" + self.story()
            self.turn(0.005)

    # --- orders

    def enter(self, mode: str = "start", reason: str = "") -> int:
        """All workers enter the next generation."""
        self.generation += 1
        if self.generation:
            self.restarts += 1
        for rank, worker in self.workers.items():
            worker.barrier = None
            self.send(rank, self.entry(rank, mode, reason))
        return self.generation

    def entry(self, rank: int, mode: str, reason: str = "") -> link.Enter:
        env: dict[str, str | None] = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "HYPERPODRUN_GENERATION": str(self.generation),
            "JOB_RESTART_COUNT": str(self.restarts),
        }
        if self.with_store:
            env["MASTER_PORT"] = str(self.store_port())
        return link.Enter(self.generation, self.restarts, env, mode, reason)  # type: ignore[arg-type]

    def store_port(self) -> int:
        """A store a generation; the older ones stay, so that whoever waits in one is not freed by its end."""
        from datetime import timedelta

        from torch.distributed import TCPStore

        if self.generation not in self.stores:
            self.stores[self.generation] = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        return int(self.stores[self.generation].port)

    def interrupt(self, reason: str = "a fault elsewhere", rank: int | None = None) -> None:
        self.times.append(("interrupt", -1, time.monotonic()))
        for each, worker in self.workers.items():
            if worker.line is not None and rank in (None, each):
                self.send(each, link.Interrupt(self.generation, reason))

    def release(self) -> None:
        self.released = self.generation
        for rank in self.workers:
            self.send(rank, link.Released(self.generation))

    # --- playing a job

    def play(self, until_generation: int | None = None, patience_s: float = PATIENCE_S) -> None:
        """Run the job until all workers have ended, or until this generation has been entered."""
        self.playing = True
        self.look()
        self.until(
            lambda: (
                all(worker.pid in self.nursery.codes for worker in self.workers.values())
                if until_generation is None
                else self.generation >= until_generation
            ),
            "the job",
            patience_s,
        )
        self.playing = False

    def look(self) -> None:
        workers = self.workers.values()
        if self.ending is None:
            for worker in workers:
                for message in worker.said:
                    if isinstance(message, (link.Fault, link.Unfit)) and message.generation == self.generation:
                        self.end_generation(f"rank {worker.rank}: {getattr(message, 'headline', '')}")
                        break
                code = self.nursery.codes.get(worker.pid)
                if code is not None and not (code == 0 and worker.returned == self.generation):
                    self.end_generation(f"rank {worker.rank} has ended")
        for worker in list(workers):
            if worker.pid in self.nursery.codes and self.replace_dead and self.ending is not None:
                self.read_rest(worker)
                self.fork(worker.rank)
        workers = self.workers.values()
        if all(worker.barrier is not None and worker.barrier in (-1, self.generation) for worker in workers):
            self.ending = None
            self.enter("start" if self.generation < 0 else "inplace")
            self.times.append(("enter", -1, time.monotonic()))
        elif (
            self.ending is None
            and 0 <= self.generation != self.released
            and all(worker.returned == self.generation for worker in workers)
        ):
            self.release()

    def read_rest(self, worker: Worker) -> None:
        if worker.line is not None:
            self.wait.unregister(worker.line)
            worker.line.close()
            worker.line = None

    def end_generation(self, reason: str) -> None:
        if self.generation < 0 or self.ending == self.generation:
            return
        self.ending = self.generation
        self.interrupt(reason)

    def close(self) -> None:
        self.playing = False
        for pid in self.all_pids:
            if pid not in self.nursery.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.until(lambda: all(pid in self.nursery.codes for pid in self.all_pids), "their end")
        for worker in self.workers.values():
            self.read_rest(worker)
        self.stores.clear()
        self.wait.close()
        self.listener.close()
