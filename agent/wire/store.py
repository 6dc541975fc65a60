"""What is asked of the store, and what agents say to each other about it (MESH S1-S6).

An operation concerns one key, or a whole shard (`NumKeys`, `ListKeys`); whoever asks takes operations on several keys apart.
Keys and values are bytes. Items travel in `Frame`s of one stream between two agents (`mesh/stream.py`), in order and once.
"""

import msgspec

MARK = b"S"
"""First byte of a frame among the messages of agents."""
MOST_VALUE_BYTES = 48 << 20
"""A value, and an answer, fit into one message between agents."""


class Set(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """Answer: None."""

    key: bytes
    value: bytes


class Get(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """Answer: the value; for a missing key None, or with `block` the value once there is one."""

    key: bytes
    block: bool = False


class Add(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """Answer: the sum, as a signed number of 64 bit; it is stored as decimal text."""

    key: bytes
    amount: int


class CompareSet(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """Answer: the value after it. A missing key is set when nothing is expected, else `expected` is the answer."""

    key: bytes
    expected: bytes
    desired: bytes


class Check(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """Answer: is there such a key, or a queue that is not empty?"""

    key: bytes


class Watch(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=5):
    """Answer: True, once `Check` would say so. `any_round`: also when that is a value of an earlier round."""

    key: bytes
    any_round: bool = False


class Delete(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=6):
    """Answer: was there such a key? Queues stay."""

    key: bytes


class Append(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=7):
    """Answer: None."""

    key: bytes
    value: bytes


class Push(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=8):
    """Answer: None."""

    key: bytes
    value: bytes


class Pop(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=9):
    """Answer: the oldest item; of an empty queue None, or with `block` the item handed over when one comes."""

    key: bytes
    block: bool = False


class Length(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=10):
    """Answer: how many items the queue holds."""

    key: bytes


class Arrive(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=11):
    """One more at this barrier. Answer: True, once `size` have come."""

    key: bytes
    size: int


class NumKeys(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=12):
    """Answer: how many keys this shard holds, queues not counted."""


class ListKeys(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=13):
    """Answer: the keys of this shard."""


Operation = Set | Get | Add | CompareSet | Check | Watch | Delete | Append | Push | Pop | Length | Arrive | NumKeys | ListKeys
KeyOperation = Set | Get | Add | CompareSet | Check | Watch | Delete | Append | Push | Pop | Length | Arrive


class Trouble(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """Instead of an answer: why the operation cannot be done; nothing was changed."""

    text: str


class Value(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """An answer on the wire."""

    value: bytes | int | bool | list[bytes] | None


class Call(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=0):
    """`number` names the call among the sender's, `client` (number, session, round) who asks among the sender's clients."""

    number: int
    client: tuple[int, int, int]
    operation: Operation


class Cancel(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    """The answer to this call is no longer wanted."""

    number: int


class Answer(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    """To the call of this number."""

    number: int
    answer: Value | Trouble


class Left(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=3):
    """The last connection of this process's `session`, counted from 1, closed; `process` is its number at the sender."""

    process: int
    session: int


class Began(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=4):
    """Some process came back for its `session`-th time."""

    session: int


Item = Call | Cancel | Answer | Left | Began


class Frame(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Items `first`, `first + 1`, … of the stream; the sender has received the other direction's up to and without `expects`.

    `life` tells apart the lives of an agent: numbers start anew with each.
    """

    generation: int
    life: int
    first: int
    expects: int
    items: list[Item]
