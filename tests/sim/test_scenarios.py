"""The transcripts in tests/scenarios hold what happens (`python -m hyperpodrun.agent.sim.transcript --rewrite FILE…`)."""

from pathlib import Path

import pytest

from hyperpodrun.agent.sim.transcript import DASHES, check, parse

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_transcript_is_what_happens(path: Path) -> None:
    assert check(str(path), rewrite=False) == ""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_no_transcript_holds_a_violation(path: Path) -> None:
    told = path.read_text().partition(DASHES)[2]
    assert told and "VIOLATION" not in told and "STUCK" not in told


def test_an_unknown_line_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown line"):
        parse("job slots=1 min=1 max=1\nfualt 3 crash n00\n")


def test_a_changed_run_is_shown_and_rewritten(tmp_path: Path) -> None:
    head = "job slots=1 min=1 max=1\nstarts n00@0\nend 100\n"
    path = tmp_path / "one.txt"
    path.write_text(head + DASHES + "\nsomething else\n")
    assert "-something else" in check(str(path), rewrite=False)
    assert check(str(path), rewrite=True) == "" and check(str(path), rewrite=False) == ""
