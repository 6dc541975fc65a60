"""A process that does of an agent only what starting workers needs: a loop, a subreaper, reaping. Run by path: `python lone_agent.py ORDER`.

ORDER is a JSON object: `program` (run_as, target, args), `out` (a folder: rank N's streams go to N.out and N.err there), and if wanted `ranks` (1),
`attempts` (1), `env` (added for each rank), `cpus`, and any field of JobConfig under `config`. `hooks` names moments with something to do then:
`{"forking": "kill-server"}`. Prints a JSON object: `said`, `attempts` (a list of {local rank: wait status}, or of a failure), `helpers`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from hyperpodrun.agent import family
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import names
from hyperpodrun.agent.wire.launch import Program, Worker
from hyperpodrun.agent.workers import environment
from hyperpodrun.agent.workers.start import WorkerStarter


class LoneAgent:
    def __init__(self, order: dict[str, Any]) -> None:
        family.become_subreaper()
        self.order = order
        self.out = order["out"]
        program = msgspec.convert(order["program"], Program)
        self.ranks = order.get("ranks", 1)
        fields = {"job_id": "test", "nproc_per_node": self.ranks, **order.get("config", {})}
        self.config = msgspec.convert({"program": program, **fields}, JobConfig)
        self.reactor = Reactor()
        self.reactor.handle_signals([signal.SIGCHLD], lambda _: self.reap())
        self.watched: dict[int, Callable[[int], None]] = {}
        self.unclaimed: dict[int, int] = {}
        self.said: list[str] = []
        self.attempts: list[dict[str, int] | str] = []
        self.codes: list[int] = []
        base = dict(os.environb)
        base[names.FAMILY.encode()] = b"lone"
        self.base = base
        self.starter = WorkerStarter(self.reactor, self.config, base, self.watch, self.open_helper, self.said.append)
        self.servers: set[int] = set()
        self.pids: dict[int, int] = {}

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        if pid in self.unclaimed:
            status = self.unclaimed.pop(pid)
            self.reactor.call_later(0, lambda: on_exit(status))
        else:
            self.watched[pid] = on_exit

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if callback := self.watched.pop(pid, None):
                callback(status)
            else:
                self.unclaimed[pid] = status

    def open(self, name: str) -> int:
        return os.open(os.path.join(self.out, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def open_helper(self, name: str) -> tuple[int, int]:
        return self.open(f"{name}.out"), self.open(f"{name}.err")

    def run(self) -> None:
        self.starter.prepare()
        self.servers |= self.starter.helper_pids()
        if self.order.get("cancel") == "loading":
            self.begin()
            self.starter.cancel()
        elif self.order.get("kill-server") == "loading":
            self.begin()
            self.kill_server()
        else:
            self.begin()
        self.reactor.run()
        self.starter.close()

    def begin(self) -> None:
        self.ends: dict[str, int] = {}
        workers = []
        for rank in range(self.ranks):
            env = environment.worker_env(
                self.config, self.base, local_rank=rank, rank=rank, world_size=self.ranks, group_rank=0, group_world_size=1,
                restart_count=len(self.attempts), generation=len(self.attempts), node="here", master_addr="127.0.0.1",
                master_port=self.order.get("port", 29500), error_file="/nowhere", family="lone", use_agent_store=False,
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
            self.watch(pid, lambda status, rank=rank: self.ended(rank, status))

    def close_streams(self) -> None:
        for pair in self.streams:
            for fd in pair:
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
        self.attempts.append(sentence)
        self.next()

    def next(self) -> None:
        if len(self.attempts) == self.order.get("attempts", 1):
            self.reactor.stop()
            return
        if self.order.get("kill-server") == "between":
            self.kill_server()
        self.begin()


def main() -> None:
    order = json.loads(sys.argv[1])
    agent = LoneAgent(order)
    agent.run()
    print(json.dumps({"said": agent.said, "attempts": agent.attempts, "codes": agent.codes, "servers": len(agent.servers), "pid": os.getpid()}))


if __name__ == "__main__":
    main()
