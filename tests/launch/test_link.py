"""The link between workers and the agent of a launcher."""

import os
import signal
import socket

import pytest

from hyperpodrun.agent.wire import address

pytestmark = pytest.mark.processes

ASK = """
from hyperpodrun.agent.wire import link as wire
from hyperpodrun.link import Inbox, Link
def ask():
    inbox = Inbox(Link.current())
    Link.current().send(wire.Hello(int(os.environ["LOCAL_RANK"]), GENERATION))
    return type(inbox.get(60)).__name__
"""


def test_every_rank_and_what_it_starts_is_answered_and_a_stranger_is_not(launch) -> None:
    run = launch(
        "--nproc-per-node=2",
        script=ASK + """
        child = os.fork()
        if child == 0:
            tell("child", answer=ask())
            sys.exit(0)
        tell("rank", answer=ask(), link=os.environ["HYPERPODRUN_LINK"], child=os.waitpid(child, 0)[1])
        wait_for("finish")
        """.replace("\n        ", "\n"),
    )  # fmt: skip
    rows = run.until_told("rank", 2)
    assert {row["answer"] for row in rows + run.notes("child")} == {"Welcome"}
    assert len(run.notes("child")) == 2 and {row["child"] for row in rows} == {0}
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(60)
            with address.fitting(rows[0]["link"].removeprefix("unix:")) as path:
                stranger.connect(path)
            assert stranger.recv(100) == b""
    (run.folder / "finish").touch()
    assert run.code() == 0, run.story()
    assert run.err.count("was refused at the workers' link") == 1
    run.nothing_left()
    assert list((run.folder / "tmp").iterdir()) == []


def test_link_outlasts_a_restart_and_an_agent_killed_and_its_path_may_be_long(launch, tmp_path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    run = launch(
        "--nproc-per-node=1", "--max-restarts=2",
        script=ASK + """
        tell("rank", answer=ask(), link=os.environ["HYPERPODRUN_LINK"])
        if ATTEMPT == 0:
            sys.exit(1)
        if ATTEMPT == 1:
            while True:
                signal.pause()
        """.replace("\n        ", "\n"),
        env={"TMPDIR": str(deep)},
    )  # fmt: skip
    run.until_told("rank", 2)
    os.kill(run.agent(), signal.SIGKILL)
    assert run.code() == 0, run.story()
    rows = run.notes("rank")
    assert [row["answer"] for row in rows] == ["Welcome"] * 3
    assert len({row["link"] for row in rows}) == 1 and len(rows[0]["link"]) > 107
    assert list(deep.iterdir()) == []


def test_program_that_is_no_python_has_no_link(launch, tmp_path) -> None:
    run = launch("--nproc-per-node=1", "--no-python", "/bin/sh", args=("-c", f"env > {tmp_path}/env"))
    assert run.code() == 0, run.story()
    text = (tmp_path / "env").read_text()
    assert "HYPERPODRUN_GENERATION=0" in text and "HYPERPODRUN_LINK" not in text
