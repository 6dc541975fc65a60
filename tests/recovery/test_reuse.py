"""Objects that are used again are known by their memory, and writes to them by its versions."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from hyperpodrun.recovery import reuse
from hyperpodrun.recovery.memory import Memory
from hyperpodrun.recovery.parts import Part, part_of


def parts_of(model: nn.Module) -> list[Part]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [part_of("model", model), part_of("optimizer", torch.optim.SGD(trained, lr=0.1, momentum=0.9))]


def committed(model: nn.Module) -> Memory:
    memory = Memory("model", parts_of(model))
    memory.committed(7)
    return memory


def nothing(model: nn.Module) -> nn.Module:
    return model


def computed(model: nn.Module) -> nn.Module:
    model(torch.ones(1, 3)).sum().backward()
    return model


def loaded(model: nn.Module) -> nn.Module:
    model.load_state_dict(nn.Linear(3, 2).state_dict())
    return model


def initialised(model: nn.Module) -> nn.Module:
    nn.init.ones_(model.bias)  # type: ignore[arg-type]  # a Linear
    return model


def made_of_it(model: nn.Module) -> nn.Module:
    other = nn.Linear(3, 2)
    other.weight.data = model.weight.data  # type: ignore[assignment, union-attr]  # a Linear
    return other


def replaced(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.bias.mul_(2)  # type: ignore[operator, union-attr]  # a Linear
    return nn.Linear(3, 2)


def replaced_by_data(model: nn.Module) -> nn.Module:
    """As helpers that put averages in a model's place do; versions do not show it."""
    model.bias.data.mul_(2)  # type: ignore[operator, union-attr]  # a Linear
    return nn.Linear(3, 2)


def replaced_and_put_back(model: nn.Module) -> nn.Module:
    model.bias.data.mul_(2).mul_(0.5)  # type: ignore[operator, union-attr]  # a Linear
    return nn.Linear(3, 2)


def new(_: nn.Module) -> nn.Module:
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("then", "shared", "written"),
    [
        (nothing, True, False),
        (computed, True, False),
        (loaded, True, True),
        (initialised, True, True),
        (made_of_it, True, True),
        (new, False, False),
        (replaced, False, True),
        (replaced_by_data, False, True),
        (replaced_and_put_back, False, False),
    ],
)
def test_what_was_done_to_them_is_known(then: Callable[[nn.Module], nn.Module], shared: bool, written: bool) -> None:
    model = nn.Linear(3, 2)
    earlier = committed(model)
    parts = parts_of(then(model))
    assert reuse.sharing(parts, earlier) == ([earlier] if shared else [])
    assert reuse.written(parts, earlier) == written
    assert reuse.trained(parts, earlier) == shared
    earlier.step = -1
    assert not reuse.trained(parts, earlier), "nothing was trained yet"


def test_a_frozen_part_that_all_lives_share_has_not_been_trained() -> None:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    earlier = committed(nn.Sequential(frozen, nn.Linear(3, 2)))
    parts = parts_of(nn.Sequential(frozen, nn.Linear(3, 2)))
    assert reuse.sharing(parts, earlier) == [earlier]
    assert not reuse.trained(parts, earlier) and not reuse.written(parts, earlier)


def test_an_average_that_no_optimizer_trains_is_watched() -> None:
    model, average = nn.Linear(3, 2), nn.Linear(3, 2)
    memory = Memory("model", [*parts_of(model), part_of("average", average)])
    memory.committed(7)
    assert memory.untouched
    with torch.no_grad():
        average.weight.mul_(2)
    assert not memory.untouched
