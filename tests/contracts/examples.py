"""One or more of every part with a contract, and every algorithm with parameters that fit."""

from __future__ import annotations

from dataclasses import replace

from fedveil import algorithms
from fedveil.parts import (
    Adagrad,
    Adam,
    AdaptiveClip,
    BandedNoise,
    Binomial,
    BufferedNoise,
    Clip,
    ClipCoordinates,
    ConditionalRound,
    ControlVariates,
    CyclicPoisson,
    Difference,
    DiscreteGaussian,
    DoubleMomentum,
    ErrorCompensation,
    Everyone,
    FixedSize,
    Gaussian,
    Momentum,
    NoMemory,
    NoNoise,
    NoQuantization,
    Normalize,
    NormalizedStep,
    PersonalModels,
    Poisson,
    ProbedClip,
    PublishedLaplace,
    RoundedGaussian,
    Separated,
    SiloGaussian,
    SmoothNormalize,
    Step,
    StochasticRound,
    TowardZero,
    TruncatedDiscreteLaplace,
    Unbounded,
    Yogi,
)
from fedveil.parts.bound import Bound
from fedveil.parts.cohort import Cohort
from fedveil.parts.memory import Memory
from fedveil.parts.noise import Noise
from fedveil.parts.quantize import Quantize
from fedveil.parts.schedule import Decay
from fedveil.parts.server import Server
from fedveil.parts.statistics import Statistics
from fedveil.privacy.secure import secured
from fedveil.recipe import Recipe

BOUNDS: list[Bound] = [
    Unbounded(), Clip(1.0), Clip(1e-6), Normalize(62.5), SmoothNormalize(0.01), ProbedClip(0.3),
    AdaptiveClip(0.1), ClipCoordinates(0.3), ClipCoordinates(1e20),
]  # fmt: skip
QUANTIZERS: list[Quantize] = [
    NoQuantization(), StochasticRound(1), StochasticRound(16), ConditionalRound(),
    ConditionalRound(1), ConditionalRound(16), TowardZero(3), TowardZero(),
]  # fmt: skip
NOISES: list[Noise] = [
    NoNoise(), Gaussian(2.0), Gaussian(2.0, "client"), RoundedGaussian(2.0),
    TruncatedDiscreteLaplace(0.05, 400), PublishedLaplace(epsilon=0.5), Binomial(800),
    DiscreteGaussian(20.0, 200), BandedNoise(2.0, bands=1), BandedNoise(2.0, bands=3),
    BandedNoise(2.0, integer=True, bands=3),
    BufferedNoise(2.0, weights=(0.3, 0.4), decays=(0.5, 0.9)),
    BufferedNoise(2.0, integer=True, weights=(0.3, 0.4), decays=(0.5, 0.9)),
    SiloGaussian((2.0,)), SiloGaussian((2.0, 3.0), integer=True),
]  # fmt: skip
COHORTS: list[Cohort] = [
    Everyone(), Everyone(honest=30), Poisson(0.2), Poisson(0.5, cap=3), Poisson(0.2, honest=4),
    Poisson(1.0), FixedSize(10), FixedSize(10, honest=4), FixedSize(4, cap=3),
    Separated(4, 5), Separated(4, 10, cap=3), CyclicPoisson(0.1, 5), CyclicPoisson(0.2, 5),
]  # fmt: skip
MEMORIES: list[Memory] = [
    NoMemory(), ErrorCompensation(0.3), ErrorCompensation(0.3, update="everyone"),
    ControlVariates(5), DoubleMomentum(0.3, 0.2), PersonalModels(),
]  # fmt: skip
SERVERS: list[Server] = [
    Step(), Step(Decay(0.5)), Momentum(), NormalizedStep(), Adagrad(), Adam(),
    Adam(bias_correction=True), Adam(remove_noise=True), Yogi(), Yogi(remove_noise=True),
]  # fmt: skip
STATISTICS = [Statistics(3.0, 1e-6), Statistics(0.7, 0.0), Statistics(3.0, 1e-6, joint=True)]

PLAIN: dict[str, Recipe] = {
    "fedavg": algorithms.fedavg(clients=5),
    "fedprox": algorithms.fedprox(),
    "model_clipped_fedavg": algorithms.model_clipped_fedavg(),
    "clipped_fedavg": algorithms.clipped_fedavg(clip=0.3),
    "norm_fedavg": algorithms.norm_fedavg(clients=5),
    "fedadagrad": algorithms.fedadagrad(clients=5),
    "fedadam": algorithms.fedadam(clients=5),
    "fedyogi": algorithms.fedyogi(clients=5),
    "scaffold": algorithms.scaffold(clients=5),
}
PRIVATE: dict[str, Recipe] = {
    "dp_fedavg": algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=2.0),
    "dp_fedavg of a fixed size": algorithms.dp_fedavg(
        clip=0.7, clients=5, noise_multiplier=2.0, report=Difference()
    ),
    "dp_fedavg capped": algorithms.dp_fedavg(rate=0.5, cap=2, noise_multiplier=2.0),
    "dp_fedavg of a fixed size, capped": algorithms.dp_fedavg(
        clients=3, cap=2, noise_multiplier=2.0
    ),
    "dp_fedavg of few levels": algorithms.dp_fedavg(
        clip=0.7, rate=0.5, levels=64, noise_multiplier=2.0
    ),
    "dp_fedavg with noise at the clients": algorithms.dp_fedavg(
        rate=0.5, noise_multiplier=2.0, noise_at="client"
    ),
    "dp_fedavg of a fixed size with noise at the clients": algorithms.dp_fedavg(
        clients=5, noise_multiplier=2.0, noise_at="client"
    ),
    "dp_fedavg with noise at the clients, few of them honest": replace(
        algorithms.dp_fedavg(noise_multiplier=2.0, noise_at="client"), cohort=FixedSize(5, honest=2)
    ),
    "dp_fedavg secured": secured(algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=2.0)),
    "dp_fedavg_coordinatewise": algorithms.dp_fedavg_coordinatewise(
        limit=0.2, rate=0.5, noise_multiplier=1.5
    ),
    "dp_fedavg_coordinatewise secured": secured(
        algorithms.dp_fedavg_coordinatewise(limit=0.2, rate=0.5, noise_multiplier=1.5)
    ),
    "dp_fedadagrad": algorithms.dp_fedadagrad(rate=0.5, noise_multiplier=2.0),
    "dp_fedadam": algorithms.dp_fedadam(rate=0.5, noise_multiplier=2.0, remove_noise=True),
    "dp_fedadam secured": secured(algorithms.dp_fedadam(rate=0.5, noise_multiplier=2.0)),
    "dp_fedyogi": algorithms.dp_fedyogi(clients=5, noise_multiplier=2.0),
    "dp_ftrl": algorithms.dp_ftrl(
        clients=2, separation=3, bands=3, learning_rate=1.0, noise_multiplier=2.0
    ),
    "dp_ftrl of everyone": algorithms.dp_ftrl(bands=3, noise_multiplier=2.0),
    "dp_ftrl capped": algorithms.dp_ftrl(
        clients=2, separation=3, bands=4, cap=2, noise_multiplier=2.0
    ),
    "dp_ftrl secured": secured(
        algorithms.dp_ftrl(clients=2, separation=3, bands=3, noise_multiplier=2.0)
    ),
    "dp_ftrl with buffers": algorithms.dp_ftrl(
        clients=2, separation=3, noise="blt", noise_multiplier=2.0
    ).planned(8, 8),
    "dp_norm_fedavg in turns": algorithms.dp_norm_fedavg(
        rate=0.2, separation=3, bands=3, noise="banded", noise_multiplier=2.0
    ),
    "dp_scaffold": algorithms.dp_scaffold(rate=0.5, noise_multiplier=2.0),
    "dp_scaffold secured": secured(algorithms.dp_scaffold(rate=0.5, noise_multiplier=2.0)),
    "clip21_sgd2m": algorithms.clip21_sgd2m(clip=0.7, noise_multiplier=2.0),
    "dp_fedavg_adaptive": algorithms.dp_fedavg_adaptive(
        start=0.3, rate=0.5, count_noise=2.0, noise_multiplier=2.0
    ),
    "dp_fedavg_adaptive of a fixed size": algorithms.dp_fedavg_adaptive(
        start=0.3, clients=5, count_noise=2.0, noise_multiplier=2.0
    ),
    "dp_fedavg_adaptive secured": secured(
        algorithms.dp_fedavg_adaptive(start=0.3, rate=0.5, count_noise=2.0, noise_multiplier=2.0)
    ),
    "dp_fedavg_adaptive with everyone": replace(
        algorithms.dp_fedavg_adaptive(start=0.3, count_noise=2.0, noise_multiplier=2.0),
        cohort=Everyone(),
    ),
    "dp_norm_fedavg": algorithms.dp_norm_fedavg(scale=2.0, rate=0.5, noise_multiplier=2.0),
    "dp_norm_fedavg of few levels": algorithms.dp_norm_fedavg(
        clients=5, levels=64, noise_multiplier=2.0
    ),
    "dp_norm_fedavg of as many levels as fit": algorithms.dp_norm_fedavg(
        clients=5, levels="auto", noise_multiplier=2.0
    ),
    "dp_norm_fedavg_discrete": algorithms.dp_norm_fedavg_discrete(
        rate=0.5, levels=64, sigma=200.0, support=1500
    ),
    "dp_norm_fedavg_discrete of a fixed size": algorithms.dp_norm_fedavg_discrete(
        clients=5, levels=64, sigma=200.0, support=1500
    ),
    "dp_norm_fedavg_secagg": algorithms.dp_norm_fedavg_secagg(
        clients=5, levels=64, sigma=100.0, support=800
    ),
    "dp_norm_fedavg_secagg of honest arrivals": algorithms.dp_norm_fedavg_secagg(
        rate=0.6, honest=2, levels=64, sigma=100.0, support=800
    ),
    "dp_norm_fedavg_secagg capped": algorithms.dp_norm_fedavg_secagg(
        clients=3, cap=2, levels=64, sigma=100.0, support=800
    ),
    "dp_norm_fedavg_secagg of honest arrivals, capped": algorithms.dp_norm_fedavg_secagg(
        rate=0.6, honest=2, cap=2, levels=64, sigma=100.0, support=800
    ),
    "dp_norm_fedavg_qtdl": algorithms.dp_norm_fedavg_qtdl(
        clients=5, levels=64, alpha=0.01, support=4000
    ),
    "dp_norm_fedavg_qtdl as published": algorithms.dp_norm_fedavg_qtdl(
        clients=5, levels=64, calibration="das2021", claimed_epsilon=0.5
    ),
    "dp_norm_fedavg_binomial": algorithms.dp_norm_fedavg_binomial(
        clients=5, levels=64, trials=40_000
    ),
    "alpha_normec": algorithms.alpha_normec(noise_multiplier=2.0),
    "fed_alpha_normec": algorithms.fed_alpha_normec(rate=0.6, noise_multiplier=2.0),
    "fed_alpha_normec of everyone": algorithms.fed_alpha_normec(
        rate=0.6, beta=0.5, update="everyone", local="ig", noise_multiplier=2.0
    ),
    "silo_dp_fedavg": algorithms.silo_dp_fedavg(
        clip=0.7, steps=2, rate=(0.5, 0.8), noise_multiplier=2.0
    ),
    "silo_dp_fedavg secured": secured(
        algorithms.silo_dp_fedavg(clip=0.7, steps=3, rate=0.5, noise_multiplier=2.0)
    ),
    "mr_mtl": algorithms.mr_mtl(clip=0.7, pull=0.3, steps=3, rate=0.5, noise_multiplier=(2.0, 3.0)),
    "dp_sgd": algorithms.dp_sgd(clip=0.7, rate=0.5, noise_multiplier=2.0),
    "dp_lsgd": algorithms.dp_lsgd(clip=0.7, rate=0.5, noise_multiplier=2.0),
}
RECIPES = PLAIN | PRIVATE
