"""Whatever happens and whenever, what goes on is the state after one step, bit for bit, or a new beginning that says why.

Each run is a random model in a random layout with random faults, a function of its seed; the oracle computes the same steps plainly,
in one loop, from the sizes of the worlds that the steps were made in.
"""

import copy
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster, Process, edges
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hyperpodrun.recovery import RecoverableState, memory, rng
from hyperpodrun.recovery.plan import went_to

SEED, STEPS, BATCH = 7, 8, 2
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the cluster's processes have: with other numbers of threads come other roundings, and other tests may have changed it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(nn.Module):
    """Random, nested, of mixed types; a weight is tied, one module joins in late (its optimizer state appears then)."""

    def __init__(self, chance: random.Random, buffers: bool) -> None:
        super().__init__()
        self.width, self.late_from = chance.randrange(1, 7), chance.randrange(1, 5)
        layers: list[nn.Module] = []
        for _ in range(chance.randrange(1, 4)):
            inner: list[nn.Module] = [nn.Linear(self.width, self.width, bias=chance.random() < 0.7, dtype=chance.choice(DTYPES))]
            inner += [nn.Dropout(0.3)] if chance.random() < 0.5 else []
            layers.append(nn.Sequential(*inner))
        self.layers = nn.ModuleList(layers)
        self.late = nn.Linear(self.width, 1, dtype=chance.choice(DTYPES))
        self.scale = nn.Parameter(torch.tensor(chance.random()))
        first, last = layers[0][0], layers[-1][0]  # type: ignore[index]  # both are sequences
        if first is not last and first.weight.dtype == last.weight.dtype:
            last.weight = first.weight
        self.norm = nn.BatchNorm1d(self.width) if buffers else None

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            kind = next(iter(layer.parameters())).dtype
            x = torch.tanh(layer(x.to(kind)))
        x = x.float()
        if self.norm is not None:
            x = self.norm(x)
        if step >= self.late_from:
            x = x + self.late(x.to(self.late.weight.dtype)).float()
        return (x * self.scale).square().mean()


class Sampler:
    """Counts the samples of the whole job."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.position = rank, world, 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def draw(self) -> list[int]:
        first = self.position + self.rank * BATCH
        self.position += self.world * BATCH
        return list(range(first, first + BATCH))


@dataclass
class Job:
    """What a seed makes of it. `every`: versions. `parts`: processes that live may be replaced, and save what they have.

    `cut`: the dimension in which a parameter is cut (None: in none), by name.
    """

    seed: int
    sharded: bool
    elastic: bool
    mode: str
    size: int
    kind: str
    tiered: bool
    every: int
    parts: bool
    cut: dict[str, int | None] = field(default_factory=dict)

    def net(self) -> Net:
        torch.manual_seed(self.seed)
        net = Net(random.Random(self.seed), buffers=not self.sharded and not self.elastic)
        chance = random.Random(self.seed)
        self.cut = {name: chance.choice([None, *range(p.dim())]) for name, p in net.named_parameters()} if self.sharded else {}
        return net

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.sharded:
            return ByPieces(parameters, {"lr": 0.1})
        if self.kind == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def piece(self, name: str, whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """By torch.chunk; some ranks have nothing."""
        dim = self.cut.get(name)
        if dim is None:
            return whole.clone()
        pieces = whole.chunk(world, dim)
        return pieces[rank].clone() if rank < len(pieces) else whole.narrow(dim, 0, 0).clone()

    def place(self, name: str, piece: torch.Tensor, whole: torch.Tensor, rank: int, world: int) -> DTensor:
        mesh = DeviceMesh("cpu", torch.arange(world), mesh_dim_names=("dp",), _init_backend=False, _rank=rank)
        dim = self.cut[name]
        placements = [Replicate() if dim is None else Shard(dim)]
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    def shard(self, net: Net, rank: int, world: int) -> Net:
        """The same net with pieces for parameters."""
        cut, known = copy.deepcopy(net), dict[int, nn.Parameter]()
        names = {id(p): name for name, p in cut.named_parameters()}
        for module in cut.modules():
            for key, p in module._parameters.items():
                if p is not None:
                    name = names[id(p)]
                    placed = self.place(name, self.piece(name, p.detach(), rank, world), p, rank, world)
                    module._parameters[key] = known.setdefault(id(p), nn.Parameter(placed))
        return cut

    def compute(self, net: Net, samples: Sequence[int], step: int) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one rank."""
        net.zero_grad()
        x = torch.tensor([[(s + 1) * (w + 1) / 50 for w in range(net.width)] for s in samples])
        loss = net(x + torch.rand(1) + random.random(), step)
        loss.backward()
        return loss.item(), {name: p.grad.detach().clone() for name, p in net.named_parameters() if p.grad is not None}

    def mean(self, every: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {name: sum(some[name] for some in every) / len(every) for name in every[0]}  # type: ignore[misc]  # tensors

    def update(self, net: Net, optimizer: torch.optim.Optimizer, mean: dict[str, torch.Tensor], rank: int, world: int) -> None:
        for name, p in net.named_parameters():
            grad = mean.get(name)
            if grad is not None and self.sharded:
                grad = self.place(name, self.piece(name, grad, rank, world), grad, rank, world)
            p.grad = grad
        optimizer.step()


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t  # type: ignore[no-any-return,no-untyped-call]  # torch's


class ByPieces(torch.optim.Optimizer):
    """Adam's states, as DTensors; computed on the pieces, since torch works out every operation on DTensors by itself (slowly)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    for key in ("first", "second"):
                        zeros = torch.zeros_like(local(p.detach()))
                        state[key] = DTensor.from_local(
                            zeros, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                        )
                grad, first, second = local(p.grad), local(state["first"]), local(state["second"])
                state["step"] += 1
                first.mul_(0.9).add_(grad, alpha=0.1)
                second.mul_(0.99).addcmul_(grad, grad, value=0.01)
                local(p.detach()).sub_(group["lr"] * first / (second.sqrt() + 0.1 / state["step"].item()))


def values(net: Net, optimizer: torch.optim.Optimizer) -> list[tuple[str, bytes]]:
    """All tensors of a rank's shard, as bytes."""
    found = [(name, p) for name, p in net.named_parameters()]
    found += [(f"{name}.{key}", v) for name, p in net.named_parameters() for key, v in sorted(optimizer.state[p].items())]
    return [(name, local(t.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in found]


def oracle(job: Job, worlds: Sequence[int]) -> tuple[list[list[float]], list[list[list[tuple[str, bytes]]]]]:
    """Losses by step and rank, and every rank's values before each step, in that step's world.

    The last of `worlds` makes no step: of it there are the values only.
    """
    generators: dict[int, dict[str, Any]] = {}
    losses, before = [], []
    net, position, size = job.net(), 0, worlds[0]
    nets = [job.shard(net, rank, size) if job.sharded else copy.deepcopy(net) for rank in range(size)]
    optimizers = [job.optimizer(one.parameters()) for one in nets]
    schedulers = [job.scheduler(one) for one in optimizers]
    for step, world in enumerate(worlds):
        if world != size:
            nets, optimizers, schedulers = _moved(job, nets, optimizers, schedulers, world)
            size = world
        before.append([values(one, optimizer) for one, optimizer in zip(nets, optimizers, strict=True)])
        if step == len(worlds) - 1:
            break
        wholes = [_whole(job, nets) if job.sharded else one for one in nets]
        parts = []
        for rank in range(world):
            if job.mode == "counter":
                rng.seed_all(SEED, rank, step)
            elif step == 0:
                torch.manual_seed(100 + rank)
                random.seed(rank)
            else:
                rng.install(generators[rank])
            first = position + rank * BATCH
            parts.append(job.compute(wholes[rank], range(first, first + BATCH), step))
            generators[rank] = rng.capture()
        position += world * BATCH
        mean = job.mean([grads for _, grads in parts])
        for rank in range(world):
            job.update(nets[rank], optimizers[rank], mean, rank, world)
            schedulers[rank].step()
        losses.append([loss for loss, _ in parts])
    return losses, before


def _whole(job: Job, nets: Sequence[Net]) -> Net:
    """A net with the whole tensors, put together from everybody's."""
    whole = job.net()
    for name, p in whole.named_parameters():
        pieces = [local(dict(net.named_parameters())[name].detach()) for net in nets]
        dim = job.cut[name]
        p.data.copy_(pieces[0] if dim is None else torch.cat(pieces, dim))
    return whole


def _moved(
    job: Job, nets: list[Net], optimizers: list[Any], schedulers: list[Any], world: int
) -> tuple[list[Net], list[Any], list[Any]]:
    """The same state in a world of another size."""
    whole = _whole(job, nets) if job.sharded else nets[0]
    new = [job.shard(whole, rank, world) if job.sharded else copy.deepcopy(whole) for rank in range(world)]
    made = [job.optimizer(net.parameters()) for net in new]
    plans = [job.scheduler(optimizer) for optimizer in made]
    for rank, (net, optimizer, plan) in enumerate(zip(new, made, plans, strict=True)):
        plan.load_state_dict(copy.deepcopy(schedulers[0].state_dict()))
        optimizer.param_groups[0]["lr"] = optimizers[0].param_groups[0]["lr"]
        for name, p in net.named_parameters():
            states = [old.state[dict(one.named_parameters())[name]] for one, old in zip(nets, optimizers, strict=True)]
            for key, value in states[0].items():
                if isinstance(value, DTensor):
                    dim, pieces = job.cut[name], [local(state[key]) for state in states]
                    full = pieces[0] if dim is None else torch.cat(pieces, dim)
                    optimizer.state[p][key] = job.place(name, job.piece(name, full, rank, world), full, rank, world)
                else:
                    optimizer.state[p][key] = value.clone() if isinstance(value, torch.Tensor) else value
    return new, made, plans


class Run:
    """A job in a cluster. `made`: by timeline and step, the losses by rank; `restored`: (step, source) by generation."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.made: dict[tuple[tuple[int, ...], int], dict[int, float]] = {}
        self.history: tuple[int, ...] = ()
        self.checks: list[tuple[int, int, int, int, list[tuple[str, bytes]]]] = []
        self.restored: list[tuple[int, str]] = []
        self.states: list[RecoverableState] = []
        self.commits: dict[tuple[int, int], int] = {}
        self.versions = self.stored = self.floor = -1
        """The newest step that is surely in shared memory, stored, or held at all: no restore goes back behind that."""

    def life(self) -> str:
        job, cluster = self.job, self.cluster
        rank, world, process = cluster.rank, len(cluster.world), cluster.me
        cluster.point("enter")
        net = job.net()
        whole = copy.deepcopy(net)
        if job.sharded:
            net = job.shard(net, rank, world)
        optimizer = job.optimizer(net.parameters())
        scheduler, sampler = job.scheduler(optimizer), Sampler(rank, world)
        torch.manual_seed(100 + rank)
        random.seed(rank)
        stored = {"tiered": cluster.folder / "tier", "tiered_every": 2} if job.tiered else {}
        state = RecoverableState(
            model=net,
            optimizer=optimizer,
            scheduler=scheduler,
            sampler=sampler,
            rng=job.mode,
            seed=SEED,
            name=process.name,
            **stored,
        )
        start = state.restore()
        assert start > self.floor, (start, self.floor, state.why)
        self.states.append(state)
        assert state._memory is not None
        history = self.history = state._memory.history
        if rank == 0:
            self.restored.append((start, state.restored_from))
        self.checks.append((cluster.generation, start - 1, rank, world, values(net, optimizer)))
        for step in range(start, STEPS):
            cluster.point("begin")
            samples = sampler.draw()
            if job.sharded:
                pieces = cluster.gather({name: local(p.detach()).clone() for name, p in net.named_parameters()})
                for name, p in whole.named_parameters():
                    dim = job.cut[name]
                    p.data.copy_(pieces[0][name] if dim is None else torch.cat([some[name] for some in pieces], dim))
            cluster.point("forward")
            loss, grads = job.compute(whole if job.sharded else net, samples, step)
            cluster.point("backward")
            mean = job.mean(cluster.gather(grads))
            self.made.setdefault((history, step), {})[rank] = loss
            cluster.point("reduced")
            with state.update(step):
                cluster.point("before the optimizer")
                job.update(net, optimizer, mean, rank, world)
                cluster.point("in the update")
                scheduler.step()
                cluster.point("after the scheduler")
            self.commits[cluster.generation, step] = self.commits.get((cluster.generation, step), 0) + 1
            if job.tiered and step % 2 and self.commits[cluster.generation, step] == world:
                self.stored = max(self.stored, step)
            cluster.point("logged")
        self.checks.append((cluster.generation, STEPS - 1, rank, world, values(net, optimizer)))
        cluster.gather(None)
        return "done"

    def run(self) -> None:
        cluster, job = self.cluster, self.job
        numbers = iter(range(1000))
        world = [Process(next(numbers), f"node{place % 3}") for place in range(job.size)]
        while any(result != "done" for result in cluster.run(world, self.life)):
            nodes = {process.node for process in world}
            live = -1 if job.elastic or job.sharded else _floor(world)
            if job.parts and cluster.chance.random() < 0.3:
                cluster.story.append("others take over")
                for process in world:
                    if process.alive:
                        cluster.part(process)
                if any("could not be saved" in text for text in cluster.story):
                    live = -1  # there was no room for it, which was said
            size = cluster.chance.randrange(1, job.size + 1) if job.elastic else job.size
            world = [one if one.alive else Process(next(numbers), one.node) for one in world]
            while len(world) < size:
                world.append(Process(next(numbers), f"node{len(world) % 3}"))
            if job.elastic:
                cluster.chance.shuffle(world)
            for process in world[size:]:
                cluster.end(process)
            world = world[:size]
            self._look_at_versions(cluster.lost_node, nodes, {process.node for process in world})
            self.floor = max(live, self.versions, self.stored)

    def _look_at_versions(self, lost_node: bool, before: set[str], now: set[str]) -> None:
        """A version that was whole in the last generation outlives the loss of one node of several, an earlier one of none."""
        versions = [state._versions for state in self.states if state._versions is not None]
        self.states.clear()
        whole = max((one._whole for one in versions if one._whole is not None), default=-1)
        self.versions = whole if lost_node else max(self.versions, whole)
        if not before <= now or (lost_node and len(before) == 1):
            self.versions = -1


def _floor(world: Sequence[Process]) -> int:
    """The newest step of which a process that lives has the model, and processes that live have every private state."""
    known = [one for process in world if process.alive and (one := memory.of(process.name)) is not None]
    states = [f"rank {rank} of {len(world)}" for rank in range(len(world))]
    whole = [
        one.step
        for one in known
        if one.whole and all(any(other.state(name).get(one.step) is not None for other in known) for name in states)
    ]
    return max(whole, default=-1)


def _timeline(history: tuple[int, ...], step: int) -> tuple[int, ...]:
    """That in which the step was made that counts: behind the last restart that went to an earlier one."""
    last = max(place for place, restart in enumerate(history) if went_to(restart) < step)
    return history[: last + 1]


def check(run: Run) -> None:
    """Against the oracle, with the worlds that the steps that count were made in."""
    last = [one for one in run.checks if one[0] == run.cluster.generation]
    world = len(run.cluster.world)
    made = [run.made[_timeline(run.history, step), step] for step in range(STEPS)]
    worlds = [*map(len, made), world]
    losses, before = oracle(run.job, worlds)
    assert [[some[rank] for rank in range(len(some))] for some in made] == losses
    for _, step, rank, size, mine in last:
        assert size == worlds[step + 1]
        assert mine == before[step + 1][rank], (step, rank)
    assert len({step for _, step, *_ in last} - {STEPS - 1}) <= 1
    assert {rank for _, step, rank, *_ in last if step == STEPS - 1} == {*range(world)}


def play(seed: int, patch: pytest.MonkeyPatch, fills: bool = False) -> Run:
    """One run, checked; says its seed and its story when it fails. `fills`: shared memory is full now and then."""
    chance = random.Random(seed)
    sharded, elastic = chance.random() < 0.6, chance.random() < 0.5
    mode = "counter" if elastic else chance.choice(["counter", "replicate"])
    kinds = chance.choice([("kill",), ("raise", "kill"), ("kill", "node"), ("raise", "kill", "node")])
    job = Job(
        seed, sharded, elastic, mode, chance.randrange(2, 5), chance.choice(["adamw", "sgd"]),
        tiered=chance.random() < 0.4, every=chance.choice([1, 2, 3]), parts=chance.random() < 0.3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="cluster-", dir="/dev/shm") as folder, edges(patch, job.every) as use:
        run = Run(job, Cluster(chance, Path(folder), chance.randrange(1, 6), chance.choice([20, 60, 150, 400]), kinds))
        run.cluster.filling = random.Random(seed) if fills else None
        use(run.cluster)
        try:
            run.run()
            check(run)
        except BaseException:
            print(f"seed {seed}: {job}", *run.cluster.story, sep="\n")
            raise
        finally:
            run.cluster.drain()
    return run


FIRST, RUNS = int(os.environ.get("CLUSTER_SEED", "11")), int(os.environ.get("CLUSTER_RUNS", "16"))


@pytest.mark.torch
def test_any_faults_at_any_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLUSTER_SEED and CLUSTER_RUNS choose others."""
    sources: set[str] = set()
    for seed in range(FIRST, FIRST + RUNS):
        with monkeypatch.context() as patch:
            sources |= {source for _, source in play(seed, patch).restored}
    assert RUNS < 16 or sources >= {"own", "peer", "copy", "shm", "tiered", "fresh"}, sources


@pytest.mark.torch
def test_versions_that_have_no_room_replace_none_that_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = 0
    for seed in range(FIRST, FIRST + RUNS // 2):
        with monkeypatch.context() as patch:
            refused += sum("there is no version of" in text for text in play(seed, patch, fills=True).cluster.story)
    assert RUNS < 16 or refused


FOUND = {
    10: "a world of one node begins anew while another node is away, which then comes back",
    482: "of two timelines the earlier one is continued",
    902: "a node is lost, then a process before the lost ones are back",
    1087: "a node is lost, others take over, and one of them ends too",
    1030: "everything is done when the world becomes smaller",
}
"""Seeds that have failed, and at what."""


@pytest.mark.torch
@pytest.mark.parametrize("seed", FOUND, ids=FOUND.get)
def test_what_failed_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play(seed, monkeypatch)
