"""Recipe: eight parts, two chains.

    data:     population → cohort → Updates → bounded sum → noisy mean → next model   (loop.py)
    privacy:  bound.norms → quantize.norms → sensitivity → noise.event → cohort.amplify   (here)

The same objects make both chains, so what is accounted is what runs. A recipe whose parts do not
fit together is refused when it is built, with the two parts and what would fit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Bound, Unbounded
from fedveil.parts.cohort import Cohort, Everyone, Poisson
from fedveil.parts.local import Local
from fedveil.parts.memory import ErrorCompensation, Memory, NoMemory
from fedveil.parts.noise import Noise, Share, Silent
from fedveil.parts.quantize import Exact, Quantize
from fedveil.parts.report import Difference, Model, Report
from fedveil.parts.server import LastIterate, Output, Server, Step
from fedveil.privacy import events
from fedveil.privacy.norms import Adjacency, Norms
from fedveil.wire import Wire, bits_for

View = Literal["models", "sum", "messages"]
Unit = Literal["client", "example"]
NOT_YET = (3e-7, 1e-8, 1e-10, 1e-13)  # chances that a cap is not reached, which are set aside


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
    view: View = "models"  # against whom a budget is kept, and for whom messages are made

    def __post_init__(self) -> None:
        _refuse_misfits(self)

    @property
    def private(self) -> bool:
        """Whether it sets out to be private at all."""
        return not isinstance(self.noise, Silent)

    @property
    def foreign(self) -> tuple[str, ...]:
        """The classes of its parts that are not fedveil's: what these promise is not proved."""
        parts = (getattr(self, field.name) for field in fields(self))
        strangers = (part for part in parts if not isinstance(part, str) and foreign(part))
        kinds = (type(getattr(part, "stranger", part)) for part in strangers)
        return tuple(f"{kind.__module__}:{kind.__qualname__}" for kind in kinds)

    def message(self, dim: int, bound: Bound | None = None) -> Norms:
        """What one message can be at most, after bound and quantization."""
        return self.quantize.norms((bound or self.bound).norms(dim))

    def wire(self, dim: int, population: int) -> Wire | None:
        """How many bits a coordinate takes on its way, where messages are on a grid.

        For secure aggregation they are residues, wide enough for the sum of a whole cohort; of a
        random one, up to ten deviations above its mean (a sum that wrapped would cost accuracy).
        """
        message = self.message(dim)
        if message.grid is None:
            return None
        reach = int(message.steps.linf) + self.noise.reach(message)
        bits = bits_for(-reach, reach)
        if self.view == "sum":
            largest = self._largest_cohort(population)
            return Wire(bits + math.ceil(math.log2(largest)), modular=True)
        return Wire(bits, low=-reach)

    def _largest_cohort(self, population: int) -> float:
        expected = self.cohort.expected(population)
        spread = 0.0 if self.cohort.fixed else 10 * math.sqrt(expected)
        return max(min(expected + spread, population), 1.0)

    def adjacency(self, view: View | None = None) -> Adjacency:
        """The neighbours under which a view is accounted.

        One who sees who takes part sees a unit leave, so there it is blanked out, not removed.
        """
        if self.hidden(view or self.view) or self.cohort.adjacency == "replace-one":
            return self.cohort.adjacency
        return "zero-out"

    def release(self, dim: int, population: int, view: View | None = None) -> events.Release:
        """What a round that the unit takes part in releases, to one who knows that it does."""
        view = view or self.view
        message = self.message(dim)
        if not message.bounded:
            return events.NonPrivate("a message is not bounded")
        if self.noise.at == "server" and view != "models":
            return events.NonPrivate("the server sees what it gets before it adds noise")
        sensitivity = message.sensitivity(self.adjacency(view))
        expected = self.cohort.expected(population)
        summands = self.summands(population, view)
        release = self.noise.event(message, sensitivity, summands, expected)
        if isinstance(self.bound, AdaptiveClip):
            return self.bound.joined(release, self.adjacency(view), expected)
        return release

    def summands(self, population: int, view: View) -> float:
        """How many clients' noise the accounting counts on in what this view shows."""
        if view == "messages" or not self.noise.adds_up:
            return 1.0
        strange = self.noise.at == "client" and foreign(self.noise)
        topped_up = not (self.noise.needs_grid or strange)
        if view == "models" and topped_up and self.cohort.honest is None:
            return self.cohort.expected(population)  # the server adds what is missing
        return float(self.cohort.sure(population))

    def event(self, dim: int, population: int, view: View | None = None) -> events.Round:
        """What any one round releases: amplified where this view does not show who took part."""
        release = self.release(dim, population, view)
        if self.hidden(view or self.view):
            return self._amplified(release, population)
        return release

    def hidden(self, view: View) -> bool:
        """Whether one with this view cannot tell who took part, so that sampling amplifies.

        Clients that bring their own noise to a cohort of random size make the amount of noise
        tell how many came, and so does a cohort in which some may bring none (`honest`); then who
        took part counts as known.
        """
        alike = self.cohort.fixed and self.cohort.honest is None
        return view == "models" and (self.noise.at == "server" or alike)

    def least_arrivals(self, population: int) -> int:
        """How many must come for a round to count: the noise that clients bring was promised."""
        promised = self.cohort.fixed or self.cohort.honest is not None
        return self.cohort.sure(population) if self.noise.at == "client" and promised else 0

    def most(self, rounds: int, view: View | None = None) -> int:
        """How many of the rounds one unit can take part in, as far as a view may rely on it.

        The server keeps the cap. In views `sum` and `messages` it is the adversary, so there a
        cap counts for nothing.
        """
        cap = self.cohort.cap
        if cap is None or (view or self.view) != "models":
            return rounds
        return min(rounds, cap)

    def spent(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.Spent:
        """What a whole run releases, however often the unit was drawn.

        A view that shows who took part is accounted for a unit that took part in every round, or,
        where the server is trusted, in as many as its cap allows. One that hides it may be
        accounted either way.
        """
        release = self.release(dim, population, view)
        known = events.Composed(release, self.most(rounds, view))
        if not self.hidden(view or self.view):
            return known
        hidden = events.Composed(self._amplified(release, population), rounds)
        if self.cohort.cap is None:
            return hidden
        return events.Either((hidden, known, *_until_the_cap(self.cohort, hidden)))

    def attended(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.Attended | None:
        """The same over the coins that decide who takes part: they are seen, but were fair.

        None where there are no such coins, or a cap makes them depend on other units' coins.
        """
        rate = self.cohort.expected(population) / population
        if rate >= 1 or (self.cohort.fixed and self.cohort.cap is not None):
            return None
        release = self.release(dim, population, view)
        return events.Attended(release, rate, rounds, self.most(rounds, view))

    def kept_by_clients(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.Composed | None:
        """The same if clients themselves refuse to take part beyond the cap.

        None where there is no cap that a view does not rely on anyway.
        """
        cap = self.cohort.cap
        if cap is None or cap >= self.most(rounds, view):
            return None
        return events.Composed(self.release(dim, population, view), cap)

    def _amplified(self, release: events.Release, population: int) -> events.Round:
        """Sampling, where it is proved: what clients remember by a part of one's own is not."""
        if self.memory.kept and foreign(self.memory):
            return release
        return self.cohort.amplify(release, population)

    def with_noise(
        self, level: float, dim: int, population: int, epsilon: float, delta: float
    ) -> Recipe:
        """The same recipe with its noise settled at a level; delta is a round's share."""
        message = self.message(dim)
        sensitivity = message.sensitivity(self.adjacency())
        share = Share(self.cohort.expected(population), epsilon, delta)
        return replace(self, noise=self.noise.scaled(level, message, sensitivity, share))


def foreign(part: object) -> bool:
    """Whether a part's class is not fedveil's own; a subclass of one is not either."""
    if type(part).__module__.partition(".")[0] != "fedveil":
        return True
    inside = getattr(part, "stranger", None)  # what stands in for one after a crash
    return inside is not None and foreign(inside)


def _until_the_cap(cohort: Cohort, hidden: events.Composed) -> tuple[events.Composed, ...]:
    """The sampled rounds by which a unit has almost surely taken part as often as its cap allows.

    It takes part in no later one, but for the chance that is set aside. Only of fedveil's own
    cohort is it known that its coins come up as often as their rate says.
    """
    event, cap = hidden.event, cohort.cap
    if type(cohort) is not Poisson or cap is None or not isinstance(event, events.PoissonSampled):
        return ()
    found = ((chance, rounds_until(event.rate, cap, chance)) for chance in NOT_YET)
    return tuple(
        events.Composed(events.Dominated(event, distance=chance / rounds), rounds)
        for chance, rounds in found
        if rounds < hidden.count
    )


@functools.lru_cache(maxsize=256)
def rounds_until(rate: float, cap: int, chance: float) -> int:
    """The least number of rounds with P(Bin(rounds, rate) < cap) ≤ chance.

    >>> rounds_until(0.5, 1, 0.001), rounds_until(0.1, 5, 1e-9)
    (10, 301)
    """
    from scipy.special import bdtr

    low, high = 0, cap
    while bdtr(cap - 1, high, rate) * (1 + 1e-6) > chance:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        enough = bdtr(cap - 1, middle, rate) * (1 + 1e-6) <= chance
        low, high = (low, middle) if enough else (middle, high)
    return high


def _refuse_misfits(recipe: Recipe) -> None:
    bounded = recipe.bound.norms(1).bounded
    grid = recipe.message(1).grid is not None if bounded else False
    bound, noise, quantize = (type(part).__name__ for part in _middle(recipe))
    _refuse_unknown_words(recipe)
    if recipe.private and not bounded:
        raise UserError(
            f"{recipe.name}: bound {bound} and noise {noise} do not fit: no noise hides an "
            "unbounded message; use Clip, Normalize or SmoothNormalize."
        )
    if not recipe.quantize.rows_needed and recipe.message(2) != recipe.bound.norms(2):
        raise UserError(
            f"{recipe.name}: quantize {quantize} changes what a message can be, but says that it "
            "does not need each message (rows_needed), so it would never be applied; set "
            "rows_needed = True."
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
    if isinstance(recipe.bound, AdaptiveClip) and recipe.noise.at == "client":
        raise UserError(
            f"{recipe.name}: bound AdaptiveClip and noise {noise} at the clients do not fit: the "
            "count of short updates is noised by the server; use noise at the server."
        )
    if recipe.cohort.honest is not None and recipe.noise.at == "server":
        raise UserError(
            f"{recipe.name}: cohort {type(recipe.cohort).__name__} with honest and noise {noise} "
            "at the server do not fit: a rejected round would tell how many came; use noise at "
            "the clients, or leave honest out."
        )
    if isinstance(recipe.memory, ErrorCompensation):
        _refuse_memory_misfits(recipe, recipe.memory)


def _refuse_unknown_words(recipe: Recipe) -> None:
    """Of parts of one's own: what they call by another name would be accounted for as something."""
    if (found := recipe.noise.at) not in ("server", "client"):
        raise UserError(
            f"{recipe.name}: noise {type(recipe.noise).__name__} is added at '{found}'; it must be "
            "'server' or 'client'."
        )
    if (kind := recipe.cohort.adjacency) not in get_args(Adjacency):
        raise UserError(
            f"{recipe.name}: cohort {type(recipe.cohort).__name__} is for '{kind}' neighbours; it "
            f"must be {', '.join(get_args(Adjacency))}."
        )


def _refuse_memory_misfits(recipe: Recipe, memory: ErrorCompensation) -> None:
    if isinstance(recipe.report, Model):
        raise UserError(
            f"{recipe.name}: memory ErrorCompensation and report Model do not fit: the memory "
            "accumulates differences; use GradientScale or Difference."
        )
    proved = type(recipe.cohort) in (Poisson, Everyone)
    if recipe.private and memory.update == "participants" and not proved:
        raise UserError(
            f"{recipe.name}: memory of participants and cohort {type(recipe.cohort).__name__} do "
            "not fit: what absent clients remember depends on who was drawn, which is covered for "
            "independent draws only; use Poisson, Everyone, or update='everyone'."
        )


def _middle(recipe: Recipe) -> tuple[Bound, Noise, Quantize]:
    return recipe.bound, recipe.noise, recipe.quantize
