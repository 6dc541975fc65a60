"""The import arrows of the design, held by walking the sources and by looking into a live agent."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lower number = lower layer. A module may import only from its own layer's group or from lower layers.
AGENT_LAYERS = {
    "wire": 0,
    "config": 1,
    "family": 1,
    "run_dir": 1,
    "node_state": 1,
    "orders": 1,
    "open_files": 1,
    "planted": 1,
    "policy": 2,
    "health": 2,
    "reactor": 2,
    "children": 3,
    "workers": 3,
    "mesh": 3,
    "transport": 4,
    "doors": 5,
    "sim": 5,
    "status": 5,
    "data_ports": 4,
    "job_facts": 4,
    "store": 6,
    "keeper": 6,
    "failure": 6,
    "attempt": 7,
    "remains": 5,
    "world_store": 7,
    "train_scripts": 8,
    "worker_links": 6,
    "mesh_slots": 1,
    "vote_file": 1,
    "mesh_words": 2,
    "mesh_worlds": 4,
    "mesh_links": 4,
    "mesh_terms": 4,
    "mesh_start": 5,
    "mesh_network": 6,
    "mesh_farewell": 4,
    "mesh_quorum_loss": 4,
    "mesh_driver": 7,
    "first_failure": 7,
    "agent": 9,
}
PURE = (
    "agent/policy",
    "agent/mesh",
    "agent/workers/group.py",
    "agent/workers/group_words.py",
    "agent/workers/recall.py",
    "agent/workers/ladder.py",
    "agent/workers/lines.py",
)
PURE_MAY_IMPORT = {"msgspec"}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        path = ROOT / folder
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.exists() else []


def imports(path: Path) -> Iterator[str]:
    """Every module a source names in an import, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_sources_are_found() -> None:
    assert len(list(sources("agent"))) > 20
    assert len(list(sources("hyperpodrun"))) > 8


@pytest.mark.parametrize("path", list(sources("agent")), ids=lambda path: str(path.relative_to(ROOT)))
def test_agent_never_imports_torch_nor_the_house_above(path: Path) -> None:
    for name in imports(path):
        assert name.split(".")[0] != "torch", f"{path} imports {name}"
        if name.startswith("hyperpodrun."):
            assert name.startswith("hyperpodrun.agent"), f"{path} imports {name}: arrows run to agent/, never back"


@pytest.mark.parametrize("path", list(sources("hyperpodrun")), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_inside_a_worker_imports_of_the_agent_only_wire(path: Path) -> None:
    if (ROOT / "hyperpodrun/cli") in path.parents or path == ROOT / "hyperpodrun/__main__.py":
        return  # the command line runs in the launcher
    for name in imports(path):
        assert not name.startswith("hyperpodrun.agent") or name.startswith("hyperpodrun.agent.wire"), f"{path} imports {name}"
        assert not name.startswith("hyperpodrun.cli"), f"{path} imports {name}"


@pytest.mark.parametrize("path", list(sources("agent")), ids=lambda path: str(path.relative_to(ROOT)))
def test_agent_modules_import_only_lower_layers(path: Path) -> None:
    inside = path.relative_to(ROOT / "agent")
    layer = inside.parts[0].removesuffix(".py")
    if layer == "__init__":
        return
    assert layer in AGENT_LAYERS, f"say in this test on which layer {inside} stands"
    for name in imports(path):
        parts = name.split(".")
        if parts[:2] != ["hyperpodrun", "agent"] or len(parts) < 3:
            continue
        other = parts[2]
        if other not in AGENT_LAYERS:
            continue  # a name inside hyperpodrun.agent itself
        allowed = other == layer or AGENT_LAYERS[other] < AGENT_LAYERS[layer]
        # The keeper clears up the cgroup of a dead agent: that one file of workers/ is standard library only.
        assert allowed or (layer == "keeper" and name.startswith("hyperpodrun.agent.workers.cgroup")), f"{inside} imports {name}"


@pytest.mark.parametrize("path", list(sources(*PURE)), ids=lambda path: str(path.relative_to(ROOT)))
def test_pure_cores_touch_no_clock_process_or_socket(path: Path) -> None:
    for name in imports(path):
        top = name.split(".")[0]
        if top == "random" and "agent/mesh" in str(path):
            continue  # random.Random(seed) of its own: the same seed gives the same run
        assert top not in {"os", "time", "socket", "subprocess", "threading", "random", "logging", "selectors", "asyncio"}, (
            f"{path}: {name}"
        )
        known = top in sys.stdlib_module_names or top in PURE_MAY_IMPORT or top == "hyperpodrun"
        assert known, f"{path} imports {name}"


@pytest.mark.parametrize("module", ["hyperpodrun.agent.keeper", "hyperpodrun.cli.entry"])
def test_keeper_loads_the_standard_library_only(module: str) -> None:
    code = (
        f"import sys; before = set(sys.modules); import {module}; new = set(sys.modules) - before\n"
        "print(*sorted(n for n in new if n.split('.')[0] not in sys.stdlib_module_names and not n.startswith('hyperpodrun')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown == []


def test_agent_and_command_line_load_no_torch() -> None:
    code = (
        "import sys, hyperpodrun.cli.launch, hyperpodrun.agent.agent\n"
        "print(*sorted({n.split('.')[0] for n in sys.modules} & {'torch', 'numpy', 'pynvml', 'asyncio', 'rich', 'zmq.asyncio'}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert shown == []
