"""State recovery: after a restart the next step runs from memory, bit for bit (`RecoverableState`).

    from hyperpodrun.recovery import RecoverableState

state.py has the theory; plan.py decides who gets what from whom.
"""

from hyperpodrun.recovery.parts import RecoveryError
from hyperpodrun.recovery.plan import Contradiction
from hyperpodrun.recovery.sampler import JobSampler
from hyperpodrun.recovery.state import RecoverableState

__all__ = ["Contradiction", "JobSampler", "RecoverableState", "RecoveryError"]
