"""The command line of a worker."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.wire.launch import Program
from hyperpodrun.agent.workers import command


@pytest.mark.parametrize(
    "typed, wanted",
    [
        ("python /bin/hyperpodrun -X dev -W error a.py", "-u"),
        ("python -m hyperpodrun -O a.py", "-u"),
        ("python -c code -O", "-u"),
        ("python -X dev -Wignore -W error::UserWarning -OO -B -m hyperpodrun", "-Xdev -Wignore -Werror::UserWarning -O -O -B -u"),
        ("python -bBOX dev -m hyperpodrun", "-b -B -O -Xdev -u"),
        ("python -u -I -E -s -S -P -R /bin/hyperpodrun", "-R -u"),
        ("python -sP /bin/hyperpodrun -B", "-u"),
        ("python --check-hash-based-pycs always -B x", "--check-hash-based-pycs always -B -u"),
        ("python - -B", "-u"),
        ("python", "-u"),
        ("python -Bm hyperpodrun -O", "-B -u"),
        ("python -iB x", "-B -u"),
    ],
)
def test_interpreter_options_of_the_launcher_reach_the_workers(typed, wanted):
    assert command.interpreter_flags(typed.split()) == wanted.split()


@given(st.lists(st.one_of(st.text(alphabet="-XWmcOBu= a", max_size=6), st.sampled_from(["-X", "-m", "-Xdev"])), max_size=6))
def test_any_command_line_gives_options_that_end_in_u(words):
    flags = command.interpreter_flags(["python", *words])
    assert flags[-1] == "-u" and not {"-c", "-m"} & set(flags[:-1])


@pytest.mark.parametrize("run_as, wanted", [("script", "py -B -u t a"), ("module", "py -B -u -m t a"), ("program", "t a")])
def test_command_lines(run_as, wanted):
    assert command.command(Program(run_as, "t", ("ignored",)), "py", ["-B", "-u"], [b"a"]) == wanted.encode().split()


@pytest.mark.parametrize(
    "flags, env, expected",
    [
        ([], {}, False),
        (["-Xdev"], {}, False),
        (["-Ximporttime"], {}, True),
        (["-v"], {}, True),
        ([], {b"COVERAGE_PROCESS_START": b"x"}, True),
        ([], {b"COVERAGE_PROCESS_START": b""}, False),
        ([], {b"PYTHONPROFILEIMPORTTIME": b"1"}, True),
    ],
)
def test_tools_that_watch_interpreters_start(flags, env, expected):
    assert bool(command.wants_own_interpreter(flags, env)) is expected


def test_the_same_interpreter():
    assert (
        command.same_interpreter("") and command.same_interpreter(sys.executable) and not command.same_interpreter("/bin/other")
    )


def test_programs_are_looked_up_as_by_execvp(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, mode in ((first, 0o644), (second, 0o755)):
        folder.mkdir()
        (folder / "prog").write_text("")
        (folder / "prog").chmod(mode)
    env = {b"PATH": f"{first}:{second}".encode()}
    assert command.find_program(b"prog", env) == str(second / "prog").encode()
    with pytest.raises(command.NotExecutable, match="not executable") as refused:
        command.find_program(b"prog", {b"PATH": str(first).encode()})
    assert refused.value.code == 126
    with pytest.raises(command.NotExecutable, match="in any folder of PATH") as refused:
        command.find_program(b"missing", env)
    assert refused.value.code == 127
