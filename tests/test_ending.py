"""A process whose threads are in native code ends as its script did."""

import gc
import subprocess
import sys
import weakref

from hyperpodrun import ending

ENDS = """
import threading
import torch
from hyperpodrun import ending

over = threading.Event()
a = torch.ones(1 << 22)

def work():
    while not over.is_set():
        a.add_(1)  # lets the GIL go and takes it again in C++

ending.thread(work, name="work", stop=over.set)
ending.thread(threading.Event().wait, name="stuck", stop=ending.by_itself, limit_s=0.1)
"""


def test_threads_in_native_code_are_over_before_the_interpreter_is() -> None:
    for code in (0, 3):
        script = f"{ENDS}\nraise SystemExit({code})"
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert (run.returncode, run.stderr) == (code, "")


class Worker:
    """Has its thread, which has how to stop it."""

    def __init__(self) -> None:
        self.thread = ending.thread(self.work, name="work", stop=self.stop)

    def work(self) -> None:
        pass

    def stop(self) -> None:
        pass


def test_what_has_ended_is_kept_by_nobody() -> None:
    """Each restart makes some of these, and what they work on may be mapped memory."""
    worker = Worker()
    worker.thread.join()
    known = weakref.ref(worker)
    del worker
    gc.collect()
    assert known() is None
