"""The privacy statement of a run: each view's (ε, δ) and all that it takes to mean something.

For a lawyer and a reviewer alike: unit, neighbours, views, what is released, sampling, noise,
accountant, assumptions, and what is not covered. As sentences, as text and as plain values.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_CEILING, Decimal
from typing import Any

from fedveil.data.origin import REAL, Origin
from fedveil.parts.bound import AdaptiveClip, ProbedClip
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.noise import Gaussian, RoundedGaussian
from fedveil.privacy import accounting, events
from fedveil.recipe import Recipe, View, foreign
from fedveil.wire import length

VIEWS: tuple[View, ...] = ("models", "sum", "messages")
SEEN: dict[str, str] = {
    "models": "sees every released model but no individual message",
    "sum": "sees who takes part and the sum of their messages, but no individual message",
    "messages": "sees every client's message and who sent it",
}
BRIEFLY: dict[str, str] = {
    "models": "seeing the released models only",
    "sum": "seeing who takes part and the sum of their messages",
    "messages": "seeing every message and who sent it",
}


UNRECORDED = "not recorded; this run counts against no budget."
RECORDED = "recorded in the ledger"  # under a name that is a hash of the data, so not told here


@dataclass(frozen=True)
class Rounds:
    """The rounds that a guarantee is for, fixed before the run, and how many have been run.

    Stopping earlier, for whatever reason, is post-processing of the planned run: the ε of
    `counted` rounds holds, that of the rounds run so far does not (docs/privacy.md, "Stopping").
    """

    planned: int
    run: int
    redrawn: int = 0  # lost in a crash and drawn again with other noise: they come on top
    limited: bool = False  # the run's own ε allowed fewer than that, whatever was lost when

    @classmethod
    def all(cls, planned: int) -> Rounds:
        """Of a run that is whole, or of none in particular."""
        return cls(planned, planned)

    @property
    def whole(self) -> bool:
        """Whether all that was planned has been run, once."""
        return self.run >= self.planned and not self.redrawn

    def sentence(self, counted: int) -> str:
        """How many, for a reader of the guarantee."""
        if self.whole:
            return f"Rounds: {counted:,}."
        told = f"Rounds: {self.planned:,} planned, {self.run:,} run"
        if self.redrawn:
            told += f", {self.redrawn:,} more lost in a crash and drawn again"
        if self.limited:
            return f"{told}; ε limits the run, whenever rounds are lost."
        return f"{told}; ε is that of {counted:,}."


@dataclass(frozen=True)
class Guarantee:
    """(ε, δ) for a unit, an adjacency and a view; ε = ∞ with the reason where there is none.

    `epsilon` holds however often the unit was drawn, up to `most` rounds. Where who takes part is
    seen, `drawn` is the ε over the coins that decide it, if they were fair, and `capped` the ε if
    clients themselves refuse to take part more than `cap` times.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    view: View
    rounds: int
    population: int
    reason: str = ""
    hidden: bool = True  # whether this view does not show who takes part
    most: int = 0
    drawn: float | None = None
    cap: int | None = None  # where this view must not rely on it
    capped: float | None = None
    course: Rounds | None = None  # None where no run is spoken of
    origin: Origin = REAL

    @property
    def private(self) -> bool:
        """Whether there is a finite ε."""
        return math.isfinite(self.epsilon)

    def sentence(self) -> str:
        """The guarantee for a reader who was not there."""
        if not self.private:
            return f"No privacy guarantee: {self.reason}.{self._by_clients()}"
        return (
            f"{self._subject()} ({rounded_up(self.epsilon)}, {rounded_up(self.delta)})"
            f"-differentially private per {self.unit} against anyone who {SEEN[self.view]}. "
            f"Adjacency: {self.adjacency}. {self._course().sentence(self.rounds)}{self._public()}"
            f"{self._attended()}{self._by_clients()}{self.remark()}"
        )

    def _subject(self) -> str:
        """What holds only in a simulation, or not at all, comes before the claim."""
        excluded = self.origin.excluded
        apart = f"apart from {excluded}, read from private data without noise, " if excluded else ""
        if self.origin.simulated:
            return (
                "Simulation: the clients are made up, so nobody real is protected. For real "
                f"clients, {apart}this training would be"
            )
        claim = f"{apart}this training is"
        return claim[:1].upper() + claim[1:]

    def _course(self) -> Rounds:
        return self.course or Rounds.all(self.rounds)

    def _public(self) -> str:
        return (
            f" Public: the number of {self.unit}s ({self.population:,})." if self.population else ""
        )

    def _by_clients(self) -> str:
        if self.capped is None or self.cap is None:
            return ""
        return (
            f" The cap is kept by the server and not counted on; if {self.unit}s themselves refuse "
            f"to take part in more than {_rounds(self.cap)}, ε is {rounded_up(self.capped)}."
        )

    def _attended(self) -> str:
        if self.hidden or (self.drawn is None and self.most == self.rounds):
            return ""
        often = "every round" if self.most == self.rounds else _rounds(self.most)
        holds = f" It holds for one that takes part in {often}"
        if self.drawn is None:
            return f"{holds}."
        coins = f"over fair coins that decide who takes part, ε is {rounded_up(self.drawn)}"
        return f"{holds}; {coins}."

    def remark(self) -> str:
        """What is wrong with its δ, if anything."""
        if self.delta * self.population < 1:
            return ""
        return (
            f" δ is at least 1/{self.population:,}: too large to protect each {self.unit}; "
            f"use {1 / (10 * self.population):.0e}."
        )


@dataclass(frozen=True)
class Statement:
    """What a run of a settled recipe may claim, view by view."""

    recipe: Recipe
    dim: int
    guarantees: tuple[Guarantee, ...]  # one for each view, in the order of VIEWS
    secure: bool | None = False  # None where no run is spoken of
    diagnostics: bool | None = None  # whether a run has recorded them; None where none is spoken of
    ledger: str | None = None  # where a run is recorded, in words; None where none is spoken of

    @property
    def main(self) -> Guarantee:
        """Towards the view that the recipe is for."""
        return self.towards(self.recipe.view)

    def towards(self, view: View) -> Guarantee:
        """The guarantee of one view."""
        return self.guarantees[VIEWS.index(view)]

    def limited(self, epsilon: float) -> Statement:
        """The same, where the run's own ε ended it before all its rounds."""
        view = self.recipe.view
        kept = (replace(g, epsilon=epsilon) if g.view == view else g for g in self.guarantees)
        return replace(self, guarantees=tuple(kept))

    def entries(self) -> Iterator[tuple[str, str]]:
        """Labels and their texts, in the order a reader needs them."""
        yield "Privacy", self.main.sentence()
        if isinstance(self.recipe.bound, ProbedClip):
            yield "Leak", self._leak(self.recipe.bound.norm)
        if not self.recipe.private:
            return
        for guarantee in self.guarantees:
            yield f"  {guarantee.view}", _line(guarantee)
        yield "Released", self._released()
        yield "Sampling", self._sampling()
        yield "Noise", self._noise() + self._randomness()
        if self.diagnostics is not None:
            yield "Diagnostics", self._diagnostics(self.diagnostics)
        if self.ledger is not None:
            yield "Ledger", self.ledger
        if self.bits is not None:
            yield "Messages", f"{self.bits} bits a coordinate, {self.message_bytes:,} bytes each"
        yield "Accounted", _accountant()
        yield "Assumed", "; ".join(self._assumptions()) + "."
        yield "Not covered", "; ".join(self._not_covered()) + "."

    def text(self) -> str:
        """The statement as a page of plain text."""
        return "".join(f"{label:<12}{text}\n" for label, text in self.entries())

    def plain(self) -> dict[str, Any]:
        """The statement as plain values, for JSON; an ε that is not finite is null."""
        main = self.main
        return {
            "algorithm": self.recipe.name,
            "unit": main.unit,
            "population": main.population,
            "rounds": main.rounds,
            "course": None if main.course is None else asdict(main.course),
            "dimension": self.dim,
            "delta": main.delta,
            "view": self.recipe.view,
            "views": {g.view: _plain(g) for g in self.guarantees},
            "noise_multiplier": self.multiplier,
            "bits_per_coordinate": self.bits,
            "bytes_per_message": self.message_bytes,
            "randomness": {None: None, True: "secure", False: "seeded"}[self.secure],
            "diagnostics": self.diagnostics,
            "ledger": self.ledger,
            "origin": main.origin.plain(),
            "accountant": _accountant(),
            "statement": {label.strip(): text for label, text in self.entries()},
        }

    @property
    def multiplier(self) -> float | None:
        """Noise on the sum over the bound of one message, where noise is Gaussian."""
        noise = self.recipe.noise
        if isinstance(noise, Gaussian | RoundedGaussian) and not foreign(noise):
            return noise.multiplier
        return None

    @property
    def bits(self) -> int | None:
        """Bits a coordinate on the wire, where messages are whole numbers."""
        wire = self._wire
        return None if wire is None else wire.bits

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return 4 * self.dim if self.bits is None else length(self.bits, self.dim)

    @functools.cached_property
    def _wire(self) -> Any:
        population = self.main.population or 1
        return self.recipe.wire(self.dim, population) if self.recipe.noise.settled else None

    @staticmethod
    def _leak(threshold: float) -> str:
        return (
            f"the clipping threshold {threshold:.4g} was taken from a run without noise on these "
            "data, and no ε covers it; an adaptive clip would not leak."
        )

    def _released(self) -> str:
        more = ""
        if isinstance(self.recipe.bound, AdaptiveClip):
            more = " and every threshold C_k, whose noisy counts are accounted"
        return f"every model of {_rounds(self.main.rounds)}{more}; all that is computed from them."

    def _sampling(self) -> str:
        cohort, unit = self.recipe.cohort, self.main.unit
        cap = "" if cohort.cap is None else f", at most {cohort.cap} times in a run"
        if not foreign(cohort):
            match cohort:
                case Poisson(rate):
                    often = f"takes part in a round with probability {rate:g}"
                    return f"Poisson: each {unit} {often}{cap}."
                case FixedSize(clients):
                    return f"fixed size: {clients} {unit}s a round without replacement{cap}."
                case Everyone():
                    return f"every {unit} takes part in every round."
        return f"{cohort!r}: {self._expected()} a round{cap}, as this cohort itself says."

    def _expected(self) -> str:
        """How many take part in a round on average; of one where their number is not known."""
        unit, population = self.main.unit, self.main.population
        expected = self.recipe.cohort.expected(population or 1)
        if population:
            return f"{expected:g} of {population:,} {unit}s on average"
        return f"{expected:g} times the number of {unit}s on average"

    def _noise(self) -> str:
        noise = self.recipe.noise
        where = "added by the server" if noise.at == "server" else "added by the clients"
        if foreign(noise):
            return f"{noise!r}, {where}"
        match noise:
            case Gaussian(multiplier) | RoundedGaussian(multiplier):
                kind = "Gaussian" if isinstance(noise, Gaussian) else "rounded Gaussian"
                return (
                    f"{kind} of multiplier {rounded_up(multiplier or 0.0, 6)} on the sum, {where}"
                )
            case PublishedLaplace():
                return "truncated discrete Laplace as published, not private as claimed"
            case TruncatedDiscreteLaplace(alpha, support):
                return f"truncated discrete Laplace, α = {alpha:.4g}, on ±{support} steps, {where}"
            case DiscreteGaussian(sigma, support):
                return f"discrete Gaussian, σ = {sigma:.4g}, on ±{support} steps, {where}"
            case Binomial(trials):
                return f"binomial of {trials} trials, {where}"
            case _:
                return f"{type(noise).__name__}, {where}"

    def _randomness(self) -> str:
        if self.secure is None:
            return "."
        if self.secure:
            return "; drawn from the operating system's randomness by ChaCha20, as whole numbers."
        return "; simulated: who knows the seed can recompute it."

    @staticmethod
    def _diagnostics(recorded: bool) -> str:
        if not recorded:
            return "not recorded; the means of every round are private data all the same."
        return (
            "recorded: norm and angle of every update of a client, and how the model serves each "
            "client; a saved run keeps them in metrics.parquet, clients.parquet and "
            "evaluation.json, and of one that is not saved result.records has the means; they are "
            "private data, which no ε covers, and not to be released."
        )

    def _assumptions(self) -> Iterator[str]:
        yield self._bounding()
        yield f"the number of {self.main.unit}s and the recipe are public"
        if own := ", ".join(self.recipe.foreign):
            yield f"parts that are not fedveil's ({own}) do what they say; nobody has checked that"
        if any(g.private and g.hidden for g in self.guarantees):
            yield "towards view models: the server is trusted, and who takes part stays secret"
        if self.recipe.noise.at == "client" and self.recipe.hidden("models"):
            yield (
                "towards view models: every drawn client's message arrives (a missing one aborts "
                "the round, which shows who was drawn)"
            )
        if self.towards("sum").private:
            yield f"towards view sum: {self._aggregation()}"
        if (course := self.main.course) is not None and course.redrawn:
            yield "when the run crashed did not depend on what it had released" + (
                f" (view {self.recipe.view} needs no such assumption)" if course.limited else ""
            )

    def _bounding(self) -> str:
        """Who sees to it that messages are short: one who is trusted."""
        how = "bounded as the recipe specifies"
        if not any(self.towards(view).private for view in ("sum", "messages")):
            return f"every message is {how}, by its client or by the server on receipt"
        own = f"every message is {how} by its client itself"
        if not self.towards("models").private:
            return own
        return f"{own}, or towards view models by the server on receipt"

    def _aggregation(self) -> str:
        sure = self.recipe.summands(self.main.population or 1, "sum")
        if sure <= 1:
            return "secure aggregation shows the sum alone"
        return (
            f"secure aggregation shows the sum alone, and none that fewer than {sure:g} honest "
            "clients add noise to; the aggregation protocol ensures both, not the server's word"
        )

    def _not_covered(self) -> Iterator[str]:
        yield "choosing settings by looking at results on these data"
        yield "diagnostics: norms, counts, accuracy curves and client memory are private data"
        yield "thresholds and ranges taken from these data, if there are any"
        if self.secure is False:
            yield "one who knows the seed, and the last bits of floating-point sums"


def _line(guarantee: Guarantee) -> str:
    """One view in a line."""
    brief = BRIEFLY[guarantee.view]
    capped = ""
    if guarantee.capped is not None:
        capped = f"; ε = {rounded_up(guarantee.capped)} if clients keep the cap themselves"
    if not guarantee.private:
        return f"no finite ε, {brief}: {guarantee.reason}{capped}."
    drawn = ""
    if not guarantee.hidden and guarantee.drawn is not None and guarantee.drawn < guarantee.epsilon:
        often = "all rounds" if guarantee.most == guarantee.rounds else _rounds(guarantee.most)
        drawn = f"; taking part in {often}, or ε = {rounded_up(guarantee.drawn)} over fair coins"
    return (
        f"ε = {rounded_up(guarantee.epsilon)} at δ = {rounded_up(guarantee.delta)}, {brief} "
        f"({guarantee.adjacency}){drawn}{capped}.{guarantee.remark()}"
    )


def _plain(guarantee: Guarantee) -> dict[str, Any]:
    values = asdict(guarantee)
    del values["origin"], values["course"]  # said once, for all views
    for name in ("epsilon", "drawn", "capped"):
        if values[name] is not None and not math.isfinite(values[name]):
            values[name] = None
    return {**values, "sentence": guarantee.sentence()}


def _accountant() -> str:
    version = importlib.metadata.version("dp-accounting")
    return (
        f"by dp-accounting {version}: privacy loss distributions, rounded up, for Gaussian, pure "
        "and sampled releases; whole-number noise by the Gaussian that dominates it or by its "
        "Rényi divergences, whichever gives the smaller ε."
    )


def rounded_up(number: float, digits: int = 3) -> str:
    """A number in a few digits, never smaller than it is.

    >>> rounded_up(4.9912), rounded_up(2.00096), rounded_up(1e-5)
    ('5', '2.01', '1e-05')
    """
    if not math.isfinite(number):
        return "∞"
    exact = Decimal(str(number))
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, ROUND_CEILING)):.{digits}g}"


def guarantee(
    recipe: Recipe,
    dim: int,
    population: int,
    rounds: int,
    delta: float,
    view: View | None = None,
    origin: Origin = REAL,
    course: Rounds | None = None,
) -> Guarantee:
    """What `rounds` rounds of a recipe with settled noise spend, towards a view."""
    view = view or recipe.view
    people = population or 1
    spent = recipe.spent(dim, people, rounds, view)
    epsilon = accounting.epsilon(spent, delta)
    hidden = recipe.hidden(view)
    attended = None if hidden else recipe.attended(dim, people, rounds, view)
    kept = recipe.kept_by_clients(dim, people, rounds, view)
    capped = math.inf if kept is None else accounting.epsilon(kept, delta)
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        unit=recipe.unit,
        adjacency=recipe.adjacency(view),
        view=view,
        rounds=rounds,
        population=population,
        reason="" if math.isfinite(epsilon) else _reason(recipe.release(dim, people, view)),
        hidden=hidden,
        most=recipe.most(rounds, view),
        drawn=None if attended is None else min(accounting.epsilon(attended, delta), epsilon),
        cap=recipe.cohort.cap if math.isfinite(capped) else None,
        capped=capped if math.isfinite(capped) else None,
        course=course,
        origin=origin,
    )


def statement(
    recipe: Recipe,
    dim: int,
    population: int,
    rounds: int,
    delta: float,
    secure: bool | None = False,
    diagnostics: bool | None = None,
    origin: Origin = REAL,
    course: Rounds | None = None,
    ledger: str | None = None,
) -> Statement:
    """The statement of a recipe with settled noise for so many rounds."""
    size = (dim, population, rounds, delta)
    views = tuple(guarantee(recipe, *size, view, origin, course) for view in VIEWS)
    return Statement(recipe, dim, views, secure, diagnostics, ledger)


def _reason(event: events.Release) -> str:
    if isinstance(event, events.NonPrivate):
        return event.reason
    return "there is too little noise for this δ"


def _rounds(count: int) -> str:
    """
    >>> _rounds(1), _rounds(1000)
    ('1 round', '1,000 rounds')
    """
    return f"{count:,} round{'' if count == 1 else 's'}"
