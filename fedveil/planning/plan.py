"""A plan: forecast, privacy, costs, verdict, and sweeps over alternatives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fedveil.accounting.rounding import short
from fedveil.errors import UserError, unknown
from fedveil.models.losses import target_of
from fedveil.parts.cohort import Participants
from fedveil.planning.compute import Cost, expected_cost
from fedveil.planning.correlation import NoiseChoice, choices
from fedveil.planning.facts import PublicFacts, SizeOptions, facts
from fedveil.planning.forecast import VARIED, Case, Forecast, bound_of, current, forecast, varied
from fedveil.planning.pilot import CLIENTS, LEAK, ROUNDS, Material, material, run_pilot
from fedveil.planning.signal import AssumedUpdates
from fedveil.planning.theory.advice import Advice, advice
from fedveil.planning.theory.constants import Constants, checked, estimated
from fedveil.planning.verdict import HOPELESS, WORKS, PlanVerdict, judged, word_for
from fedveil.privacy.calibrate import Budget, calibrated, sensible_delta
from fedveil.privacy.guarantee import Guarantee, guarantee
from fedveil.recipe import Recipe
from fedveil.training import metrics

if TYPE_CHECKING:
    from fedveil.training.settings import Settings

COSINE = {"client": 0.2, "example": 0.05}  # defaults (docs/planning.md)
FACTORS = (0.5, 1.0, 2.0)
SWEEP = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan, in addition to the settings."""

    sizes: SizeOptions = SizeOptions()
    cosine: float | None = None
    norm: float | None = None
    pilot_clients: int = CLIENTS
    pilot_rounds: int = ROUNDS
    theory: bool = False
    constants: Mapping[str, float] | None = None


@dataclass(frozen=True)
class PlannedSilos:
    """A run in silos, of which a plan considers one. Its steps count as rounds."""

    count: int
    rounds: int  # of messages
    steps: int  # in each of them


@dataclass(frozen=True, eq=False)
class Plan:
    """The prediction for a training run."""

    case: Case
    known: PublicFacts
    forecast: Forecast
    guarantee: Guarantee
    cost: Cost
    verdict: PlanVerdict
    pilot: Material | None = None
    theory: tuple[Advice, ...] = ()
    constants: Constants | None = None
    noises: tuple[NoiseChoice, ...] = ()  # independent noise first, then correlated ones
    metric: str | None = None  # that runs are to be ranked by, if it was named
    silos: PlannedSilos | None = None  # if it is the plan of one silo by itself

    def __repr__(self) -> str:
        """One line. `plain()` has all numbers."""
        found, ratio = self.forecast.run_ratio, ""
        if self.recipe.private and found is not None:
            ratio = f", signal-to-noise ratio {short(found, 2)} over the run"
        people = f"{self.participants:,.0f} of {self.case.population:,} {self.known.unit}s"
        return (
            f"Plan({self.recipe.name}: {people} per round, {self.case.rounds:,} rounds, "
            f"{self.verdict.word}{ratio})"
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe with calibrated noise."""
        return self.forecast.recipe

    @property
    def participants(self) -> float:
        """The expected number of participants per round, averaged over the run."""
        return self._participants.mean

    @property
    def participants_exact(self) -> bool:
        """Whether `participants` is the expected number; otherwise an upper bound on it."""
        return self._participants.exact

    @property
    def _participants(self) -> Participants:
        return self.recipe.cohort.participants(self.case.population, self.case.rounds)

    def plain(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; infinities and NaN become null."""
        found, cost = self.forecast, self.cost
        values = {
            "algorithm": self.recipe.name,
            "unit": self.known.unit,
            "population": self.case.population,
            "participants": self.participants,
            "participants_exact": self.participants_exact,
            "rounds": self.case.rounds,
            "dimension": self.case.dim,
            "bound": bound_of(self.case),
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "view": self.guarantee.view,
            "adjacency": self.guarantee.adjacency,
            "origin": self.guarantee.origin.plain(),
            "noise_multiplier": self.recipe.noise.noise_multiplier,
            "signal": found.signal,
            "noise": found.noise,
            "signal_to_noise": found.ratio,
            "signal_to_noise_on_average": found.mean_ratio,
            "signal_to_noise_of_run": found.run_ratio,
            "verdict": self.verdict.word,
            "clients_needed": self.verdict.clients,
            "criterion": {"works": WORKS, "hopeless": HOPELESS},
            "prefix_errors": {one.name: one.error for one in reversed(self.noises)},
            "updates": self.case.updates.describe(),
            "pilot_is_private": self.pilot is not None and self.pilot.private,
            "leak": LEAK if self.pilot is not None and self.pilot.private else None,
            "bytes_up": cost.up,
            "bytes_down": cost.down,
            "products_per_client": cost.products,
            "seconds_per_round": cost.seconds,
            "theory": {a.paper: {**a.numbers, "needs": list(a.needs)} for a in self.theory},
            "constants": dict(self.constants.values) if self.constants else {},
            "silos": None if self.silos is None else asdict(self.silos),
        }
        return {name: _finite(value) for name, value in values.items()}


def _metric(settings: Settings, known: PublicFacts) -> str | None:
    """The name of the metric that was asked for, if it fits the task."""
    sample = known.sample
    if settings.metric is None or sample is None:
        return settings.metric
    sequence = len(sample.labels.shape) > 1
    target = target_of(sample.loss)
    return metrics.chosen(settings.metric, None, target, sample.classes, sequence).main.name


def make(settings: Settings, options: PlanOptions) -> Plan:
    """Predict a training run without training it."""
    from fedveil.accounting.accountant import sensible_delta
    from fedveil.privacy.secure import secured
    from fedveil.training.prepare import refuse_per_round, with_statistics
    from fedveil.training.private_evaluation import refuse_unfit, released
    from fedveil.training.settings import resolve_recipe

    recipe = resolve_recipe(settings)
    if recipe.bound.awaits_probe:
        raise UserError(
            "clip='probe' needs a run on the data. Give a plan a number, such as --set clip=1.0."
        )
    if settings.noise == "secure":
        recipe = secured(recipe)
    known = facts(settings, options.sizes, recipe.unit)
    metric = _metric(settings, known)
    recipe = with_statistics(recipe, known.origin)
    if settings.private_evaluation is not None:
        refuse_per_round(settings.per_round)
        refuse_unfit(recipe)
        delta = sensible_delta(known.population) if settings.delta is None else settings.delta
        evaluated = released(settings.private_evaluation, delta, recipe)
        recipe = replace(recipe, evaluation=evaluated)
    if recipe.by_record:
        return _of_a_silo(recipe, known, settings, options, metric)
    cosine = COSINE[recipe.unit] if options.cosine is None else options.cosine
    updates = AssumedUpdates(cosine, options.norm)
    case = Case(
        recipe, known.dim, known.population, settings.rounds, updates,
        settings.epsilon, settings.delta, settings.per_round,
    )  # fmt: skip
    ready = forecast(case).recipe
    chosen = None
    if options.sizes.pilot is not None:
        if options.cosine is not None or options.norm is not None:
            raise UserError("A pilot measures the cosine and the norm. Remove --cosine and --norm.")
        chosen = material(options.sizes.pilot, settings, known, options.pilot_clients)
        rounds, limit, seed = settings.rounds, options.pilot_rounds, settings.seed
        measured = run_pilot(ready, known, chosen, rounds, limit, seed)
        case = replace(case, updates=measured)
    constants = _constants(options, known, chosen, recipe)
    return Plan(
        case,
        known,
        forecast(case),
        guarantee(
            ready,
            known.dim,
            known.population,
            settings.rounds,
            case.resolved_delta,
            origin=known.origin,
        ),
        expected_cost(ready, known, settings.rounds),
        judged(case),
        chosen,
        tuple(advice(case, known, constants, chosen)) if constants is not None else (),
        constants,
        choices(case),
        metric,
    )


def _of_a_silo(
    recipe: Recipe, known: PublicFacts, settings: Settings, options: PlanOptions, metric: str | None
) -> Plan:
    """The plan of one silo of mean size, whose steps are rounds of DP-SGD over its records."""
    if options.sizes.pilot is not None or options.theory or settings.per_round:
        raise UserError(
            f"A plan of {recipe.name} has no pilot, no theory and no budget per round. Remove "
            "them, or plan one silo by itself with dp_sgd."
        )
    silos = PlannedSilos(known.clients, settings.rounds, recipe.local.inner_steps)
    records = round(known.clients * known.examples)
    delta = sensible_delta(records) if settings.delta is None else settings.delta
    budget = None if settings.epsilon is None else Budget(settings.epsilon, delta)
    ready = calibrated(recipe, budget, settings.rounds, known.dim, known.clients)
    alone = replace(known, clients=1, unit="example")
    own = None if settings.epsilon is None else settings.epsilon * recipe.noise.share(0)
    cosine = COSINE["example"] if options.cosine is None else options.cosine
    step = replace(recipe.inside(0), statistics=recipe.statistics, evaluation=recipe.evaluation)
    case = Case(
        step, known.dim, alone.population, silos.rounds * silos.steps,
        AssumedUpdates(cosine, options.norm), own, delta,
    )  # fmt: skip
    said = guarantee(ready, known.dim, known.clients, settings.rounds, delta, origin=known.origin)
    cost = expected_cost(case.recipe, alone, case.rounds)
    found = forecast(case)
    verdict = PlanVerdict(word_for(found.run_ratio))
    return Plan(case, alone, found, said, cost, verdict, metric=metric, silos=silos)


def moves(case: Case) -> dict[str, list[Forecast | None]]:
    """Forecasts with one quantity halved, as planned, and doubled."""
    return {
        name: [_expected(_varied(case, name, now * factor)) for factor in FACTORS]
        for name in VARIED
        if (now := current(case, name)) is not None
    }


@dataclass(frozen=True)
class Sweep:
    """A quantity to vary, and its values."""

    name: str
    values: tuple[float, ...]


def sweep_of(case: Case, text: str) -> Sweep:
    """Parse `cohort` or `cohort=100,200,400`."""
    name, sign, listed = text.partition("=")
    name = name.strip()
    if name not in VARIED:
        raise unknown("quantity to sweep named", name, VARIED)
    now = current(case, name)
    if now is None:
        raise UserError(
            f"This plan has no {name} to sweep. Choose one of {', '.join(_sweepable(case))}."
        )
    if not sign:
        return Sweep(name, tuple(value for f in SWEEP if (value := _rounded(name, now * f))))
    try:
        values = tuple(float(value) for value in listed.split(","))
    except ValueError as problem:
        raise UserError(
            f"--sweep {text} is not a list of numbers. Write {name}=1,2,4."
        ) from problem
    if not all(0 < value < math.inf for value in values):
        raise UserError(f"--sweep {text} has a value that is not positive. Give numbers above 0.")
    return Sweep(name, values)


def swept(
    case: Case, sweeps: Sequence[Sweep], begin: Callable[[int, int], None] = lambda *_: None
) -> list[list[Forecast | None]]:
    """Forecasts: a row per value of the first sweep, a column per value of the second, if any.

    `begin(number, total)` is called before each forecast.
    """
    first, second = sweeps[0], sweeps[1] if len(sweeps) > 1 else None
    rows: list[list[Case | None]] = [[_varied(case, first.name, value)] for value in first.values]
    if second is not None:
        rows = [[row and _varied(row, second.name, v) for v in second.values] for (row,) in rows]
    numbers = itertools.count(1)
    found: list[list[Forecast | None]] = []
    for row in rows:
        found.append([])
        for one in row:
            begin(next(numbers), len(rows) * len(row))
            found[-1].append(_expected(one))
    return found


def _constants(
    options: PlanOptions, known: PublicFacts, chosen: Material | None, recipe: Recipe
) -> Constants | None:
    """Given constants and those the pilot estimates; None if no theory is requested."""
    if not options.theory:
        return None
    given = checked(options.constants or {})
    if chosen is None or known.task is None:
        return Constants({}).or_given(given)
    return estimated(known.task, chosen.data, recipe).or_given(given)


def _sweepable(case: Case) -> list[str]:
    return [name for name in VARIED if current(case, name) is not None]


def _varied(case: Case, name: str, value: float) -> Case | None:
    return varied(case, name, value) if _rounded(name, value) else None


def _expected(case: Case | None) -> Forecast | None:
    """The forecast; None if the case is impossible or no noise meets the budget."""
    try:
        return None if case is None else forecast(case)
    except UserError:
        return None


def _rounded(name: str, value: float) -> float:
    """The value, rounded if the quantity is an integer; 0 if nothing is left."""
    return value if name in ("epsilon", "clip") else float(round(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
