"""Asks NVML which GPUs there are and prints the answer as JSON. Runs as a process of its own (see gpus.py), never imported.

    python -I -S nvml_child.py FOLDER-OF-PYNVML

A driver call may hang in the kernel for ever or crash; here that costs one helper. Standard library and pynvml only: the folder
of pynvml comes last in the path, so that nothing beside it can shadow the standard library.

Answer: {"boards": [{"uuid", "bus", "mig": null | [{"uuid", "gi", "ci"}]}]}, {"absent": true} without a driver library, or
{"error": TEXT}.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any


def _boards(nvml: Any) -> Iterator[dict[str, Any]]:
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            yield {"uuid": nvml.nvmlDeviceGetUUID(handle), "bus": _bus(nvml, handle), "mig": _slices(nvml, handle)}
        except nvml.NVMLError as error:
            raise RuntimeError(f"GPU {index}: {error}") from error


def _bus(nvml: Any, handle: Any) -> str:
    try:
        return str(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except nvml.NVMLError:
        return ""  # integrated GPUs have none


def _slices(nvml: Any, handle: Any) -> list[dict[str, Any]] | None:
    """The compute instances of a board in MIG mode; None for any other board."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return None  # not a board that can do it
    slices = []
    for index in range(most):
        try:
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except (nvml.NVMLError_NotFound, nvml.NVMLError_NoPermission):
            continue
        slices.append({"uuid": nvml.nvmlDeviceGetUUID(mig), "gi": _number(nvml, nvml.nvmlDeviceGetGpuInstanceId, mig),
                       "ci": _number(nvml, nvml.nvmlDeviceGetComputeInstanceId, mig)})  # fmt: skip
    return slices


def _number(nvml: Any, ask: Callable[[Any], int], handle: Any) -> int:
    try:
        return ask(handle)
    except nvml.NVMLError:
        return -1


def _answer() -> dict[str, Any]:
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return {"absent": True}
    except nvml.NVMLError as error:
        return {"error": str(error)}
    try:
        return {"boards": list(_boards(nvml))}
    except (nvml.NVMLError, RuntimeError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    print(json.dumps(_answer()), flush=True)
