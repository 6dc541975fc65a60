"""Which CPUs each rank of a node gets with --numa-binding, from what sysfs says about the machine.

Theory. Each rank has a *seat*: its GPU, hence the NUMA node that the GPU hangs on. There are as many seats as visible GPUs, or as
ranks where there are fewer GPUs than ranks (GPUs then go round) or none (ranks are spread over the nodes in blocks). The modes
(torch/numa/binding.py defines them) turn the seats of one node into sets of CPUs:

| mode | a rank gets |
|---|---|
| node | all CPUs of its node |
| socket | all CPUs of all nodes of its node's socket |
| exclusive | its equal share of its node's physical cores, in order; the first seats get what is left over |
| core-complex | one group of its node's CPUs that share the last cache, the larger first, taking turns |

Invariants: only CPUs that this process may use are given; no rank gets an empty set; shares of "exclusive" do not overlap.
Source of the files: kernel documentation ABI/stable/sysfs-devices-node, sysfs-devices-system-cpu, ABI/testing/sysfs-bus-pci.
"""

import os
from collections.abc import Callable, Iterable, Sequence

from hyperpodrun.agent.config import NumaBinding


class NumaError(ValueError):
    """The binding cannot be made on this machine; the text is a sentence for the user."""


def cpus_of_ranks(
    binding: NumaBinding, nproc: int, gpu_bus_ids: Sequence[str], allowed: frozenset[int] | None = None, sysfs: str = "/sys"
) -> list[list[int]]:
    """The CPUs of each local rank, ascending. `gpu_bus_ids`: PCI addresses of the visible GPUs, in CUDA's order.

    `allowed`: the CPUs that may be used; None: those of this process's affinity. Raises NumaError.
    """
    machine = _Machine(sysfs, frozenset(os.sched_getaffinity(0)) if allowed is None else allowed)
    nodes = _seats(machine, nproc, gpu_bus_ids)
    cpus = [_cpus(machine, binding, seat, nodes) for seat in range(nproc)]
    return [sorted(some) for some in cpus]


def _seats(machine: "_Machine", nproc: int, gpu_bus_ids: Sequence[str]) -> list[int]:
    """The NUMA node of each seat; seat i is local rank i's."""
    if not gpu_bus_ids:
        nodes = machine.usable_nodes()
        return [nodes[rank * len(nodes) // nproc] for rank in range(nproc)]
    nodes = [machine.node_of_gpu(bus_id) for bus_id in gpu_bus_ids]
    return [nodes[seat % len(nodes)] for seat in range(max(nproc, len(nodes)))]


def _cpus(machine: "_Machine", binding: NumaBinding, seat: int, nodes: Sequence[int]) -> set[int]:
    node = nodes[seat]
    cpus = machine.cpus_of_node(node)
    if not cpus:
        raise NumaError(
            f"--numa-binding={binding}: local rank {seat} belongs to NUMA node {node}, of which this process may use no CPU "
            f"(it may use {ranges(machine.allowed)}): widen its CPU set or leave the option out"
        )
    if binding == "node":
        return cpus
    if binding == "socket":
        return machine.cpus_of_socket(node)
    neighbours = [other for other, its_node in enumerate(nodes) if its_node == node]
    turn = neighbours.index(seat)
    if binding == "exclusive":
        return _share(machine.groups(cpus, machine.core_of), turn, len(neighbours), node)
    # Of equal ones the first, by the lowest CPU of the whole complex (usable or not), as torch does: the sort is stable.
    complexes = sorted(machine.groups(cpus, machine.last_cache_of), key=lambda group: -len(group))
    return complexes[turn % len(complexes)]


def _share(cores: list[set[int]], turn: int, sharers: int, node: int) -> set[int]:
    each, left_over = divmod(len(cores), sharers)
    if each == 0:
        raise NumaError(
            f"--numa-binding=exclusive: NUMA node {node} has {len(cores)} usable physical core{'s' if len(cores) > 1 else ''} "
            f"for {sharers} GPUs or ranks: use --numa-binding=node"
        )
    start = turn * each + min(turn, left_over)
    return set().union(*cores[start : start + each + (turn < left_over)])


def ranges(cpus: Iterable[int]) -> str:
    """{0, 1, 2, 4} as the kernel writes it: "0-2,4"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _cpu_list(text: str) -> set[int]:
    """The reverse of `ranges`. Raises NumaError."""
    cpus: set[int] = set()
    try:
        for run in filter(None, text.split(",")):
            first, _, last = run.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise NumaError(
            f"--numa-binding: this machine lists CPUs as {text!r}, which means nothing: leave the option out"
        ) from None
    return cpus


def _pci_address(bus_id: str) -> str:
    """NVML's "00000000:3B:00.0" as sysfs names it: "0000:3b:00.0"."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


class _Machine:
    """Questions to sysfs, each answered in terms of the CPUs that may be used."""

    def __init__(self, sysfs: str, allowed: frozenset[int]) -> None:
        self.allowed = allowed
        self._sysfs = sysfs
        self._nodes = self._read_nodes()

    def usable_nodes(self) -> list[int]:
        """Nodes with CPUs that may be used."""
        nodes = [node for node, cpus in sorted(self._nodes.items()) if cpus]
        if not nodes:
            raise NumaError(f"--numa-binding: no NUMA node has a CPU that this process may use ({ranges(self.allowed)})")
        return nodes

    def cpus_of_node(self, node: int) -> set[int]:
        return self._nodes.get(node, set())

    def node_of_gpu(self, bus_id: str) -> int:
        """-1 stands for "not known", as on machines with one node: that is node 0."""
        path = f"{self._sysfs}/bus/pci/devices/{_pci_address(bus_id)}/numa_node"
        return max(0, self._number(path, f"the NUMA node of the GPU at PCI address {bus_id or '(unknown)'}"))

    def cpus_of_socket(self, node: int) -> set[int]:
        socket = self._socket(self._nodes[node])
        found: set[int] = set()
        for cpus in self._nodes.values():
            if cpus and self._socket(cpus) == socket:
                found |= cpus
        return found

    def core_of(self, cpu: int) -> frozenset[int]:
        return frozenset(_cpu_list(self._text(f"{self._cpu(cpu)}/topology/thread_siblings_list", f"the core of CPU {cpu}")))

    def last_cache_of(self, cpu: int) -> frozenset[int]:
        """All CPUs that share this CPU's cache of the highest level."""
        folder = f"{self._cpu(cpu)}/cache"
        best_level, sharing = -1, ""
        try:
            entries = sorted(os.listdir(folder))
        except OSError:
            entries = []
        for entry in entries:
            what = f"the caches of CPU {cpu}"
            if not (entry.startswith("index") and entry[5:].isdecimal()):
                continue
            if self._text(f"{folder}/{entry}/type", what) not in ("Unified", "Data"):
                continue
            level = self._number(f"{folder}/{entry}/level", what)
            if level > best_level:
                best_level, sharing = level, self._text(f"{folder}/{entry}/shared_cpu_list", what)
        if best_level < 0:
            raise NumaError(
                f"--numa-binding=core-complex: this machine does not tell which CPUs share a cache ({folder}): "
                "use --numa-binding=node"
            )
        return frozenset(_cpu_list(sharing))

    def groups(self, cpus: set[int], of: Callable[[int], frozenset[int]]) -> list[set[int]]:
        """The CPUs divided by what they share, ordered by the lowest number in the whole group, usable or not."""
        found: dict[int, set[int]] = {}
        for cpu in sorted(cpus):
            found.setdefault(min(of(cpu), default=cpu), set()).add(cpu)
        return [found[first] for first in sorted(found)]

    def _read_nodes(self) -> dict[int, set[int]]:
        folder = f"{self._sysfs}/devices/system/node"
        try:
            numbers = [int(entry[4:]) for entry in os.listdir(folder) if entry.startswith("node") and entry[4:].isdecimal()]
        except OSError:
            numbers = []
        if not numbers:
            return {0: set(self.allowed)}  # a kernel without NUMA: one node
        return {
            node: _cpu_list(self._text(f"{folder}/node{node}/cpulist", f"the CPUs of NUMA node {node}")) & self.allowed
            for node in numbers
        }

    def _socket(self, cpus: set[int]) -> int:
        cpu = min(cpus)
        return self._number(f"{self._cpu(cpu)}/topology/physical_package_id", f"the socket of CPU {cpu}")

    def _cpu(self, cpu: int) -> str:
        return f"{self._sysfs}/devices/system/cpu/cpu{cpu}"

    def _number(self, path: str, what: str) -> int:
        text = self._text(path, what)
        try:
            return int(text)
        except ValueError:
            raise NumaError(
                f"--numa-binding: this machine does not tell {what} ({path} holds {text!r}): leave the option out"
            ) from None

    def _text(self, path: str, what: str) -> str:
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                return file.read().strip()
        except OSError as error:
            raise NumaError(
                f"--numa-binding: this machine does not tell {what} ({path}: {error.strerror}): leave the option out"
            ) from None
