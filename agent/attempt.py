"""One attempt on this node: the worker group core joined to processes, pipes, links and the clock.

Events from the starter, the reaper, the workers' links and the clock go into `workers/group.py`, the effects it gives are carried
out here. An attempt that is over has been swept, and its output has been read; only then is it judged. With in-process restart it
runs through several worlds: `on_back` says that one is over, `go_on` begins the next.
"""

import os
import signal
from collections import deque
from collections.abc import Callable
from functools import partial

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.failure import FailureDesk, Verdict
from hyperpodrun.agent.health.hang import UNCOUNTED_S, HangWatch, Unwatched
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.remains import Remains
from hyperpodrun.agent.wire import exit_codes, link, names
from hyperpodrun.agent.wire.launch import Worker
from hyperpodrun.agent.worker_links import WorkerLinks
from hyperpodrun.agent.workers import environment, group, group_words, recall, stacks
from hyperpodrun.agent.workers.cgroup import WorkerCgroup
from hyperpodrun.agent.workers.output import Output
from hyperpodrun.agent.workers.placement import Place
from hyperpodrun.agent.workers.start import WorkerStarter
from hyperpodrun.agent.workers.sweep import Sweeper

SLOW_S = 1.0
"""A recall that takes longer is told of while it goes on."""


class AttemptRunner:
    """Runs one attempt after another. `on_over` gets the verdict, `on_first_failure` the rank that failed first, at once,
    `on_further_failure` others, `on_drained` each rank whose last words have been read. `on_back` gets the verdict of a generation
    whose workers wait at the barrier, `on_returned` and `on_all_in` the word that the function has returned on, or been entered by,
    all ranks here.

    `places` says where each local rank runs; `base_env` is the launcher's environment, its mark included.
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
        on_first_failure: Callable[[group_words.End], None],
        on_further_failure: Callable[[group_words.End], None],
        on_drained: Callable[[int], None],
        on_back: Callable[[Verdict], None],
        on_returned: Callable[[], None],
        on_all_in: Callable[[], None],
    ) -> None:
        self.world: World | None = None
        self.places: list[Place] = []
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
        self._on_further_failure = on_further_failure
        self._on_drained = on_drained
        self._on_back = on_back
        self._on_returned = on_returned
        self._on_all_in = on_all_in
        back = recall.Recall(config.abort_timeout_s, config.inprocess_timeout_s) if config.inprocess_restart else None
        self._group = group.WorkerGroup(config.shutdown_signal, config.shutdown_timeout_s, config.exit_skew_timeout_s, back)
        self.links = WorkerLinks(reactor, config, lambda: self._group.alive, self._said, self._unlinked)
        # A number of restarts that somebody has asked for is theirs to spend, where nobody can know of progress.
        by_time = config.inprocess_restart and not config.max_restarts_given
        self._hangs = HangWatch(config.hang_timeout_s, UNCOUNTED_S if by_time else 0.0)
        self._hang_tick: Timer | None = None
        self._remains = Remains(sweeper, output.error_file, self._swept_alone)
        self._effects: deque[group_words.Effect] = deque()
        self._busy = False
        self._slow: Timer | None = None
        self._plain_told = False
        self._failed_at_s: float | None = None
        self._reason = ""
        self._store: tuple[str, int] | None = None
        self._tick: Timer | None = None
        self._asked_to_dump: dict[int, int] = {}
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
        self._reason = ""
        self._failed_at_s = None
        self._desk.begin_attempt(world)
        self._hangs.begin()
        self._feed(group_words.Start(self._config.nproc_per_node, world.generation))

    def go_on(self, world: World, store: tuple[str, int] | None = None, reason: str = "") -> None:
        """After `on_back`: the next world, with the processes that are there. `reason` is for the workers: why again."""
        self.world = world
        self._store = store
        self._reason = reason
        self._desk.begin_attempt(world)
        self._hangs.begin()
        self._feed(group_words.Reenter(world.generation))
        self._on_change()

    def leave(self, reason: str) -> None:
        """The world is lost elsewhere: bring the workers out of it, in place where that saves one; `on_back` or `on_over` comes."""
        self._failed_at_s = self._failed_at_s or self._reactor.now_s()
        self._feed(group_words.Leave(reason))

    def release(self) -> None:
        """The function has returned on all ranks of the world."""
        self._feed(group_words.Release())

    def assembled(self) -> None:
        """All ranks of the world are inside their function."""
        self._hangs.assembled(self._reactor.now_s())
        self._reset_tick()

    @property
    def kept(self) -> int:
        """How many processes wait at the barrier."""
        return len(self._group.recall.parked) if self._group.state is group.State.BACK else 0

    def stop(self, kill: bool, part: bool = False) -> None:
        """End the attempt, with the grace or at once. `part`: other processes take over what these hold."""
        self._feed(group_words.Stop(kill, part))

    def ask_with(self, number: int) -> None:
        """What asks workers to leave from here on, unless they are killed without being asked."""
        if self._group.shutdown_signal != signal.SIGKILL:
            self._group.shutdown_signal = number

    def others_done(self) -> None:
        """Another node's ranks have all ended well: those here have --exit-skew-timeout left."""
        self._feed(group_words.OthersDone())

    def forward(self, number: int) -> None:
        """A signal for every rank."""
        for pid in self._group.alive.values():
            os.kill(pid, number)

    @property
    def progressed(self) -> bool:
        """Has a rank here completed a step in this generation, as far as can be known?"""
        return self._hangs.progressed(self._reactor.now_s())

    @property
    def recalled(self) -> bool:
        """Are the workers being brought, or were they, to the barrier in place?"""
        return self._group.state in (group.State.RECALLING, group.State.BACK)

    @property
    def pids(self) -> dict[int, int]:
        """Local rank -> pid of each worker that runs."""
        return self._group.alive

    # --- the group core

    def _feed(self, event: group_words.Event) -> None:
        """Effects are carried out in the order given; those of events that come of it follow."""
        self._effects += self._group.handle(event, self._reactor.now_s())
        if self._busy:
            return
        self._busy = True
        try:
            while self._effects:
                self._carry_out(self._effects.popleft())
        finally:
            self._busy = False
        if self._group.state not in (group.State.STARTING, group.State.RUNNING):
            self._hangs.stop(self._reactor.now_s())
        self._reset_tick()

    def _carry_out(self, effect: group_words.Effect) -> None:
        match effect:
            case group_words.MakeProcesses(local_ranks):
                self._make_processes(local_ranks)
            case group_words.CancelStart():
                self._starter.cancel()
                self._close_streams()
            case group_words.Part(local_ranks):
                self._enough_waiting()
                for local_rank in local_ranks:
                    self.links.send(local_rank, link.Part())
            case group_words.Ask(local_ranks):
                self._ask(local_ranks)
            case recall.DumpStacks(local_ranks, why, ends):
                self._dump_stacks({r: pid for r in local_ranks if (pid := self._group.alive.get(r))}, why, ends)
            case group_words.Kill():
                self._sweeper.kill_now()
            case group_words.FirstFailure(end):
                self._first_failure(end)
            case group_words.FurtherFailure(end):
                self._on_further_failure(end)
            case group_words.Sweep():
                self._sweeper.sweep(self._sweep_done)
            case group_words.Back():
                self._enough_waiting()
                self._on_back(self._desk.judge_back(effect))
            case group_words.Over():
                self._enough_waiting()
                self._remains.forget()
                self._on_over(self._desk.judge(effect))
            case _:
                self._carry_out_recall(effect)

    def _carry_out_recall(self, effect: group_words.Effect) -> None:
        """What concerns single workers, over their links."""
        world = self.world
        assert world is not None
        match effect:
            case recall.Enter(local_ranks):
                self._hangs.entered(local_ranks, self._reactor.now_s())
                for local_rank in local_ranks:
                    self.links.send(local_rank, self._entry(local_rank, world))
            case recall.Interrupt(local_ranks, reason):
                for local_rank in local_ranks:
                    self.links.send(local_rank, link.Interrupt(world.generation, reason))
            case recall.Released(local_ranks):
                for local_rank in local_ranks:
                    self.links.send(local_rank, link.Released(world.generation))
            case recall.KillAlone(local_ranks):
                for local_rank in local_ranks:
                    if pid := self._group.alive.get(local_rank):
                        self._remains.kill(local_rank, pid)
            case recall.SweepAlone(local_ranks):
                for local_rank in local_ranks:
                    self._remains.sweep(local_rank)
            case recall.AllReturned():
                self._on_returned()
            case recall.AllIn():
                self._on_all_in()
                if self._failed_at_s is not None:
                    self._desk.back_after(self._reactor.now_s() - self._failed_at_s)
                    self._failed_at_s = None

    def _dump_stacks(self, pids: dict[int, int], why: str, ends: bool) -> None:
        self._desk.tell_dump(pids, why)
        for local_rank, pid in sorted(pids.items()):
            if self.links.send(local_rank, link.Dump()):
                if ends:
                    self._asked_to_dump[local_rank] = pid
                    self._reactor.call_later(stacks.ANSWER_S, partial(self._dump_by_signal, local_rank, pid))
                    self._desk.dump_c_frames(local_rank, pid)
            else:
                self._desk.dump_by_signal(pid)
                self._desk.dump_c_frames(local_rank, pid)

    def _dump_by_signal(self, local_rank: int, pid: int) -> None:
        """Whoever has said anything since lives, and prints its stacks itself."""
        if self._asked_to_dump.get(local_rank) == pid == self._group.alive.get(local_rank):
            self._desk.dump_by_signal(pid)

    def _first_failure(self, end: group_words.End) -> None:
        self._failed_at_s = end.at_s
        if self._config.inprocess_restart and not self._hangs.greeted and not self._plain_told:
            self._plain_told = True
            self._output.say("nothing here can be restarted in place: no rank had come to a function under @HPWrapper")
        if self._group.state in (group.State.STOPPING, group.State.SWEEPING):
            self._desk.first_failure(end, others=len(self._group.alive))
        else:
            self._slow = self._reactor.call_later(SLOW_S, lambda: self._desk.slow_to_leave(end, self._group.recall.late()))
        self._on_first_failure(end)

    def _enough_waiting(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None

    def _reset_tick(self) -> None:
        if self._tick:
            self._tick.cancel()
        deadline_s = self._group.next_deadline_s()
        self._tick = None if deadline_s is None else self._reactor.call_at(deadline_s, lambda: self._feed(group_words.Tick()))
        hang_s = self._hangs.next_deadline_s()
        if self._hang_tick is not None and (
            hang_s is None or self._hang_tick.callback is None or hang_s < self._hang_tick.when_s
        ):
            self._hang_tick.cancel()
            self._hang_tick = None
        if hang_s is not None and self._hang_tick is None:
            self._hang_tick = self._reactor.call_at(hang_s, self._look_for_hangs)

    def _look_for_hangs(self) -> None:
        """At most this often: a deadline that moved away meanwhile is looked at again when it comes."""
        self._hang_tick = None
        verdict = self._hangs.tick(self._reactor.now_s())
        if isinstance(verdict, Unwatched):
            self._output.say(
                f"--hang-timeout watches nobody: no rank here has come to a function under @HPWrapper in {verdict.since_s:g} s"
            )
            self._reset_tick()
        elif verdict is not None:
            self._feed(group_words.Hung(verdict.local_ranks, verdict.why, verdict.deaf))
        else:
            self._reset_tick()

    def _make_processes(self, local_ranks: tuple[int, ...]) -> None:
        world, config = self.world, self._config
        assert world is not None
        ranks = range(world.first_rank, world.first_rank + config.nproc_per_node)
        wanted = local_ranks or tuple(range(config.nproc_per_node))
        try:
            if local_ranks:
                self._output.begin_generation(ranks, local_ranks)
            else:
                self._output.begin_attempt(world.restart_count, ranks)
            for local_rank in wanted:
                self._streams.append(self._output.open_worker(local_rank))
        except OSError as error:
            self._start_failed(reason_of(error), exit_codes.CONFIG)
            return
        workers = [
            Worker(r, environment.worker_argv(config, r), self._environment(r, world), self.places[r].cpus) for r in wanted
        ]
        self._starter.start(workers, self._streams, self._started, self._start_failed)

    def _environment(self, local_rank: int, world: World) -> list[tuple[bytes, bytes]]:
        return environment.worker_env(
            self._config,
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
            link=self.links.address,
            visible_device=self.places[local_rank].visible_device,
        )

    def _entry(self, local_rank: int, world: World) -> link.Enter:
        """What a worker at the barrier is told: every variable that describes its rank, as a new process would find it."""
        found = {os.fsdecode(name): os.fsdecode(value) for name, value in self._environment(local_rank, world)}
        fresh = self._group.recall.is_fresh(local_rank)
        return link.Enter(
            world.generation,
            world.restart_count,
            {name: found.get(name) for name in sorted(names.PER_RANK)},
            ("process" if world.restart_count else "start") if fresh else "inplace",
            self._reason,
        )

    def _started(self, pids: list[tuple[int, int]]) -> None:
        self._close_streams()
        self._cgroup.add(pid for _, pid in pids)
        self._hangs.born([local_rank for local_rank, _ in pids], self._reactor.now_s())
        self._feed(group_words.Started(tuple(pids)))
        for local_rank, pid in pids:
            self._watch_child(pid, lambda status, local_rank=local_rank: self._exited(local_rank, status))  # type: ignore[misc]
        self._on_change()

    def _start_failed(self, reason: str, code: int) -> None:
        self._close_streams()
        self._desk.start_failed(reason, code)
        self._feed(group_words.StartFailed(reason))

    def _close_streams(self) -> None:
        """Our copies of the pipes' write ends: they must not keep the pipes open."""
        for pair in self._streams:
            for fd in pair:
                os.close(fd)
        self._streams = []

    def _exited(self, local_rank: int, status: int) -> None:
        self._draining.add(local_rank)
        pid = self._group.alive.get(local_rank, 0)
        self.links.ended(pid)
        self._hangs.gone(local_rank)
        self._remains.ended(local_rank, pid)
        self._output.worker_ended(local_rank, lambda: self._drained(local_rank))
        self._feed(group_words.Exited(local_rank, status))

    def _drained(self, local_rank: int) -> None:
        self._draining.discard(local_rank)
        self._on_drained(local_rank)
        self._remains.drained(local_rank)
        self._clear()

    def _swept_alone(self, local_rank: int, left: tuple[str, ...]) -> None:
        self._desk.tell_unkillable(left)
        self._feed(group_words.SweptAlone((local_rank,)))

    def _said(self, local_rank: int, message: link.FromWorker) -> None:
        self._asked_to_dump.pop(local_rank, None)
        self._hangs.heard(local_rank, message, self._reactor.now_s())
        if isinstance(message, link.Returned):
            self._hangs.gone(local_rank)
        self._feed(group_words.Said(local_rank, message))

    def _unlinked(self, local_rank: int) -> None:
        self._feed(group_words.Unlinked(local_rank))

    def _ask(self, local_ranks: tuple[int, ...]) -> None:
        for local_rank in local_ranks:
            if pid := self._group.alive.get(local_rank):
                # At the barrier the user's handler of the signal may do no more than to note the wish.
                self.links.send(local_rank, link.End(0, "no world follows in this process"))
                os.kill(pid, self._group.shutdown_signal)
                os.kill(pid, signal.SIGCONT)  # a frozen worker takes it only when it runs

    def _sweep_done(self, left: tuple[str, ...]) -> None:
        self._swept = left
        self._clear()

    def _clear(self) -> None:
        """The attempt is over once it is swept and its output read."""
        if self._swept is not None and not self._draining:
            left, self._swept = self._swept, None
            self._desk.tell_unkillable(left)
            self._feed(group_words.Swept(left))


def reason_of(error: Exception) -> str:
    """An error of the system as part of a sentence: the file, then what is wrong with it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)
