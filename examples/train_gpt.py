"""Train a small byte-level GPT on text that every Python ships, and survive losing a rank.

    python examples/train_gpt.py                                                   # one process
    HYPERPODRUN_INJECT="sigkill@rank=2,phase=backward,step=70" \\
        hyperpodrun --nproc-per-node 4 --inprocess-restart examples/train_gpt.py   # four, one of which dies

Plain PyTorch: DistributedDataParallel over gloo on CPUs and over NCCL on GPUs. The text is the help topics of `pydoc`, about 450 KB
of English about Python.

What makes it recoverable are five lines: `@HPWrapper` on `main`, `RecoverableState(...)` and `restore()` in `run`, `update(step)`
around the optimizer's step. Under `hyperpodrun --inprocess-restart` the surviving ranks then stay in their processes and the next
step runs from memory; under any other launcher, or none, these lines do nothing, and `--checkpoint` is what there is.

What makes a restart exact, down to the last bit of the loss:

- the batch of a step is a function of (seed, step, rank), so there is no data loader whose position could be lost;
- a checkpoint holds everything else that a step depends on: parameters, optimizer state, the number of steps done and
  the random state of every rank (dropout draws from it);
- a checkpoint is written whole or not at all: to a temporary file, flushed to disk, renamed, with a checksum in front;
- DistributedDataParallel rearranges its gradient buckets after the first backward pass, which changes the order in which
  numbers from different ranks are added. One throw-away pass before the first step puts that behind us (`settle`).
"""

import argparse
import hashlib
import io
import json
import math
import os
import pydoc_data.topics
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hyperpodrun.inprocess import inject
from hyperpodrun.inprocess.wrap import HPWrapper
from hyperpodrun.recovery import RecoverableState

RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
DISTRIBUTED = "RANK" in os.environ  # a launcher started us

VOCABULARY = 256  # every byte is a token
WARMUP_STEPS = 20
CHECKPOINTS_KEPT = 2


def look_around() -> None:
    """Who this process is: a restart may have changed it."""
    global RANK, WORLD_SIZE
    RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def say(text: str) -> None:
    """Print a line, once a job."""
    if RANK == 0:
        print(text, flush=True)


# ------------------------------------------------------------------------------------------------ data


def load_text() -> tuple[Tensor, Tensor]:
    """The training and the validation text: bytes as int64, shapes (n,) and (m,), the last tenth for validation."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def batch_at(text: Tensor, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Inputs and targets of this rank at this step, each (batch, block): the targets are the inputs, one byte on.

    Every rank draws the places of the whole global batch and takes its own rows, so no two ranks share a row by design
    and the answer depends on nothing but (seed, step, rank).
    """
    draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    places = torch.randint(len(text) - options.block, (WORLD_SIZE, options.batch_size), generator=draw)[RANK]
    rows = torch.stack([text[place : place + options.block + 1] for place in places.tolist()])
    return rows[:, :-1], rows[:, 1:]


# ----------------------------------------------------------------------------------------------- model


class Block(nn.Module):
    """One transformer layer, normalised before each half: causal self-attention, then a two-layer perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """A decoder-only transformer over bytes; the embedding is also the output layer."""

    def __init__(self, block: int, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(block, width)
        self.layers = nn.Sequential(*(Block(width, width // 32, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Bytes (batch, time) to logits (batch, time, 256); with targets, to the mean cross-entropy in nats a byte."""
        x = self.tokens(inputs) + self.places.weight[: inputs.shape[1]]
        logits = F.linear(self.norm(self.layers(x)), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: GPT, text: Tensor, options: argparse.Namespace, device: torch.device) -> float:
    """Mean loss over 256 windows spread evenly over the validation text, in nats a byte."""
    model.eval()
    windows = text.unfold(0, options.block + 1, max(1, (len(text) - options.block) // 256))
    losses = [model(rows[:, :-1].to(device), rows[:, 1:].to(device)).item() * len(rows) for rows in windows.split(32)]
    return sum(losses) / len(windows)


@torch.no_grad()
def write_on(model: GPT, start: str, length: int, options: argparse.Namespace, device: torch.device) -> str:
    """Let the model continue `start` by `length` bytes, always drawing from the same random numbers."""
    model.eval()
    draw = torch.Generator().manual_seed(options.seed)
    text = list(start.encode())
    for _ in range(length):
        logits = model(torch.tensor([text[-options.block :]], device=device))[0, -1]
        chances = (logits.float().cpu() / 0.7).softmax(0)
        text.append(int(torch.multinomial(chances, 1, generator=draw)))
    words = " ".join(bytes(text).decode(errors="replace").split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)  # no control codes for the terminal


# ----------------------------------------------------------------------------------------- checkpoints


def random_state(device: torch.device) -> dict[str, Tensor]:
    """This rank's random state."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def save(folder: Path, step: int, model: GPT, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Write the state after `step` steps; all ranks call this, rank 0 writes. File: SHA-256 (32 bytes), then torch's format."""
    states: list[Any] = [random_state(device)]
    if DISTRIBUTED:
        mine = states[0]
        states = [None] * WORLD_SIZE
        dist.all_gather_object(states, mine)
    if RANK != 0:
        return
    buffer = io.BytesIO()
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": states}, buffer)
    body = buffer.getvalue()
    final = folder / f"step-{step:08d}.pt"
    draft = folder / f"{final.name}.{os.getpid()}.tmp"
    folder.mkdir(parents=True, exist_ok=True)
    with draft.open("wb") as file:
        file.write(hashlib.sha256(body).digest())
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(final)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # the new name is on disk too
    finally:
        os.close(directory)
    for old in sorted(folder.glob("step-*.pt"))[:-CHECKPOINTS_KEPT]:
        old.unlink()


def newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, or None. Drafts of a killed writer are removed, damaged files passed over."""
    for draft in folder.glob("step-*.tmp"):
        say(f"removing {draft.name}: its writer was killed in the middle of it")
        draft.unlink()
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        data = path.read_bytes()
        if hashlib.sha256(data[32:]).digest() != data[:32]:
            say(f"ignoring {path.name}: the file is damaged (its checksum does not match); trying the one before")
            continue
        state: dict[str, Any] = torch.load(io.BytesIO(data[32:]), map_location="cpu", weights_only=True)
        return state
    return None


def resume(folder: Path, model: GPT, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Load the newest checkpoint; returns how many steps are done. Rank 0 reads and tells the others, so all agree on one."""
    found: list[Any] = [newest_checkpoint(folder) if RANK == 0 else None]
    if DISTRIBUTED:
        dist.broadcast_object_list(found, src=0)
    state = found[0]
    if state is None:
        return 0
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if len(state["random"]) > RANK:  # a job that has grown has ranks without a past
        torch.set_rng_state(state["random"][RANK]["cpu"])
        if device.type == "cuda" and "cuda" in state["random"][RANK]:
            torch.cuda.set_rng_state(state["random"][RANK]["cuda"], device)
    say(f"resumed from the checkpoint of step {state['step']}")
    return int(state["step"])


# ------------------------------------------------------------------------------------------ the training


class StopRequest:
    """Turns SIGTERM into a wish: the running step is finished, the state saved, and the process ends in good order."""

    def __init__(self) -> None:
        self.wanted = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


def over_all_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sum of each value over all ranks."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    if DISTRIBUTED:
        dist.all_reduce(sums)
    return [float(value) for value in sums.tolist()]


def settle(model: nn.Module, text: Tensor, options: argparse.Namespace, device: torch.device) -> None:
    """One pass whose result is thrown away, after which gradients are summed in their final order (see the top)."""
    inputs, targets = batch_at(text, 0, options)
    model(inputs.to(device), targets.to(device)).backward()
    model.zero_grad()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: RecoverableState,
    text: Tensor,
    steps: range,
    options: argparse.Namespace,
    device: torch.device,
) -> Iterator[tuple[int, float, bool]]:
    """Take these steps. After each yields (steps done, mean loss over all ranks, whether to stop now)."""
    stop = StopRequest()
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        inputs, targets = batch_at(text, step, options)
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        inject.point("backward", step)  # a place for rehearsed faults (HYPERPODRUN_INJECT)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with state.update(step):
            optimizer.step()
        optimizer.zero_grad()
        # The signal does not reach all ranks within the same step, so the wish to stop travels with the loss.
        total, stops = over_all_ranks([loss.item(), float(stop.wanted)], device)
        yield step + 1, total / WORLD_SIZE, stops > 0


def choose_device(wanted: str) -> torch.device:
    """This rank's device: the CPU, or the GPU of its local rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() <= LOCAL_RANK:
        sys.exit(f"local rank {LOCAL_RANK} has no GPU of its own: start {torch.cuda.device_count()} ranks, or use --device cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic; read at its first use
    torch.cuda.set_device(LOCAL_RANK)
    return torch.device("cuda", LOCAL_RANK)


def run(options: argparse.Namespace) -> None:
    """Train, save, resume, and show what was learnt."""
    device = choose_device(options.device)
    torch.use_deterministic_algorithms(True)
    training_text, validation_text = load_text()

    torch.manual_seed(options.seed)  # the same parameters on all ranks
    model = GPT(options.block, options.layers, options.width, options.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
    backend = f"{dist.get_backend()}, world size {WORLD_SIZE}" if DISTRIBUTED else "one process"
    size = sum(parameter.numel() for parameter in model.parameters())
    say(f"GPT with {size:,} parameters on {device.type} ({backend}), {len(training_text):,} bytes of text")

    wrapped = DistributedDataParallel(model) if DISTRIBUTED else model
    settle(wrapped, training_text, options, device)
    torch.manual_seed(options.seed * 1_000_003 + RANK)  # other dropout on each rank
    state = RecoverableState(model=model, optimizer=optimizer)
    resumed_at = state.restore()
    if not resumed_at and options.checkpoint:
        resumed_at = resume(options.checkpoint, model, optimizer, device)

    losses = options.losses.open("a") if options.losses and RANK == 0 else None
    logged, since = resumed_at, time.monotonic()
    steps = range(resumed_at, options.steps)
    for done, loss, stopping in train(wrapped, optimizer, state, training_text, steps, options, device):
        last = stopping or done == options.steps
        if losses:
            print(json.dumps({"step": done, "loss": loss.hex()}), file=losses, flush=True)
        if last or done % options.log_every == 0:
            rate = (done - logged) * options.batch_size * options.block * WORLD_SIZE / (time.monotonic() - since)
            say(f"step {done:>5}/{options.steps}   loss {loss:.4f}   {rate:>8,.0f} tokens/s")
            logged, since = done, time.monotonic()
        if options.checkpoint and (last or done % options.checkpoint_every == 0):
            save(options.checkpoint, done, model, optimizer, device)
        if stopping:
            kept = f"saved; the same command goes on from step {done}" if options.checkpoint else "not saved: no --checkpoint"
            say(f"asked to stop (SIGTERM): {kept}")
            return
    if RANK == 0:
        loss = validate(model, validation_text, options, device)
        say(f"validation loss {loss:.4f} nats a byte ({loss / math.log(2):.2f} bits)")
        if options.sample:
            say(f"the model writes: {write_on(model, 'The ', options.sample, options, device)}")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on the help topics of pydoc.")
    add = parser.add_argument
    add("--steps", type=int, default=200, help="train until so many steps are done (200)")
    add("--batch-size", type=int, default=8, help="rows a rank and step (8)")
    add("--block", type=int, default=64, help="bytes a row: how far the model looks back (64)")
    add("--layers", type=int, default=2, help="transformer layers (2)")
    add("--width", type=int, default=128, help="size of a token's vector, a multiple of 32 (128)")
    add("--dropout", type=float, default=0.05, help="share of activations dropped (0.05)")
    add("--lr", type=float, default=3e-3, help="learning rate after 20 steps of warm-up (0.003)")
    add("--seed", type=int, default=1, help="of parameters, batches, dropout and the sample (1)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU when there is one")
    add("--checkpoint", type=Path, metavar="DIR", help="save here, and resume from what is here")
    add("--checkpoint-every", type=int, default=20, metavar="STEPS", help="steps between two checkpoints (20)")
    add("--log-every", type=int, default=10, metavar="STEPS", help="steps between two progress lines (10)")
    add("--losses", type=Path, metavar="FILE", help="append the exact loss of each step (JSON lines, hexadecimal floats)")
    add("--sample", type=int, default=240, metavar="BYTES", help="length of the text written at the end (240; 0: none)")
    options = parser.parse_args()
    for name in ("steps", "batch_size", "block", "layers", "width", "checkpoint_every", "log_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if options.width % 32:
        parser.error(f"--width must be a multiple of 32 (the size of an attention head), not {options.width}")
    return options


@HPWrapper
def main(options: argparse.Namespace) -> None:
    """Join the other ranks, if there are any, and train. Runs again, in the same process, after a fault anywhere in the job."""
    look_around()
    if DISTRIBUTED:
        dist.init_process_group("gloo" if choose_device(options.device).type == "cpu" else "nccl")
    run(options)
    if DISTRIBUTED:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse_options())
