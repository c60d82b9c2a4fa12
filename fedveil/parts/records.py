"""Silos: clients that protect their own records from everyone else, the server included.

A silo's local work is the loop itself over its own records. Each of its steps samples records,
clips each record's gradient, and adds the silo's own noise:

    y ← y − η_k·((Σ_{j∈S} clip(∇f_j(y), C) + N(0, (z_i·C)²·I))/(q_i·n_i) + pull·(y − x))

S has each of the silo's n_i records with probability q_i. Messages are made of noisy steps only, so
whoever sees them sees nothing else of a record (docs/privacy.md, "Records inside silos").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.accounting.rounding import rounded_up
from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.checks import check, count, not_negative, numbers, positive
from fedveil.parts.cohort import Poisson
from fedveil.parts.local import SGD, Inside, Local, LocalPlan
from fedveil.parts.noise import Gaussian, Noise, RoundedGaussian, Share
from fedveil.parts.quantize import NoQuantization
from fedveil.parts.report import PseudoGradient
from fedveil.parts.schedule import Constant, Schedule
from fedveil.parts.server import Step

if TYPE_CHECKING:
    from fedveil.recipe import Recipe

PerSilo = tuple[float, ...]  # one number for each silo, or one for all of them


def of_silo(values: PerSilo, silo: int) -> float:
    """The silo's own number.

    >>> of_silo((0.1,), 3), of_silo((0.1, 0.2), 1)
    (0.1, 0.2)
    """
    return values[0] if len(values) == 1 else values[silo]


@dataclass(frozen=True)
class RecordSGD(Local):
    """`steps` steps of DP-SGD on the silo's records.  Abadi et al. 2016, Alg. 1.

    The noise multipliers are those of the recipe's noise, `SiloGaussian`.
    """

    learning_rate: Schedule
    steps: int = 10
    rates: PerSilo = (0.1,)
    clip: float = 1.0
    pull: float = 0.0  # λ of f_i(y) + λ/2·‖y − x‖², x the server's model
    weight_decay: float = 0.0
    by_record = True

    def __post_init__(self) -> None:
        count(self, "steps", self.steps)
        positive(self, "clip", self.clip)
        not_negative(self, "pull", self.pull)
        not_negative(self, "weight_decay", self.weight_decay)
        _check_listed(self, "rates", self.rates)
        for rate in self.rates:
            check(self, "rates", rate, 0 < rate <= 1, "above 0 and at most 1")

    def rate(self, round: int) -> float:
        """η_k."""
        return self.learning_rate(round)

    @property
    def inner_steps(self) -> int:  # type: ignore[override]
        """K."""
        return self.steps

    @property
    def listed(self) -> int | None:
        """The number of silos, if each has its own rate."""
        return len(self.rates) if len(self.rates) > 1 else None

    def inside(self, silo: int, round: int, noise: Noise) -> Inside:
        """A step: the mean clipped gradient with noise, which the silo follows by η_k."""
        own = noise.inside(silo)
        return Inside(
            SGD(Constant(1.0), steps=1, weight_decay=self.weight_decay),
            Poisson(of_silo(self.rates, silo)),
            PseudoGradient(),
            Clip(self.clip),
            NoQuantization().on_grid() if own.needs_grid else NoQuantization(),
            own,
            Step(Constant(self.rate(round))),
        )

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        """No batches of silos as a whole: their records are sampled inside."""
        nothing = torch.empty(len(sizes), 1, 0, dtype=torch.int64)
        return LocalPlan(nothing, torch.empty(len(sizes), 0))

    def describe(self, silos: int) -> str:
        """Sampling inside the silos, for the statement."""
        common = len(self.rates) == 1
        rate = f"{self.rates[0]:g}" if common else "that depends on the silo"
        return (
            f"Poisson inside each silo: each record takes part in a step with probability {rate}. "
            f"A round has {self.steps} step{'s' * (self.steps > 1)}."
        )

    def misfit(self, recipe: Recipe) -> str | None:
        """Noise must be added inside, and nothing may change the messages outside."""
        if not recipe.noise.by_silo:
            return (
                f"local RecordSGD and noise {type(recipe.noise).__name__} do not fit: silos add "
                "noise in every step, by themselves. Use SiloGaussian."
            )
        outside = recipe.bound.norms(1).bounded or recipe.quantize.rows_needed
        if outside or recipe.report.affine(1.0) != (1.0, 0.0) or recipe.unit != "record":
            return (
                "local RecordSGD protects records inside silos, and silos send differences as "
                "they are. Use unit='record', Difference, Unbounded and NoQuantization."
            )
        if recipe.cohort.honest is not None or recipe.cohort.cap is not None:
            return (
                f"cohort {type(recipe.cohort).__name__} with honest or cap and local RecordSGD do "
                "not fit: each silo's noise protects its own records, in every round. Remove both."
            )
        return None


@dataclass(frozen=True)
class SiloGaussian(Noise):
    """N(0, (z_i·C)²·I) on the sum of each step inside silo i. `None` is calibrated to a budget.

    With `budgets`, silo i is calibrated to budgets[i]·ε. `integer` draws the noise on a grid.
    """

    multipliers: PerSilo | None = None
    budgets: PerSilo = (1.0,)
    integer: bool = False
    at = "client"
    by_silo = True
    scale_free = True

    def __post_init__(self) -> None:
        _check_listed(self, "budgets", self.budgets)
        for share in self.budgets:
            check(self, "budgets", share, 0 < share <= 1, "above 0 and at most 1")
        if self.multipliers is not None:
            _check_listed(self, "multipliers", self.multipliers)
            for multiplier in self.multipliers:
                positive(self, "multipliers", multiplier)

    @property
    def calibrated(self) -> bool:  # type: ignore[override]
        """Whether the multipliers are given."""
        return self.multipliers is not None

    @property
    def listed(self) -> int | None:
        """The number of silos, if they differ."""
        return max(len(self.multipliers or ()), len(self.budgets), 1) if self._differ else None

    @property
    def _differ(self) -> bool:
        return max(len(self.multipliers or ()), len(self.budgets)) > 1

    def inside(self, silo: int) -> Noise:
        """Gaussian noise with the silo's own multiplier."""
        own = None if self.multipliers is None else of_silo(self.multipliers, silo)
        return RoundedGaussian(own) if self.integer else Gaussian(own)

    def share(self, silo: int) -> float:
        """The silo's budget as a share of ε."""
        return of_silo(self.budgets, silo)

    def with_multipliers(self, multipliers: PerSilo) -> SiloGaussian:
        """The noise with these multipliers; one number if they are all equal."""
        alike = len(set(multipliers)) == 1
        return replace(self, multipliers=multipliers[:1] if alike else multipliers)

    def scaled(
        self, level: float, message: Norms, sensitivity: Norms, share: Share
    ) -> SiloGaussian:
        """The same multiplier in every silo."""
        return replace(self, multipliers=(level,))

    def draw(
        self, message: Norms, arrived: int, expected: float, rng: np.random.Generator
    ) -> Tensor:
        """Nothing more on the sum of messages, which have the silos' noise in them."""
        return torch.zeros(message.dim, dtype=torch.float64)

    def describe(self) -> str:
        """The multipliers."""
        kind = "Rounded Gaussian" if self.integer else "Gaussian"
        some = sorted(self.multipliers or (0.0,))
        least, most = rounded_up(some[0], 6), rounded_up(some[-1], 6)
        told = least if least == most else f"{least} to {most}, depending on the silo,"
        return f"{kind} with noise multiplier {told} on the sum of each step"

    @property
    def noise_multiplier(self) -> float | None:
        """The multiplier, if all silos have the same."""
        return self.multipliers[0] if self.multipliers and not self._differ else None

    def uncalibrated(self) -> SiloGaussian:
        """The same noise without multipliers."""
        return replace(self, multipliers=None)

    def secured(self) -> SiloGaussian:
        """The noise rounded to a grid."""
        return replace(self, integer=True)

    def misfit(self, recipe: Recipe) -> str | None:
        """It is added by local work, and nowhere else."""
        if not recipe.local.by_record:
            return (
                f"local {type(recipe.local).__name__} and noise SiloGaussian do not fit: this "
                "noise is added in the steps inside silos. Use RecordSGD, or Gaussian noise."
            )
        several = {found for found in (self.listed, recipe.local.listed) if found is not None}
        if len(several) > 1:
            return (
                f"rates, multipliers and budgets list {' and '.join(map(str, sorted(several)))} "
                "silos. Give one number for each silo, or one for all of them."
            )
        return None


def _check_listed(part: object, field: str, values: PerSilo) -> None:
    numbers(part, field, values)
    if not values:
        raise UserError(
            f"{type(part).__name__}: {field} is empty. Give one number for each silo, or one for "
            "all of them."
        )
