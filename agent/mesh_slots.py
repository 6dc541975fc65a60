"""Which slot of the job is this agent's, and what the slots are called (MESH section 1, roster). Pure.

A slot is called as its contact point is written, host and port: all agents of a job get the same list, so they agree on the
names without a word. An agent finds its own entry by its port and by an address or name that is this host's. One that is on no
list (a late joiner, an elastic job with one contact point) calls itself by its host name and port.
"""

from collections.abc import Mapping, Sequence

import msgspec


class Here(msgspec.Struct, frozen=True):
    """What this host is called: its name, its addresses, and the addresses behind the names of contact points."""

    name: str
    addresses: tuple[str, ...] = ()
    resolved: Mapping[str, Sequence[str]] = {}

    def is_here(self, host: str) -> bool:
        """Does this contact point's host mean this host?"""
        if _is_loopback(host) or host in self.addresses:
            return True
        numeric = ":" in host or host.replace(".", "").isdigit()
        bare, short = host.rstrip(".").lower(), self.name.partition(".")[0].lower()
        if not numeric and (bare == "localhost" or bare.partition(".")[0] == short):
            return True
        return any(_is_loopback(address) or address in self.addresses for address in self.resolved.get(host, ()))


def own_slot(contacts: Sequence[tuple[str, int]], port: int, here: Here) -> str:
    """This agent's slot name. `contacts` are (host, port) in order; `port` is the one this agent listens on."""
    for host, contact_port in contacts:
        if contact_port == port and here.is_here(host):
            return slot_name(host, port)
    return slot_name(here.name, port)


def slot_name(host: str, port: int) -> str:
    """HOST:PORT, as in `--peers`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"
