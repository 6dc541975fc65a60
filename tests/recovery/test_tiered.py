"""Where no memory has the state any more, it comes from the folder that it was stored in, whole or not at all."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_job import run as run_gloo

from hyperpodrun.agent.wire import node_state
from hyperpodrun.recovery import RecoverableState, shard, shm, tiered
from hyperpodrun.recovery.held import blob

NAMES = ["model", "rank 0 of 2", "rank 1 of 2"]


def shards(*names: str, text: bytes = b"x" * 5000) -> dict[str, shard.Shard]:
    return {name: blob(name, name.encode() + text) for name in names}


def store(path: Path, steps: list[int], *, node: list[str] = NAMES, say: list[str] | None = None, since: int = -1) -> None:
    heard: list[str] = [] if say is None else say
    stored = tiered.Tiered(str(path), 5, heard.append)
    stored.begin(since, (since,), NAMES, node, True)
    for step in steps:
        stored.store(step, shards(*node))
        stored.settle()
    stored.close()
    if say is None:
        assert not heard


def test_what_was_stored_is_found_bit_for_bit(tmp_path: Path) -> None:
    store(tmp_path / "new", [4])
    found = tiered.found(str(tmp_path / "new"))
    assert sorted(version.name for version in found) == sorted(NAMES)
    for version in found:
        assert version.step == 4 and version.history == (-1,) and version.check()
        assert b"".join(bytes(shard.view(piece)) for piece in version.shard.tensors) == version.name.encode() + b"x" * 5000


def test_steps_are_counted_from_one() -> None:
    stored = tiered.Tiered("nowhere", 5, print)
    assert [step for step in range(12) if stored.due(step)] == [4, 9]


@pytest.mark.parametrize("node", [NAMES, NAMES[:2]])
def test_two_whole_steps_before_the_newest_are_kept(tmp_path: Path, node: list[str]) -> None:
    """Also where a node sees no more than its own part."""
    store(tmp_path, [4, 9, 14, 19], node=node)
    assert tiered.steps(str(tmp_path)) == [9, 14, 19] if node == NAMES else [9, 14, 19]


def test_an_old_step_goes_only_when_newer_ones_are_whole(tmp_path: Path) -> None:
    store(tmp_path, [4])
    store(tmp_path, [9, 14, 19], node=NAMES[:2], since=4)  # the other node's part never comes
    assert tiered.steps(str(tmp_path)) == [4, 9, 14, 19]


def test_what_will_be_lived_again_goes(tmp_path: Path) -> None:
    store(tmp_path, [4, 9])
    store(tmp_path, [], since=7)
    assert tiered.steps(str(tmp_path)) == [4]


def test_a_new_beginning_destroys_nothing(tmp_path: Path) -> None:
    store(tmp_path, [4])
    said: list[str] = []
    store(tmp_path, [], say=said)
    assert tiered.steps(str(tmp_path)) == [] and tiered.steps(str(tmp_path / "unused-0")) == [4]
    assert "unused-0" in said[0]


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    store(tmp_path / "file", [4], say=said)
    assert len(said) == 1 and "step 4 is not stored" in said[0]


def test_an_order_to_leave_that_breaks_into_the_wait_leaves_no_writer_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[threading.Thread] = []
    may_copy = threading.Event()
    join, write = threading.Thread.join, shm.write_file

    def broken_into(thread: threading.Thread, timeout: float | None = None) -> None:
        waits.append(thread)
        if len(waits) == 1:
            raise InterruptedError
        may_copy.set()
        join(thread, timeout)

    def late(*given: Any) -> Any:
        assert may_copy.wait(30)
        return write(*given)

    monkeypatch.setattr(shm, "write_file", late)
    stored = tiered.Tiered(str(tmp_path), 5, pytest.fail)
    stored.begin(-1, (-1,), NAMES, NAMES, False)
    stored.store(4, shards(*NAMES))
    monkeypatch.setattr(threading.Thread, "join", broken_into)
    with pytest.raises(InterruptedError):
        stored.close()
    stored.close()
    assert len(waits) == 2 and len(tiered.found(str(tmp_path))) == len(NAMES)
    may_copy.set()


def test_what_a_full_disk_has_half_of_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = os.pwrite, list[int]()

    def full(fd: int, text: bytes, at: int) -> int:
        written.append(len(text))
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, text, at)

    monkeypatch.setattr(os, "pwrite", full)
    said: list[str] = []
    store(tmp_path, [4], say=said)
    assert len(said) == 1 and "step 4 is not stored" in said[0]
    assert not any(found.is_file() for found in tmp_path.rglob("*"))


def test_folders_that_go_meanwhile_or_are_none_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node tidies the same folder; its process may do so while a rank looks already what there is."""
    store(tmp_path, [4, 9])
    (tmp_path / "step-000000007").write_text("no folder")
    monkeypatch.setattr(tiered, "steps", lambda path, steps=tiered.steps: [1, *steps(path)])
    assert {version.step for version in tiered.found(str(tmp_path))} == {4, 9}
    store(tmp_path, [14], since=9)  # and nobody is told that it was not stored


def test_what_was_stored_is_read_whoever_owns_it_and_changed_by_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share gives files to whom it likes (root is nobody there), and a checkpoint may lie on one that can only be read."""
    store(tmp_path, [4])
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    opened = os.open

    def read_only(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", read_only)
    found = tiered.found(str(tmp_path))
    assert len(found) == len(NAMES) and all(version.check() for version in found)
    found[0].shard.tensors[0].fill_(0)
    assert all(version.check() for version in tiered.found(str(tmp_path)))


def test_half_a_file_and_a_flipped_bit_are_no_version(tmp_path: Path) -> None:
    store(tmp_path, [4])
    folder = Path(tiered.folder_of(str(tmp_path), 4))
    first, second, third = sorted(folder.iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    shutil.copy(second, folder / "0000.123.new")
    damaged = bytearray(third.read_bytes())
    damaged[-1] ^= 1
    third.write_bytes(bytes(damaged))
    found = tiered.found(str(tmp_path))
    assert len(found) == 2 and sorted(version.check() for version in found) == [False, True]


def test_the_processes_of_a_node_offer_all_of_it_together(tmp_path: Path) -> None:
    store(tmp_path, [4])
    found = [{version.name for version in tiered.found(str(tmp_path), place, 2, ["model"])} for place in range(2)]
    assert all("model" in names for names in found)
    assert found[0] | found[1] == {*NAMES} and len(found[0]) + len(found[1]) in (4, 5)


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    for options in ({"tiered_every": 5}, {"tiered": tmp_path, "tiered_every": 0}):
        with pytest.raises(ValueError, match="tiered_every"):
            RecoverableState(model=model, **options)  # type: ignore[arg-type]  # as a user would


JOB = r"""
import hashlib, json, os, random, shutil, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from hyperpodrun.agent.wire import names, node_state
from hyperpodrun.inprocess import groups
from hyperpodrun.recovery import RecoverableState, memory

me, path = int(os.environ["RANK"]), os.path.join(os.environ["OUT"], "stored")
os.environ[names.NODE] = f"node{me}"
torch.set_num_threads(1)
meets = iter(range(1000))


class Sampler:
    "Counts the samples of the whole job."
    def __init__(self, rank, world): self.rank, self.world, self.position = rank, world, 0
    def state_dict(self): return {"position": self.position}
    def load_state_dict(self, state): self.position = state["position"]
    def draw(self):
        self.position += self.world
        return torch.full((2, 16), (self.position + self.rank) / 50)


def digest(model, optimizer, sampler):
    def full(t): return t.full_tensor() if hasattr(t, "full_tensor") else t
    tensors = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
    text = b"".join(full(t).detach().numpy().tobytes() for t in tensors)
    return hashlib.sha256(text + repr(sampler.position).encode()).hexdigest()[:12]


def life(job, world, until, **options):
    "A job of its own: processes and their nodes' memory are new."
    meet = next(meets)
    if me >= world: return
    os.environ |= {names.JOB_ID: "test-" + os.path.basename(os.environ["OUT"]) + job, names.GENERATION: job}
    os.environ |= {names.RANK: str(me), names.WORLD_SIZE: str(world)}
    groups.forget_meshes()
    dist.init_process_group("gloo", init_method=os.environ["MEET"] + str(meet), rank=me, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 10), nn.Tanh(), nn.Linear(10, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = Sampler(me, world)
    state = RecoverableState(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, rng="counter",
                             tiered=path, tiered_every=3, **options)
    start = state.restore()
    print("restored", job, start, state.restored_from, digest(model, optimizer, sampler) if start else "", flush=True)
    for step in range(start, until + 1):
        optimizer.zero_grad()
        model(sampler.draw() + random.random()).square().mean().backward()
        with state.update(step): optimizer.step(); scheduler.step()
        print("step", job, step, digest(model, optimizer, sampler), flush=True)
    state._tiered.close()
    dist.barrier()
    dist.destroy_process_group()
    memory.of("default").stop()
    memory.forget("default")
    shutil.rmtree(node_state.folder_of(os.environ[names.JOB_ID], os.environ[names.NODE]), ignore_errors=True)


life("a", 2, 7)
life("b", 2, 6, copies=1)
life("c", 1, 9)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[list[str]]]]:
    """The words of each line that each process printed."""
    folder = tmp_path_factory.mktemp(f"tiered-{os.getpid()}")  # names of jobs are made of it
    yield [[line.split() for line in text.splitlines()] for text in run_gloo(folder, JOB, 2)]
    for path in Path(node_state.BASE).glob(f"{node_state.prefix()}test-{folder.name}*"):
        shutil.rmtree(path)


@pytest.mark.torch
def test_other_jobs_go_on_from_it_in_worlds_of_other_sizes_too(said: list[list[list[str]]]) -> None:
    """Job b repeats what came after the last stored step, c takes up what b stored, alone."""
    restored = {words[1]: words[2:] for words in said[0] if words[0] == "restored"}
    digests = {(words[1], int(words[2])): words[3] for words in said[0] if words[0] == "step"}
    assert restored["a"] == ["0", "fresh"]
    assert restored["b"] == ["6", "tiered", digests["a", 5]]
    assert digests["b", 6] == digests["a", 6]
    assert restored["c"] == ["6", "tiered", digests["a", 5]]
    assert ("c", 9) in digests
    assert [words[1:] for words in said[1] if words[0] == "restored"] == [["a", "0", "fresh"], ["b", *restored["b"]]]
