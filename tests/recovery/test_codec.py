"""States come back bit for bit, and what cannot be carried is refused by name."""

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperpodrun.recovery import codec

numpy = pytest.importorskip("numpy")

KEYS = st.one_of(st.text(max_size=5), st.integers(-(2**70), 2**70), st.tuples(st.integers(), st.text(max_size=2)))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
TREES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
        st.frozensets(st.integers(), max_size=3),
        st.sets(st.text(max_size=3), max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a == b and math.copysign(1, a) == math.copysign(1, b) if not math.isnan(a) else math.isnan(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back_with_their_types(tree: Any) -> None:
    tensors, skeleton = codec.encode(tree)
    assert tensors == []
    assert same(codec.decode(skeleton, []), tree)


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_give_a_value_or_a_codec_error(text: bytes) -> None:
    try:
        codec.decode(text, [torch.zeros(1)])
    except codec.CodecError:
        pass


def test_generators_states_come_back() -> None:
    state = {"python": random.getstate(), "numpy": numpy.random.get_state(), "torch": torch.get_rng_state()}
    tensors, skeleton = codec.encode(state)
    back = codec.decode(skeleton, [tensor.clone() for _, tensor in tensors])
    assert back["python"] == state["python"]
    assert back["numpy"][0] == state["numpy"][0]
    assert (back["numpy"][1] == state["numpy"][1]).all()
    assert torch.equal(back["torch"], state["torch"])


TENSORS = {
    "float": torch.randn(3, 4),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.randn(5).bfloat16(),
    "complex": torch.randn(4, dtype=torch.complex64),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "fp8": torch.randn(8).to(torch.float8_e4m3fn),
    "transposed": torch.randn(3, 4).t(),
    "strided": torch.randn(10)[::2],
    "expanded": torch.randn(1).expand(5),
    "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
    "int64": torch.tensor([2**62]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_each_kind_of_tensor_travels_as_bytes(name: str) -> None:
    tensor = TENSORS[name]
    ((path, taken),), skeleton = codec.encode({"a": [tensor]})
    assert path == "a.0"
    leaf = codec.leaf_of(path, taken)
    copy = codec.empty(leaf)
    source = codec.raw(codec.dense(taken))
    assert source.numel() == leaf.nbytes
    codec.raw(copy).copy_(source)
    (back,) = codec.decode(skeleton, [copy])["a"]
    assert back.shape == tensor.shape and back.dtype == tensor.dtype
    assert torch.equal(codec.raw(codec.dense(back)), codec.raw(codec.dense(tensor)))


def test_tied_tensors_are_taken_once_and_stay_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(2, 2))
    tensors, skeleton = codec.encode({"in": weight, "out": weight, "other": weight.detach().clone()})
    assert [path for path, _ in tensors] == ["in", "other"]
    back = codec.decode(skeleton, [tensor for _, tensor in tensors])
    assert back["in"] is back["out"]


def test_numpy_values_and_torch_names_come_back() -> None:
    state = {"a": numpy.arange(6).reshape(2, 3), "s": numpy.float32(1.5), "size": torch.Size([1, 2]), "t": torch.int8,
             "d": torch.device("cpu"), "dd": defaultdict(list, {1: 2}),
             "milestones": Counter([3, 3, 6]), "window": deque([1, 2], maxlen=2)}  # fmt: skip
    back = codec.decode(codec.encode(state)[1], [])
    assert (back["a"] == state["a"]).all() and back["a"].dtype == state["a"].dtype
    assert back["s"] == 1.5 and type(back["s"]) is numpy.float32
    assert (back["size"], back["t"], back["d"], back["dd"]) == (torch.Size([1, 2]), torch.int8, torch.device("cpu"), {1: 2})
    assert back["milestones"] == Counter([3, 3, 6]) and type(back["milestones"]) is Counter  # MultiStepLR's
    assert back["window"] == deque([1, 2]) and back["window"].maxlen == 2


@pytest.mark.filterwarnings("ignore:.*quantiz:")
@pytest.mark.parametrize("channels", [False, True])
def test_quantized_tensors_come_back(channels: bool) -> None:
    values = torch.randn(3, 4)
    if channels:
        tensor = torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.quint8)
    else:
        tensor = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
    tensors, skeleton = codec.encode([tensor])
    (back,) = codec.decode(skeleton, [taken.clone() for _, taken in tensors])
    assert back.dtype == tensor.dtype and back.qscheme() == tensor.qscheme()
    assert torch.equal(back.int_repr(), tensor.int_repr()) and torch.equal(back.dequantize(), tensor.dequantize())


class Odd:
    pass


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": Odd()}}, "a.b is a .*Odd"),
        ({"a": torch.eye(2).to_sparse()}, "a cannot be carried: its layout"),
        ({"m": torch.empty(2, device="meta")}, "has no memory"),
        ({"o": numpy.array([None])}, "o is a numpy ndarray of type object"),
    ],
)
def test_what_cannot_be_carried_is_named(state: Any, words: str) -> None:
    with pytest.raises(codec.CodecError, match=words) as raised:
        codec.encode(state)
    assert getattr(raised.value, "rung", "") == "end", "a restart does not help"


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(codec.Uncarriable, match="deeper than"):
        codec.encode(state)
