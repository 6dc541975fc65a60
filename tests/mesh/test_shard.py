"""The keys of one owner, beside a store simple enough to be read at a glance."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hyperpodrun.agent.mesh.shard import ENTRY_BYTES, PENDING, Shard
from hyperpodrun.agent.wire import store as op

KEYS = st.sampled_from([b"a", b"b", b"c"])
VALUES = st.sampled_from([b"", b"1", b"-7", b"x", b"long" * 9])
CLIENTS = st.sampled_from([("n", 1, 1, 1), ("n", 2, 1, 1), ("m", 1, 1, 1)])


class Oracle:
    """What TCPStore does, as plainly as possible; waiting calls are asked again after every change."""

    def __init__(self):
        self.values, self.queues, self.waiting, self.come = {}, {}, {}, {}

    def there(self, key):
        return key in self.values or bool(self.queues.get(key))

    def now(self, asked):
        """The answer, or PENDING."""
        match asked:
            case op.Set(key, value):
                self.values[key] = value
            case op.Append(key, value):
                self.values[key] = self.values.get(key, b"") + value
            case op.Get(key, block):
                return PENDING if block and key not in self.values else self.values.get(key)
            case op.Add(key, amount):
                try:
                    total = int(self.values.get(key, b"0")) + amount
                except ValueError:
                    return op.Trouble
                self.values[key] = str(total).encode()
                return total
            case op.CompareSet(key, expected, desired):
                if self.values.get(key, b"") != expected:
                    return self.values.get(key, expected)
                self.values[key] = desired
                return desired
            case op.Check(key):
                return self.there(key)
            case op.Watch(key):
                return self.there(key) or PENDING
            case op.Delete(key):
                return self.values.pop(key, None) is not None
            case op.Push(key, value):
                self.queues.setdefault(key, []).append(value)
            case op.Pop(key, block):
                return self.queues[key].pop(0) if self.queues.get(key) else PENDING if block else None
            case op.Length(key):
                return len(self.queues.get(key, ()))
            case op.NumKeys():
                return len(self.values)
            case op.ListKeys():
                return sorted(self.values)
        return None

    def call(self, ticket, asked):
        """(answer, [(ticket, answer) of those who waited])"""
        if isinstance(asked, op.CompareSet) and asked.key in self.values and self.values[asked.key] != asked.expected:
            return self.values[asked.key], []
        answer = self.now(asked)
        if answer is PENDING:
            self.waiting[ticket] = asked
        woken = []
        # An item that was pushed is handed to who waits for it before anybody sees it.
        for kind in (op.Pop, op.Get, op.Watch):
            for other, wanted in list(self.waiting.items()):
                if other != ticket and isinstance(wanted, kind) and (late := self.now(wanted)) is not PENDING:
                    del self.waiting[other]
                    woken.append((other, late))
        return answer, woken


OPERATIONS = st.one_of(
    st.builds(op.Set, KEYS, VALUES),
    st.builds(op.Get, KEYS, st.booleans()),
    st.builds(op.Add, KEYS, st.integers(-3, 3)),
    st.builds(op.CompareSet, KEYS, VALUES, VALUES),
    st.builds(op.Check, KEYS),
    st.builds(op.Watch, KEYS),
    st.builds(op.Delete, KEYS),
    st.builds(op.Append, KEYS, VALUES),
    st.builds(op.Push, KEYS, VALUES),
    st.builds(op.Pop, KEYS, st.booleans()),
    st.builds(op.Length, KEYS),
    st.just(op.NumKeys()),
    st.just(op.ListKeys()),
)


class AsTheOracle(RuleBasedStateMachine):
    """Whatever is asked, in whatever order, is answered as the oracle answers it."""

    tickets = Bundle("tickets")

    def __init__(self):
        super().__init__()
        self.shard, self.oracle, self.number = Shard(1 << 20), Oracle(), 0

    @rule(asked=OPERATIONS, client=CLIENTS, target=tickets)
    def ask(self, asked, client):
        self.number += 1
        ticket = ("n", self.number)
        answer = self.shard.call(ticket, client, asked)
        woken, self.shard.woken = self.shard.woken, []
        wanted, wanted_woken = self.oracle.call(ticket, asked)
        if wanted is op.Trouble:
            assert isinstance(answer, op.Trouble)
        elif isinstance(asked, op.ListKeys):
            assert sorted(answer) == wanted
        else:
            assert answer == wanted and type(answer) is type(wanted)
        assert sorted(woken) == sorted(wanted_woken)
        return ticket

    @rule(ticket=consumes(tickets))
    def cancel(self, ticket):
        self.shard.cancel(ticket)
        self.oracle.waiting.pop(ticket, None)

    @invariant()
    def holds_what_it_says(self):
        assert self.shard.waiting() == len(self.oracle.waiting)
        values = sum(len(k) + len(v) + ENTRY_BYTES for k, v in self.oracle.values.items())
        queues = sum(len(k) + len(v) + ENTRY_BYTES for k, queue in self.oracle.queues.items() for v in queue)
        assert self.shard.size_bytes == values + queues


TestAsTheOracle = AsTheOracle.TestCase
TestAsTheOracle.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

A1, B1 = ("n", 1, 1, 1), ("n", 2, 1, 1)
A2, B2 = ("n", 1, 2, 2), ("n", 2, 2, 2)


def ask(shard, asked, client=A1, ticket=("n", 0)):
    return shard.call(ticket, client, asked)


def test_keys_of_who_left_stay_until_somebody_comes_back():
    shard = Shard(1 << 20)
    ask(shard, op.Set(b"address of a", b"old"), A1)
    ask(shard, op.Set(b"address of b", b"old"), B1)
    shard.left(*A1[:3])
    assert ask(shard, op.Get(b"address of a"), B1) == b"old"
    shard.began(2)
    assert ask(shard, op.Get(b"address of a"), A2) is None
    assert ask(shard, op.Get(b"address of b"), A2) == b"old"
    shard.left(*B1[:3])
    assert ask(shard, op.Get(b"address of b"), A2) is None


def test_a_counter_goes_with_the_first_of_those_who_added_and_no_later_one_takes_the_new_one():
    shard = Shard(1 << 20)
    assert [ask(shard, op.Add(b"c", 1), client) for client in (A1, B1)] == [1, 2]
    shard.left(*A1[:3])
    shard.began(2)
    assert ask(shard, op.Add(b"c", 1), A2) == 1
    shard.left(*B1[:3])
    assert ask(shard, op.Get(b"c"), A2) == b"1"


def test_a_key_belongs_to_who_set_it_last():
    shard = Shard(1 << 20)
    ask(shard, op.Set(b"k", b"a"), A1)
    ask(shard, op.Set(b"k", b"b"), B1)
    shard.left(*A1[:3])
    shard.began(2)
    assert ask(shard, op.Get(b"k"), A2) == b"b"


def test_who_makes_a_group_again_waits_for_the_keys_of_who_does_so_too():
    shard, key = Shard(1 << 20), b"/default_pg/0/address of b"
    ask(shard, op.Set(key, b"old"), B1)
    assert ask(shard, op.Watch(key), A2, ("n", 1)) is PENDING
    assert ask(shard, op.Check(key), A2) is False and ask(shard, op.Check(key), A1) is True
    ask(shard, op.Set(key, b"older"), B1)
    assert not shard.woken
    assert ask(shard, op.Watch(key, any_round=True), A2) is True
    ask(shard, op.Set(key, b"new"), B2)
    assert shard.woken == [(("n", 1), True)]
    assert ask(shard, op.Watch(key), A2) is True


def test_a_sum_of_an_earlier_group_begins_anew_and_no_other_does():
    shard = Shard(1 << 20)
    for key, sums in ((b"/default_pg/0/barrier", [1, 2, 1, 2]), (b"/mine", [1, 2, 3, 4])):
        assert [ask(shard, op.Add(key, 1), client) for client in (A1, B1, A2, B2)] == sums


def test_a_barrier_opens_for_all_when_the_last_one_comes():
    shard = Shard(1 << 20)
    assert ask(shard, op.Arrive(b"b", 3), ticket=("n", 1)) is PENDING
    assert ask(shard, op.Arrive(b"b", 3), ticket=("n", 2)) is PENDING
    assert not shard.woken
    assert ask(shard, op.Arrive(b"b", 3), ticket=("n", 3)) is True
    assert sorted(shard.woken) == [(("n", 1), True), (("n", 2), True)]


def test_sums_are_signed_numbers_of_64_bit():
    shard = Shard(1 << 20)
    assert ask(shard, op.Add(b"c", 2**63 - 1)) == 2**63 - 1
    assert ask(shard, op.Add(b"c", 1)) == -(2**63)


def test_a_full_store_refuses_with_a_sentence_and_keeps_what_it_has():
    shard = Shard(3000)
    ask(shard, op.Set(b"k", b"v" * 1000))
    for asked in (
        op.Set(b"l", b"v" * 3000),
        op.Append(b"k", b"v" * 3000),
        op.Push(b"q", b"v" * 3000),
        op.CompareSet(b"m", b"", b"v" * 3000),
    ):
        trouble = ask(shard, asked)
        assert isinstance(trouble, op.Trouble) and "full" in trouble.text
    assert ask(shard, op.Get(b"k")) == b"v" * 1000 and ask(shard, op.NumKeys()) == 1
    ask(shard, op.Set(b"k", b""))
    assert ask(shard, op.Set(b"l", b"v" * 2000)) is None
