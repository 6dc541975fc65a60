"""Agents that do not belong together: told by one clear line on both sides, and nobody is hurt."""

import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

WORK = "meet()\nwait_for('finish')"


def secret(folder: Path, name: str) -> str:
    path = folder / name
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


def lines(run: object, *words: str) -> list[str]:
    return [line for line in run.err.splitlines() if all(word in line for word in words)]


def test_job_with_a_secret_is_a_job_like_any_other(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", f"--job-secret-file={secret(tmp_path, 's')}", script=WORK)
    nodes.up(2)
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0], nodes.story()
    nodes.nothing_left()


def test_secret_may_come_in_a_variable_that_workers_do_not_see(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    script = "meet()\ntell('secret', seen='HYPERPODRUN_JOB_SECRET' in os.environ)"
    nodes.start_all("--nnodes=2", script=script, env={"HYPERPODRUN_JOB_SECRET": "x" * 40})
    assert nodes.codes() == [0, 0], nodes.story()
    assert [row["seen"] for row in nodes.runs[0].notes("secret")] == [False, False]


@pytest.mark.parametrize("theirs", ["another secret", "no secret", "another job"])
def test_stranger_is_refused_and_the_job_goes_on(nodes, tmp_path: Path, theirs: str) -> None:
    nodes.contacts(0, 1)
    ours = f"--job-secret-file={secret(tmp_path, 'ours')}"
    given = [] if theirs == "another job" else [ours]
    for index in (0, 1):
        nodes.start(index, "--nnodes=2", *given, script=WORK)
    nodes.up(2)
    extra = {
        "another secret": [f"--job-secret-file={secret(tmp_path, 'theirs')}"], "no secret": [], "another job": ["--job-id=other"],
    }[theirs]  # fmt: skip
    stranger = nodes.start(2, "--nnodes=2", "--rdzv-conf=join_timeout=4", *extra, script="tell('stranger')")
    assert stranger.code() == 69, nodes.story()
    word = "job with another id" if theirs == "another job" else "secret"
    assert len(lines(stranger, word)) in (1, 2), f"a line for each contact point expected{nodes.story()}"
    for index in (0, 1):
        nodes.runs[index].until(lambda index=index: lines(nodes.runs[index], word), "a line about the stranger")
        assert len(lines(nodes.runs[index], word)) == 1, f"node {index}{nodes.story()}"
    assert not stranger.notes("stranger")
    (tmp_path / "finish").touch()
    assert [nodes.runs[index].code() for index in (0, 1)] == [0, 0], nodes.story()
    assert {row["generation"] for row in nodes.up(2)} == {0}
    nodes.nothing_left()


@pytest.mark.parametrize("theirs", ["--nnodes=3", "--nnodes=1:2", "--spares=1", "--peers", "--failure-detector=fast"])
def test_job_of_the_same_id_on_other_terms_is_refused_and_hurts_nobody(nodes, tmp_path: Path, theirs: str) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", script=WORK)
    nodes.up(2)
    mine = nodes.port.setdefault(2, next(nodes.ports))
    other = f"--peers=127.0.0.1:{nodes.port[0]},127.0.0.1:{mine}" if theirs == "--peers" else theirs
    options = ["--nnodes=2", "--rdzv-conf=join_timeout=4", other]  # what is given last counts
    stranger = nodes.start(2, *options, script="tell('stranger')")
    assert stranger.code() == 69, nodes.story()
    refused = lines(stranger, "refused", f":{mine}", nodes.name(0), "--job-id")
    assert len(refused) == 1, f"one line of node 0 expected{nodes.story()}"
    assert len(lines(nodes.runs[0], "refused", f":{mine}", "--job-id")) == 1, nodes.story()
    for index in (0, 1):
        assert len(lines(nodes.runs[index], "refused")) <= 1, f"node {index}{nodes.story()}"
    assert theirs.split("=")[0].replace("--spares", "--nnodes") in refused[0]
    assert not stranger.notes("stranger")
    (tmp_path / "finish").touch()
    assert [nodes.runs[index].code() for index in (0, 1)] == [0, 0], nodes.story()
    assert {row["generation"] for row in nodes.up(2)} == {0}
    nodes.nothing_left()


def test_second_job_at_a_port_that_is_taken_ends_at_once(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", script=WORK)
    nodes.up(2)
    second = nodes._launch(*nodes.options(0), "--job-id=second", "--nnodes=2", script="tell('stranger')")
    assert second.code() == 78, second.story()
    assert str(nodes.port[0]) in second.err and "--mesh-port" in second.err and "Traceback" not in second.err
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0], nodes.story()


def test_same_node_started_twice_leaves_the_first_alone(nodes, tmp_path: Path) -> None:
    nodes.contacts(0, 1)
    nodes.start_all("--nnodes=2", script=WORK)
    nodes.up(2)
    second = nodes._launch(*nodes.options(0), "--nnodes=2", script="tell('stranger')")
    assert second.code() == 78, second.story()
    (tmp_path / "finish").touch()
    assert nodes.codes() == [0, 0], nodes.story()
    nodes.nothing_left()


def test_short_secret_is_refused(nodes) -> None:
    nodes.contacts(0, 1)
    run = nodes.start(0, "--nnodes=2", script=WORK, env={"HYPERPODRUN_JOB_SECRET": "short"})
    assert run.code() == 78, run.story()
    assert "32" in run.err and "short" not in run.err.replace("too short", "") and "Traceback" not in run.err
    nodes.nothing_left()
