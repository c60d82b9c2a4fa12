"""Recipe: eight parts, two chains.

    data:     population → cohort → Updates → bounded sum → noisy mean → next model   (loop.py)
    privacy:  bound.norms → quantize.norms → sensitivity → noise.event → cohort.amplify   (here)

The same objects make both chains, so what is accounted is what runs. A recipe whose parts do not
fit together is refused when it is built, with the two parts and what would fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Unbounded
from fedveil.parts.cohort import Cohort, Everyone
from fedveil.parts.local import Local
from fedveil.parts.memory import ErrorCompensation, Memory, NoMemory
from fedveil.parts.noise import Noise, Silent
from fedveil.parts.quantize import Exact, Quantize
from fedveil.parts.report import Difference, Model, Report
from fedveil.parts.server import LastIterate, Output, Server, Step
from fedveil.privacy import events
from fedveil.privacy.norms import Adjacency, Norms

View = Literal["models", "messages"]
Unit = Literal["client", "example"]


@dataclass(frozen=True)
class Recipe:
    """One algorithm: cohort → local → report → memory → bound → quantize → noise → server."""

    name: str
    local: Local
    cohort: Cohort = Everyone()
    report: Report = Difference()
    memory: Memory = NoMemory()
    bound: Bound = Unbounded()
    quantize: Quantize = Exact()
    noise: Noise = Silent()
    server: Server = Step()
    output: Output = LastIterate()
    unit: Unit = "client"

    def __post_init__(self) -> None:
        _refuse_misfits(self)

    @property
    def private(self) -> bool:
        """Whether it sets out to be private at all."""
        return not isinstance(self.noise, Silent)

    def message(self, dim: int) -> Norms:
        """What one message can be at most, after bound and quantization."""
        return self.quantize.norms(self.bound.norms(dim))

    def adjacency(self, view: View = "models") -> Adjacency:
        """The neighbours under which a view is accounted.

        One who sees each message sees who sent it, so there a unit is blanked out, not removed.
        """
        if self._hidden(view) or self.cohort.adjacency == "replace-one":
            return self.cohort.adjacency
        return "zero-out"

    def event(self, dim: int, population: int, view: View = "models") -> events.Round:
        """What one round releases to one who sees the models, or each message."""
        message = self.message(dim)
        if not message.bounded:
            return events.NonPrivate("a message is not bounded")
        sensitivity = message.sensitivity(self.adjacency(view))
        if self._hidden(view):
            return self.cohort.amplify(self.noise.event(message, sensitivity, 1.0), population)
        if self.noise.at == "server":
            return events.NonPrivate("the server sees each message before noise is added")
        return self.noise.event(message, sensitivity, self.cohort.expected(population))

    def _hidden(self, view: View) -> bool:
        """Whether one with this view cannot tell who took part, so that sampling amplifies.

        Clients that bring their own noise to a cohort of random size make the amount of noise
        tell how many came; then the models are accounted as the messages are.
        """
        return view == "models" and (self.noise.at == "server" or self.cohort.fixed)

    def spent(
        self, dim: int, population: int, rounds: int, view: View = "models"
    ) -> events.Composed:
        """What a whole run releases."""
        return events.Composed(self.event(dim, population, view), rounds)

    def with_noise(self, level: float, dim: int, delta: float) -> Recipe:
        """The same recipe with its noise settled at a level; delta is for truncation, if any."""
        message = self.message(dim)
        sensitivity = message.sensitivity(self.adjacency())
        return replace(self, noise=self.noise.scaled(level, message, sensitivity, delta))


def _refuse_misfits(recipe: Recipe) -> None:
    bounded = recipe.bound.norms(1).bounded
    grid = recipe.message(1).grid is not None if bounded else False
    bound, noise, quantize = (type(part).__name__ for part in _middle(recipe))
    if recipe.private and not bounded:
        raise UserError(
            f"{recipe.name}: bound {bound} and noise {noise} do not fit: no noise hides an "
            "unbounded message; use Clip, Normalize or SmoothNormalize."
        )
    if recipe.quantize.rows_needed and not bounded:
        raise UserError(
            f"{recipe.name}: bound {bound} and quantize {quantize} do not fit: a grid needs a "
            "largest value; use Clip, Normalize or SmoothNormalize."
        )
    if recipe.noise.needs_grid and not grid:
        raise UserError(
            f"{recipe.name}: quantize {quantize} and noise {noise} do not fit: discrete noise "
            "needs messages on a grid; use StochasticRound(levels), or Gaussian noise."
        )
    if isinstance(recipe.memory, ErrorCompensation):
        _refuse_memory_misfits(recipe, recipe.memory)


def _refuse_memory_misfits(recipe: Recipe, memory: ErrorCompensation) -> None:
    if isinstance(recipe.report, Model):
        raise UserError(
            f"{recipe.name}: memory ErrorCompensation and report Model do not fit: the memory "
            "accumulates differences; use GradientScale or Difference."
        )
    if (
        recipe.private
        and memory.update == "participants"
        and recipe.cohort.adjacency == ("replace-one")
    ):
        raise UserError(
            f"{recipe.name}: memory of participants and cohort {type(recipe.cohort).__name__} do "
            "not fit: what absent clients remember depends on who was drawn, which the "
            "fixed-size theorem does not cover; use Poisson, Everyone, or update='everyone'."
        )


def _middle(recipe: Recipe) -> tuple[Bound, Noise, Quantize]:
    return recipe.bound, recipe.noise, recipe.quantize
