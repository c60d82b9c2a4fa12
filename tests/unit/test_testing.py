"""fedveil.testing is there for users: one import, and a sentence where its extra is missing."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms, testing
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.parts import Begin, Bound, Gaussian, Noise, Poisson, Server, StochasticRound, Tensors
from fedveil.testing import (
    check_bound,
    check_cohort,
    check_noise,
    check_quantizer,
    check_recipe,
    check_server,
)


def test_every_check_is_exported_and_says_what_it_cannot_show() -> None:
    assert set(testing.__all__) == set(dir(testing))
    for name in testing.__all__:
        check = getattr(testing, name)
        assert check.__name__ == name
        assert "\n\n" in check.__doc__  # what it proves, and what it does not


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "fedveil.testing.bounds", raising=False)
    with pytest.raises(ImportError, match=r"needs hypothesis, .*pip install 'fedveil\[test\]'"):
        from fedveil.testing import check_bound  # noqa: F401
    from fedveil.testing import check_cohort, check_recipe

    assert callable(check_cohort)
    assert callable(check_recipe)


def test_an_unknown_check_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'fedveil.testing' has no attribute 'check_luck'"):
        _ = testing.check_luck  # type: ignore[attr-defined]


# What a check is for


@dataclass(frozen=True)
class PerCoordinate(Bound):
    """A limit of its own for each coordinate."""

    limits: tuple[float, ...]
    reach: float = 0.999
    radial = False

    def rows(self, updates: Tensor) -> Tensor:
        limits = self.reach * torch.tensor(self.limits)
        return torch.minimum(torch.maximum(updates, -limits), limits)

    def norms(self, dim: int) -> Norms:
        own = self.limits[:dim]
        return Norms(dim, sum(own), math.hypot(*own), max(own))


def test_a_bound_that_is_made_for_one_model_is_checked_in_its_dimension() -> None:
    limits = tuple(0.01 * (1 + k % 7) for k in range(40))
    check_bound(PerCoordinate(limits), dim=40)
    with pytest.raises(AssertionError, match="PerCoordinate"):
        check_bound(PerCoordinate(limits, reach=1.1), dim=40)


@dataclass(frozen=True)
class Growing(Bound):
    """A limit that grows with every use."""

    norm: float = 1.0
    used: list[int] = field(default_factory=list)
    radial = False

    def rows(self, updates: Tensor) -> Tensor:
        self.used.append(1)
        length = updates.norm(dim=1, keepdim=True).clamp_min(1e-30)
        return updates * (0.9999 * self.norm / length).clamp_max(1)

    def norms(self, dim: int) -> Norms:
        now = self.norm * (1 + len(self.used))
        return Norms(dim, now * math.sqrt(dim), now, now)


def test_a_bound_that_changes_with_its_use_is_found() -> None:
    with pytest.raises(AssertionError, match="keep nothing in the bound between updates"):
        check_bound(Growing())


@dataclass(frozen=True)
class Fixed(Noise):
    """Noise of a fixed amount, which no budget changes."""

    sigma: float = 2.0

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.from_numpy(rng.normal(0, self.sigma, message.dim))

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(self.sigma / sensitivity.l2)


def test_noise_of_a_fixed_amount_has_no_level_to_check() -> None:
    check_noise(Fixed())
    with pytest.raises(AssertionError, match="deviation"):
        check_noise(replace_event(Fixed(), 1.5))


def replace_event(noise: Fixed, factor: float) -> Noise:
    """The noise with an event that claims more."""

    class Claiming(Fixed):
        def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
            return events.GaussianRelease(factor * self.sigma / sensitivity.l2)

    return Claiming(noise.sigma)


@dataclass(frozen=True)
class Counting(Server):
    """An int in its state."""

    def initial_state(self, begin: Begin) -> Tensors:
        return {"rounds": 0}  # type: ignore[dict-item]

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        return x - descent, {"rounds": state["rounds"] + 1}


def test_a_state_that_cannot_be_saved_is_named() -> None:
    with pytest.raises(AssertionError, match="Server Counting keeps 'rounds' as 0"):
        check_server(Counting())


# Parts that draw from a generator of their own


class Own(Poisson):
    def draw(self, population: int, rng: Any, state: Any = None) -> np.ndarray:
        return super().draw(population, np.random.default_rng(), state)


class OwnNoise(Gaussian):
    event = Gaussian.event

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return super().draw(message, arrived, expected, np.random.default_rng())


class OwnCoins(StochasticRound):
    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        return super().__call__(rows, bound, np.random.default_rng())


class GlobalNoise(Gaussian):
    event = Gaussian.event

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.randn(message.dim, dtype=torch.float64) * self.deviation(message)


RECIPE = algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=2.0)
DRAWING: dict[str, tuple[Callable[[Any], None], Any]] = {
    "noise": (check_noise, OwnNoise(2.0)),
    "noise of torch": (check_noise, GlobalNoise(2.0)),
    "cohort": (check_cohort, Own(0.5)),
    "quantizer": (check_quantizer, OwnCoins(16)),
    "recipe's noise": (check_recipe, replace(RECIPE, noise=OwnNoise(2.0))),
    "recipe's cohort": (check_recipe, replace(RECIPE, cohort=Own(0.5))),
    "recipe's noise of torch": (check_recipe, replace(RECIPE, noise=GlobalNoise(2.0))),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_part_that_draws_from_a_generator_of_its_own_is_found(name: str) -> None:
    check, part = DRAWING[name]
    with pytest.raises(AssertionError, match=r"draw from `rng` alone|Draw from the `rng`"):
        check(part)
