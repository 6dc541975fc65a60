"""CURVE keys of a job, from its secret (Z5). Pure.

Scheme: HKDF-SHA256 (RFC 5869) with the job label as salt makes two 32-byte private keys: one for every inbox of the job
("server"), one for everyone who dials ("client"). Who has the secret has both, and nobody else has either: a dialer proves it
by knowing the server's public key, which is never sent in the clear, and again by the client key, which the ZAP check
compares. One pair for all agents is enough because the secret is what is trusted: any holder could make any key. Each
connection has fresh ephemeral keys (CurveCP), so a secret that leaks later opens no recorded traffic. The job's id goes into
the salt: jobs that share a secret cannot talk to each other.
"""

import hashlib
import hmac

import msgspec

SHORTEST_SECRET_BYTES = 32


class KeyPair(msgspec.Struct, frozen=True):
    """A Curve25519 pair, 32 bytes each."""

    public: bytes
    private: bytes

    def __repr__(self) -> str:
        return "KeyPair(...)"  # private keys have no business in a traceback


class JobKeys(msgspec.Struct, frozen=True):
    """What all agents of one job share."""

    server: KeyPair
    client: KeyPair


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """RFC 5869; `length` at most 255 x 32 bytes."""
    if length > 255 * 32:
        raise ValueError("HKDF gives at most 8160 bytes")
    extracted = hmac.digest(salt or bytes(32), secret, hashlib.sha256)
    out = block = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([counter]), hashlib.sha256)
        out += block
    return out[:length]


def derive(secret: bytes, label: bytes) -> JobKeys:
    """The keys of the job with this label. Raises ValueError for a short secret, NotImplementedError if pyzmq cannot encrypt."""
    if len(secret) < SHORTEST_SECRET_BYTES:
        raise ValueError(f"the job secret has {len(secret)} bytes and needs {SHORTEST_SECRET_BYTES} or more")
    return JobKeys(_pair(secret, label, b"inbox"), _pair(secret, label, b"dialer"))


def _pair(secret: bytes, label: bytes, role: bytes) -> KeyPair:
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise NotImplementedError(
            "this pyzmq was built without CURVE, so the mesh cannot be encrypted; install the wheel from PyPI"
        )
    private = hkdf_sha256(secret, label, b"hyperpodrun mesh 1 " + role)
    return KeyPair(z85.decode(zmq.curve_public(z85.encode(private))), private)
