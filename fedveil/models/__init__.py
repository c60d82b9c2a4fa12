"""Models as plain `torch.nn.Module`s that vmap over stacked weights, and their losses."""

from __future__ import annotations

from fedveil.models.catalog import MODELS, build, suggest
from fedveil.models.check import fix, refuse_batch_norm
from fedveil.models.lora import lora, merge
from fedveil.models.losses import LOSSES, correct
from fedveil.models.start import initialise

__all__ = [
    "LOSSES",
    "MODELS",
    "build",
    "correct",
    "fix",
    "initialise",
    "lora",
    "merge",
    "refuse_batch_norm",
    "suggest",
]
