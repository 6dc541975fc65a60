"""Whatever a state consists of comes back, or is refused by its name in the first steps; two states do not meddle with each other."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import alone
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hyperpodrun.agent.wire import names
from hyperpodrun.recovery import RecoverableState, RecoveryError, codec, nodestate, shm
from hyperpodrun.recovery.shard import of as shard_of

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank."""
    with alone.job(monkeypatch):
        yield


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()


def train(state: RecoverableState, model: nn.Module, optimizer: Any, until: int, inside: Callable[[], Any] = int) -> None:
    """From where it is to `until`; `inside` is called in each update."""
    for step in range(state.restore(), until + 1):
        step_of(model, optimizer)
        with state.update(step):
            optimizer.step()
            inside()


def linear(width: int = 4, **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, width, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


# --- two states


@pytest.mark.parametrize("stored", [False, True], ids=["shared memory", "stored"])
@pytest.mark.parametrize("widths", [(4, 4), (3, 9)], ids=["of one size", "of two sizes"])
def test_two_states_keep_apart(widths: tuple[int, int], stored: bool, tmp_path: Path) -> None:
    """Their versions, in shared memory or stored, of one size (they would be taken for each other) or of two."""
    options: dict[str, Any] = {"tiered": tmp_path, "tiered_every": 1, "copies": 1} if stored else {}

    def lives(until: int) -> tuple[list[RecoverableState], list[nn.Module]]:
        made = [linear(width) for width in widths]
        states = [
            RecoverableState(model=model, optimizer=optimizer, name=name, **options)
            for name, (model, optimizer) in zip(("g", "d/x"), made, strict=True)
        ]
        for state in states:
            state.restore()
        for step in range(states[0]._memory.step + 1, until + 1):  # type: ignore[union-attr]  # it is restored
            for state, (model, optimizer) in zip(states, made, strict=True):
                step_of(model, optimizer)
                with state.update(step):
                    optimizer.step()
        return states, [model for model, _ in made]

    _, before = lives(3)
    (alone.the_node_is_lost if stored else alone.all_processes_are_lost)("g", "d/x")
    states, after = lives(3)
    assert [state.restored_from for state in states] == ["tiered" if stored else "shm"] * 2
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_two_states_of_one_name_are_refused() -> None:
    (first, optimizer), (second, other) = linear(), linear()
    states = RecoverableState(model=first, optimizer=optimizer), RecoverableState(model=second, optimizer=other)
    for state in states:
        state.restore()
    with pytest.raises(RecoveryError, match="another state by the name of 'default' was restored after this one"):
        states[0].update(0).__enter__()


def test_a_file_that_was_made_anew_is_mapped_anew(tmp_path: Path) -> None:
    """Another process may have removed it: what is written into the old memory nobody would find."""
    slots, shard = shm.Slots(str(tmp_path), "model"), shard_of([])
    model = shard_of([RecoverableState(model=nn.Linear(2, 2))._shared[0]])
    slots.write(0, model)
    slots.write(1, model)
    for path in tmp_path.iterdir():
        path.unlink()
    slots.write(2, model)
    assert [version.step for version in shm.scan(str(tmp_path))] == [2]
    assert shard.nbytes == 0


# --- buffers


class Features(nn.Module):
    """`freqs` and `cache` are drawn, `mean` is put anew by each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("freqs", torch.randn(4))
        self.register_buffer("cache", torch.randn(4), persistent=False)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return self.linear(x * self.freqs)  # type: ignore[no-any-return]  # torch's


@pytest.mark.parametrize("lost", [int, alone.all_processes_are_lost], ids=["nothing", "processes"])
def test_constant_buffers_come_back(lost: Callable[[], Any]) -> None:
    """Though the next entry of the function draws others; and buffers that are replaced instead of written."""
    values = []
    for until in (3, 3, 5):
        model = Features()
        optimizer = torch.optim.AdamW(model.parameters())
        drawn = model.freqs.clone()
        train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, until)
        values.append([buffer.clone() for buffer in model.buffers()])
        assert not values[1:] or not torch.equal(drawn, values[0][0])
        lost()
    (freqs, cache, mean), restored, later = values
    assert torch.equal(restored[0], freqs) and torch.equal(restored[1], cache) and torch.equal(restored[2], mean)
    assert torch.equal(later[0], freqs) and not torch.equal(later[2], mean)


class Lazy(nn.Linear):
    """Makes its mean in the first forward pass."""

    mean: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + x.mean(0)
        return super().forward(x)


@pytest.mark.parametrize("lost", [int, alone.all_processes_are_lost], ids=["nothing", "processes"])
def test_a_buffer_that_is_none_at_first_comes_back(lost: Callable[[], Any]) -> None:
    values = []
    for until in (3, 3):
        model = Lazy()
        optimizer = torch.optim.AdamW(model.parameters())
        train(RecoverableState(model=model, optimizer=optimizer, rng="counter"), model, optimizer, until)
        values.append(model.mean)
        lost()
    assert values[0] is not None and values[1] is not None and torch.equal(values[0], values[1])


def test_a_buffer_that_is_registered_late_is_refused_in_the_first_step() -> None:
    model, optimizer = linear()
    state = RecoverableState(model=model, optimizer=optimizer)
    with pytest.raises(RecoveryError, match=r"the buffer model.late was registered after RecoverableState was made"):
        train(state, model, optimizer, 0, lambda: model.register_buffer("late", torch.ones(1)))


def test_a_cache_that_was_grown_is_none_of_the_state() -> None:
    model = Features()
    optimizer = torch.optim.AdamW(model.parameters())

    def forward(*_: Any) -> None:
        model.cache = torch.randn(8)

    model.register_forward_hook(forward)
    train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, 3)
    other = Features()
    cache = other.cache.clone()
    assert RecoverableState(model=other, optimizer=torch.optim.AdamW(other.parameters())).restore() == 4
    assert torch.equal(other.freqs, model.freqs) and other.cache.shape == cache.shape


class Extra(nn.Linear):
    """Has more than tensors."""

    seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_what_a_module_has_besides_tensors_comes_back() -> None:
    for until, seen in ((3, 4), (3, 4), (5, 6)):
        model = Extra(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        train(RecoverableState(model=model, optimizer=optimizer, rng="counter"), model, optimizer, until)
        assert model.seen == seen


# --- optimizers, averages


def test_what_an_optimizer_keeps_by_a_name_comes_back() -> None:
    for until, count in ((3, 4), (3, 4), (5, 6)):
        model, optimizer = linear()

        def count_up(state: Any = optimizer.state) -> None:
            state["count"] = state.get("count", 0) + 1

        train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, until, count_up)
        assert optimizer.state["count"] == count  # type: ignore[index]  # as some do
        assert len(optimizer.state) == 3


def test_the_state_of_something_that_is_no_parameter_is_refused() -> None:
    model, optimizer = linear()
    optimizer.state[torch.zeros(3)] = {"x": 1}
    with pytest.raises(RecoveryError, match="optimizer: it keeps a state for a Tensor that is none of its parameters"):
        train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, 0)


class Lookahead(torch.optim.SGD):
    """Keeps something beside `state`."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": 1}


def test_an_optimizer_with_a_state_dict_of_its_own_is_refused() -> None:
    model, _ = linear()
    with pytest.raises(TypeError, match=r"optimizer: a Lookahead has a state_dict\(\) of its own"):
        RecoverableState(model=model, optimizer=Lookahead(model.parameters(), lr=0.1))


@pytest.mark.parametrize("lost", [int, alone.all_processes_are_lost], ids=["nothing", "processes"])
def test_an_average_of_models_comes_back_with_its_count(lost: Callable[[], Any]) -> None:
    values = []
    for until in (3, 3):
        model, optimizer = linear()
        average = AveragedModel(model)
        state = RecoverableState(model=model, optimizer=optimizer, average=average)
        train(state, model, optimizer, until, lambda: average.update_parameters(model))  # noqa: B023  # called in this turn
        values.append([tensor.detach().clone() for tensor in average.state_dict().values()])
        lost()
    assert int(values[1][0]) == 4 and all(torch.equal(one, other) for one, other in zip(*values, strict=True))


class Ema:
    """A helper as they are written by hand."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.shadow

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.shadow = state


@pytest.mark.parametrize("lost", [int, alone.all_processes_are_lost], ids=["nothing", "processes"])
@pytest.mark.parametrize("role", ["optimizer", "scheduler"])
def test_a_helper_that_follows_the_parameters_comes_back(role: str, lost: Callable[[], Any]) -> None:
    values = []
    for until in (3, 3):
        model, optimizer = linear()
        ema = Ema(model)
        roles: dict[str, Any] = (
            {"optimizer": [optimizer, ema]} if role == "optimizer" else {"optimizer": optimizer, "scheduler": ema}
        )
        train(RecoverableState(model=model, **roles), model, optimizer, until, ema.update)
        values.append([tensor.clone() for tensor in ema.shadow.values()])
        lost()
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))


def late(which: str, model: Any, ema: Ema) -> Callable[[], Any]:
    model.register_buffer("count", torch.zeros(1))
    inside = {"ema": ema.update, "model.count": lambda: model.count.add_(1), "the random numbers": lambda: torch.rand(1)}
    return inside[which]


@pytest.mark.parametrize("which", ["ema", "model.count", "the random numbers"])
def test_what_changes_too_late_is_refused_in_the_first_step(which: str) -> None:
    """Private states are saved on entering the block: these would come back a step old."""
    model, optimizer = linear()
    ema = Ema(model)
    inside = late(which, model, ema)
    with pytest.raises(RecoveryError, match=rf"^{which} changed inside .*update.*step old after a restart") as refused:
        train(RecoverableState(model=model, optimizer=optimizer, ema=ema), model, optimizer, 5, inside)
    assert refused.value.rung == "end"  # type: ignore[attr-defined]  # no restart helps


def test_what_is_stepped_behind_the_block_is_refused_in_the_second_step() -> None:
    """A fault between the two would leave a model of one step beside one of another."""
    model, optimizer = linear()
    critic, its_optimizer = linear(3)
    state = RecoverableState(model=[model, critic], optimizer=[optimizer, its_optimizer])

    def train_critic(*_: Any) -> None:
        step_of(critic, its_optimizer)
        its_optimizer.step()

    model.register_forward_hook(train_critic)
    with pytest.raises(RecoveryError, match=r"^model1.weight, model1.bias, optimizer1.*5 more changed outside of") as refused:
        train(state, model, optimizer, 5)
    assert refused.value.rung == "end" and state._memory is not None and state._memory.step == 0  # type: ignore[attr-defined]


def test_rates_that_are_set_in_front_of_the_block_are_none_of_that() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))

    def set_rate(*_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"].mul_(0.9)

    model.register_forward_hook(set_rate)
    train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, 5)


@pytest.mark.parametrize("lost", [int, alone.all_processes_are_lost], ids=["nothing", "processes"])
def test_averages_in_the_place_of_weights_are_no_state(lost: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault comes in a validation, while a version is still being written."""
    go_on = threading.Event()
    model, optimizer = linear()
    state = RecoverableState(model=model, optimizer=optimizer)
    train(state, model, optimizer, 3)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    write = shm.Slots.reserve

    def slowly(*given: Any, **more: Any) -> Any:
        go_on.wait(60)
        return write(*given, **more)

    monkeypatch.setattr(nodestate, "INLINE", -1.0)
    monkeypatch.setattr(shm.Slots, "reserve", slowly)
    with state.update(4):
        optimizer.step()
    for parameter in model.parameters():
        parameter.data.zero_()
    go_on.set()
    assert state._versions is not None
    state._versions.settle()
    lost()
    other, its_optimizer = linear()
    again = RecoverableState(model=other, optimizer=its_optimizer)
    assert again.restore() == 4 and again.restored_from == "shm"
    assert all(torch.equal(*pair) for pair in zip(kept, other.parameters(), strict=True))


@pytest.mark.parametrize("copies", [1, 2])
def test_a_state_that_cannot_be_carried_is_refused_in_the_first_step(copies: int) -> None:
    model, optimizer = linear()

    def inside() -> None:
        optimizer.state[model.weight]["sparse"] = torch.eye(4).to_sparse()

    with pytest.raises(codec.CodecError, match=r"state.0.sparse cannot be carried"):
        train(RecoverableState(model=model, optimizer=optimizer, copies=copies), model, optimizer, 0, inside)


# --- what is said


def test_a_restart_that_finds_nothing_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    model, optimizer = linear()
    train(RecoverableState(model=model, optimizer=optimizer), model, optimizer, 3)
    assert capfd.readouterr().err == ""
    alone.the_node_is_lost()
    monkeypatch.setenv(names.JOB_RESTART_COUNT, "1")
    model, optimizer = linear()
    assert RecoverableState(model=model, optimizer=optimizer).restore() == 0
    said = capfd.readouterr().err
    assert "step 0 is next, whatever was done before the restart is lost: no memory holds a state" in said


def test_a_state_that_is_restored_twice_says_where_from_each_time() -> None:
    model, optimizer = linear()
    state = RecoverableState(model=model, optimizer=optimizer)
    train(state, model, optimizer, 3)
    alone.all_processes_are_lost()
    assert state.restore() == 4 and state.restored_from == "shm"
    versions = state._versions
    assert versions is not None and not versions._copies._closed.is_set()
    assert state.restore() == 4 and state.restored_from == "own"
    assert versions._copies._closed.is_set(), "nobody listens for the one before"
    alone.the_node_is_lost()
    assert state.restore() == 0 and state.restored_from == "fresh"
