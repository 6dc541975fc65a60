"""The core between the mesh and this node's workers."""

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.policy import cluster, job
from hyperpodrun.agent.policy.cluster import ClusterJob, JobOver, RankFailed, StartHere, State, StopHere
from hyperpodrun.agent.policy.world import World


def world(generation: int) -> World:
    return World(
        generation=generation, restart_count=0, first_rank=0, world_size=2, group_rank=0, group_world_size=2,
        master_addr="127.0.0.1", master_port=1,
    )  # fmt: skip


START, OTHER = StartHere(world(0)), StartHere(world(1))
RUN = cluster.RunAttempt(world(0))
OVER = job.AttemptOver(0)
TERM, INT = job.StopSignal(signal.SIGTERM), job.StopSignal(signal.SIGINT)
GONE, LEAVING = cluster.TellGone(0), cluster.TellLeaving()
END, POLITE, PART = job.End, job.StopAttempt(kill=False), job.StopAttempt(kill=False, part=True)


def play(core: ClusterJob, *events: cluster.Event) -> list[cluster.Effect]:
    """Effects of the last event."""
    effects: list[cluster.Effect] = []
    for number, event in enumerate(events):
        effects = core.handle(event, float(number))
        core.validate()
    return effects


# (what happens, effects of the last event, state afterwards)
TABLE = {
    "start": ([START], [RUN], State.TRAINING),
    "all ranks here end well": ([START, OVER], [cluster.TellFinished(0)], State.DONE),
    "the job ends well": ([START, OVER, JobOver(0)], [END(0)], State.ENDED),
    "a failure is told at once": ([START, RankFailed(3, "boom")], [cluster.TellFailed(0, 3, "boom")], State.TRAINING),
    "a taken port is told as such": ([START, RankFailed(3, "b", True)], [cluster.TellFailed(0, 3, "b", True)], State.TRAINING),
    "a failure is told once": ([START, RankFailed(3, "boom"), RankFailed(4, "bang")], [], State.TRAINING),
    "and not again when the attempt is over": ([START, RankFailed(3, "boom"), job.AttemptOver(3)], [], State.BROKEN),
    "a failure nobody told of is told at the end": (
        [START, job.AttemptOver(3)], [cluster.TellFailed(0, 3, "the workers failed")], State.BROKEN
    ),
    "stop: the workers first": ([START, StopHere(0, False)], [PART], State.TRAINING),
    "then the word that they are gone": ([START, StopHere(0, False), OVER], [GONE], State.WAITING),
    "failures of an ordered end are none": ([START, StopHere(0, False), RankFailed(9, "x")], [], State.TRAINING),
    "nor is their code": ([START, StopHere(0, False), job.AttemptOver(9)], [GONE], State.WAITING),
    "a fence kills what was asked politely": ([START, StopHere(0, False), StopHere(0, True)], [job.StopAttempt(True)], State.TRAINING),
    "stop of what is done": ([START, OVER, StopHere(0, False)], [GONE], State.WAITING),
    "stop of what is broken": ([START, job.AttemptOver(3), StopHere(0, False)], [GONE], State.WAITING),
    "stop where nothing ever ran": ([StopHere(0, False)], [GONE], State.WAITING),
    "a late stop of an older world": ([START, StopHere(0, False), OVER, OTHER, StopHere(0, False)], [], State.TRAINING),
    "the next world": ([START, StopHere(0, False), OVER, OTHER], [cluster.RunAttempt(world(1))], State.TRAINING),
    "start while something runs": ([START, OTHER], [], State.TRAINING),
    "end while workers run": ([START, JobOver(5)], [POLITE], State.TRAINING),
    "and when they are gone": ([START, JobOver(5), job.AttemptOver(143)], [END(5)], State.ENDED),
    "end where nothing ran": ([JobOver(69)], [END(69)], State.ENDED),
    "start after the end": ([START, JobOver(5), job.AttemptOver(143), OTHER], [], State.ENDED),
    "a person's stop: the workers first": ([START, TERM], [POLITE], State.TRAINING),
    "then leave": ([START, TERM, OVER], [LEAVING], State.BROKEN),
    "then end with the signal": ([START, TERM, OVER, JobOver(0)], [END(143)], State.ENDED),
    "also when the job failed meanwhile": ([START, TERM, OVER, JobOver(5)], [END(143)], State.ENDED),
    "a repeated SIGTERM changes nothing": ([START, TERM, TERM], [], State.TRAINING),
    "a second Ctrl-C kills": ([START, INT, INT], [job.StopAttempt(True)], State.TRAINING),
    "stop of a node that waits": ([TERM], [LEAVING], State.WAITING),
    "a repeated SIGTERM waits for the mesh": ([TERM, TERM], [], State.WAITING),
    "a second Ctrl-C does not": ([INT, INT], [END(130)], State.ENDED),
    "start while leaving": ([TERM, START], [], State.WAITING),
    "the keeper is gone": ([START, job.StopSignal(signal.SIGTERM, at_once=True)], [job.StopAttempt(True)], State.TRAINING),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_table(name: str) -> None:
    events, effects, state = TABLE[name]
    core = ClusterJob()
    assert play(core, *events) == effects
    assert core.state is state


PRE, POST, ENDED = job.RunScript("pre"), job.RunScript("post"), job.ScriptEnded
SCRIPTS = {
    "pre first": ([START], [PRE], State.PRE),
    "then the workers": ([START, ENDED(0)], [RUN], State.TRAINING),
    "pre fails": (
        [START, ENDED(7)], [cluster.TellFailed(0, 7, "the pre-train script ended with code 7")], State.BROKEN,
    ),
    "stop during pre": ([START, StopHere(0, False)], [job.EndScript(False)], State.PRE),
    "its end is no failure": ([START, StopHere(0, False), ENDED(143)], [GONE], State.WAITING),
    "nor is the start undone by it": ([START, StopHere(0, False), ENDED(0)], [GONE], State.WAITING),
    "post after success": ([START, ENDED(0), OVER, JobOver(0)], [POST], State.POST),
    "the stop of the last view undoes no success": (
        [START, ENDED(0), OVER, StopHere(0, False), JobOver(0)], [POST], State.POST,
    ),
    "a success before the last world is none": (
        [START, ENDED(0), OVER, StopHere(0, False), OTHER, StopHere(1, False), ENDED(0), JobOver(0)], [END(0)], State.ENDED,
    ),
    "its code is the node's": ([START, ENDED(0), OVER, JobOver(0), ENDED(4)], [END(4)], State.ENDED),
    "no post where nothing ran": ([JobOver(0)], [END(0)], State.ENDED),
    "no post after failure": ([START, ENDED(0), job.AttemptOver(3), JobOver(3)], [END(3)], State.ENDED),
    "stop during post": ([START, ENDED(0), OVER, JobOver(0), TERM], [job.EndScript(False)], State.POST),
    "ends with the signal": ([START, ENDED(0), OVER, JobOver(0), TERM, ENDED(0)], [END(143)], State.ENDED),
    "the mesh is not kept waiting by post": ([START, ENDED(0), OVER, JobOver(0), StopHere(0, False)], [GONE], State.POST),
    "end during pre": ([START, JobOver(5)], [job.EndScript(False)], State.PRE),
    "after it": ([START, JobOver(5), ENDED(143)], [END(5)], State.ENDED),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_table_with_scripts(name: str) -> None:
    events, effects, state = SCRIPTS[name]
    core = ClusterJob(pre_script=True, post_script=True)
    assert play(core, *events) == effects
    assert core.state is state


RECALL, BACK = StopHere(0, False, in_place=True), job.AttemptBack(0)
PARKED = cluster.TellGone(0, parked=True)
IN_PLACE = {
    "stop in place": ([START, RECALL], [cluster.Recall()], State.TRAINING),
    "all are at the barrier": ([START, RECALL, BACK], [PARKED], State.PARKED),
    "the next world goes on with them": ([START, RECALL, BACK, OTHER], [cluster.RunAttempt(world(1), in_place=True)], State.TRAINING),
    "nothing could be saved": ([START, RECALL, OVER], [GONE], State.WAITING),
    "then all start anew": ([START, RECALL, OVER, OTHER], [cluster.RunAttempt(world(1))], State.TRAINING),
    "a failure here, back before anybody asked": (
        [START, RankFailed(1, "boom"), job.AttemptBack(1)], [], State.PARKED,
    ),
    "a failure that nobody told of is told when all are back": (
        [START, job.AttemptBack(1)], [cluster.TellFailed(0, 1, "the workers failed")], State.PARKED,
    ),
    "then asked": ([START, job.AttemptBack(1), RECALL], [PARKED], State.PARKED),
    "the processes are to end after all": ([START, job.AttemptBack(1), StopHere(0, False)], [PART], State.PARKED),
    "and have": ([START, job.AttemptBack(1), StopHere(0, False), job.AttemptOver(1)], [GONE], State.WAITING),
    "asked to end while they come back": ([START, RECALL, StopHere(0, False)], [PART], State.TRAINING),
    "what came back then does not count": ([START, RECALL, StopHere(0, False), BACK], [], State.TRAINING),
    "a kill is never in place": ([START, StopHere(0, True, in_place=True)], [job.StopAttempt(True)], State.TRAINING),
    "fenced at the barrier": ([START, RECALL, BACK, StopHere(0, True)], [job.StopAttempt(True)], State.PARKED),
    "all died at the barrier": (
        [START, RECALL, BACK, job.AttemptOver(1)], [cluster.TellFailed(0, 1, "the workers failed")], State.BROKEN,
    ),
    "died there by our own hand: nothing is finished": ([START, RECALL, BACK, OVER], [], State.BROKEN),
    "and start anew": ([START, RECALL, BACK, job.AttemptOver(1), OTHER], [cluster.RunAttempt(world(1))], State.TRAINING),
    "the job ends": ([START, RECALL, BACK, JobOver(5)], [PART], State.PARKED),
    "and has": ([START, RECALL, BACK, JobOver(5), job.AttemptOver(143)], [END(5)], State.ENDED),
    "a person's stop at the barrier": ([START, RECALL, BACK, TERM], [POLITE], State.PARKED),
    "is not undone by a world": ([START, RECALL, BACK, TERM, OTHER], [], State.PARKED),
    "and leaves": ([START, RECALL, BACK, TERM, job.AttemptOver(143)], [LEAVING], State.BROKEN),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_table_in_place(name: str) -> None:
    events, effects, state = IN_PLACE[name]
    core = ClusterJob()
    assert play(core, *events) == effects
    assert core.state is state


EVENTS = st.one_of(
    st.builds(StartHere, st.integers(0, 3).map(world)),
    st.builds(StopHere, st.integers(0, 3), st.booleans(), st.booleans()),
    st.builds(job.AttemptBack, st.sampled_from([0, 3])),
    st.builds(JobOver, st.sampled_from([0, 3, 69])),
    st.builds(RankFailed, st.just(3), st.just("boom"), st.booleans()),
    st.builds(job.ScriptEnded, st.sampled_from([0, 7])),
    st.builds(job.AttemptOver, st.sampled_from([0, 3])),
    st.builds(job.StopSignal, st.sampled_from([signal.SIGTERM, signal.SIGINT]), st.booleans()),
)


@given(st.booleans(), st.booleans(), st.lists(EVENTS, max_size=25))
def test_whatever_comes_in_whatever_order(pre: bool, post: bool, events: list[cluster.Event]) -> None:
    """A driver that answers truthfully: scripts and attempts end only when they run."""
    core = ClusterJob(pre, post)
    script = attempt = parked = ending = False
    ends, stopped = [], False
    for number, event in enumerate(events):
        if (isinstance(event, job.ScriptEnded) and not script) or (isinstance(event, job.AttemptOver) and not attempt):
            continue
        if isinstance(event, job.AttemptBack):
            if not attempt or parked or ending:
                continue
            parked = True
        script = script and not isinstance(event, job.ScriptEnded)
        attempt = attempt and not isinstance(event, job.AttemptOver)
        parked, ending = parked and attempt, ending and attempt
        effects = core.handle(event, number * 0.3)
        core.validate()
        stopped = stopped or (isinstance(event, job.StopSignal) and not ends)
        for effect in effects:
            assert not ends, "something after the end"
            match effect:
                case job.RunScript():
                    assert not script and not attempt, "two things at once"
                    assert not stopped, "started after a stop order"
                    script = True
                case cluster.RunAttempt(_, in_place):
                    assert not script and in_place == attempt == parked, "two things at once"
                    assert not stopped and not ending, "started after a stop order"
                    attempt, parked = True, False
                case cluster.Recall():
                    assert attempt and not parked and not ending and not stopped
                case job.EndScript():
                    assert script, "no script to end"
                case job.StopAttempt():
                    assert attempt, "no attempt to stop"
                    ending = True
                case cluster.TellGone(_, in_place):
                    assert in_place == (attempt and parked)
                    quiet = not attempt and not script
                    assert in_place or quiet or core.state is State.POST, "gone was said while something runs"
                case cluster.TellLeaving():
                    assert not attempt and not script, "left while something runs"
                case job.End(code):
                    assert not attempt and not script, "ended while something runs"
                    assert code > 128 if stopped else code in (0, 3, 7, 69)
                    ends.append(code)


@given(st.booleans(), st.booleans(), st.lists(EVENTS, max_size=15))
def test_it_ends_once_it_is_told_to_and_what_runs_ends(pre: bool, post: bool, events: list[cluster.Event]) -> None:
    core = ClusterJob(pre, post)
    script = attempt = ended = False

    def feed(event: cluster.Event, now_s: float) -> None:
        nonlocal script, attempt, ended
        if (isinstance(event, job.ScriptEnded) and not script) or (isinstance(event, job.AttemptOver) and not attempt):
            return
        script = script and not isinstance(event, job.ScriptEnded)
        attempt = attempt and not isinstance(event, job.AttemptOver)
        for effect in core.handle(event, now_s):
            script = script or isinstance(effect, job.RunScript)
            attempt = attempt or isinstance(effect, cluster.RunAttempt)
            ended = ended or isinstance(effect, job.End)

    for number, event in enumerate(events):
        feed(event, float(number))
    feed(JobOver(0), 100.0)
    for event in (job.ScriptEnded(0), job.AttemptOver(0), job.ScriptEnded(0)):
        feed(event, 101.0)
    assert ended, core.state
