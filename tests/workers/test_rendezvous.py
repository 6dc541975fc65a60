"""Choosing MASTER_ADDR and MASTER_PORT."""

import socket

from hyperpodrun.agent.workers import rendezvous


def test_port_is_free_and_below_the_ephemeral_range() -> None:
    first, _ = rendezvous.ephemeral_range()
    for _ in range(20):
        port = rendezvous.choose_port()
        assert port < first or first - rendezvous.FIRST_PORT < 1000
        with socket.socket() as server:
            server.bind(("", port))


def test_port_held_by_somebody_is_not_free() -> None:
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        assert not rendezvous.is_free(holder.getsockname()[1])
    with socket.socket(socket.AF_INET6) as holder:
        holder.bind(("::1", 0))
        assert not rendezvous.is_free(holder.getsockname()[1])


def test_ports_already_tried_are_avoided() -> None:
    first = frozenset(range(rendezvous.FIRST_PORT, 65536)) - {rendezvous.FIRST_PORT + 7}
    try:
        assert rendezvous.choose_port(first) == rendezvous.FIRST_PORT + 7
    except OSError:
        pass  # 200 random tries may miss the only one left: that is told, not hung on


def test_words_of_a_taken_port_are_known() -> None:
    torch_says = (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 12345, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )
    assert rendezvous.names_taken_port(torch_says, 12345)
    assert not rendezvous.names_taken_port(torch_says, 12346)
    assert not rendezvous.names_taken_port("port 12345 is fine", 12345)


def test_loopback_can_be_bound() -> None:
    address = rendezvous.loopback()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        server.bind((address, 0))
