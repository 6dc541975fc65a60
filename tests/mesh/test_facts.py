"""Facts of the job: acknowledged means kept by every node of the world (MESH S9)."""

import random

import pytest

from hyperpodrun.agent.mesh.facts import RESEND_NS, Facts
from hyperpodrun.agent.mesh.keyspace import Pending
from hyperpodrun.agent.wire.facts import MOST_BYTES, Outcome, Place, Record


class World:
    """Agents whose messages travel in any order, twice or not at all; `disk` is what each had on its disk when it spoke last."""

    def __init__(self, nodes, seed=0, loss=0.0):
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0
        self.generation = -1
        self.order = ()
        self.flying = []
        self.disk = {}
        self.agents = {}
        for node in nodes:
            self.boot(node)

    def boot(self, node, remembers=True):
        record = self.disk.get(node, Record()) if remembers else Record()

        def send(to, message):
            assert to in self.order and to != node
            if self.random.random() >= self.loss:
                self.flying.append((node, to, message))
                if self.random.random() < self.loss:
                    self.flying.append((node, to, message))

        self.agents[node] = Facts(record, send, lambda kept: self.disk.__setitem__(node, kept))

    def begin(self, *order, shuffled=True):
        self.generation += 1
        self.order = order
        nodes = list(order)
        if shuffled:
            self.random.shuffle(nodes)
        for place, node in enumerate(nodes):
            self.agents[node].begin(self.generation, order, Place(node, f"host-{node}", 100 * place, 2), self.now)
            if shuffled and self.flying and self.random.random() < 0.5:
                self.step()

    def step(self):
        if self.flying:
            source, to, message = self.flying.pop(self.random.randrange(len(self.flying)))
            if to in self.agents:
                self.agents[to].receive(source, message, self.now)
            return True
        due = [at for node in self.order if (at := self.agents[node].next_deadline_ns()) is not None]
        if due:
            self.now = max(self.now, min(due))
            for node in self.order:
                self.agents[node].tick(self.now)
        return bool(due)

    def settle(self):
        for _ in range(20000):
            if not self.step():
                return
        raise AssertionError("no rest")

    def ask(self, node, verb, argument):
        """A list that gets the outcome when it comes."""
        got = []
        answer = self.agents[node].call(verb, argument, self.now, got.append)
        if not isinstance(answer, Pending):
            assert not got
            got.append(answer)
        return got

    def facts(self, node):
        return self.agents[node].record.facts


def test_one_node_answers_at_once():
    world = World("a")
    world.begin("a")
    assert world.ask("a", "set", ("step", b"7")) == [Outcome()]
    assert world.ask("a", "get", "step") == [Outcome(value=b"7")]
    assert world.ask("a", "get", "none") == [Outcome(missing=True)]
    assert world.ask("a", "names", None) == [Outcome(names=["step"])]
    assert world.ask("a", "set", ("step", None)) == [Outcome()]
    assert world.ask("a", "set", ("step", None)) == [Outcome(missing=True)]
    assert world.disk["a"] == Record(0, 2, {})


def test_what_is_acknowledged_is_on_every_disk():
    world = World("abc")
    world.begin("a", "b", "c")
    world.settle()
    got = world.ask("c", "set", ("step", b"7"))
    while not got:
        assert world.step()
    assert [world.disk[node].facts for node in "abc"] == [{"step": b"7"}] * 3


def test_questions_wait_for_the_beginning_of_the_generation():
    world = World("ab")
    world.disk["a"] = Record(3, 1, {"step": b"9"})
    world.boot("a")
    world.generation = 3
    world.begin("b", "a", shuffled=False)
    got, places = world.ask("b", "get", "step"), world.ask("b", "places", None)
    assert not got, "an agent that is new here does not know what the job knows"
    world.settle()
    assert got == [Outcome(value=b"9")]
    assert [place.node for place in places[0].places] == ["b", "a"]


def test_the_newest_record_counts_and_what_was_deleted_stays_away():
    world = World("abc")
    world.begin("a", "b", "c")
    world.settle()
    world.ask("a", "set", ("old", b"1"))
    world.settle()
    world.begin("a", "b")  # c is cut off
    world.settle()
    world.ask("b", "set", ("old", None))
    world.ask("b", "set", ("new", b"2"))
    world.settle()
    world.begin("c", "b")
    world.settle()
    assert world.facts("b") == world.facts("c") == {"new": b"2"}


@pytest.mark.parametrize("lost", "abc")
def test_any_one_node_may_be_lost_with_its_disk(lost):
    world = World("abcd")
    world.begin("a", "b", "c")
    world.settle()
    world.ask("b", "set", ("step", b"7"))
    world.settle()
    world.disk.pop(lost)
    world.boot(lost, remembers=False)
    world.begin(*["d" if node == lost else node for node in "abc"])
    world.settle()
    assert [world.facts(node) for node in world.order] == [{"step": b"7"}] * 3


def test_an_agent_that_comes_back_has_its_file():
    world = World("a")
    world.begin("a")
    world.ask("a", "set", ("step", b"7"))
    world.boot("a")
    world.begin("a")
    assert world.facts("a") == {"step": b"7"}


def test_too_much_is_refused_whole():
    world = World("ab")
    world.begin("a", "b")
    world.settle()
    first, second = world.ask("b", "set", ("a", b"x" * (MOST_BYTES - 1))), world.ask("b", "set", ("b", b"xx"))
    world.settle()
    assert first == [Outcome()]
    assert f"the limit is {MOST_BYTES}" in second[0].error
    assert list(world.facts("a")) == ["a"]
    again = world.ask("b", "set", ("a", b"y" * (MOST_BYTES - 1)))
    world.settle()
    assert again == [Outcome()], "the value that it replaces does not count"


def test_nobody_is_answered_when_the_generation_ends():
    world = World("ab")
    world.begin("a", "b")
    world.settle()
    got = world.ask("b", "set", ("step", b"7"))
    for node in "ab":
        world.agents[node].end()
    world.settle()
    assert not got
    world.begin("a", "b")
    world.settle()
    assert world.facts("a") == world.facts("b")


@pytest.mark.parametrize("seed", range(60))
def test_random_losses_and_restarts(seed):
    """Whatever was acknowledged is there in the next generation, and all nodes of one agree from its beginning on."""
    world = World("abcde", seed, loss=0.3)
    chooser = random.Random(seed + 1000)
    acknowledged = {}
    open_wishes = {}
    previous = ()
    for _ in range(6):
        others = [node for node in "abcde" if node not in previous]
        keep = chooser.sample(previous, max(1, len(previous) - 1)) if previous else []
        order = keep + chooser.sample(others, min(len(others), 3 - min(len(keep), 2)))
        chooser.shuffle(order)
        for node in order:
            if node not in previous:
                world.boot(node, remembers=chooser.random() < 0.5)
        world.begin(*order)
        starts = [world.ask(node, "names", None) for node in order]
        while not all(starts):
            assert world.step()
        assert len({tuple(start[0].names) for start in starts}) == 1
        for name, values in acknowledged.items():
            assert world.facts(order[0]).get(name) in values | open_wishes.get(name, set()), name
        wishes = []
        for number in range(chooser.randrange(12)):
            node, name = chooser.choice(order), chooser.choice("xyz")
            value = f"{world.generation}.{number}".encode()
            wishes.append((name, value, world.ask(node, "set", (name, value))))
            for _ in range(chooser.randrange(12)):
                world.step()
        open_wishes = {}
        done = {}
        for name, value, got in wishes:
            if got:
                assert got == [Outcome()]
                done.setdefault(name, set()).add(value)
            else:
                open_wishes.setdefault(name, set()).add(value)
        acknowledged |= done  # of several at once any may have been the last
        for name, values in open_wishes.items():
            acknowledged.setdefault(name, {None})
            acknowledged[name] = acknowledged[name] | values
        for node in order:
            world.agents[node].end()
        previous = tuple(order)
    assert world.now < 10**6 * RESEND_NS
