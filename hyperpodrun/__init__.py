"""Launch distributed PyTorch jobs, keep them alive, bring them back after a fault.

Importing this package costs nothing: it loads no other module (the launcher's start time is a promise, and
training processes import only what they use).
"""

__version__ = "0.1.0"
