"""Kinds of option values that name a place: hosts, ports, contact points, files.

Contact points and files are looked at, because a path that cannot be read is better told before a job starts than after. Bare
IPv6 addresses are taken as hosts; with a port they need brackets, as in URLs. The grammar is the transport's, loaded late.
"""

import os
import stat
from typing import TYPE_CHECKING

from hyperpodrun.cli.kinds import BadValueError, Kind
from hyperpodrun.cli.refusal import quoted

if TYPE_CHECKING:
    from hyperpodrun.agent.transport.contact_points import Contact

SECRET_BYTES = 32
LARGEST_FILE_BYTES = 1 << 20


def _host(text: str) -> str:
    from hyperpodrun.agent.transport.addresses import BadAddressError, parse_host

    try:
        return parse_host(text)
    except BadAddressError as error:
        raise BadValueError(str(error)) from None


def _endpoint(text: str) -> str:
    from hyperpodrun.agent.transport.addresses import BadAddressError
    from hyperpodrun.agent.transport.contact_points import parse_endpoint

    try:
        parse_endpoint(text)
    except BadAddressError as error:
        raise BadValueError(str(error)) from None
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


def _peers(text: str) -> "Contact":
    from hyperpodrun.agent.transport.addresses import BadAddressError
    from hyperpodrun.agent.transport.contact_points import parse_contact

    try:
        return parse_contact(text, os.environ, lambda path: read_small(path).decode(errors="replace"))
    except BadAddressError as error:
        raise BadValueError(str(error)) from None


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
