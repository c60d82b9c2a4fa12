"""The guarantee of a run in one sentence, with everything an ε needs to mean something."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from fedveil.privacy import accounting, events
from fedveil.recipe import Recipe, View

SEEN: dict[str, str] = {
    "models": "sees all released models but no single message",
    "messages": "sees every client's message and who sent it",
}


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ) for a unit, an adjacency and a view; ε = ∞ with the reason where there is none."""

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    view: View
    rounds: int
    population: int
    reason: str = ""

    @property
    def private(self) -> bool:
        """Whether there is a finite ε."""
        return math.isfinite(self.epsilon)

    def sentence(self) -> str:
        """The guarantee for a reader who was not there."""
        if not self.private:
            return f"No privacy guarantee: {self.reason}."
        return (
            f"To anyone who {SEEN[self.view]}, this training is "
            f"({rounded_up(self.epsilon)}, {rounded_up(self.delta)})-differentially private at the "
            f"level of one {self.unit} ({self.adjacency} adjacency, {self.rounds} rounds, "
            f"{self.population:,} {self.unit}s as a public number, PLD accounting). Simulated: who "
            f"knows the seed can recompute the noise.{self._remark()}"
        )

    def _remark(self) -> str:
        if self.delta * self.population < 1:
            return ""
        return (
            f" δ is at least 1/{self.population:,}: too large to protect each {self.unit}; "
            f"use {1 / (10 * self.population):.0e}."
        )


def rounded_up(number: float, digits: int = 3) -> str:
    """A number in a few digits, never smaller than it is.

    >>> rounded_up(4.9912), rounded_up(2.00096), rounded_up(1e-5)
    ('5', '2.01', '1e-05')
    """
    exact = Decimal(str(number))
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, ROUND_CEILING)):.{digits}g}"


def guarantee(
    recipe: Recipe, dim: int, population: int, rounds: int, delta: float, view: View = "models"
) -> Guarantee:
    """What `rounds` rounds of a recipe with settled noise have spent."""
    spent = recipe.spent(dim, population, rounds, view)
    epsilon = accounting.epsilon(spent, delta)
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=recipe.unit,
        adjacency=recipe.adjacency(view),
        view=view,
        rounds=rounds,
        population=population,
        reason="" if math.isfinite(epsilon) else _reason(spent.event),
    )


def _reason(event: events.Round) -> str:
    if isinstance(event, events.NonPrivate):
        return event.reason
    return "there is too little noise for this δ"
