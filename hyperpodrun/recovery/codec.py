"""A state as bytes that another process may read: tensors by reference, everything else spelled out. Nothing is pickled.

Theory. A state (what `state_dict()` gives) is a tree of plain values with tensors at some leaves. `encode` takes the tensors out, in
an order that depends on the tree alone, and writes the rest as MessagePack in which each node says what it is; `decode` puts tensors
back in. What is not a plain value is refused by its path, since guessing would restore something else than was saved.

Every node is a value of MessagePack (None, bool, int of 64 bit, float, str, bytes) or a list [kind, ...]:
  l list, t tuple, d dict (pairs), o OrderedDict, k Counter, e deque (its limit), s set, f frozenset, i int beyond 64 bit, c complex,
  x tensor (index),
  n numpy array (dtype, shape, bytes), g numpy scalar, z torch.Size, y torch.dtype, v torch.device,
  q quantized tensor (scale and zero point, or those of each channel, and its integers, whose type tells its own)

Invariants: `decode(*encode(state))` equals `state` bit for bit, types included, NaNs and signed zeros too; a tensor that occurs twice
(tied weights) is taken out once. Bytes from elsewhere can raise `CodecError`, and nothing worse.
Source: MessagePack specification; torch.Tensor.untyped_storage.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

MAX_DEPTH = 64
# What a missing key of a defaultdict would give is code, not state: whoever loads it has that.
_MAPPINGS: dict[type[Any], str] = {dict: "d", defaultdict: "d", OrderedDict: "o", Counter: "k"}


class CodecError(ValueError):
    """The state holds something that cannot be carried, or the bytes are not a state. Says where."""


class Uncarriable(CodecError):
    """The state holds something that cannot be carried. Restarts do not help."""

    rung = "end"


class Leaf(msgspec.Struct, frozen=True):
    """What a tensor looks like: enough to make an empty one. `dtype` as in torch's name behind the dot.

    A piece of a tensor that is spread over ranks says of what shape the `whole` is and where in it the piece begins (`start`).
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    device: str = "cpu"
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, laid out densely."""
        count = 1
        for size in self.shape:
            count *= size
        return count * torch_dtype(self.dtype).itemsize


def encode(state: Any) -> tuple[list[tuple[str, torch.Tensor]], bytes]:
    """The tensors of a state with their paths, in a fixed order, and the rest of it. Raises CodecError."""
    tensors: list[tuple[str, torch.Tensor]] = []
    known: dict[tuple[Any, ...], int] = {}

    def take(path: str, tensor: torch.Tensor) -> list[Any]:
        _check(path, tensor)
        place = known.setdefault(_identity(tensor), len(tensors))
        if place == len(tensors):
            tensors.append((path, tensor))
        return ["x", place]

    return tensors, msgspec.msgpack.encode(_pack(state, "", take, 0))


def decode(skeleton: bytes, tensors: Sequence[Any]) -> Any:
    """The state again, with these tensors (or what stands for them) in it. Raises CodecError."""
    try:
        return _unpack(msgspec.msgpack.decode(skeleton), tensors, 0)
    except (
        msgspec.DecodeError,
        TypeError,
        IndexError,
        KeyError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise CodecError(f"not a state of this program: {error}") from error


def leaf_of(path: str, tensor: torch.Tensor) -> Leaf:
    """Its description."""
    return Leaf(path, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), str(tensor.device))


def empty(leaf: Leaf, device: torch.device | str | None = None) -> torch.Tensor:
    """A dense tensor for this leaf, its bytes unset. Raises CodecError for a type that this torch has not."""
    return torch.empty(leaf.shape, dtype=torch_dtype(leaf.dtype), device=device or "cpu")


def torch_dtype(name: str) -> torch.dtype:
    """By its name. Raises CodecError."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise CodecError(f"this torch has no type {name!r}")
    return dtype


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as a flat uint8 tensor over the same memory. The tensor must be contiguous."""
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its elements lie densely and as they read, else a copy that does."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _check(path: str, tensor: torch.Tensor) -> None:
    reason = ""
    if tensor.layout is not torch.strided:
        reason = f"its layout is {tensor.layout}"
    elif tensor.device.type == "meta":
        reason = "it has no memory (device meta)"
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        reason = f"it is a {type(tensor).__name__}"
    if reason:
        raise Uncarriable(f"the tensor at {path or 'the top'} cannot be carried: {reason}; give the parts of it as plain tensors")


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    if not tensor.numel():
        return (id(tensor),)
    return (
        tensor.data_ptr(), str(tensor.device), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def _pack(value: Any, path: str, take: Callable[[str, torch.Tensor], list[Any]], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise Uncarriable(f"{path[:80]}…: deeper than {MAX_DEPTH} levels (does it hold itself?)")
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["i", str(value)]
    if isinstance(value, torch.Tensor):
        # its integers are a copy: the type of a quantized tensor follows from theirs
        return _pack_quantized(value, path, take) if value.is_quantized else take(path, value)

    def pack(inner: Any, name: object) -> Any:
        return _pack(inner, f"{path}.{name}" if path else str(name), take, depth + 1)

    if kind in (list, tuple):
        return ["l" if kind is list else "t", [pack(item, place) for place, item in enumerate(value)]]
    if kind is deque:
        return ["e", value.maxlen, [pack(item, place) for place, item in enumerate(value)]]
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind], [[pack(key, "a key"), pack(item, key)] for key, item in value.items()]]
    if kind in (set, frozenset):
        return ["s" if kind is set else "f", [pack(item, "an element") for item in _in_order(value)]]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind is torch.Size:
        return ["z", list(value)]
    if kind is torch.dtype:
        return ["y", str(value).removeprefix("torch.")]
    if kind is torch.device:
        return ["v", str(value)]
    if kind.__module__.partition(".")[0] == "numpy":
        return _pack_numpy(value, path)
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise Uncarriable(f"{path or 'the state'} is a {name}, which cannot be carried: use plain values and tensors")


def _pack_quantized(value: torch.Tensor, path: str, take: Callable[[str, torch.Tensor], list[Any]]) -> list[Any]:
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale: list[Any] = [value.q_scale(), value.q_zero_point()]
    elif value.qscheme() in (torch.per_channel_affine, torch.per_channel_symmetric):
        scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
        scale = [take(f"{path}.scales", scales), take(f"{path}.zero_points", points), value.q_per_channel_axis()]
    else:
        raise Uncarriable(f"the tensor at {path or 'the top'} cannot be carried: it is quantized by {value.qscheme()}")
    return ["q", scale, take(f"{path}.integers", value.int_repr())]


def _unpack_quantized(scale: Sequence[Any], integers: torch.Tensor) -> torch.Tensor:
    if len(scale) == 2:
        return torch._make_per_tensor_quantized_tensor(integers, *scale)
    return torch._make_per_channel_quantized_tensor(integers, *scale)


def _in_order(items: Iterable[Any]) -> list[Any]:
    return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def _pack_numpy(value: Any, path: str) -> list[Any]:
    import numpy

    if (
        isinstance(value, numpy.ndarray)
        and not value.dtype.hasobject
        and type(value) is numpy.ndarray
        and value.dtype.names is None
    ):
        return ["n", value.dtype.str, list(value.shape), value.tobytes()]
    if isinstance(value, numpy.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return ["g", value.dtype.str, value.tobytes()]
    raise Uncarriable(f"{path} is a numpy {type(value).__name__} of type {getattr(value, 'dtype', '?')}, which cannot be carried")


def _unpack(node: Any, tensors: Sequence[Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise CodecError("deeper than a state can be")
    if not isinstance(node, list):
        return node
    kind, *rest = node

    def each(items: Any) -> list[Any]:
        return [_unpack(item, tensors, depth + 1) for item in items]

    match kind, rest:
        case "l", [items]:
            return each(items)
        case "t", [items]:
            return tuple(each(items))
        case "d" | "o" | "k", [pairs]:
            made = dict(each(pair) for pair in pairs)
            return OrderedDict(made) if kind == "o" else Counter(made) if kind == "k" else made
        case "e", [int() | None as limit, items]:
            return deque(each(items), limit)
        case "s", [items]:
            return set(each(items))
        case "f", [items]:
            return frozenset(each(items))
        case "i", [str(digits)]:
            return _whole_number(digits)
        case "c", [float(real), float(imaginary)]:
            return complex(real, imaginary)
        case "x", [int(place)] if 0 <= place < len(tensors):
            return tensors[place]
        case "z", [sizes]:
            return torch.Size(sizes)
        case "y", [str(name)]:
            return torch_dtype(name)
        case "v", [str(name)]:
            return torch.device(name)
        case "q", [scale, integers]:
            return _unpack_quantized(each(scale), _unpack(integers, tensors, depth + 1))
        case "n" | "g", [str(dtype), *_]:
            return _unpack_numpy(dtype, rest[1:])
    raise CodecError(f"an unknown kind of value: {kind!r:.40}")


def _whole_number(digits: str) -> int:
    if len(digits) > 4000:
        raise CodecError("a number of more than 4,000 digits")
    return int(digits)


def _unpack_numpy(dtype: str, rest: Sequence[Any]) -> Any:
    import numpy

    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise CodecError("a numpy array of objects")
    flat = numpy.frombuffer(rest[-1], dtype=kind)
    return flat.reshape(rest[0]).copy() if len(rest) == 2 else flat[0]
