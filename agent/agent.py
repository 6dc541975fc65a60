"""The agent of one node: signals and scripts joined to the core that decides about the job.

What to do next is decided in `policy/job.py` where this node is the job, and else by the mesh, to which `policy/cluster.py` is the
bridge. One attempt is run by `attempt.py`; how a failure is told is in `failure.py`. Everything here is plumbing: events go into the
core, the effects it gives are carried out.
"""

import os
import signal
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from hyperpodrun.agent import family, node_state, planted
from hyperpodrun.agent.attempt import AttemptRunner, reason_of
from hyperpodrun.agent.children import Children
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.failure import FailureDesk, Verdict
from hyperpodrun.agent.first_failure import FirstFailure
from hyperpodrun.agent.keeper import FORWARDED, STOP_SIGNALS, KeeperLink
from hyperpodrun.agent.policy import cluster
from hyperpodrun.agent.policy import job as policy
from hyperpodrun.agent.policy.budget import Total, Window
from hyperpodrun.agent.policy.escalation import story
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.status import Status, StatusFiles, WorkerStatus
from hyperpodrun.agent.train_scripts import TrainScripts
from hyperpodrun.agent.wire import exit_codes, names
from hyperpodrun.agent.wire.rungs import Symptoms
from hyperpodrun.agent.workers import rendezvous
from hyperpodrun.agent.workers.cgroup import WorkerCgroup
from hyperpodrun.agent.workers.group_words import End
from hyperpodrun.agent.workers.output import Output
from hyperpodrun.agent.workers.placement import places
from hyperpodrun.agent.workers.start import WorkerStarter
from hyperpodrun.agent.workers.sweep import Sweeper
from hyperpodrun.agent.world_store import WorldStore

if TYPE_CHECKING:
    from hyperpodrun.agent.mesh_driver import MeshDriver

STATUS_EVERY_S = 5.0
"""In a mesh the state files are at most this old."""
TELL_GRACE_S = 1.0
OLD_STATE_S = 5.0
"""What long dead jobs left is looked for when the first workers are well on their way."""
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
        self.children = Children(self.reactor)
        self.base_env = {k: v for k, v in os.environb.items() if k.decode(errors="replace") not in names.NEVER_IN_WORKERS}
        self.base_env[names.FAMILY.encode()] = link.family.encode()
        self.output = Output(self.reactor, config, link.run_dir.path)
        self.cgroup = WorkerCgroup(link.family)
        self.starter = WorkerStarter(
            self.reactor, config, self.base_env, self.children.watch, self.output.open_helper, self.output.say
        )
        self.sweeper = Sweeper(self.reactor, link.family, self.starter.helper_pids, self.children.reap, self.cgroup)
        self.scripts = TrainScripts(
            self.reactor,
            config,
            self.base_env,
            self.output,
            self.sweeper,
            self.children.watch,
            lambda code: self.advance(policy.ScriptEnded(code)),
        )
        self.status_files = StatusFiles(link.run_dir.path, os.environ.get(names.STATUS_FILE), self.output.say)
        self.restarts = Total(config.max_restarts, int(link.memo.get("restarts_used", "0")))
        self.job: policy.Job | cluster.ClusterJob = policy.Job(
            self.restarts,
            Window(config.max_node_failures, config.restart_window_s, link.deaths_s[:-1]),
            pre_script=config.pre_train_script is not None,
            post_script=config.post_train_script is not None,
            restart_count=int(link.memo.get("restart_count", "0")),
            rules=config.rules(),
        )
        self.mesh: MeshDriver | None = None
        if config.mesh is not None:
            finished = link.memo.get("finished") == "True"
            self.job = cluster.ClusterJob(config.pre_train_script is not None, config.post_train_script is not None, finished)
        self.restart_count = int(link.memo.get("restart_count", "0"))
        self.desk = FailureDesk(config, self.node, self.reactor, self.output, self.children.watch)
        self.attempt = AttemptRunner(
            config,
            self.reactor,
            self.output,
            self.starter,
            self.sweeper,
            self.cgroup,
            self.desk,
            self.children.watch,
            self.base_env,
            link.family,
            self.node,
            on_over=self.attempt_over,
            on_change=self.write_status,
            on_first_failure=self.rank_failed,
            on_further_failure=lambda end: self.first_failure.further(end),
            on_drained=lambda local_rank: self.first_failure.drained(local_rank),
            on_back=self.attempt_back,
            on_returned=self.all_returned,
            on_all_in=self.all_in,
        )
        self.first_failure = FirstFailure(
            self.reactor,
            self.desk,
            tell=self.tell_failure,
            ship=lambda text: self.mesh.ship(self.attempt.world.generation, text) if self.mesh and self.attempt.world else None,
            is_missed=lambda: self.mesh is not None and self.mesh.misses_somebody(),
        )
        self.store: WorldStore | None = None
        self.port_retries = 0
        self.started_at = float(link.memo.get("started_at", f"{time.time()}"))

    # --- life

    def run(self) -> int:
        """From the first attempt to the last; the exit code."""
        family.become_subreaper()
        self.take_signals()
        config = self.config
        # The agent before this one may have heard the end of the job: nobody else may be left to ask.
        over = self.link.memo.get("over")
        try:
            self.output.prepare()
            self.attempt.places = places(config, self.base_env)
            facts_path = os.path.join(self.link.run_dir.path, "facts")
            self.store = WorldStore(
                self.reactor, config, self.output.say, self.send_to_node, facts_path, warn=not self.link.deaths
            )
            if over is None:
                self.starter.prepare()  # torch is what takes longest: its import goes on while this process imports zmq
                if config.mesh is not None:
                    self.join_mesh()
        except (OSError, ValueError) as error:
            self.output.say(f"{reason_of(error)}; the job was not started")
            return exit_codes.CONFIG
        for note in config.notes if not self.link.deaths else ():
            self.output.say(note)
        if over is None:
            self.open_link()
            self.reactor.call_later(OLD_STATE_S, lambda: node_state.remove_old(config.job_id, self.node, self.output.say))
            self.advance(policy.Begin(reborn=self.link.deaths > 0))
        else:
            self.advance(cluster.JobOver(int(over)))
        self.reactor.run()
        return self.code

    def open_link(self) -> None:
        """Listen for workers, where they can speak; without it they can only be restarted as processes."""
        if self.config.program.run_as == "program" and not self.config.inprocess_restart:
            return
        try:
            self.attempt.links.open(self.link.run_dir.path, self.output.say)
        except OSError as error:
            self.output.say(f"{reason_of(error)}; workers cannot speak to the launcher, and are not restarted in place")

    def take_signals(self) -> None:
        """From here on signals are events; those that came before were held back and arrive now."""
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        wanted = {*FORWARDED, *self.config.signals_to_handle} - ({signal.SIGHUP} if ignored else set())
        self.reactor.handle_signals(wanted, self.on_signal)
        self.reactor.handle_signals([signal.SIGCHLD], lambda _: self.children.reap())
        signal.pthread_sigmask(signal.SIG_SETMASK, self.link.signal_mask)

    def on_signal(self, number: int) -> None:
        """A signal to the launcher (forwarded by the keeper), or the kernel's word that the keeper is gone."""
        if not self.link.alive():
            self.advance(policy.StopSignal(signal.SIGTERM, at_once=True))
        elif number in self.config.signals_to_handle:
            if number in FORWARDED_TO_RANKS and self.job.stopped_by is None:
                self.attempt.ask_with(number)  # as torchrun does: a script that saves at this signal need not know another
            self.advance(policy.StopSignal(number))
        elif number in FORWARDED_TO_RANKS:
            self.attempt.forward(number)
        elif number in STOP_SIGNALS:
            self.advance(policy.StopSignal(number, at_once=True))  # not to be handled: its default action, without leftovers

    # --- the job

    def advance(self, event: policy.Event | cluster.Event) -> None:
        """Give the job core an event and carry out what it says."""
        for effect in self.job.handle(event, self.reactor.now_s()):  # type: ignore[arg-type]  # each core ignores the other's events
            match effect:
                case cluster.RunAttempt(world, in_place):
                    self.run_world(world, in_place)
                case cluster.Recall():
                    self.attempt.leave(self.mesh.view.reason if self.mesh and self.mesh.view else "")
                case cluster.TellFailed() | cluster.TellFinished() | cluster.TellGone() | cluster.TellLeaving():
                    if self.mesh is not None:
                        self.mesh.tell(effect)
                case policy.RunScript(which):
                    self.run_script(which)
                case policy.EndScript(kill):
                    self.scripts.stop(kill)
                case policy.RunAttempt(restart_count, in_place):
                    self.run_attempt(restart_count, in_place)
                case policy.StopAttempt(kill, part):
                    if not kill:
                        self.reactor.call_later(TELL_GRACE_S, partial(self.tell_grace, self.attempt.world))
                    self.attempt.stop(kill, part)
                case policy.Restarting() | policy.GivingUp():
                    self.desk.tell_next(effect, self.attempt.kept)
                case policy.End(code):
                    self.end(code)
        self.write_status()

    def tell_grace(self, asked: World | None) -> None:
        """Most ranks leave at once; who waits for the others should know for what, and how to end it."""
        if (count := len(self.attempt.pids)) and self.attempt.world is asked:
            self.output.say(
                f"waiting for {count} rank(s) of this node to end, at most {self.config.shutdown_timeout_s:g} s; "
                "a second Ctrl-C (SIGINT) ends them now"
            )

    def run_attempt(self, restart_count: int, in_place: bool) -> None:
        """Start all ranks, or those that are missing; this node is the world."""
        config = self.config
        try:
            port = self.store.choose_port() if self.store is not None else 0
        except OSError as error:
            self.output.say(str(error))
            self.advance(policy.AttemptOver(exit_codes.CONFIG, final=True))
            return
        self.run_world(
            World(
                generation=restart_count,
                restart_count=restart_count,
                first_rank=0,
                world_size=config.nproc_per_node,
                group_rank=0,
                group_world_size=1,
                master_addr=config.master_addr or config.local_addr or rendezvous.loopback(),
                master_port=port,
            ),
            in_place,
        )

    def run_world(self, world: World, in_place: bool) -> None:
        """Start this node's ranks of that world; `in_place`: those that wait at the restart barrier go on in it."""
        self.restart_count = world.restart_count
        self.link.remember(
            job_id=self.config.job_id,
            restart_count=world.restart_count,
            restarts_used=self.restarts.used,
            started_at=self.started_at,
        )
        self.children.forget()
        self.first_failure.begin()
        if self.store is not None:
            host = self.mesh.host if self.mesh else rendezvous.loopback()
            self.store.open(world, self.mesh.slot if self.mesh else "", host)
        address = self.store.address if self.store is not None else None
        if in_place:
            self.attempt.go_on(world, address)
        else:
            self.attempt.run(world, address)

    def rank_failed(self, end: End) -> None:
        """A rank failed, the first one here. Whoever waits for one of its keys, deaf to signals, is freed."""
        self.end_store(f"local rank {end.local_rank} of {self.node} failed")
        if self.mesh is not None:
            self.first_failure.failed(end)

    def end_store(self, reason: str) -> None:
        """This world's keys are of no use any more."""
        if self.store is not None:
            self.store.end(reason)

    def tell_failure(self, verdict: Verdict) -> None:
        """A rank failed, here first as far as is known: a word to the mesh."""
        free = (
            self.store is not None
            and self.store.was_taken(verdict.text, self.attempt.world)
            and self.port_retries < policy.MAX_PORT_RETRIES
        )
        self.port_retries += free
        self.advance(cluster.RankFailed(verdict.code, verdict.headline, free, self.symptoms(verdict)))

    def symptoms(self, verdict: Verdict) -> Symptoms:
        """What is known of a failure, beside its code and words."""
        return Symptoms(
            rank=verdict.local_rank,
            final=verdict.final,
            rung=verdict.rung,
            in_place=self.attempt.recalled,
            progressed=self.attempt.progressed,
            victim=verdict.victim,
        )

    def attempt_over(self, verdict: Verdict) -> None:
        """Nothing of the attempt is left."""
        if verdict.code or self.mesh is None:  # where all went well, other nodes may still need the keys that are here
            self.end_store("its ranks have ended")
        if self.store is not None:
            self.store.explain(verdict.text)
        port_taken = self.store is not None and self.store.was_taken(verdict.text, self.attempt.world)
        self.pass_on(verdict, policy.AttemptOver(verdict.code, port_taken, verdict.final, self.symptoms(verdict)))

    def attempt_back(self, verdict: Verdict) -> None:
        """Workers wait at the restart barrier; nothing of their generation is left."""
        self.pass_on(verdict, policy.AttemptBack(verdict.code, self.symptoms(verdict)))

    def pass_on(self, verdict: Verdict, event: policy.AttemptOver | policy.AttemptBack) -> None:
        """The job core says what follows."""
        if self.mesh is not None:
            self.desk.tell_here(self.attempt.kept)
            self.first_failure.over(verdict, lambda: self.advance(event))
        else:
            self.advance(event)

    def all_returned(self) -> None:
        """The wrapped function has returned on all ranks here: they wait for the ranks elsewhere."""
        if self.store is not None and self.attempt.world is not None:
            self.store.when_all_returned(self.attempt.world, self.attempt.release)

    def all_in(self) -> None:
        """All ranks here are inside the wrapped function: from now on who makes no progress hangs, once that holds elsewhere too."""
        if self.store is not None and self.attempt.world is not None:
            self.store.when_all_in(self.attempt.world, self.attempt.assembled)

    # --- the mesh

    def join_mesh(self) -> None:
        """Begin to look for the other nodes; zmq is imported only now."""
        from hyperpodrun.agent.mesh_driver import MeshDriver

        port = int(self.link.memo.get("mesh_port", "0"))
        self.mesh = MeshDriver(
            self.reactor,
            self.config,
            self,
            self.children.watch,
            self.output.say,
            os.environ,
            self.link.lease,
            self.link.run_dir.path,
            self.store_heard,
            port,
        )
        self.mesh.start()
        self.reactor.call_later(STATUS_EVERY_S, self.renew_status)

    def send_to_node(self, node: str, payload: bytes) -> None:
        """The store has something for another node's agent."""
        if self.mesh is not None:
            self.mesh.send(node, payload)

    def store_heard(self, node: str, payload: bytes) -> None:
        """Another node's store has something for this one."""
        if self.store is not None:
            self.store.heard(node, payload)

    def placed(self, port: int, vote_path: str) -> None:
        """The port is this launcher's from now on, also if this agent should die, and the vote file is to be gone in the end."""
        self.link.remember(mesh_port=port, vote=vote_path)

    def start_here(self, world: World) -> None:
        """The mesh says: start."""
        self.advance(cluster.StartHere(world))

    def stop_here(self, generation: int, kill: bool, in_place: bool) -> None:
        """The mesh says: stop. `in_place`: workers that can, go to the restart barrier instead."""
        self.end_store(self.mesh.view.reason if self.mesh and self.mesh.view else "this node is no longer part of it")
        self.first_failure.settle()
        self.advance(cluster.StopHere(generation, kill, in_place))

    def job_over(self, code: int, reason: str) -> None:
        """The mesh says: the job is over."""
        self.link.remember(over=code, finished=isinstance(self.job, cluster.ClusterJob) and self.job.finished)
        self.desk.because(reason if code else "")
        self.first_failure.settle()
        self.advance(cluster.JobOver(code, reason))

    def others_done(self, generation: int) -> None:
        """The mesh says: all ranks of another node have ended well."""
        if self.attempt.world is not None and self.attempt.world.generation == generation:
            self.attempt.others_done()

    def view_changed(self) -> None:
        """The nodes agreed on something new."""
        self.write_status()

    def run_script(self, which: str) -> None:
        """The pre- or post-train script."""
        if isinstance(self.job, policy.Job):
            restart_count = self.job.restart_count  # of the attempt to come; self.restart_count is the last one's
        else:
            restart_count = self.job.world.restart_count if self.job.world is not None else self.restart_count
        self.scripts.run(which, restart_count)

    def end(self, code: int) -> None:
        """Close everything in order; the loop stops when the consoles have taken the last line."""
        self.code = code
        self.link.remember(ended=code)
        if code == 0 and self.config.mesh is None:
            folder = os.environ.get(names.INJECT_DIR) or self.link.run_dir.path
            for order in planted.not_struck(self.config.planted, folder, self.config.job_id):
                self.output.say(
                    f"{names.INJECT}: {order!r} did not strike: no rank with @HPWrapper or note_step() came to its place"
                )
        self.desk.flush(code)
        self.starter.close()
        self.attempt.links.close()
        if self.store is not None:
            self.store.close()
        self.sweeper.sweep(self.ended, gentle=False, marked=True)

    def ended(self, left: tuple[str, ...]) -> None:
        """Nothing runs any more."""
        self.desk.tell_unkillable(left)
        node_state.end(self.config.job_id, self.node, self.code == 0, self.config.job_id_by_chance, self.output.say)
        self.cgroup.remove()
        if self.mesh is not None:
            self.mesh.close(lambda: self.output.finish(self.reactor.stop))
        else:
            self.output.finish(self.reactor.stop)

    def renew_status(self) -> None:
        """The mesh's counters move without an event that anybody here is told of."""
        self.write_status()
        self.reactor.call_later(STATUS_EVERY_S, self.renew_status)

    def write_status(self) -> None:
        """Renew the state files."""
        config, world = self.config, self.attempt.world
        first = world.first_rank if world else 0
        view = self.mesh.view if self.mesh else None
        faults = self.job.history if isinstance(self.job, policy.Job) else view.faults if view else ()
        self.status_files.write(
            Status(
                job_id=config.job_id,
                pid=self.link.pid,
                agent_pid=os.getpid(),
                node=self.node,
                generation=world.generation if world else 0,
                restart_count=world.restart_count if world else 0,
                state=self.job.state.value,
                world_size=world.world_size if world else 0,
                workers=[
                    WorkerStatus(first + local_rank, local_rank, pid) for local_rank, pid in sorted(self.attempt.pids.items())
                ],
                started_at=self.started_at,
                run_dir=self.link.run_dir.path,
                command=[config.program.target, *config.program.args],
                exit_code=self.code if self.job.state in (policy.State.ENDED, cluster.State.ENDED) else None,
                mesh=self.mesh.status() if self.mesh else None,
                faults=list(story(faults)),
            )
        )
