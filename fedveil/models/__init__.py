"""Models as plain `torch.nn.Module`s that can be mapped over stacked weights, and their losses."""

from __future__ import annotations

from fedveil.models.catalog import MODELS, build, suggest
from fedveil.models.check import dropout_layers, refuse_batch_norm
from fedveil.models.losses import LOSSES, correct
from fedveil.models.start import initialise

__all__ = [
    "LOSSES",
    "MODELS",
    "build",
    "correct",
    "dropout_layers",
    "initialise",
    "refuse_batch_norm",
    "suggest",
]
