"""The objects of a training state as recovery sees them: tensors by name, and the rest as plain values.

Theory. A part gives its tensors as they are (no copies: `leaves`) and everything else as bytes (the skeleton). `places` says where the
tensors of another process's part may be written here, `install` makes the object that state. Where an object's
load_state_dict would change bits (optimizers cast their state to the type of the parameters) or copy needlessly, the part puts
values in by itself.

Kinds of parts
- ModelPart      parameters in place. Buffers are not here: a forward pass changes them before the step is committed (private state).
                 Those of an average of models are, for they change with its parameters.
- OptimizerPart  state set directly, the groups' values too; what appears at the first step is made from the layout. Only of an
                 optimizer whose state is that: one with a state_dict of its own is refused.
- PlainPart      anything with state_dict and load_state_dict (schedulers, scalers, samplers, loaders): its values are copied.

Invariants: leaves of equal layouts pair up by position; the leaves of models and optimizers alias their memory.
Source: torch.optim.Optimizer.load_state_dict, torch.nn.Module.state_dict, torch.distributed.tensor.DTensor.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hyperpodrun.recovery import boxes, codec
from hyperpodrun.recovery.boxes import Box

_SPREAD = "dtensor"
Leaves = tuple[list[tuple[str, torch.Tensor]], bytes]


class RecoveryError(RuntimeError):
    """The state cannot be restored into these objects; says which part and why."""


class Misused(RecoveryError):
    """The training loop does something with which a restart would lose state. Restarts do not help."""

    rung = "end"


class Part(Protocol):
    """One object of a training state."""

    name: str

    def leaves(self) -> Leaves:
        """Its tensors by path, and the rest. Raises CodecError."""

    def places(self, leaves: Sequence[codec.Leaf]) -> list[torch.Tensor]:
        """Dense tensors to write another process's leaves into, the object's own memory where that will do."""

    def install(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """Make the object that state; `tensors` may be kept. Raises RecoveryError when it does not fit."""

    def spread(self, rank: int) -> dict[str, tuple[tuple[int, ...], Box | None]]:
        """Of each leaf that is a piece of a tensor: the whole's shape and which box of it that rank has
        (None: in doubt), by path."""

    def cut(self, leaves: Sequence[codec.Leaf], skeleton: bytes, rank: int) -> list[codec.Leaf]:
        """Leaves of another cut of the same state as they are to be on that rank. Raises RecoveryError when they cannot be."""


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor that may be spread over ranks (DTensor), without its gradient."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def following(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module that change when its parameters do: those of averages of models."""
    from torch.optim.swa_utils import AveragedModel

    averages = [(path, module) for path, module in model.named_modules() if isinstance(module, AveragedModel)]
    return {name: buffer for path, module in averages for name, buffer in module.named_buffers(path)}


class ModelPart:
    """The parameters of a module, each once, and the buffers that follow them."""

    def __init__(self, name: str, model: torch.nn.Module) -> None:
        self.name = name
        self._model = model
        # FSDP2 puts the whole parameter in the place of this rank's piece while it computes, which is when faults come
        self._pieces = {path: parameter for path, parameter in model.named_parameters() if hasattr(parameter, "to_local")}

    def leaves(self) -> Leaves:
        """See Part."""
        return codec.encode(self._here())

    def places(self, leaves: Sequence[codec.Leaf]) -> list[torch.Tensor]:
        """See Part."""
        here = self._here()
        return [_place(leaf, here.get(leaf.path)) for leaf in leaves]

    def install(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """See Part."""
        there, here = codec.decode(skeleton, tensors), self._here()
        if there.keys() != here.keys():
            raise RecoveryError(f"{self.name}: other parameters than before the restart: {_difference(there, here)}")
        for name, tensor in here.items():
            _put(f"{self.name}.{name}", tensor, there[name])

    def spread(self, rank: int) -> dict[str, tuple[tuple[int, ...], Box | None]]:
        """See Part."""
        return {name: (tuple(p.shape), boxes.of(p, rank)) for name, p in self._tensors().items() if hasattr(p, "to_local")}

    def cut(self, leaves: Sequence[codec.Leaf], skeleton: bytes, rank: int) -> list[codec.Leaf]:
        """See Part."""
        here = self._tensors()
        lost = [leaf.path for leaf in leaves if leaf.path not in here]
        if lost:
            raise RecoveryError(f"{self.name}: other parameters than before the restart: {len(lost)} are gone ({lost[0]})")
        return [_cut(f"{self.name}.{leaf.path}", leaf, rank, here[leaf.path]) for leaf in leaves]

    def adopt(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> list[torch.Tensor]:
        """`install` with the tensors of a module that is given up: their memory becomes this one's where that can be.

        Gives what this one's memory was, to be freed when there is time.
        """
        there = codec.decode(skeleton, tensors)
        adopted: set[int] = set()
        left: list[torch.Tensor] = []
        for name, parameter in self._model.named_parameters():
            tensor = there.get(name)
            if tensor is not None and tensor.data_ptr() not in adopted and (former := _adopt(parameter, tensor)) is not None:
                adopted.add(tensor.data_ptr())
                left.append(former)
        self.install(tensors, skeleton)
        return left

    def parameters(self) -> list[torch.Tensor]:
        """Its parameters, and the buffers that follow them."""
        return [*self._tensors().values()]

    def _here(self) -> dict[str, torch.Tensor]:
        return {name: local(tensor) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        now = dict(self._model.named_parameters())
        gathered = {name: piece for name, piece in self._pieces.items() if name in now and not hasattr(now[name], "to_local")}
        return {**now, **gathered, **following(self._model)}


class OptimizerPart:
    """An optimizer of torch: its state by the position of the parameter, what else it keeps there, and the values of its groups."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        own = next(kind for kind in type(optimizer).__mro__ if "state_dict" in vars(kind))
        if own is not torch.optim.Optimizer:
            raise TypeError(
                f"{name}: a {type(optimizer).__qualname__} has a state_dict() of its own ({own.__qualname__}), so not all of its "
                "state is where an optimizer's is, and the rest would be lost. Give the optimizer that it wraps, and what it adds as "
                "another object with state_dict() and load_state_dict() in the list optimizer=[...]"
            )
        self.name = name
        self._optimizer = optimizer

    def leaves(self) -> Leaves:
        """See Part. Raises RecoveryError for a state of something that is none of its parameters."""
        known = {id(parameter) for parameter in self.parameters()}
        others = {key: value for key, value in self._optimizer.state.items() if id(key) not in known}
        for key in others:
            if not isinstance(key, str | int | tuple):
                raise RecoveryError(
                    f"{self.name}: it keeps a state for a {type(key).__qualname__} that is none of its parameters, which cannot be "
                    "carried: keep that by a name"
                )
        state = {
            place: {key: _gathered(value, parameter) for key, value in self._optimizer.state[parameter].items()}
            for place, parameter in enumerate(self.parameters())
            if parameter in self._optimizer.state
        }
        groups = [
            {key: len(value) if key == "params" else value for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]
        return codec.encode({"state": state, "groups": groups, "others": others})

    def places(self, leaves: Sequence[codec.Leaf]) -> list[torch.Tensor]:
        """See Part."""
        here = dict(self.leaves()[0])
        parameters = self.parameters()
        return [_place(leaf, here.get(leaf.path), _device_of(leaf, parameters)) for leaf in leaves]

    def install(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """See Part."""
        there = codec.decode(skeleton, tensors)
        groups, parameters = self._optimizer.param_groups, self.parameters()
        if [group["params"] for group in there["groups"]] != [len(group["params"]) for group in groups]:
            raise RecoveryError(f"{self.name}: its groups do not hold as many parameters as before the restart")
        for group, values in zip(groups, there["groups"], strict=True):
            for key, value in values.items():
                if key != "params":
                    group[key] = _over(group.get(key), value)
        self._optimizer.state.clear()
        for place, values in there["state"].items():
            parameter = parameters[place]
            self._optimizer.state[parameter] = {key: _spread(value, parameter) for key, value in values.items()}
        self._optimizer.state.update(there["others"])

    def spread(self, rank: int) -> dict[str, tuple[tuple[int, ...], Box | None]]:
        """See Part."""
        return {
            f"state.{place}.{key}.1": (tuple(value.shape), boxes.of(value, rank))
            for place, parameter in enumerate(self.parameters())
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if hasattr(value, "to_local")
        }

    def cut(self, leaves: Sequence[codec.Leaf], skeleton: bytes, rank: int) -> list[codec.Leaf]:
        """See Part."""
        parameters, made = self.parameters(), {leaf.path: leaf for leaf in leaves}
        for place, values in codec.decode(skeleton, leaves)["state"].items():
            for key, value in values.items():
                if _is_spread(value) and place < len(parameters):
                    _, leaf, shape, _, spread = value
                    made[leaf.path] = _cut(f"{self.name}.state.{place}.{key}", leaf, rank, parameters[place], shape, spread)
        return list(made.values())

    def groups(self) -> list[dict[str, Any]]:
        """Its groups, live."""
        return self._optimizer.param_groups

    def parameters(self) -> list[torch.Tensor]:
        """All that it optimizes, in its order."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


class PlainPart:
    """Anything with state_dict and load_state_dict."""

    def __init__(self, name: str, thing: Any) -> None:
        self.name = name
        self._thing = thing

    def leaves(self) -> Leaves:
        """See Part."""
        return codec.encode(self._thing.state_dict())

    def places(self, leaves: Sequence[codec.Leaf]) -> list[torch.Tensor]:
        """See Part."""
        return [codec.empty(leaf, leaf.device) for leaf in leaves]

    def install(self, tensors: Sequence[torch.Tensor], skeleton: bytes) -> None:
        """See Part. What the object's own load_state_dict raises is raised."""
        self._thing.load_state_dict(codec.decode(skeleton, [tensor.clone() for tensor in tensors]))

    def spread(self, rank: int) -> dict[str, tuple[tuple[int, ...], Box | None]]:
        """See Part."""
        return {}

    def cut(self, leaves: Sequence[codec.Leaf], skeleton: bytes, rank: int) -> list[codec.Leaf]:
        """See Part."""
        return list(leaves)


def hand_over(old: Part, new: Part) -> list[torch.Tensor]:
    """Give an object what one of this process holds that is given up; what is not used any more. Raises as `install` does."""
    found, skeleton = old.leaves()
    tensors = [tensor for _, tensor in found]
    if isinstance(new, ModelPart):
        return new.adopt(tensors, skeleton)
    new.install(tensors, skeleton)
    return []


def expected_bytes(parts: Sequence[Part]) -> int:
    """What their tensors will take once the optimizers have made their state: two values a parameter is assumed before that."""
    size = 0
    for part in parts:
        tensors = [tensor for _, tensor in part.leaves()[0]]
        if isinstance(part, OptimizerPart) and not tensors:
            tensors = [local(parameter) for parameter in part.parameters()] * 2
        size += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return size


def part_of(name: str, thing: Any) -> Part:
    """The part for an object. Raises TypeError for one that has no state."""
    if isinstance(thing, torch.nn.Module):
        return ModelPart(name, thing)
    if isinstance(thing, torch.optim.Optimizer):
        return OptimizerPart(name, thing)
    if callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
        return PlainPart(name, thing)
    raise TypeError(f"{name}: a {type(thing).__qualname__} has no state_dict() and load_state_dict(), so it cannot be recovered")


def _place(leaf: codec.Leaf, here: torch.Tensor | None, device: torch.device | str | None = None) -> torch.Tensor:
    if here is not None:
        fits = tuple(here.shape) == leaf.shape and here.dtype == codec.torch_dtype(leaf.dtype)
        if fits and here.is_contiguous() and not here.is_conj() and not here.is_neg():
            return here
        device = device or here.device
    return codec.empty(leaf, device or leaf.device)


def _put(path: str, here: torch.Tensor, there: torch.Tensor) -> None:
    if here.shape != there.shape or here.dtype != there.dtype:
        raise RecoveryError(
            f"{path} is {tuple(here.shape)} {here.dtype}, it was {tuple(there.shape)} {there.dtype} before the restart"
        )
    if here.data_ptr() != there.data_ptr() or here.stride() != there.stride() or here.device != there.device:
        here.copy_(there)


def _adopt(parameter: torch.Tensor, there: torch.Tensor) -> torch.Tensor | None:
    """Let a parameter have the memory of an earlier one, if nobody can see the difference. What it had, if so.

    On the CPU only: elsewhere a captured graph may know the address. Views of either memory, which would not follow, must not be.
    """
    alike = (parameter.shape, parameter.dtype, parameter.stride()) == (there.shape, there.dtype, there.stride())
    plain = type(parameter) is torch.nn.Parameter and parameter.device.type == there.device.type == "cpu"
    if not (alike and plain and there.numel() and _fills(parameter) and _fills(there) and _alone(parameter)):
        return None
    former = parameter.data
    parameter.data = there
    return former


def _fills(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.numel() * tensor.element_size() and not storage.is_shared()


def _alone(tensor: torch.Tensor) -> bool:
    """Is it the only one that has its memory? False where this torch cannot say."""
    uses = getattr(torch._C, "_storage_Use_Count", None)
    one = torch.empty(1)
    return uses is not None and uses(tensor.untyped_storage()._cdata) == uses(one.untyped_storage()._cdata)


def _over(here: Any, there: Any) -> Any:
    """A group's value; a tensor that is there already (a learning rate that a graph has captured) is kept and filled."""
    if isinstance(here, torch.Tensor) and isinstance(there, torch.Tensor) and here.shape == there.shape:
        here.copy_(there)
        return here
    return there


def _gathered(value: Any, like: torch.Tensor) -> Any:
    """A DTensor of an optimizer as plain values: this rank's piece, the whole's shape, how it is spread if not as its parameter."""
    if not hasattr(value, "to_local"):
        return value
    same = (getattr(like, "placements", None), getattr(like, "device_mesh", None)) == (value.placements, value.device_mesh)
    spread = None if same else [_dim_of(kind) for kind in value.placements]
    return _SPREAD, local(value), tuple(value.shape), tuple(value.stride()), spread


def _dim_of(kind: Any) -> int | None:
    """The dimension of the tensor that is sharded; None: replicated."""
    if kind.is_replicate():
        return None
    if type(kind).__name__ == "Shard":
        return int(kind.dim)
    raise codec.Uncarriable(f"an optimizer's state is spread as {kind}, unlike its parameter: that cannot be carried")


def _is_spread(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 5 and value[0] == _SPREAD


def _cut(
    path: str,
    leaf: codec.Leaf,
    rank: int,
    like: torch.Tensor,
    shape: Sequence[int] | None = None,
    spread: Sequence[int | None] | None = None,
) -> codec.Leaf:
    """The leaf as it is to be here, on the mesh of a parameter."""
    whole = leaf.whole or leaf.shape
    box = boxes.of(like, rank, None if spread is None else _placements(spread), shape)
    if tuple(like.shape if shape is None else shape) != whole:
        raise RecoveryError(f"{path} is {tuple(like.shape)}, it was {whole} before the restart")
    if box is None:
        raise RecoveryError(f"{path} is spread in a way that it cannot be cut anew for")
    return codec.Leaf(leaf.path, leaf.dtype, box.shape, leaf.device, whole, box.start)


def _placements(spread: Sequence[int | None]) -> list[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if dim is None else Shard(dim) for dim in spread]


def _spread(value: Any, like: torch.Tensor) -> Any:
    if _is_spread(value) and not hasattr(like, "placements"):
        return value[1]  # it was cut anew to be whole here
    if _is_spread(value):
        from torch.distributed.tensor import DTensor

        _, piece, shape, stride, spread = value
        placements = like.placements if spread is None else _placements(spread)  # type: ignore[attr-defined]  # a DTensor
        mesh: Any = like.device_mesh  # type: ignore[attr-defined]  # a DTensor
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
    return value


def _device_of(leaf: codec.Leaf, parameters: Sequence[torch.Tensor]) -> torch.device | None:
    """State on a device lives where its parameter does here; state on the CPU (a step counter) stays there."""
    kind, place, *_ = [*leaf.path.split("."), "", ""]
    if leaf.device == "cpu" or kind != "state" or not place.isdigit() or int(place) >= len(parameters):
        return None
    return parameters[int(place)].device


def _difference(there: Any, here: Any) -> str:
    lost, new = [*(there.keys() - here.keys())], [*(here.keys() - there.keys())]
    return f"{len(lost)} are gone ({', '.join(sorted(lost)[:3])}), {len(new)} are new ({', '.join(sorted(new)[:3])})"
