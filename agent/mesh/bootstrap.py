"""Without a view: finding the others, being taken in, or forming view 0 (A10).

Theory. An agent without a view says Hello to contact points and whoever it hears of. Somebody who has a view takes it
in. When nobody has one, view 0 is decided by slots: (a) min_nodes > M/2 and a closed roster: any group of min_nodes,
for no two such groups are disjoint; (b) otherwise only a group with the first contact's agent.

In (b) that agent may be one that forgot: its host was rebooted while the job went on without it. So before it forms a
world every slot it knows of must have answered that it has no view either, or have *refused* a connection for
`absent_ns`: no agent runs there, and a keeper would have restarted one by then. Silence proves nothing and forms
nothing. With an open roster (only the contact point is known) there is nobody to ask: it listens for `absent_ns`,
since members of a running job say Hello to slots they lost, and it forms a world with less than all slots only if the
driver knows that its launcher runs for the first time in this job.

States: settled (has a view), joining (says Hello), held (its old workers are not gone yet, so it says nothing: a new
incarnation's Hello means that nothing of the old one runs).
Invariant: an agent that heard of anybody's view within `present_ns` forms none.
"""

import random

from hyperpodrun.agent.mesh.config import MeshConfig
from hyperpodrun.agent.mesh.effects import Connect, Effect, Send
from hyperpodrun.agent.wire.mesh import Brief, Hello, Member


class Bootstrap:
    """Times: nanoseconds of the local clock."""

    def __init__(self, config: MeshConfig, me: str, rng: random.Random, now: int, first_start: bool = True) -> None:
        self._first_start = first_start
        self._config = config
        self._me = me
        self._rng = rng
        self._slots = tuple(dict.fromkeys(n for n in (config.first_contact, *config.roster) if n and n != me))
        self.start(now)

    def start(self, now: int) -> None:
        """Join (again)."""
        self._known: dict[str, tuple[Member, int]] = {}
        self._present: tuple[int, tuple[Member, ...]] | None = None
        self._hints: tuple[str, ...] = ()
        self._settled_ns: int | None = None
        self._refused: dict[str, tuple[int, int]] = {}
        self._started_ns = now
        self._enough_ns: int | None = None
        self.due_ns = now

    def settle(self, nodes: tuple[str, ...]) -> None:
        """In a view with these."""
        self._slots = tuple(node for node in dict.fromkeys((*self._slots, *nodes)) if node != self._me)
        self._first_start = False

    def slots(self) -> tuple[str, ...]:
        """Every slot this agent knows by name but its own: those of the launch and all it ever had in a view."""
        return self._slots

    def overheard(self, now: int, node: str) -> None:
        """Somebody speaks to this slot as if it were in a view: there is one."""
        self._settled_ns = now
        if node not in self._hints:
            self._hints = (*self._hints, node)[-4:]

    def knows_view(self, now: int) -> bool:
        """Somebody with a view was heard of lately."""
        return self._settled_ns is not None and now - self._settled_ns <= self._config.present_ns

    def met(self, now: int, member: Member, has_view: bool, knows: tuple[Member, ...], hints: tuple[str, ...]) -> None:
        """An agent told about itself (and of others it heard of: worth a Hello, no proof that they are there)."""
        self._known[member.node] = (member, now)
        self._present = None
        self._refused.pop(member.node, None)
        if has_view:
            self._settled_ns = now
            self._hints = hints or self._hints
        for other in knows:
            if other.node != self._me and other.node not in self._known:
                self._known[other.node] = (other, now - 2 * self._config.present_ns)

    def connected(self, now: int, node: str, refused: bool) -> None:
        """A contact's host answered a plain connect."""
        if refused:
            self._refused[node] = (self._refused.get(node, (now, now))[0], now)
        else:
            self._refused.pop(node, None)

    def present(self, now: int) -> tuple[Member, ...]:
        """Agents heard of at first hand within `present_ns`, by node."""
        if self._present is None or self._present[0] != now:
            oldest = now - self._config.present_ns
            self._present = now, tuple([m for _, (m, last) in sorted(self._known.items()) if last >= oldest])
        return self._present[1]

    def recent(self, now: int) -> tuple[Member, ...]:
        """Some of them, to be passed on."""
        return self.present(now)[:32]

    def hellos(self, now: int, brief: Brief, me: Member) -> list[Effect]:
        """This round's Hellos: all when few; else three contact points, those hinted at, and three at random."""
        self.due_ns = now + self._config.hello_ns
        everyone = tuple(dict.fromkeys((*self._hints, *self.slots(), *sorted(self._known))))
        if len(everyone) > 16:
            everyone = tuple(dict.fromkeys((*everyone[:6], *self._rng.sample(everyone, 3))))
        hello = Hello(brief, me, False, self.recent(now))
        effects: list[Effect] = [Send(node, hello) for node in everyone if node != self._me]
        if self._config.first_contact == self._me and not self._config.forms_anywhere:
            effects += (Connect(node) for node in self._must_answer(now))
        return effects

    def _must_answer(self, now: int) -> list[str]:
        here = {member.node for member in self.present(now)}
        return [node for node in self.slots() if node not in here]

    def _absent(self, now: int, node: str) -> bool:
        first, last = self._refused.get(node, (now, 0))
        return last - first >= self._config.absent_ns and now - last <= self._config.present_ns

    def form_at(self, now: int) -> int | None:
        """When this agent may open the roll call for view 0; None: not as things are."""
        config = self._config
        if self.knows_view(now):
            return None
        here = self.present(now)
        if len(here) + 1 < config.min_nodes:
            self._enough_ns = None
            return None
        if self._enough_ns is None:
            self._enough_ns = now
        everyone = len(here) + 1 >= config.slots
        if not config.forms_anywhere:
            if config.first_contact != self._me or not all(self._absent(now, node) for node in self._must_answer(now)):
                return None
            closed = len(config.roster) == config.slots
            if everyone or closed:
                return now
            return self._started_ns + config.absent_ns if self._first_start else None
        # The first names are the contact points, who hear of everyone; whoever of them is not there is passed over.
        there = {self._me, *(member.node for member in here)}
        ordered = [node for node in config.roster if node in there]
        if self._me not in ordered:
            return None
        wait = 0 if everyone else config.join_window_ns
        return self._enough_ns + wait + ordered.index(self._me) * config.stagger_ns
