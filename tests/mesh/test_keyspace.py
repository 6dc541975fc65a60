"""Several agents' stores over a network that loses, repeats, delays and reorders: every history of a key has an order."""

import heapq
import importlib.util
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.mesh.keyspace import KeySpace, Pending, owners
from hyperpodrun.agent.wire import store as op

_spec = importlib.util.spec_from_file_location("linear", Path(__file__).with_name("linear.py"))
linear = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(linear)

KEYS = [b"a", b"b", b"c", b"d"]
LIMIT_BYTES = 1 << 24


class Net:
    """Virtual time in ns. `loss` of the frames never arrive, some arrive twice, each takes its own time."""

    def __init__(self, seed, nodes, loss=0.0):
        self.random = random.Random(seed)
        self.loss = loss
        self.now = 0
        self.turns = 0
        self.events = []
        self.order = [f"n{i}" for i in range(nodes)]
        self.spaces = {}
        for i, node in enumerate(self.order):
            self.begin(node, life=i)

    def begin(self, node, life):
        self.spaces[node] = KeySpace(3, node, self.order, life, LIMIT_BYTES, wake=lambda node=node: self.at(0, self.flush, node))

    def at(self, delay, what, *args):
        self.turns += 1
        heapq.heappush(self.events, (self.now + delay, self.turns, what, args))

    def flush(self, node):
        space = self.spaces[node]
        space.tick(self.now)
        for to, frame in space.frames(self.now):
            for _ in range(2 if self.random.random() < self.loss / 2 else 1):
                if self.random.random() >= self.loss:
                    self.at(self.random.randrange(1, 3_000_000), self.arrive, node, to, frame)
        deadline = space.next_deadline_ns()
        if deadline is not None:
            self.at(max(1, deadline - self.now), self.flush, node)

    def arrive(self, source, to, frame):
        self.spaces[to].receive(source, frame, self.now)
        self.flush(to)

    def run(self, until=None):
        while self.events and (until is None or not until()):
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)


class Script:
    """A client that asks one thing after another and writes down what it was told."""

    def __init__(self, net, node, number, asked, history):
        self.net, self.space, self.number = net, net.spaces[node], number
        self.client, self.asked, self.history = self.space.client(number, 1), list(asked), history
        self.done = False
        net.at(net.random.randrange(1, 1000), self.next)

    def next(self):
        if not self.asked:
            self.done = True
            return
        key, name, args = self.asked.pop(0)
        kind = {"set": op.Set, "get": op.Get, "add": op.Add, "append": op.Append, "compare_set": op.CompareSet,
                "check": op.Check, "delete": op.Delete}[name]  # fmt: skip
        start = self.net.now

        def came(answer):
            self.history.setdefault(key, []).append(linear.Op(self.number, start, self.net.now, name, args, answer))
            self.net.now += 1
            self.net.at(self.net.random.randrange(1, 2_000_000), self.next)

        self.net.now += 1
        answer = self.space.call(self.client, kind(key, *args), came)
        if type(answer) is not Pending:
            came(answer)


NUMBERS = st.tuples(st.sampled_from(KEYS[:2]), st.sampled_from([("add", (1,)), ("add", (5,)), ("get", ()), ("delete", ())]))
TEXTS = st.tuples(
    st.sampled_from(KEYS[2:]),
    st.sampled_from([
        ("set", (b"x",)), ("set", (b"y",)), ("get", ()), ("get", ()), ("append", (b"z",)), ("compare_set", (b"", b"v")),
        ("compare_set", (b"x", b"w")), ("check", ()), ("delete", ()),
    ]),
)  # fmt: skip
PROGRAMS = st.lists(st.lists(NUMBERS | TEXTS, max_size=10), min_size=2, max_size=5)


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 20), nodes=st.integers(1, 4), loss=st.sampled_from([0.0, 0.1, 0.4]), programs=PROGRAMS)
def test_every_key_has_an_order(seed, nodes, loss, programs):
    net, history = Net(seed, nodes, loss), {}
    crew = [
        Script(net, net.order[i % nodes], i, [(key, *what) for key, what in program], history)
        for i, program in enumerate(programs)
    ]
    net.run(until=lambda: all(client.done for client in crew))
    assert all(client.done for client in crew), "a call was never answered"
    for key, ops in history.items():
        assert linear.linearizable(ops), (key, ops)


def test_the_checker_can_say_no():
    stale = [linear.Op(0, 0, 1, "set", (b"x",), None), linear.Op(1, 2, 3, "get", (), None)]
    assert not linear.linearizable(stale)
    assert linear.linearizable([stale[0], stale[1]._replace(start=0)])


def ask(net, node, asked, number=0, session=1):
    """The answers, in a list to which they come."""
    space, answers = net.spaces[node], []
    answer = space.call(space.client(number, session), asked, answers.append)
    if type(answer) is not Pending:
        answers.append(answer)
    return answers


def foreign_key(net, node):
    """A key of which another node is the owner."""
    table = owners(net.order)
    import zlib

    return next(key for i in range(999) if table[zlib.crc32(key := b"k%d" % i) % len(table)] != node)


def test_waits_are_answered_when_the_key_comes_whoever_sets_it():
    net = Net(1, 3, loss=0.3)
    key = foreign_key(net, "n0")
    waits = [ask(net, node, asked) for node in net.order for asked in (op.Watch(key), op.Get(key, block=True))]
    net.run(until=lambda: net.now > 5_000_000_000)
    assert waits == [[]] * 6
    ask(net, "n1", op.Set(key, b"v"))
    net.run()
    assert waits == [[True], [b"v"]] * 3


def test_an_item_goes_to_one_who_waits_for_it():
    net = Net(2, 2)
    key = foreign_key(net, "n0")
    pops = [ask(net, node, op.Pop(key, block=True), number) for number, node in enumerate(["n0", "n1", "n0"])]
    net.run()
    for item in (b"1", b"2", b"3"):
        ask(net, "n0", op.Push(key, item))
    net.run()
    assert sorted(pops) == [[b"1"], [b"2"], [b"3"]]
    assert ask(net, "n0", op.Length(key)) == [] or net.run() is None


def test_the_end_of_the_generation_answers_everything_at_once():
    net = Net(3, 2)
    key = foreign_key(net, "n0")
    waits = [ask(net, "n0", op.Watch(key)), ask(net, "n0", op.Pop(b"local", block=True))]
    net.run()
    net.spaces["n0"].end("node n1 died")
    assert waits == [[op.Trouble("generation 3 ended: node n1 died")]] * 2
    assert ask(net, "n0", op.Set(key, b"v")) == [op.Trouble("generation 3 ended: node n1 died")]


def test_an_agent_that_was_born_again_ends_the_generation():
    net = Net(4, 2)
    key = foreign_key(net, "n0")
    ask(net, "n0", op.Set(key, b"v"))
    net.run()
    net.begin("n1", life=77)
    ask(net, "n1", op.Set(foreign_key(net, "n1"), b"v"))
    net.run(until=lambda: net.now > 10_000_000_000)
    assert "started again" in net.spaces["n0"].ended


def test_a_cancelled_wait_is_forgotten_everywhere():
    net = Net(5, 2)
    key = foreign_key(net, "n0")
    pending = net.spaces["n0"].call(net.spaces["n0"].client(0, 1), op.Watch(key), lambda _: pytest.fail("not wanted any more"))
    net.run()
    pending.cancel()
    net.run()
    assert net.spaces["n1"]._shard.waiting() == 0
    ask(net, "n1", op.Set(key, b"v"))
    net.run()


def test_reads_that_leave_together_are_one():
    net = Net(6, 2)
    key = foreign_key(net, "n0")
    ask(net, "n1", op.Set(key, b"v"))
    net.run()
    reads = [ask(net, "n0", op.Get(key), number) for number in range(8)]
    frames = [frame for _, frame in net.spaces["n0"].frames(net.now)]
    assert [len(frame.items) for frame in frames] == [1]
    net.arrive("n0", "n1", frames[0])
    net.run()
    assert reads == [[b"v"]] * 8


def test_questions_to_all_shards_count_every_key_once():
    net = Net(7, 3)
    for i in range(50):
        ask(net, "n0", op.Set(b"key%d" % i, b""))
    net.run()
    answers = []
    net.spaces["n2"].call_all(net.spaces["n2"].client(0, 1), op.NumKeys(), answers.append)
    net.run()
    assert len(answers[0]) == 3 and sum(answers[0]) == 50


def test_owners_stay_with_their_shards_when_a_node_goes():
    nodes = [f"host{i}:29400" for i in range(64)]
    before, after = owners(nodes), owners([*nodes[:20], *nodes[21:], "host99:29400"])
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) < 12
