"""What the agent knows about this machine's GPUs, memory and processors."""
