"""Every published method as a function of a few lines that returns a Recipe.

The first line of a docstring is the rule, then comes the citation. Where a paper's privacy claim
is false or silent, the recipe runs the paper's rule and the accounting is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fedveil.errors import unknown
from fedveil.parts.bound import Clip, Normalize, SmoothNormalize
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.local import GD, SGD, IncrementalGradient, Proximal
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import Binomial, Gaussian, Noise, Silent, TruncatedDiscreteLaplace
from fedveil.parts.quantize import StochasticRound
from fedveil.parts.report import Difference, GradientScale, Model, Report
from fedveil.parts.schedule import Schedule, schedule
from fedveil.parts.server import LastIterate, Momentum, NormalizedStep, Output, Server, Step
from fedveil.recipe import Recipe


def fedavg(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """x ← x + η_g·mean(y_i − x): local SGD, then the mean difference.

    Zhang et al. 2022, Alg. 1, lines 3–10; Das et al. 2022, Alg. 3. Not private.
    """
    local = _sgd(learning_rate, steps, epochs, batch, decay, momentum, weight_decay)
    return Recipe("fedavg", local, _some(clients), server=Step(schedule(server_rate)))


def fedprox(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    strength: float = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
) -> Recipe:
    """FedAvg whose local loss is f_i(y) + (strength/2)‖y − x‖².

    Li et al. 2020 (FedProx), Alg. 2, lines 4–6. Not private.
    """
    length = (steps, epochs) if steps or epochs else (10, None)
    local = Proximal(schedule(learning_rate), *length, batch, strength=strength)
    return Recipe("fedprox", local, _some(clients), server=Step(schedule(server_rate)))


def model_clipped_fedavg(
    clip: float = 1.0,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
) -> Recipe:
    """x ← mean(clip(y_i, c)): the local models themselves are clipped.

    Zhang et al. 2022, §2.1 (model clipping). Not private; its limit is biased (Claim 2.1).
    """
    local = _sgd(learning_rate, steps, epochs, batch)
    return Recipe("model_clipped_fedavg", local, _some(clients), Model(), bound=Clip(clip))


def clipped_fedavg(
    clip: float = 1.0,
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    server_rate: float | Schedule = 1.0,
) -> Recipe:
    """x ← x + η_g·mean(clip(y_i − x, c)): CE-FedAvg, without noise.

    Zhang et al. 2022, Alg. 2, lines 9–12. Not private.
    """
    local = _sgd(learning_rate, steps, epochs, batch)
    return Recipe(
        "clipped_fedavg",
        local,
        _some(clients),
        bound=Clip(clip),
        server=Step(schedule(server_rate)),
    )


def dp_fedavg(
    clip: float = 1.0,
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
    noise_at: Literal["server", "client"] = "server",
    report: Report | None = None,
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x − β_k·(Σ clip((x − y_i)/η_k, C) + noise)/(q·n).

    Das et al. 2022, Alg. 1, lines 3–12. With report=Difference() and clients=P it is
    Zhang et al. 2022, Alg. 3, lines 3–12, there with a server rate of 1.
    """
    report = report or GradientScale()
    local = _sgd(learning_rate, steps, epochs, batch, decay, weight_decay=weight_decay)
    default = learning_rate if isinstance(report, GradientScale) else 1.0
    beta = schedule(default if server_rate is None else server_rate, decay)
    return Recipe(
        "dp_fedavg",
        local,
        _sampled(rate, clients),
        report,
        bound=Clip(clip),
        noise=Gaussian(noise_multiplier, noise_at),
        server=_heavy(beta, server_momentum),
        output=output,
    )


def norm_fedavg(
    clients: int | None = None,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """x ← x − (β_k/r)·Σ (x − y_i)/‖x − y_i‖.

    Das et al. 2021, Remark 3 (NormFedAvg): Alg. 2 without the operator of line 9. Not private.
    """
    local = _sgd(learning_rate, steps, epochs, batch, decay, momentum, weight_decay)
    return Recipe(
        "norm_fedavg",
        local,
        _some(clients),
        bound=Normalize(1.0),
        server=Step(schedule(server_rate, decay)),
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
    noise_at: Literal["server", "client"] = "server",
    output: Output = LastIterate(),
) -> Recipe:
    """x ← x − β_k·(Σ C·u_i/‖u_i‖ + noise)/(q·n), u_i = (x − y_i)/η_k.

    Das et al. 2022, Alg. 2, lines 3–12.
    """
    beta = schedule(learning_rate if server_rate is None else server_rate, decay)
    return Recipe(
        "dp_norm_fedavg",
        _sgd(learning_rate, steps, epochs, batch, decay, weight_decay=weight_decay),
        _sampled(rate, clients),
        GradientScale(),
        bound=Normalize(scale),
        noise=Gaussian(noise_multiplier, noise_at),
        server=_heavy(beta, server_momentum),
        output=output,
    )


def dp_norm_fedavg_qtdl(
    clients: int,
    levels: int = 64,
    alpha: float | None = None,
    support: int | None = None,
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
    Theorem 1's.
    """
    return _quantized(
        "dp_norm_fedavg_qtdl",
        TruncatedDiscreteLaplace(alpha, support),
        clients,
        levels,
        _sgd(learning_rate, steps, epochs, batch, 1.0, momentum, weight_decay),
        server_rate,
    )


def dp_norm_fedavg_binomial(
    clients: int,
    trials: int,
    levels: int = 64,
    learning_rate: float | Schedule = 0.1,
    server_rate: float | Schedule = 0.1,
    steps: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Recipe:
    """The same messages with binomial noise, Bin(N, ½) − N/2 on the grid.

    Das et al. 2021, §6 (i), after Agarwal et al. 2018 (cpSGD), §4. No guarantee is stated.
    """
    return _quantized(
        "dp_norm_fedavg_binomial",
        Binomial(trials),
        clients,
        levels,
        _sgd(learning_rate, steps, epochs, batch, 1.0, momentum, weight_decay),
        server_rate,
    )


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
        noise=_noise(private, noise_multiplier),
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
        noise=_noise(private, noise_multiplier),
        server=_normec_server(gamma, server_rate, normalize_server),
    )


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


ALGORITHMS: dict[str, Callable[..., Recipe]] = {
    method.__name__: method
    for method in (
        fedavg,
        fedprox,
        model_clipped_fedavg,
        clipped_fedavg,
        dp_fedavg,
        norm_fedavg,
        dp_norm_fedavg,
        dp_norm_fedavg_qtdl,
        dp_norm_fedavg_binomial,
        alpha_normec,
        fed_alpha_normec,
        dp_sgd,
        dp_lsgd,
    )
}


def _sgd(
    learning_rate: float | Schedule,
    steps: int | None,
    epochs: int | None,
    batch: int | None,
    decay: float = 1.0,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> SGD:
    """Local SGD; ten steps when no length is given."""
    if steps is None and epochs is None:
        steps = 10
    return SGD(schedule(learning_rate, decay), steps, epochs, batch, momentum, weight_decay)


def _some(clients: int | None) -> Cohort:
    return Everyone() if clients is None else FixedSize(clients)


def _sampled(rate: float, clients: int | None) -> Cohort:
    return Poisson(rate) if clients is None else FixedSize(clients)


def _heavy(rate: Schedule, momentum: float) -> Server:
    return Momentum(rate, momentum) if momentum else Step(rate)


def _noise(private: bool, multiplier: float | None) -> Noise:
    return Gaussian(multiplier) if private or multiplier is not None else Silent()


def _normec_server(gamma: Schedule, rate: float | Schedule | None, normalize: bool) -> Server:
    eta = gamma if rate is None else schedule(rate)
    return NormalizedStep(eta) if normalize else Step(eta)


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
        server=_heavy(schedule(1.0), server_momentum),
        output=output,
        unit="example",
    )
