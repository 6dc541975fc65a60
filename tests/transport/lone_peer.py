"""Run by the tests: an agent that sends every message back to where it came from. Prints its port.

lone_peer.py NODE [first-port=N] [incarnation=N] [secret=TEXT] [job=ID]
"""

import sys

from hyperpodrun.agent.reactor import Reactor
from hyperpodrun.agent.transport.frames import Identity, job_label
from hyperpodrun.agent.transport.transport import Transport

options = dict(word.split("=", 1) for word in sys.argv[2:])
reactor = Reactor()
secret = options.get("secret")
net = Transport(
    reactor,
    identity=Identity(sys.argv[1], int(options.get("incarnation", "1"))),
    label=job_label(options.get("job", "job")),
    version=1,
    first_port=int(options.get("first-port", "0")),
    secret=secret.encode() if secret else None,
    on_message=lambda source, payload, link: net.send(source.node, payload) and None,
    on_lost=lambda who: None,
    say=lambda line: print(line, file=sys.stderr, flush=True),
)
print(net.port, flush=True)
reactor.run()
