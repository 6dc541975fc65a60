"""Messages of the agent for a thread that waits for them."""

import queue

from hyperpodrun.agent.wire.link import ToWorker
from hyperpodrun.link.errors import LinkLost
from hyperpodrun.link.link import Link


class Inbox:
    """What arrives from now on, in order (and what nobody has had yet, for the first one who listens).

    Several threads may wait: each message goes to one of them, the link's end to all.
    """

    def __init__(self, link: Link) -> None:
        self._queue: queue.SimpleQueue[ToWorker | LinkLost] = queue.SimpleQueue()
        self._link = link
        link.subscribe(self._queue.put, self._queue.put)

    def get(self, timeout_s: float | None = None) -> ToWorker:
        """The next message. Raises LinkLost when none will come any more, TimeoutError after `timeout_s` seconds,
        RuntimeError in a forked child.
        """
        self._link.check_process()
        try:
            message = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no message from the agent within {timeout_s:g} s") from None
        if isinstance(message, LinkLost):
            self._queue.put(message)  # for whoever else waits
            raise LinkLost(*message.args)
        return message
