"""Random states: to be carried (`replicate`) or to be had again from a counter (`counter`).

Theory. `capture` takes all generators that exist in this process: python's, torch's on the CPU, those of the GPUs that this process
has used, numpy's if it is imported. `counter` needs no copy: before each step every generator is seeded from (seed, rank, step), so
that whoever takes a lost rank's place draws the same numbers.

States: none.
Source: torch.get_rng_state, random.getstate, numpy.random.get_state; splitmix64 for the spreading of seeds.
"""

import random
import sys
from typing import Any, Literal

import torch

Mode = Literal["replicate", "counter", "none"]
_MASK = (1 << 64) - 1


def mode_of(rng: bool | str | None) -> Mode:
    """What RecoverableState(rng=...) means. Raises ValueError."""
    if rng is True or rng == "replicate":
        return "replicate"
    if rng == "counter":
        return "counter"
    if rng is None or rng is False or rng == "none":
        return "none"
    raise ValueError(f"rng={rng!r}: it can be True (or 'replicate'), 'counter', or False")


def capture() -> dict[str, Any]:
    """The states of all generators, as plain values and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type for it
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def install(states: dict[str, Any]) -> None:
    """Put them back. GPUs that are not here are left out."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    for place, state in enumerate(states.get("cuda", ())):
        if place < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, place)


def seed_of(seed: int, rank: int, step: int) -> int:
    """64 well mixed bits."""
    value = seed & _MASK
    for word in (rank, step):
        value = (value + 0x9E3779B97F4A7C15 * (word + 1)) & _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


def seed_all(seed: int, rank: int, step: int) -> None:
    """Seed every generator for this step of this rank."""
    seed_with(seed_of(seed, rank, step))


def seed_with(value: int) -> None:
    """Seed every generator with 64 bits."""
    random.seed(value)
    # torch.manual_seed looks for all kinds of devices each time, which takes longer than the rest of a step's mark
    torch.default_generator.manual_seed(value >> 1)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type for it
        torch.cuda.manual_seed_all(value >> 1)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value & 0xFFFFFFFF)
