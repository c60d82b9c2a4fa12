"""The eight parts of the loop, one file each. A part has a formula and a privacy contract."""

from __future__ import annotations

from fedveil.parts.bound import (
    AdaptiveClip,
    Bound,
    Clip,
    ClipCoordinates,
    Normalize,
    ProbedClip,
    SmoothNormalize,
    Unbounded,
)
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.controls import ControlVariates, DoubleMomentum
from fedveil.parts.correlated import BandedNoise, BufferedNoise
from fedveil.parts.discrete import (
    Binomial,
    DiscreteGaussian,
    PublishedLaplace,
    TruncatedDiscreteLaplace,
)
from fedveil.parts.local import GD, SGD, IncrementalGradient, Local, MiniBatchGD, Proximal
from fedveil.parts.memory import ErrorCompensation, Memory, NoMemory, PersonalModels
from fedveil.parts.noise import Gaussian, Noise, NoNoise, RoundedGaussian
from fedveil.parts.part import Begin, Part, Tensors
from fedveil.parts.quantize import (
    ConditionalRound,
    NoQuantization,
    Quantize,
    StochasticRound,
    TowardZero,
)
from fedveil.parts.records import RecordSGD, SiloGaussian
from fedveil.parts.report import Difference, Model, PseudoGradient, Report
from fedveil.parts.schedule import Constant, Decay, Piecewise, Schedule, Steps
from fedveil.parts.server import (
    Adagrad,
    Adam,
    LastIterate,
    Momentum,
    MovingAverage,
    NormalizedStep,
    Output,
    RandomIterate,
    Server,
    Step,
    Yogi,
)
from fedveil.parts.spaced import CyclicPoisson, Separated

__all__ = [
    "GD",
    "SGD",
    "Adagrad",
    "Adam",
    "AdaptiveClip",
    "BandedNoise",
    "Begin",
    "Binomial",
    "Bound",
    "BufferedNoise",
    "Clip",
    "ClipCoordinates",
    "Cohort",
    "ConditionalRound",
    "Constant",
    "ControlVariates",
    "CyclicPoisson",
    "Decay",
    "Difference",
    "DiscreteGaussian",
    "DoubleMomentum",
    "ErrorCompensation",
    "Everyone",
    "FixedSize",
    "Gaussian",
    "IncrementalGradient",
    "LastIterate",
    "Local",
    "Memory",
    "MiniBatchGD",
    "Model",
    "Momentum",
    "MovingAverage",
    "NoMemory",
    "NoNoise",
    "NoQuantization",
    "Noise",
    "Normalize",
    "NormalizedStep",
    "Output",
    "Part",
    "PersonalModels",
    "Piecewise",
    "Poisson",
    "ProbedClip",
    "Proximal",
    "PseudoGradient",
    "PublishedLaplace",
    "Quantize",
    "RandomIterate",
    "RecordSGD",
    "Report",
    "RoundedGaussian",
    "Schedule",
    "Separated",
    "Server",
    "SiloGaussian",
    "SmoothNormalize",
    "Step",
    "Steps",
    "StochasticRound",
    "Tensors",
    "TowardZero",
    "TruncatedDiscreteLaplace",
    "Unbounded",
    "Yogi",
]
