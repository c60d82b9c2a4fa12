"""Attention computed from its equations with linear layers, products and softmax.

torch's own kernels support neither vmap over stacked weights nor interception of their weights, and
draw dropout from the global generator. The results are equal up to the order of float sums.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedveil.engines.dropout import Masks, dropped


def attend(
    masks: Masks | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(QKᵀ·scale + mask)·V, the signature of `F.scaled_dot_product_attention`."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(times, -3) for part in (key, value))
    weights = _weights(query, key, attn_mask, is_causal, scale)
    if masks is not None and dropout_p > 0:
        weights = dropped(masks, weights, dropout_p)
    return weights @ value


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if is_causal:
        length = scores.shape[-2:]
        allowed = torch.ones(length, dtype=torch.bool, device=query.device).tril()
        scores = torch.where(allowed, scores, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    some = scores.amax(-1, keepdim=True) > -math.inf
    weights = torch.where(some, scores, 0.0).softmax(-1)
    return torch.where(some, weights, 0.0)  # as torch: nothing to attend to


def many_heads(
    masks: Masks | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The result of `F.multi_head_attention_forward`, for inputs [length, n, size]."""
    single = query.dim() == 2
    if single:
        query, key, value = (part[:, None] for part in (query, key, value))
    own = (q_proj_weight, k_proj_weight, v_proj_weight) if use_separate_proj_weight else None
    q, k, v = _projected((query, key, value), in_proj_weight, in_proj_bias, own)
    extra = 0
    if bias_k is not None and bias_v is not None:
        k, v = (
            torch.cat([part, bias.repeat(1, part.shape[1], 1)])
            for part, bias in ((k, bias_k), (v, bias_v))
        )
        extra += 1
    q, k, v = (_split(part, num_heads) for part in (q, k, v))
    if add_zero_attn:
        k, v = (F.pad(part, (0, 0, 0, 1)) for part in (k, v))
        extra += 1
    mask = _joint_mask(attn_mask, key_padding_mask, q, extra)
    weights = _weights(q, k, mask, False, None)
    if masks is not None and training and dropout_p > 0:
        weights = dropped(masks, weights, dropout_p)
    answer = (weights @ v).permute(2, 0, 1, 3).flatten(2)
    answer = F.linear(answer, out_proj_weight, out_proj_bias)
    shown = weights.mean(1) if average_attn_weights else weights
    if single:
        answer, shown = answer[:, 0], shown[0]
    return answer, shown if need_weights else None


def _projected(
    parts: tuple[Tensor, Tensor, Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    own: tuple[Tensor | None, ...] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; a joint weight is applied whole, once for each different input."""
    if own is not None:
        q, k, v = (F.linear(x, w) for x, w in zip(parts, own, strict=True) if w is not None)
        shifts = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (x if b is None else x + b for x, b in zip((q, k, v), shifts, strict=True))
        return q, k, v
    assert weight is not None
    made: dict[int, Tensor] = {}
    for x in parts:
        if id(x) not in made:
            made[id(x)] = F.linear(x, weight, bias)
    q, k, v = (made[id(x)].chunk(3, -1)[place] for place, x in enumerate(parts))
    return q, k, v


def _split(x: Tensor, heads: int) -> Tensor:
    """[length, n, size] → [n, heads, length, size/heads]."""
    return x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3)


def _joint_mask(
    mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int
) -> Tensor | None:
    """Numbers to add to the scores; −∞ where a key is masked, and 0 for the added keys."""
    n, heads = q.shape[:2]
    joint = None
    if mask is not None:
        joint = _additive(mask, q)
        if mask.dim() == 3:
            joint = joint.reshape(n, heads, *joint.shape[1:])
    if padding is not None:
        more = _additive(padding, q).reshape(-1, 1, 1, padding.shape[-1])
        joint = more if joint is None else joint + more
    return joint if joint is None or not extra else F.pad(joint, (0, extra))


def _additive(mask: Tensor, q: Tensor) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
