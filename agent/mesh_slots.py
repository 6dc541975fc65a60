"""Which slot of the job is this agent's, and what the slots are called (MESH section 1, roster). Pure.

A slot is called as its contact point is written, host and port: all agents of a job get the same list, so they agree on the names
without a word. An agent finds its own entry by its port and by an address or name that is this host's. One that is on no list (a
late joiner, an elastic job with one contact point) calls itself by its host name and port.
"""

from collections.abc import Collection, Sequence


def own_slot(
    contacts: Sequence[tuple[str, int]], port: int, host_name: str, own_addresses: Collection[str], resolved: dict[str, list[str]]
) -> str:
    """This agent's slot name. `contacts` are (host, port) in order; `resolved` holds the addresses of hosts that are names."""
    short = host_name.partition(".")[0]
    for host, contact_port in contacts:
        if contact_port != port:
            continue
        bare = host.rstrip(".").lower()
        numeric = ":" in bare or bare.replace(".", "").isdigit()
        named = not numeric and (bare == "localhost" or bare.partition(".")[0] == short.lower())
        if named or host in own_addresses or host.startswith("127.") or host == "::1":
            return slot_name(host, port)
        if any(address in own_addresses or address.startswith("127.") for address in resolved.get(host, ())):
            return slot_name(host, port)
    return slot_name(host_name, port)


def slot_name(host: str, port: int) -> str:
    """HOST:PORT, as in `--peers`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
