"""Whether the peers one observes are there (M2, M3, M5).

Theory: every node sends a heartbeat to its observers each interval. Silence of two intervals starts asking (probe and
plain connect), of three accuses. The plain connect tells apart what silence hides: *refused*, its process is gone
(loud: accused at once); *open*, its kernel answers but its process stands still (it gets `stalled_ns`); no answer,
the host or the way to it is gone. A closed connection is asked about at once. After Lifeguard (Dadgar et al., 2018) a
node that is itself starved doubts itself first: the score 0..7 stretches all its patience; it grows when the node was
late for its own heartbeat or had to refute an accusation, and sinks with each round in which everybody was heard.
Nobody is accused of silence who was not asked before and had time to answer, be this node's rounds as uneven as they may.
What was not listened to is no silence: a late round moves the times of hearing by as much as it was late.

States of a subject: heard, asked (silent for two intervals, or its connection closed), accused.
Invariants: accusations are taken back when the subject is heard again; only subjects of the current view are accused.
"""

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.effects import Connect, Effect, Send
from hyperpodrun.agent.wire.mesh import Probe

Verdict = tuple[str, bool, bool]
"""(subject, down, loud)"""


class Detector:
    """Times: nanoseconds of the local clock. Verdicts are collected and taken by `verdicts()`."""

    def __init__(self, config: MeshConfig) -> None:
        self._config = config
        self.score = 0
        self.heard_ns: dict[str, int] = {}
        self.down: set[str] = set()
        self._open_ns: dict[str, int] = {}
        self._asked_ns: dict[str, int] = {}
        self._loud: dict[str, tuple[int, int]] = {}
        self._verdicts: list[Verdict] = []
        self._round_ns = 0

    def adopt(self, now: int, subjects: tuple[str, ...]) -> None:
        """Observe these from now on, each as if just heard."""
        self.heard_ns = dict.fromkeys(subjects, now)
        self.down.clear()
        self._open_ns.clear()
        self._asked_ns.clear()
        self._loud.clear()
        self._verdicts.clear()
        self._round_ns = now

    def heard(self, now: int, node: str) -> bool:
        """A message of the member in that slot came in; True when that takes back an accusation."""
        if node in self.heard_ns:
            self.heard_ns[node] = now
            if self._loud:
                self._loud.pop(node, None)
            if self._asked_ns:
                self._asked_ns.pop(node, None)
            if node in self.down:
                self.down.discard(node)
                self._verdicts.append((node, False, False))
                return True
        return False

    def verdicts(self) -> tuple[Verdict, ...]:
        """What changed since the last call."""
        if not self._verdicts:
            return ()
        taken = tuple(self._verdicts)
        self._verdicts.clear()
        return taken

    def refuted(self) -> None:
        """This node had to refute an accusation."""
        self.score = min(7, self.score + 1)

    def lost(self, now: int, node: str) -> None:
        """The connection to a subject closed: two probes and a plain connect, 50 ms apart."""
        if node in self.heard_ns and node not in self.down and node not in self._loud:
            self._loud[node] = (0, now)

    def gone(self, node: str) -> None:
        """The incarnation observed in this slot is over for certain."""
        self._accuse(node, True)

    def connected(self, now: int, node: str, refused: bool) -> None:
        """A plain connect was answered."""
        if node not in self.heard_ns:
            return
        if not refused:
            self._open_ns[node] = now
        elif node in self._loud or now - self.heard_ns[node] > self._config.heartbeat_ns:
            self._accuse(node, True)

    def _accuse(self, node: str, loud: bool) -> None:
        if node in self.heard_ns and node not in self.down:
            self.down.add(node)
            self._loud.pop(node, None)
            self._verdicts.append((node, True, loud))

    def patience_ns(self, now: int, node: str) -> int:
        """How long `node` may be silent now."""
        config = self._config
        opened = self._open_ns.get(node)
        stands_still = opened is not None and now - opened < 4 * config.heartbeat_ns
        patience = config.heartbeat_ns * config.misses * (self.score + 1)
        return max(patience, config.stalled_ns) if stands_still else patience

    def round(self, now: int, probe: Probe) -> list[Effect]:
        """To be called each heartbeat interval: ask the silent, accuse the silent for too long."""
        late = now - self._round_ns - self._config.heartbeat_ns
        self._round_ns = now
        if late > self._config.heartbeat_ns:
            self.score = min(7, self.score + 1 + late // (4 * self._config.heartbeat_ns))
            for node in self.heard_ns:
                self.heard_ns[node] = min(now, self.heard_ns[node] + late)
        asks: list[Effect] = []
        good = True
        for node, heard in self.heard_ns.items():
            silent = now - heard
            if node in self.down or silent < 2 * self._config.heartbeat_ns * (self.score + 1):
                continue
            good = False
            asked = self._asked_ns.setdefault(node, now)
            if silent >= self.patience_ns(now, node) and now - asked >= self._config.heartbeat_ns // 2:
                self._accuse(node, False)
            else:
                asks += (Send(node, probe), Connect(node))
        if good and self.score:
            self.score -= 1
        return asks

    def loud_due(self) -> int | None:
        """When the next question about a closed connection is due."""
        return min((due for _, due in self._loud.values()), default=None) if self._loud else None

    def loud(self, now: int, probe: Probe) -> list[Effect]:
        """Ask about closed connections."""
        asks: list[Effect] = []
        for node, (step, due) in sorted(self._loud.items()):
            if due <= now:
                asks.append(Send(node, probe) if step < 2 else Connect(node))
                self._loud[node] = (step + 1, now + self._config.loud_gap_ns * (1 if step < 2 else 2))
        return asks

    def validate(self) -> None:
        """Raise ValueError when an invariant is broken."""
        if (self.down or self._loud) and not (self.down <= self.heard_ns.keys() and self._loud.keys() <= self.heard_ns.keys()):
            raise ValueError("the detector accuses somebody it does not observe")
        if not 0 <= self.score <= 7:
            raise ValueError(f"health score {self.score}")
