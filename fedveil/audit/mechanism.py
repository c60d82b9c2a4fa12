"""Black-box tests of noise: search for an event that violates the claimed privacy.

The noise is drawn many times on two neighbouring messages. Half of the draws choose the event, the
other half bound its probabilities exactly, so the choice costs nothing (as in Bichsel et al. 2021).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.audit.bounds import ALPHA, chance_at_least, chance_at_most
from fedveil.audit.report import ALARM
from fedveil.errors import UserError
from fedveil.parts.bound import within
from fedveil.parts.noise import Noise
from fedveil.parts.quantize import StochasticRound

EPSILONS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
DELTA = 1e-3  # at which ε is bounded: there are too few draws for smaller values
CUTS = 200  # tried per statistic

Statistic = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Event:
    """{y: sign·statistic(y) ≥ cut} for a move of the message."""

    move: np.ndarray
    statistic: str
    sign: float
    cut: float
    reverse: bool  # whether the event is more likely on the message that did not move

    def __str__(self) -> str:
        side = "at least" if self.sign > 0 else "at most"
        where = ", ".join(f"{step:g}" for step in self.move)
        return f"{self.statistic} {side} {self.sign * self.cut:.4g}, messages ({where}) apart"


@dataclass(frozen=True)
class NoiseAudit:
    """What draws reveal about one message's noise, next to its claimed event."""

    noise: Noise
    claimed: float  # ε at DELTA
    audited: float  # a lower bound on it
    violation: str = ""  # an event that contradicts the claim

    @property
    def alarm(self) -> bool:
        """Whether the claim is contradicted."""
        return bool(self.violation)


def audit_noise(
    noise: Noise,
    rng: np.random.Generator,
    dim: int = 2,
    levels: int = 8,
    trials: int = 10_000,
    alpha: float = ALPHA,
) -> NoiseAudit:
    """Draw the noise of one message on neighbours, and compare it with the claimed release."""
    if not noise.calibrated:
        raise UserError(f"{type(noise).__name__} has no noise level yet. Calibrate it first.")
    message = StochasticRound(levels).norms(within(1.0, dim))
    release = noise.event(message, message, 1.0, 1.0)
    draws = [_drawn(noise, message, trials, rng) for _ in range(4)]
    moves = list(_moves(message, 1.0 if noise.needs_grid else message.grid or 1.0))
    curves = _curves(draws[:2], moves)
    return NoiseAudit(
        noise,
        accounting.epsilon(release, DELTA),
        _audited(draws, curves, alpha),
        _violation(draws, curves, release),
    )


def _drawn(noise: Noise, message: Norms, trials: int, rng: np.random.Generator) -> np.ndarray:
    """[trials, dim]: consecutive releases, drawn as in a run."""
    if noise.on_messages:
        return np.stack([noise.each(message, rng) for _ in range(trials)]).astype(float)
    drawn = [noise.draw(message, 1, 1.0, rng).numpy() for _ in range(trials)]
    return np.stack(drawn).astype(float)


def _moves(message: Norms, unit: float) -> Iterator[np.ndarray]:
    """Each coordinate moved alone as far as possible, and all together; in the noise's units."""
    steps = message.steps
    for axis in np.eye(message.dim):
        yield axis * min(steps.linf, math.floor(steps.l2)) * unit
    each = min(steps.l1 / message.dim, steps.l2 / math.sqrt(message.dim), steps.linf)
    if each >= 1 and message.dim > 1:
        yield np.full(message.dim, math.floor(each) * unit)


STATISTICS: dict[str, Statistic] = {
    "the projection on the move": lambda y, move: y @ (move / np.linalg.norm(move)),
    "the largest moved coordinate": lambda y, move: y[:, move != 0].max(axis=1),
    "the smallest moved coordinate": lambda y, move: y[:, move != 0].min(axis=1),
}


def _worlds(event: Event, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The statistics where the event is more likely, and where it is less likely."""
    statistic = STATISTICS[event.statistic]
    values = [event.sign * statistic(y, event.move) for y in (first + event.move, second)]
    return (values[1], values[0]) if event.reverse else (values[0], values[1])


def _hits(event: Event, first: np.ndarray, second: np.ndarray) -> tuple[int, int]:
    """How often the event occurs in each world."""
    likelier, other = _worlds(event, first, second)
    return int((likelier >= event.cut).sum()), int((other >= event.cut).sum())


Worth = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Curve:
    """How often an event occurred in both worlds, for each cut."""

    event: Event
    cuts: np.ndarray
    likelier: np.ndarray
    other: np.ndarray


def _curves(draws: list[np.ndarray], moves: list[np.ndarray]) -> list[_Curve]:
    """Every event to try, with its frequencies in these draws."""
    return [
        _curve(Event(move, name, sign, 0.0, reverse), draws)
        for move in moves
        for name in STATISTICS
        for sign in (1.0, -1.0)
        for reverse in (False, True)
    ]


def _curve(event: Event, draws: list[np.ndarray]) -> _Curve:
    worlds = [np.sort(values) for values in _worlds(event, *draws)]
    ranks = np.linspace(0, 1, CUTS)
    cuts = np.unique(np.concatenate([np.quantile(values, ranks) for values in worlds]))
    above = [1 - np.searchsorted(values, cuts) / len(values) for values in worlds]
    return _Curve(event, cuts, *above)


def _chosen(curves: list[_Curve], worth: Worth) -> Event:
    """The event with the largest `worth`."""
    values = [worth(curve.likelier, curve.other) for curve in curves]
    best = int(np.argmax([value.max() for value in values]))
    return replace(curves[best].event, cut=float(curves[best].cuts[int(values[best].argmax())]))


def _excess(factor: float, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p - factor * q


def _likely_bound(trials: int, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The approximate bound that an event with these frequencies will give."""
    least = p - 2 * np.sqrt(p * (1 - p) / trials) - DELTA
    most = q + 2 * np.sqrt(q * (1 - q) / trials) + 4 / trials
    return np.asarray(np.log(np.maximum(least, 1e-12) / most))


def _audited(draws: list[np.ndarray], curves: list[_Curve], alpha: float) -> float:
    """log((P − δ)/Q) of the most promising event, with both probabilities bounded."""
    trials = len(draws[0])
    best = _chosen(curves, functools.partial(_likely_bound, trials))
    hits, others = _hits(best, *draws[2:])
    least = chance_at_least(hits, trials, alpha / 2) - DELTA
    most = chance_at_most(others, trials, alpha / 2)
    return max(math.log(least / most), 0.0) if least > 0 else 0.0


def _violation(draws: list[np.ndarray], curves: list[_Curve], release: events.Release) -> str:
    """The first ε at which an event exceeds the claimed release, with certainty."""
    trials, share = len(draws[0]), ALARM / len(EPSILONS) / 2
    for epsilon in EPSILONS:
        factor = math.exp(epsilon)
        best = _chosen(curves, functools.partial(_excess, factor))
        hits, others = _hits(best, *draws[2:])
        least = chance_at_least(hits, trials, share) - factor * chance_at_most(
            others, trials, share
        )
        claimed = accounting.delta(release, epsilon)
        if least > claimed:
            return f"δ({epsilon:g}) is at least {least:.3g}, not {claimed:.3g}: {best}"
    return ""
