"""Faults on order: what can be said, and that each strikes once."""

import os
from pathlib import Path

import pytest
from fake_agent import FakeAgent

from hyperpodrun.agent.wire import link
from hyperpodrun.inprocess import inject


def test_what_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("# a rehearsal\nexception@rank=0+2,step=5 # why\n\nhang-c@for=3;exit@code=7,generation=2\n")
    first, second, third = inject.parse(f"@{tmp_path}/faults")
    assert (first.kind, first.ranks, first.steps, first.phase) == ("exception", {0, 2}, (5, 5), "step")
    assert (second.kind, second.for_s, second.phase, second.ranks) == ("hang-c", 3.0, "enter", None)
    assert (third.kind, third.code, third.generation) == ("exit", 7, 2)
    assert inject.parse("sigkill@phase=health check")[0].phase == "health check"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode", "'explode' in 'explode' is no kind of fault; there are exception, sigkill"),
        ("exit@colour=red", "'colour=red'"),
        ("exit@rank", "what can be said is KEY=VALUE"),
        ("exit@rank=two", "invalid literal"),
        ("exit@step=9-3", "the first step comes before the last"),
        ("exit@step=1,step=2", "'step' is there twice"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str) -> None:
    with pytest.raises(inject.BadInjection, match="HYPERPODRUN_INJECT") as caught:
        inject.parse(text)
    assert words in str(caught.value)


def test_places() -> None:
    (fault,) = inject.parse("exception@rank=1,step=5,generation=0")
    assert fault.meets("step", 5, 1, 4, 0)
    for other in [("enter", 5, 1, 4, 0), ("step", 4, 1, 4, 0), ("step", 5, 0, 4, 0), ("step", 5, 1, 4, 1)]:
        assert not fault.meets(*other)


def test_draws_are_the_seeds() -> None:
    def places(seed: int) -> list[tuple[int, int]]:
        (fault,) = inject.parse(f"exception@rank=any,step=10-29,seed={seed}")
        return [(rank, step) for rank in range(4) for step in range(40) if fault.meets("step", step, rank, 4, 0)]

    assert all(len(places(seed)) == 1 for seed in range(20))
    assert places(3) == places(3)
    assert len({places(seed)[0] for seed in range(20)}) > 5
    assert all(10 <= places(seed)[0][1] <= 29 for seed in range(20))


@pytest.mark.parametrize("folder", [True, False])
def test_each_strikes_as_often_as_it_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool) -> None:
    monkeypatch.setenv("HYPERPODRUN_INJECT", f"exception@times=2,phase=here{folder}")
    monkeypatch.delenv("HYPERPODRUN_LINK", raising=False)
    if folder:
        monkeypatch.setenv("HYPERPODRUN_INJECT_DIR", str(tmp_path))
    struck = 0
    for _ in range(5):
        try:
            inject.point(f"here{folder}")
        except inject.InjectedFault:
            struck += 1
    assert struck == 2
    assert len(os.listdir(tmp_path)) == (2 if folder else 0)


SCRIPT = """
import os
from hyperpodrun.inprocess.wrap import HPWrapper
from hyperpodrun.inprocess.progress import note_step
@HPWrapper
def main(caller=None):
    for step in range(5):
        note_step(step)
    return caller.generation
print("value", main(), flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("order", "deaths"),
    [
        ("exception@step=3", 0),
        ("sigkill@step=3", 1),
        ("exit@step=2,code=9", 1),
        ("hang", 0),
        ("hang-sleep@step=4", 0),
        ("balloon@step=1,mb=32", 0),
        ("exception@phase=finalizing;exception@step=1", 1),
        ("hang-c@for=1;exception@step=2", 0),
        ("sigstop@for=0.2;exception@step=2", 0),
    ],
)
def test_each_kind_strikes_once_in_a_job(agent: FakeAgent, order: str, deaths: int) -> None:
    agent.start(SCRIPT, HYPERPODRUN_INJECT=order)
    agent.play(until_generation=0)
    agent.await_line("injected fault")
    if order.startswith("hang") and "for" not in order:
        agent.end_generation("it hangs")
    agent.play()
    assert agent.lines()[-1] == f"value {agent.generation}", agent.story()
    assert agent.generation == 1
    assert len(agent.all_pids) == 1 + deaths
    if "exit" in order:
        assert agent.nursery.codes[agent.all_pids[0]] == 9


@pytest.mark.processes
@pytest.mark.torch
def test_a_hang_in_a_collective(agent_of) -> None:  # type: ignore[no-untyped-def]
    agent = agent_of(2, store=True)
    body = "    import torch.distributed as dist\n    dist.init_process_group('gloo')\n"
    agent.start(
        SCRIPT.replace("    for step", body + "    for step").replace("    return", "    dist.barrier()\n    return"),
        HYPERPODRUN_INJECT="hang-collective@rank=1,step=2",
    )
    agent.play(until_generation=0)
    agent.await_line("injected fault", rank=1)
    agent.end_generation("it hangs")
    agent.play()
    assert [agent.lines(rank)[-1] for rank in range(2)] == ["value 1", "value 1"]
    assert not [one for _, one in agent.history if isinstance(one, link.Fault)]
