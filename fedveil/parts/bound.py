"""bound: limit the norm of every message.

A radial bound scales an update by a function of its norm, b = s(‖w‖)·w, so engines need no single
update. Any other bound works on rows, and its contract gives the resulting norms.

The contract also holds in floating point. Scales are reduced by `MARGIN`, which is more than the
rounding error of one float32 product, so ‖b‖ ≤ C for the numbers that are actually summed. Norms
below `TINY` count as zero, because their direction is rounding error. An update so large that
float32 cannot represent its scale is sent as zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.events import GaussianRelease, NonPrivate, Release, alike
from fedveil.accounting.norms import Adjacency, Norms
from fedveil.parts.checks import check, not_negative, number, positive
from fedveil.parts.part import Begin, Part, Tensors

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

MARGIN = 1.0 - 2.0**-20
TINY = 2.0**-100
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # scales that float32 represents without loss
LEAST_NORM, LARGEST_NORM = 1e-12, 1e12  # limits of an adaptive threshold
LEVELS = tuple(10.0**k for k in range(-12, 13))  # of an adaptive threshold, over its first value


class Bound(Part, ABC):
    """A bound on one message, and the norms it guarantees."""

    claims: ClassVar = ("threshold", "stretched", "joined", "released")

    radial: bool = True  # whether b = s(‖w‖)·w; else `rows` is called instead of `scale`
    adapts: bool = False  # whether its threshold changes from round to round
    leaks: bool = False  # whether it was taken from the data without noise; `leak` describes it
    awaits_probe: bool = False  # whether a run without noise must still measure its threshold

    @abstractmethod
    def norms(self, dim: int) -> Norms:
        """The maximum norms of one bounded message."""

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) of a radial bound, for finite norms r ≥ 0 in float64, [clients]."""
        raise NotImplementedError(f"{type(self).__name__} is radial but does not define `scale`.")

    def rows(self, updates: Tensor) -> Tensor:
        """b of a bound that is not radial, for finite updates in float32, [clients, dim]."""
        raise NotImplementedError(f"{type(self).__name__} is not radial and must define `rows`.")

    @property
    def threshold(self) -> float | None:
        """The (first) C beyond which updates are clipped; None if no advice on it is possible."""
        return None

    @property
    def leak(self) -> str:
        """What was taken from the data without noise, for the statement."""
        return f"{self!r} was taken from these data without noise. No ε covers it."

    @property
    def released(self) -> str:
        """What a round releases in addition to the model, for the statement."""
        return ", whatever the bound's steps release" if self.adapts else ""

    def at(self, state: Tensors) -> Bound:
        """The bound of one round, from its state."""
        return self

    def step(
        self, state: Tensors, short: int, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensors:
        """The next state of an adaptive bound; `short` updates had norms within the threshold."""
        return state

    def joined(self, release: Release, adjacency: Adjacency, expected: float) -> Release:
        """The release of a round with that of `step`. An adaptive bound must define it."""
        if not self.adapts:
            return release
        return NonPrivate(f"bound {type(self).__name__} does not define what its steps release")

    def own_noise(self, expected: float) -> float | None:
        """The standard deviation of the noise of `step`; None if it releases nothing."""
        return None

    def with_own_noise(self, deviation: float) -> Bound:
        """The same bound with another amount of that noise."""
        return self

    def stretched(self, factor: float) -> Bound | None:
        """The bound with C times a factor; None if there is no C."""
        return None

    def probed_at(self, mean_norm: float) -> Bound:
        """The bound with the threshold for the mean norm that a run without noise measured."""
        return self

    def found_as(self, saved: Bound) -> Bound:
        """This bound with the values that a saved one measured on the data, if any."""
        return self

    def misfit(self, recipe: Recipe) -> str | None:
        """A bound that changes says so, and needs noise that changes with it.

        It is accounted at its first norms, so a round must release the same at any other.
        """
        if not self.adapts:
            return self._unused()
        noise, first = recipe.noise, self.norms(2)
        if not noise.private or not noise.calibrated or not first.bounded:
            return None
        releases = [noise.event(message, message, 1.0, 1.0) for message in _at_levels(self, recipe)]
        if all(alike(release, releases[0]) for release in releases):
            return None
        return (
            f"bound {type(self).__name__} and noise {type(noise).__name__} do not fit: the bound "
            "changes from round to round, but the noise does not scale with it. Use Gaussian noise."
        )

    def _unused(self) -> str | None:
        """A bound that does not adapt is never asked for the bound of a round or the next state."""
        unused = [
            name for name in ("at", "step") if getattr(type(self), name) != getattr(Bound, name)
        ]
        if not unused:
            return None
        return (
            f"bound {type(self).__name__} defines `{unused[0]}`, but does not adapt, so its norms "
            "would stay as they are. Set adapts = True, or give a field of that name another one."
        )


def _at_levels(bound: Bound, recipe: Recipe) -> list[Norms]:
    """The norms of a message at the first threshold and at multiples of it."""
    first = bound.norms(2)
    return [
        recipe.quantize.norms(Norms(2, level * first.l1, level * first.l2, level * first.linf))
        for level in LEVELS
    ]


def within(norm: float, dim: int) -> Norms:
    """The ball ‖b‖₂ ≤ norm and what it implies for the other norms."""
    return Norms(dim, l1=norm * math.sqrt(dim), l2=norm, linf=norm)


def in_range(scale: Tensor) -> Tensor:
    """Scales in the range of float32: never larger, and zero if they would lose precision."""
    return torch.where(scale >= SMALLEST, scale.clamp_max(LARGEST), 0.0)


@dataclass(frozen=True)
class Unbounded(Bound):
    """b = w.  No bound: a message can have any norm, so no noise on it makes it private."""

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = 1."""
        return torch.ones_like(norms)

    def norms(self, dim: int) -> Norms:
        """Infinite."""
        return within(math.inf, dim)


@dataclass(frozen=True)
class Clip(Bound):
    """clip_C(w) = min(1, C/‖w‖)·w.  ‖clip_C(w)‖ ≤ C.  Zhang et al. 2022, eq. 3."""

    norm: float

    def __post_init__(self) -> None:
        positive(self, "norm", self.norm)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = min(1, C/r), and 1 at r = 0."""
        return in_range((MARGIN * self.norm / norms.clamp_min(TINY)).clamp_max(1.0))

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ C."""
        return within(self.norm, dim)

    @property
    def threshold(self) -> float | None:
        """C."""
        return self.norm

    def stretched(self, factor: float) -> Clip:
        """C times the factor."""
        return replace(self, norm=self.norm * factor)


@dataclass(frozen=True)
class ProbedClip(Clip):
    """Clip at c = factor·mean‖w‖ over all rounds of a run without bound or noise on the same data.

    Zhang et al. 2022, §3.1. *The threshold leaks*: no ε covers how it was found, and the statement
    says so. A norm of 0 means that the threshold has not been probed yet.
    """

    norm: float = 0.0
    factor: float = 0.5
    leaks = True

    def __post_init__(self) -> None:
        not_negative(self, "norm", self.norm)
        positive(self, "factor", self.factor)

    @property
    def awaits_probe(self) -> bool:  # type: ignore[override]
        """Whether the threshold has not been probed yet."""
        return self.norm == 0

    @property
    def leak(self) -> str:
        """The threshold, which was measured without noise."""
        return (
            f"The clipping threshold {self.norm:.4g} was measured on these data without noise. No "
            "ε covers it. An adaptive clip would not leak."
        )

    def probed_at(self, mean_norm: float) -> ProbedClip:
        """c to four digits, because c is in the run key and later digits depend on sum order."""
        return replace(self, norm=float(f"{self.factor * mean_norm:.4g}"))

    def found_as(self, saved: Bound) -> Bound:
        """The saved threshold."""
        return replace(self, norm=saved.norm) if isinstance(saved, ProbedClip) else self


@dataclass(frozen=True)
class AdaptiveClip(Bound):
    """C_{k+1} = C_k·exp(−η·(b̃ − γ)), b̃ the noisy fraction of updates no longer than C_k.

    Andrew et al. 2021, Alg. 1: C tracks the γ-quantile of the norms. Each unit adds ±½ to the
    count. The noise of the count has standard deviation `count_noise` [default: cohort/20] and is
    accounted. The noise of the sum is proportional to the C_k of its round.
    """

    start: float = 1.0
    quantile: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    adapts = True

    def __post_init__(self) -> None:
        for field in ("start", "quantile", "rate"):
            positive(self, field, getattr(self, field))
        inside = LEAST_NORM <= self.start <= LARGEST_NORM
        check(self, "start", self.start, inside, "from 1e-12 to 1e12")
        check(self, "quantile", self.quantile, self.quantile < 1, "above 0 and below 1")
        check(self, "rate", self.rate, self.rate <= 10, "above 0 and at most 10")
        if self.count_noise is not None:
            positive(self, "count_noise", self.count_noise)

    def scale(self, norms: Tensor) -> Tensor:
        """Clip at the first threshold. A round uses the bound that `at` returns."""
        return Clip(self.start).scale(norms)

    def norms(self, dim: int) -> Norms:
        """Clip at the first threshold. The ratio of noise to bound is the same at every C_k."""
        return Clip(self.start).norms(dim)

    @property
    def threshold(self) -> float:
        """C_0."""
        return self.start

    @property
    def released(self) -> str:
        """The thresholds, which follow from noisy counts."""
        return ", every threshold C_k (its noisy counts are accounted)"

    def initial_state(self, begin: Begin) -> Tensors:
        """C_0."""
        return {"threshold": torch.tensor([self.start]).double()}

    def at(self, state: Tensors) -> Clip:
        """Clip at C_k."""
        return Clip(float(state["threshold"]))

    def step(
        self, state: Tensors, short: int, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensors:
        """C_{k+1}."""
        norm = self.next(float(state["threshold"]), short, arrived, expected, rng)
        return {"threshold": torch.tensor([norm]).double()}

    def own_noise(self, expected: float) -> float:
        """The standard deviation of the count's noise."""
        return self.count_noise or expected / 20

    def with_own_noise(self, deviation: float) -> AdaptiveClip:
        """The bound with another noise on the count."""
        return replace(self, count_noise=deviation)

    def stretched(self, factor: float) -> AdaptiveClip:
        """C_0 times the factor."""
        return replace(self, start=self.start * factor)

    def misfit(self, recipe: Recipe) -> str | None:
        """The count needs its own noise, which the server adds."""
        if recipe.noise.at == "server":
            return super().misfit(recipe)
        return (
            f"bound AdaptiveClip and noise {type(recipe.noise).__name__} at the clients do not "
            "fit: the server adds the noise of the count. Use noise at the server."
        )

    def joined(self, release: Release, adjacency: Adjacency, expected: float) -> Release:
        """The sum and the count as one release: 1/ρ² = 1/ρ_sum² + 1/ρ_count².

        The count changes by ½ if a unit is added or removed, by 1 if it is replaced or zeroed out.
        """
        if not isinstance(release, GaussianRelease):
            return NonPrivate("the count of an adaptive clip is accounted with Gaussian noise only")
        move = 0.5 if adjacency == "add-remove" else 1.0
        ratio = self.own_noise(expected) / move
        return GaussianRelease((release.ratio**-2 + ratio**-2) ** -0.5)

    def next(
        self, norm: float, short: int, arrived: int, expected: float, rng: np.random.Generator
    ) -> float:
        """C_{k+1} from the number of short updates. The noise is an integer number of halves."""
        from fedveil.random.samplers import rounded_gaussian

        halves = 2 * short - arrived  # Σ(b_i − ½) in units of ½
        noise = int(rounded_gaussian(2 * self.own_noise(expected), 1, rng)[0])
        fraction = 0.5 + (halves + noise) / 2 / expected
        step = -self.rate * (min(max(fraction, 0.0), 1.0) - self.quantile)
        return min(max(norm * math.exp(step), LEAST_NORM), LARGEST_NORM)


@dataclass(frozen=True)
class Normalize(Bound):
    """norm_C(w) = C·w/‖w‖, and 0 at w = 0.  ‖norm_C(w)‖ ≤ C.  Das et al. 2022, Alg. 2, line 9."""

    norm: float

    def __post_init__(self) -> None:
        positive(self, "norm", self.norm)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = C/r, and 0 at r = 0."""
        scale = in_range(MARGIN * self.norm / norms.clamp_min(TINY))
        return torch.where(norms >= TINY, scale, 0.0)

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ C."""
        return within(self.norm, dim)

    def stretched(self, factor: float) -> Normalize:
        """C times the factor."""
        return replace(self, norm=self.norm * factor)


@dataclass(frozen=True)
class ClipCoordinates(Bound):
    """b_j = min(max(w_j, −limit), limit).  ‖b‖∞ ≤ limit, so ‖b‖₂ ≤ limit·√d and ‖b‖₁ ≤ limit·d.

    Not radial: a single large coordinate is clipped without scaling the others. Noise is
    proportional to ‖b‖₂, which grows with √d (docs/privacy.md, "Bounds on rows").
    """

    limit: float
    radial = False

    def __post_init__(self) -> None:
        inside = number(self.limit) and SMALLEST <= self.limit <= LARGEST
        check(self, "limit", self.limit, inside, "above 2^-126 and below 2^126")

    def rows(self, updates: Tensor) -> Tensor:
        """Clip at MARGIN·limit, which float32 cannot round above the limit."""
        largest = MARGIN * self.limit
        return updates.clamp(-largest, largest)

    def norms(self, dim: int) -> Norms:
        """|b_j| ≤ limit in every coordinate."""
        root = math.sqrt(dim)
        return Norms(dim, l1=self.limit * dim, l2=self.limit * root, linf=self.limit)

    def stretched(self, factor: float) -> ClipCoordinates:
        """The limit times the factor."""
        return replace(self, limit=self.limit * factor)


@dataclass(frozen=True)
class SmoothNormalize(Bound):
    """Norm_α(w) = w/(α + ‖w‖).  ‖Norm_α(w)‖ < 1.  Shulgin et al. 2025, Alg. 1, line 5."""

    alpha: float

    def __post_init__(self) -> None:
        positive(self, "alpha", self.alpha)

    def scale(self, norms: Tensor) -> Tensor:
        """s(r) = 1/(α + r)."""
        return in_range(MARGIN / (self.alpha + norms))

    def norms(self, dim: int) -> Norms:
        """‖b‖ ≤ 1."""
        return within(1.0, dim)
