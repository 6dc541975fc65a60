"""Job-scoped facts and the ranks' data addresses: what workers ask of their agent, and agents of each other (MESH S9).

Workers ask through the store's door: a compare-set on `KEY`, which is no key of the store, whose two texts are the verb and its
argument and whose answer is an `Outcome`. Agents send a `Message` of one union, `MARK` in front.
"""

import msgspec

KEY = "//hyperpodrun/job"
"""What a worker asks of the job goes to this key."""
SENT_KEY = b"/" + KEY.encode()
"""As torch's client sends it."""
MARK = b"F"
"""Behind the store's own mark: no frame of the store begins with it."""
MOST_BYTES = 64 << 10
"""All names and values together."""

Verb = str
"""set (name, value; None deletes) | get (name) -> value | names (None) -> names | places (None) -> places."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where the ranks of a node listen for data of other ranks: local rank r on `port` + r. Port 0: none could be planned."""

    node: str
    host: str
    port: int
    nproc: int


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a worker; `error` is a sentence, `missing` says that there is no such fact."""

    error: str = ""
    missing: bool = False
    value: bytes = b""
    names: list[str] = []
    places: list[Place] = []


class Record(msgspec.Struct, frozen=True, array_like=True):
    """All facts as they were after change `number` of a generation. Records are ordered by (generation, number)."""

    generation: int = -1
    number: int = 0
    facts: dict[str, bytes] = {}


class Here(msgspec.Struct, frozen=True, array_like=True, tag="here"):
    """To the first node of the world: what this node brings along, and where its ranks listen."""

    generation: int
    place: Place
    record: Record


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """From the first node: what this generation begins with."""

    generation: int
    places: list[Place]
    facts: dict[str, bytes]


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """To the first node: change a fact (None: delete it). `number` counts the sender's wishes, one is open at a time."""

    generation: int
    number: int
    name: str
    value: bytes | None


class Change(msgspec.Struct, frozen=True, array_like=True, tag="change"):
    """From the first node: this is change `number` of the generation."""

    generation: int
    number: int
    name: str
    value: bytes | None


class Have(msgspec.Struct, frozen=True, array_like=True, tag="have"):
    """To the first node: every change up to this one is kept here."""

    generation: int
    number: int


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """From the first node: wish `number` was granted (every node has it), or refused for a reason."""

    generation: int
    number: int
    error: str


Message = Here | Whole | Ask | Change | Have | Done
