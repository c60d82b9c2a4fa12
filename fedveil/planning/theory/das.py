"""Das et al. 2022: Theorems 2 and 4, for convex L-smooth losses and full local gradients.

The paper's ρ = √(q·d·log(1/δ))/(nε) has an unspecified constant q. Its noise is σ√d = C·√K·ρ, so

    ρ = ‖noise on the mean‖ / (C·√K)

with the accountant's noise. Every formula below is the paper's in terms of this ρ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_ROUNDS = 1_000_000
ITERATIONS = 6  # of the fixed point K ↔ ρ(K)


@dataclass(frozen=True)
class ConvexProblem:
    """Constants of the theorems."""

    smoothness: float  # L of every f_i
    distance: float  # ‖x_0 − x*‖
    heterogeneity: float  # mean of Δ*_i = f_i(x*) − min f_i
    worst: float  # max of Δ*_i
    norm: float  # ‖u_i‖ of a client late in the run, if below C


@dataclass(frozen=True)
class DasChoice:
    """Theorem 2's choices for E local steps at Ĉ = C/E."""

    rho: float
    steps: int  # E
    least_clip: float  # 4·E·√(L·max Δ*): the smallest C the theorem allows
    alpha: float
    learning_rate: float  # η = β
    rounds: float  # K

    @property
    def max_steps(self) -> float:
        """E ≤ α/(2ρ)."""
        return self.alpha / (2 * self.rho)


@dataclass(frozen=True)
class Bounds:
    """Right-hand sides of both theorems, and the bound on f(x) − f* that each of them gives."""

    initialization: float  # A, of both
    clip: float  # B of Theorem 2
    normalize: float  # B₂ of Theorem 4
    clip_gap: float
    normalize_gap: float
    clipped: bool  # whether updates are longer than C, where both algorithms are the same

    @property
    def favoured(self) -> Literal["clip", "normalize", "neither"]:
        """The algorithm with the smaller bound."""
        if self.clipped:
            return "neither"
        return "clip" if self.clip_gap < self.normalize_gap else "normalize"


def rho(noise: float, clip: float, rounds: int) -> float:
    """ρ = ‖noise on the mean‖/(C√K).  Das et al. 2022, eq. 3 with eq. 5; accountant's noise."""
    return noise / (clip * math.sqrt(rounds))


def choices(
    problem: ConvexProblem, rho: float, clip: float, steps: int, alpha: float = 1.0
) -> DasChoice:
    """η = ρ/(2αL), K = 2αγ/(ĈEρ²), E ≤ α/(2ρ).  Das et al. 2022, Thm. 2.

    γ = L‖x_0 − x*‖, which minimizes term A; α is raised to 2ρE if E needs it.
    """
    alpha = max(alpha, 2 * rho * steps)
    gamma = problem.smoothness * problem.distance
    return DasChoice(
        rho=rho,
        steps=steps,
        least_clip=4 * steps * math.sqrt(problem.smoothness * problem.worst),
        alpha=alpha,
        learning_rate=rho / (2 * alpha * problem.smoothness),
        rounds=2 * alpha * gamma / (clip * rho**2),
    )


def consistent_choices(
    problem: ConvexProblem, rho_at: Callable[[int], float], rounds: int, clip: float, steps: int
) -> DasChoice:
    """The choices at a fixed point, where ρ is that of the recommended K: K → ρ(K) → K."""
    for _ in range(ITERATIONS):
        choice = choices(problem, rho_at(rounds), clip, steps)
        wanted = round(min(max(choice.rounds, 1.0), MAX_ROUNDS))
        if abs(wanted - rounds) <= 0.02 * rounds:
            break
        rounds = wanted
    return choice


def bounds(problem: ConvexProblem, choice: DasChoice, clip: float) -> Bounds:
    """A, B and B₂, and the gaps they prove.  Das et al. 2022, Thm. 2 and eq. 14.

    For clients that are not clipped, the left-hand side of Theorem 2 is (2 − ρE/α − ρ²E²/α²)·gap,
    that of Theorem 4 (2 − ρ²E²/α²)·(C/‖u‖)·gap, with equal clients. Clipped clients are the same in
    both.
    """
    rho, alpha, steps, length = choice.rho, choice.alpha, choice.steps, problem.smoothness
    hat, share = clip / steps, choice.rho * steps / choice.alpha
    stretch = max(clip / problem.norm, 1.0)
    first = 2 * hat * problem.distance * rho
    second = 1.5 * steps / alpha * problem.heterogeneity * rho
    drift = hat**2 / (2 * alpha * length) + stretch * problem.heterogeneity * rho * steps / alpha**2
    third = drift * steps * rho
    return Bounds(
        initialization=first,
        clip=second,
        normalize=third,
        clip_gap=(first + second) / (2 - share - share**2),
        normalize_gap=(first + third) / ((2 - share**2) * stretch),
        clipped=problem.norm > clip,
    )


def best_steps(problem: ConvexProblem, rho: float, lipschitz: float, curvature: float) -> float:
    """E = 1/(2ρ) if mean Δ* < (11/48)·G·(λ²/L²)·‖x_0 − x*‖·ρ, else 1.  Das et al. 2022, eq. 11.

    Under its Assumption 1: f_i are G-Lipschitz, with curvature λ along their gradients.
    """
    share = (curvature / problem.smoothness) ** 2
    worth = 11 / 48 * lipschitz * share * problem.distance * rho
    return 1 / (2 * rho) if problem.heterogeneity < worth else 1.0
