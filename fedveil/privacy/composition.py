"""Composition of several runs on the same data: an ε(δ) that holds however the next is chosen.

Anyone who sees the models of the first run may choose the noise of the second run by them.
Composition theorems for events that are fixed in advance do not cover that (Rogers et al. 2016).
The argument for the composition used here is in docs/privacy.md, "The ledger".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Adjacency
from fedveil.accounting.plain import event_from_plain, event_to_plain
from fedveil.data.origin import REAL, Origin
from fedveil.errors import UserError
from fedveil.parts.cohort import rounds_until
from fedveil.parts.part import Part, foreign
from fedveil.recipe import Recipe, View

ORDERS = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 30.0, 64.0, 256.0)  # known for every noise
MIDDLE = 7.0  # the order at which proofs are compared
HARDLY = 1e-13  # escapes too small to prefer another proof
MANY = 10**9  # rounds: more than any run trains
PREFERRED: tuple[Adjacency, ...] = ("zero-out", "add-remove", "replace-one")  # for an account
Orders = Sequence[float]


class Way(NamedTuple):
    """One proof: the event of a round, of which at most `most` rounds count, after `first`.

    `cap` is set if the proof counts the sampled rounds until a cap is reached with high probability
    (`Cohort.until_cap`). Its event then sets aside the probability that the cap is not reached.
    """

    event: events.Round
    most: int | None
    cap: int | None = None
    first: events.Dominated | None = None

    def spent(self, rounds: int) -> events.Composed:
        """The event of a number of rounds by this proof.

        Whether a cap is reached is decided once, by all the coins. Its probability is therefore set
        aside in full, also for fewer rounds than the proof counts.
        """
        if self.most is None or rounds >= self.most:
            most = rounds if self.most is None else self.most
            return events.Composed(self.event, most, self.first)
        if self.cap is None or not rounds:
            return events.Composed(self.event, rounds, self.first)
        assert isinstance(self.event, events.Dominated)
        whole = replace(self.event, distance=self.event.distance * self.most / rounds)
        return events.Composed(whole, rounds, self.first)

    def redrawn(self, lost: int) -> Way:
        """The same proof after `lost` rounds were lost and drawn again with other coins.

        At most `lost` participations of a unit do not count towards its cap, whatever decided
        which rounds were lost (docs/privacy.md, "Stopping").
        """
        if isinstance(self.event, events.Correlated | events.CyclicSampled):
            return self._replace(event=_over_the_run(self.event, lost=lost, first=0))
        if self.most is None or not lost:
            return self
        if self.cap is None:
            return self._replace(most=self.most + lost)
        assert isinstance(self.event, events.Dominated)
        assert isinstance(self.event.by, events.PoissonSampled)
        chance, cap = self.event.distance * self.most, self.cap + lost
        most = rounds_until(self.event.by.rate, cap, chance)
        return Way(replace(self.event, distance=chance / most), most, cap, self.first)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        cap = {} if self.cap is None else {"cap": self.cap}
        first = {} if self.first is None else {"first": event_to_plain(self.first)}
        return {"event": event_to_plain(self.event), "most": self.most, **cap, **first}


@dataclass(frozen=True)
class ReleasePlan:
    """The release of a run in one view, round by round, and the adjacencies it holds for."""

    ways: tuple[Way, ...]
    adjacencies: tuple[Adjacency, ...]

    @property
    def first(self) -> events.Dominated | None:
        """The release before the first round: the same in every proof."""
        return self.ways[0].first

    def spent(self, rounds: int) -> events.Spent:
        """The event of a number of rounds, as in `Recipe.spent`: the best of several proofs."""
        unlimited = [way.event for way in self.ways if way.most is None]
        ways = tuple(
            way.spent(rounds)
            for way in self.ways
            if way.most is None or rounds > way.most or not _same_with_aside(way.event, unlimited)
        )
        return ways[0] if len(ways) == 1 else events.Either(ways)

    def redrawn(self, rounds: int) -> ReleasePlan:
        """The plan after a number of rounds were lost and drawn again, in addition to a cap."""
        return replace(self, ways=tuple(way.redrawn(rounds) for way in self.ways))

    def of_silo(self, silo: int) -> ReleasePlan:
        """What the plan releases of the records of one silo; the whole plan without silos."""
        ways = tuple(way._replace(event=_of_silo(way.event, silo)) for way in self.ways)
        return replace(self, ways=ways)

    @property
    def over_the_run(self) -> bool:
        """Whether its rounds are one release together, so that they do not add up one by one."""
        return not all(map(_adds_up, self.ways)) and all(way.most is None for way in self.ways)

    def resumed(self, round: int) -> ReleasePlan:
        """The plan of a noise stream that takes over at a round, with the past noise."""
        ways = (
            way._replace(event=_over_the_run(way.event, first=round))
            if isinstance(way.event, events.Correlated | events.CyclicSampled)
            else way
            for way in self.ways
        )
        return replace(self, ways=tuple(ways))

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        ways = [way.plain() for way in self.ways]
        return {"ways": ways, "adjacencies": list(self.adjacencies)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> ReleasePlan:
        """Read a plan from the output of `plain`."""
        ways = [
            Way(event_from_plain(way["event"]), way["most"], None, _first_of(way))
            for way in plain["ways"]
        ]
        # Old plans do not record their cap. It is what the proof without sampling counts.
        caps = [way["cap"] for way in plain["ways"] if "cap" in way]
        cap = min(caps or [way.most for way in ways if way.most is not None], default=None)
        return ReleasePlan(_relying_on(cap, ways), tuple(plain["adjacencies"]))


def _first_of(way: Mapping[str, Any]) -> events.Dominated | None:
    """The release before the first round; plans of versions before 0.3 have none."""
    if "first" not in way:
        return None
    first = event_from_plain(way["first"])
    if not isinstance(first, events.Dominated):
        raise UserError("A plan's first release is of an unknown kind. Use a newer version.")
    return first


def _of_silo(event: events.Round, silo: int) -> events.Round:
    if not isinstance(event, events.InSilos) or len(event.silos) == 1:
        return event
    return replace(event, silos=(event.silos[silo],))


def _over_the_run(
    event: events.Correlated | events.CyclicSampled, first: int, lost: int = 0
) -> events.Correlated | events.CyclicSampled:
    """The event with another first round and number of lost rounds."""
    if isinstance(event, events.CyclicSampled):
        return replace(event, event=replace(event.event, first=first, lost=lost))
    return replace(event, first=first, lost=lost)


def _relying_on(cap: int | None, ways: Sequence[Way]) -> tuple[Way, ...]:
    """The proofs, with the cap set in those that count sampled rounds until it is reached."""
    unlimited = [way.event for way in ways if way.most is None]
    return tuple(
        way._replace(cap=cap)
        if way.most is not None and _same_with_aside(way.event, unlimited)
        else way
        for way in ways
    )


def _same_with_aside(event: events.Round, others: Sequence[events.Round]) -> bool:
    """Whether it is another proof's event with something set aside, so worse for equal rounds."""
    return isinstance(event, events.Dominated) and event.by in others


def plan(
    recipe: Recipe, dim: int, population: int, view: View, origin: Origin = REAL
) -> ReleasePlan:
    """The releases of a run of a recipe with calibrated noise, in a view.

    If something was read from the data without noise, there is no ε, whatever noise the recipe
    adds to its sums.
    """
    adjacencies = covered(recipe, view)
    if reason := _unnoised(recipe, origin):
        return ReleasePlan((Way(events.NonPrivate(reason), None),), adjacencies)
    return ReleasePlan(ways(recipe, dim, population, view), adjacencies)


def _unnoised(recipe: Recipe, origin: Origin) -> str:
    if recipe.bound.leaks:
        return "its clipping threshold was taken from these data without noise"
    if origin.exclusions:
        return (
            f"{origin.excluded} were read from these data without noise (declare public ranges, "
            "categories and classes instead)"
        )
    return ""


def reason(runs: Sequence[Charged], budgeted: bool = False) -> str:
    """Why the composition of some runs has no finite ε, if not for the amount of noise."""
    for run in runs:
        for way in run.plan.ways:
            if isinstance(way.event, events.NonPrivate):
                return way.event.reason
    if adjacency(runs, budgeted) is not None:
        return ""
    if budgeted:
        return f"the runs on these data do not all hold for {adjacency(runs[:1])} neighbours"
    return "the runs on these data have no adjacency in common"


def ways(recipe: Recipe, dim: int, population: int, view: View) -> tuple[Way, ...]:
    """The proofs for any number of rounds, each with the most rounds that count."""
    spent = recipe.spent(dim, population, MANY, view)
    found = spent.ways if isinstance(spent, events.Either) else (spent,)
    composed = (way for way in found if isinstance(way, events.Composed))
    proofs = [
        Way(way.event, None if way.count == MANY else way.count, None, way.first)
        for way in composed
    ]
    return _relying_on(recipe.cap, proofs)


def covered(recipe: Recipe, view: View) -> tuple[Adjacency, ...]:
    """The adjacencies for which a recipe's events hold, first the one it is accounted for.

    Zeroing a unit out is replacing it by one whose message is zero, and for a sum with noise from
    the server it is removing it. Only the count of an adaptive clip distinguishes the last two. For
    user-defined parts, nothing is known but what they state themselves.
    """
    own = recipe.adjacency(view)
    parts = [part for one in (recipe, *recipe.inner_recipes) for part in _contributing(one)]
    if any(map(foreign, parts)) or (recipe.by_record and foreign(recipe.local)):
        return (own,)
    if own == "replace-one":
        return ("replace-one", "zero-out")
    if own == "add-remove":
        return ("add-remove",) if recipe.bound.adapts else ("add-remove", "zero-out")
    removable = recipe.noise.at == "server" and recipe.cohort.independent
    return ("zero-out", "add-remove") if removable else ("zero-out",)


def _contributing(recipe: Recipe) -> tuple[Part, ...]:
    """The parts that the release of a round depends on."""
    return recipe.cohort, recipe.memory, recipe.bound, recipe.quantize, recipe.noise


@dataclass(frozen=True)
class Charged:
    """A run in the ledger: its plan, its planned rounds, and its reserved rounds."""

    plan: ReleasePlan
    planned: int
    rounds: int


def common(runs: Sequence[Charged]) -> tuple[Adjacency, ...]:
    """The adjacencies that the events of all runs hold for, in the first run's order."""
    each = [run.plan.adjacencies for run in runs]
    return tuple(one for one in each[0] if all(one in others for others in each))


def adjacency(runs: Sequence[Charged], budgeted: bool = False) -> Adjacency | None:
    """The adjacency of an account: one that all runs hold for, zero-out if possible, or None.

    A budget has one before later runs are chosen, so there the first run fixes it.
    """
    found = sorted(common(runs[:1] if budgeted else runs), key=PREFERRED.index)
    return found[0] if found and found[0] in common(runs) else None


def epsilon(runs: Sequence[Charged], delta: float, target: float | None = None) -> float:
    """The ε of the composition of runs, in the order they began, to be compared with `target`.

    For one kind of release, it is the accountant's ε, at δ up to the first run's plan and at the
    `_share` of δ beyond. For several kinds, it follows from Rényi divergences, at the rest of δ.
    """
    runs = [run for run in runs if run.rounds]
    if not runs:
        return 0.0
    if adjacency(runs, target is not None) is None:
        return math.inf
    first, total = runs[0], sum(run.rounds for run in runs)
    alike = all(run.plan == first.plan for run in runs)
    repeatable = first.plan.first is None and all(map(_adds_up, first.plan.ways))
    if len(runs) == 1 or (alike and repeatable):
        at = delta if total <= first.planned else _share(first, delta, target)
        return accounting.epsilon(first.plan.spent(total), at)
    return _by_orders(runs, delta - _share(first, delta, target), target)


def _adds_up(way: Way) -> bool:
    """Whether the rounds of several runs count as rounds of one run."""
    if isinstance(way.event, events.InSilos):  # a record may be in another silo in each run
        return way.most is None and len(set(way.event.silos)) == 1
    over_the_run = isinstance(way.event, events.Correlated | events.CyclicSampled)
    return way.most is None and not over_the_run


def _share(first: Charged, delta: float, target: float | None) -> float:
    """The δ reserved for the case of one kind of release: δ/2, or all that its plan may use."""
    if target is None:
        return delta / 2
    planned = accounting.delta(first.plan.spent(first.planned), target)
    return min(max(delta / 2, planned), delta)


def _by_orders(runs: Sequence[Charged], delta: float, target: float | None) -> float:
    """min over α of the ε of Σ D_α, at ¾δ shared by the orders. ¼δ covers escape and distance.

    Each order alone is a filter, whatever is chosen: Feldman and Zrnic 2021. The target determines
    which orders share δ. Without a target, the best choice in hindsight is used.
    """
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    if delta <= 0:
        return math.inf
    parts = [_divergence(_way(run), run.rounds) for run in runs]
    total = np.sum([part.orders for part in parts], axis=0)
    several = range(1, len(ORDERS) + 1) if target is None else [_useful(target, delta)]
    found = min(float(compute_epsilon(ORDERS[:m], total[:m], 0.75 * delta / m)[0]) for m in several)
    largest = min(max(found, target or 0.0), 700.0)
    aside = sum(part.escape + (1 + math.exp(largest)) * part.distance for part in parts)
    return found if aside <= delta / 4 else math.inf


def _useful(target: float, delta: float) -> int:
    """How many of the orders can be the best one for this ε: none beyond the best of a Gaussian.

    >>> ORDERS[_useful(8.0, 1e-5) - 1], ORDERS[_useful(1.0, 1e-5) - 1]
    (4.0, 30.0)
    """
    best = 1 + 2 * math.log(1 / delta) / target
    return min(sum(order < best for order in ORDERS) + 1, len(ORDERS))


def _way(run: Charged) -> Way:
    """The proof that accounts for a run, chosen by its plan and so before its first round.

    It is never one that counts rounds until a cap is reached. The probability that the cap is not
    reached belongs to the run, not to its rounds, and case 2 sums escape and distance over rounds.
    """
    middle = ORDERS.index(MIDDLE)
    ways = (way for way in run.plan.ways if way.cap is None)
    return min(ways, key=lambda way: _divergence(way, run.planned).orders[middle])


class Divergence(NamedTuple):
    """D_α ≤ orders at some orders, up to `escape` and `distance` as in `events.RenyiRelease`."""

    orders: np.ndarray
    escape: float
    distance: float


def curve(run: Charged) -> Divergence:
    """D_α of a whole run at all of `events.ORDERS`, by the proof chosen in advance."""
    return _divergence(_way(run), run.rounds, events.ORDERS)


def _divergence(way: Way, rounds: int, orders: Orders = ORDERS) -> Divergence:
    if isinstance(way.event, events.Correlated):
        return _divergence(way._replace(event=way.event.whole(rounds)), 1, orders)
    if isinstance(way.event, events.CyclicSampled):
        whole = way.event.whole(rounds)
        return _divergence(way._replace(event=whole.event, most=None), whole.count, orders)
    count = rounds if way.most is None else min(rounds, way.most)
    once, nothing = _once(way.event, orders), Divergence(np.zeros(len(orders)), 0.0, 0.0)
    first = nothing if way.first is None else _once(way.first, orders)
    return Divergence(
        count * once.orders + first.orders,
        count * once.escape + first.escape,
        count * once.distance + first.distance,
    )


def _once(event: events.Round, orders: Orders = ORDERS) -> Divergence:
    """The divergence of one release, from dp-accounting if it has one."""
    import dp_accounting as dp

    match event:
        case events.NonPrivate():
            return Divergence(np.full(len(orders), np.inf), 0.0, 0.0)
        case events.Proven(ways):
            return _cheapest([_once(way, orders) for way in ways], list(orders).index(MIDDLE))
        case events.RenyiRelease(divergences, escape, distance):
            places = [events.ORDERS.index(order) for order in orders]
            return Divergence(np.array(divergences)[places], escape, distance)
        case events.Dominated(by, escape, distance):  # conditioned on mass 1 − escape
            grown = -math.log1p(-escape) if escape < 1 else math.inf
            return Divergence(_once(by, orders).orders + grown, escape, distance)
        case events.InSilos(silos, times):
            each = [_once(silo, orders) for silo in dict.fromkeys(silos)]
            return Divergence(
                times * np.max([silo.orders for silo in each], axis=0),
                times * max(silo.escape for silo in each),
                times * max(silo.distance for silo in each),
            )
        case events.GaussianRelease(ratio):
            return _of_library(dp.GaussianDpEvent(ratio), orders)
        case events.PoissonSampled(rate, events.GaussianRelease(ratio)):
            sampled = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(ratio))
            return _between(_of_library(sampled, _whole(orders)), orders)
        case events.SampledWithoutReplacement(cohort, population, events.GaussianRelease(ratio)):
            drawn = dp.SampledWithoutReplacementDpEvent(
                population, cohort, dp.GaussianDpEvent(ratio)
            )
            relation = dp.NeighboringRelation.REPLACE_ONE
            return _between(_of_library(drawn, _whole(orders), relation), orders)
        case events.ApproximateRelease() as pure:
            return _of_pure(pure, orders)
        case events.PoissonSampled(rate, events.ApproximateRelease() as pure):
            return _of_pure(accounting.subsampled(pure, rate), orders)
        case events.SampledWithoutReplacement(cohort, size, events.ApproximateRelease() as pure):
            return _of_pure(accounting.subsampled(pure, cohort / size), orders)
    raise TypeError(f"no Rényi divergence for {event!r}")


def _cheapest(proofs: list[Divergence], middle: int) -> Divergence:
    """The proof with the least divergence among those with little escape: known in advance."""
    most = HARDLY + 1.5 * min(proof.escape for proof in proofs)
    fine = [proof for proof in proofs if proof.escape <= most]
    return min(fine, key=lambda proof: float(proof.orders[middle]))


def _whole(orders: Orders) -> Orders:
    """The integer orders around these, at least 2: there a sampled Gaussian is a finite sum."""
    around = {round(order) for order in orders for round in (math.floor, math.ceil)}
    return sorted(float(order) for order in around | {2} if order >= 2)


def _between(known: Divergence, orders: Orders) -> Divergence:
    """(α − 1)·D_α is convex in α and 0 at 1, so between integer orders the chord is above it."""
    whole = np.array(_whole(orders))
    if len(whole) == len(orders):
        return known
    chords = np.interp(orders, [1.0, *whole], [0.0, *((whole - 1) * known.orders)])
    return known._replace(orders=chords / (np.array(orders) - 1))


def _of_library(event: Any, orders: Orders, relation: Any = None) -> Divergence:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders, *([] if relation is None else [relation])).compose(event)
    return Divergence(np.array(accountant._rdp), 0.0, 0.0)  # there is no public attribute


def _of_pure(event: events.ApproximateRelease, at: Orders) -> Divergence:
    """(ε, δ)-DP: up to δ, it is dominated by randomized response, the worst case of ε-DP.

    D_α = ε + log((1 + e^{−(2α−1)ε})/(1 + e^{−ε}))/(α − 1).  Bun and Steinke 2016.
    """
    e, orders = event.epsilon, np.array(at)
    gap = np.log1p(np.exp((1 - 2 * orders) * e)) - math.log1p(math.exp(-e))
    return Divergence(np.clip(e + gap / (orders - 1) + 1e-15, 0.0, e), event.delta, 0.0)
