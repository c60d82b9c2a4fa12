"""Initial weights from an explicit generator, and construction without the global generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

_M = TypeVar("_M", bound=nn.Module)
_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """W, b ~ U(±1/√fan_in); embeddings ~ N(0, 1); norms 1 and 0; then `start_weights()`.

    The same generator state gives the same weights, and torch's global generator is not used.
    Children are initialized before their parents, so a model's own `start_weights` comes last.
    Any other layer keeps the weights it was constructed with.
    """
    with torch.no_grad():
        for module in reversed(list(model.modules())):
            _initialise_own(module, generator)


def construct(make: Callable[[], _M], seed: int | None = None) -> _M:
    """make(), with torch's global generator restored afterwards.

    With a seed, the constructor's draws depend on that seed alone.
    """
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        return make()


def _initialise_own(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, _WEIGHTED):
        bound = 1 / math.sqrt(max(1, module.weight[0].numel()))
        for parameter in (module.weight, module.bias):
            _uniform(parameter, bound, generator)
    elif isinstance(module, nn.Embedding):
        _embedding(module, generator)
    elif isinstance(module, _NORMS):
        _fill(module.weight, 1.0)
        _fill(module.bias, 0.0)
    start = getattr(module, "start_weights", None)
    if callable(start):
        start()


def _uniform(parameter: Tensor | None, bound: float, generator: torch.Generator) -> None:
    # Drawn on the generator's device and copied, so weights on a GPU and a CPU start equal.
    if parameter is not None:
        fresh = torch.empty(parameter.shape, device=generator.device)
        parameter.copy_(fresh.uniform_(-bound, bound, generator=generator))


def _embedding(module: nn.Embedding, generator: torch.Generator) -> None:
    fresh = torch.empty(module.weight.shape, device=generator.device)
    module.weight.copy_(fresh.normal_(generator=generator))
    if module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()


def _fill(parameter: Tensor | None, value: float) -> None:
    if parameter is not None:
        parameter.fill_(value)
