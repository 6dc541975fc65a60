"""The GPUs that a process with these variables would see, in the order in which CUDA would number them.

Two halves. The driver half asks NVML in a child process with a time limit (`nvml_child.py`): a driver call that never returns, or
crashes, must not take the launcher along, and the launcher loads no driver library. The pure half reads CUDA_VISIBLE_DEVICES:

- unset: all devices; empty, or beginning with a negative number: none;
- a list of ordinals, or of GPU- or MIG- names; a name may be cut as long as it stays unique. The kind of the first entry holds
  for the whole list;
- the list ends before its first invalid entry; a device named twice makes the whole list empty;
- MIG: "MIG-uuid", or "MIG-GPU-uuid/gi/ci" of drivers before R470. A board in MIG mode is no device by itself: without MIG names,
  CUDA shows one device for all such boards together, the first instance, and then none of the other boards. MIG names that the
  user listed count each, since each rank may be given its own.

Sources: CUDA C++ Programming Guide, "CUDA Environment Variables"; NVIDIA MIG User Guide, "CUDA Device Enumeration"; torch.cuda's
device_count. NVIDIA_VISIBLE_DEVICES is the container runtime's and has no say here. NVML numbers boards by PCI bus, CUDA too with
CUDA_DEVICE_ORDER=PCI_BUS_ID or where all boards are alike.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hyperpodrun.agent.wire import names

QUERY_TIMEOUT_S = 10.0
_ANSWER_LIMIT_BYTES = 1 << 20


class GpuQueryError(ValueError):
    """The GPUs of this machine cannot be told; the text is a sentence for the user."""


class Gpu(msgspec.Struct, frozen=True):
    """One device as CUDA would see it.

    `index` is the board's number in NVML's order, `uuid` the device's own (a MIG instance's, where it is one), `pci_bus_id` like
    "00000000:3b:00.0" ("" when unknown), `token` what CUDA_VISIBLE_DEVICES must hold to show just this device.
    """

    index: int
    uuid: str
    pci_bus_id: str
    token: str


class Slice(msgspec.Struct, frozen=True):
    """A compute instance of a board in MIG mode; `gi` and `ci` are its instances' numbers (-1 when unknown)."""

    uuid: str
    gi: int = -1
    ci: int = -1


class Board(msgspec.Struct, frozen=True):
    """One board as NVML reports it. `mig` is None when MIG mode is off."""

    uuid: str
    bus: str = ""
    mig: tuple[Slice, ...] | None = None


class _Answer(msgspec.Struct, frozen=True):
    boards: tuple[Board, ...] = ()
    absent: bool = False
    error: str = ""


def visible_gpus(env: Mapping[str, str], timeout_s: float = QUERY_TIMEOUT_S) -> list[Gpu]:
    """The devices that a process with the environment `env` would see; [] when this machine has no driver library.

    Blocks for at most a little over `timeout_s`. Raises GpuQueryError when the driver fails or does not answer.
    """
    return select(query_boards(env, timeout_s), env.get(names.CUDA_VISIBLE_DEVICES))


def visible_tokens(env: Mapping[str, str], count: int) -> list[str]:
    """For each of `count` ranks, the CUDA_VISIBLE_DEVICES that shows it one device, without asking a driver.

    Entries of the user's list in their order, as torchrun does; numbers where there is no list; where the list hides all devices,
    every rank's is that list. Raises GpuQueryError when the list is too short.
    """
    value = env.get(names.CUDA_VISIBLE_DEVICES)
    if value is None:
        return [str(rank) for rank in range(count)]
    entries = [entry.strip() for entry in value.split(",")]
    valid = next((at for at, entry in enumerate(entries) if not entry or entry.startswith("-")), len(entries))
    if valid == 0:
        return [value] * count
    if valid < count:
        raise GpuQueryError(
            f"CUDA_VISIBLE_DEVICES={value} shows {valid} device{'s' if valid > 1 else ''}, "
            f"but there are {count} ranks on this node: name more devices or start fewer ranks"
        )
    return entries[:count]


def select(boards: Sequence[Board], value: str | None) -> list[Gpu]:
    """Apply a CUDA_VISIBLE_DEVICES (None: unset) to the boards of a machine."""
    if value is None:
        return _as_cuda_shows([_board(boards, at, str(at)) for at in range(len(boards))], boards)
    entries = [entry.strip() for entry in value.split(",")]
    if entries[0].startswith("MIG-"):
        return _unique([_find_slice(boards, entry) for entry in entries])
    if entries[0].startswith("GPU-"):
        found = _unique([_find_board(boards, entry) for entry in entries])
    else:
        found = _unique([_find_ordinal(boards, entry) for entry in entries])
    return _as_cuda_shows(found, boards)


def _as_cuda_shows(found: Sequence[Gpu], boards: Sequence[Board]) -> list[Gpu]:
    """Boards in MIG mode become their instances, of which one process sees but the first, and no other board beside it."""
    for gpu in found:
        if slices := boards[gpu.index].mig:
            return [Gpu(gpu.index, slices[0].uuid, gpu.pci_bus_id, slices[0].uuid)]
    return [gpu for gpu in found if boards[gpu.index].mig is None]


def _unique(found: Sequence[Gpu | None]) -> list[Gpu]:
    """The list up to its first invalid entry; empty when it names a device twice."""
    valid: list[Gpu] = []
    for gpu in found:
        if gpu is None:
            break
        if any(gpu.uuid == other.uuid for other in valid):
            return []
        valid.append(gpu)
    return valid


def _board(boards: Sequence[Board], at: int, token: str) -> Gpu:
    return Gpu(at, boards[at].uuid, boards[at].bus, token)


def _find_ordinal(boards: Sequence[Board], entry: str) -> Gpu | None:
    """The number with which the entry begins counts, as strtoul(3) reads it ("1gpu" is 1)."""
    digits = entry[1:] if entry[:1] == "+" else entry
    length = next((at for at, char in enumerate(digits) if char not in "0123456789"), len(digits))
    if not length or length > 9 or int(digits[:length]) >= len(boards):
        return None
    return _board(boards, int(digits[:length]), entry)


def _find_board(boards: Sequence[Board], entry: str) -> Gpu | None:
    matching = [at for at, board in enumerate(boards) if entry.startswith("GPU-") and board.uuid.startswith(entry)]
    return _board(boards, matching[0], entry) if len(matching) == 1 else None


def _find_slice(boards: Sequence[Board], entry: str) -> Gpu | None:
    matching = [
        Gpu(at, part.uuid, board.bus, entry)
        for at, board in enumerate(boards)
        for part in board.mig or ()
        if entry.startswith("MIG-") and (part.uuid.startswith(entry) or _old_name(board, part) == entry)
    ]
    exact = [gpu for gpu in matching if gpu.uuid == entry]
    if exact or len(matching) == 1:
        return (exact or matching)[0]
    return None


def _old_name(board: Board, part: Slice) -> str:
    return f"MIG-{board.uuid}/{part.gi}/{part.ci}"


def query_boards(env: Mapping[str, str], timeout_s: float = QUERY_TIMEOUT_S) -> tuple[Board, ...]:
    """All boards that NVML shows; () without a driver library. `env` is the child's environment (LD_LIBRARY_PATH counts).

    Raises GpuQueryError. Never waits for a child that cannot be killed.
    """
    raw = _ask(_command(), env, timeout_s)
    try:
        answer = msgspec.json.decode(raw, type=_Answer)
    except msgspec.DecodeError:
        raise GpuQueryError(f"the GPU driver library crashed while it was asked for the GPUs: {_ADVICE}") from None
    if answer.error:
        raise GpuQueryError(f"the GPU driver does not tell its GPUs ({answer.error}): {_ADVICE}")
    return answer.boards


_ADVICE = "check it with nvidia-smi, or give --nproc-per-node as a number"


def _command() -> list[str]:
    from importlib.util import find_spec  # finds, does not import

    spec = find_spec("pynvml")
    if spec is None or spec.origin is None:
        raise GpuQueryError("the package nvidia-ml-py is not installed: install it, or give --nproc-per-node as a number")
    module = os.path.dirname(spec.origin)
    folder = os.path.dirname(module) if spec.submodule_search_locations else module
    return [sys.executable, "-I", "-S", f"{os.path.dirname(os.path.abspath(__file__))}/nvml_child.py", folder]


def _ask(command: list[str], env: Mapping[str, str], timeout_s: float) -> bytes:
    """Run the command in a session of its own; its stdout. Raises GpuQueryError when it takes too long."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, write, 1),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        try:
            pid = os.posix_spawn(command[0], command, dict(env), file_actions=actions, setsid=True)
        except OSError as error:
            raise GpuQueryError(f"the GPUs cannot be counted: {command[0]} does not start ({error.strerror})") from None
        finally:
            os.close(write)
        answer = _read_all(read, timeout_s)
    finally:
        os.close(read)
    _let_go(pid)
    if answer is None:
        raise GpuQueryError(f"the GPU driver did not answer within {timeout_s:g} s: {_ADVICE}")
    return answer


def _read_all(fd: int, timeout_s: float) -> bytes | None:
    """All that comes until the end of the pipe; None when the end does not come in time."""
    import select as polling
    import time

    poll = polling.poll()
    poll.register(fd, polling.POLLIN)
    deadline_s = time.monotonic() + timeout_s
    chunks: list[bytes] = []
    size_bytes = 0
    while size_bytes < _ANSWER_LIMIT_BYTES:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            return None
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            break
        chunks.append(chunk)
        size_bytes += len(chunk)
    return b"".join(chunks)


def _let_go(pid: int) -> None:
    """Kill the child and collect it if it dies at once. In an uninterruptible driver call it does not: init gets it then."""
    import signal
    import time

    try:
        os.kill(pid, signal.SIGKILL)
        for _ in range(20):
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
            time.sleep(0.01)
    except (ChildProcessError, ProcessLookupError):
        pass  # somebody who waits for every child was faster
