"""The privacy statement of a run: the (ε, δ) of each view, and what it depends on.

It names the unit, the adjacency, the views, the release, sampling, noise, accountant, assumptions,
and what is not covered. It is available as sentences, as text and as plain values.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fedveil.accounting import accountant as accounting
from fedveil.accounting.rounding import rounded_up, short
from fedveil.data.origin import REAL, Origin
from fedveil.parts.statistics import Statistics
from fedveil.privacy.guarantee import (
    BRIEFLY,
    VIEWS,
    Guarantee,
    Rounds,
    guarantee,
    in_rounds,
    written,
)
from fedveil.recipe import Recipe, View
from fedveil.serialization import markup
from fedveil.wire import length

if TYPE_CHECKING:
    from polars import DataFrame

Setting = tuple[tuple[str, str], ...]  # more labels and texts of a statement
UNRECORDED = "Not recorded: this run counts against no budget."
RECORDED = "Recorded (`fedveil budget show`)."  # the account is a hash, so it is not printed
OTHERS = "Other views"


@dataclass(frozen=True, repr=False)
class Statement:
    """The guarantees of a run of a calibrated recipe, in each view."""

    recipe: Recipe
    dim: int
    guarantees: tuple[Guarantee, ...]  # one for each view, in the order of VIEWS
    secure: bool | None = False  # None if there is no run
    diagnostics: bool | None = None  # whether the run records them; None if there is no run
    ledger: str | None = None  # where the run is recorded, as text; None if there is no run
    setting: Setting = ()  # what a federation adds: who holds the data, and who is trusted
    trained: str | None = None  # which parameters, if some are frozen

    def __repr__(self) -> str:
        said = self.main
        spent = "no guarantee" if math.isinf(said.epsilon) else f"ε = {rounded_up(said.epsilon)}"
        return (
            f"<Statement of {self.recipe.name}: {spent}, δ = {short(said.delta)}, view {said.view}>"
        )

    def _repr_html_(self) -> str:
        """The statement as a table, for notebooks."""
        return markup.table(self.entries(), caption="Privacy statement")

    def to_frame(self) -> DataFrame:
        """One row per view: ε, δ, adjacency and unit, as a polars DataFrame."""
        from polars import DataFrame

        rows = [
            {"view": g.view, "epsilon": g.epsilon, "delta": g.delta, "adjacency": g.adjacency,
             "unit": g.unit}
            for g in self.guarantees
        ]  # fmt: skip
        return DataFrame(rows)

    def plot(self) -> Any:
        """ε over the rounds as a Plotly figure."""
        import fedveil

        return fedveil.plot(self)

    @property
    def main(self) -> Guarantee:
        """The guarantee in the recipe's view."""
        return self.towards(self.recipe.view)

    def towards(self, view: View) -> Guarantee:
        """The guarantee in one view."""
        return self.guarantees[VIEWS.index(view)]

    def limited(self, epsilon: float) -> Statement:
        """The statement of a run that its own ε ended before all its rounds."""
        view = self.recipe.view
        kept = (replace(g, epsilon=epsilon) if g.view == view else g for g in self.guarantees)
        return replace(self, guarantees=tuple(kept))

    def entries(self) -> Iterator[tuple[str, str]]:
        """Labels and their texts, in reading order."""
        yield "Privacy", self.main.sentence()
        if self.recipe.bound.leaks:
            yield "Leak", self.recipe.bound.leak
        if not self.recipe.private:
            return
        yield OTHERS, self._other_views()
        if self.recipe.statistics is not None:
            yield "Statistics", self._statistics(self.recipe.statistics)
        if self.recipe.evaluation is not None:
            yield "Evaluation", self._evaluation(self.recipe.evaluation)
        yield "Released", self._released()
        if self.trained is not None:
            yield "Trained", self.trained
        yield "Sampling", self._sampling()
        yield "Noise", self._noise() + self._randomness()
        yield from self.setting
        if self.diagnostics is not None:
            yield "Diagnostics", self._diagnostics(self.diagnostics)
        if self.ledger is not None:
            yield "Ledger", self.ledger
        if self.bits is not None:
            yield "Messages", f"{self.bits} bits per coordinate, {self.message_bytes:,} bytes each."
        yield "Accounting", self._accounting()
        yield "Assumptions", _sentences(self._assumptions())
        yield "Not covered", _sentences(self._not_covered())

    def _other_views(self) -> str:
        """The views other than the recipe's. Views without a guarantee share their reason.

        A large δ is warned of once: beside the recipe's own guarantee, if it has one.
        """
        told: dict[str, list[str]] = {}
        others = [one for one in self.guarantees if one.view != self.recipe.view]
        for one in others:
            told.setdefault(_line(one), []).append(one.view)
        large = not self.main.private and any(one.private for one in others)
        lines = " ".join(f"{' and '.join(views)}: {line}" for line, views in told.items())
        return f"{self.main.warning() if large else ''}{lines}"

    def text(self) -> str:
        """The statement as a page of plain text."""
        return "".join(f"{label:<12}{text}\n" for label, text in self.entries())

    def plain(self) -> dict[str, Any]:
        """The statement as plain values for JSON. An infinite ε is null."""
        main = self.main
        return {
            "algorithm": self.recipe.name,
            "unit": main.unit,
            "population": main.population,
            "population_of": "silo" if self.recipe.by_record else main.unit,
            "rounds": main.rounds,
            "course": None if main.course is None else asdict(main.course),
            "dimension": self.dim,
            "trained": self.trained,
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
            "accountant": self._accounting(),
            "statement": {label.strip(): text for label, text in self.entries()},
        }

    @property
    def multiplier(self) -> float | None:
        """The noise multiplier, for Gaussian noise: noise on the sum over the message bound."""
        return self.recipe.noise.noise_multiplier

    @property
    def bits(self) -> int | None:
        """Bits per coordinate of a message, for integer messages."""
        wire = self._wire
        return None if wire is None else wire.bits

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return 4 * self.dim if self.bits is None else length(self.bits, self.dim)

    @functools.cached_property
    def _wire(self) -> Any:
        population = self.main.population or 1
        return self.recipe.wire(self.dim, population) if self.recipe.noise.calibrated else None

    def _released(self) -> str:
        more = self.recipe.bound.released
        released = [f"every model of {in_rounds(self.main.rounds)}{more}"]
        if self.recipe.by_record:
            own = " and its own model" if self.recipe.memory.personal else ""
            released.append(f"every silo's messages{own}")
        if self.recipe.statistics is not None:
            released.insert(0, "the statistics")
        if self.recipe.evaluation is not None:
            released.append("the noisy evaluations")
        listed = ", ".join(released)
        return f"{listed[:1].upper()}{listed[1:]}, and everything computed from them."

    def _statistics(self, statistics: Statistics) -> str:
        event = statistics.event(self.main.adjacency)  # type: ignore[arg-type]
        alone = rounded_up(accounting.epsilon(event, self.main.delta))
        what = ", and ".join(self.main.origin.released) or "statistics of the data"
        return (
            f"{what[:1].upper()}{what[1:]}, learned before training with Gaussian noise. Alone, "
            f"they have ε = {alone} at the same δ. ε above covers them and the training together. "
            f"A category or class that only one {self.main.unit} has is released with probability "
            f"at most {rounded_up(statistics.escape)}."
        )

    def _evaluation(self, evaluation: Statistics) -> str:
        event = evaluation.event(self.main.adjacency)  # type: ignore[arg-type]
        alone = rounded_up(accounting.epsilon(event, self.main.delta))
        unit = self.main.unit
        whose = f"the {unit}s' own held-out examples" if unit == "client" else "the test examples"
        simulated = self.main.origin.simulated and unit == "client"
        dealt = " Test examples were assigned to the simulated clients." if simulated else ""
        return (
            f"Accuracy, loss and other results on {whose} carry Gaussian noise: all planned "
            f"evaluations together have ε = {alone} at the same δ. ε above covers them and the "
            f"training together, for {unit}s in either. Each {unit} counts once.{dealt}"
        )

    def _sampling(self) -> str:
        recipe, people = self.recipe, self.main.population
        if recipe.by_record:
            return f"{recipe.local.describe(people)} {recipe.cohort.describe('silo', people)}"
        told = recipe.cohort.describe(self.main.unit, people)
        if recipe.cohort.cap is None or not recipe.lost:
            return told
        return f"{told} Participations in lost rounds count in addition to this limit."

    def _noise(self) -> str:
        noise = self.recipe.noise
        who = "server" if noise.at == "server" else "clients"
        if self.recipe.by_record:
            who = "silos to their own steps"
        return f"{noise.describe()}, added by the {who}."

    def _randomness(self) -> str:
        if self.secure is None:
            return ""
        if self.secure:
            return " Drawn as integers from the operating system's randomness with ChaCha20."
        return " Simulated: anyone who knows the seed can reproduce it."

    @staticmethod
    def _diagnostics(recorded: bool) -> str:
        if not recorded:
            return "Not recorded. The means of each round are still private data."
        return (
            "Recorded: the norm and angle of each client's update, and per-client evaluation "
            "(metrics.parquet, clients.parquet, evaluation.json; in Python, result.records). These "
            "are private data: no ε covers them. Do not release them."
        )

    def _accounting(self) -> str:
        version = importlib.metadata.version("dp-accounting")
        told = f"By dp-accounting {version}, with privacy loss distributions, rounded up."
        if self.bits is None:
            return told
        return (
            f"{told} Integer noise: the Gaussian that dominates it, or its Rényi divergences, "
            "whichever gives the smaller ε."
        )

    def _assumptions(self) -> Iterator[str]:
        if self.recipe.by_record:
            yield from self._assumed_of_silos()
            return
        yield self._bounding()
        yield f"the number of {self.main.unit}s and the recipe are public"
        yield from self._foreign()
        if any(g.private and g.hidden for g in self.guarantees):
            yield "view models: the server is trusted, and who takes part stays secret"
        if self.recipe.noise.correlated and not self.recipe.hidden("models"):
            yield (
                "view models: the server is trusted, and enforces the separation between the "
                f"participations of a {self.main.unit}. Who takes part may be known"
            )
        if self.recipe.noise.at == "client" and self.recipe.hidden("models"):
            yield (
                "view models: every sampled client's message arrives (a missing one aborts the "
                "round, which shows who was sampled)"
            )
        if self.towards("sum").private:
            yield f"view sum: {self._aggregation()}"
        yield from self._crashed()

    def _assumed_of_silos(self) -> Iterator[str]:
        """Records rely on their own silo, and on nobody else."""
        yield (
            "every silo samples, clips and adds noise as the recipe specifies, and keeps its "
            "samples secret. Neither the server nor any other silo is trusted"
        )
        yield "the number of silos, the number of records in each, and the recipe are public"
        yield from self._foreign()
        yield from self._crashed()

    def _foreign(self) -> Iterator[str]:
        if own := ", ".join(self.recipe.foreign):
            yield f"user-defined parts ({own}) do what they claim, which fedveil cannot check"

    def _crashed(self) -> Iterator[str]:
        if (course := self.main.course) is not None and course.redrawn:
            yield "the time of the crash did not depend on what the run had released" + (
                f" (view {self.recipe.view} needs no such assumption)" if course.limited else ""
            )

    def _bounding(self) -> str:
        """The party that is trusted to bound messages."""
        how = "bounded as the recipe specifies"
        if not any(self.towards(view).private for view in ("sum", "messages")):
            return f"every message is {how}, by its client or by the server on receipt"
        own = f"every message is {how} by its client itself"
        if not self.towards("models").private:
            return own
        return f"{own}, or in view models by the server on receipt"

    def _aggregation(self) -> str:
        sure = self.recipe.noise_shares(self.main.population or 1, "sum")
        if sure <= 1:
            return "secure aggregation reveals nothing but the sum"
        return (
            "secure aggregation reveals nothing but the sum, and no sum with noise from fewer than "
            f"{sure:g} honest clients (the aggregation protocol ensures both, not the server)"
        )

    def _not_covered(self) -> Iterator[str]:
        yield "settings chosen by looking at results on these data"
        exact = "accuracy curves" if self.recipe.evaluation is None else "results per client"
        memory = "" if self.recipe.by_record else " and client memory"  # of silos, it is noisy
        told = f"norms, counts{',' if memory else ' and'} {exact}{memory}"
        yield f"diagnostics ({told} are private data)"
        yield "any threshold or range that you took from these data without noise"
        if self.recipe.by_record:
            yield "a person with several records, as a whole, and what a silo's own staff sees"
        if self.trained is not None:
            yield "the data that frozen parameters were trained on before"
        if self.recipe.noise.correlated:
            yield "the run's checkpoint, which contains past noise"
        if self.secure is False:
            yield "adversaries who know the seed or see the last bits of floating-point sums"


def _sentences(clauses: Iterator[str]) -> str:
    """Each clause as a sentence."""
    return " ".join(f"{clause[:1].upper()}{clause[1:]}." for clause in clauses)


def _line(one: Guarantee) -> str:
    """One view in a sentence or more."""
    brief = BRIEFLY[one.view]
    capped = ""
    if one.capped is not None:
        capped = f" ε = {rounded_up(one.capped)} if clients enforce the cap themselves."
    if not one.private:
        return f"no guarantee, since {one.reason}.{capped}"
    drawn = ""
    if not one.hidden and one.drawn is not None and one.drawn < one.epsilon:
        often = "all rounds" if one.most == one.rounds else in_rounds(one.most)
        drawn = (
            f" This holds for any {one.unit} that takes part in {often}. If the server samples "
            f"participants fairly, ε over the sampling is {rounded_up(one.drawn)}."
        )
    return (
        f"ε = {rounded_up(one.epsilon)}, δ = {rounded_up(one.delta)} {brief} "
        f"({written(one.adjacency)}).{drawn}{capped}"
    )


def _plain(guarantee: Guarantee) -> dict[str, Any]:
    values = asdict(guarantee)
    del values["origin"], values["course"]  # stored once, for all views
    for name in ("epsilon", "drawn", "capped"):
        if values[name] is not None and not math.isfinite(values[name]):
            values[name] = None
    values["silos"] = [one if math.isfinite(one) else None for one in guarantee.silos]
    return {**values, "sentence": guarantee.sentence()}


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
    setting: Setting = (),
    trained: str | None = None,
) -> Statement:
    """The statement of a recipe with calibrated noise for a number of rounds."""
    size = (dim, population, rounds, delta)
    views = tuple(guarantee(recipe, *size, view, origin, course) for view in VIEWS)
    return Statement(recipe, dim, views, secure, diagnostics, ledger, setting, trained)
