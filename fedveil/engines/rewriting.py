"""Computes dropout, attention and others from their equations, wherever a module calls them.

Dropout draws from the masks of each client. The equations consist of operations that support vmap
and interception. Transformers' shortcut for batches without padding is not taken under vmap, where
it would depend on the example.
"""

from __future__ import annotations

import sys
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from fedveil.engines.attention import attend, many_heads
from fedveil.engines.dropout import DROPOUTS, Masks, drop
from fedveil.engines.recurrent import unrollable, unrolled

# The module of Hugging Face's masks asks 'is nothing masked?', and if so leaves the mask out. It
# answers 'no' itself while a model is traced, and then builds the mask, which gives equal results.
MASKING = "transformers.masking_utils"


def rewritable(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `rewritten` computes this call."""
    if func is torch.Tensor.__bool__:
        return is_functorch_wrapped_tensor(args[0]) and _caller() == MASKING
    if func is F.multi_head_attention_forward:
        return kwargs.get("static_k") is None and kwargs.get("static_v") is None
    if func is F.group_norm:
        return bool((args[0] if args else kwargs["input"]).dim() > 3)
    if func is F.embedding_bag:
        return _plain_bag(args, kwargs)
    return func in DROPOUTS or func is F.scaled_dot_product_attention or unrollable(func, args)


def rewritten(func: Any, args: Any, kwargs: dict[str, Any], masks: Masks | None) -> Any:
    """The result of a call, from its equations; dropout is off without masks."""
    if func is torch.Tensor.__bool__:
        return False
    if func in DROPOUTS:
        return drop(func, masks, *args, **kwargs)
    if func is F.scaled_dot_product_attention:
        return attend(masks, *args, **kwargs)
    if func is F.multi_head_attention_forward:
        return many_heads(masks, *args, **kwargs)
    if func is F.embedding_bag:
        return _bagged(args, kwargs)
    if func is F.group_norm:  # vmap refuses images of 1×1
        return _flat_norm(*args, **kwargs)
    return unrolled(func, args)


def _flat_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return F.group_norm(input.flatten(2), *args, **kwargs).reshape(input.shape)


def _bag(args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an embedding bag, by name."""
    return signature(F.embedding_bag).bind(*args, **kwargs).arguments


def _plain_bag(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a bag has [n, length] tokens and none of the rarer options."""
    given = _bag(args, kwargs)
    rare = ("offsets", "max_norm", "padding_idx")
    return (
        given["input"].dim() == 2
        and all(given.get(name) is None for name in rare)
        and not given.get("scale_grad_by_freq")
    )


def _bagged(args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Sum, mean or maximum of the embeddings of each example's tokens."""
    given = _bag(args, kwargs)
    each = F.embedding(given["input"], given["weight"])
    if (weights := given.get("per_sample_weights")) is not None:
        each = each * weights[..., None]
    mode = given.get("mode", "mean")
    return each.amax(1) if mode == "max" else each.sum(1) if mode == "sum" else each.mean(1)


def _caller() -> str:
    """The module whose code called torch."""
    frame = sys._getframe(1)
    while frame.f_back and str(frame.f_globals.get("__name__")).startswith(("fedveil.", "torch.")):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


class Rewriting(TorchFunctionMode):
    """Rewrites calls and leaves all other functions unchanged."""

    def __init__(self, masks: Masks | None = None) -> None:
        super().__init__()
        self.masks = masks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not rewritable(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            return rewritten(func, args, kwargs, self.masks)


class Unfused(TorchFunctionMode):
    """Changes nothing: nn.TransformerEncoder uses no fused kernels while any mode is active.

    With padding, those kernels return shorter sequences than in training.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


FUSED = (torch.nn.TransformerEncoder, torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
