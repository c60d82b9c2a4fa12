"""Operations on parameters that the factored engine computes for all clients at once.

A handler returns NotImplemented where it has no layer for the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedveil.engines.convolution import ConvLayer, GroupedConvLayer, Window
from fedveil.engines.layers import (
    LinearLayer,
    ScaleLayer,
    Shift,
    TurnedLayer,
    WholeLayer,
    applied,
)
from fedveil.engines.stores import Pace

if TYPE_CHECKING:
    from fedveil.engines.interception import Work


class NotServedError(Exception):
    """A parameter is used by an operation that the factored engine does not support."""


@dataclass(frozen=True)
class Placed:
    """Where an operation takes place: the group's layers, and its step."""

    work: Work
    pace: Pace


def _linear(mode: Placed, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        return _shifted(mode, F.linear(input, weight), bias, input.dim() - 1)
    if input.dim() == 1:  # a single example
        return _linear(mode, input[None], weight, bias)[0]
    if isinstance(mode.work.layers.get(name), WholeLayer):
        product = applied(mode.work.whole(name).multiplied(), input, mode.work.anchor)
        return _shifted(mode, product, bias, input.dim() - 1)
    return _product(mode, LinearLayer, name, mode.work.start[name], input, bias)


def _product(
    mode: Placed,
    kind: type[LinearLayer],
    name: str,
    weight: Tensor,
    input: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """x·Wᵀ + b by the linear layer of this name, W [out, in]."""
    work = mode.work
    if name not in work.layers:
        work.layers[name] = kind(name, weight, work.clients, work.shift(bias), work.repeated)
    layer = work.layers[name]
    if type(layer) is not kind:
        raise NotServedError(f"{name} is shared by two kinds of operations")
    _refuse_others(mode, name, (layer.bias, bias))
    output = applied(layer.use(mode.pace), input, work.anchor)
    return output if bias is None or layer.bias is not None else output + bias


def _refuse_others(mode: Placed, name: str, *pairs: tuple[Shift | None, Tensor | None]) -> None:
    """Refuse a layer whose vectors are not those of this use."""
    for own, given in pairs:
        if mode.work.name_of(given) != (None if own is None else own.name):
            raise NotServedError(f"{name} is used with two different biases or scales")


def _matmul(mode: Placed, input: Any, other: Any, bias: Tensor | None = None) -> Any:
    """x·W with a parameter W [in, out]."""
    name = mode.work.name_of(other)
    if name is None or mode.work.name_of(input) is not None or other.dim() != 2:
        return NotImplemented
    if input.dim() < 2:
        return NotImplemented
    return _product(mode, TurnedLayer, name, mode.work.start[name].T, input, bias)


def _mm(mode: Placed, input: Any, mat2: Any) -> Any:
    """The same, where torch calls W by another name."""
    return _matmul(mode, input, mat2)


def _addmm(
    mode: Placed, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Any:
    """b + x·W, the product of Hugging Face's Conv1D."""
    if (beta, alpha) != (1, 1) or input.dim() != 1:
        return NotImplemented
    return _matmul(mode, mat1, mat2, input)


def _conv1d(
    mode: Placed,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution of images of height 1."""
    if mode.work.name_of(weight) is None:
        output = F.conv1d(input, weight, None, stride, padding, dilation, groups)
        return _shifted(mode, output, bias, input.dim() - 2)
    row = [(1, _pair(x)[1]) for x in (stride, dilation)]
    beside = padding if isinstance(padding, str) else (0, _pair(padding)[1])
    flat = _conv2d(mode, input[..., None, :], weight, bias, row[0], beside, row[1], groups)
    return flat[..., 0, :]


def _conv2d(
    mode: Placed,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        output = F.conv2d(input, weight, None, stride, padding, dilation, groups)
        return _shifted(mode, output, bias, input.dim() - 3)
    if input.dim() == 3:  # a single image
        return _conv2d(mode, input[None], weight, bias, stride, padding, dilation, groups)[0]
    shared = mode.work.start[name]
    shared = shared if shared.dim() == 4 else shared[:, :, None]  # of a one-dimensional convolution
    window = Window(_pair(shared.shape[2:]), _pair(stride), _pair(dilation))
    named = isinstance(padding, str)
    images, window = window.around(input, padding if named else _pair(padding))
    if name not in mode.work.layers:
        facts = (name, shared, mode.work.clients, mode.work.shift(bias), window)
        mode.work.layers[name] = (
            ConvLayer(*facts, mode.work.repeated)
            if groups == 1
            else GroupedConvLayer(*facts, groups)
        )
    layer = mode.work.layers[name]
    if not isinstance(layer, ConvLayer | GroupedConvLayer) or layer.window != window:
        raise NotServedError(f"{name} is used in two different ways")
    _refuse_others(mode, name, (layer.bias, bias))
    use = layer.use() if isinstance(layer, GroupedConvLayer) else layer.use(mode.work.source)
    output = applied(use, images, mode.work.anchor)
    return output + bias[:, None, None] if bias is not None and layer.bias is None else output


def _shifted(mode: Placed, output: Tensor, bias: Tensor | None, axis: int) -> Tensor:
    """Add the bias after a frozen weight; the bias may be trained or frozen."""
    if bias is None or mode.work.name_of(bias) is not None:
        return _scaled(mode, output, None, bias, axis)
    return output + bias.view(-1, *[1] * (output.dim() - axis - 1))


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def _embedding(
    mode: Placed,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    name = mode.work.name_of(weight)
    if name is None:
        return F.embedding(input, weight, padding_idx, max_norm, norm_type)
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotServedError(f"{name} is an embedding with a maximum norm or special gradients")
    return applied(mode.work.whole(name).looked_up(padding_idx), input, mode.work.anchor)


def _group_norm(
    mode: Placed,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    # With channels last, torch's sums of squares lose precision and take longer. Images of 1×1 are
    # such, and refused under vmap.
    flat = input.flatten(2) if input.dim() > 3 else input
    normal = F.group_norm(flat.contiguous(), num_groups, None, None, eps).reshape(input.shape)
    return _scaled(mode, normal, weight, bias, 1)


def _layer_norm(
    mode: Placed,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    normal = F.layer_norm(input, normalized_shape, None, None, eps)
    return _scaled(mode, normal, weight, bias, input.dim() - len(normalized_shape))


def _rms_norm(
    mode: Placed,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    normal = F.rms_norm(input, normalized_shape, None, eps)
    return _scaled(mode, normal, weight, None, input.dim() - len(normalized_shape))


def _instance_norm(
    mode: Placed,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    normal = F.group_norm(input.contiguous(), input.shape[1], None, None, eps)
    return _scaled(mode, normal, weight, bias, 1)


def _scaled(
    mode: Placed, normal: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int
) -> Tensor:
    """Apply the trained scale and shift after a normalization."""
    names = [mode.work.name_of(part) for part in (weight, bias) if part is not None]
    if None in names:
        return _partly_frozen(mode, normal, weight, bias, axis)
    if not names:
        return normal
    name = str(names[0])
    if name not in mode.work.layers:
        scale, shift = mode.work.shift(weight), mode.work.shift(bias)
        mode.work.layers[name] = ScaleLayer(scale, shift, mode.work.clients)
    layer = mode.work.layers[name]
    if not isinstance(layer, ScaleLayer):
        raise NotServedError(f"{name} is shared by two kinds of operations")
    _refuse_others(mode, name, (layer.scale, weight), (layer.shift, bias))
    return applied(layer.use(axis), normal, mode.work.anchor)


def _partly_frozen(
    mode: Placed, normal: Tensor, weight: Tensor | None, bias: Tensor | None, axis: int
) -> Tensor:
    """Frozen vectors as they are, trained ones by their layers."""
    for part, shift in ((weight, False), (bias, True)):
        if part is None:
            continue
        if mode.work.name_of(part) is not None:
            scale, moved = (None, part) if shift else (part, None)
            normal = _scaled(mode, normal, scale, moved, axis)
            continue
        spread = part.reshape(*part.shape, *[1] * (normal.dim() - axis - part.dim()))
        normal = normal + spread if shift else normal * spread
    return normal


HANDLERS: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    F.conv2d: _conv2d,
    F.embedding: _embedding,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.instance_norm: _instance_norm,
    F.conv1d: _conv1d,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _mm,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _mm,
    torch.Tensor.__matmul__: _matmul,
}
# Numbers that each output looks at, from the arguments of the handler
LOOKING_AT: dict[Any, Callable[[Any], int]] = {
    F.linear: lambda given: given["weight"].shape[-1],
    F.conv2d: lambda given: given["weight"][0].numel(),
    F.conv1d: lambda given: given["weight"][0].numel(),
    torch.addmm: lambda given: given["mat2"].shape[0],
    torch.matmul: lambda given: given["other"].shape[0],
    torch.Tensor.__matmul__: lambda given: given["other"].shape[0],
}
PATCHING = (F.conv1d, F.conv2d)
