"""A part is a value: its fields are plain and say everything about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting.norms import Norms
from fedveil.errors import UserError
from fedveil.parts import SGD, Bound, Clip, Constant, Noise
from fedveil.parts.bound import within
from fedveil.parts.schedule import Schedule
from fedveil.recipe import Recipe

BASE = algorithms.dp_fedavg(noise_multiplier=1.0)


@dataclass(frozen=True)
class Each(Bound):
    """Clips with any settings."""

    limits: Any

    def scale(self, norms: Tensor) -> Tensor:
        return Clip(1.0).scale(norms)

    def norms(self, dim: int) -> Norms:
        return within(1.0, dim)


def of_each(limits: Any) -> Recipe:
    return replace(BASE, bound=Each(limits))


REFUSED: dict[str, tuple[Any, str]] = {
    "an array": (np.ones(3), r"limits is a ndarray. Write a tuple, such as tuple\("),
    "a tensor": (torch.ones(3), r"limits is a Tensor. Write a tuple"),
    "a list": ([1.0, 2.0], r"limits is \[1.0, 2.0\]. Write a tuple"),
    "a set": ({1.0}, "Write a tuple"),
    "a dictionary": ({"a": 1.0}, r"limits is {'a': 1.0}. Write a tuple of tuples"),
    "a function": (lambda x: x, "limits is a function. Write a frozen dataclass"),
    "an object": (object(), "limits is an object. Write numbers, texts, tuples of these"),
    "a complex number": (1j, r"limits is 1j. Write numbers"),
    "an array in a tuple": ((1.0, np.ones(2)), "an item of limits is a ndarray"),
    "none in a tuple": ((1.0, None), "an item of limits is None. recipe.toml has no value for it"),
    "an array in a part": (Each(np.ones(2)), "Each: limits is a ndarray"),
    "an array in a part in a tuple": ((Each(np.ones(2)),), "Each: limits is a ndarray"),
}


@pytest.mark.parametrize(("value", "words"), REFUSED.values(), ids=REFUSED)
def test_fields_that_do_not_identify_a_part_are_refused(value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        of_each(value)


TAKEN = [1, 0.5, "x", True, None, (), (1, (2.0, "y")), Clip(2.0), (Clip(1.0), Each(3))]


@pytest.mark.parametrize("value", [*TAKEN, np.float64(0.5), np.int64(3), math.nan], ids=repr)
def test_plain_fields_are_taken(value: Any) -> None:
    assert of_each(value).bound is not None


class Bare(Bound):
    """Keeps its setting as an attribute."""

    def __init__(self, norm: float) -> None:
        self.norm = norm

    scale, norms = Each.scale, Each.norms


@dataclass
class Thawed(Bound):
    """Can be changed."""

    norm: float

    scale, norms = Each.scale, Each.norms  # type: ignore[assignment]


@dataclass(frozen=True)
class Hiding(Clip):
    """Takes more than it declares."""

    def __init__(self, norm: float, limits: Any = ()) -> None:
        object.__setattr__(self, "norm", norm)
        object.__setattr__(self, "limits", limits)


@dataclass(frozen=True)
class Percent(Each):
    """Changes its field each time it is built."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", self.limits / 100)


@dataclass(frozen=True, eq=False)
class Unequal(Bound):
    """Is equal to nothing."""

    norm: float

    scale, norms = Each.scale, Each.norms  # type: ignore[assignment]


@dataclass(frozen=True)
class Positional(Clip):
    """Is built from something else."""

    def __init__(self, square: float) -> None:
        object.__setattr__(self, "norm", square**0.5)


class Halving(Schedule):
    """A rate that is no dataclass."""

    def __call__(self, round: int) -> float:
        return 0.5**round


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Bare(1.0), "Bare is not a frozen dataclass"),
        (lambda: Thawed(1.0), "Thawed is not a frozen dataclass"),
        (lambda: Hiding(1.0, np.ones(9)), "Hiding keeps `limits` beside its fields"),
        (lambda: Percent(150.0), "Percent changes when it is built again from its fields"),
        (lambda: Unequal(1.0), "Unequal changes when .*no eq=False"),
        (lambda: Positional(4.0), "Positional cannot be built again from its fields: .*norm"),
    ],
)
def test_a_part_that_is_not_what_its_fields_say_is_refused(
    build: Callable[[], Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        replace(BASE, bound=build())


def test_a_part_in_a_field_of_fedveil_s_parts_is_a_value_too() -> None:
    with pytest.raises(UserError, match="learning_rate is a Halving"):
        replace(BASE, local=SGD(Halving(), steps=1))
    assert replace(BASE, local=SGD(Constant(0.2), steps=1)).local.steps == 1


def test_what_follows_from_the_fields_may_be_cached() -> None:
    @dataclass(frozen=True)
    class Caching(Each):
        @cached_property
        def table(self) -> np.ndarray:
            return np.ones(3)

    bound = Caching(1.0)
    assert bound.table.sum() == 3
    assert replace(BASE, bound=bound).bound is bound


def test_a_noise_that_inherits_everything_needs_no_decorator() -> None:
    class Same(type(BASE.noise)):  # type: ignore[misc]
        event = Noise.event

    assert replace(BASE, noise=Same(1.0)).noise.multiplier == 1.0
