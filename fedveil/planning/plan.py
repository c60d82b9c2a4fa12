"""A plan: the case, its forecast, what it costs, how it moves, and the verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError, unknown
from fedveil.parts.bound import ProbedClip
from fedveil.planning.compute import Cost, expected_cost
from fedveil.planning.facts import Asked, Facts, facts
from fedveil.planning.forecast import VARIED, Case, Forecast, bound_of, current, forecast, varied
from fedveil.planning.pilot import CLIENTS, LEAK, ROUNDS, Material, material, play
from fedveil.planning.signal import Assumed
from fedveil.planning.theory.advice import Advice, advice
from fedveil.planning.theory.constants import Constants, checked, estimated
from fedveil.planning.verdict import HOPELESS, WORKS, Verdict, judged
from fedveil.privacy.statement import Guarantee, guarantee
from fedveil.recipe import Recipe

if TYPE_CHECKING:
    from fedveil.settings import Settings

COSINE = {"client": 0.2, "example": 0.05}  # where neither said nor measured (docs/planning.md)
FACTORS = (0.5, 1.0, 2.0)
SWEEP = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class Question:
    """What is asked of a plan beside the settings."""

    asked: Asked = Asked()
    cosine: float | None = None
    norm: float | None = None
    pilot_clients: int = CLIENTS
    pilot_rounds: int = ROUNDS
    theory: bool = False
    constants: Mapping[str, float] | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be expected of a training."""

    case: Case
    known: Facts
    forecast: Forecast
    guarantee: Guarantee
    cost: Cost
    verdict: Verdict
    pilot: Material | None = None
    theory: tuple[Advice, ...] = ()
    constants: Constants | None = None

    @property
    def recipe(self) -> Recipe:
        """With settled noise."""
        return self.forecast.recipe

    @property
    def participants(self) -> float:
        """Of a round, on average."""
        return self.recipe.cohort.expected(self.case.population)

    def plain(self) -> dict[str, Any]:
        """The plan as plain values, for JSON; what is not finite is null."""
        found, cost = self.forecast, self.cost
        values = {
            "algorithm": self.recipe.name,
            "unit": self.known.unit,
            "population": self.case.population,
            "participants": self.participants,
            "rounds": self.case.rounds,
            "dimension": self.case.dim,
            "bound": bound_of(self.case),
            "epsilon": self.guarantee.epsilon,
            "delta": self.guarantee.delta,
            "view": self.guarantee.view,
            "adjacency": self.guarantee.adjacency,
            "origin": self.guarantee.origin.plain(),
            "noise_multiplier": getattr(self.recipe.noise, "multiplier", None),
            "signal": found.signal,
            "noise": found.noise,
            "signal_to_noise": found.ratio,
            "signal_to_noise_on_average": found.mean_ratio,
            "signal_to_noise_of_run": found.run_ratio,
            "verdict": self.verdict.word,
            "clients_needed": self.verdict.clients,
            "criterion": {"works": WORKS, "hopeless": HOPELESS},
            "updates": self.case.updates.told(),
            "pilot_is_private": self.pilot is not None and self.pilot.private,
            "leak": LEAK if self.pilot is not None and self.pilot.private else None,
            "bytes_up": cost.up,
            "bytes_down": cost.down,
            "products_per_client": cost.products,
            "seconds_per_round": cost.seconds,
            "theory": {a.paper: {**a.numbers, "needs": list(a.needs)} for a in self.theory},
            "constants": dict(self.constants.values) if self.constants else {},
        }
        return {name: _finite(value) for name, value in values.items()}


def make(settings: Settings, question: Question) -> Plan:
    """Everything that can be said before training."""
    from fedveil.privacy.secure import secured
    from fedveil.settings import resolve_recipe

    recipe = resolve_recipe(settings)
    if isinstance(recipe.bound, ProbedClip) and not recipe.bound.probed:
        raise UserError(
            "clip='probe' is found by a run on the data; for a plan give a number, --set clip=1.0."
        )
    if settings.noise == "secure":
        recipe = secured(recipe)
    known = facts(settings, question.asked, recipe.unit)
    cosine = COSINE[recipe.unit] if question.cosine is None else question.cosine
    updates = Assumed(cosine, question.norm)
    case = Case(
        recipe, known.dim, known.population, settings.rounds, updates,
        settings.epsilon, settings.delta, settings.per_round,
    )  # fmt: skip
    settled = forecast(case).recipe
    chosen = None
    if question.asked.pilot is not None:
        if question.cosine is not None or question.norm is not None:
            raise UserError("A pilot measures cosine and norm; leave --cosine and --norm out.")
        chosen = material(question.asked.pilot, settings, known, question.pilot_clients)
        rounds, limit, seed = settings.rounds, question.pilot_rounds, settings.seed
        case = replace(case, updates=play(settled, known, chosen, rounds, limit, seed))
    constants = _constants(question, known, chosen, recipe)
    return Plan(
        case,
        known,
        forecast(case),
        guarantee(
            settled,
            known.dim,
            known.population,
            settings.rounds,
            case.sure_delta,
            origin=known.origin,
        ),
        expected_cost(settled, known),
        judged(case),
        chosen,
        tuple(advice(case, known, constants, chosen)) if constants is not None else (),
        constants,
    )


def moves(case: Case) -> dict[str, list[Forecast | None]]:
    """How the forecast moves when one thing is divided and multiplied by 2."""
    return {
        name: [_expected(_varied(case, name, now * factor)) for factor in FACTORS]
        for name in VARIED
        if (now := current(case, name)) is not None
    }


@dataclass(frozen=True)
class Sweep:
    """A thing that is varied, over these values."""

    name: str
    values: tuple[float, ...]


def sweep_of(case: Case, text: str) -> Sweep:
    """`cohort`, or `cohort=100,200,400`."""
    name, sign, listed = text.partition("=")
    name = name.strip()
    if name not in VARIED:
        raise unknown("thing to sweep named", name, VARIED)
    now = current(case, name)
    if now is None:
        raise UserError(f"This plan has no {name} to sweep; it has {', '.join(_sweepable(case))}.")
    if not sign:
        return Sweep(name, tuple(value for f in SWEEP if (value := _rounded(name, now * f))))
    try:
        values = tuple(float(value) for value in listed.split(","))
    except ValueError as problem:
        raise UserError(f"--sweep {text}: write the values as {name}=1,2,4.") from problem
    if not all(0 < value < math.inf for value in values):
        raise UserError(f"--sweep {text}: every value must be a number above 0.")
    return Sweep(name, values)


def swept(
    case: Case, sweeps: Sequence[Sweep], begin: Callable[[int, int], None] = lambda *_: None
) -> list[list[Forecast | None]]:
    """Forecasts, a row for each value of the first and a column for each of the second, if any.

    `begin` hears which of how many comes next.
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
    question: Question, known: Facts, chosen: Material | None, recipe: Recipe
) -> Constants | None:
    """What is given, over what the pilot shows; None where no theory is asked for."""
    if not question.theory:
        return None
    given = checked(question.constants or {})
    if chosen is None or known.task is None:
        return Constants({}).or_given(given)
    return estimated(known.task, chosen.data, recipe).or_given(given)


def _sweepable(case: Case) -> list[str]:
    return [name for name in VARIED if current(case, name) is not None]


def _varied(case: Case, name: str, value: float) -> Case | None:
    return varied(case, name, value) if _rounded(name, value) else None


def _expected(case: Case | None) -> Forecast | None:
    """None where a change makes no sense, or where no noise keeps the budget."""
    try:
        return None if case is None else forecast(case)
    except UserError:
        return None


def _rounded(name: str, value: float) -> float:
    """Whole numbers stay whole; 0 for what would be none."""
    return value if name in ("epsilon", "clip") else float(round(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
