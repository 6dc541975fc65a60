"""The failure desk: gathers what is known of a failed attempt while it is there, decides whom to blame, and tells people.

The report is written once per failed attempt, after the job core has said what follows (a restart, or the end), because what
happens next belongs into it. Deciding is `policy/blame.py`, the words are `workers/report.py`; this joins them to their sources.
"""

import os
import signal
from collections.abc import Callable, Sequence

import msgspec

from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.health.oom import OomWatch
from hyperpodrun.agent.health.shm import shm_figures
from hyperpodrun.agent.policy import blame
from hyperpodrun.agent.policy import job as policy
from hyperpodrun.agent.policy.world import World
from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.wire import exit_codes
from hyperpodrun.agent.wire.rungs import Asked
from hyperpodrun.agent.workers import evidence, report, stacks
from hyperpodrun.agent.workers.group_words import Back, End, Over
from hyperpodrun.agent.workers.output import Output, StreamName


def _as_victim(rank: report.FailedRank) -> report.FailedRank:
    return msgspec.structs.replace(rank, evidence=msgspec.structs.replace(rank.evidence, victim=True))


_STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")
_RAISED = 1 << 8
"""The wait status of a Python program that ends by an exception: what a rank counts for that left its function by one."""


class Verdict(msgspec.Struct, frozen=True):
    """`code` is the exit code of the rank to blame (0: success), `text` its last words, `final`: trying again is useless.

    `headline` is the failure in a line, for other nodes. `local_rank`: whose failure it is, -1 when it is no one worker's.
    `victim`: its words say that a peer was lost.
    """

    code: int
    text: str = ""
    final: bool = False
    headline: str = ""
    local_rank: int = -1
    rung: Asked = ""
    """The least rung that the rank asked for."""
    victim: bool = False


class FailureDesk:
    """One a launcher. `watch_child` tells the end of a helper (py-spy) that the desk starts."""

    def __init__(
        self,
        config: JobConfig,
        node: str,
        reactor: Reactor,
        output: Output,
        watch_child: Callable[[int, Callable[[int], None]], None],
    ) -> None:
        self._config = config
        self._node = node
        self._reactor = reactor
        self._output = output
        self._watch_child = watch_child
        self._oom = OomWatch()
        self._restart_count = 0
        self._first_rank = 0
        self._began_s = 0.0
        self._start_code: int | None = None
        self._pending: tuple[report.FailedRank, list[report.FailedRank]] | None = None
        self._in_place = False
        """What is pending is a fault after which processes wait to go on."""
        self._reason = ""

    def begin_attempt(self, world: World) -> None:
        """A new attempt starts now."""
        self._restart_count = world.restart_count
        self._first_rank = world.first_rank
        self._began_s = self._reactor.now_s()
        self._start_code = None
        self._oom.snapshot()

    def first_failure(self, end: End, others: int) -> None:
        """Say at once what was seen, when others have to be stopped first: that may take as long as --shutdown-timeout."""
        if others and end.status is not None:
            many = f"the other {others} ranks" if others > 1 else "the other rank"
            self._output.say(
                f"rank {self._first_rank + end.local_rank} (pid {end.pid}) {report.ending(end.status)}; stopping {many} of this node"
            )

    def slow_to_leave(self, end: End, waits: tuple[int, ...]) -> None:
        """Say what was seen and who is waited for: a recall that takes long should not look like a silence."""
        if not waits:
            return
        ranks = ", ".join(str(self._first_rank + local_rank) for local_rank in waits)
        self._output.say(
            f"{report.headline(self._failed_rank(end), self._about(''))}; waiting for rank {ranks} to leave its function"
        )

    def back_after(self, seconds_s: float) -> None:
        """All ranks run again."""
        self._output.say(f"back after {seconds_s:.2f} s")

    def first_words(self, end: End) -> Verdict:
        """What is known of a rank that has just failed."""
        return self._verdict(self._failed_rank(end))

    def first_report(self, end: End) -> str:
        """The whole report about this rank, for another node's console."""
        return report.render(self._failed_rank(end), [], self._about("the nodes decide what follows"))

    def tell_here(self, kept: int = 0) -> None:
        """Tell what failed on this node; what follows is decided elsewhere. `kept`: processes that wait at the restart barrier."""
        if self._in_place and self._pending and self._pending[0].evidence.victim:
            root, others = self._pending
            ranks = ", ".join(str(rank.end.rank) for rank in sorted((root, *others), key=lambda rank: rank.end.rank))
            self._pending = None
            self._output.say(f"rank {ranks} lost its peer and left its function; {kept} processes wait at the restart barrier")
        self._tell(f"{kept} processes wait at the restart barrier" if kept else "the nodes decide what follows")

    def tell_dump(self, pids: dict[int, int], why: str) -> None:
        """Say whose stacks (local rank -> pid) will be printed, and what the kernel says of them."""
        named = ", ".join(f"rank {self._first_rank + local_rank} (pid {pid})" for local_rank, pid in sorted(pids.items()))
        self._output.say(f"{named}: {why}; stacks follow")
        for local_rank, pid in sorted(pids.items()):
            if facts := stacks.kernel_facts(pid):
                self._output.say(f"rank {self._first_rank + local_rank}, as the kernel sees it:\n{facts}")

    def dump_c_frames(self, local_rank: int, pid: int) -> None:
        """Print the stacks of a rank that is to be ended, with the frames of C code, where that can be done."""
        plan = stacks.plan(pid, os.environ)
        if plan.command:
            self._run_dumper(local_rank, plan)

    def dump_by_signal(self, pid: int) -> None:
        """Have a rank that does not answer, and is to be ended, print its stacks."""
        plan = stacks.plan(pid, os.environ)
        if plan.signal is not None:
            os.kill(pid, plan.signal)  # not reaped yet, so still this worker

    def _run_dumper(self, local_rank: int, plan: stacks.DumpPlan) -> None:
        name = f"stacks of rank {self._first_rank + local_rank}"
        out, err = self._output.open_helper(name)
        try:
            helper = os.posix_spawn(
                plan.command[0],
                plan.command,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)],
                setsigmask=[],
            )
        except OSError as error:
            self._output.say(f"{plan.command[0]} cannot be run: {error.strerror}")
            self._output.helper_ended(name)
            return
        finally:
            os.close(out)
            os.close(err)
        # It sits below this process like anything of the attempt: a sweep ends it if it takes too long.
        self._watch_child(helper, lambda _: self._output.helper_ended(name))

    def start_failed(self, reason: str, code: int) -> None:
        """The workers could not be started."""
        self._start_code = code
        self._output.say(f"the workers could not be started: {reason}")

    def judge_back(self, back: Back) -> Verdict:
        """Who took this node's workers out of their generation; code 0: nobody here."""
        self._pending = None
        own = [end for end in back.failures if back.cause != "order" or not end.sent]
        return self._blame(own, in_place=True) if own else Verdict(0)

    def judge(self, over: Over) -> Verdict:
        """Who failed first, and what the job's exit code would be."""
        self._pending = None
        if over.success:
            return Verdict(0)
        if over.start_failure is not None:
            # Nothing that another attempt could change: the program or this machine is not fit.
            headline = f"the workers of {self._node} could not be started: {over.start_failure}"
            return Verdict(self._start_code or exit_codes.CONFIG, over.start_failure, final=True, headline=headline)
        failed = [end for end in over.ends if end.failed or end.hung]
        if over.cause == "order" or not failed:
            return Verdict(0)
        return self._blame(failed, in_place=False)

    def _blame(self, ends: Sequence[End], in_place: bool) -> Verdict:
        failed = [self._failed_rank(end) for end in ends]
        if len(hung := [rank for rank in failed if rank.end.hung]) > 1:
            culprits = stacks.out_of_step({rank.end.local_rank: stacks.waits_in(rank.tail.stderr) for rank in hung})
            if culprits:
                failed = [_as_victim(r) if r.end.hung and r.end.local_rank not in culprits else r for r in failed]
        told = {rank.end.local_rank: rank.evidence for rank in failed}
        culprit = blame.root_cause([rank.end for rank in failed], told)
        root = next(rank for rank in failed if rank.end is culprit)
        self._pending = root, [rank for rank in failed if rank is not root]
        self._in_place = in_place
        return self._verdict(root)

    def _verdict(self, failed: report.FailedRank) -> Verdict:
        return Verdict(
            # Ended by our own signal, kindly or not: 0 would be a success, 128 + N would say that somebody had stopped the job.
            1
            if exit_codes.signal_of_wait_status(failed.end.status) in failed.end.sent
            else exit_codes.from_wait_status(failed.end.status) or 1,
            "\n".join(failed.tail.stderr),
            headline=report.headline(failed, self._about("")),
            local_rank=failed.end.local_rank,
            rung=failed.rung,
            victim=failed.evidence.victim,
        )

    def tell_unkillable(self, left: tuple[str, ...]) -> None:
        """Name what SIGKILL did not end."""
        if left:
            self._output.say(
                f"cannot be ended and stay behind: {', '.join(left)}. The kernel holds them (a dead network file system or device): "
                "only its return or a reboot frees them"
            )

    def tell_next(self, effect: policy.Restarting | policy.GivingUp, kept: int = 0) -> None:
        """What follows was decided: a restart is told now, the end when its code is known. `kept`: processes that go on in place."""
        if isinstance(effect, policy.GivingUp):
            self._reason = effect.reason
            return
        what = f"in place (generation {effect.generation}, {kept} processes kept)" if effect.in_place else "all ranks"
        step = f"restarting {what}"
        if effect.left is not None:
            step += f", {effect.left} of {self._config.max_restarts} restarts left"
        if effect.free:
            step = "the rendezvous port was taken by another program in the meantime: trying another one (no restart is counted)"
        self._tell(step)

    def because(self, reason: str) -> None:
        """Why the job ends, should it end now."""
        self._reason = reason

    def flush(self, code: int) -> None:
        """The job ends with this code: tell what was not told yet."""
        reason = f"{self._reason}: " if self._reason else ""
        # The others may go on without this node: what stopped it need not be the end of the job.
        what = "the job" if self._config.mesh is None or self._reason else "this node"
        step = f"{reason}{what} ends with exit code {code}"
        if self._pending:
            self._tell(step)
        elif code:
            self._output.say(step)

    def _tell(self, step: str) -> None:
        if not self._pending:
            return
        root, others = self._pending
        self._pending = None
        about = self._about(step)
        self._output.say(report.render_short(root, len(others), about) if self._in_place else report.render(root, others, about))

    def _about(self, step: str) -> report.Circumstances:
        return report.Circumstances(
            host=self._node,
            started_at_s=self._began_s,
            restart_count=self._restart_count,
            oom_kills=self._oom.killed_since(),
            memory_limit_bytes=self._oom.limit_bytes(),
            shm=shm_figures(),
            program=self._config.program.target,
            next_step=step,
        )

    def _failed_rank(self, end: End) -> report.FailedRank:
        local_rank = end.local_rank
        files = tuple(path for name in _STREAMS if (path := self._output.log_path(local_rank, name)))
        if end.fault is not None or end.why:
            fault = end.fault
            return report.FailedRank(
                end=blame.WorkerEnd(
                    local_rank,
                    self._first_rank + local_rank,
                    end.pid,
                    _RAISED if fault is None or fault.exit_status is None else fault.exit_status,
                    end.at_s,
                    hung=end.hung,
                    left=not end.hung and (fault is None or fault.exit_status is None),
                    why=end.why,
                ),
                evidence=evidence.of_fault(fault.text, fault.headline) if fault is not None else blame.NO_EVIDENCE,
                tail=self._output.tail(local_rank),
                log_files=files,
                rung=end.rung,
            )
        # A process that SIGKILL did not end has no status yet; SIGKILL is what it will end of.
        status = signal.SIGKILL if end.status is None else end.status
        tail = self._output.tail(local_rank)
        return report.FailedRank(
            end=blame.WorkerEnd(
                local_rank,
                self._first_rank + local_rank,
                end.pid,
                status,
                end.at_s,
                bool(end.sent),
                end.hung,
                end.sent,
                end.status is None,
            ),
            evidence=evidence.gather(self._output.error_file(local_rank), tail, status),
            tail=tail,
            log_files=files,
        )
