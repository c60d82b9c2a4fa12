"""What every part's state between rounds must be like: tensors that a checkpoint can hold."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedveil.parts.bound import Bound
from fedveil.parts.part import Begin, Part, Tensors

ARRIVED = 1000  # updates of a round in which a bound adapts


def check_same_form(part: Part, before: Tensors, after: Tensors) -> None:
    """Raise unless a state has the same names, shapes and types as the one before it."""
    for name, leaf in after.items():
        assert isinstance(leaf, Tensor), (
            f"{part} keeps {name} as a {type(leaf).__name__}. A checkpoint stores tensors only"
        )
    assert before.keys() == after.keys(), (
        f"{part} kept {sorted(before)} and then {sorted(after)}. Declare all of it in initial_state"
    )
    for name, leaf in after.items():
        first = before[name]
        assert (first.shape, first.dtype) == (leaf.shape, leaf.dtype), (
            f"{part} kept {name} as {tuple(first.shape)} {first.dtype} and then as "
            f"{tuple(leaf.shape)} {leaf.dtype}"
        )


def copied(state: Tensors) -> Tensors:
    """The same values in memory of their own."""
    return {name: leaf.clone() for name, leaf in state.items()}


def driven(bound: Bound, share: float, rounds: int) -> Tensors:
    """The state of a bound that adapts after rounds with a given share of short updates."""
    rng = np.random.default_rng(0)
    state = bound.initial_state(Begin(torch.zeros(1), ARRIVED, rounds, rng))
    for _ in range(rounds):
        state = bound.step(state, round(share * ARRIVED), ARRIVED, float(ARRIVED), rng)
    return state
