"""Hosts, ports and their one grammar: `HOST`, `HOST:PORT`, `[IPv6]:PORT`. Pure.

A bare IPv6 address is a host; with a port it needs brackets, as in URLs (RFC 3986). Host names are looser than DNS wants
(underscores and a final dot exist in real clusters), and addresses are told from names by inet_pton, never by a guess.
"""

import socket

import msgspec


class BadAddressError(ValueError):
    """The text is no address; its own text is the reason."""


class Address(msgspec.Struct, frozen=True):
    """A host name or address (IPv6 without brackets) and a TCP port, None where none was given."""

    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and self.port is not None else self.host
        return host if self.port is None else f"{host}:{self.port}"

    def with_port(self, port: int) -> "Address":
        """Itself, or with this port where it had none."""
        return self if self.port is not None else Address(self.host, port)


def parse_host(text: str) -> str:
    """A host name, an IPv4 address, or an IPv6 address with or without brackets. Raises BadAddressError."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not (_is_ipv6(bare) if bare != text else is_host(bare)):
        raise BadAddressError(f"{text[:200]!r} is no host" if text else "the host is missing")
    return bare


def is_host(text: str) -> bool:
    """Whether this is a host name, an IPv4 address or an IPv6 address without brackets."""
    return _is_ipv6(text) if ":" in text else _is_name(text)


def parse_port(text: str, smallest: int = 1) -> int:
    """A decimal TCP port of at least `smallest`. Raises BadAddressError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and smallest <= int(text) <= 65535):
        raise BadAddressError(f"port {text[:200]!r} is not in {smallest}..65535")
    return int(text)


def parse_address(text: str, smallest_port: int = 1) -> Address:
    """`HOST`, `HOST:PORT` or `[IPv6]:PORT`. Raises BadAddressError."""
    if text.startswith("["):
        inside, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadAddressError(f"{text[:200]!r} is no [IPv6]:PORT")
        return Address(parse_host(inside + "]"), parse_port(rest[1:], smallest_port) if rest else None)
    if text.count(":") != 1:
        return Address(parse_host(text))
    host, _, port = text.partition(":")
    return Address(parse_host(host), parse_port(port, smallest_port))


def is_numeric(host: str) -> bool:
    """Whether the host is an IPv4 or IPv6 address and so needs no look-up."""
    return _is_ipv4(host) or _is_ipv6(host)


def is_loopback(host: str) -> bool:
    """Whether this host is always this machine: 127.0.0.0/8, ::1, or `localhost`."""
    if _is_ipv4(host):
        return host.startswith("127.")
    if _is_ipv6(host):
        packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        return packed == bytes(15) + b"\1" or (packed[:12] == bytes(10) + b"\xff\xff" and packed[12] == 127)
    return host.rstrip(".").lower() == "localhost"


def endpoint(host: str, port: int) -> str:
    """The ZeroMQ endpoint of a numeric host and a port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_name(text: str) -> bool:
    return 0 < len(text) < 256 and text.isascii() and all(c.isalnum() or c in "-._" for c in text)


def _is_ipv4(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, text)
    except (OSError, ValueError):
        return False
    return True


def _is_ipv6(text: str) -> bool:
    bare, percent, zone = text.partition("%")
    try:
        socket.inet_pton(socket.AF_INET6, bare)
    except (OSError, ValueError):
        return False
    return not percent or (zone.isascii() and zone.isprintable() and 0 < len(zone) < 16 and not set(zone) & set(" []/;:%"))
