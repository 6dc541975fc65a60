"""Which rung follows a fault."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.policy.escalation import MEMORY, decide, story
from hyperpodrun.agent.wire.rungs import RUNGS, Decision, Fault, Incident, Rules, Situation, Symptoms

replace = msgspec.structs.replace
INPROCESS = Rules(inprocess=True)
STUCK = Symptoms(rank=1, in_place=True, progressed=False)
GOOD = Symptoms(rank=1, in_place=True)


def failed(symptoms: Symptoms = GOOD, node: str = "a", generation: int = 0, code: int = 3) -> Incident:
    return Incident("failed", generation, node, code, "boom", symptoms)


def lost(node: str, generation: int = 0) -> Incident:
    return Incident("lost", generation, node)


def test_a_final_failure_ends_the_job_also_if_its_node_is_lost_next() -> None:
    decision = once(failed(replace(GOOD, final=True), node="a"), lost("a"), generation=0)
    assert decision.rung == "end" and decision.code == 3


def once(*incidents: Incident, rules: Rules = INPROCESS, **more: object) -> Decision:
    return decide(Situation(rules=rules, incidents=incidents, **more))  # type: ignore[arg-type]


class Run:
    """One job, fault after fault."""

    def __init__(self, rules: Rules = INPROCESS, spares: int = 0, shrink: int = 0) -> None:
        self.situation = Situation(rules=rules, generation=0, spares=spares, shrink=shrink)
        self.rungs: list[str] = []
        self.last = Decision()

    def fault(self, *incidents: Incident, after_s: int = 10) -> Decision:
        old = self.situation
        here = tuple(replace(i, generation=old.generation) for i in incidents)
        self.last = decide(replace(old, incidents=here, now_s=old.now_s + after_s))
        self.rungs.append(self.last.rung)
        self.situation = replace(
            old, generation=old.generation + 1, restarts=old.restarts + self.last.counted, history=self.last.history,
            now_s=old.now_s + after_s,
        )  # fmt: skip
        return self.last

    def faults(self, number: int, *incidents: Incident, after_s: int = 10) -> list[str]:
        for _ in range(number):
            self.fault(*incidents, after_s=after_s)
        return self.rungs


# --- one fault


# (what it looks like, rung, nodes with new processes)
FIRST = {
    "it can restart in place": (GOOD, "inplace", ()),
    "also before the first step": (STUCK, "inplace", ()),
    "its node cannot": (Symptoms(rank=1), "node", ("a",)),
    "its node's processes are asked for": (replace(GOOD, rung="node"), "node", ("a",)),
    "all processes are": (replace(GOOD, rung="all"), "all", ()),
    "less is asked for than is needed": (Symptoms(rank=1, rung="inplace"), "node", ("a",)),
    "another node is, and there is none": (replace(GOOD, rung="replace"), "all", ()),
    "the end is": (replace(GOOD, rung="end"), "end", ()),
    "nothing helps": (replace(GOOD, final=True), "end", ()),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_first_fault_takes_the_least_that_may_help(name: str) -> None:
    symptoms, rung, fresh = FIRST[name]
    decision = once(failed(symptoms), generation=0)
    assert (decision.rung, decision.fresh) == (rung, fresh)
    assert decision.in_place is (rung in ("inplace", "node"))
    assert decision.code == (3 if rung == "end" else 0)


def test_without_inprocess_restart_every_fault_replaces_all_processes_until_the_budget_is_spent() -> None:
    run = Run(Rules(max_restarts=7))
    assert run.faults(8, failed(Symptoms(rank=1))) == ["all"] * 7 + ["end"]
    assert (run.last.code, run.last.reason) == (3, "all 7 restarts are spent")
    assert once(failed(), rules=Rules(max_restarts=0), generation=0).reason == "no restarts were asked for (--max-restarts)"


def test_a_fault_of_an_older_generation_changes_nothing() -> None:
    assert once(failed(replace(GOOD, final=True), generation=3), generation=4) == Decision(in_place=True)


def test_another_node_takes_the_place_of_one_or_the_world_gets_smaller() -> None:
    asked = failed(replace(GOOD, rung="replace"))
    for more in ({"spares": 1}, {"shrink": 1}):
        decision = once(asked, generation=0, **more)
        assert (decision.rung, decision.dropped, decision.held_back, decision.in_place) == ("replace", ("a",), ("a",), True)


def test_the_lost_take_the_spares_first() -> None:
    decision = once(lost("b"), failed(replace(GOOD, rung="replace")), generation=0, spares=1)
    assert decision.dropped == () and not decision.in_place


@pytest.mark.parametrize("broken", [lost("b"), Incident("revived", 0, "b")], ids=["lost", "revived"])
def test_workers_that_fail_because_a_node_is_gone_spend_nothing(broken: Incident) -> None:
    victim = Symptoms(rank=1, in_place=True, victim=True)
    rules = replace(INPROCESS, max_restarts=0)
    alone, both = once(broken, rules=rules, generation=0), once(failed(victim), broken, rules=rules, generation=0)
    assert (both.rung, both.counted, both.history) == (alone.rung, False, alone.history)
    torchrun_like = once(failed(victim), broken, rules=Rules(max_restarts=0), generation=0)
    assert (torchrun_like.rung != "end", torchrun_like.counted) == (True, False)
    assert once(failed(replace(victim, in_place=False)), broken, rules=rules, generation=0).fresh[0] == "a", (
        "it needs a new process all the same"
    )
    # Its words alone acquit nobody, and whoever blames no peer is no victim.
    assert once(failed(victim), rules=rules, generation=0).rung == "end"
    assert once(failed(), broken, rules=rules, generation=0).rung == "end"


def test_a_lost_node_is_no_restart_of_the_budget_and_leaves_the_others_in_place() -> None:
    decision = once(lost("b"), rules=replace(INPROCESS, max_restarts=0), generation=0)
    assert (decision.rung, decision.counted, decision.in_place) == ("replace", False, True)


def test_the_highest_of_several_rungs_holds_and_all_that_need_it_get_new_processes() -> None:
    decision = once(failed(), failed(Symptoms(rank=0), "b"), failed(Symptoms(rank=0), "c"), lost("d"), generation=0)
    assert (decision.rung, decision.fresh, decision.in_place) == ("replace", ("b", "c"), True)
    worse = once(failed(replace(GOOD, rung="all")), lost("d"), generation=0)
    assert (worse.fresh, worse.in_place) == ((), False)


# --- again and again


def test_the_same_rank_climbs_rung_by_rung_when_no_step_is_completed() -> None:
    assert Run().faults(5, failed(STUCK)) == ["inplace", "node", "all", "all", "end"]
    run = Run(spares=1)
    assert run.faults(5, failed(STUCK)) == ["inplace", "node", "all", "replace", "end"]
    assert "local rank 1 of a fails again and again" in run.last.reason and run.last.code == 3


def test_with_progress_each_rung_is_tried_several_times() -> None:
    wanted = ["inplace"] * 3 + ["node"] * 3 + ["all"] * 3 + ["replace"] * 3 + ["end"]
    assert Run(spares=1).faults(13, failed()) == wanted


def test_another_rank_starts_at_the_bottom() -> None:
    run = Run()
    run.faults(2, failed(STUCK))
    assert run.fault(failed(Symptoms(rank=0, in_place=True))).rung == "inplace"


def test_what_is_long_ago_is_forgotten() -> None:
    assert Run().faults(40, failed(), after_s=2000) == ["inplace"] * 40


def test_no_progress_is_a_verdict_of_its_own_whoever_fails_and_however_slowly() -> None:
    run = Run()
    rungs = [run.fault(failed(replace(STUCK, rank=rank)), after_s=9000).rung for rank in range(6)]
    assert rungs == ["inplace"] * 4 + ["all", "end"]
    assert run.last.reason == "no rank has completed a step in 6 generations"


def test_progress_starts_the_count_anew() -> None:
    run = Run()
    for rank in range(5):
        run.fault(failed(replace(STUCK, rank=rank)))
    run.fault(failed(replace(GOOD, rank=7)))
    assert run.fault(failed(replace(STUCK, rank=8))).rung == "inplace"


def test_without_a_number_of_restarts_the_memory_is_the_budget() -> None:
    run = Run()
    for number in range(MEMORY):
        assert run.fault(failed(replace(GOOD, rank=number))).rung == "inplace"
    assert run.fault(failed(replace(GOOD, rank=99))).rung == "end"
    assert run.last.reason.startswith("32 faults of workers within 3600 s")
    allowed = Run(replace(INPROCESS, max_restarts=100))
    assert [allowed.fault(failed(replace(GOOD, rank=n))).rung for n in range(101)] == ["inplace"] * 100 + ["end"]


def test_a_rank_that_fails_again_and_again_gives_way_to_a_spare_also_without_inprocess_restart() -> None:
    wanted = ["all"] * 3 + ["replace"]
    run = Run(Rules(max_restarts=50), spares=1)
    assert run.faults(4, failed(Symptoms(rank=1))) == wanted and run.last.dropped == ("a",)
    smaller = Run(Rules(max_restarts=50), shrink=1)
    assert smaller.faults(9, failed(Symptoms(rank=1))) == ["all"] * 9, "the number alone decides"


# --- nodes


def test_node_failures_have_a_budget_within_a_window() -> None:
    rules = Rules(max_node_failures=2, window_s=100)
    assert Run(rules).faults(9, lost("a"), after_s=60) == ["replace"] * 9
    run = Run(rules)
    assert run.faults(3, lost("a"), after_s=40) == ["replace", "replace", "end"]
    assert run.last.code == 69 and "--max-node-failures" in run.last.reason
    assert once(lost("a"), lost("b"), lost("c"), rules=rules, generation=0).rung == "end"


def test_as_many_lost_nodes_are_remembered_as_are_to_be_counted() -> None:
    run = Run(Rules(max_node_failures=80))
    rungs = run.faults(81, lost("a"))
    assert rungs == ["replace"] * 80 + ["end"]


def test_an_agent_that_died_counts_as_a_node_and_its_processes_are_new() -> None:
    revived = Incident("revived", 0, "a")
    assert once(revived, generation=0).rung == "node"
    assert Run(replace(INPROCESS, max_node_failures=1)).faults(2, revived) == ["node", "end"]


def test_a_restart_that_is_nobodys_fault_costs_and_leaves_nothing() -> None:
    decision = once(Incident("asked", 0, "a"), rules=replace(INPROCESS, max_restarts=0), generation=0)
    assert (decision.rung, decision.counted, decision.history) == ("inplace", False, ())
    assert once(Incident("asked", 0, "a", symptoms=Symptoms(rung="all")), generation=0).rung == "all"


def test_nodes_that_fail_again_and_again_are_held_back() -> None:
    run = Run()
    run.faults(3, lost("a"))
    assert run.last.held_back == ("a",)
    assert decide(replace(run.situation, incidents=())).held_back == ("a",)
    assert decide(replace(run.situation, incidents=(), now_s=99999)).held_back == ()


# --- always


ASKED = st.sampled_from(["", "inplace", "node", "all", "replace", "end"])
SYMPTOMS = st.builds(Symptoms, st.integers(-1, 2), st.just(False), ASKED, st.booleans(), st.booleans())
INCIDENTS = st.lists(
    st.builds(Incident, st.sampled_from(["failed", "lost", "revived", "asked"]), st.just(0), st.sampled_from("abcd"),
              st.just(3), st.just("boom"), SYMPTOMS),
    min_size=1, max_size=6,
)  # fmt: skip
RULES = st.builds(
    Rules, inprocess=st.booleans(), max_restarts=st.none() | st.integers(0, 60), max_node_failures=st.none() | st.integers(0, 40),
    window_s=st.sampled_from([60.0, 3600.0]), max_rank_faults=st.integers(1, 4),
)  # fmt: skip


@given(RULES, st.lists(st.tuples(INCIDENTS, st.integers(0, 50)), max_size=50), st.integers(0, 2), st.integers(0, 2))
def test_whatever_happens(rules: Rules, happens: list[tuple[list[Incident], int]], spares: int, shrink: int) -> None:
    run = Run(rules, spares, shrink)
    for incidents, after_s in happens:
        before = run.situation
        decision = run.fault(*incidents, after_s=after_s)
        here = [replace(i, generation=before.generation) for i in incidents]
        gone = {i.node for i in here if i.kind == "lost"}
        for incident in (i for i in here if i.kind != "lost" and i.node not in gone and i.symptoms.rung):
            asked = incident.symptoms.rung
            got = "replace" if incident.node in decision.dropped else decision.rung
            if asked == "replace" and incident.node not in decision.dropped:
                asked = "all"
            if decision.rung != "end":
                assert RUNGS.index(got) >= RUNGS.index(asked), "never lower than asked"  # type: ignore[arg-type]
                assert asked not in ("all",) or not decision.in_place
        assert set(decision.fresh).isdisjoint(decision.dropped) and gone.isdisjoint(decision.dropped)
        assert len(decision.dropped) <= spares + shrink
        assert len(decision.history) <= MEMORY + max(MEMORY, rules.max_node_failures or 0), "bounded memory"
        assert decision.counted is (decision.rung != "end" and any(i.kind == "failed" and i.node not in gone for i in here))
        assert len(story(decision.history)) <= len(decision.history)
        if decision.rung == "end":
            assert decision.reason and decision.code
            return


@given(st.data(), st.integers(0, 2), st.integers(0, 2))
def test_the_same_rank_never_goes_down_and_a_job_that_always_fails_ends(data: st.DataObject, spares: int, shrink: int) -> None:
    run = Run(INPROCESS, spares, shrink)
    top = -1
    for _ in range(60):
        progressed = data.draw(st.booleans())
        rung = run.fault(failed(replace(GOOD, progressed=progressed))).rung
        wanted = run.last.history[-1].rung if run.last.rung != "end" else "end"
        assert RUNGS.index(wanted) >= top
        top = RUNGS.index(wanted)
        if rung == "end":
            return
    pytest.fail("it never ends")


@given(st.lists(st.integers(0, 9), min_size=60, max_size=60))
def test_a_job_that_never_completes_a_step_ends_soon_whoever_fails(ranks: list[int]) -> None:
    run = Run(INPROCESS)
    rungs = [run.fault(failed(replace(STUCK, rank=rank)), after_s=5000).rung for rank in ranks]
    assert "end" in rungs[:6]


def test_the_story_has_a_line_for_each_decision() -> None:
    run = Run(spares=1)
    run.fault(failed(STUCK), failed(Symptoms(rank=0, progressed=False), "b"))
    run.fault(lost("c"))
    assert story(run.last.history) == (
        "generation 0: local rank 1 of a, local rank 0 of b failed, before any step was completed: new processes on that node",
        "generation 1: c failed: the node replaced, or all processes where nobody could take its place",
    )
    alone = Run()
    alone.faults(5, failed(STUCK, node=""))
    assert alone.last.reason == "local rank 1 fails again and again, and nothing helps"
    assert story((Fault(7, "a", -2, "all", True, 0),)) == ("generation 7: a failed: all processes replaced",)
