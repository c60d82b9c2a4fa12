"""Apply a recipe's bound and quantizer to the updates of a group, each by itself.

What a part from outside fedveil returns is held to the norms that were declared: the sensitivity is
then what was accounted, whatever the part computes (docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Limits, Norms
from fedveil.engines.asking import message_of, of_each
from fedveil.engines.updates import Updates
from fedveil.parts.bound import MARGIN, TINY, Bound, in_range
from fedveil.parts.part import foreign
from fedveil.parts.quantize import Quantize, by_message


def by_rows(bound: Bound, quantize: Quantize, limit: Norms) -> bool:
    """Whether whole updates are needed, or their norms and one weighted sum are enough."""
    if not bound.radial or by_message(quantize):
        return True
    root = math.sqrt(limit.dim)
    implied = limit.l1 >= limit.l2 * root * MARGIN and limit.linf >= limit.l2 * MARGIN
    return foreign(bound) and limit.bounded and not implied


def scales_of(norms: Tensor, bound: Bound, limit: Norms) -> Tensor:
    """s(‖w_i‖) of a radial bound, and 0 for an update that is not finite: it is rejected."""
    sound = torch.isfinite(norms)
    finite = torch.where(sound, norms, 0.0)
    scales = of_each(bound, bound.scale, finite)
    if foreign(bound):
        largest = in_range(MARGIN * limit.l2 / finite.clamp_min(TINY))
        scales = scales.to(finite.dtype).nan_to_num(0.0).clamp(-largest, largest)
    return torch.where(sound, scales, 0.0)


def bounded_rows(
    updates: Updates, norms: Tensor, bound: Bound, limit: Norms
) -> tuple[Tensor, Tensor]:
    """b_i, and ‖b_i‖/‖w_i‖; 0 for an update that is not finite."""
    updates_, sound = updates.rows(), torch.isfinite(norms)
    finite = torch.where(sound[:, None], updates_, 0.0)
    if bound.radial:
        scales = scales_of(norms, bound, limit)
        rows = finite * scales.float()[:, None]
    else:
        rows = of_each(bound, bound.rows, finite)
    if foreign(bound):
        rows = held(rows.to(finite.dtype), limit)
    if bound.radial:
        return rows, scales
    unchanged = (rows == finite).all(dim=1)
    left = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / norms
    return rows, torch.where(sound, torch.where(unchanged, 1.0, left), 0.0)


def quantized_row(
    quantize: Quantize, row: Tensor, limits: Limits, rng: np.random.Generator
) -> Tensor:
    """q_i of one client, [1, dim]; by a quantizer from outside, held to the norms it declares."""
    message = message_of(quantize, row, limits, rng)
    if not foreign(quantize):
        return message
    norms = limits.message
    if norms.grid is None:
        return held(message, norms)
    return torch.from_numpy(held_steps(message[0].numpy(), norms.steps))[None]


def held(rows: Tensor, norms: Norms) -> Tensor:
    """Rows that keep all three norms as they are, others shortened; what is not finite is 0."""
    if not norms.bounded:
        return rows
    size = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, 0.0).double()
    lengths = [torch.linalg.vector_norm(size, ord=kind, dim=1) for kind in (1, 2, math.inf)]
    limits = (norms.l1, norms.l2, norms.linf)
    shares = [limit / x.clamp_min(TINY) for limit, x in zip(limits, lengths, strict=True)]
    share = torch.stack(shares).amin(dim=0)
    shortened = size * in_range(MARGIN * share)[:, None]
    return torch.where((share >= 1)[:, None], size, shortened).to(rows.dtype)


def held_steps(levels: np.ndarray, steps: Norms) -> np.ndarray:
    """Cut towards zero until ‖·‖₁, ‖·‖₂ and ‖·‖∞ are kept; what keeps them is untouched."""
    size = np.abs(levels.astype(np.float64))
    lengths = (size.sum(), math.sqrt(float((size * size).sum())), size.max(initial=0.0))
    limits = (steps.l1, steps.l2, steps.linf)
    if all(length <= limit for length, limit in zip(lengths, limits, strict=True)):
        return levels
    share = min(limit / length for length, limit in zip(lengths, limits, strict=True) if length)
    return np.asarray(np.trunc(levels * (share * MARGIN)), dtype=np.int64)
