"""Who watches whom (M1): K pseudo-random rings over the members, the same at everyone.

Theory: Rapid's overlay (Suresh et al., 2018). In each ring a node is observed by its predecessor. A random K-regular
graph is an expander: a set of failed nodes nearly always has healthy observers, and gossip along it reaches everyone
in O(log N) steps.

States: none; a pure function of the member names.
Invariants: each node has K observers and K subjects, counted with multiplicity; up to K + 1 members everyone observes
everyone else once.
"""

import functools
from hashlib import blake2b

import msgspec


class Rings(msgspec.Struct, frozen=True):
    """`subjects[n]`: whom n observes and in how many rings; `observers[n]`: by whom n is observed, likewise."""

    k: int
    subjects: dict[str, dict[str, int]]
    observers: dict[str, dict[str, int]]

    @property
    def high(self) -> int:
        """H = ceil(0.8 K): that many alerts are beyond doubt (M4)."""
        return (8 * self.k + 9) // 10

    @property
    def low(self) -> int:
        """L = max(1, ceil(0.3 K)): fewer are noise (M4)."""
        return max(1, (3 * self.k + 9) // 10)


def position(salt: str, node: str) -> bytes:
    """A pseudo-random place for `node`; the same on every machine."""
    return blake2b(f"{salt}\0{node}".encode(), digest_size=8).digest()


@functools.lru_cache(maxsize=64)
def rings(nodes: tuple[str, ...], most: int) -> Rings:
    """Rings over `nodes` (sorted, unique); K = min(most, N - 1)."""
    k = max(0, min(most, len(nodes) - 1))
    subjects: dict[str, dict[str, int]] = {node: {} for node in nodes}
    observers: dict[str, dict[str, int]] = {node: {} for node in nodes}
    complete = len(nodes) <= most + 1
    for ring in range(k):
        order = nodes if complete else tuple(sorted(nodes, key=lambda node: position(str(ring), node)))
        shift = ring + 1 if complete else 1
        for index, node in enumerate(order):
            subject = order[(index + shift) % len(order)]
            subjects[node][subject] = subjects[node].get(subject, 0) + 1
            observers[subject][node] = observers[subject].get(node, 0) + 1
    return Rings(k, subjects, observers)
