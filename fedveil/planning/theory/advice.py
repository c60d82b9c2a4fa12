"""Which theorem speaks about a plan, what it needs to know, and what it recommends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from fedveil.parts.bound import Clip, Normalize, SmoothNormalize
from fedveil.parts.local import SGD, IncrementalGradient
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.report import GradientScale
from fedveil.parts.schedule import Constant
from fedveil.planning.facts import Facts
from fedveil.planning.forecast import Case, bound_of, forecast
from fedveil.planning.pilot import Material
from fedveil.planning.theory import das, lsgd, shulgin
from fedveil.planning.theory.constants import NAMES, Constants, report_norms
from fedveil.recipe import Recipe

CONVEX = ("softmax", "linear")
Line = tuple[str, str]


@dataclass(frozen=True)
class Advice:
    """What one paper says: lines to read, and the numbers in them."""

    paper: str
    lines: tuple[Line, ...]
    numbers: dict[str, Any]
    needs: tuple[str, ...] = ()  # constants that are missing


def advice(
    case: Case, known: Facts, constants: Constants, chosen: Material | None
) -> Iterator[Advice]:
    """From every paper whose algorithm is planned."""
    recipe = case.recipe
    if isinstance(recipe.report, GradientScale) and isinstance(recipe.bound, Clip | Normalize):
        yield _das(case, known, constants)
    if isinstance(recipe.memory, ErrorCompensation) and isinstance(recipe.bound, SmoothNormalize):
        yield _shulgin(case, constants)
    if recipe.unit == "example" and isinstance(recipe.bound, Clip):
        yield _lsgd(case, known, constants, chosen)


def local_steps(recipe: Recipe, known: Facts) -> int:
    """E of a client of average size."""
    size = 1 if known.unit == "example" else max(1, round(known.examples))
    return recipe.local.plan(torch.tensor([size]), 0, np.random.default_rng(0)).steps


def asked_for(needs: list[str]) -> Line:
    """The sentence that asks for what is missing."""
    named = "; ".join(f"{name} ({NAMES[name]})" for name in needs)
    return ("needs", f"{named}. Give each with --constant NAME=VALUE, or all by a --pilot.")


def _das(case: Case, known: Facts, constants: Constants) -> Advice:
    clip, steps = bound_of(case) or 1.0, local_steps(case.recipe, known)
    now = _rho(case, clip)(case.rounds)
    lines = [("ρ", f"{now:.3g} = ‖noise‖/(C√K) by the accountant; theory needs ρ < 1")]
    needs = constants.missing("L", "distance", "delta", "delta_max", "norm")
    title = "Das et al. 2022, Theorems 2 and 4"
    if known.model and known.model not in CONVEX:
        lines.append(
            ("holds", f"for convex losses only; {known.model} is not, so take it as a hint")
        )
    if needs:
        return Advice(title, (*lines, asked_for(needs)), {"rho": now}, tuple(needs))
    problem = das.Problem(*(constants[n] for n in ("L", "distance", "delta", "delta_max", "norm")))
    choice = das.settled_choices(problem, _rho(case, clip), case.rounds, clip, steps)
    found = das.bounds(problem, choice, clip)
    lines += [
        *_das_choice(choice, clip),
        *_das_bounds(found, choice),
        *_das_steps(problem, choice, constants),
    ]
    numbers = {**asdict(choice), **asdict(found), "favoured": found.favoured}
    return Advice(title, tuple(lines), numbers)


def _rho(case: Case, clip: float) -> Callable[[int], float]:
    """ρ(K): the noise is settled anew for K rounds."""
    return lambda rounds: das.rho(forecast(replace(case, rounds=rounds)).noise, clip, rounds)


def _das_choice(choice: das.Choice, clip: float) -> Iterator[Line]:
    yield (
        "take",
        f"η = β = {choice.learning_rate:.3g}, K = {_many(choice.rounds)} rounds (ρ = "
        f"{choice.rho:.3g} there), E ≤ {choice.most_steps:.3g} for α = {choice.alpha:.3g}",
    )
    if clip < choice.least_clip:
        yield "but", f"C = {clip:g} is below 4E√(L·max Δ*) = {choice.least_clip:.3g} that they need"


def _das_bounds(found: das.Bounds, choice: das.Choice) -> Iterator[Line]:
    yield (
        "bound",
        f"A = {found.initialization:.3g} (start), B = {found.clip:.3g} (clip) or B₂ = "
        f"{found.normalize:.3g} (normalize) from heterogeneity",
    )
    if found.favoured == "neither":
        yield "favours", "neither: updates are longer than C, so clip and normalize do the same"
        return
    pair = f"{found.normalize_gap:.3g} by normalizing, {found.clip_gap:.3g} by clipping"
    yield "favours", f"{found.favoured}: the proven f(x) − f* is {pair}"


def _das_steps(problem: das.Problem, choice: das.Choice, constants: Constants) -> Iterator[Line]:
    needs = constants.missing("G", "lambda")
    if needs:
        yield "E", f"more or fewer local steps (eq. 11) needs {' and '.join(needs)} by --constant"
        return
    best = das.best_steps(problem, choice.rho, constants["G"], constants["lambda"])
    yield "E", f"eq. 11 favours {'few: E = 1' if best == 1 else f'many: E = {best:.3g}'}"


def _shulgin(case: Case, constants: Constants) -> Advice:
    title = "Shulgin et al. 2025, Corollaries 1–6"
    recipe, found = case.recipe, forecast(case)
    local = _operator(recipe)
    wanted = ["L", "gap", "R"] + (["delta"] if local != "one step" else [])
    if needs := constants.missing(*wanted):
        return Advice(title, (asked_for(needs),), {}, tuple(needs))
    assert isinstance(recipe.bound, SmoothNormalize)
    hetero = constants.values.get("delta", 0.0)
    rate = recipe.cohort.expected(case.population) / case.population
    problem = shulgin.Problem(
        constants["L"], constants["gap"], constants["R"], hetero, hetero,
        recipe.bound.alpha, rate, case.population, found.noise,
    )  # fmt: skip
    options = [
        shulgin.with_constant_noise(problem, case.rounds, local),
        shulgin.with_budget(problem, case.rounds, local),
    ]
    given = [option for option in options if option is not None]
    lines = [(f"Cor. {o.corollary}", _shulgin_line(o)) for o in given]
    lines.append(("holds", _shulgin_holds(recipe, constants["R"])))
    return Advice(title, tuple(lines), {f"corollary {o.corollary}": asdict(o) for o in given})


def _shulgin_line(choice: shulgin.Choice) -> str:
    return (
        f"γ = {choice.local_rate:.3g}, β = {choice.beta:.3g}, η = {choice.server_rate:.3g}, "
        f"α = {choice.alpha:.3g}: min ‖∇f‖ ≤ {choice.bound:.3g}"
    )


def _shulgin_holds(recipe: Recipe, start: float) -> str:
    memory = recipe.memory
    usual = isinstance(memory, ErrorCompensation) and memory.update == "everyone"
    told = "" if usual else "for update='everyone' and a normalized server step; "
    return f"{told}the bound is never below 2R = {2 * start:.3g}, as memory starts at 0"


def _operator(recipe: Recipe) -> shulgin.Operator:
    if isinstance(recipe.local, IncrementalGradient):
        return "ig"
    return "one step" if getattr(recipe.local, "steps", 1) == 1 else "gd"


def _lsgd(case: Case, known: Facts, constants: Constants, chosen: Material | None) -> Advice:
    title = "DP-LSGD, Theorems 1 and 2"
    recipe, found = case.recipe, forecast(case)
    cohort = recipe.cohort.expected(case.population)
    lines: list[Line] = [("limit", f"K² = O(nq): K of about {_many(math.sqrt(cohort))} at most")]
    if case.epsilon is not None:
        order = lsgd.order(case.rounds, case.dim, case.population, case.epsilon)
        lines.append(("order", f"K ~ T·d/(nε)² = {order:.2g} without clipping bias (Thm. 1)"))
    needs = constants.missing("L", "loss", "tau")
    if needs:
        return Advice(title, (*lines, asked_for(needs)), {}, tuple(needs))
    if chosen is None:
        lines.append(
            ("needs", "B(K, η), the clipping bias at each K, which only a --pilot can show")
        )
        return Advice(title, tuple(lines), {}, ("B",))
    assert known.task is not None
    assert isinstance(recipe.bound, Clip)
    problem = lsgd.Problem(
        constants["L"], constants["loss"], constants["tau"], cohort / case.population, cohort,
        found.noise, case.rounds, recipe.bound.norm,
    )  # fmt: skip
    options = lsgd.tried(problem, _second_moment(known, chosen, recipe))
    best = lsgd.best(options)
    table = ", ".join(f"{o.steps}: {o.bias:.2g}" for o in options)
    lines.append(("B/c", f"at K = {table}, each at Theorem 2's largest η"))
    lines.append(("take", f"K = {best.steps}, η = {best.learning_rate:.3g}: its bound is least"))
    return Advice(title, tuple(lines), {"tried": [asdict(o) for o in options], "K": best.steps})


def _second_moment(known: Facts, chosen: Material, recipe: Recipe) -> Callable[[int, float], float]:
    """B²(K, η) = mean max(‖Δ‖ − c, 0)² of the pilot's units at the start."""
    task = known.task
    assert task is not None
    assert isinstance(recipe.bound, Clip)
    clip, start = recipe.bound.norm, task.flatten()

    def at(steps: int, rate: float) -> float:
        local = SGD(Constant(rate), steps=steps)
        norms, _ = report_norms(task, chosen.data, local, recipe.report)(start)
        return float((norms - clip).clamp_min(0).square().mean())

    return at


def _many(number: float) -> str:
    return f"{number:,.0f}" if 1 <= number < 1e9 else f"{number:.3g}"
