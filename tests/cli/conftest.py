"""The command line under test: `main` with an agent that only writes down which job it was given."""

import io
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

import msgspec
import pytest

import hyperpodrun.agent
from hyperpodrun.agent.config import JobConfig
from hyperpodrun.agent.run_dir import RunDir
from hyperpodrun.cli import launch


class Keeper:
    """As much of the keeper's link as the command line looks at."""

    family = "0123456789abcdef"
    run_dir: RunDir


KEEPER = Keeper()


class Outcome(msgspec.Struct, frozen=True):
    """What one call of `main` did; `job` is None when no agent was started."""

    code: int
    job: JobConfig | None
    out: str
    err: str


class Launcher:
    """Calls `main` with only the variables that are given, in a folder that holds `train.py` and an executable `program`."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders
        self.jobs: list[JobConfig] = []

    def agent_run(self, config: JobConfig, keeper: object) -> int:
        assert keeper is KEEPER
        self.jobs.append(config)
        return 0

    def __call__(self, *words: str, **variables: str) -> Outcome:
        return self.run(words, variables)

    def run(self, words: tuple[str, ...], variables: Mapping[str, str]) -> Outcome:
        self.jobs.clear()
        KEEPER.run_dir = RunDir(str(self.folders.mktemp("run")), -1)
        with pytest.MonkeyPatch.context() as patch:
            out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2))
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            patch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})
            code = launch.main(list(words), KEEPER)  # type: ignore[arg-type]
            texts = []
            for stream in (out, err):
                stream.flush()
                texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
        assert len(self.jobs) <= 1
        return Outcome(code, self.jobs[0] if self.jobs else None, *texts)

    def job(self, *words: str, **variables: str) -> JobConfig:
        """The job of a command line that must be right."""
        outcome = self.run(words, variables)
        assert outcome.job is not None, outcome.err
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
        return outcome.job

    def refusal(self, *words: str, code: int = 2, **variables: str) -> str:
        """The one line of a command line that must be refused."""
        outcome = self.run(words, variables)
        assert outcome.job is None, f"a job was started: {outcome.job}"
        assert (outcome.code, outcome.out) == (code, ""), outcome.err
        assert outcome.err.startswith("hyperpodrun: ") and outcome.err.count("\n") == 1, outcome.err
        return outcome.err


def look_up(host: str, port: object) -> list[object]:
    """A resolver that knows every name but those of the domain that never exists (RFC 2606)."""
    if host.endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return []


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory)
    folder = tmp_path_factory.mktemp("cli")
    (folder / "train.py").write_text("print('never run')\n")
    program = folder / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    stand_in = ModuleType("hyperpodrun.agent.agent")
    stand_in.run = launcher.agent_run  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, stand_in.__name__, stand_in)
        patch.setattr(hyperpodrun.agent, "agent", stand_in, raising=False)
        patch.setattr(socket, "getaddrinfo", look_up)
        patch.chdir(folder)
        yield launcher
