"""`HOST`, `HOST:PORT`, `[IPv6]:PORT`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperpodrun.agent.transport.addresses import Address, BadAddressError, endpoint, is_loopback, is_numeric, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("gpu-001", "gpu-001", None),
        ("gpu-001:29400", "gpu-001", 29400),
        ("10.0.0.3:1", "10.0.0.3", 1),
        ("::1", "::1", None),
        ("[::1]", "::1", None),
        ("[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
        ("my_pod.svc.cluster.local.:80", "my_pod.svc.cluster.local.", 80),
    ],
)
def test_right_ones(text, host, port):
    address = parse_address(text)
    assert address == Address(host, port)
    assert parse_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the host is missing"),
        (":29400", "the host is missing"),
        ("host:", "port '' is not in 1..65535"),
        ("host:0", "port '0' is not in 1..65535"),
        ("host:65536", "65536"),
        ("host:1_0", "1_0"),
        ("host:٣", "is not in"),
        ("a b", "'a b' is no host"),
        ("[::1", "is no [IPv6]:PORT"),
        ("[::1]29400", "is no [IPv6]:PORT"),
        ("[10.0.0.1]:1", "is no host"),
        ("1:2:3", "is no host"),
        ("fe80::1%", "is no host"),
        ("fe80::1%a/b", "is no host"),
        ("h" * 256, "is no host"),
    ],
)
def test_wrong_ones_say_why(text, reason):
    with pytest.raises(BadAddressError) as error:
        parse_address(text)
    assert reason in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_an_address_or_a_reason(text):
    try:
        address = parse_address(text)
    except BadAddressError as error:
        assert str(error)
        return
    assert parse_address(str(address)) == address


@given(st.ip_addresses(), st.integers(1, 65535))
def test_numeric_addresses_survive_being_shown(ip, port):
    address = Address(str(ip), port)
    assert parse_address(str(address)) == address
    assert is_numeric(address.host)
    assert is_loopback(address.host) == (
        ip.is_loopback or bool(ip.version == 6 and ip.ipv4_mapped and ip.ipv4_mapped.is_loopback)
    )


def test_names_of_this_machine():
    assert is_loopback("localhost") and is_loopback("LOCALHOST.")
    assert not is_loopback("127.example.org") and not is_loopback("gpu-1")
    assert not is_numeric("127.1") and not is_numeric("gpu-1")
    assert endpoint("::1", 5) == "tcp://[::1]:5" and endpoint("10.0.0.1", 5) == "tcp://10.0.0.1:5"
