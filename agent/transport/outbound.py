"""One connection to one peer: a DEALER that is opened, watched, and opened again.

libzmq's own reconnection is off (RECONNECT_IVL -1): a peer may have several addresses, names that resolve later and a new port
after a restart, and the loss of a connection is the mesh's loudest news (M2), so we want to know at once and decide
ourselves. Each attempt has a socket of its own; closing it also drops what was queued for a peer that is gone.

    waiting     until the next round, or until somebody nudges
    resolving   a name is being looked up and no other address is left to try
    dialing     connecting, handshake, hello; over when the inbox answers, or after a time limit
    up          welcomed: this is the right agent of the right job
    closed      forgotten

A round tries every address once, the one that worked last first. Rounds are `FIRST_WAIT_S`..`LONGEST_WAIT_S` apart, doubling,
with jitter; the longest wait grows with the number of peers that are away, so that their attempts stay below about 50 a second
(an attempt takes 0.4 ms of the loop). The first attempts of a long list are spread in the same way.
Messages sent while not up are `Kept` for a moment.
Invariants: at most one socket; `on_lost` only after `on_up`, once each.
"""

from collections import deque
from collections.abc import Callable
from typing import Literal

import zmq

from hyperpodrun.agent.reactor import Timer
from hyperpodrun.agent.transport import frames
from hyperpodrun.agent.transport.addresses import Address, endpoint, is_loopback
from hyperpodrun.agent.transport.frames import Hello, Identity, Refused, Welcome
from hyperpodrun.agent.transport.kept import Kept
from hyperpodrun.agent.transport.surroundings import Surroundings
from hyperpodrun.agent.transport.zsocket import HANDSHAKE_FAILED, NOBLOCK, Monitor, Socket, Source, new_socket

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
REFUSED_WAIT_S = 5.0
CONNECT_S = 1.5
ANSWER_S = 4.0
STUCK_S = 0.1
STEADY_S = 1.0
HUNG_UP_OFTEN = 4
ATTEMPTS_PER_S = 50.0
DIALLED_AT_ONCE = 64
FIRST_ATTEMPTS_PER_S = 500.0
LARGEST_ANSWER_BYTES = 8192

Key = str | Address
"""A node's name, or an address whose owner is not known yet."""
State = Literal["waiting", "resolving", "dialing", "up", "closed"]


class Outbound:
    """`addresses` gives what is known now, best first; `hello` what to say; see the module for the rest."""

    def __init__(
        self,
        around: Surroundings,
        key: Key,
        addresses: Callable[[], tuple[Address, ...]],
        hello: Callable[[str], Hello],
        on_up: Callable[["Outbound", Welcome], None],
        on_lost: Callable[["Outbound", Identity], None],
        on_self: Callable[["Outbound"], None],
    ) -> None:
        self.key = key
        self.state: State = "waiting"
        self.identity: Identity | None = None
        self.session = b""
        self.place: Address | None = None
        """Where the current or last attempt went, numeric."""
        self.used_s = around.reactor.now_s()
        self._around = around
        self._addresses = addresses
        self._hello = hello
        self._on_up, self._on_lost, self._on_self = on_up, on_lost, on_self
        self._candidates: deque[Address] = deque()
        self.good: Address | None = None
        """Where it answered last."""
        self._round = 0
        self._asked = 0
        self._failures = 0
        self._refused = False
        self._hung_up = 0
        self._up_s = 0.0
        self._kept = Kept(around.counters)
        self._socket: Socket | None = None
        self._monitor: Monitor | None = None
        self._source: Source | None = None
        self._connected = False
        self._dialled_s = 0.0
        self._connected_s = 0.0
        self._handshake_failure: tuple[int, int] | None = None
        around.away += 1
        before = max(0, around.away - DIALLED_AT_ONCE)
        self._timer: Timer | None = around.reactor.call_later(before / FIRST_ATTEMPTS_PER_S, self._begin_round)

    # --- for the transport

    def send(self, payload: bytes) -> bool:
        """Hand a message to the connection; False when it is dropped. While not up it is kept for a moment."""
        around = self._around
        now_s = around.reactor.now_s()
        self.used_s = now_s
        if self.state != "up":
            return self._kept.keep(now_s, payload)
        return self._hand_over(around.message_header + payload)

    def nudge(self) -> None:
        """There is news about this peer (an address, a sign of life): try now instead of later."""
        self._failures = 0
        stuck = self.state == "dialing" and not self._connected and self._around.reactor.now_s() - self._dialled_s > STUCK_S
        if stuck:
            self._hang_up()
        if stuck or self.state == "waiting":
            self._begin_round()

    def redial(self) -> None:
        """The process this was connected to is known to be gone."""
        if self.state in ("up", "dialing"):
            self._ended(wait=False)

    def close(self) -> None:
        """Forget the peer."""
        if self.state != "closed":
            if self.state != "up":
                self._around.away -= 1
            self.state = "closed"
            self._hang_up()
            self._cancel_timer()
            self._kept.forget()

    # --- rounds

    def _begin_round(self) -> None:
        self._cancel_timer()
        self._round += 1
        self._candidates.clear()
        self.state = "resolving"
        addresses = self._addresses()
        self._asked = len(addresses)
        this_round = self._round
        for address in addresses:
            self._around.resolver.ask(address.host, lambda hosts, reason, a=address: self._resolved(this_round, a, hosts, reason))  # type: ignore[misc]
        if not addresses:
            self._next()

    def _resolved(self, asked_in: int, address: Address, hosts: list[str], reason: str) -> None:
        if asked_in != self._round or self.state == "closed":
            return
        self._asked -= 1
        if not hosts:
            self._around.complaints.about(
                f"name {address.host}",
                f"the name {address.host} does not resolve ({reason}); it is asked again until it does",
            )
        for host in hosts:
            candidate = Address(host, address.port)
            if self._around.loopback_only and not is_loopback(host):
                self._around.complaints.about(
                    f"outside {host}",
                    f"{address} is on another host, and without a job secret agents only talk within this machine: "
                    "give all nodes the same --job-secret-file, or --insecure-mesh in a network where nobody else is",
                )
            elif candidate == self.good:
                self._candidates.appendleft(candidate)
            elif candidate not in self._candidates:
                self._candidates.append(candidate)
        if self.state == "resolving" and (self._candidates or not self._asked):
            self._next()

    def _next(self) -> None:
        if self._candidates:
            self._dial(self._candidates.popleft())
        elif self._asked:
            self.state = "resolving"
            self._limit(LONGEST_WAIT_S, self._begin_round)  # a name server that hangs holds up no address that is known
        else:
            self._wait()

    def _wait(self) -> None:
        self.state = "waiting"
        around = self._around
        longest_s = max(REFUSED_WAIT_S if self._refused else LONGEST_WAIT_S, around.away / ATTEMPTS_PER_S)
        wait_s = max(around.away / FIRST_ATTEMPTS_PER_S, min(longest_s, FIRST_WAIT_S * 2.0 ** min(self._failures, 20)))
        self._failures += 1
        self._cancel_timer()
        self._timer = around.reactor.call_later(wait_s * around.random.uniform(0.5, 1.0), self._begin_round)

    # --- one attempt

    def _dial(self, place: Address) -> None:
        around = self._around
        assert place.port is not None
        self.state = "dialing"
        self.place = place
        self._dialled_s = around.reactor.now_s()
        self._connected = False
        self._handshake_failure = None
        around.links_made += 1
        around.counters["attempts"] += 1
        try:
            self._socket = self._new_dealer()
            events = (
                int(zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
                | HANDSHAKE_FAILED
            )
            self._monitor = Monitor(around.reactor, self._socket, events, self._monitored)
            self._socket.connect(endpoint(place.host, place.port))
        except zmq.ZMQError as error:
            around.complaints.about(f"dial {place}", f"{place} cannot be dialled ({error.strerror})")
            self._ended()
            return
        self._limit(CONNECT_S, self._ended)

    def _new_dealer(self) -> Socket:
        around = self._around
        dealer = new_socket(around.context, zmq.DEALER, around.settings)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.RECONNECT_IVL, -1),
            (zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000)),
            (zmq.HEARTBEAT_IVL, around.settings.heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, around.settings.heartbeat_timeout_ms),
            (zmq.HEARTBEAT_TTL, around.settings.heartbeat_timeout_ms),
            (zmq.RCVHWM, 4),  # one answer is all that ever comes back
            (zmq.MAXMSGSIZE, LARGEST_ANSWER_BYTES),
        ):
            dealer.setsockopt(option, value)
        # Never twice the same name: an inbox ignores a second connection under a name that it still holds.
        dealer.setsockopt(zmq.ROUTING_ID, b"a" + around.session + around.links_made.to_bytes(8, "big"))
        if around.keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, around.keys.server.public)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, around.keys.client.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, around.keys.client.private)
        return dealer

    def _monitored(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._connected = True
            self._connected_s = self._around.reactor.now_s()
            self._limit(ANSWER_S, self._unanswered)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._say_hello()
        elif event & HANDSHAKE_FAILED:
            self._handshake_failure = (event, value)
        elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED) and self.state in ("dialing", "up"):
            if self._handshake_failure:
                self._explain(*self._handshake_failure)
            self._ended()

    def _say_hello(self) -> None:
        assert self._socket is not None
        around = self._around
        hello = self._hello(self.key if isinstance(self.key, str) else "")
        self._socket.getsockopt(zmq.EVENTS)  # makes the socket notice its new connection
        try:
            self._socket.send(frames.header(around.version, around.label, frames.HELLO) + frames.encode(hello), NOBLOCK)
        except zmq.Again:
            self._ended()
            return
        self._source = Source(around.reactor, self._socket, self._read_answer)

    def _read_answer(self) -> bool:
        assert self._socket is not None
        frame = self._socket.recv(NOBLOCK)
        more = self._socket.getsockopt(zmq.RCVMORE)
        if self.state != "dialing":
            return True
        around, place = self._around, self.place
        fault = frames.fault_of(frame, around.version, around.label)
        answer = None if more or fault == "malformed" else frames.decode_answer(frame)
        if fault == "version":
            self._turned_away(
                f"version {place}",
                f"the agent at {place} speaks version {frame[0]} of the mesh protocol, this one version {around.version}: "
                "install the same hyperpodrun on all nodes",
            )
        elif fault == "job":
            self._turned_away(
                f"job {place}",
                f"the agent at {place} belongs to a job with another id: give both the same --job-id if they are one job, "
                "else look at --peers and --mesh-port",
            )
        elif isinstance(answer, Welcome):
            self._welcomed(answer)
        elif isinstance(answer, Refused):
            self._not_welcome(answer)
        else:
            around.counters["malformed"] += 1
            self._ended()
        return self.state == "dialing"

    def _welcomed(self, answer: Welcome) -> None:
        if isinstance(self.key, str) and self.key != answer.node:  # it was asked for by name: no agent answers so
            self._around.counters["malformed"] += 1
            self._ended()
            return
        self.identity = Identity(answer.node, answer.incarnation)
        self.session = answer.session
        self.good = self.place
        self._refused = False
        self._hung_up = 0
        self._cancel_timer()
        if self._source:
            self._source.close()  # nothing else ever comes back
            self._source = None
        self.state = "up"
        self._around.away -= 1
        self._up_s = self._around.reactor.now_s()
        for topic in ("job", "version", "handshake", "unfit", "silent"):
            self._around.complaints.over(f"{topic} {self.place}")
        self._on_up(self, answer)
        if self.state == "up":
            self._flush()

    def _not_welcome(self, answer: Refused) -> None:
        if answer.why == "self":
            self._on_self(self)
            if self.state == "dialing":
                self._ended()
        elif answer.why == "unfit":
            detail = answer.detail if answer.detail.isprintable() else ascii(answer.detail)
            self._turned_away(f"unfit {self.place}", f"the agent at {self.place} refused this one: {detail[:500]}")
        else:  # somebody else of this job lives at this address: the next one may be right
            self._ended()

    def _turned_away(self, key: str, sentence: str) -> None:
        self._refused = True
        self._around.counters["turned_away"] += 1
        self._around.complaints.about(key, sentence)
        self._ended()

    def _explain(self, failure: int, detail: int) -> None:
        place, encrypted = self.place, self._around.keys is not None
        if self.state != "dialing":
            return
        waited_s = self._around.reactor.now_s() - self._connected_s
        if failure == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and waited_s >= 0.9 * self._around.settings.handshake_ms / 1000:
            self._stands_still(waited_s)  # libzmq gave up waiting; it tells this apart from a refusal by the time alone
            return
        if failure == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            # It hung up without a word. A process that just ends does that too, but not again and again.
            self._hung_up += 1
            if self._hung_up < HUNG_UP_OFTEN and not encrypted:
                return
            meaning = (
                "it has another job secret or none, belongs to a job with another id" if encrypted else "it has a job secret"
            )
            meaning += ", or is no agent"
        elif detail == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            meaning = "it has no job secret and this one has" if encrypted else "it has a job secret and this one has none"
        else:
            meaning = "it is no agent, or has another job secret"
        self._refused = True
        self._around.counters["turned_away"] += 1
        self._around.complaints.about(
            f"handshake {place}",
            f"the peer at {place} refused the handshake: {meaning}. It is tried again; "
            "give all nodes of the job the same --job-secret-file and --job-id",
        )

    def _unanswered(self) -> None:
        self._stands_still(ANSWER_S)
        self._ended()

    def _stands_still(self, waited_s: float) -> None:
        self._around.complaints.about(
            f"silent {self.place}",
            f"the peer at {self.place} took the connection and has said nothing for {waited_s:.0f} s: timed out. Its process stands "
            "still or is overloaded, or it is no agent. It is tried again",
        )

    def _ended(self, wait: bool = True) -> None:
        """The attempt or the connection is over; go on with the next address, or wait."""
        around = self._around
        was_up, self.state = self.state == "up", "resolving"
        self._hang_up()
        self._cancel_timer()
        if was_up:
            around.away += 1
            if around.reactor.now_s() - self._up_s >= STEADY_S:
                self._failures = 0
            self._candidates.clear()
            self._asked = 0
            lost, self.identity = self.identity, None
            assert lost is not None
            self._on_lost(self, lost)
            if self.state != "resolving":
                return  # forgotten, or nudged, within the callback
            if wait:
                self._wait()
                return
        if wait:
            self._next()
        else:
            self._begin_round()

    def _limit(self, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._around.reactor.call_later(seconds, then)

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _hang_up(self) -> None:
        if self._source:
            self._source.close()
            self._source = None
        if self._monitor:
            self._monitor.close()
            self._monitor = None
        if self._socket:
            self._socket.close()
            self._socket = None

    # --- messages

    def _hand_over(self, frame: bytes) -> bool:
        counters = self._around.counters
        try:
            self._socket.send(frame, NOBLOCK)  # type: ignore[union-attr]
        except zmq.Again:
            counters["dropped"] += 1
            return False
        counters["sent"] += 1
        counters["sent_bytes"] += len(frame)
        return True

    def take_kept(self) -> list[bytes]:
        """What still waits and is fresh, for the connection that turned out to lead to the same peer."""
        return self._kept.take(self._around.reactor.now_s())

    def _flush(self) -> None:
        for payload in self.take_kept():
            self._hand_over(self._around.message_header + payload)
