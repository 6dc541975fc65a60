"""A process that does of an agent only what starting workers needs: a loop, a subreaper, reaping. Run by path: `python
lone_agent.py ORDER`.

ORDER is a file with a JSON object: `program` (run_as, target, args), `out` (a folder: rank N's streams go to N.out and N.err
there), and if wanted `ranks` (1), `attempts` (1), `env` (added for each rank), `cpus`, `devices`, `port`, any field of
JobConfig under `config`; `kill-server`: "loading" or "between" attempts;
`cancel`: "at-once", "loading" or "asked"; `fail-spawn-after`: so many processes, then EAGAIN. Prints a
JSON object: `said`, `attempts` (each {local rank: wait status}, or why it failed), `codes` (of failed starts), `left`
(processes of theirs that were still there), `servers` (how many forkservers there were), `pid`.
"""

import errno
import json
import os
import signal
import sys
from typing import Any

import msgspec

from hyperpodrun.agent import family
from hyperpodrun.agent.children import Children
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.launch import Program, Worker
from hyperpodrun.agent.workers import environment
from hyperpodrun.agent.workers.start import WorkerStarter


class LoneAgent:
    def __init__(self, order: dict[str, Any]) -> None:
        family.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # ours, not the workers'
        self.order = order
        self.out = order["out"]
        program = msgspec.convert(order["program"], Program)
        self.ranks = order.get("ranks", 1)
        fields = {"job_id": "test", "nproc_per_node": self.ranks, **order.get("config", {})}
        self.config = msgspec.convert({"program": program, **fields}, JobConfig)
        self.reactor = Reactor()
        self.reactor.handle_signals([signal.SIGCHLD], lambda _: self.children.reap())
        self.children = Children(self.reactor)
        self.said: list[str] = []
        self.attempts: list[dict[str, int] | str] = []
        self.codes: list[int] = []
        self.left = 0
        self.fail_spawn_after = order.get("fail-spawn-after")
        if self.fail_spawn_after is not None:
            self.break_spawning()
        base = dict(os.environb)
        base[names.FAMILY.encode()] = b"lone"
        self.base = base
        self.starter = WorkerStarter(self.reactor, self.config, base, self.children.watch, self.open_helper, self.said.append)
        self.servers: set[int] = set()
        self.pids: dict[int, int] = {}

    def open(self, name: str) -> int:
        return os.open(os.path.join(self.out, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def open_helper(self, name: str) -> tuple[int, int]:
        return self.open(f"{name}.out"), self.open(f"{name}.err")

    def run(self) -> None:
        self.starter.prepare()
        self.servers |= self.starter.helper_pids()
        self.begin()
        cancel = self.order.get("cancel")
        if cancel == "at-once":
            self.starter.cancel()
            self.until_childless()
        elif cancel == "loading":
            self.reactor.turn(0.01)
            self.starter.cancel()
            self.until_childless()
        elif cancel == "asked":
            self.cancel_once_asked()
        if self.order.get("kill-server") == "loading":
            self.kill_server()
        self.reactor.run()
        self.starter.close()

    def break_spawning(self) -> None:
        """Let the system refuse new processes after so many."""
        real, left = os.posix_spawn, self.fail_spawn_after

        def posix_spawn(*args: Any, **more: Any) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return real(*args, **more)

        os.posix_spawn = posix_spawn

    def cancel_once_asked(self) -> None:
        """Turn the loop until the forkserver was asked, then call the start off."""
        while self.starter._server.state == "loading":
            self.reactor.turn()
        self.starter.cancel()
        self.until_childless()

    def until_childless(self) -> None:
        """Nothing can run later when nothing is there: end helpers, wait for all children, stop."""
        self.close_streams()
        self.starter.close()
        while family.descendants(os.getpid(), family.all_processes()):
            self.reactor.turn(0.05)
        self.reactor.stop()

    def begin(self) -> None:
        self.ends: dict[str, int] = {}
        workers = []
        for rank in range(self.ranks):
            env = environment.worker_env(
                self.config, self.base, local_rank=rank, rank=rank, world_size=self.ranks, group_rank=0, group_world_size=1,
                restart_count=len(self.attempts), generation=len(self.attempts), node="here",
                master_addr="127.0.0.1", rank0_addr="127.0.0.1",
                master_port=self.order.get("port", 29500), error_file="/nowhere", family="lone", use_agent_store=False, link="",
                visible_device=(self.order.get("devices") or [None] * self.ranks)[rank],
            )  # fmt: skip
            env += [(os.fsencode(k), os.fsencode(v)) for k, v in self.order.get("env", {}).items()]
            workers.append(Worker(rank, environment.worker_argv(self.config, rank), env, self.order.get("cpus")))
        self.streams = [(self.open(f"{rank}.out"), self.open(f"{rank}.err")) for rank in range(self.ranks)]
        self.starter.start(workers, self.streams, self.started, self.failed)
        self.servers |= self.starter.helper_pids()

    def started(self, pids: list[tuple[int, int]]) -> None:
        self.close_streams()
        self.pids = dict(pids)
        for rank, pid in pids:
            self.children.watch(pid, lambda status, rank=rank: self.ended(rank, status))

    def close_streams(self) -> None:
        while self.streams:
            for fd in self.streams.pop():
                os.close(fd)

    def kill_server(self) -> None:
        for pid in self.starter.helper_pids():
            os.kill(pid, signal.SIGKILL)

    def ended(self, rank: int, status: int) -> None:
        self.ends[str(rank)] = status
        if len(self.ends) == self.ranks:
            self.attempts.append(self.ends)
            self.next()

    def failed(self, sentence: str, code: int) -> None:
        self.close_streams()
        self.codes.append(code)
        below = {process.pid for process in family.descendants(os.getpid(), family.all_processes())}
        self.left += len(below - self.starter.helper_pids())
        self.attempts.append(sentence)
        self.next()

    def next(self) -> None:
        if len(self.attempts) == self.order.get("attempts", 1):
            self.reactor.stop()
            return
        if self.order.get("kill-server") == "between":
            self.kill_server()
            for pid in self.starter.helper_pids():
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, but not known to be: the next order meets a closed line
        self.begin()


def main() -> None:
    with open(sys.argv[1]) as file:
        order = json.load(file)
    agent = LoneAgent(order)
    agent.run()
    print(
        json.dumps(
            {
                "said": agent.said,
                "attempts": agent.attempts,
                "codes": agent.codes,
                "left": agent.left,
                "servers": len(agent.servers),
                "pid": os.getpid(),
            }
        )
    )


if __name__ == "__main__":
    main()
