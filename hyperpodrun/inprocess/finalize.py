"""What is put back in order after the abort, before the health check: this process's own state."""

import sys
from typing import Any


class Finalize:
    """Base class; any callable without arguments will do instead. Runs in the function's thread."""

    def __call__(self) -> None:
        """What it raises makes the process be replaced."""
        raise NotImplementedError


class CheckpointlessFinalizeCleanup(Finalize):
    """Forget what the last call left in modules: cached CUDA memory, Megatron's parallel state where it is loaded.

    gc.collect() is left out on purpose: it takes longer than the rest of a restart; frames were cleared already.
    """

    def __call__(self) -> None:
        """Raises RuntimeError when the device does not answer any more."""
        megatron: Any = sys.modules.get("megatron.core.parallel_state")
        if megatron is not None and hasattr(megatron, "destroy_model_parallel"):
            megatron.destroy_model_parallel()
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
