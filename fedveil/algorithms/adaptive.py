"""Adaptive servers: FedAdagrad, FedAdam and FedYogi, plain and private.

Noise is in the direction that the server adapts to. What follows the noisy mean is post-processing,
so the guarantee is that of `dp_fedavg` (docs/privacy.md, "The chain").
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Unpack

from fedveil.algorithms.noisy import dp_fedavg
from fedveil.algorithms.plain import Averaging, fedavg
from fedveil.algorithms.published import Default, published
from fedveil.algorithms.shared import (
    GaussianNoise,
    LocalMomentum,
    LocalTraining,
    ReleasedModel,
    Sampling,
)
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import Adagrad, Adam, Server, Yogi
from fedveil.recipe import Recipe

Second = Annotated[float, "Decay β₂ of the squared directions."]
Clipped = Annotated[float, "Clipping threshold C."]
Corrected = Annotated[
    bool, "Correct the bias of both moments, as Adam does and the paper does not."
]
REMOVED = "Subtract the variance of the noise from the squared directions."


class AdaptiveStep(Averaging, total=False):
    """Averaging, then a step that adapts to each coordinate."""

    server_rate: Annotated[float | Schedule, Default(0.01), "Server learning rate η."]
    first: Annotated[float, Default(0.9), "Decay β₁ of the directions."]
    floor: Annotated[float, Default(1e-3), "Degree of adaptivity τ, added to √v."]


class PrivateAdaptiveStep(
    Sampling, LocalTraining, LocalMomentum, GaussianNoise, ReleasedModel, total=False
):
    """Private averaging, then a step that adapts to each coordinate."""

    server_rate: Annotated[float | Schedule, Default(0.01), "Server learning rate η."]
    first: Annotated[float, Default(0.9), "Decay β₁ of the directions."]
    floor: Annotated[float, Default(1e-3), "Degree of adaptivity τ, added to √v."]
    remove_noise: Annotated[bool, Default(False), REMOVED]


@published(first=0.0)
def fedadagrad(**options: Unpack[AdaptiveStep]) -> Recipe:
    """x ← x + η·m/(√v + τ), v ← v + Δ², Δ = mean(y_i − x).

    Reddi et al. 2021 (FedAdagrad), Alg. 2. Not private.
    """
    return _averaged("fedadagrad", Adagrad, options)


@published()
def fedadam(
    second: Second = 0.99, *, bias_correction: Corrected = False, **options: Unpack[AdaptiveStep]
) -> Recipe:
    """x ← x + η·m/(√v + τ), v ← β₂v + (1 − β₂)Δ², Δ = mean(y_i − x).

    Reddi et al. 2021 (FedAdam), Alg. 2. Not private.
    """
    own = {"second": second, "bias_correction": bias_correction}
    return _averaged("fedadam", Adam, options, **own)


@published()
def fedyogi(second: Second = 0.99, **options: Unpack[AdaptiveStep]) -> Recipe:
    """x ← x + η·m/(√v + τ), v ← v − (1 − β₂)Δ²·sign(v − Δ²), Δ = mean(y_i − x).

    Reddi et al. 2021 (FedYogi), Alg. 2. Not private.
    """
    return _averaged("fedyogi", Yogi, options, second=second)


@published(first=0.0)
def dp_fedadagrad(clip: Clipped = 1.0, **options: Unpack[PrivateAdaptiveStep]) -> Recipe:
    """x ← x − η·m/(√v + τ), v ← v + d², d = (Σ clip((x − y_i)/η_k, C) + noise)/(q·n).

    Reddi et al. 2021 (FedAdagrad), Alg. 2 after Das et al. 2022, Alg. 1, lines 3–11.
    """
    return _private("dp_fedadagrad", Adagrad, clip, options)


@published()
def dp_fedadam(
    clip: Clipped = 1.0,
    second: Second = 0.99,
    *,
    bias_correction: Corrected = False,
    **options: Unpack[PrivateAdaptiveStep],
) -> Recipe:
    """x ← x − η·m/(√v + τ), v ← β₂v + (1 − β₂)d², d = (Σ clip((x − y_i)/η_k, C) + noise)/(q·n).

    Reddi et al. 2021 (FedAdam), Alg. 2 after Das et al. 2022, Alg. 1, lines 3–11.
    """
    own = {"second": second, "bias_correction": bias_correction}
    return _private("dp_fedadam", Adam, clip, options, **own)


@published()
def dp_fedyogi(
    clip: Clipped = 1.0, second: Second = 0.99, **options: Unpack[PrivateAdaptiveStep]
) -> Recipe:
    """x ← x − η·m/(√v + τ), v ← v − (1 − β₂)d²·sign(v − d²), d the noisy mean of dp_fedavg.

    Reddi et al. 2021 (FedYogi), Alg. 2 after Das et al. 2022, Alg. 1, lines 3–11.
    """
    return _private("dp_fedyogi", Yogi, clip, options, second=second)


def _averaged(name: str, kind: type[Server], options: AdaptiveStep, **own: Any) -> Recipe:
    given, rest = _server_options(options)
    return replace(fedavg(**rest), name=name, server=kind(**given, **own))


def _private(
    name: str, kind: type[Server], clip: float, options: PrivateAdaptiveStep, **own: Any
) -> Recipe:
    given, rest = _server_options(options)
    return replace(dp_fedavg(clip, **rest), name=name, server=kind(**given, **own))


def _server_options(options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the server, and the other options."""
    names = ("first", "floor", "remove_noise")
    given = {name: options[name] for name in names if name in options}
    rest = {name: options[name] for name in options if name not in (*names, "server_rate")}
    return {"rate": schedule(options["server_rate"]), **given}, rest
