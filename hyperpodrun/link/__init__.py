"""A worker's line to the agent of its node: `Link.current()` (messages: hyperpodrun.agent.wire.link)."""

from hyperpodrun.link.errors import LinkError, LinkLost, LinkStuck, NoLauncher
from hyperpodrun.link.inbox import Inbox
from hyperpodrun.link.link import Link

__all__ = ["Inbox", "Link", "LinkError", "LinkLost", "LinkStuck", "NoLauncher"]
