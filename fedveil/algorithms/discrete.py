"""Messages of finitely many bits, to which clients add whole-number noise themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedveil.algorithms.shared import heavy, sampled, sgd
from fedveil.errors import UserError, unknown
from fedveil.parts.bound import Normalize
from fedveil.parts.cohort import FixedSize
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.local import SGD
from fedveil.parts.noise import Noise
from fedveil.parts.quantize import ConditionalRound, StochasticRound
from fedveil.parts.report import Difference, GradientScale
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import Step
from fedveil.recipe import Recipe, View


def dp_norm_fedavg_qtdl(
    clients: int,
    levels: int = 64,
    calibration: Literal["exact", "das2021"] = "exact",
    alpha: float | None = None,
    support: int | None = None,
    claimed_epsilon: float = 10.0,
    mu: float = 0.1,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """x ← x − (β_k/r)·Σ QTDL((x − y_i)/‖x − y_i‖): unit vectors, rounded, with TDL noise.

    Das et al. 2021, Alg. 2, lines 3–11 with Alg. 1, lines 3–4. The true (ε, δ) is accounted, not
    Theorem 1's. calibration='das2021' takes the published α and m for claimed_epsilon and mu: it is
    not private as claimed and meets no budget.
    """
    if calibration not in ("exact", "das2021"):
        raise unknown("calibration", calibration, ("exact", "das2021"))
    published = PublishedLaplace(epsilon=claimed_epsilon, mu=mu)
    exact = TruncatedDiscreteLaplace(alpha, support)
    return _quantized(
        "dp_norm_fedavg_qtdl",
        exact if calibration == "exact" else published,
        clients,
        levels,
        sgd(learning_rate, steps, epochs, batch, 1.0, momentum, weight_decay),
        server_rate,
    )


def dp_norm_fedavg_binomial(
    clients: int,
    levels: int = 64,
    trials: int | None = None,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """The same messages with binomial noise, Bin(N, ½) − N/2 on the grid.

    Das et al. 2021, §6 (i), after Agarwal et al. 2018 (cpSGD), §4. Accounted by its
    mass function.
    """
    return _quantized(
        "dp_norm_fedavg_binomial",
        Binomial(trials),
        clients,
        levels,
        sgd(learning_rate, steps, epochs, batch, 1.0, momentum, weight_decay),
        server_rate,
    )


def dp_norm_fedavg_discrete(
    clients: int | None = None,
    rate: float = 0.1,
    levels: int | None = None,
    scale: float = 1.0,
    sigma: float | None = None,
    support: int | None = None,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    weight_decay: float = 0.0,
    cap: int | None = None,
    honest: int | None = None,
    view: View = "messages",
) -> Recipe:
    """x ← x − β_k·Σ (round(C·u_i/‖u_i‖) + y_i)/(q·n), y_i discrete Gaussian cut to a few bits.

    Each message is private by itself, towards a server that sees them all. Rounding after
    Kairouz et al. 2021, Alg. 1, noise after Canonne et al. 2020, Thm. 4; the cut is in δ.
    """
    beta = schedule(learning_rate if server_rate is None else server_rate, decay)
    return Recipe(
        "dp_norm_fedavg_discrete",
        sgd(learning_rate, steps, epochs, batch, decay, weight_decay=weight_decay),
        sampled(rate, clients, cap, honest),
        GradientScale(),
        bound=Normalize(scale),
        quantize=ConditionalRound(levels),
        noise=DiscreteGaussian(sigma, support),
        server=heavy(beta, server_momentum),
        view=view,
    )


def dp_norm_fedavg_secagg(
    clients: int | None = None,
    rate: float = 0.1,
    levels: int | None = None,
    scale: float = 1.0,
    sigma: float | None = None,
    support: int | None = None,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    weight_decay: float = 0.0,
    cap: int | None = None,
    honest: int | None = None,
) -> Recipe:
    """The same messages modulo 2^b, of which the server learns the sum alone: noise adds up.

    Kairouz et al. 2021, Alg. 2 (distributed discrete Gaussian), without its rotation. Give clients,
    or rate with honest: rounds in which fewer arrive are rejected.
    """
    if clients is None and honest is None:
        raise UserError(
            "dp_norm_fedavg_secagg counts on the noise of those who arrive: give clients (a fixed "
            "number a round), or rate and honest (how many arrive at least)."
        )
    recipe = dp_norm_fedavg_discrete(
        clients, rate, levels, scale, sigma, support, learning_rate, server_rate, steps, epochs,
        batch, decay, server_momentum, weight_decay, cap, honest, "sum",
    )  # fmt: skip
    return replace(recipe, name="dp_norm_fedavg_secagg")


def _quantized(
    name: str, noise: Noise, clients: int, levels: int, local: SGD, server_rate: float | Schedule
) -> Recipe:
    return Recipe(
        name,
        local,
        FixedSize(clients),
        Difference(),
        bound=Normalize(1.0),
        quantize=StochasticRound(levels),
        noise=noise,
        server=Step(schedule(server_rate)),
    )
