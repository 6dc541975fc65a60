"""What a person certifies to this node's agent: one file in the run folder, which only its user can write.

`hyperpodctl certify-dead NODE` says that a lost node is gone for good and that nothing of it runs any more (MESH A11). The agent
looks for the file while it waits for lost nodes, takes it, and passes the names on.
"""

import os

FILE = "certified-dead"


def certify(run_dir: str, node: str) -> None:
    """Leave word for the agent of this run folder. Raises OSError."""
    with open(os.path.join(run_dir, FILE), "a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{node}\n")


def take(run_dir: str) -> tuple[str, ...]:
    """The nodes certified since the last look."""
    path = os.path.join(run_dir, FILE)
    try:
        os.rename(path, f"{path}.taken")  # what comes from now on is the next look's
        with open(f"{path}.taken", encoding="utf-8", errors="surrogateescape") as file:
            return tuple(dict.fromkeys(file.read().split("\n")[:-1]))
    except OSError:
        return ()
