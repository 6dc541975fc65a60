"""The one bound socket of an agent: who may connect, who is who, what is thrown away (Z2, Z5, Z7).

A ROUTER. The routing id of a connection is random and new with each connection, so two connections never collide and
ROUTER_HANDOVER stays off: nobody can take over a connection by its name. Who is behind it is said by its `Hello`, once; the
frames that follow are looked up by routing id. A frame of an unknown connection that is no hello is dropped.

With a secret: CURVE server, and a ZAP check of the client key as second wall. Handshakes that fail are only known to the
socket's monitor; one I/O thread emits "failed" and "disconnected" of a connection one after the other, which is how the
failure finds its address. A peer without the right mechanism may notice first and hang up without a word; then only its coming
again at once tells it from a port check.

Invariants: nothing that arrives here raises; memory is bounded by `MOST_NODES` x `LINKS_A_NODE`, the high-water marks and the
largest message.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from hyperpodrun.agent.reactor import Reactor, Timer
from hyperpodrun.agent.transport import frames
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.transport.frames import Hello, Identity, Refused, Welcome
from hyperpodrun.agent.transport.keys import JobKeys
from hyperpodrun.agent.transport.probe import peer_of, plain
from hyperpodrun.agent.transport.zsocket import HANDSHAKE_FAILED, NOBLOCK, Monitor, Settings, Source, drop_rest, new_socket

LINKS_A_NODE = 16
MOST_NODES = 8192
NAMELESS_S = 10.0
"""So long a peer that was gone before it was looked at may come back and be named."""
MOST_WORDLESS = 64
WORDLESS_TIMES, WORDLESS_S = 3, 2.0
"""A peer that leaves the handshake so often in that time is an agent with another mechanism; no port check comes so often."""
_ZAP_DOMAIN = b"hyperpodrun"


class Link(msgspec.Struct, eq=False):
    """A connection that said hello. `host`: the numeric address it came from; `session`: which process of that incarnation.

    `heard`: how many messages this inbox had received when this connection last spoke.
    """

    source: Identity
    session: bytes
    host: str
    hello: Hello
    heard: int


class Inbox:
    """`on_hello` judges an introduction and says what to answer; `on_message` gets what comes after it was welcomed."""

    def __init__(
        self,
        reactor: Reactor,
        context: "zmq.Context[Any]",
        settings: Settings,
        keys: JobKeys | None,
        version: int,
        label: bytes,
        on_hello: Callable[[Hello, str], Welcome | Refused],
        on_message: Callable[[Identity, bytes, Link], None],
        counters: dict[str, int],
        complaints: Complaints,
    ) -> None:
        self._version = version
        self._label = label
        self._on_hello = on_hello
        self._on_message = on_message
        self._counters = counters
        self._complaints = complaints
        self._message_header = frames.header(version, label, frames.MESSAGE)
        self._links: dict[bytes, Link] = {}
        self._by_node: dict[str, list[bytes]] = {}
        self._accepted: dict[int, tuple[str, float]] = {}
        self._fresh: set[int] = set()
        self._nameless: dict[str, Timer] = {}
        self._wordless: dict[str, list[float]] = {}
        self._failed: tuple[int, int] | None = None
        self.port = 0
        self.socket = new_socket(context, zmq.ROUTER, settings)
        self.socket.setsockopt(zmq.MAXMSGSIZE, settings.largest_message_bytes + frames.HEADER_BYTES)
        self.socket.setsockopt(zmq.BACKLOG, settings.backlog)
        self._zap: tuple[Source, Any] | None = None
        self._encrypted = keys is not None
        if keys is not None:
            self._lock(reactor, context, keys)
        events = int(zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED | zmq.EVENT_DISCONNECTED) | HANDSHAKE_FAILED
        self._reactor = reactor
        self._monitor = Monitor(reactor, self.socket, events, self._monitored, self._look_at_accepted)
        self._source = Source(reactor, self.socket, self._read_one)

    def close(self) -> None:
        """Close all connections."""
        for timer in self._nameless.values():
            timer.cancel()
        self._source.close()
        self._monitor.close()
        self.socket.close()
        if self._zap:
            source, socket = self._zap
            source.close()
            socket.close()

    # --- frames

    def _read_one(self) -> bool:
        socket = self.socket
        routing_id = socket.recv(NOBLOCK)
        link = self._links.get(routing_id)
        if link is None:
            self._stranger(routing_id)
            return True
        frame = socket.recv(NOBLOCK)
        if socket.getsockopt(zmq.RCVMORE):
            drop_rest(socket)
            self._malformed(link.host)
        elif frame.startswith(self._message_header):
            counters = self._counters
            counters["received"] = link.heard = counters["received"] + 1
            counters["received_bytes"] += len(frame)
            self._on_message(link.source, frame[frames.HEADER_BYTES :], link)
        else:
            self._introduced(routing_id, frame, link.host)
        return True

    def _stranger(self, routing_id: bytes) -> None:
        if not self.socket.getsockopt(zmq.RCVMORE):
            self._malformed("?")
            return
        part = self.socket.recv(NOBLOCK, copy=False)
        if drop_rest(self.socket) or len(part) > frames.LONGEST_INTRODUCTION_BYTES:
            self._malformed("?")
            return
        frame = part.bytes
        if len(frame) >= frames.HEADER_BYTES and frames.kind_of(frame) == frames.HELLO:
            self._introduced(routing_id, frame, _host(part))
        else:
            self._malformed("?")

    def _introduced(self, routing_id: bytes, frame: bytes, host: str) -> None:
        fault = frames.fault_of(frame, self._version, self._label)
        if fault == "version":
            self._refuse(routing_id, "version")
            self._complaints.about(
                f"version {host}",
                f"an agent at {host} speaks version {frame[0]} of the mesh protocol, this one version {self._version}: "
                "it was refused. Install the same hyperpodrun on all nodes",
            )
        elif fault == "job":
            self._refuse(routing_id, "job")
            self._complaints.about(
                f"job {host}",
                f"an agent at {host} of a job with another id talks to port {self.port} of this one: it was refused. "
                "If it should belong here give both the same --job-id, else give one job another --mesh-port",
            )
        elif fault or (hello := frames.decode_hello(frame)) is None:
            self._malformed(host)
        else:
            self._judge(routing_id, hello, host)

    def _judge(self, routing_id: bytes, hello: Hello, host: str) -> None:
        full = len(self._by_node) >= MOST_NODES and hello.node not in self._by_node
        answer = Refused("unfit", f"it already knows {MOST_NODES} nodes") if full else self._on_hello(hello, host)
        if isinstance(answer, Refused):
            self._counters["refused"] += 1
            self._answer(routing_id, frames.REFUSED, answer)
            return
        if routing_id not in self._links:
            self._make_room(hello.node)
            self._by_node[hello.node].append(routing_id)
        self._links[routing_id] = Link(
            Identity(hello.node, hello.incarnation), hello.session, host, hello, self._counters["received"]
        )
        self._answer(routing_id, frames.WELCOME, answer)

    def _make_room(self, node: str) -> None:
        """Of a node's connections the ones that speak survive; the others were closed long ago (a ROUTER does not say when)."""
        of_node = self._by_node.setdefault(node, [])
        if len(of_node) >= LINKS_A_NODE:
            silent = min(of_node, key=lambda routing_id: self._links[routing_id].heard)
            of_node.remove(silent)
            del self._links[silent]

    def _refuse(self, routing_id: bytes, why: frames.Why) -> None:
        self._counters["refused"] += 1
        self._answer(routing_id, frames.REFUSED, Refused(why))

    def _answer(self, routing_id: bytes, kind: bytes, answer: Welcome | Refused) -> None:
        try:
            self.socket.send(routing_id, NOBLOCK | zmq.SNDMORE)
            self.socket.send(frames.header(self._version, self._label, kind) + frames.encode(answer), NOBLOCK)
        except zmq.ZMQError as error:  # gone already, or does not read: it will time out and come again
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def _malformed(self, host: str) -> None:
        self._counters["malformed"] += 1
        self._complaints.about(
            "malformed",
            f"port {self.port} receives frames that no agent sends{f' (from {host})' if host != '?' else ''}; they are dropped. "
            "Another program uses this port: find it, or give this job another --mesh-port",
        )

    # --- connections

    def _lock(self, reactor: Reactor, context: "zmq.Context[Any]", keys: JobKeys) -> None:
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.server.public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server.private)
        self.socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        desk = context.socket(zmq.REP)
        desk.setsockopt(zmq.LINGER, 0)
        desk.bind("inproc://zeromq.zap.01")

        def check_one() -> bool:
            # version, request id, domain, address, identity, mechanism, credentials (RFC 27/ZAP)
            request = desk.recv_multipart(NOBLOCK)
            good = len(request) == 7 and request[2] == _ZAP_DOMAIN and request[5] == b"CURVE" and request[6] == keys.client.public
            verdict = [b"200", b"OK", b"agent", b""] if good else [b"400", b"no key of this job", b"", b""]
            desk.send_multipart([b"1.0", request[1] if len(request) > 1 else b"", *verdict], NOBLOCK)
            return True

        self._zap = (Source(reactor, desk, check_one), desk)

    def _monitored(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._fresh.add(value)
        elif event & HANDSHAKE_FAILED:
            self._failed = (event, value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._fresh.discard(value)
            now_s = self._reactor.now_s()
            host, came_s = self._accepted.pop(value, ("?", now_s))
            if self._failed:
                (failure, detail), self._failed = self._failed, None
                self._handshake_failed(host, failure, detail, now_s - came_s)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            self._complaints.about(
                "accept",
                f"port {self.port} cannot take another connection: this process has no descriptors left; raise ulimit -n",
            )

    def _look_at_accepted(self) -> None:
        """Only now: a descriptor that was closed since may already belong to somebody else."""
        for fd in self._fresh:
            self._accepted[fd] = (peer_of(fd), self._reactor.now_s())
        self._fresh.clear()

    def _handshake_failed(self, host: str, failure: int, detail: int, after_s: float) -> None:
        self._counters["handshakes_failed"] += 1
        wordless = failure == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if wordless and not (after_s < WORDLESS_S and self._comes_again(host)):
            return  # it left before it said anything: a port check or a probe, or two machines under load; not worth a line
        self._counters["refused"] += 1
        if wordless or detail == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            meaning = "it has no job secret and this one has" if self._encrypted else "it has a job secret and this one has none"
            meaning += ", or it is no agent" if wordless else ""
        elif failure == zmq.EVENT_HANDSHAKE_FAILED_AUTH or detail == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            meaning = "it has another job secret or belongs to a job with another id"
        else:
            meaning = "it is no agent of this job"
        if host != "?":
            if (timer := self._nameless.pop(meaning, None)) is not None:
                timer.cancel()
            self._tell_refused(host, meaning)
        elif meaning not in self._nameless:  # it was gone before we looked; it will try again, and we shall be quicker
            self._nameless[meaning] = self._reactor.call_later(NAMELESS_S, partial(self._tell_nameless, meaning))

    def _comes_again(self, host: str) -> bool:
        """Whether it was here so often lately that it wants to get in."""
        now_s = self._reactor.now_s()
        lately = {
            place: kept for place, times in self._wordless.items() if (kept := [at for at in times if now_s - at < WORDLESS_S])
        }
        self._wordless = dict(list(lately.items())[-MOST_WORDLESS:])
        times = self._wordless.setdefault(host, [])
        times.append(now_s)
        return len(times) >= WORDLESS_TIMES

    def _tell_nameless(self, meaning: str) -> None:
        del self._nameless[meaning]
        self._tell_refused("an address that was not seen", meaning)

    def _tell_refused(self, where: str, meaning: str) -> None:
        self._complaints.about(
            f"handshake {where}",
            f"a peer at {where} failed the handshake at port {self.port}: {meaning}. It was refused; "
            "give all nodes of the job the same --job-secret-file and --job-id",
        )


def _host(part: zmq.Frame) -> str:
    try:
        return plain(str(part.get("Peer-Address")))
    except zmq.ZMQError:
        return "?"
