"""One attempt on this node: the worker group core joined to processes, pipes and the clock.

Events from the starter, the reaper and the clock go into `workers/group.py`, the effects it gives are carried out here. An attempt
that is over has been swept, and its output has been read; only then is it judged.
"""

import os
import signal
from collections.abc import Callable

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.failure import FailureDesk, Verdict
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.launch import Worker
from hyperpodrun.agent.workers import environment, group
from hyperpodrun.agent.workers.cgroup import WorkerCgroup
from hyperpodrun.agent.workers.output import Output
from hyperpodrun.agent.workers.placement import Place
from hyperpodrun.agent.workers.start import WorkerStarter
from hyperpodrun.agent.workers.sweep import Sweeper


class AttemptRunner:
    """Runs one attempt after another. `on_over` gets the verdict, `on_first_failure` the rank that failed first, at once,
    `on_drained` each rank whose last words have been read.

    `places` says where each local rank runs, `link` where the agent listens for them ("": nowhere); `base_env` is the launcher's
    environment, its mark included.
    """

    def __init__(
        self,
        config: JobConfig,
        reactor: Reactor,
        output: Output,
        starter: WorkerStarter,
        sweeper: Sweeper,
        cgroup: WorkerCgroup,
        desk: FailureDesk,
        watch_child: Callable[[int, Callable[[int], None]], None],
        base_env: dict[bytes, bytes],
        family: str,
        node: str,
        on_over: Callable[[Verdict], None],
        on_change: Callable[[], None],
        on_first_failure: Callable[[group.End], None] = lambda _end: None,
        on_drained: Callable[[int], None] = lambda _local_rank: None,
    ) -> None:
        self.world: World | None = None
        self.places: list[Place] = []
        self.link = ""
        self._config = config
        self._reactor = reactor
        self._output = output
        self._starter = starter
        self._sweeper = sweeper
        self._cgroup = cgroup
        self._desk = desk
        self._watch_child = watch_child
        self._base_env = base_env
        self._family = family
        self._node = node
        self._on_over = on_over
        self._on_change = on_change
        self._on_first_failure = on_first_failure
        self._on_drained = on_drained
        self._group = group.WorkerGroup(config.shutdown_signal, config.shutdown_timeout_s, config.exit_skew_timeout_s)
        self._store: tuple[str, int] | None = None
        self._tick: Timer | None = None
        self._draining: set[int] = set()
        self._swept: tuple[str, ...] | None = None
        self._streams: list[tuple[int, int]] = []

    # --- for the agent

    def run(self, world: World, store: tuple[str, int] | None = None) -> None:
        """Start this node's ranks of that world. `store` is where the agent's own store listens; None: rank 0 opens one."""
        self.world = world
        self._store = store
        self._draining = set()
        self._swept = None
        self._desk.begin_attempt(world)
        self._feed(group.Start(self._config.nproc_per_node))

    def stop(self, kill: bool) -> None:
        """End the attempt, with the grace or at once."""
        self._feed(group.Stop(kill))

    def others_done(self) -> None:
        """Another node's ranks have all ended well: those here have --exit-skew-timeout left."""
        self._feed(group.OthersDone())

    def forward(self, number: int) -> None:
        """A signal for every rank."""
        for pid in self._group.alive.values():
            os.kill(pid, number)

    @property
    def pids(self) -> dict[int, int]:
        """Local rank -> pid of each worker that runs."""
        return self._group.alive

    # --- the group core

    def _feed(self, event: group.Event) -> None:
        effects = self._group.handle(event, self._reactor.now_s())
        self._reset_tick()
        for effect in effects:
            match effect:
                case group.MakeProcesses():
                    self._make_processes()
                case group.CancelStart():
                    self._starter.cancel()
                    self._close_streams()
                case group.Ask(local_ranks):
                    self._ask(local_ranks)
                case group.DumpStacks(local_ranks, why):
                    self._desk.dump_stacks({r: self._group.alive[r] for r in local_ranks}, why)
                case group.Kill():
                    self._sweeper.kill_now()
                case group.FirstFailure(end):
                    self._desk.first_failure(end, others=len(self._group.alive))
                    self._on_first_failure(end)
                case group.Sweep():
                    self._sweeper.sweep(self._sweep_done)
                case group.Over():
                    self._on_over(self._desk.judge(effect))

    def _reset_tick(self) -> None:
        if self._tick:
            self._tick.cancel()
        deadline_s = self._group.next_deadline_s()
        self._tick = None if deadline_s is None else self._reactor.call_at(deadline_s, lambda: self._feed(group.Tick()))

    def _make_processes(self) -> None:
        world, config = self.world, self._config
        assert world is not None
        workers = []
        try:
            self._output.begin_attempt(world.restart_count, range(world.first_rank, world.first_rank + config.nproc_per_node))
            for local_rank in range(config.nproc_per_node):
                self._streams.append(self._output.open_worker(local_rank))
        except OSError as error:
            self._start_failed(reason_of(error), exit_codes.CONFIG)
            return
        for local_rank, place in enumerate(self.places):
            env = environment.worker_env(
                config,
                self._base_env,
                local_rank=local_rank,
                rank=world.first_rank + local_rank,
                world_size=world.world_size,
                group_rank=world.group_rank,
                group_world_size=world.group_world_size,
                restart_count=world.restart_count,
                generation=world.generation,
                node=self._node,
                master_addr=self._store[0] if self._store else world.master_addr,
                master_port=self._store[1] if self._store else world.master_port,
                error_file=self._output.error_file(local_rank),
                family=self._family,
                use_agent_store=self._store is not None,
                rank0_addr=world.master_addr,
                link=self.link,
                visible_device=place.visible_device,
            )
            workers.append(Worker(local_rank, environment.worker_argv(config, local_rank), env, place.cpus))
        self._starter.start(workers, self._streams, self._started, self._start_failed)

    def _started(self, pids: list[tuple[int, int]]) -> None:
        self._close_streams()
        self._cgroup.add(pid for _, pid in pids)
        self._feed(group.Started(tuple(pids)))
        for local_rank, pid in pids:
            self._watch_child(pid, lambda status, local_rank=local_rank: self._exited(local_rank, status))  # type: ignore[misc]
        self._on_change()

    def _start_failed(self, reason: str, code: int) -> None:
        self._close_streams()
        self._desk.start_failed(reason, code)
        self._feed(group.StartFailed(reason))

    def _close_streams(self) -> None:
        """Our copies of the pipes' write ends: they must not keep the pipes open."""
        for pair in self._streams:
            for fd in pair:
                os.close(fd)
        self._streams = []

    def _exited(self, local_rank: int, status: int) -> None:
        self._draining.add(local_rank)
        self._output.worker_ended(local_rank, lambda: self._drained(local_rank))
        self._feed(group.Exited(local_rank, status))

    def _drained(self, local_rank: int) -> None:
        self._draining.discard(local_rank)
        self._on_drained(local_rank)
        self._clear()

    def _ask(self, local_ranks: tuple[int, ...]) -> None:
        for local_rank in local_ranks:
            os.kill(self._group.alive[local_rank], self._config.shutdown_signal)
            os.kill(self._group.alive[local_rank], signal.SIGCONT)  # a frozen worker takes it only when it runs

    def _sweep_done(self, left: tuple[str, ...]) -> None:
        self._swept = left
        self._clear()

    def _clear(self) -> None:
        """The attempt is over once it is swept and its output read."""
        if self._swept is not None and not self._draining:
            left, self._swept = self._swept, None
            self._desk.tell_unkillable(left)
            self._feed(group.Swept(left))


def reason_of(error: Exception) -> str:
    """An error of the system as part of a sentence: the file, then what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)
