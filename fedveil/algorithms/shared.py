"""What the algorithms' signatures have in common, as parts."""

from __future__ import annotations

from typing import Literal

from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Clip, ProbedClip
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian, Noise, Place, RoundedGaussian, Silent
from fedveil.parts.quantize import ConditionalRound, Exact, Quantize
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import Momentum, Server, Step


def sgd(
    learning_rate: float | Schedule,
    steps: int | None,
    epochs: int | None,
    batch: int | None,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> SGD:
    """Local SGD; ten steps when no length is given."""
    if steps is None and epochs is None:
        steps = 10
    return SGD(schedule(learning_rate, decay), steps, epochs, batch, momentum, weight_decay)


def some(clients: int | None) -> Cohort:
    """A fixed number of clients, or everyone."""
    return Everyone() if clients is None else FixedSize(clients)


def sampled(
    rate: float, clients: int | None, cap: int | None = None, honest: int | None = None
) -> Cohort:
    """A fixed number of clients, or each with probability rate."""
    return Poisson(rate, cap, honest) if clients is None else FixedSize(clients, cap, honest)


def clip_at(norm: float | str) -> Bound:
    """Clip at a number, or at what a run without noise on the same data suggests."""
    if isinstance(norm, str):
        if norm != "probe":
            raise UserError(f"clip is '{norm}'; it must be a number, or 'probe'.")
        return ProbedClip()
    return Clip(norm)


def heavy(rate: Schedule, momentum: float) -> Server:
    """A step, with momentum if there is any."""
    return Momentum(rate, momentum) if momentum else Step(rate)


def gaussian(private: bool, multiplier: float | None) -> Noise:
    """Gaussian noise if private, or if its amount is given."""
    return Gaussian(multiplier) if private or multiplier is not None else Silent()


def of_few_bits(
    levels: int | Literal["auto"] | None, multiplier: float | None, at: Place
) -> tuple[Quantize, Noise]:
    """Messages as they are with Gaussian noise, or rounded to levels with whole-number noise."""
    if levels is None:
        return Exact(), Gaussian(multiplier, at)
    if at == "client":
        raise UserError(
            "levels and noise_at='client' do not fit: rounded Gaussian noise is the server's; use "
            "dp_norm_fedavg_discrete or dp_norm_fedavg_secagg for clients that add their own."
        )
    if isinstance(levels, str) and levels != "auto":
        raise UserError(f"levels is '{levels}'; it must be a whole number, or 'auto'.")
    return ConditionalRound(None if levels == "auto" else levels), RoundedGaussian(multiplier)
