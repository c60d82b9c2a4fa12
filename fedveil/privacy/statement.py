"""The guarantee of a run in one sentence, with everything an ε needs to mean something."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
            f"({self.epsilon:.3g}, {self.delta:.3g})-differentially private at the level of one "
            f"{self.unit} ({self.adjacency} adjacency, {self.rounds} rounds, "
            f"{self.population:,} {self.unit}s, PLD accounting).{self._remark()}"
        )

    def _remark(self) -> str:
        if self.delta * self.population < 1:
            return ""
        return (
            f" δ is at least 1/{self.population:,}: too large to protect each {self.unit}; "
            f"use {1 / (10 * self.population):.0e}."
        )


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
