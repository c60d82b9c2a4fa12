"""The eight parts of the loop, one file each: a frozen dataclass, its formula and its contract."""

from __future__ import annotations

from fedveil.parts.bound import Clip, Normalize, SmoothNormalize, Unbounded
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.local import GD, SGD, IncrementalGradient, Proximal
from fedveil.parts.memory import ErrorCompensation, NoMemory
from fedveil.parts.noise import Binomial, Gaussian, Silent, TruncatedDiscreteLaplace
from fedveil.parts.quantize import Exact, StochasticRound
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
    "Binomial",
    "Clip",
    "Constant",
    "Decay",
    "Difference",
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
    "Proximal",
    "RandomIterate",
    "Silent",
    "SmoothNormalize",
    "Step",
    "Steps",
    "StochasticRound",
    "TruncatedDiscreteLaplace",
    "Unbounded",
]
