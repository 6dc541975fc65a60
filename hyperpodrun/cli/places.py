"""Kinds of option values that name a place: hosts, ports, contact points, files.

Contact points and files are looked at, because a path that cannot be read is better told before a job starts than after. Bare
IPv6 addresses are taken as hosts; with a port they need brackets, as in URLs.
"""

import os
import stat

import msgspec

from hyperpodrun.cli.kinds import BadValueError, Kind, integer
from hyperpodrun.cli.refusal import quoted

SECRET_BYTES = 32
LARGEST_FILE_BYTES = 1 << 20


class Address(msgspec.Struct, frozen=True):
    """A host name or address (IPv6 without brackets) and a TCP port, None where none was given."""

    host: str
    port: int | None = None


def _host(text: str) -> str:
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    right = _is_ipv6(bare) if bare != text or ":" in bare else _is_name(bare)
    if not right:
        raise BadValueError(f"{quoted(text)} is no host" if text else "the host is missing")
    return bare


def _is_name(text: str) -> bool:
    return 0 < len(text) < 256 and text.isascii() and all(c.isalnum() or c in "-._" for c in text)


def _is_ipv6(text: str) -> bool:
    import socket

    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return text.isprintable()


def _port(text: str, minimum: int) -> int:
    try:
        number = integer(text)
    except BadValueError:
        number = -1
    if not minimum <= number <= 65535:
        raise BadValueError(f"port {quoted(text)} is not in {minimum}..65535")
    return number


def _address(text: str, smallest_port: int = 1) -> Address:
    if text.startswith("["):
        inside, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadValueError(f"{quoted(text)} is no [IPv6]:PORT")
        return Address(_host(inside + "]"), _port(rest[1:], smallest_port) if rest else None)
    if text.count(":") != 1:
        return Address(_host(text))
    host, _, port = text.partition(":")
    return Address(_host(host), _port(port, smallest_port))


def _endpoint(text: str) -> str:
    if text:
        _address(text, smallest_port=0)
    return text


def read_small(path: str) -> bytes:
    """Content of a file of at most a MiB; a missing, unreadable or larger one is a bad value."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadValueError(f"{quoted(path)} is no regular file")
            content = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise BadValueError(f"{quoted(path)} cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadValueError(f"{quoted(path)} is no path") from None
    if len(content) > LARGEST_FILE_BYTES:
        raise BadValueError(f"{quoted(path)} is larger than a MiB")
    return content


def _listed(text: str) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(_address(part.strip()) for part in text.split(",")))


def _peers(text: str) -> tuple[Address, ...] | str:
    if text.startswith("@"):
        lines = (line.partition("#")[0].strip(" \t\r,") for line in read_small(text[1:]).decode(errors="replace").split("\n"))
        joined = ",".join(line for line in lines if line)
        if not joined:
            raise BadValueError(f"{quoted(text[1:])} names no host")
        return _listed(joined)
    if text.startswith("slurm:"):
        if text != "slurm:":
            raise BadValueError("nothing may follow slurm:")
        if not (os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")):
            raise BadValueError("SLURM_JOB_NODELIST is not set, so this is no Slurm job")
        return text
    if text.startswith("dns:"):
        name, colon, port = text[4:].rpartition(":")
        if not colon:
            raise BadValueError("it is not dns:NAME:PORT")
        _host(name)
        _port(port, 1)
        return text
    return _listed(text)


def _secret_file(text: str) -> str:
    content = read_small(text)
    if len(content) < SECRET_BYTES:
        raise BadValueError(f"the file holds {len(content)} bytes, and a secret needs {SECRET_BYTES} or more")
    if os.stat(text).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadValueError("every user of this machine can read or change the file; run chmod o-rw on it")
    return text


def _file(text: str) -> str:
    try:
        if stat.S_ISDIR(os.stat(text).st_mode):
            raise BadValueError("it is a directory")
    except OSError as error:
        raise BadValueError(error.strerror or "it cannot be read") from None
    except ValueError:
        raise BadValueError("it is no path") from None
    return text


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


HOST = Kind("HOST", "a host name or an address", _host)
ENDPOINT = Kind("HOST[:PORT]", "a host with or without a port ([IPv6]:PORT)", _endpoint)
PEERS = Kind("HOST[:PORT],...", "HOST[:PORT] separated by commas, @FILE, slurm: or dns:NAME:PORT", _peers)
SECRET_FILE = Kind("FILE", f"a file of {SECRET_BYTES} or more random bytes that only you can read", _secret_file)
FILE = Kind("FILE", "an existing file", _file)
