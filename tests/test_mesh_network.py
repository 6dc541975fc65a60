"""What is sent to many is encoded once, and nothing is mistaken for it."""

import msgspec

from hyperpodrun.agent.mesh_network import Encoder, Envelope
from hyperpodrun.agent.wire.mesh import NOWHERE, Ack, Go


def decoded(encoder: Encoder, envelope: Envelope) -> Envelope:
    return msgspec.msgpack.decode(encoder.encode(envelope), type=Envelope)


def test_a_message_to_many_is_encoded_once() -> None:
    encoder, message = Encoder(), Go(NOWHERE, 3)
    first = encoder.encode(Envelope(1, message))
    assert encoder.encode(Envelope(1, message)) is first
    assert msgspec.msgpack.decode(first, type=Envelope) == Envelope(1, message)


def test_whatever_differs_is_encoded_anew() -> None:
    encoder, message = Encoder(), Go(NOWHERE, 3)
    for envelope in (
        Envelope(1, message),
        Envelope(1, message, "host:1"),
        Envelope(2, message, "host:1"),
        Envelope(2, Ack(NOWHERE), "host:1"),
        Envelope(2, None, report="one"),
        Envelope(2, None, report="two"),
        Envelope(2, message),
    ):
        assert decoded(encoder, envelope) == envelope
