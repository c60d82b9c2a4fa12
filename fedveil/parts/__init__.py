"""The eight parts of the loop, one file each: a frozen dataclass, its formula and its contract."""

from __future__ import annotations

from fedveil.parts.bound import (
    AdaptiveClip,
    Clip,
    Normalize,
    ProbedClip,
    SmoothNormalize,
    Unbounded,
)
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.local import GD, SGD, IncrementalGradient, Proximal
from fedveil.parts.memory import ErrorCompensation, NoMemory
from fedveil.parts.noise import Gaussian, RoundedGaussian, Silent
from fedveil.parts.quantize import ConditionalRound, Exact, StochasticRound, TowardZero
from fedveil.parts.report import Difference, GradientScale, Model
from fedveil.parts.schedule import Constant, Decay, Steps
from fedveil.parts.server import (
    Adam,
    LastIterate,
    Momentum,
    MovingAverage,
    NormalizedStep,
    RandomIterate,
    Step,
)

__all__ = [
    "GD",
    "SGD",
    "Adam",
    "AdaptiveClip",
    "Binomial",
    "Clip",
    "ConditionalRound",
    "Constant",
    "Decay",
    "Difference",
    "DiscreteGaussian",
    "ErrorCompensation",
    "Everyone",
    "Exact",
    "FixedSize",
    "Gaussian",
    "GradientScale",
    "IncrementalGradient",
    "LastIterate",
    "Model",
    "Momentum",
    "MovingAverage",
    "NoMemory",
    "Normalize",
    "NormalizedStep",
    "Poisson",
    "ProbedClip",
    "Proximal",
    "PublishedLaplace",
    "RandomIterate",
    "RoundedGaussian",
    "Silent",
    "SmoothNormalize",
    "Step",
    "Steps",
    "StochasticRound",
    "TowardZero",
    "TruncatedDiscreteLaplace",
    "Unbounded",
]
