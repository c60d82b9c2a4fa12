"""Smoothed normalization with error compensation: α-NormEC and Fed-α-NormEC."""

from __future__ import annotations

from typing import Literal

from fedveil.algorithms.shared import gaussian
from fedveil.errors import unknown
from fedveil.parts.bound import SmoothNormalize
from fedveil.parts.cohort import Everyone, Poisson
from fedveil.parts.local import GD, IncrementalGradient
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.report import GradientScale
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import NormalizedStep, Server, Step
from fedveil.recipe import Recipe


def alpha_normec(
    beta: float = 0.1,
    alpha: float = 0.01,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule | None = None,
    normalize_server: bool = True,
    private: bool = False,
    noise_multiplier: float | None = None,
) -> Recipe:
    """Δ_i = Norm_α(∇f_i(x) − v_i), v_i ← v_i + βΔ_i, v̂ ← v̂ + β·mean(Δ), x ← x − η·v̂/‖v̂‖.

    Shulgin et al. 2025, Alg. 1, lines 3–12 with T = 1 and p = 1 (α-NormEC).
    """
    gamma = schedule(learning_rate)
    return Recipe(
        "alpha_normec",
        GD(gamma, 1),
        Everyone(),
        GradientScale(),
        ErrorCompensation(beta, "everyone"),
        SmoothNormalize(alpha),
        noise=gaussian(private, noise_multiplier),
        server=_normec_server(gamma, server_rate, normalize_server),
    )


def fed_alpha_normec(
    rate: float = 1.0,
    beta: float = 0.01,
    alpha: float = 0.01,
    learning_rate: float | Schedule = 0.1,
    steps: int = 1,
    local: Literal["gd", "ig"] = "gd",
    server_rate: float | Schedule | None = None,
    normalize_server: bool = False,
    update: Literal["participants", "everyone"] = "participants",
    private: bool = True,
    noise_multiplier: float | None = None,
) -> Recipe:
    """Δ_i = Norm_α((x − T_i(x))/γ − v_i), sent with probability p; x ← x − η·v̂ or η·v̂/‖v̂‖.

    Shulgin et al. 2025, Alg. 1, lines 3–12; local GD as in Thm. 1, local IG as in App. C.
    update='everyone' is the algorithm as written, 'participants' what a deployment can do.
    """
    if local not in ("gd", "ig"):
        raise unknown("local operator", local, ("gd", "ig"))
    gamma = schedule(learning_rate)
    return Recipe(
        "fed_alpha_normec",
        GD(gamma, steps) if local == "gd" else IncrementalGradient(gamma),
        Everyone() if rate == 1 else Poisson(rate),
        GradientScale(),
        ErrorCompensation(beta, update),
        SmoothNormalize(alpha),
        noise=gaussian(private, noise_multiplier),
        server=_normec_server(gamma, server_rate, normalize_server),
    )


def _normec_server(gamma: Schedule, rate: float | Schedule | None, normalize: bool) -> Server:
    eta = gamma if rate is None else schedule(rate)
    return NormalizedStep(eta) if normalize else Step(eta)
