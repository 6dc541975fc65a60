"""What tells that bytes arrived as they were sent.

Theory. Memory of the CPU: XXH3, 64 bit, faster than the memory it reads. Memory of a device is summed up there, without a way through
the host: as 64-bit words, each times an odd number of its place, modulo 2^64. A word that differs changes the sum unless others make
up for it, since an odd number times anything but zero is not zero; a single flipped bit is always seen.

States: none. Source: xxHash (XXH3).
"""

from collections.abc import Sequence

import torch
import xxhash

BYTES = 8
_ROW_WORDS = 1 << 12


def of_memory(views: Sequence[memoryview]) -> bytes:
    """Of the bytes in these places, one after the other."""
    state = xxhash.xxh3_64()
    for piece in views:
        state.update(piece)
    return state.digest()


def of_tensor(flat: torch.Tensor) -> torch.Tensor:
    """Of a flat uint8 tensor: one int64 on its device. Takes as much memory again as the tensor."""
    size = flat.numel()
    row_bytes = 8 * _ROW_WORDS
    words = torch.zeros(max(1, -(-size // row_bytes)) * row_bytes, dtype=torch.uint8, device=flat.device)
    words[:size].copy_(flat)
    rows = words.view(torch.int64).view(-1, _ROW_WORDS)
    sums = rows.mul_(_odd(_ROW_WORDS, flat.device, 1)).sum(1)
    return (sums * _odd(len(sums), flat.device, 2)).sum().reshape(1)


def _odd(count: int, device: torch.device, kind: int) -> torch.Tensor:
    """Odd numbers that differ, and by more than a few bits."""
    return (torch.arange(count, dtype=torch.int64, device=device) + kind * 0x1000003) * -0x61C8864680B583EB * 2 + 1
