"""The theorems' formulas by hand, and the theorems against runs on problems of known optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.data.problems import QuadraticProblem, das2022_quadratics, heterogeneous_quadratic
from fedveil.engines.dense import DenseEngine
from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.planning.theory import das, lsgd, shulgin
from fedveil.planning.theory.constants import Constants, checked, estimated
from fedveil.recipe import Recipe

# Das et al. 2022

BY_HAND = das.ConvexProblem(smoothness=2.0, distance=3.0, heterogeneity=0.1, worst=0.2, norm=1.0)


def test_das_2022_theorem_2_by_hand() -> None:
    """ρ = 0.1, C = 10, E = 5: Ĉ = 2, γ = 6, α = 1."""
    choice = das.choices(BY_HAND, 0.1, 10.0, 5)
    assert choice.alpha == 1.0
    assert choice.learning_rate == pytest.approx(0.025)
    assert choice.rounds == pytest.approx(120)
    assert choice.max_steps == pytest.approx(5)
    assert choice.least_clip == pytest.approx(20 * math.sqrt(0.4))
    found = das.bounds(BY_HAND, choice, 10.0)
    assert found.initialization == pytest.approx(2 * (2 * 9 / 6 + 6 / 2) * 0.1)
    assert found.clip == pytest.approx(0.075)
    assert found.clip_gap == pytest.approx(1.275 / 1.25)


def test_das_2022_theorem_4_by_hand() -> None:
    """C/‖u‖ = 10: B₂ = (1 + 10·0.05)·0.5, over (2 − 0.25)·10."""
    choice = das.choices(BY_HAND, 0.1, 10.0, 5)
    found = das.bounds(BY_HAND, choice, 10.0)
    assert found.normalize == pytest.approx(0.75)
    assert found.normalize_gap == pytest.approx(1.95 / 17.5)
    assert found.favoured == "normalize"
    once = das.choices(BY_HAND, 0.1, 10.0, 1)  # Ĉ = 10: A = 6, B = 0.015, B₂ = 2.501
    near = das.bounds(replace(BY_HAND, norm=9.9), once, 10.0)
    assert near.clip_gap == pytest.approx(6.015 / 1.89)
    assert near.normalize_gap == pytest.approx(8.5 / (1.99 * 10 / 9.9), rel=1e-3)
    assert near.favoured == "clip"  # little to gain by stretching, and B₂ > B
    assert das.bounds(replace(BY_HAND, norm=11.0), choice, 10.0).favoured == "neither"


def test_das_2022_more_steps_raise_alpha_and_eq_11_chooses_them() -> None:
    assert das.choices(BY_HAND, 0.1, 10.0, 50).alpha == pytest.approx(10)
    # 11/48 · G · (λ/L)² · 3 · 0.1 = 0.1 at G = 1.4545…, λ = L
    assert das.best_steps(BY_HAND, 0.1, 1.5, 2.0) == pytest.approx(5)
    assert das.best_steps(BY_HAND, 0.1, 1.4, 2.0) == 1.0


def test_das_2022_rho_is_the_paper_s_where_noise_is_as_it_says() -> None:
    """σ√d with σ² = qKC²log(1/δ)/(nε)² gives back ρ = √(q·d·log(1/δ))/(nε), for any K and C."""
    q, d, n, epsilon, delta = 2.0, 50, 100, 5.0, 1e-6
    paper = math.sqrt(q * d * math.log(1 / delta)) / (n * epsilon)
    for rounds, clip in ((10, 1.0), (700, 40.0)):
        sigma = math.sqrt(q * rounds * clip**2 * math.log(1 / delta)) / (n * epsilon)
        assert das.rho(sigma * math.sqrt(d), clip, rounds) == pytest.approx(paper)


def test_das_2022_rounds_and_rho_agree() -> None:
    """ρ(K) that falls with K: the recommended K is that of its own ρ."""
    choice = das.consistent_choices(BY_HAND, lambda k: 0.05 + 1 / k, 100, 10.0, 5)
    wanted = das.choices(BY_HAND, 0.05 + 1 / round(choice.rounds), 10.0, 5)
    assert wanted.rounds == pytest.approx(choice.rounds, rel=0.05)


def client_losses(problem: QuadraticProblem, x: Tensor) -> Tensor:
    """f_i(x) of every client, which all have equally many examples."""
    residuals = problem.data.inputs[:].double() @ x.double() - problem.data.labels[:].double()
    return 0.5 * residuals.square().reshape(problem.data.clients, -1).mean(dim=1)


def smoothness(problem: QuadraticProblem) -> float:
    rows = problem.data.inputs[:].double().reshape(problem.data.clients, -1, len(problem.start))
    hessians = rows.transpose(1, 2) @ rows / rows.shape[1]
    return float(torch.linalg.eigvalsh(hessians).max())


@pytest.mark.parametrize("normalize", [False, True], ids=["Theorem 2", "Theorem 4"])
def test_das_2022_the_bound_holds_on_quadratics(normalize: bool) -> None:
    """Left ≤ right on average over the recommended K rounds, at the recommended η = β.

    And the right-hand side is within 100 times the left one, so it is the same kind of number.
    """
    quadratic = das2022_quadratics(0, clients=20, dim=10, rank=4)
    length, steps, rho = smoothness(quadratic), 4, 0.1
    star = client_losses(quadratic, quadratic.optimum)
    distance = float((quadratic.start.double() - quadratic.optimum).norm())
    problem = das.ConvexProblem(length, distance, float(star.mean()), float(star.max()), 1.0)
    clip = das.choices(problem, rho, 1.0, steps).least_clip
    choice = das.choices(problem, rho, clip, steps)
    rounds = math.ceil(choice.rounds)
    multiplier = rho * math.sqrt(rounds) * 20 / math.sqrt(10)
    make = algorithms.dp_norm_fedavg if normalize else algorithms.dp_fedavg
    recipe = make(
        clip, rate=1.0, learning_rate=choice.learning_rate, steps=steps, noise_multiplier=multiplier
    )
    left, right = sides(recipe, quadratic, problem, choice, clip, rounds, star)
    assert 0 < left <= right < 100 * left


def sides(
    recipe: Recipe,
    quadratic: QuadraticProblem,
    problem: das.ConvexProblem,
    choice: das.DasChoice,
    clip: float,
    rounds: int,
    star: Tensor,
) -> tuple[float, float]:
    """Both sides of eq. 6 or 14, averaged over the rounds of a run."""
    normalize = recipe.name == "dp_norm_fedavg"
    share = choice.rho * choice.steps / choice.alpha
    hat = clip / choice.steps
    left, right = 0.0, 0.0
    engine = DenseEngine(Task(quadratic.model, "half_squared"), 64)
    state = begin(recipe, quadratic.start, quadratic.data, rounds, 0)
    for _ in range(rounds):
        gaps = client_losses(quadratic, state.x) - star
        state, info = run_round(recipe, state, quadratic.data, engine, 0)
        inside = (info.norms <= clip).double()
        stretch = clip / info.norms if normalize else torch.ones_like(info.norms)
        factor = (2 - share**2) if normalize else (2 - share - share**2)
        clipped = 3 * hat * info.norms / (8 * problem.smoothness * choice.steps)
        left += float((inside * factor * stretch * gaps + (1 - inside) * clipped).mean())
        drift = hat**2 / (2 * choice.alpha * problem.smoothness)
        spread = drift + stretch * star * choice.rho * choice.steps / choice.alpha**2
        hetero = spread * choice.steps if normalize else 1.5 * choice.steps / choice.alpha * star
        right += float((inside * hetero).mean()) * choice.rho
    initial = das.bounds(problem, choice, clip).initialization
    return left / rounds, initial + right / rounds


# Shulgin et al. 2025

SMOOTH = shulgin.NormECProblem(
    smoothness=2.0, gap=3.0, start=1.0, heterogeneity=0.5, of_examples=0.25, alpha=1.0,
    rate=0.5, clients=10, noise=0.1,
)  # fmt: skip


def test_shulgin_2025_theorem_by_hand() -> None:
    """B/M = 2·0.5/5 + 0.02; 100 rounds, γ = 0.1, β = 0.01, η = 0.002."""
    assert SMOOTH.chance == pytest.approx(0.22)
    one = 3 * 3 / 0.2 + 2 + 0.02 * math.sqrt(22) + 0.002
    assert shulgin.theorem(SMOOTH, 100, 0.1, 0.01, 0.002, "one step") == pytest.approx(one)
    drift = 0.1 * 8 * 2 * 2 * math.sqrt(0.5)
    assert shulgin.theorem(SMOOTH, 100, 0.1, 0.01, 0.002, "gd") == pytest.approx(one + drift)
    more = 0.1 * 4 * 2 * 2 * 0.5
    found = shulgin.theorem(SMOOTH, 100, 0.1, 0.01, 0.002, "ig")
    assert found == pytest.approx(one + drift + more)


def test_shulgin_2025_corollary_1_by_hand() -> None:
    """64 rounds: K^(1/6) = 2, K^(2/3) = 16, K^(5/6) = 32; D₁ = 2, h = 2/(12·3)."""
    choice = shulgin.with_constant_noise(SMOOTH, 64, "one step")
    height = 1 / 18
    second = math.sqrt(9 / (2 * height * math.sqrt(0.22)))
    assert choice.corollary == 1
    assert choice.local_rate == pytest.approx(0.25)
    assert choice.beta == pytest.approx(second / 16)
    assert choice.server_rate == pytest.approx(height * second / 32)
    published = 3 * 3 / (height * second) + 2 * 2 + 2 * math.sqrt(0.22) * second
    last = height * second * 2 / 2
    assert choice.bound == pytest.approx(published / 2 + last / 32)


def test_shulgin_2025_the_free_constant_is_the_best() -> None:
    choice = shulgin.with_constant_noise(SMOOTH, 64, "one step")
    for factor in (0.9, 1.1):
        beta, eta = choice.beta * factor, choice.server_rate * factor
        other = shulgin.theorem(SMOOTH, 64, choice.local_rate, beta, eta, "one step")
        assert other > choice.bound - 1e-3  # A₂ is not part of what D₂ makes least


@pytest.mark.parametrize(("local", "number"), [("gd", 3), ("ig", 5)])
def test_shulgin_2025_corollaries_3_and_5_keep_the_theorem_s_conditions(
    local: shulgin.Operator, number: int
) -> None:
    """256 rounds: K^(1/8) = 2."""
    choice = shulgin.with_constant_noise(SMOOTH, 256, local)
    assert choice.corollary == number
    assert choice.local_rate == pytest.approx(1 / 8)
    check_conditions(choice, 256, multiple=True)


@pytest.mark.parametrize(("local", "number"), [("one step", 2), ("gd", 4), ("ig", 6)])
def test_shulgin_2025_corollaries_2_4_and_6(local: shulgin.Operator, number: int) -> None:
    """100 rounds: B₂/M = 0.02/100, β̂ = √(9·4)·(2e-4)^(−1/4), α = R = 1."""
    choice = shulgin.with_budget(SMOOTH, 100, local)
    assert choice is not None
    assert choice.corollary == number
    assert choice.alpha == 1.0
    hat = 6 * 2e-4**-0.25
    assert choice.beta == pytest.approx(hat / 100)
    check_conditions(choice, 100, multiple=local != "one step")
    assert shulgin.with_budget(replace(SMOOTH, noise=0.0), 100, local) is None


def check_conditions(choice: shulgin.NormECChoice, rounds: int, multiple: bool) -> None:
    """η ≤ (γ/3)βR/(α + R), γ ≤ 1/(2L), β < α + R, ηγ ≤ √Δ/(4L√(2L)·rounds)."""
    assert choice.local_rate <= 1 / 4
    assert choice.beta < choice.alpha + 1
    limit = choice.local_rate / 3 * choice.beta / (choice.alpha + 1)
    assert choice.server_rate <= limit * 1.0000001
    if multiple:
        most = math.sqrt(0.5) / (8 * 2 * rounds)
        assert choice.server_rate * choice.local_rate <= most * 1.0000001


@pytest.mark.parametrize("steps", [1, 3])
def test_shulgin_2025_the_bound_holds_on_quadratics(steps: int) -> None:
    """min ‖∇f(x_k)‖ ≤ bound, and memory errors never exceed R, as its proof's step 1 has it."""
    quadratic, rounds, noise = heterogeneous_quadratic(6, 4, seed=0), 60, 0.05
    length, star = smoothness(quadratic), client_losses(quadratic, quadratic.optimum)
    local: shulgin.Operator = "one step" if steps == 1 else "gd"
    gamma = 1 / (2 * length * (1 if steps == 1 else rounds ** (1 / 8)))
    first = reports(quadratic, gamma, steps, quadratic.start)
    start = float(first.norm(dim=1).max())
    gap = quadratic.suboptimality(quadratic.start)
    problem = shulgin.NormECProblem(length, gap, start, float(star.mean()), 0.0, 1.0, 1.0, 6, noise)
    choice = shulgin.with_constant_noise(problem, rounds, local)
    assert choice.local_rate == pytest.approx(gamma)
    recipe = algorithms.fed_alpha_normec(
        rate=1.0, beta=choice.beta, alpha=1.0, learning_rate=gamma, steps=steps,
        server_rate=choice.server_rate, normalize_server=True, update="everyone",
        noise_multiplier=noise * 6 / math.sqrt(4),
    )  # fmt: skip
    engine = DenseEngine(Task(quadratic.model, "half_squared"), 64)
    state = begin(recipe, quadratic.start, quadratic.data, rounds, 0)
    slopes, errors = [], []
    for _ in range(rounds):
        slopes.append(float(slope(quadratic, state.x).norm()))
        state, info = run_round(recipe, state, quadratic.data, engine, 0)
        errors.append(float(info.norms.max()))
    assert min(slopes) <= choice.bound
    assert max(errors) <= start * (1 + 1e-5)
    assert errors[-1] < errors[0]


def slope(quadratic: QuadraticProblem, x: Tensor) -> Tensor:
    rows, targets = quadratic.data.inputs[:].double(), quadratic.data.labels[:].double()
    return rows.T @ (rows @ x.double() - targets) / len(targets)


def reports(quadratic: QuadraticProblem, gamma: float, steps: int, x: Tensor) -> Tensor:
    """(x − T_i(x))/γ of every client, by hand."""
    clients = quadratic.data.clients
    rows = quadratic.data.inputs[:].double().reshape(clients, -1, len(x))
    targets = quadratic.data.labels[:].double().reshape(clients, -1)
    local = x.double().repeat(clients, 1)
    for _ in range(steps):
        residual = torch.einsum("ijd,id->ij", rows, local) - targets
        local = local - gamma / steps * torch.einsum("ijd,ij->id", rows, residual) / rows.shape[1]
    return (x.double() - local) / gamma


# DP-LSGD

LOCAL = lsgd.LSGDProblem(
    smoothness=2.0, loss=3.0, variance=4.0, rate=0.1, cohort=100.0, noise=0.05, rounds=50, clip=1.0
)


def test_dp_lsgd_theorem_2_by_hand() -> None:
    """K = 4, η = 0.02, B² = 0.01."""
    first = 4 * 3 / (50 * 4 * 0.02)
    second = 16 * 0.02**2 * 4 * 4 * 16 / 100
    third = 4 * 1.04 * (0.1 + 0.0025) / (0.0004 * 4)
    assert lsgd.bound(LOCAL, 4, 0.02, 0.01) == pytest.approx(first + second + third)


def test_dp_lsgd_takes_the_best_of_the_steps_that_its_condition_allows() -> None:
    tried = lsgd.candidates(LOCAL, lambda steps, rate: 0.04 / steps)
    assert [one.steps for one in tried] == [1, 2, 4, 8]  # 16² > nq = 100
    assert [one.bias for one in tried] == pytest.approx([0.2 / math.sqrt(k) for k in (1, 2, 4, 8)])
    assert all(one.learning_rate * 5 * 2 * one.steps <= 1.0000001 for one in tried)
    assert lsgd.best(tried).bound == min(one.bound for one in tried)
    assert lsgd.order(1000, 270_000, 50_000, 2.0) == pytest.approx(0.027)


# Constants


def test_constants_of_a_quadratic_are_found() -> None:
    quadratic = das2022_quadratics(3, clients=10, dim=12, rank=3)
    recipe = algorithms.dp_fedavg(learning_rate=0.5, steps=1)
    found = estimated(Task(quadratic.model, "half_squared"), quadratic.data, recipe)
    star = client_losses(quadratic, quadratic.optimum)
    exact = {
        "L": smoothness(quadratic),
        "distance": float((quadratic.start.double() - quadratic.optimum).norm()),
        "gap": quadratic.suboptimality(quadratic.start),
        "delta": float(star.mean()),
        "delta_max": float(star.max()),
        "R": float(reports(quadratic, 0.5, 1, quadratic.start).norm(dim=1).max()),
        "loss": quadratic.loss(quadratic.start),
        "norm": float(reports(quadratic, 0.5, 1, quadratic.optimum).norm(dim=1).mean()),
    }
    for name, value in exact.items():
        assert found[name] == pytest.approx(value, rel=0.02), name
    slopes = reports(quadratic, 0.5, 1, quadratic.start)
    spread = (slopes - slopes.mean(dim=0)).square().sum(dim=1).mean()
    assert found["tau"] == pytest.approx(float(spread), rel=0.01)
    assert found.missing("G", "lambda", "L") == ["G", "lambda"]


def test_given_constants_win_and_wrong_ones_are_refused() -> None:
    known = Constants({"L": 1.0}).or_given({"L": 2.0})
    assert known["L"] == 2.0
    assert known.given == {"L"}
    with pytest.raises(UserError, match="no constant 'M'"):
        checked({"M": 1.0})
    for wrong in (0.0, -1.0, math.nan, math.inf, "two", True):
        with pytest.raises(UserError, match="above 0"):
            checked({"L": wrong})  # type: ignore[dict-item]


def test_more_rounds_bring_the_proven_gradient_down() -> None:
    """Without noise Corollary 1's bound falls with the rounds, towards 2R."""
    quiet = replace(SMOOTH, noise=0.0, rate=1.0)
    bounds = [shulgin.with_constant_noise(quiet, k, "one step").bound for k in (10, 100, 1000)]
    assert all(np.isfinite(bounds))
    assert all(later < earlier for earlier, later in pairwise(bounds))
    assert bounds[-1] > 2 * quiet.start
