"""Which theorems apply to a plan, which constants they need, and what they recommend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedveil.accounting.rounding import short
from fedveil.parts.bound import Clip, Normalize, SmoothNormalize
from fedveil.parts.local import SGD, IncrementalGradient
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.schedule import Constant
from fedveil.planning.facts import PublicFacts
from fedveil.planning.forecast import Case, bound_of, forecast
from fedveil.planning.pilot import Material
from fedveil.planning.theory import das, lsgd, shulgin
from fedveil.planning.theory.constants import NAMES, Constants, report_norms
from fedveil.recipe import Recipe

CONVEX = ("softmax", "linear")
Line = tuple[str, str]


@dataclass(frozen=True)
class Advice:
    """The recommendations of one paper: labelled lines, and the numbers in them."""

    paper: str
    lines: tuple[Line, ...]
    numbers: dict[str, Any]
    needs: tuple[str, ...] = ()  # constants that are missing


def advice(
    case: Case, known: PublicFacts, constants: Constants, chosen: Material | None
) -> Iterator[Advice]:
    """The recommendations of every paper whose algorithm is planned."""
    recipe, bound, memory = case.recipe, case.recipe.bound, case.recipe.memory
    if recipe.foreign:
        return  # a theorem holds for the parts that its paper names, so classes decide below
    # Das et al. 2022: Thm. 2 is about clipping, Thm. 4 about normalizing.
    if recipe.report.divides and isinstance(bound, Clip | Normalize):
        yield _das(case, known, constants)
    # Shulgin et al. 2025: Cor. 1–6 are about error compensation with smoothed normalization.
    if isinstance(memory, ErrorCompensation) and isinstance(bound, SmoothNormalize):
        yield _shulgin(case, known, constants, memory, bound)
    # DP-LSGD: Thm. 2 is about the bias of clipping.
    if recipe.unit == "example" and isinstance(bound, Clip):
        yield _lsgd(case, known, constants, chosen, bound)


def local_steps(recipe: Recipe, known: PublicFacts) -> int:
    """E of a client of average size."""
    size = 1 if known.unit == "example" else max(1, round(known.examples))
    return recipe.local.plan(torch.tensor([size]), 0, np.random.default_rng(0)).steps


def missing_line(needs: list[str]) -> Line:
    """The line that asks for missing constants."""
    named = ", ".join(f"{name} ({NAMES[name]})" for name in needs)
    return (
        "needs",
        f"{named}. Give each with --constant NAME=VALUE, or estimate all with --pilot.",
    )


def _das(case: Case, known: PublicFacts, constants: Constants) -> Advice:
    clip, steps = bound_of(case) or 1.0, local_steps(case.recipe, known)
    now = _rho(case, clip)(case.rounds)
    lines = [("ρ", f"{short(now, 3)} = ‖noise‖/(C√K) by the accountant. The theorems need ρ < 1")]
    needs = constants.missing("L", "distance", "delta", "delta_max", "norm")
    title = "Das et al. 2022, Theorems 2 and 4"
    if known.model and known.model not in CONVEX:
        lines.append(
            (
                "holds",
                f"for convex losses only. {known.model} is not convex, so this is only a hint",
            )
        )
    if needs:
        return Advice(title, (*lines, missing_line(needs)), {"rho": now}, tuple(needs))
    problem = das.ConvexProblem(
        *(constants[n] for n in ("L", "distance", "delta", "delta_max", "norm"))
    )
    choice = das.consistent_choices(problem, _rho(case, clip), case.rounds, clip, steps)
    found = das.bounds(problem, choice, clip)
    lines += [
        *_das_choice(choice, clip),
        *_das_bounds(found, choice),
        *_das_steps(problem, choice, constants),
    ]
    numbers = {**asdict(choice), **asdict(found), "favoured": found.favoured}
    return Advice(title, tuple(lines), numbers)


def _rho(case: Case, clip: float) -> Callable[[int], float]:
    """ρ(K), with the noise calibrated for K rounds."""
    return lambda rounds: das.rho(_noise(replace(case, rounds=rounds)), clip, rounds)


def _noise(case: Case) -> float:
    """‖noise on the mean‖, which every published noise tells."""
    noise = forecast(case).noise
    assert noise is not None
    return noise


def _das_choice(choice: das.DasChoice, clip: float) -> Iterator[Line]:
    yield (
        "take",
        f"η = β = {short(choice.learning_rate, 3)}, K = {_many(choice.rounds)} rounds (where ρ = "
        f"{short(choice.rho, 3)}), E ≤ {short(choice.max_steps, 3)} for α = "
        f"{short(choice.alpha, 3)}",
    )
    if clip < choice.least_clip:
        needed = short(choice.least_clip, 3)
        yield "but", f"C = {short(clip)} is below 4E√(L·max Δ*) = {needed}, which the theorems need"


def _das_bounds(found: das.Bounds, choice: das.DasChoice) -> Iterator[Line]:
    yield (
        "bound",
        f"A = {short(found.initialization, 3)} (initialization). Heterogeneity: B = "
        f"{short(found.clip, 3)} (clip) or B₂ = {short(found.normalize, 3)} (normalize)",
    )
    if found.favoured == "neither":
        yield (
            "favours",
            "neither: updates are longer than C, so clipping and normalizing are the same",
        )
        return
    normalized, clipped = short(found.normalize_gap, 3), short(found.clip_gap, 3)
    pair = f"{normalized} with normalizing, {clipped} with clipping"
    yield "favours", f"{found.favoured}: the proven bound on f(x) − f* is {pair}"


def _das_steps(
    problem: das.ConvexProblem, choice: das.DasChoice, constants: Constants
) -> Iterator[Line]:
    needs = constants.missing("G", "lambda")
    if needs:
        yield "E", f"eq. 11 (many or few local steps) needs {' and '.join(needs)}: use --constant"
        return
    best = das.best_steps(problem, choice.rho, constants["G"], constants["lambda"])
    yield "E", f"eq. 11 favours {'few: E = 1' if best == 1 else f'many: E = {short(best, 3)}'}"


def _shulgin(
    case: Case,
    known: PublicFacts,
    constants: Constants,
    memory: ErrorCompensation,
    bound: SmoothNormalize,
) -> Advice:
    title = "Shulgin et al. 2025, Corollaries 1–6"
    recipe, local = case.recipe, _operator(case.recipe, known)
    wanted = ["L", "gap", "R"] + (["delta"] if local != "one step" else [])
    if needs := constants.missing(*wanted):
        return Advice(title, (missing_line(needs),), {}, tuple(needs))
    hetero = constants.values.get("delta", 0.0)
    rate = recipe.cohort.expected(case.population) / case.population
    problem = shulgin.NormECProblem(
        constants["L"], constants["gap"], constants["R"], hetero, hetero,
        bound.alpha, rate, case.population, _noise(case),
    )  # fmt: skip
    options = [
        shulgin.with_constant_noise(problem, case.rounds, local),
        shulgin.with_budget(problem, case.rounds, local),
    ]
    given = [option for option in options if option is not None]
    lines = [(f"Cor. {o.corollary}", _shulgin_line(o)) for o in given]
    lines.append(("holds", _shulgin_holds(memory, constants["R"])))
    return Advice(title, tuple(lines), {f"corollary {o.corollary}": asdict(o) for o in given})


def _shulgin_line(choice: shulgin.NormECChoice) -> str:
    return (
        f"γ = {short(choice.local_rate, 3)}, β = {short(choice.beta, 3)}, η = "
        f"{short(choice.server_rate, 3)}, α = {short(choice.alpha, 3)}: min ‖∇f‖ ≤ "
        f"{short(choice.bound, 3)}"
    )


def _shulgin_holds(memory: ErrorCompensation, start: float) -> str:
    usual = memory.update == "everyone"
    limit = f"the bound is at least 2R = {short(2 * start, 3)}, since memory starts at 0"
    return limit if usual else f"for update='everyone' and a normalized server step; {limit}"


def _operator(recipe: Recipe, known: PublicFacts) -> shulgin.Operator:
    if isinstance(recipe.local, IncrementalGradient):  # Cor. 5 and 6 are about this operator
        return "ig"
    return "one step" if local_steps(recipe, known) == 1 else "gd"


def _lsgd(
    case: Case, known: PublicFacts, constants: Constants, chosen: Material | None, bound: Clip
) -> Advice:
    title = "DP-LSGD, Theorems 1 and 2"
    recipe = case.recipe
    cohort = recipe.cohort.expected(case.population)
    lines: list[Line] = [("limit", f"K² = O(nq): K at most about {_many(math.sqrt(cohort))}")]
    if case.epsilon is not None:
        order = lsgd.order(case.rounds, case.dim, case.population, case.epsilon)
        lines.append(("order", f"K ~ T·d/(nε)² = {short(order, 2)} without clipping bias (Thm. 1)"))
    needs = constants.missing("L", "loss", "tau")
    if needs:
        return Advice(title, (*lines, missing_line(needs)), {}, tuple(needs))
    if chosen is None:
        lines.append(("needs", "B(K, η), the clipping bias at each K. Measure it with --pilot"))
        return Advice(title, tuple(lines), {}, ("B",))
    assert known.task is not None
    problem = lsgd.LSGDProblem(
        constants["L"], constants["loss"], constants["tau"], cohort / case.population, cohort,
        _noise(case), case.rounds, bound.norm,
    )  # fmt: skip
    options = lsgd.candidates(problem, _second_moment(known, chosen, recipe, bound.norm))
    best = lsgd.best(options)
    table = ", ".join(f"{o.steps}: {short(o.bias, 2)}" for o in options)
    lines.append(("B/c", f"at K = {table}, each at Theorem 2's largest η"))
    lines.append(
        ("take", f"K = {best.steps}, η = {short(best.learning_rate, 3)}: the smallest bound")
    )
    return Advice(title, tuple(lines), {"tried": [asdict(o) for o in options], "K": best.steps})


def _second_moment(
    known: PublicFacts, chosen: Material, recipe: Recipe, clip: float
) -> Callable[[int, float], float]:
    """B²(K, η) = mean max(‖Δ‖ − c, 0)² of the pilot's units at the start."""
    task = known.task
    assert task is not None
    start = task.flatten()

    def at(steps: int, rate: float) -> float:
        local = SGD(Constant(rate), steps=steps)
        norms, _ = report_norms(task, chosen.data, local, recipe.report)(start)
        return float((norms - clip).clamp_min(0).square().mean())

    return at


def _many(number: float) -> str:
    return f"{number:,.0f}" if 1 <= number < 1e9 else short(number, 3)
