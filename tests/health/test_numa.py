"""CPU sets of ranks, over made-up machines; what torch's own code says about the same machines is the oracle."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hyperpodrun.agent.config import NumaBinding
from hyperpodrun.agent.health.numa import NumaError, cpus_of_ranks, ranges

BINDINGS: tuple[NumaBinding, ...] = get_args(NumaBinding)


class Machine(msgspec.Struct, frozen=True):
    """`sockets` x `nodes` each x `caches` each x `cores` each x `threads` each.

    CPUs are numbered as Linux does on PCs: first one thread of each core, then the others. `gpus` holds each GPU's node, -1 for
    one that does not tell.
    """

    sockets: int = 1
    nodes: int = 1
    caches: int = 1
    cores: int = 1
    threads: int = 1
    gpus: tuple[int, ...] = ()
    barred: frozenset[int] = frozenset()

    @property
    def core_count(self) -> int:
        return self.sockets * self.nodes * self.caches * self.cores

    @property
    def cpus(self) -> range:
        return range(self.core_count * self.threads)

    @property
    def allowed(self) -> frozenset[int]:
        return frozenset(self.cpus) - self.barred

    def sharing(self, cpu: int, cores: int) -> list[int]:
        """The CPUs of the group of `cores` cores to which this CPU belongs."""
        first = cpu % self.core_count // cores * cores
        return sorted(core + t * self.core_count for t in range(self.threads) for core in range(first, first + cores))

    def node_of(self, cpu: int) -> int:
        return cpu % self.core_count // (self.caches * self.cores)

    def bus(self, gpu: int) -> str:
        return f"00000000:{0x3A + gpu:02X}:00.0"

    def build(self, root: Path) -> str:
        def write(path: str, text: object) -> None:
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

        per_node = self.caches * self.cores
        for cpu in self.cpus:
            folder = f"devices/system/cpu/cpu{cpu}"
            write(f"{folder}/topology/thread_siblings_list", ranges(self.sharing(cpu, 1)))
            write(f"{folder}/topology/physical_package_id", self.node_of(cpu) // self.nodes)
            levels = (("Data", 1, 1), ("Instruction", 9, self.core_count), ("Unified", 2, 1), ("Unified", 3, self.cores))
            for index, (kind, level, cores) in enumerate(levels):
                write(f"{folder}/cache/index{index}/type", kind)
                write(f"{folder}/cache/index{index}/level", level)
                write(f"{folder}/cache/index{index}/shared_cpu_list", ranges(self.sharing(cpu, cores)))
            write(f"{folder}/cache/uevent", "")
        count = self.sockets * self.nodes
        write("devices/system/node/possible", f"0-{count - 1}" if count > 1 else "0")
        for node in range(count):
            write(f"devices/system/node/node{node}/cpulist", ranges(self.sharing(node * per_node, per_node)))
        for gpu, node in enumerate(self.gpus):
            write(f"bus/pci/devices/0000:{0x3A + gpu:02x}:00.0/numa_node", node)
        return str(root)


def bind(machine: Machine, root: Path, binding: NumaBinding, nproc: int) -> list[str]:
    sysfs = machine.build(root)
    cpus = cpus_of_ranks(binding, nproc, [machine.bus(gpu) for gpu in range(len(machine.gpus))], machine.allowed, sysfs)
    return [ranges(some) for some in cpus]


# 2 sockets x 2 nodes x 4 cores x 2 threads: node 0 has CPUs 0-3,16-19; node 1 4-7,20-23; …
SERVER = Machine(sockets=2, nodes=2, caches=2, cores=2, threads=2, gpus=(0, 0, 1, 3))

TABLE: list[tuple[Machine, NumaBinding, int, list[str]]] = [
    (SERVER, "node", 4, ["0-3,16-19", "0-3,16-19", "4-7,20-23", "12-15,28-31"]),
    (SERVER, "socket", 4, ["0-7,16-23", "0-7,16-23", "0-7,16-23", "8-15,24-31"]),
    (SERVER, "exclusive", 4, ["0-1,16-17", "2-3,18-19", "4-7,20-23", "12-15,28-31"]),
    (SERVER, "core-complex", 4, ["0-1,16-17", "2-3,18-19", "4-5,20-21", "12-13,28-29"]),
    # Fewer ranks than GPUs: the other GPUs keep their share, as with torchrun.
    (SERVER, "exclusive", 1, ["0-1,16-17"]),
    # More ranks than GPUs: GPUs go round.
    (Machine(nodes=2, cores=4, gpus=(1, 0)), "exclusive", 4, ["4-5", "0-1", "6-7", "2-3"]),
    # No GPUs: blocks of ranks.
    (Machine(nodes=2, cores=4), "node", 4, ["0-3", "0-3", "4-7", "4-7"]),
    (Machine(nodes=2, cores=4), "exclusive", 4, ["0-1", "2-3", "4-5", "6-7"]),
    (Machine(nodes=2, cores=4), "node", 1, ["0-3"]),
    (Machine(nodes=2, cores=4), "node", 3, ["0-3", "0-3", "4-7"]),
    # A GPU that does not tell its node is on node 0.
    (Machine(cores=4, gpus=(-1, -1)), "exclusive", 2, ["0-1", "2-3"]),
    # Left over cores go to the first.
    (Machine(cores=5, gpus=(0, 0)), "exclusive", 2, ["0-2", "3-4"]),
    # Only what may be used.
    (Machine(nodes=2, cores=4, gpus=(0, 1), barred=frozenset({0, 1, 7})), "node", 2, ["2-3", "4-6"]),
    (Machine(nodes=2, cores=4, barred=frozenset(range(4))), "node", 2, ["4-7", "4-7"]),
    (Machine(cores=4, threads=2, gpus=(0, 0), barred=frozenset({0, 5})), "exclusive", 2, ["1,4", "2-3,6-7"]),
    # The larger group of CPUs that share a cache first.
    (Machine(caches=2, cores=4, gpus=(0, 0, 0), barred=frozenset({0})), "core-complex", 3, ["4-7", "1-3", "4-7"]),
]


@pytest.mark.parametrize("machine, binding, nproc, expected", TABLE)
def test_table(machine: Machine, binding: NumaBinding, nproc: int, expected: list[str], tmp_path: Path) -> None:
    assert bind(machine, tmp_path, binding, nproc) == expected


@pytest.mark.parametrize(
    "machine, binding, nproc, words",
    [
        (
            Machine(nodes=2, cores=2, gpus=(0, 1), barred=frozenset({2, 3})),
            "node",
            2,
            "local rank 1 belongs to NUMA node 1, of which",
        ),
        (Machine(cores=2, gpus=(0, 0, 0)), "exclusive", 3, "has 2 usable physical cores for 3 GPUs"),
        (Machine(cores=1), "exclusive", 2, "has 1 usable physical core for 2"),
        (Machine(cores=1, barred=frozenset({0})), "node", 1, "no NUMA node has a CPU"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    machine: Machine, binding: NumaBinding, nproc: int, words: str, tmp_path: Path
) -> None:
    with pytest.raises(NumaError) as caught:
        bind(machine, tmp_path, binding, nproc)
    assert words in str(caught.value)
    assert str(caught.value).startswith("--numa-binding")
    assert "\n" not in str(caught.value)


def without(pattern: str) -> Callable[[Path], None]:
    def remove(root: Path) -> None:
        for path in root.glob(pattern):
            path.unlink()

    return remove


@pytest.mark.parametrize(
    "binding, spoil",
    [
        ("node", without("bus/pci/devices/*/numa_node")),
        ("node", lambda root: (root / "bus/pci/devices/0000:3a:00.0/numa_node").write_text("none\n")),
        ("node", lambda root: (root / "devices/system/node/node0/cpulist").write_text("a-b\n")),
        ("socket", without("devices/system/cpu/*/topology/physical_package_id")),
        ("exclusive", without("devices/system/cpu/*/topology/thread_siblings_list")),
        ("core-complex", without("devices/system/cpu/*/cache/*/level")),
        ("core-complex", without("devices/system/cpu/*/cache/*/*")),
    ],
)
def test_a_machine_that_does_not_tell_is_one_sentence(binding: NumaBinding, spoil: Callable[[Path], Any], tmp_path: Path) -> None:
    machine = Machine(cores=2, gpus=(0, 0))
    machine.build(tmp_path)
    spoil(tmp_path)
    with pytest.raises(NumaError, match="this machine"):
        cpus_of_ranks(binding, 2, [machine.bus(0), machine.bus(1)], machine.allowed, str(tmp_path))


def test_a_kernel_without_numa_is_one_node(tmp_path: Path) -> None:
    assert cpus_of_ranks("node", 2, [], frozenset({3, 1}), str(tmp_path)) == [[1, 3], [1, 3]]


def test_a_wide_pci_domain(tmp_path: Path) -> None:
    Machine(nodes=2, cores=1).build(tmp_path)
    folder = tmp_path / "bus/pci/devices/10000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text("1\n")
    assert cpus_of_ranks("node", 1, ["00010000:01:00.0"], frozenset({0, 1}), str(tmp_path)) == [[1]]


def test_the_real_machine(tmp_path: Path) -> None:
    assert cpus_of_ranks("node", 1, [])[0]
    assert set(cpus_of_ranks("node", 1, [])[0]) <= os.sched_getaffinity(0)


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([4, 0, 1, 2, 7, 6]) == "0-2,4,6-7"


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    few = st.integers(1, 3)
    bare = Machine(draw(few), draw(few), draw(few), draw(few), threads=draw(st.integers(1, 2)))
    count = bare.sockets * bare.nodes
    gpus = draw(st.lists(st.integers(-1, count - 1), max_size=6))
    return msgspec.structs.replace(bare, gpus=tuple(gpus), barred=draw(st.frozensets(st.sampled_from(bare.cpus), max_size=6)))


quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(machines(), st.integers(1, 6))
def test_for_any_machine(tmp_path_factory: pytest.TempPathFactory, machine: Machine, nproc: int) -> None:
    sysfs = machine.build(tmp_path_factory.mktemp("sys"))
    buses = [machine.bus(gpu) for gpu in range(len(machine.gpus))]
    made: dict[str, list[set[int]]] = {}
    for binding in BINDINGS:
        try:
            made[binding] = [set(cpus) for cpus in cpus_of_ranks(binding, nproc, buses, machine.allowed, sysfs)]
        except NumaError:
            continue
        assert len(made[binding]) == nproc
        assert all(cpus and cpus <= machine.allowed for cpus in made[binding])
    if "node" not in made:
        assert not made
        return
    for rank, node in enumerate(made["node"]):
        assert len({machine.node_of(cpu) for cpu in node}) == 1
        assert node == {cpu for cpu in machine.allowed if machine.node_of(cpu) == machine.node_of(min(node))}
        assert node <= made["socket"][rank]
        assert made["core-complex"][rank] <= node
    if "exclusive" in made:
        shares = made["exclusive"]
        assert all(share <= node for share, node in zip(shares, made["node"], strict=True))
        assert sum(map(len, shares)) == len(set().union(*shares)), "shares overlap"
        cores = [{cpu % machine.core_count for cpu in share} for share in shares]
        assert sum(map(len, cores)) == len(set().union(*cores)), "a core is shared"
        if nproc >= len(machine.gpus):
            assert set().union(*shares) == set().union(*made["node"]), "CPUs are left unused"


@pytest.mark.torch
@quick
@given(machines())
@example(Machine(sockets=1, nodes=3, caches=2, cores=1, threads=2, gpus=(0,), barred=frozenset({0, 7})))
def test_torch_agrees(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> None:
    """One rank a GPU, where torch's own code has an answer."""
    if not machine.gpus:
        return
    sysfs = machine.build(tmp_path_factory.mktemp("sys"))
    buses = [machine.bus(gpu) for gpu in range(len(machine.gpus))]
    for binding in BINDINGS:
        oracle = torchs_answer(machine, sysfs, binding)
        if oracle is not None:
            assert [set(cpus) for cpus in cpus_of_ranks(binding, len(buses), buses, machine.allowed, sysfs)] == oracle


def torchs_answer(machine: Machine, sysfs: str, binding: NumaBinding) -> Sequence[set[int]] | None:
    """None where torch fails."""
    from torch.numa import binding as torchs

    def inside(path: str) -> str:
        assert path.startswith("/sys/")
        return f"{sysfs}/{path[5:]}"

    gpus = SimpleNamespace(
        device_count=lambda: len(machine.gpus),
        get_device_properties=lambda gpu: SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3A + gpu, pci_device_id=0),
    )
    system = SimpleNamespace(
        path=os.path, listdir=lambda path: os.listdir(inside(path)), sched_getaffinity=lambda _pid: set(machine.allowed)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchs, "open", lambda path: io.StringIO(Path(inside(path)).read_text()), raising=False)
        patch.setattr(torchs, "os", system)
        patch.setattr(torchs, "torch", SimpleNamespace(cuda=gpus))
        options = torchs.NumaOptions(torchs.AffinityMode(binding))
        try:
            answers = [
                torchs._get_logical_cpus_to_bind_to(gpu_index=gpu, numa_options=options) for gpu in range(len(machine.gpus))
            ]
        except (RuntimeError, ValueError, ZeroDivisionError):
            return None
    return answers if all(answers) else None
