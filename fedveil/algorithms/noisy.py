"""Client-level private averaging with Gaussian noise: by clipping, normalizing, adapting."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedveil.algorithms.shared import clip_at, heavy, of_few_bits, sampled, sgd
from fedveil.parts.bound import AdaptiveClip, Normalize
from fedveil.parts.report import GradientScale, Report
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import LastIterate, Output
from fedveil.recipe import Recipe


def dp_fedavg(
    clip: float | Literal["probe"] = 1.0,
    rate: float = 0.1,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule | None = None,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    weight_decay: float = 0.0,
    noise_multiplier: float | None = None,
    cap: int | None = None,
    levels: int | Literal["auto"] | None = None,
    noise_at: Literal["server", "client"] = "server",
    report: Report | None = None,
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x − β_k·(Σ clip((x − y_i)/η_k, C) + noise)/(q·n).

    Das et al. 2022, Alg. 1, lines 3–12. With report=Difference() and clients=P it is
    Zhang et al. 2022, Alg. 3, lines 3–12, there with a server rate of 1 and clip="probe", which
    leaks. With levels, messages are rounded to 2·levels + 1 values and noise is whole numbers.
    """
    report = report or GradientScale()
    local = sgd(learning_rate, steps, epochs, batch, decay, weight_decay=weight_decay)
    default = learning_rate if isinstance(report, GradientScale) else 1.0
    beta = schedule(default if server_rate is None else server_rate, decay)
    quantize, noise = of_few_bits(levels, noise_multiplier, noise_at)
    return Recipe(
        "dp_fedavg",
        local,
        sampled(rate, clients, cap),
        report,
        bound=clip_at(clip),
        quantize=quantize,
        noise=noise,
        server=heavy(beta, server_momentum),
        output=output,
    )


def dp_norm_fedavg(
    scale: float = 1.0,
    rate: float = 0.1,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule | None = None,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    weight_decay: float = 0.0,
    noise_multiplier: float | None = None,
    cap: int | None = None,
    levels: int | Literal["auto"] | None = None,
    noise_at: Literal["server", "client"] = "server",
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x − β_k·(Σ C·u_i/‖u_i‖ + noise)/(q·n), u_i = (x − y_i)/η_k.

    Das et al. 2022, Alg. 2, lines 3–12. With levels, messages are rounded to 2·levels + 1 values
    and noise is whole numbers.
    """
    beta = schedule(learning_rate if server_rate is None else server_rate, decay)
    quantize, noise = of_few_bits(levels, noise_multiplier, noise_at)
    return Recipe(
        "dp_norm_fedavg",
        sgd(learning_rate, steps, epochs, batch, decay, weight_decay=weight_decay),
        sampled(rate, clients, cap),
        GradientScale(),
        bound=Normalize(scale),
        quantize=quantize,
        noise=noise,
        server=heavy(beta, server_momentum),
        output=output,
    )


def dp_fedavg_adaptive(
    start: float = 1.0,
    quantile: float = 0.5,
    clip_rate: float = 0.2,
    count_noise: float | None = None,
    rate: float = 0.1,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule | None = None,
    decay: float = 1.0,
    server_momentum: float = 0.0,
    weight_decay: float = 0.0,
    noise_multiplier: float | None = None,
    cap: int | None = None,
    report: Report | None = None,
    output: Output = LastIterate(),
) -> Recipe:
    """DP-FedAvg with C ← C·exp(−η_C·(b̃ − γ)), b̃ the noisy fraction of updates no longer than C.

    Andrew et al. 2021, Alg. 1: the threshold follows the γ-quantile of the update norms; the noise
    of the count is in the accounting.
    """
    recipe = dp_fedavg(
        start, rate, clients, learning_rate, steps, epochs, batch, server_rate, decay,
        server_momentum, weight_decay, noise_multiplier, cap, report=report, output=output,
    )  # fmt: skip
    bound = AdaptiveClip(start, quantile, clip_rate, count_noise)
    return replace(recipe, name="dp_fedavg_adaptive", bound=bound)
