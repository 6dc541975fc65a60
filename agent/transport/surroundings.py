"""What all outgoing connections of one transport share."""

import random
from typing import Any

import zmq

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport import frames
from hyperpodrun.agent.transport.complaints import Complaints
from hyperpodrun.agent.transport.keys import JobKeys
from hyperpodrun.agent.transport.resolver import Resolver
from hyperpodrun.agent.transport.zsocket import Settings


class Surroundings:
    """`session`: random, names this process; `away`: how many peers are not up; `links_made`: attempts so far."""

    def __init__(
        self,
        reactor: Reactor,
        context: "zmq.Context[Any]",
        settings: Settings,
        keys: JobKeys | None,
        version: int,
        label: bytes,
        resolver: Resolver,
        counters: dict[str, int],
        complaints: Complaints,
    ) -> None:
        self.reactor = reactor
        self.context = context
        self.settings = settings
        self.keys = keys
        self.version = version
        self.label = label
        self.resolver = resolver
        self.counters = counters
        self.complaints = complaints
        self.random = random.Random()
        self.session = self.random.randbytes(8)
        self.links_made = 0
        self.away = 0
        self.loopback_only = False
        self.message_header = frames.header(version, label, frames.MESSAGE)
