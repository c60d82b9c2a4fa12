"""Recipe: eight parts, two chains.

    data:     population → cohort → Updates → bounded sum → noisy mean → next model   (loop.py)
    privacy:  bound.norms → quantize.norms → sensitivity → noise.event → cohort.amplify   (here)

The same objects define both chains, so the accounting matches the training. A recipe whose parts do
not fit together is refused when it is built. The error names both parts and what would fit.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from fedveil.accounting import events
from fedveil.accounting.norms import Adjacency, Limits, Norms, declared
from fedveil.errors import UserError
from fedveil.parts.bound import Bound, Unbounded
from fedveil.parts.checks import check, one_of
from fedveil.parts.cohort import Cohort, Everyone, check_cap, contradiction
from fedveil.parts.local import Local
from fedveil.parts.memory import Memory, NoMemory
from fedveil.parts.noise import Noise, NoNoise, Share
from fedveil.parts.part import Part, definers_of, foreign
from fedveil.parts.quantize import NoQuantization, Quantize
from fedveil.parts.report import Difference, Report
from fedveil.parts.server import LastIterate, Output, Server, Step
from fedveil.parts.statistics import Statistics
from fedveil.parts.values import refuse_unplain
from fedveil.wire import Wire, bits_for

if TYPE_CHECKING:
    from polars import DataFrame

LONG = 48  # letters of a part in a short text
ROUNDING = 1e-9  # of rates that are compared
UNKNOWN = 1  # clients, where their number does not matter
View = Literal["models", "sum", "messages"]
Sampled = TypeVar("Sampled", bound=events.Round)
Unit = Literal["client", "example", "record"]  # record: an example inside a silo
SLOTS: dict[str, type[Part]] = {
    "cohort": Cohort,
    "local": Local,
    "report": Report,
    "memory": Memory,
    "bound": Bound,
    "quantize": Quantize,
    "noise": Noise,
    "server": Server,
    "output": Output,
}


@dataclass(frozen=True, repr=False)
class Recipe:
    """One algorithm: cohort → local → report → memory → bound → quantize → noise → server.

    `name` is its name, and `output` the released model. `unit` is what is protected (client,
    example or record), and `view` the adversary that a budget is calibrated against. `statistics`
    were released before the first round, and `evaluation` is the release of all noisy evaluations.
    `lost` rounds were drawn again after a crash; a cap and correlated noise do not limit them.

    >>> from fedveil.algorithms import dp_fedavg
    >>> dp_fedavg(clip=2.0).bound
    Clip(norm=2.0)
    """

    name: str
    local: Local
    cohort: Cohort = Everyone()
    report: Report = Difference()
    memory: Memory = NoMemory()
    bound: Bound = Unbounded()
    quantize: Quantize = NoQuantization()
    noise: Noise = NoNoise()
    server: Server = Step()
    output: Output = LastIterate()
    unit: Unit = "client"
    view: View = "models"  # of the budget; it also decides how messages travel
    statistics: Statistics | None = field(default=None, repr=False)  # released before round 1
    evaluation: Statistics | None = field(default=None, repr=False)  # all planned ones together
    lost: int | None = field(default=None, repr=False)  # rounds that were drawn again, if any

    def __post_init__(self) -> None:
        _refuse_misfits(self)

    def __repr__(self) -> str:
        told = (_brief(part) for part in (self.cohort, self.bound, self.noise))
        return f"<Recipe {self.name}: {', '.join(told)}, view {self.view}>"

    def _repr_html_(self) -> str:
        """The parts as a table, for notebooks."""
        rows = "".join(f"<tr><th>{s}</th><td>{escape(str(p))}</td></tr>" for s, p in self._told())
        return f"<table><caption>{escape(self.name)}</caption><tbody>{rows}</tbody></table>"

    def to_frame(self) -> DataFrame:
        """One row per part, as a polars DataFrame."""
        from polars import DataFrame

        rows = [{"slot": slot, "part": str(part)} for slot, part in self._told()]
        return DataFrame(rows)

    def plot(self, clients: int, dim: int, **run: Any) -> Any:
        """ε over the rounds as a Plotly figure, for a model of `dim` parameters.

        `run` has rounds [default: 100], and epsilon and delta to calibrate the noise to.

        >>> from fedveil.algorithms import dp_fedavg
        >>> dp_fedavg().plot(clients=1000, dim=7850, rounds=10, epsilon=4.0).layout.title.text
        'ε over the rounds'
        """
        import fedveil

        return fedveil.plot(self, clients=clients, dim=dim, **run)

    def _told(self) -> list[tuple[str, object]]:
        return [*self.parts.items(), ("view", self.view)]

    @property
    def private(self) -> bool:
        """Whether it adds noise for privacy."""
        return self.noise.private

    @property
    def in_silos(self) -> bool:
        """Whether records are protected inside silos, each of which samples, bounds and adds noise.

        The noise is then that of one silo's sum, and `cohort.honest` counts silos. If silos work
        for several steps by themselves (`by_record`), the cohort is of silos instead.
        """
        return self.unit == "record" and not self.by_record

    @property
    def by_record(self) -> bool:
        """Whether clients are silos whose local work is rounds over their own records."""
        return self.local.by_record

    def inside(self, silo: int, round: int = 0) -> Recipe:
        """One step of a silo's local work, as a recipe over its records (`by_record`)."""
        parts = self.local.inside(silo, round, self.noise)._asdict()
        found = Recipe(self.name, **parts, unit="example")
        fresh = found.noise.at == "server" and not found.noise.correlated
        if not fresh or found.bound.adapts or not found.private:
            raise UserError(
                f"{self.name}: every step inside a silo needs noise of its own and a fixed bound. "
                "Use Gaussian noise and Clip."
            )
        return found

    def accounted_inside(self, silo: int, round: int, dim: int) -> Recipe:
        """One step of a silo in a round, which must release what is accounted: that of round 0."""
        found = self.inside(silo, round)
        if self._alike:
            return found
        now, accounted = found._step(dim), self.inside(silo)._step(dim)
        if now != accounted:
            raise UserError(
                f"{self.name}: each step of silo {silo} in round {round + 1} releases {now}, but "
                f"{accounted} is accounted. Sample, bound and add noise alike in all rounds."
            )
        return found

    @property
    def _alike(self) -> bool:
        """Whether silos that are not listed are known to work alike, and alike in all rounds."""
        return not foreign(self.local) and not foreign(self.noise)

    def _step(self, dim: int) -> tuple[Adjacency, events.Round]:
        """What one step inside a silo releases, and for which adjacency."""
        return self.adjacency(), self.event(dim, UNKNOWN, "models")

    def insides(self, silos: int) -> tuple[Recipe, ...]:
        """One step of each silo, or of one of them if all silos are known to work alike."""
        listed = self.local.listed or self.noise.listed or (None if self._alike else silos)
        if listed is not None and silos not in (listed, UNKNOWN):
            raise UserError(
                f"{self.name}: rates, multipliers or budgets are for {listed} silos, but there are "
                f"{silos}. Give one number for each silo, or one for all of them."
            )
        found = tuple(self.inside(silo) for silo in range(listed or 1))
        if len(kinds := {step.adjacency() for step in found}) > 1:
            raise UserError(
                f"{self.name}: silos are accounted for {' and '.join(sorted(kinds))} neighbours. "
                "Sample records in the same way in all silos."
            )
        return found

    @property
    def parts(self) -> dict[str, Part]:
        """The parts by slot, in the order of the loop."""
        return {slot: getattr(self, slot) for slot in SLOTS}

    @property
    def foreign(self) -> tuple[str, ...]:
        """The classes of its user-defined parts, whose claims are not proved."""
        strangers = (part for part in self.parts.values() if foreign(part))
        kinds = (type(getattr(part, "stranger", part)) for part in strangers)
        own = [f"{kind.__module__}:{kind.__qualname__}" for kind in kinds]
        inside = [name for step in self.inner_recipes for name in step.foreign]
        return tuple(dict.fromkeys(own + inside))

    @property
    def inner_recipes(self) -> tuple[Recipe, ...]:
        """One step of each kind of silo, if clients are silos (`by_record`)."""
        return self.insides(UNKNOWN) if self.by_record else ()

    def message(self, dim: int, bound: Bound | None = None) -> Norms:
        """The maximum norms of one message, after bound and quantization."""
        return self.limits(dim, bound).message

    def limits(self, dim: int, bound: Bound | None = None) -> Limits:
        """The norms that a message is held to, after the bound and after quantization."""
        bound = bound or self.bound
        bounded = declared(bound, bound.norms(dim), dim)
        return Limits(bounded, declared(self.quantize, self.quantize.norms(bounded), dim))

    def wire(self, dim: int, population: int) -> Wire | None:
        """The bits per coordinate of a message, if messages are on a grid.

        For secure aggregation, coordinates are residues, wide enough for the sum of a whole cohort.
        A cohort of random size is counted up to ten standard deviations above its mean. A sum that
        wraps around would cost accuracy.
        """
        message = self.message(dim)
        if message.grid is None:
            return None
        reach = int(message.steps.linf) + self.noise.max_magnitude(message)
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
        """The adjacency for which a view is accounted.

        In a view that shows who takes part, the removal of a unit is visible, so the unit is zeroed
        out instead of removed.
        """
        if self.by_record:  # a record is sampled inside its silo, in every view
            return self.inside(0).cohort.adjacency
        if self.hidden(view or self.view) or self.cohort.adjacency == "replace-one":
            return self.cohort.adjacency
        return "zero-out"

    def release(
        self, dim: int, population: int, view: View | None = None, bound: Bound | None = None
    ) -> events.Release:
        """The release of a round that the unit takes part in, to an adversary who knows that.

        `bound` is the one of the round, if it adapts. [default: the first]
        """
        view = view or self.view
        message = self.message(dim, bound)
        if reason := self._exposed(message, view):
            return events.NonPrivate(reason)
        if self.by_record:
            steps = tuple(step._step(dim)[1] for step in self.insides(population))
            release: events.Release = events.InSilos(steps, self.local.inner_steps)
        else:
            release = self._noisy(message, population, view)
        if not self.private and not isinstance(release, events.NonPrivate):
            kind = type(self.noise).__name__
            return events.NonPrivate(f"noise {kind} declares that it is not private")
        return self._proven(release, self.adjacency(view), population)

    def _exposed(self, message: Norms, view: View) -> str:
        """Why no noise protects a unit in this view, if none does."""
        contribution = f"the server sees what each {self.unit} contributes to"
        if self.statistics is not None and view != "models":
            return f"{contribution} the statistics of the data"
        if self.evaluation is not None and view != "models":
            return f"{contribution} an evaluation"
        if self.by_record:
            return ""
        if not message.bounded:
            return "updates are not clipped"
        if self.noise.at == "server" and view != "models" and not self.in_silos:
            return "the server sees every message before noise is added"
        return ""

    def _noisy(self, message: Norms, population: int, view: View) -> events.Release:
        """The release of the sum of messages, and of what the bound's step releases."""
        sensitivity = message.sensitivity(self.adjacency(view))
        expected = self.cohort.expected(population)
        noise_shares = self.noise_shares(population, view)
        release = self.noise.event(message, sensitivity, noise_shares, expected)
        if isinstance(release, events.Correlated):
            apart, most = (self.separation, self.cohort.cap) if view == "models" else (1, None)
            lost = self.lost or release.lost
            release = replace(release, separation=apart, most=most, lost=lost)
        return self.bound.joined(release, self.adjacency(view), expected)

    def _proven(self, event: Sampled, adjacency: Adjacency, population: int) -> Sampled:
        """The event, if the theorems on the sampling in it hold for this adjacency and cohort."""
        for one in events.sampled_in(event):
            theorem, kind = type(one).__name__, type(self.cohort).__name__
            if (wanted := events.PROVEN_FOR[type(one)]) != adjacency:
                raise UserError(
                    f"{self.name}: {theorem} is proven for {wanted} neighbours, but cohort {kind} "
                    f"is accounted for {adjacency} ones. Set its adjacency to '{wanted}', or do "
                    "not amplify."
                )
            sized = isinstance(one, events.SampledWithoutReplacement)
            if sized != self.cohort.fixed:
                drawn = "of a fixed size" if sized else "whose units are drawn independently"
                raise UserError(
                    f"{self.name}: {theorem} is proven for cohorts {drawn}, but {kind} has fixed = "
                    f"{self.cohort.fixed}. Amplify by the theorem for its draws, or not at all."
                )
            if problem := contradiction(self.cohort, one, population):
                raise UserError(f"{self.name}: cohort {kind} {problem}")
        return event

    def noise_shares(self, population: int, view: View) -> float:
        """The number of clients whose noise the accounting relies on in this view."""
        if view == "messages" or not self.noise.adds_up:
            return 1.0
        whole = (self.noise.at == "server" or self.noise.topped_up) and not self.in_silos
        if view == "models" and whole and self.cohort.honest is None:
            return self.cohort.expected(population)  # the server adds what is missing
        return float(self.cohort.min_honest(population))

    def event(self, dim: int, population: int, view: View | None = None) -> events.Round:
        """The release of any one round, amplified if this view hides who takes part."""
        release = self.release(dim, population, view)
        if self.hidden(view or self.view):
            return self._amplified(release, population)
        return release

    def hidden(self, view: View) -> bool:
        """Whether this view hides who takes part, so that sampling amplifies.

        If clients add their own noise in a cohort of random size, the amount of noise shows how
        many took part. The same holds for a cohort in which some may add none (`honest`). In both
        cases, who took part counts as known. Noise that is correlated over the rounds is amplified
        only if clients take turns.
        """
        if self.in_silos or self.by_record:
            return True  # records are sampled inside their silo, which alone knows the sample
        if self.noise.correlated and not self.cohort.cyclic:
            return False
        alike = self.cohort.fixed and self.cohort.honest is None
        return view == "models" and (self.noise.at == "server" or alike)

    def least_arrivals(self, population: int) -> int:
        """The least number of messages for a round not to be aborted: the noise relies on them."""
        cohort = self.cohort
        promised = cohort.fixed or cohort.honest is not None or foreign(cohort)
        return self.cohort.min_honest(population) if self.noise.at == "client" and promised else 0

    def max_participations(self, rounds: int, view: View | None = None) -> int:
        """The maximum participations of one unit that a view may rely on.

        The server enforces the cap. In views `sum` and `messages` the server is the adversary, so
        these views do not rely on a cap.
        """
        if (view or self.view) != "models" or self.by_record:
            return rounds
        lost = self.lost or 0
        turns = -(-max(rounds - lost, 0) // self.separation) + lost
        return turns if self.cap is None else min(turns, self.cap)

    @property
    def cap(self) -> int | None:
        """The maximum participations of a unit in a run: the cohort's cap, and each lost round."""
        return None if self.cohort.cap is None else self.cohort.cap + (self.lost or 0)

    @property
    def separation(self) -> int:
        """The least number of rounds between two participations, as fedveil's cohorts keep it."""
        return 1 if foreign(self.cohort) else self.cohort.separation or 1

    def spent(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.Spent:
        """The release of a whole run, however often the unit was drawn.

        A view that shows who took part is accounted for a unit that took part in every round, or,
        if the server is trusted, in as many as its cap allows. A view that hides it may be
        accounted either way.
        """
        release, first = self.release(dim, population, view), self._first(view)
        if isinstance(release, events.Correlated):  # it has the participations in it
            hidden = self.hidden(view or self.view)
            event = self._amplified(release, population) if hidden else release
            return events.Composed(event, rounds, first)
        known = events.Composed(release, self.max_participations(rounds, view), first)
        if not self.hidden(view or self.view):
            return known
        sampled = events.Composed(self._amplified(release, population), rounds, first)
        if self.cap is None:
            return sampled
        until = () if foreign(self.cohort) else self.cohort.until_cap(sampled, self.cap)
        return events.Either((sampled, known, *until))

    def participation_mixture(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.ParticipationMixture | None:
        """The release of a run over the random choice of participants, which is seen but was fair.

        None if the choice is not random, or if the cohort does not know it to be fair, or with
        statistics or private evaluations.
        """
        rate = self.cohort.coin(population)
        if rate is None or rate >= 1 or self._besides is not None or self.by_record:
            return None
        if rate < (drawn := self.cohort.expected(population) / population) * (1 - ROUNDING):
            raise UserError(
                f"{self.name}: cohort {type(self.cohort).__name__} says in `coin` that a unit is "
                f"drawn with probability {rate:g}, but in `expected` with {drawn:g}. Correct one."
            )
        release = self.release(dim, population, view)
        return events.ParticipationMixture(
            release, rate, rounds, self.max_participations(rounds, view)
        )

    def kept_by_clients(
        self, dim: int, population: int, rounds: int, view: View | None = None
    ) -> events.Composed | None:
        """The release of a run if clients themselves refuse to take part beyond the cap.

        None if there is no cap, or if the view relies on it already.
        """
        cap = self.cap
        if cap is None or cap >= self.max_participations(rounds, view):
            return None
        return events.Composed(self.release(dim, population, view), cap)

    @property
    def _besides(self) -> Statistics | None:
        """What is released besides the models: statistics of the data and evaluations."""
        if self.statistics is None:
            return self.evaluation
        return self.statistics.and_(self.evaluation)

    def _first(self, view: View | None) -> events.Dominated | None:
        """What is released besides the rounds, counted with the first one."""
        besides = self._besides
        return None if besides is None else besides.event(self.adjacency(view))

    def _amplified(self, release: events.Release, population: int) -> events.Round:
        """Amplification by sampling, if it is proved. With a user-defined memory it is not.

        In silos it is in the release already, and sampling the silos is not counted.
        """
        if self.by_record:
            return release
        if not self.memory.amplified:
            return release
        event = self.cohort.amplify(release, population)
        return self._proven(event, self.cohort.adjacency, population)

    def planned(self, rounds: int, population: int) -> Recipe:
        """The recipe with everything fixed that follows from rounds and population."""
        cohort = self.cohort.planned(population)
        noise = self.noise.planned(rounds, cohort.separation or 1, cohort.cap)
        same = cohort == self.cohort and noise == self.noise
        return self if same else replace(self, cohort=cohort, noise=noise)

    def noise_of_mean(self, dim: int, population: int) -> float:
        """Standard deviation of a coordinate of the noise on a round's mean; 0 if unknown."""
        expected = self.cohort.expected(population)
        if not (self.noise.calibrated and self.message(dim).bounded):
            return 0.0
        return (self.noise.deviation_of_sum(self.message(dim), expected, 1.0) or 0.0) / expected

    def with_noise(
        self, level: float, dim: int, population: int, epsilon: float, delta: float
    ) -> Recipe:
        """The same recipe with noise calibrated to a level; `delta` is the share of a round."""
        message = self.message(dim)
        sensitivity = message.sensitivity(self.adjacency())
        share = Share(self.cohort.expected(population), epsilon, delta)
        return replace(self, noise=self.noise.scaled(level, message, sensitivity, share))


def observed(recipe: Recipe, **parts: Any) -> Recipe:
    """The recipe with stand-ins that do what its own parts do, for audits and tests.

    They are not checked: a recipe that is built from such parts is refused.
    """
    found = copy(recipe)
    vars(found).update(parts)
    return found


def _brief(part: Part) -> str:
    """A part with the fields that differ from their defaults, or only its class if that is long."""
    kind = type(part).__name__
    own: tuple[Field[Any], ...] = fields(part) if is_dataclass(part) else ()
    given = [
        f"{f.name}={value!r}"
        for f in own
        if f.repr and not _same(value := getattr(part, f.name), f.default)
    ]
    text = f"{kind}({', '.join(given)})"
    return text if len(text) <= LONG else f"{kind}(…)"


def _same(value: object, default: object) -> bool:
    """Whether a field has its default; fields of users' parts, such as tensors, may have no ==."""
    return repr(value) == repr(default)


def _refuse_misfits(recipe: Recipe) -> None:
    for slot, part in recipe.parts.items():
        _refuse_unanswering(recipe, slot, part)
    _refuse_unknown_words(recipe)
    for part in recipe.parts.values():
        refuse_unplain(part)
    _refuse_unfit_for_silos(recipe)
    first = declared(recipe.bound, recipe.bound.norms(1), 1)
    if recipe.private and not recipe.by_record and not first.bounded:
        raise UserError(
            f"{recipe.name}: bound {type(recipe.bound).__name__} and noise "
            f"{type(recipe.noise).__name__} do not fit: no noise hides an unbounded message. Use "
            "Clip, Normalize or SmoothNormalize."
        )
    for slot, part in recipe.parts.items():
        base = SLOTS[slot].misfit(part, recipe) if foreign(part) else None
        if (problem := part.misfit(recipe) or base) is not None:
            raise UserError(f"{recipe.name}: {problem}")


def _refuse_unfit_for_silos(recipe: Recipe) -> None:
    """Refuse what silos would have to keep between rounds: each round is drawn afresh inside."""
    if not recipe.in_silos:
        return
    cohort, keeps = recipe.cohort, recipe.memory.kept or recipe.bound.adapts
    spaced = cohort.cap is not None or cohort.separation is not None
    if keeps or spaced or cohort.fixed or not cohort.independent:
        raise UserError(
            f"{recipe.name}: silos sample their records independently in each round, with no cap, "
            "and keep no memory and no adaptive bound. Use dp_sgd or dp_lsgd with Poisson sampling."
        )


def _refuse_unanswering(recipe: Recipe, slot: str, part: object) -> None:
    """Refuse a user-defined part that lacks an answer and does not inherit its safe default."""
    base = SLOTS[slot]
    if isinstance(part, type):
        raise UserError(
            f"{recipe.name}: {slot} is the class {part.__name__}. Give an instance: "
            f"{part.__name__}(…)."
        )
    kind = type(part)
    if not foreign(kind) and base in kind.__mro__:
        return
    questions = (name for name in dir(base) if not name.startswith("_") and name != "claims")
    if missing := [name for name in questions if not definers_of(kind, name)]:
        raise UserError(
            f"{recipe.name}: {slot} {kind.__name__} does not define `{missing[0]}`. Inherit from "
            f"fedveil.parts.{base.__name__}, which has a safe default for everything but the "
            "formula."
        )
    for name in base.claims:
        definer = definers_of(kind, name)[0]
        if not foreign(definer) and definer not in base.__mro__:
            raise UserError(
                f"{recipe.name}: {slot} {kind.__name__} takes `{name}` from {definer.__name__}, "
                "whose formula it may have changed. Define it, or call super().__init_subclass__() "
                "in the first base class."
            )


def _refuse_unknown_words(recipe: Recipe) -> None:
    """Refuse user-defined parts with unknown values, which would be accounted for wrongly."""
    check(recipe, "name", recipe.name, isinstance(recipe.name, str), "a text")
    one_of(recipe, "unit", recipe.unit, *get_args(Unit))
    one_of(recipe, "view", recipe.view, *get_args(View))
    if (found := recipe.noise.at) not in ("server", "client"):
        raise UserError(
            f"{recipe.name}: noise {type(recipe.noise).__name__} is added at '{found}'; it must be "
            "'server' or 'client'."
        )
    if (kind := recipe.cohort.adjacency) not in get_args(Adjacency):
        raise UserError(
            f"{recipe.name}: cohort {type(recipe.cohort).__name__} has adjacency '{kind}'; it must "
            f"be {', '.join(get_args(Adjacency))}."
        )
    check_cap(recipe.cohort, recipe.cohort.cap)
