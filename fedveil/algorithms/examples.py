"""Example-level private training: every sampled example works by itself, as a client would."""

from __future__ import annotations

from fedveil.algorithms.shared import heavy
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Poisson
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import LastIterate, Output
from fedveil.recipe import Recipe


def dp_sgd(
    clip: float = 1.0,
    rate: float = 0.01,
    learning_rate: float | Schedule = 0.1,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    noise_multiplier: float | None = None,
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x + (Σ clip(−η·∇f_i(x), c) + N(0, (zc)²I))/(n·q) over single examples.

    DP-LSGD, Alg. 1, lines 3–10 with K = 1; Abadi et al. 2016, Alg. 1.
    """
    return _per_example(
        "dp_sgd",
        clip,
        rate,
        SGD(schedule(learning_rate, decay), steps=1),
        server_momentum,
        noise_multiplier,
        output,
    )


def dp_lsgd(
    clip: float = 1.0,
    rate: float = 0.01,
    learning_rate: float | Schedule = 0.025,
    steps: int = 10,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    noise_multiplier: float | None = None,
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x + (Σ clip(y_i − x, c) + N(0, (zc)²I))/(n·q), y_i: K steps on one example alone.

    DP-LSGD, Alg. 1, lines 3–10.
    """
    return _per_example(
        "dp_lsgd",
        clip,
        rate,
        SGD(schedule(learning_rate, decay), steps=steps),
        server_momentum,
        noise_multiplier,
        output,
    )


def _per_example(
    name: str,
    clip: float,
    rate: float,
    local: SGD,
    server_momentum: float,
    noise_multiplier: float | None,
    output: Output,
) -> Recipe:
    return Recipe(
        name,
        local,
        Poisson(rate),
        Difference(),
        bound=Clip(clip),
        noise=Gaussian(noise_multiplier),
        server=heavy(schedule(1.0), server_momentum),
        output=output,
        unit="example",
    )
