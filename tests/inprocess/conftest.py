"""A fake agent for each test, workers forked from one process that has torch."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_agent import FakeAgent, Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def agent_of(tmp_path: Path, nursery: Nursery) -> Iterator[Callable[..., FakeAgent]]:
    made: list[FakeAgent] = []

    def make(ranks: int = 1, store: bool = False) -> FakeAgent:
        made.append(FakeAgent(tmp_path, nursery, ranks, store))
        return made[-1]

    yield make
    for agent in made:
        agent.close()


@pytest.fixture
def agent(agent_of: Callable[..., FakeAgent]) -> FakeAgent:
    return agent_of()
