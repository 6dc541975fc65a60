"""Whatever is typed: no exception, no traceback, a code of the table, and either a job or a sentence."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.cli.options import OPTIONS

GARBAGE = st.text(max_size=8).filter(lambda text: "/" not in text) | st.binary(max_size=8).map(
    lambda data: os.fsdecode(data.replace(b"/", b""))
)
VALUES = GARBAGE | st.sampled_from(
    ["0", "1", "2", "-1", "3", "0:1", "0:1,1:2", "1:4", "auto", "cpu", "gpu", "spawn", "fork", "SIGTERM", "a=b", "a,b",
     "train.py", "@train.py", "slurm:", "dns:a:1", "0.5", "nan", "1e400", "[::1]:5", "hold", "continue:1", "now", "node", "''",
     "logs"]
)  # fmt: skip


@st.composite
def option_words(draw):
    option = draw(st.sampled_from(OPTIONS))
    flag = draw(st.sampled_from([option.flag, option.flag.replace("-", "_").replace("__", "--", 1), option.short or option.flag]))
    if option.is_switch and draw(st.integers(0, 9)):
        return [flag]
    value = draw(VALUES)
    return draw(st.sampled_from([[flag, value], [f"{flag}={value}"], [f"{flag}{value}"]]))


SCRIPTS = st.sampled_from([["train.py"], ["--", "train.py"], ["-m", "pkg"], ["--no-python", "./program"], ["none.py"], []])
COMMAND_LINES = st.tuples(
    st.lists(option_words() | GARBAGE.map(lambda word: [word]), max_size=5), SCRIPTS, st.lists(GARBAGE, max_size=3)
)
VARIABLES = st.dictionaries(
    st.sampled_from(
        [*(name for option in OPTIONS for name in option.variables), "HPCT_USE_ROOTLESS", "PYTHON_EXEC", "SLURM_JOB_ID"]
    ),
    VALUES,
    max_size=2,
)


@given(line=COMMAND_LINES, variables=VARIABLES)
@settings(max_examples=600, deadline=None)
def test_main_never_raises_and_never_shows_a_traceback(launcher, line, variables):
    options, script, arguments = line
    words = [word for group in options for word in group] + script + arguments
    outcome = launcher.run(tuple(words), variables)
    assert outcome.code in (0, 2, 78)
    assert "Traceback" not in outcome.out + outcome.err
    if outcome.job is not None:
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
        assert len(outcome.job.redirects) == len(outcome.job.tee) == outcome.job.nproc_per_node
    elif outcome.code == 0:
        assert outcome.out and not outcome.err
    else:
        assert outcome.err.startswith("hyperpodrun: ") and outcome.err.count("\n") == 1 and not outcome.out
