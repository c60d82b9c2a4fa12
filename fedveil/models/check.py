"""Layers a model must not contain, so that each client's update depends on that client alone.

`refuse_unfit` names the first one, `fix` replaces those that have a substitute.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedveil.errors import UserError
from fedveil.models.layers import group_count
from fedveil.serialization.arguments import for_python

_BATCH = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def refuse_batch_norm(model: nn.Module) -> None:
    """Raise `UserError` at the first layer that mixes examples or keeps statistics of them.

    A model that passes has no batch norm of any kind and no instance norm with running statistics.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BATCH):
            raise UserError(_message(name, module, "mixes the examples of a batch"))
        if isinstance(module, _INSTANCE) and module.track_running_stats:
            raise UserError(_message(name, module, "keeps running statistics of the examples"))


@for_python
def fix(model: nn.Module) -> nn.Module:
    """A copy of the model with group norm instead of batch norm, which keeps scale and shift.

    Instance norm loses its running statistics. The copy passes `refuse_batch_norm`; layers of other
    kinds, and the model itself, are unchanged.

    >>> [type(layer).__name__ for layer in fix(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(16)))]
    ['ReLU', 'GroupNorm']
    """
    _refuse_lazy(model)
    fixed = copy.deepcopy(model)
    if replacement := _substitute(fixed):
        return replacement
    made: dict[nn.Module, nn.Module | None] = {}
    for parent in list(fixed.modules()):
        for name, layer in list(parent._modules.items()):
            if layer is None:
                continue
            if layer not in made:
                made[layer] = _substitute(layer)
            if (other := made[layer]) is not None:
                setattr(parent, name, other)
    return fixed


def _substitute(layer: nn.Module) -> nn.Module | None:
    """The layer that replaces a batch norm or an instance norm with statistics; None for others."""
    if isinstance(layer, _INSTANCE) and layer.track_running_stats:
        made = type(layer)(layer.num_features, eps=layer.eps, affine=layer.affine)
        return _with_weights(made, layer)
    if not isinstance(layer, _BATCH):
        return None
    count = group_count(layer.num_features)
    norm = nn.GroupNorm(count, layer.num_features, layer.eps, layer.affine)
    return _with_weights(norm, layer)


def _with_weights(layer: nn.Module, old: nn.Module) -> nn.Module:
    """The layer with the scale, shift, place and mode of the old one."""
    for name in ("weight", "bias"):
        if getattr(old, name, None) is not None:
            setattr(layer, name, getattr(old, name))
    return layer.train(old.training)


def _message(name: str, module: nn.Module, fault: str) -> str:
    channels = int(getattr(module, "num_features", 0))
    # A lazy layer does not know its channels before its first input.
    numbers = f"{group_count(channels)}, {channels}" if channels else "groups, channels"
    where = f"Layer '{name}'" if name else "The model itself"
    return (
        f"{where} is a {type(module).__name__}, which {fault}, so no bound on the influence of one "
        f"client or example would hold. Replace it with torch.nn.GroupNorm({numbers}), or all such "
        "layers with fedveil.models.fix(model)."
    )


def refuse_unfit(module: nn.Module) -> None:
    """Refuse layers whose output depends on other examples or on a first call."""
    refuse_batch_norm(module)
    _refuse_lazy(module)
    _refuse_untrainable(module)


def _refuse_untrainable(module: nn.Module) -> None:
    """Refuse compiled modules, and parameters or gradients that are no vectors of real numbers."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UserError(
            "The model is compiled by torch.jit, so its parameters cannot be replaced. Give the "
            "module itself."
        )
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise UserError(
                f"Layer '{name}' ({type(layer).__name__}) has sparse gradients. Use sparse=False."
            )
    for name, leaf in module.named_parameters():
        if leaf.is_complex() and leaf.requires_grad:
            raise UserError(
                f"The parameter '{name}' is complex. Use a real one, such as torch.view_as_real of "
                "it, and torch.view_as_complex where it is used."
            )


def _refuse_lazy(module: nn.Module) -> None:
    if any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
        raise UserError(
            f"{type(module).__name__} has a lazy layer, whose size is not known yet. "
            "Call the module once, or give the layer its size."
        )
