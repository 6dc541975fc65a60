"""What can be wrong with the link."""


class NoLauncher(RuntimeError):
    """This process was not started by hyperpodrun: there is no agent to speak to."""


class LinkError(OSError):
    """A message cannot be sent, or none will come."""


class LinkLost(LinkError):
    """The agent has ended, or the link to it: nothing is sent or received any more."""


class LinkStuck(LinkError):
    """The agent lives but takes no messages (it is stopped, or its host is overloaded)."""
