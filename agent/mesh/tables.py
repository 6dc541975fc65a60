"""The state diagrams of docs/PROTOCOL.md, drawn from the tables in the modules: `python -m hyperpodrun.agent.mesh.tables`."""

from collections.abc import Mapping
from typing import Any

from hyperpodrun.agent.mesh import agreement, barrier, works

MACHINES: tuple[tuple[str, Mapping[Any, str]], ...] = (
    ("Proposer (agreement.py)", agreement.TABLE),
    ("Barrier (barrier.py)", barrier.TABLE),
    ("Workers of a node (works.py)", works.TABLE),
)


def diagram(table: Mapping[Any, str]) -> str:
    """One machine as a Mermaid state diagram, its first state first."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(table))[0]}"]
    lines += (f"    {before} --> {after} : {event}" for (before, event), after in table.items())
    return "\n".join([*lines, "```"])


def diagrams() -> str:
    """All of them, as they stand in the document."""
    return "\n\n".join(f"### {name}\n\n{diagram(table)}" for name, table in MACHINES) + "\n"


if __name__ == "__main__":
    print(diagrams(), end="")
