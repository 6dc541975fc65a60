"""What is said can be written and read back; what is malformed is refused."""

import typing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.mesh.inbox import HANDLERS
from hyperpodrun.agent.mesh.tables import MACHINES, diagrams
from hyperpodrun.agent.mesh.view import digest_of
from hyperpodrun.agent.wire.mesh import (
    NOWHERE,
    ZERO,
    Accepted,
    Alert,
    Chain,
    Grant,
    Heartbeat,
    Hello,
    Member,
    Message,
    Promise,
    Report,
    View,
    Vote,
)

VIEW = View(
    "c", 0, 1, 0, "p", (Member("a", 1, "active", 8, "g", 3, ("x:1",)),), "a", ("a",), "run", fence=("b",), ghosts=(("a",),)
)
SAMPLES = (
    Heartbeat(NOWHERE, (Alert("d", "a", "b", 1, True), Report("join", ("a", 1), member=Member("a", 1)))),
    Promise("d", ZERO, Accepted(ZERO, VIEW), True, Member("a", 1)), Chain((VIEW, VIEW)), Grant("d", "a", 1, 2, None),
    Hello(NOWHERE, Member("a", 2**63 - 1), False, (Member("b", 1),)),
)  # fmt: skip


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_reads_back_as_it_was(message: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


def test_every_message_has_a_handler() -> None:
    assert set(HANDLERS) == set(typing.get_args(Message))


def test_a_vote_file_reads_back() -> None:
    vote = Vote(7, VIEW, ZERO, Accepted(ZERO, VIEW))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(vote), type=Vote) == vote


def test_the_digest_tells_every_field_apart() -> None:
    others = (
        msgspec.structs.replace(VIEW, generation=1),
        msgspec.structs.replace(VIEW, fence=()),
        msgspec.structs.replace(VIEW, epoch=1),
    )
    assert len({digest_of(view) for view in (VIEW, *others)}) == 4


@given(st.binary(max_size=60))
def test_rubbish_raises_a_decode_error_and_nothing_else(data: bytes) -> None:
    try:
        msgspec.msgpack.decode(data, type=Message)
    except msgspec.MsgspecError:
        pass


def test_the_tables_lead_only_to_states_that_lead_on() -> None:
    for name, table in MACHINES:
        assert set(table.values()) == {before for before, _ in table}, name
    assert diagrams().count("stateDiagram") == len(MACHINES)


def test_the_diagrams_in_the_document_are_those_of_the_tables() -> None:
    document = (Path(__file__).parents[2] / "docs" / "PROTOCOL.md").read_text()
    assert diagrams() in document
