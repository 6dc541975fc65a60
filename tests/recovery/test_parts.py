"""A part's state goes into other objects bit for bit, without the detours that change bits."""

from typing import Any

import pytest
import torch
from torch import nn

from hyperpodrun.recovery import codec, rng, shard
from hyperpodrun.recovery.parts import Part, RecoveryError, hand_over, part_of


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step + 1))).square().sum().backward()
        optimizer.step()


def made(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, seed: int = 0, **options: Any
) -> tuple[nn.Module, Any, list[Part]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[2].weight = nn.Parameter(model[1].weight.detach().new_zeros(4, 4).normal_())
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    return model, optimizer, [part_of("model", model), part_of("optimizer", optimizer)]


def carry(source: list[Part], target: list[Part]) -> shard.Shard:
    """As a transfer does it: layout, places, bytes, install."""
    there = shard.of(source)
    layout = there.layout
    here, tensors = shard.place(layout, target)
    half = there.nbytes // 2
    for start, stop in ((0, half), (half, there.nbytes)):
        for into, out in zip(here.range(start, stop), there.range(start, stop), strict=True):
            into.copy_(out)
    shard.install(layout, target, tensors)
    return there


def same(a: list[Part], b: list[Part]) -> bool:
    return shard.pack(shard.of(a)) == shard.pack(shard.of(b))


@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adam]
)
def test_model_and_optimizer_go_on_as_the_original_does(kind: type[torch.optim.Optimizer]) -> None:
    options = {"momentum": 0.9} if kind in (torch.optim.SGD, torch.optim.RMSprop) else {}
    model, optimizer, parts = made(kind, **options)
    train(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    model2, optimizer2, parts2 = made(kind, seed=1, **options)  # has made no step: its state appears here for the first time
    carry(parts, parts2)
    assert same(parts, parts2)
    train(model, optimizer)
    train(model2, optimizer2)
    assert same(parts, parts2)


def test_parameters_are_written_where_they_are() -> None:
    model, optimizer, parts = made()
    train(model, optimizer)
    model2, optimizer2, parts2 = made(seed=1)
    train(model2, optimizer2, 5)
    before = [tensor.data_ptr() for tensor in [*model2.parameters(), *(s["exp_avg"] for s in optimizer2.state.values())]]
    carry(parts, parts2)
    assert [t.data_ptr() for t in [*model2.parameters(), *(s["exp_avg"] for s in optimizer2.state.values())]] == before
    assert same(parts, parts2)


def test_state_keeps_its_type_where_load_state_dict_would_cast_it() -> None:
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"master": torch.tensor([1 / 3, 2 / 3]), "plain": [1, "x"]}
    other = nn.Linear(2, 2).bfloat16()
    optimizer2 = torch.optim.SGD(other.parameters(), lr=0.2)
    carry([part_of("o", optimizer)], [part_of("o", optimizer2)])
    state = optimizer2.state[other.weight]
    assert state["master"].dtype == torch.float32 and torch.equal(state["master"], torch.tensor([1 / 3, 2 / 3]))
    assert state["plain"] == [1, "x"] and optimizer2.param_groups[0]["lr"] == 0.1


def test_a_non_contiguous_parameter_is_filled_in_place() -> None:
    a, b = nn.Module(), nn.Module()
    a.w = nn.Parameter(torch.randn(3, 4).t())
    b.w = nn.Parameter(torch.zeros(4, 3).t().contiguous().t())
    b.w = nn.Parameter(torch.zeros(3, 4).t())
    carry([part_of("m", a)], [part_of("m", b)])
    assert torch.equal(a.w, b.w) and not b.w.is_contiguous()


def test_schedulers_and_scalers_are_plain_parts() -> None:
    model, optimizer, _ = made()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(model, optimizer)
    scheduler.step()
    _, optimizer2, _ = made()
    scheduler2 = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer2, 10)
    carry([part_of("s", scheduler)], [part_of("s", scheduler2)])
    assert scheduler.state_dict() == scheduler2.state_dict()


def test_what_does_not_fit_is_refused_by_name() -> None:
    model, optimizer, parts = made()
    train(model, optimizer)
    other = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(RecoveryError, match="model: other parameters than before the restart: 2 are gone"):
        carry(parts[:1], [part_of("model", other)])
    wide = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 4, bias=False))
    with pytest.raises(RecoveryError, match=r"model.0.weight is \(5, 4\) torch.float32, it was \(3, 4\)"):
        carry(parts[:1], [part_of("model", wide)])
    with pytest.raises(RecoveryError, match="the parts model, here are mine"):
        carry(parts[:1], [part_of("mine", model)])
    with pytest.raises(TypeError, match="a object has no state_dict"):
        part_of("x", object())


def test_small_states_are_packed_into_bytes() -> None:
    model, optimizer, parts = made()
    train(model, optimizer)
    layout, tensors = shard.unpack(shard.pack(shard.of(parts)))
    _, _, parts2 = made(seed=1)
    shard.install(layout, parts2, tensors)
    assert same(parts, parts2)
    with pytest.raises(codec.CodecError):
        shard.unpack(shard.pack(shard.of(parts))[:-1])


def test_random_states_come_back() -> None:
    numpy = pytest.importorskip("numpy")
    import random

    def draw() -> list[float]:
        return [random.random(), torch.rand(1).item(), numpy.random.random()]

    state = rng.capture()
    first = draw()
    rng.install(state)
    assert draw() == first
    rng.seed_all(1, 2, 3)
    first = draw()
    rng.seed_all(1, 2, 3)
    assert draw() == first
    assert len({rng.seed_of(seed, rank, step) for seed in range(4) for rank in range(8) for step in range(64)}) == 4 * 8 * 64


@pytest.mark.parametrize(("given", "mode"), [(True, "replicate"), ("counter", "counter"), (False, "none"), (None, "none")])
def test_the_modes_of_random_states(given: Any, mode: str) -> None:
    assert rng.mode_of(given) == mode
    with pytest.raises(ValueError, match="rng='some'"):
        rng.mode_of("some")


def test_what_is_given_up_gives_its_memory() -> None:
    old, new = nn.Linear(3, 2), nn.Linear(3, 2)
    where = [parameter.data_ptr() for parameter in old.parameters()]
    before = [parameter.detach().clone() for parameter in old.parameters()]
    had = [parameter.data_ptr() for parameter in new.parameters()]
    left = hand_over(part_of("model", old), part_of("model", new))
    assert [parameter.data_ptr() for parameter in new.parameters()] == where
    assert [tensor.data_ptr() for tensor in left] == had
    assert all(torch.equal(one, other) for one, other in zip(new.parameters(), before, strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in new.parameters())


@pytest.mark.parametrize("which", ["the new one is seen by others", "the old one is a piece of more"])
def test_memory_that_is_not_theirs_alone_is_filled_where_it_is(which: str) -> None:
    old, new = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    if which.startswith("the old"):
        old.weight.data = torch.zeros(8)[:6].view(2, 3)
    seen = new.weight.data.view(-1) if which.startswith("the new") else None
    old.weight.data.copy_(torch.arange(6.0).view(2, 3))
    where = new.weight.data_ptr()
    hand_over(part_of("model", old), part_of("model", new))
    assert new.weight.data_ptr() == where
    assert torch.equal(new.weight, old.weight)
    assert seen is None or torch.equal(seen, torch.arange(6.0))


def test_parameters_that_were_one_memory_do_not_become_so_elsewhere() -> None:
    old = nn.ParameterList([torch.ones(3), torch.ones(3)])
    old[1].data = old[0].data
    new = nn.ParameterList([torch.zeros(3), torch.zeros(3)])
    hand_over(part_of("model", old), part_of("model", new))
    assert new[0].data_ptr() != new[1].data_ptr()
    assert torch.equal(new[0], torch.ones(3)) and torch.equal(new[1], torch.ones(3))
