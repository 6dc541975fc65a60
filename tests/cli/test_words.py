"""Splitting: where options end, what reaches the script."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

WORDS = st.lists(st.binary(max_size=12).map(lambda data: os.fsdecode(data.replace(b"\0", b""))) | st.sampled_from(
    ["--", "-m", "--nnodes", "7", "-h", "--help", "--dry-run", "--r=16", "-t", "", "-"]), max_size=6)  # fmt: skip


@given(words=WORDS)
@settings(max_examples=150, deadline=None)
def test_words_after_the_script_are_never_touched(launcher, words):
    assert launcher.job("--nproc-per-node", "2", "train.py", *words).program.args == tuple(words)
    assert launcher.job("--", "train.py", *words).program.args == tuple(words)


def test_a_script_is_a_program_with_its_arguments(launcher):
    what = launcher.job("train.py", "--lr", "1").program
    assert (what.run_as, what.target, what.args) == ("script", "train.py", ("--lr", "1"))


@pytest.mark.parametrize(
    ("words", "run_as", "target"),
    [
        (["-m", "pkg.train"], "module", "pkg.train"),
        (["--module", "pkg.train"], "module", "pkg.train"),
        (["--no-python", "./program"], "program", "./program"),
        (["--no-python", "sh"], "program", "sh"),
        (["--run-path", "train.py"], "run-path", "train.py"),
        (["--run-path", "--no-python", "train.py"], "run-path", "train.py"),
        (["train.py"], "script", "train.py"),
    ],
)
def test_forms_of_programs(launcher, words, run_as, target):
    what = launcher.job(*words, "-m", "--no-python").program
    assert (what.run_as, what.target, what.args) == (run_as, target, ("-m", "--no-python"))


def test_directories_and_archives_with_a_main_module_are_scripts(launcher, tmp_path):
    (tmp_path / "__main__.py").write_text("")
    assert launcher.job(str(tmp_path)).program.target == str(tmp_path)
    (tmp_path / "app.pyz").write_bytes(b"PK\5\6" + bytes(18))
    assert launcher.job(str(tmp_path / "app.pyz")).program.run_as == "script"


@pytest.mark.parametrize("name", ["--nproc-per-node", "--nproc_per_node", "--nproc-per_node"])
@pytest.mark.parametrize("joined", [True, False])
def test_dashes_and_underscores_are_the_same(launcher, name, joined):
    assert launcher.job(*([f"{name}=3"] if joined else [name, "3"]), "train.py").nproc_per_node == 3


def test_the_last_of_several_counts(launcher):
    assert launcher.job("--max-restarts=1", "--max_restarts=2", "train.py").max_restarts == 2


def test_a_script_that_looks_like_an_option_needs_a_path(launcher):
    assert "--help" in launcher.refusal("--", "--help")


def test_help_and_version_end_well_whatever_the_variables_say(launcher):
    outcome = launcher("--nproc-per-node", "2", "--help", PET_NNODES="rubbish")
    assert (outcome.code, outcome.job, outcome.err) == (0, None, "")
    assert "--nproc-per-node" in outcome.out
    assert launcher("-h").out == launcher("--help").out
    assert launcher("--version").out.startswith("hyperpodrun ")
