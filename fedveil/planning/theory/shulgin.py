"""Shulgin et al. 2025: Corollaries 1–6 of Fed-α-NormEC, for L-smooth losses bounded from below.

K+1 in the paper is the number of rounds here. Its σ_DP² is E‖z_i‖² (its Lemma 3). The accountant
replaces its unspecified constant c: 2σ_DP²/(pM) = 2N², N = ‖noise on the mean‖. So

    B/M = 2(1 − p)/(pM) + 2N²,   of which the paper's B₂/M is 2N²/(K+1).

Three corrections, by the paper's own proofs: η ≤ (γ/3)·βR/(α+R), where the theorem in the text has
γ/2; ηγ ≤ √Δ/(4L√(2L)(K+1)), where it has Δ; and Corollary 1's η has L in the denominator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Operator = Literal["one step", "gd", "ig"]


@dataclass(frozen=True)
class NormECProblem:
    """Constants of the corollaries."""

    smoothness: float  # L of every f_ij
    gap: float  # f(x_0) − inf f
    start: float  # R = max ‖v_i⁰ − (x_0 − T_i(x_0))/γ‖; v_i⁰ = 0 here
    heterogeneity: float  # Δ = inf f − mean of inf f_i; only for more than one step
    of_examples: float  # mean of inf f − mean_j inf f_ij; only for incremental gradients
    alpha: float  # of the smoothed normalization
    rate: float  # p
    clients: int  # M
    noise: float  # N, the norm of the noise on the mean of messages

    @property
    def chance(self) -> float:
        """B/M of one round: client sampling and noise."""
        return 2 * (1 - self.rate) / (self.rate * self.clients) + 2 * self.noise**2


@dataclass(frozen=True)
class NormECChoice:
    """What a corollary recommends, and its bound on min_k E‖∇f(x_k)‖."""

    corollary: int
    local_rate: float  # γ
    beta: float
    server_rate: float  # η
    alpha: float
    bound: float


def theorem(
    problem: NormECProblem,
    rounds: int,
    local_rate: float,
    beta: float,
    server_rate: float,
    local: Operator,
) -> float:
    """3(f(x_0) − f^inf)/(η(K+1)) + 2R + 2β√(B(K+1)/M) + drift·γ + ηL/2.

    Shulgin et al. 2025, Thm. 1 and (incremental gradients) Thm. 2 in App. G.
    """
    length = problem.smoothness
    drift = 0.0 if local == "one step" else 8 * math.sqrt(problem.heterogeneity)
    if local == "ig":
        drift += 4 * math.sqrt(problem.of_examples)
    return (
        3 * problem.gap / (server_rate * rounds)
        + 2 * problem.start
        + 2 * beta * math.sqrt(problem.chance * rounds)
        + local_rate * length * math.sqrt(2 * length) * drift
        + server_rate * length / 2
    )


def with_constant_noise(problem: NormECProblem, rounds: int, local: Operator) -> NormECChoice:
    """Corollary 1 (one step), 3 (GD), 5 (IG): γ ~ 1/(2L), β ~ D₂/K^a, η ~ η̂/K^b.

    D₂, free in the paper, minimizes A₁: √(3·gap/(2h√(B/M))), h = D₁/(6L(α + D₁)). It is capped so
    that β stays below α + R.
    """
    one = local == "one step"
    slow, fast, whole = (1 / 6, 2 / 3, 5 / 6) if one else (1 / 8, 5 / 8, 7 / 8)
    length = problem.smoothness
    gamma = 1 / (2 * length * (1 if one else rounds**slow))
    first = problem.start * rounds**slow  # D₁
    height = first / (6 * length * (problem.alpha + first))
    limit = 0.99 * (problem.alpha + problem.start) * rounds**fast
    second = limit
    if problem.chance > 0:
        second = min(math.sqrt(3 * problem.gap / (2 * height * math.sqrt(problem.chance))), limit)
    top = height * second
    if not one:
        top = min(top, math.sqrt(problem.heterogeneity) / (2 * math.sqrt(2 * length)))
    beta, eta = second / rounds**fast, top / rounds**whole
    number = {"one step": 1, "gd": 3, "ig": 5}[local]
    bound = theorem(problem, rounds, gamma, beta, eta, local)
    return NormECChoice(number, gamma, beta, eta, problem.alpha, bound)


def with_budget(problem: NormECProblem, rounds: int, local: Operator) -> NormECChoice | None:
    """Corollary 2 (one step), 4 (GD), 6 (IG): γ = 1/(2L), β = β̂/(K+1), α = R, η from these.

    β̂ = √(3·gap/γ)·(M/B₂)^¼. None without noise, where the corollary does not apply.
    """
    if problem.noise <= 0 or problem.start <= 0:
        return None
    length = problem.smoothness
    gamma, alpha = 1 / (2 * length), problem.start
    per_client = 2 * problem.noise**2 / rounds  # B₂/M
    hat = math.sqrt(3 * problem.gap / gamma) * per_client**-0.25
    hat = min(hat, 0.99 * (alpha + problem.start) * rounds)
    eta = gamma / 3 * hat * problem.start / (alpha + problem.start) / rounds
    if local != "one step":
        eta = min(eta, math.sqrt(problem.heterogeneity) / (2 * math.sqrt(2 * length) * rounds))
    number = {"one step": 2, "gd": 4, "ig": 6}[local]
    bound = theorem(problem, rounds, gamma, hat / rounds, eta, local)
    return NormECChoice(number, gamma, hat / rounds, eta, alpha, bound)
