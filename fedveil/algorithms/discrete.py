"""Messages of finitely many bits, to which clients add whole-number noise themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Unpack

from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import (
    Capped,
    FixedStep,
    LocalMomentum,
    LocalTraining,
    PoissonSampling,
    ServerStep,
    averaged,
    sampled,
    sgd,
    step,
)
from fedveil.errors import UserError, unknown
from fedveil.parts.bound import Normalize
from fedveil.parts.cohort import FixedSize
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.noise import Noise
from fedveil.parts.quantize import ConditionalRound, StochasticRound
from fedveil.parts.report import Difference, PseudoGradient
from fedveil.parts.schedule import schedule
from fedveil.recipe import Recipe, View


class Quantized(LocalTraining, LocalMomentum, FixedStep, total=False):
    """Unit vectors, rounded to a grid."""

    levels: Annotated[int, Default(64), "Grid steps per unit: 2·levels + 1 values a coordinate."]
    decay: Annotated[float, Default(1.0), "Factor on both learning rates after each round."]


class DiscreteAveraging(
    PoissonSampling, Capped, LocalTraining, LocalMomentum, ServerStep, total=False
):
    """Normalized updates on a grid, with discrete Gaussian noise on each."""

    levels: Annotated[
        int | None, Default(None), "Grid steps per bound; 2·√(number of parameters) by default."
    ]
    scale: Annotated[float, Default(1.0), "Length C of every normalized update."]
    sigma: Annotated[
        float | None, Default(None), "Noise σ of a message in grid steps; calibrated to ε if None."
    ]
    support: Annotated[
        int | None, Default(None), "Largest noise value in grid steps; given with sigma."
    ]
    honest: Annotated[
        int | None, Default(None), "Least number of honest clients; smaller rounds are rejected."
    ]


@published(server_rate=0.1)
def dp_norm_fedavg_qtdl(
    clients: Annotated[int, "Clients per round."],
    *,
    calibration: Annotated[
        Literal["exact", "das2021"], "Noise for the true ε, or as published (not private)."
    ] = "exact",
    alpha: Annotated[float | None, "Rate α of the noise; calibrated to ε if None."] = None,
    support: Annotated[int | None, "Largest noise value m; given with alpha."] = None,
    claimed_epsilon: Annotated[float, "The paper's ε per message, for das2021."] = 10.0,
    mu: Annotated[float, "The paper's μ, for das2021."] = 0.1,
    **options: Unpack[Quantized],
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
    noise = exact if calibration == "exact" else published
    return _quantized("dp_norm_fedavg_qtdl", noise, clients, options)


@published(server_rate=0.1)
def dp_norm_fedavg_binomial(
    clients: Annotated[int, "Clients per round."],
    *,
    trials: Annotated[int | None, "Trials N of the noise; calibrated to ε if None."] = None,
    **options: Unpack[Quantized],
) -> Recipe:
    """The same messages with binomial noise, Bin(N, ½) − N/2 on the grid.

    Das et al. 2021, §6 (i), after Agarwal et al. 2018 (cpSGD), §4. Accounted by its
    mass function.
    """
    return _quantized("dp_norm_fedavg_binomial", Binomial(trials), clients, options)


@published()
def dp_norm_fedavg_discrete(
    clients: Annotated[int | None, "Clients per round, instead of rate."] = None,
    *,
    view: Annotated[View, "What the adversary sees: 'models', 'sum' or 'messages'."] = "messages",
    **options: Unpack[DiscreteAveraging],
) -> Recipe:
    """x ← x − β_k·Σ (round(C·u_i/‖u_i‖) + y_i)/(q·n), y_i discrete Gaussian cut to a few bits.

    Each message is private by itself, towards a server that sees them all. Rounding after
    Kairouz et al. 2021, Alg. 1, noise after Canonne et al. 2020, Thm. 4; the cut is in δ.
    """
    return Recipe(
        "dp_norm_fedavg_discrete",
        sgd(options, options["decay"]),
        sampled(options["rate"], clients, options["cap"], options["honest"]),
        PseudoGradient(),
        bound=Normalize(options["scale"]),
        quantize=ConditionalRound(options["levels"]),
        noise=DiscreteGaussian(options["sigma"], options["support"]),
        server=averaged(options, options["learning_rate"]),
        view=view,
    )


@published()
def dp_norm_fedavg_secagg(
    clients: Annotated[int | None, "Clients per round, instead of rate."] = None,
    **options: Unpack[DiscreteAveraging],
) -> Recipe:
    """The same messages modulo 2^b, of which the server learns the sum alone: noise adds up.

    Kairouz et al. 2021, Alg. 2 (distributed discrete Gaussian), without its rotation. Give clients,
    or rate with honest: rounds in which fewer arrive are rejected.
    """
    if clients is None and options["honest"] is None:
        raise UserError(
            "dp_norm_fedavg_secagg relies on the noise of the clients that arrive. Pass clients (a "
            "fixed number per round), or rate and honest (the minimum that arrives)."
        )
    recipe = dp_norm_fedavg_discrete(clients, view="sum", **options)
    return replace(recipe, name="dp_norm_fedavg_secagg")


def _quantized(name: str, noise: Noise, clients: int, options: Quantized) -> Recipe:
    rate = schedule(options["server_rate"], options["decay"])
    return Recipe(
        name,
        sgd(options, options["decay"]),
        FixedSize(clients),
        Difference(),
        bound=Normalize(1.0),
        quantize=StochasticRound(options["levels"]),
        noise=noise,
        server=step(rate, options["server_momentum"]),
    )
