"""Apply a recipe's bound, quantizer and memory to the updates of a group, each by itself.

A part from outside fedveil sees one update at a time, and a message is held to the norms that were
declared: the sensitivity is then what was accounted, whatever the part computes
(docs/privacy.md, "User-defined parts").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.engines.updates import Updates
from fedveil.errors import UserError
from fedveil.parts.bound import MARGIN, TINY, Bound, in_range
from fedveil.parts.memory import Memory
from fedveil.parts.part import foreign
from fedveil.parts.quantize import Quantize


def by_rows(bound: Bound, dim: int) -> bool:
    """Whether whole updates are needed: not radial, or held to more than the norm ‖·‖₂ implies."""
    if not bound.radial:
        return True
    norms = bound.norms(dim)
    implied = norms.l1 >= norms.l2 * math.sqrt(dim) * MARGIN and norms.linf >= norms.l2 * MARGIN
    return foreign(bound) and norms.bounded and not implied


def scales_of(norms: Tensor, bound: Bound, dim: int) -> Tensor:
    """s(‖w_i‖) of a radial bound, and 0 for an update that is not finite: it is rejected."""
    sound = torch.isfinite(norms)
    finite = torch.where(sound, norms, 0.0)
    if not foreign(bound):
        return torch.where(sound, bound.scale(finite), 0.0)
    each = [bound.scale(norm[None]) for norm in finite]
    scales = torch.cat(each) if each else torch.zeros(0, dtype=torch.float64)
    largest = in_range(MARGIN * bound.norms(dim).l2 / finite.clamp_min(TINY))
    held = scales.nan_to_num(0.0).clamp(-largest, largest)
    return torch.where(sound, held, 0.0)


def bounded_rows(updates: Updates, norms: Tensor, bound: Bound) -> tuple[Tensor, Tensor]:
    """b_i, and ‖b_i‖/‖w_i‖; 0 for an update that is not finite."""
    updates_, sound = updates.rows(), torch.isfinite(norms)
    finite = torch.where(sound[:, None], updates_, 0.0)
    if bound.radial:
        scales = scales_of(norms, bound, updates_.shape[1])
        rows = finite * scales.float()[:, None]
    else:
        rows = _each(bound, finite)
    if foreign(bound):
        rows = held(rows, bound.norms(rows.shape[1]))
    if bound.radial:
        return rows, scales
    unchanged = (rows == finite).all(dim=1)
    left = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / norms
    return rows, torch.where(sound, torch.where(unchanged, 1.0, left), 0.0)


def _each(bound: Bound, rows: Tensor) -> Tensor:
    """A bound on rows; one from outside is shown a single row at a time."""
    if not foreign(bound) or not len(rows):
        return bound.rows(rows)
    return torch.cat([bound.rows(row[None]) for row in rows])


def quantized_row(
    quantize: Quantize, row: Tensor, bound: Norms, rng: np.random.Generator
) -> Tensor:
    """q_i of one client, [1, dim]; by a quantizer from outside, held to the norms it declares."""
    message = quantize(row[None], bound, rng)
    if not foreign(quantize):
        return message
    norms = quantize.norms(bound)
    wanted = row.dtype if norms.grid is None else torch.int64
    if message.shape != (1, len(row)) or message.dtype != wanted:
        raise UserError(
            f"Quantizer {type(quantize).__name__} made {tuple(message.shape)} {message.dtype} of a "
            f"message of {len(row)} numbers; return one row of {wanted}, whole grid steps if int64."
        )
    if norms.grid is None:
        return held(message, norms)
    return torch.from_numpy(held_steps(message[0].numpy(), norms.steps))[None]


def of_each(memory: Memory, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """A function of a memory on rows of clients; one from outside sees one client at a time."""
    if not foreign(memory) or not len(rows[0]):
        return function(*rows)
    return torch.cat([function(*(row[None] for row in each)) for each in zip(*rows, strict=True)])


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
    return torch.where((share < 1)[:, None], shortened, size).to(rows.dtype)


def held_steps(levels: np.ndarray, steps: Norms) -> np.ndarray:
    """Cut towards zero until ‖·‖₁, ‖·‖₂ and ‖·‖∞ are kept; what keeps them is untouched."""
    size = np.abs(levels.astype(np.float64))
    lengths = (size.sum(), math.sqrt(float((size * size).sum())), size.max(initial=0.0))
    limits = (steps.l1, steps.l2, steps.linf)
    if all(length <= limit for length, limit in zip(lengths, limits, strict=True)):
        return levels
    share = min(limit / length for length, limit in zip(lengths, limits, strict=True) if length)
    return np.asarray(np.trunc(levels * (share * MARGIN)), dtype=np.int64)
