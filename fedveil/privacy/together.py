"""What several runs on the same data come to: ε(δ) that holds however the next one is chosen.

Who sees the first run's models may choose the second run's noise by them. Composition theorems for
events that are fixed beforehand do not cover that (Rogers et al. 2016); the argument for what is
counted here is in docs/privacy.md, "The ledger".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fedveil.data.origin import REAL, Origin
from fedveil.parts.bound import AdaptiveClip, ProbedClip
from fedveil.privacy import accounting, events
from fedveil.privacy.norms import Adjacency
from fedveil.privacy.plain import event_from_plain, event_to_plain
from fedveil.recipe import Recipe, View, foreign, rounds_until

ORDERS = (2.0, 3.0, 4.0, 5.0, 7.0, 10.0, 16.0, 30.0, 64.0, 256.0)  # at which every noise is known
MIDDLE = 7.0  # the order at which proofs are compared
HARDLY = 1e-13  # escapes that are no reason to prefer another proof
MANY = 10**9  # rounds: more than anybody plays
Orders = Sequence[float]


class Way(NamedTuple):
    """One proof: the event of a round, of which at most `most` count.

    `cap` is set where the proof counts the sampled rounds until a cap is almost surely reached
    (`recipe._until_the_cap`): its event then sets aside the chance that it is not.
    """

    event: events.Round
    most: int | None
    cap: int | None = None

    def spent(self, rounds: int) -> events.Composed:
        """So many rounds by this proof.

        Whether a cap is reached is decided once, by all the coins: it is paid for in whole, also
        by fewer rounds than it takes.
        """
        if self.most is None or rounds >= self.most:
            return events.Composed(self.event, rounds if self.most is None else self.most)
        if self.cap is None or not rounds:
            return events.Composed(self.event, rounds)
        assert isinstance(self.event, events.Dominated)
        whole = replace(self.event, distance=self.event.distance * self.most / rounds)
        return events.Composed(whole, rounds)

    def redrawn(self, lost: int) -> Way:
        """The same proof where so many rounds were lost and drawn again with other coins.

        At most so many of a unit's participations do not count towards its cap, whatever decided
        which rounds were lost (docs/privacy.md, "Stopping").
        """
        if self.most is None or not lost:
            return self
        if self.cap is None:
            return self._replace(most=self.most + lost)
        assert isinstance(self.event, events.Dominated)
        assert isinstance(self.event.by, events.PoissonSampled)
        chance, cap = self.event.distance * self.most, self.cap + lost
        most = rounds_until(self.event.by.rate, cap, chance)
        return Way(replace(self.event, distance=chance / most), most, cap)

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        cap = {} if self.cap is None else {"cap": self.cap}
        return {"event": event_to_plain(self.event), "most": self.most, **cap}


@dataclass(frozen=True)
class Plan:
    """What a run releases towards one view, round by round, and for which neighbours it holds."""

    ways: tuple[Way, ...]
    adjacencies: tuple[Adjacency, ...]
    stranded: events.Round | None = None  # of a round, once rounds were lost that a cap relies on

    def spent(self, rounds: int) -> events.Spent:
        """As `Recipe.spent` has it: so many rounds, the best proof of several."""
        unlimited = [way.event for way in self.ways if way.most is None]
        ways = tuple(
            way.spent(rounds)
            for way in self.ways
            if way.most is None or rounds > way.most or not _same_with_aside(way.event, unlimited)
        )
        return ways[0] if len(ways) == 1 else events.Either(ways)

    def redrawn(self, rounds: int) -> Plan:
        """The same where so many rounds were lost and drawn anew: they come on top of a cap."""
        if rounds and self.stranded is not None:
            return Plan((Way(self.stranded, None),), self.adjacencies)
        return replace(self, ways=tuple(way.redrawn(rounds) for way in self.ways))

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        ways = [way.plain() for way in self.ways]
        plain: dict[str, Any] = {"ways": ways, "adjacencies": list(self.adjacencies)}
        if self.stranded is not None:
            plain["stranded"] = event_to_plain(self.stranded)
        return plain

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Plan:
        """The plan that `plain` wrote down."""
        ways = [Way(event_from_plain(way["event"]), way["most"]) for way in plain["ways"]]
        # Plans once did not record their cap; it is what the proof without sampling counts.
        caps = [way["cap"] for way in plain["ways"] if "cap" in way]
        cap = min(caps or [way.most for way in ways if way.most is not None], default=None)
        stranded = plain.get("stranded")
        return Plan(
            _relying_on(cap, ways),
            tuple(plain["adjacencies"]),
            None if stranded is None else event_from_plain(stranded),
        )


def _relying_on(cap: int | None, ways: Sequence[Way]) -> tuple[Way, ...]:
    """The proofs, with the cap in those that count sampled rounds until it is reached."""
    unlimited = [way.event for way in ways if way.most is None]
    return tuple(
        way._replace(cap=cap)
        if way.most is not None and _same_with_aside(way.event, unlimited)
        else way
        for way in ways
    )


def _same_with_aside(event: events.Round, others: Sequence[events.Round]) -> bool:
    """Whether it is another proof's event with something set aside: worse for as many rounds."""
    return isinstance(event, events.Dominated) and event.by in others


def plan(recipe: Recipe, dim: int, population: int, view: View, origin: Origin = REAL) -> Plan:
    """What a run of a recipe with settled noise will release towards a view.

    What was read from the data without noise has no ε, whatever the recipe adds to its sums.
    """
    adjacencies = covered(recipe, view)
    if reason := _unnoised(recipe, origin):
        return Plan((Way(events.NonPrivate(reason), None),), adjacencies)
    strange = recipe.cohort.cap is not None and foreign(recipe.cohort)
    stranded = recipe.release(dim, population, view) if strange else None
    return Plan(ways(recipe, dim, population, view), adjacencies, stranded)


def _unnoised(recipe: Recipe, origin: Origin) -> str:
    if isinstance(recipe.bound, ProbedClip):
        return "its clipping threshold was taken from these data without noise"
    if origin.exclusions:
        return (
            f"{origin.excluded} were read from these data without noise (declare public ranges, "
            "categories and classes instead)"
        )
    return ""


def reason(runs: Sequence[Charged]) -> str:
    """Why some runs have no finite ε together, where it is not for the amount of noise."""
    for run in runs:
        for way in run.plan.ways:
            if isinstance(way.event, events.NonPrivate):
                return way.event.reason
    if fitting(runs):
        return ""
    return f"the runs on these data do not all hold for {adjacency(runs)} neighbours"


def ways(recipe: Recipe, dim: int, population: int, view: View) -> tuple[Way, ...]:
    """The proofs for a run of any number of rounds, each with how many rounds count at most."""
    spent = recipe.spent(dim, population, MANY, view)
    found = spent.ways if isinstance(spent, events.Either) else (spent,)
    composed = (way for way in found if isinstance(way, events.Composed))
    proofs = [Way(way.event, None if way.count == MANY else way.count) for way in composed]
    return _relying_on(recipe.cohort.cap, proofs)


def covered(recipe: Recipe, view: View) -> tuple[Adjacency, ...]:
    """The neighbours for which a recipe's events hold; the one it was accounted for comes first.

    Blanking a unit out is replacing it by one whose message is zero, and for a sum with noise from
    the server it is removing it. Only the count of an adaptive clip tells the last two apart. Of
    parts that are not fedveil's nothing but what they say themselves is known.
    """
    own = recipe.adjacency(view)
    parts = (recipe.cohort, recipe.memory, recipe.bound, recipe.quantize, recipe.noise)
    if any(map(foreign, parts)):
        return (own,)
    if own == "replace-one":
        return ("replace-one", "zero-out")
    if own == "add-remove":
        apart = isinstance(recipe.bound, AdaptiveClip)
        return ("add-remove",) if apart else ("add-remove", "zero-out")
    return ("zero-out", "add-remove") if recipe.noise.at == "server" else ("zero-out",)


@dataclass(frozen=True)
class Charged:
    """A run as the ledger has it: what it planned, and how many rounds were reserved."""

    plan: Plan
    planned: int
    rounds: int


def adjacency(runs: Sequence[Charged]) -> Adjacency:
    """The neighbours that an account speaks of, fixed by its first run: zero-out if it can be."""
    first = runs[0].plan.adjacencies
    return "zero-out" if "zero-out" in first else first[0]


def fitting(runs: Sequence[Charged]) -> bool:
    """Whether all runs' events hold for the account's neighbours."""
    return all(adjacency(runs) in run.plan.adjacencies for run in runs)


def epsilon(runs: Sequence[Charged], delta: float, target: float | None = None) -> float:
    """What the runs have spent together, in the order they began, towards keeping `target`.

    One kind of release: as accounted, at δ up to the first run's plan and at a half of it beyond.
    Several kinds: by Rényi divergences, at what is left of δ.
    """
    runs = [run for run in runs if run.rounds]
    if not runs:
        return 0.0
    if not fitting(runs):
        return math.inf
    first, total = runs[0], sum(run.rounds for run in runs)
    alike = all(run.plan == first.plan for run in runs)
    if alike and (len(runs) == 1 or all(way.most is None for way in first.plan.ways)):
        at = delta if total <= first.planned else _share(first, delta, target)
        return accounting.epsilon(first.plan.spent(total), at)
    return _by_orders(runs, delta - _share(first, delta, target), target)


def _share(first: Charged, delta: float, target: float | None) -> float:
    """What is set aside for never leaving the first kind: δ/2, or all that its plan may use."""
    if target is None:
        return delta / 2
    planned = accounting.delta(first.plan.spent(first.planned), target)
    return min(max(delta / 2, planned), delta)


def _by_orders(runs: Sequence[Charged], delta: float, target: float | None) -> float:
    """min over α of the ε of Σ D_α at ¾δ shared by the orders; ¼δ pays for what was set aside.

    Each order alone is a filter, whatever is chosen: Feldman and Zrnic 2021. Which orders share is
    settled by the target; without one, by what would have been best.
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
    """How many of the orders can be the best one for this ε: not those beyond a Gaussian's own.

    >>> ORDERS[_useful(8.0, 1e-5) - 1], ORDERS[_useful(1.0, 1e-5) - 1]
    (4.0, 30.0)
    """
    best = 1 + 2 * math.log(1 / delta) / target
    return min(sum(order < best for order in ORDERS) + 1, len(ORDERS))


def _way(run: Charged) -> Way:
    """The proof to count a run by, chosen by its plan and so before its first round.

    Not one that counts rounds until a cap is reached: the chance that it is not belongs to the
    run, not to its rounds, and the asides of case 2 are summed over rounds.
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
    """D_α of a whole run at all of `events.ORDERS`, by the proof chosen beforehand."""
    return _divergence(_way(run), run.rounds, events.ORDERS)


def _divergence(way: Way, rounds: int, orders: Orders = ORDERS) -> Divergence:
    count = rounds if way.most is None else min(rounds, way.most)
    once = _once(way.event, orders)
    return Divergence(count * once.orders, count * once.escape, count * once.distance)


def _once(event: events.Round, orders: Orders = ORDERS) -> Divergence:
    """Of one release, by dp-accounting where it has one."""
    import dp_accounting as dp

    match event:
        case events.NonPrivate():
            return Divergence(np.full(len(orders), np.inf), 0.0, 0.0)
        case events.Proven(ways):
            return _cheapest([_once(way, orders) for way in ways], list(orders).index(MIDDLE))
        case events.RenyiRelease(divergences, escape, distance):
            places = [events.ORDERS.index(order) for order in orders]
            return Divergence(np.array(divergences)[places], escape, distance)
        case events.Dominated(by, escape, distance):  # what is not escaped weighs 1 − escape
            grown = -math.log1p(-escape) if escape < 1 else math.inf
            return Divergence(_once(by, orders).orders + grown, escape, distance)
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
    """The proof with the least divergence of those that set little aside: known beforehand."""
    most = HARDLY + 1.5 * min(proof.escape for proof in proofs)
    fine = [proof for proof in proofs if proof.escape <= most]
    return min(fine, key=lambda proof: float(proof.orders[middle]))


def _whole(orders: Orders) -> Orders:
    """The whole orders around them, from 2 on: only there a sampled Gaussian is a finite sum."""
    around = {round(order) for order in orders for round in (math.floor, math.ceil)}
    return sorted(float(order) for order in around | {2} if order >= 2)


def _between(known: Divergence, orders: Orders) -> Divergence:
    """(α − 1)·D_α is convex in α and 0 at 1, so between whole orders the chord is above it."""
    whole = np.array(_whole(orders))
    if len(whole) == len(orders):
        return known
    chords = np.interp(orders, [1.0, *whole], [0.0, *((whole - 1) * known.orders)])
    return known._replace(orders=chords / (np.array(orders) - 1))


def _of_library(event: Any, orders: Orders, relation: Any = None) -> Divergence:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders, *([] if relation is None else [relation])).compose(event)
    return Divergence(np.array(accountant._rdp), 0.0, 0.0)  # it has no public way to ask


def _of_pure(event: events.ApproximateRelease, at: Orders) -> Divergence:
    """(ε, δ): but for δ it is randomized response, whose D_α is the largest of all ε-DP.

    D_α = ε + log((1 + e^{−(2α−1)ε})/(1 + e^{−ε}))/(α − 1).  Bun and Steinke 2016.
    """
    e, orders = event.epsilon, np.array(at)
    gap = np.log1p(np.exp((1 - 2 * orders) * e)) - math.log1p(math.exp(-e))
    return Divergence(np.clip(e + gap / (orders - 1) + 1e-15, 0.0, e), event.delta, 0.0)
