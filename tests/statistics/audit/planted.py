"""Bugs planted on purpose, each in a recipe that claims what it does not keep.

The ten of the privacy issue and thirteen more. Each is looked for by the audit of a run, by the
black-box test of its noise, and by the contract suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms, loop, recipe
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.audit.mechanism import audit_noise
from fedveil.audit.run import audit
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Clip, in_range
from fedveil.parts.cohort import Poisson
from fedveil.parts.discrete import DiscreteGaussian, PublishedLaplace
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import Gaussian
from fedveil.parts.quantize import StochasticRound
from fedveil.privacy.guarantee import Guarantee
from fedveil.recipe import Recipe
from fedveil.testing.cohorts import check_cohort
from fedveil.testing.noises import check_noise
from fedveil.testing.quantizers import check_quantizer
from fedveil.testing.recipes import (
    check_count,
    check_denominator,
    check_fresh_noise,
    check_neighbours,
    check_noise_of_rounds,
)
from tests.contracts.test_contracts import check_remark
from tests.mutations.making import line, returning
from tests.mutations.test_core import noise_before_the_clip

INSIDE = "fedveil.parts.bound"  # mistakes of our own: from outside no claim would be believed

CLIPPED = algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=1.0)
ADAPTED = algorithms.dp_fedavg_adaptive(start=0.3, rate=0.5, count_noise=2.0, noise_multiplier=2.0)
COMPENSATED = algorithms.fed_alpha_normec(rate=0.6, noise_multiplier=2.0)
DISCRETE = algorithms.dp_norm_fedavg_discrete(rate=0.5, levels=64, sigma=200.0, support=1500)


# ------------------------------------------------------------------- the list of the privacy issue


class Halved(Gaussian):
    __module__ = INSIDE

    def draw(self, *arguments: Any) -> Tensor:
        return super().draw(*arguments) / 2


class Unclipped(Clip):
    __module__ = INSIDE

    def scale(self, norms: Tensor) -> Tensor:
        return torch.ones_like(norms)


class Shuffled(Poisson):
    """Every unit once an epoch."""

    __module__ = INSIDE

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        left = getattr(self, "left", [])
        if not left:
            left = rng.permutation(population).tolist()
        size = round(self.rate * population)
        object.__setattr__(self, "left", left[size:])
        return np.sort(left[:size]).astype(int)


class Reused(Gaussian):
    """The same noise in every round."""

    __module__ = INSIDE

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return super().draw(message, arrived, expected, np.random.default_rng(5))


class Backwards(AdaptiveClip):
    """A threshold that grows when most updates are short."""

    __module__ = INSIDE

    def next(self, norm: float, *rest: Any) -> float:
        return norm**2 / super().next(norm, *rest)


class Sold(PublishedLaplace):
    """Das et al. taken at their word."""

    __module__ = INSIDE

    def event(self, message: Norms, *rest: Any) -> events.Release:
        return events.ApproximateRelease(self.epsilon, 2.0**-message.dim)


# ---------------------------------------------------------------------------------- and more


class Thin(Gaussian):
    """σ/√d a coordinate, as if the whole vector had σ."""

    __module__ = INSIDE

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        return super().draw(message, *rest) / math.sqrt(message.dim)


class OnTheMean(Gaussian):
    """Noise of the mean, added to the sum."""

    __module__ = INSIDE

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return super().draw(message, arrived, expected, rng) / expected


class HalfOfIt(Gaussian):
    """The second half of the model was forgotten, the first has more."""

    __module__ = INSIDE

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        noise = super().draw(message, *rest) * math.sqrt(2)
        noise[: len(noise) // 2] = 0
        return noise


class Laplace(Gaussian):
    """Laplace noise of the same deviation, accounted as Gaussian, cut at two deviations."""

    __module__ = INSIDE

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        deviation = self.deviation(message)
        drawn = rng.laplace(scale=deviation / math.sqrt(2), size=message.dim)
        return torch.from_numpy(drawn.clip(-2 * deviation, 2 * deviation))


class PerLayer(Clip):
    """Each of four layers clipped to C, so that all of them are 2·C."""

    __module__ = INSIDE

    def scale(self, norms: Tensor) -> Tensor:
        return Clip(2 * self.norm).scale(norms)


class ByTheMean(Clip):
    """The sum is short enough: all are scaled by the mean length, so one can be all of it."""

    __module__ = INSIDE

    def scale(self, norms: Tensor) -> Tensor:
        mean = norms.mean().clamp_min(1e-30)
        return in_range(torch.full_like(norms, float(min(self.norm / mean, 1.0))))


class Leaking(ErrorCompensation):
    """The server's memory is the clients' own, without noise."""

    __module__ = INSIDE

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        if message.dim() == 2:
            object.__setattr__(self, "clean", message.mean(dim=0))
            return super().learn(remembered, message)
        return super().learn(remembered, getattr(self, "clean", message))


class Outwards(StochasticRound):
    """Rounded away from zero, beyond the bound."""

    __module__ = INSIDE

    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        steps = super().__call__(rows, bound, rng)
        return 2 * steps + steps.sign()


class FirstOnes(Poisson):
    """The first q·n in every round."""

    __module__ = INSIDE

    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        return np.arange(round(self.rate * population))


class HalfRate(Poisson):
    """Drawn at q, accounted at q/2."""

    __module__ = INSIDE

    def amplify(self, event: events.Round, population: int) -> events.Round:
        assert isinstance(event, events.GaussianRelease)
        return events.PoissonSampled(self.rate / 2, event)


class SameForAll(DiscreteGaussian):
    """Every client draws from one seed."""

    __module__ = INSIDE

    def each(self, message: Norms, rng: Any) -> np.ndarray:
        return super().each(message, np.random.default_rng(9))


class Cheap(AdaptiveClip):
    """The count's noise is not counted."""

    __module__ = INSIDE

    def joined(self, release: events.Release, *rest: Any) -> events.Release:
        return release


# ---------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Planted:
    """A bug in a recipe, and the check of the contract suite that is meant for it."""

    mistake: str
    recipe: Recipe
    contract: Callable[[Recipe], Any]
    patch: Callable[[Any], None] | None = None  # where it is not in a part but in the loop


def part(kind: str, check: Callable[[Any], Any]) -> Callable[[Recipe], Any]:
    """The contract of one part of the recipe."""
    return lambda recipe: check(getattr(recipe, kind))


def check_median(recipe: Recipe) -> None:
    """From far above, the threshold comes to the median of the lengths."""
    bound, rng = recipe.bound, np.random.default_rng(0)
    assert isinstance(bound, AdaptiveClip)
    lengths, norm = np.exp(rng.normal(size=200)), 100.0
    for _ in range(80):
        norm = bound.next(norm, int((lengths <= norm).sum()), 200, 200.0, rng)
    assert 0.75 < norm < 1.33, f"the clip went to {norm:.3g} medians"


weights = line(
    loop._Work,
    "messages",
    (
        "scales_of(norms, self.bound, self.limits.bounded)",
        "scales_of(norms, self.bound, self.limits.bounded)"
        " * group.data.sizes[torch.from_numpy(group.clients)]",
    ),
)

realised = line(
    loop,
    "conclude_round",
    ("= expected_of(recipe.cohort, population)", "= float(max(came, 1))"),
)

LISTED = [
    Planted(
        "noise halved",
        replace(CLIPPED, noise=Halved(1.0)),
        check_noise_of_rounds,
    ),
    Planted("clip skipped", replace(CLIPPED, bound=Unclipped(0.7)), check_neighbours),
    Planted("realised denominator", CLIPPED, check_denominator, realised),
    Planted("noise before the clip", CLIPPED, check_noise_of_rounds, noise_before_the_clip),
    Planted("weights by example count", CLIPPED, check_neighbours, weights),
    Planted(
        "shuffled batches as Poisson",
        replace(CLIPPED, cohort=Shuffled(0.2)),
        part("cohort", check_cohort),
    ),
    Planted(
        "δ of 1/n and more unremarked",
        CLIPPED,
        check_remark,
        returning(Guarantee, "warning", lambda self: ""),
    ),
    Planted("reused noise", replace(CLIPPED, noise=Reused(1.0)), check_fresh_noise),
    Planted(
        "adaptive clip with its sign flipped",
        replace(ADAPTED, bound=Backwards(0.3, count_noise=2.0)),
        check_median,
    ),
    Planted(
        "TDL with the paper's m sold as private",
        replace(
            algorithms.dp_norm_fedavg_qtdl(clients=5, alpha=1.0, support=1), noise=Sold(epsilon=0.5)
        ),
        part("noise", check_noise),
    ),
]
MORE = [
    Planted("noise of σ/√d", replace(CLIPPED, noise=Thin(1.0)), check_noise_of_rounds),
    Planted(
        "noise of the mean on the sum",
        replace(CLIPPED, noise=OnTheMean(1.0)),
        check_noise_of_rounds,
    ),
    Planted(
        "no noise on half of the model",
        replace(CLIPPED, noise=HalfOfIt(1.0)),
        part("noise", check_noise),
    ),
    Planted(
        "cut Laplace noise accounted as Gaussian",
        replace(CLIPPED, noise=Laplace(1.0)),
        part("noise", check_noise),
    ),
    Planted(
        "client-side noise without top-up",
        replace(CLIPPED, noise=Gaussian(1.0, "client")),
        check_noise_of_rounds,
        line(Gaussian, "draw", ("max(arrived / expected, 1.0)", "(arrived / expected)")),
    ),
    Planted("a bound for each layer", replace(CLIPPED, bound=PerLayer(0.7)), check_neighbours),
    Planted("clip by the mean length", replace(CLIPPED, bound=ByTheMean(0.7)), check_neighbours),
    Planted(
        "the clients' memory released",
        replace(COMPENSATED, memory=Leaking(0.01)),
        check_noise_of_rounds,
    ),
    Planted(
        "a quantizer beyond its bound",
        replace(
            algorithms.dp_fedavg(clip=0.7, rate=0.5, levels=64, noise_multiplier=1.0),
            quantize=Outwards(64),
        ),
        part("quantize", check_quantizer),
    ),
    Planted(
        "the first clients in every round",
        replace(CLIPPED, cohort=FirstOnes(0.5)),
        part("cohort", check_cohort),
    ),
    Planted(
        "amplified at half the rate",
        replace(CLIPPED, cohort=HalfRate(0.5)),
        part("cohort", check_cohort),
        returning(recipe, "contradiction", lambda *_: None),  # which refuses this rate
    ),
    Planted(
        "one seed for all clients' noise",
        replace(DISCRETE, noise=SameForAll(200.0, 1500)),
        check_fresh_noise,
    ),
    Planted(
        "a count that is not accounted",
        replace(ADAPTED, bound=Cheap(0.3, count_noise=2.0)),
        check_count,
    ),
]
PLANTED = LISTED + MORE


# ---------------------------------------------------------------------------------- who notices


def by_audit(recipe: Recipe, data: Federated, rounds: int = 6) -> bool:
    """Whether a run of it contradicts its proof."""
    found = audit(recipe, data, rounds=rounds, canaries=100, delta=1e-4, engine="factored")
    return found.alarm


def by_noise(recipe: Recipe) -> bool:
    """Whether draws of its noise do."""
    return audit_noise(recipe.noise, np.random.default_rng(0), trials=2000).alarm


def by_contract(planted: Planted) -> bool:
    """Whether the contract suite says so."""
    try:
        planted.contract(planted.recipe)
    except (AssertionError, UserError):
        return True
    return False


WATCHERS: dict[str, Callable[[Planted, Federated], bool]] = {
    "audit of a run": lambda planted, data: by_audit(planted.recipe, data),
    "test of its noise": lambda planted, data: by_noise(planted.recipe),
    "contract suite": lambda planted, data: by_contract(planted),
}


def noticed(
    planted: Planted, data: Federated, watchers: Iterable[str] = tuple(WATCHERS)
) -> dict[str, bool]:
    """Which of these watchers notice the bug."""
    with pytest.MonkeyPatch.context() as patch:
        if planted.patch is not None:
            planted.patch(patch)
        return {name: WATCHERS[name](planted, data) for name in watchers}
