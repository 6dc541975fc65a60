"""The agent of one node: the cores (worker group, job) joined to processes, pipes, signals and the clock.

Everything here is plumbing: events from the reactor go into a core, the effects it gives are carried out. What to do is decided in
`policy/job.py` (the job) and `workers/group.py` (one attempt); how a failure is told in `failure.py`.
"""

import os
import signal
import socket
import time
from collections.abc import Callable

from hyperpodrun.agent import family
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.failure import FailureDesk
from hyperpodrun.agent.keeper import FORWARDED, STOP_SIGNALS, KeeperLink
from hyperpodrun.agent.policy import job as policy
from hyperpodrun.agent.policy.budget import Total, Window
from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.status import Status, StatusFiles, WorkerStatus
from hyperpodrun.agent.wire import exit_codes, names
from hyperpodrun.agent.wire.launch import Worker
from hyperpodrun.agent.workers import environment, group, rendezvous
from hyperpodrun.agent.workers.cgroup import WorkerCgroup
from hyperpodrun.agent.workers.output import Output
from hyperpodrun.agent.workers.placement import places
from hyperpodrun.agent.workers.script import Script
from hyperpodrun.agent.workers.start import WorkerStarter
from hyperpodrun.agent.workers.sweep import Sweeper

FORWARDED_TO_RANKS = (signal.SIGUSR1, signal.SIGUSR2)


def run(config: JobConfig, link: KeeperLink) -> int:
    """Run the job to its end on this node; the exit code."""
    return Agent(config, link).run()


class Agent:
    """`config` is the job, `link` the keeper. One object a process."""

    def __init__(self, config: JobConfig, link: KeeperLink) -> None:
        self.config = config
        self.link = link
        self.node = socket.gethostname()
        self.code = exit_codes.INTERNAL
        self.reactor = Reactor()
        self.base_env = {k: v for k, v in os.environb.items() if k.decode(errors="replace") not in names.NEVER_IN_WORKERS}
        self.base_env[names.FAMILY.encode()] = link.family.encode()
        self.output = Output(self.reactor, config, link.run_dir.path)
        self.cgroup = WorkerCgroup(link.family)
        self.starter = WorkerStarter(self.reactor, config, self.base_env, self.watch_child, self.output.open_helper, self.output.say)
        self.sweeper = Sweeper(self.reactor, link.family, self.starter.helper_pids, self.reap, self.cgroup)
        self.script = Script(self.reactor, self.watch_child, config.python)
        self.status_files = StatusFiles(link.run_dir.path, os.environ.get(names.STATUS_FILE), self.output.say)
        self.group = group.WorkerGroup(config.shutdown_signal, config.shutdown_timeout_s, config.exit_skew_timeout_s)
        self.restarts = Total(config.max_restarts, int(link.memo.get("restarts_used", "0")))
        self.job = policy.Job(
            self.restarts,
            Window(config.max_node_failures, config.restart_window_s),
            pre_script=config.pre_train_script is not None,
            post_script=config.post_train_script is not None,
            restart_count=int(link.memo.get("restart_count", "0")),
        )
        self.desk = FailureDesk(config, self.node, self.reactor, self.output, self.watch_child)
        self.watched: dict[int, Callable[[int], None]] = {}
        self.unclaimed: dict[int, int] = {}
        self.tick_timer: Timer | None = None
        self.draining: set[int] = set()
        self.swept: tuple[str, ...] | None = None
        self.streams: list[tuple[int, int]] = []
        self.ports: set[int] = set()
        self.port = 0
        self.started_at = float(link.memo.get("started_at", f"{time.time()}"))

    # --- life

    def run(self) -> int:
        """From the first attempt to the last; the exit code."""
        family.become_subreaper()
        self.take_signals()
        config = self.config
        try:
            self.output.prepare()
            self.places = places(config, self.base_env)
        except (OSError, ValueError) as error:
            self.output.say(f"{_reason(error)}; the job was not started")
            return exit_codes.CONFIG
        for note in config.notes if not self.link.deaths else ():
            self.output.say(note)
        self.starter.prepare()
        self.advance(policy.Begin(reborn=self.link.deaths > 0))
        self.reactor.run()
        return self.code

    def take_signals(self) -> None:
        """From here on signals are events; those that came before were held back and arrive now."""
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        wanted = {*FORWARDED, *self.config.signals_to_handle} - ({signal.SIGHUP} if ignored else set())
        self.reactor.handle_signals(wanted, self.on_signal)
        self.reactor.handle_signals([signal.SIGCHLD], lambda _: self.reap())
        signal.pthread_sigmask(signal.SIG_SETMASK, self.link.signal_mask)

    def on_signal(self, number: int) -> None:
        """A signal to the launcher (forwarded by the keeper), or the kernel's word that the keeper is gone."""
        if not self.link.alive():
            self.advance(policy.StopSignal(signal.SIGTERM, at_once=True))
        elif number in FORWARDED_TO_RANKS:
            for pid in self.group.alive.values():
                os.kill(pid, number)
        elif number in self.config.signals_to_handle:
            self.advance(policy.StopSignal(number))
        elif number in STOP_SIGNALS:
            self.advance(policy.StopSignal(number, at_once=True))  # not to be handled: its default action, without leftovers

    # --- children

    def watch_child(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call back with the wait status of this child, also when it was reaped a moment ago."""
        status = self.unclaimed.pop(pid, None)
        if status is not None and family.read_process(pid) is None:
            self.reactor.call_later(0, lambda: on_exit(status))
        else:
            self.watched[pid] = on_exit

    def reap(self) -> None:
        """Take leave of every dead child: workers, helpers, adopted orphans."""
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
                self.unclaimed[pid] = status  # an orphan, or a worker so short-lived that its pid is not known yet

    # --- the job

    def advance(self, event: policy.Event) -> None:
        """Give the job core an event and carry out what it says."""
        effects = self.job.handle(event, self.reactor.now_s())
        for effect in effects:
            match effect:
                case policy.RunScript(which):
                    self.run_script(which)
                case policy.EndScript(kill):
                    self.script.stop(kill, self.config.shutdown_timeout_s)
                case policy.RunAttempt(restart_count):
                    self.run_attempt(restart_count)
                case policy.StopAttempt(kill):
                    self.feed(group.Stop(kill))
                case policy.Restarting() | policy.GivingUp():
                    self.desk.tell_next(effect)
                case policy.End(code):
                    self.end(code)
        self.write_status()

    def end(self, code: int) -> None:
        """Close everything in order; the loop stops when the consoles have taken the last line."""
        self.code = code
        self.desk.flush(code)
        self.starter.close()
        self.sweeper.sweep(self.ended, gentle=False, marked=True)

    def ended(self, left: tuple[str, ...]) -> None:
        """Nothing runs any more."""
        self.say_unkillable(left)
        self.cgroup.remove()
        self.output.finish(self.reactor.stop)

    def run_script(self, which: str) -> None:
        """The pre- or post-train script."""
        config = self.config
        path, args = (
            (config.pre_train_script, config.pre_train_args) if which == "pre" else (config.post_train_script, config.post_train_args)
        )
        assert path is not None
        name = f"{which}-train"
        env = self.base_env | {
            names.JOB_ID.encode(): os.fsencode(config.job_id),
            names.RESTART_COUNT.encode(): b"%d" % self.job.restart_count,
            names.JOB_RESTART_COUNT.encode(): b"%d" % self.job.restart_count,
        }
        streams = self.output.open_helper(name)

        def ended(status: int) -> None:
            self.output.helper_ended(name)
            code = exit_codes.from_wait_status(status)
            self.sweeper.sweep(lambda left: self.advance(policy.ScriptEnded(code)))

        try:
            self.script.start(path, args, env, streams, ended)
        except OSError as error:
            self.output.say(f"the {name} script cannot be run: {_reason(error)}")
            self.output.helper_ended(name)
            self.reactor.call_later(0, lambda: self.advance(policy.ScriptEnded(126)))
        finally:
            _close(streams)

    # --- one attempt

    def run_attempt(self, restart_count: int) -> None:
        """Start all workers of this node."""
        self.link.remember(
            job_id=self.config.job_id, restart_count=restart_count, restarts_used=self.restarts.used, started_at=self.started_at
        )
        self.unclaimed.clear()
        self.draining = set()
        self.swept = None
        self.desk.begin_attempt(restart_count)
        self.feed(group.Start(self.config.nproc_per_node))

    def make_processes(self) -> None:
        """Effect of the group core: ask the starter for all workers."""
        config = self.config
        count = config.nproc_per_node
        try:
            self.output.begin_attempt(self.job.restart_count, range(count))
            self.port = config.master_port or rendezvous.choose_port(frozenset(self.ports))
            self.ports.add(self.port)
            address = config.master_addr or config.local_addr or rendezvous.loopback()
            for local_rank in range(count):
                self.streams.append(self.output.open_worker(local_rank))
        except OSError as error:
            self.close_streams()
            self.start_failed(_reason(error), exit_codes.CONFIG)
            return
        workers = []
        for local_rank in range(count):
            place = self.places[local_rank]
            env = environment.worker_env(
                config,
                self.base_env,
                local_rank=local_rank,
                rank=local_rank,
                world_size=count,
                group_rank=0,
                group_world_size=1,
                restart_count=self.job.restart_count,
                generation=self.job.restart_count,
                node=self.node,
                master_addr=address,
                master_port=self.port,
                error_file=self.output.error_file(local_rank),
                family=self.link.family,
                use_agent_store=False,
                visible_device=place.visible_device,
            )
            workers.append(Worker(local_rank, environment.worker_argv(config, local_rank), env, place.cpus))
        self.starter.start(workers, self.streams, self.started, self.start_failed)

    def started(self, pids: list[tuple[int, int]]) -> None:
        """All workers exist."""
        self.close_streams()
        self.cgroup.add(pid for _, pid in pids)
        self.feed(group.Started(tuple(pids)))
        for local_rank, pid in pids:
            self.watch_child(pid, lambda status, local_rank=local_rank: self.worker_exited(local_rank, status))  # type: ignore[misc]
        self.write_status()

    def start_failed(self, reason: str, code: int) -> None:
        """No worker exists."""
        self.close_streams()
        self.desk.start_failed(reason, code)
        self.feed(group.StartFailed(reason))

    def close_streams(self) -> None:
        """Our copies of the pipes' write ends: they must not keep the pipes open."""
        for pair in self.streams:
            _close(pair)
        self.streams = []

    def worker_exited(self, local_rank: int, status: int) -> None:
        """A worker's main process was reaped."""
        self.draining.add(local_rank)
        self.output.worker_ended(local_rank, lambda: self.drained(local_rank))
        self.feed(group.Exited(local_rank, status))

    def drained(self, local_rank: int) -> None:
        """All that this worker wrote has been read."""
        self.draining.discard(local_rank)
        self.clear()

    def feed(self, event: group.Event) -> None:
        """Give the group core an event and carry out what it says."""
        effects = self.group.handle(event, self.reactor.now_s())
        self.reset_tick()
        for effect in effects:
            match effect:
                case group.MakeProcesses():
                    self.make_processes()
                case group.CancelStart():
                    self.starter.cancel()
                    self.close_streams()
                case group.Ask(local_ranks):
                    self.ask(local_ranks)
                case group.DumpStacks(local_ranks, why):
                    self.desk.dump_stacks({r: self.group.alive[r] for r in local_ranks}, why)
                case group.Kill():
                    self.sweeper.kill_now()
                case group.FirstFailure(end):
                    self.desk.first_failure(end, others=len(self.group.alive))
                case group.Sweep():
                    self.sweeper.sweep(self.sweep_done)
                case group.Over():
                    self.over(effect)

    def reset_tick(self) -> None:
        """Wake the group core at its next deadline."""
        if self.tick_timer:
            self.tick_timer.cancel()
        deadline_s = self.group.next_deadline_s()
        self.tick_timer = None if deadline_s is None else self.reactor.call_at(deadline_s, lambda: self.feed(group.Tick()))

    def ask(self, local_ranks: tuple[int, ...]) -> None:
        """The shutdown signal; a frozen worker is woken to take it."""
        for local_rank in local_ranks:
            os.kill(self.group.alive[local_rank], self.config.shutdown_signal)
            os.kill(self.group.alive[local_rank], signal.SIGCONT)

    def sweep_done(self, left: tuple[str, ...]) -> None:
        """What the workers had left behind is gone."""
        self.swept = left
        self.clear()

    def clear(self) -> None:
        """The attempt is over once it is swept and its output read."""
        if self.swept is not None and not self.draining:
            left, self.swept = self.swept, None
            self.feed(group.Swept(left))

    def over(self, over: group.Over) -> None:
        """Nothing of the attempt is left: find whom to blame, and ask the job core what follows."""
        self.say_unkillable(over.left)
        verdict = self.desk.judge(over)
        taken = self.config.master_port is None and rendezvous.names_taken_port(verdict.text, self.port)
        self.advance(policy.AttemptOver(verdict.code, port_taken=taken, final=verdict.final))

    def say_unkillable(self, left: tuple[str, ...]) -> None:
        """Name what SIGKILL did not end."""
        if left:
            self.output.say(
                f"cannot be ended and stay behind: {', '.join(left)}. The kernel holds them (a dead network file system or device): "
                "only its return or a reboot frees them"
            )

    def write_status(self) -> None:
        """Renew the state files."""
        config = self.config
        program = config.program
        self.status_files.write(
            Status(
                job_id=config.job_id,
                pid=self.link.pid,
                agent_pid=os.getpid(),
                node=self.node,
                generation=self.job.restart_count,
                restart_count=self.job.restart_count,
                state=self.job.state.value,
                world_size=config.nproc_per_node,
                workers=[WorkerStatus(local_rank, local_rank, pid) for local_rank, pid in sorted(self.group.alive.items())],
                started_at=self.started_at,
                run_dir=self.link.run_dir.path,
                command=[program.target, *program.args],
                exit_code=self.code if self.job.state is policy.State.ENDED else None,
            )
        )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _close(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)
