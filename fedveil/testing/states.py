"""What every part's state between rounds must be like: tensors that a checkpoint can hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fedveil.engines.asking import refuse_other_form, refuse_unsaved
from fedveil.errors import UserError
from fedveil.parts.bound import Bound
from fedveil.parts.part import Begin, Part, Tensors

ARRIVED = 1000  # updates of a round in which a bound adapts


def first_state(part: Part, begin: Begin) -> Tensors:
    """The state of a part before the first round. Raise unless a checkpoint can hold it."""
    found = part.initial_state(begin)
    with failing():
        refuse_unsaved(part, found)
    return found


def check_same_form(part: Part, before: Tensors, after: Tensors) -> None:
    """Raise unless a state has the same names, shapes and types as the one before it."""
    with failing():
        refuse_unsaved(part, after)
        refuse_other_form(part, before, after)


@contextmanager
def failing() -> Iterator[None]:
    """What the loop refuses is a mistake in the part."""
    try:
        yield
    except UserError as problem:
        raise AssertionError(str(problem)) from problem


def copied(state: Tensors) -> Tensors:
    """The same values in memory of their own."""
    return {name: leaf.clone() for name, leaf in state.items()}


def driven(bound: Bound, share: float, rounds: int) -> Tensors:
    """The state of a bound that adapts after rounds with a given share of short updates."""
    rng = np.random.default_rng(0)
    state = first_state(bound, Begin(torch.zeros(1), ARRIVED, rounds, rng))
    for _ in range(rounds):
        state = bound.step(state, round(share * ARRIVED), ARRIVED, float(ARRIVED), rng)
    return state
