"""Which slot is this agent's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.mesh_slots import Here, own_slot, slot_name

HERE = Here("node7.cluster.example", ("10.0.0.7", "fe80::7"), {"alias": ["10.0.0.7"], "other": ["10.0.0.8"], "lo": ["127.0.0.1"]})


@pytest.mark.parametrize(
    ("contacts", "port", "slot"),
    [
        ([("10.0.0.6", 1), ("10.0.0.7", 1)], 1, "10.0.0.7:1"),
        ([("node6", 1), ("node7", 1)], 1, "node7:1"),
        ([("NODE7.", 1)], 1, "NODE7.:1"),
        ([("node7.other.example", 1)], 1, "node7.other.example:1"),
        ([("fe80::7", 1)], 1, "[fe80::7]:1"),
        ([("other", 1), ("alias", 1)], 1, "alias:1"),
        ([("lo", 1)], 1, "lo:1"),
        ([("127.0.0.1", 1), ("127.0.0.1", 2)], 2, "127.0.0.1:2"),
        ([("localhost", 1)], 1, "localhost:1"),
        ([("10.0.0.7", 1)], 2, "node7.cluster.example:2"),
        ([("10.0.0.8", 1)], 1, "node7.cluster.example:1"),
        ([("unknown", 1)], 1, "node7.cluster.example:1"),
        ([], 5, "node7.cluster.example:5"),
        ([("10.0.0.7", 1), ("node7", 1)], 1, "10.0.0.7:1"),
    ],
)
def test_own_entry_is_found_by_port_and_host(contacts: list[tuple[str, int]], port: int, slot: str) -> None:
    assert own_slot(contacts, port, HERE) == slot


@given(st.permutations(["a", "b", "c", "d"]), st.integers(1, 65535))
def test_agents_with_one_list_agree_on_the_names(hosts: list[str], port: int) -> None:
    contacts = [(host, port) for host in hosts]
    slots = [own_slot(contacts, port, Here(host)) for host in hosts]
    assert slots == [slot_name(host, port) for host in hosts]


@given(st.lists(st.integers(1, 65535), min_size=1, unique=True))
def test_agents_on_one_host_are_told_apart_by_their_ports(ports: list[int]) -> None:
    contacts = [("127.0.0.1", port) for port in ports]
    assert len({own_slot(contacts, port, Here("h")) for port in ports}) == len(ports)
