"""Dropout whose masks come from each client's own stream and are equal on every engine.

A mask is a hash of (seed of the example, dropout call, position), computed with integer operations.
It therefore depends neither on other clients nor on the engine, the grouping or the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedveil.errors import UserError
from fedveil.random.streams import Key, stream

LEVELS = 2**24  # the resolution of p
ALPHA = -1.7580993408473766  # what alpha dropout sets units to: −λα of SELU
_SPREAD, _FIRST, _SECOND = 0x9E3779B9 - 2**32, 0x21F0AAAD, 0xD35A2D97 - 2**32  # as int32


@dataclass(frozen=True, eq=False)
class DropoutStreams:
    """The dropout streams of a group's clients in one round, keyed by (run key, round, client)."""

    key: Key
    round: int
    clients: np.ndarray  # their indexes in the population
    purpose: str = "dropout"

    def part(self, start: int, stop: int) -> DropoutStreams:
        """The streams of clients start..stop−1."""
        return DropoutStreams(self.key, self.round, self.clients[start:stop], self.purpose)

    def seeds(self) -> np.ndarray:
        """One uint64 from the stream of each client."""
        streams = (stream(self.key, self.round, f"{self.purpose} of {i}") for i in self.clients)
        return np.array([each.integers(2**64, dtype=np.uint64) for each in streams], np.uint64)


def example_seeds(seeds: np.ndarray, step: int, width: int) -> Tensor:
    """int32 [clients, width, 2]: a seed for each example of a step's batches."""
    place = np.arange(width, dtype=np.uint64) + np.uint64(1) + (np.uint64(step) << np.uint64(32))
    mixed = _splitmix(_splitmix(seeds)[:, None] ^ _splitmix(place)[None, :])
    return torch.from_numpy(mixed.view(np.int32).reshape(len(seeds), width, 2))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele et al. 2014): a bijection of 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@dataclass
class Masks:
    """The masks of one forward pass, drawn call by call.

    `seeds` are those of one example, [2], where the module sees one example, and [examples, 2]
    where it sees a batch. Then `single` has the shapes that one example has in each call, from
    which follows the axis of the batch.
    """

    seeds: Tensor
    single: list[torch.Size] | None = None
    calls: int = 0

    def uniform(self, shape: torch.Size) -> Tensor:
        """Integers below LEVELS, in this shape: uniform, and independent between calls."""
        call, self.calls = self.calls, self.calls + 1
        if self.seeds.dim() == 1:
            return _hashed(self.seeds, call, math.prod(shape)).reshape(shape)
        if self._known(call) == shape:  # nothing of one example, such as a weight: one for the step
            return _hashed(self.seeds[0], call, math.prod(shape)).reshape(shape)
        axis, one = self._axis(call, shape)
        each = _hashed(self.seeds, call, math.prod(one)).reshape(-1, *one)
        return each.movedim(0, axis).reshape(shape)

    def _axis(self, call: int, shape: torch.Size) -> tuple[int, list[int]]:
        """The axis of the batch, and the shape of one example."""
        count = len(self.seeds)
        known = self._known(call)
        if known is not None and len(known) == len(shape):
            pairs = list(zip(shape, known, strict=True))
            grown = [axis for axis, (size, one) in enumerate(pairs) if size == count * one]
            if count > 1 and len(grown) == 1 and math.prod(shape) == count * math.prod(known):
                return grown[0], list(known)
        if shape and shape[0] % count == 0:
            return 0, [shape[0] // count, *shape[1:]]
        raise UserError(
            f"The model drops entries of a tensor of shape {list(shape)}, in which the {count} "
            "examples of a batch have no axis of their own. Use dropout on tensors whose first "
            "axis is the batch."
        )

    def _known(self, call: int) -> torch.Size | None:
        """The shape that one example has in a call."""
        return self.single[call] if self.single and call < len(self.single) else None


@dataclass
class RecordedMasks(Masks):
    """Records the shapes of all dropout calls, and drops nothing."""

    shapes: list[torch.Size] = field(default_factory=list)

    def uniform(self, shape: torch.Size) -> Tensor:
        """Keeps everything."""
        self.shapes.append(shape)
        return torch.full(shape, LEVELS, dtype=torch.int32, device=self.seeds.device)


def _hashed(seeds: Tensor, call: int, count: int) -> Tensor:
    """int32 in [0, LEVELS), [..., count]: two rounds of a 32-bit hash of (seed, call, position)."""
    places = torch.arange(count, dtype=torch.int32, device=seeds.device) * _SPREAD
    first = _mixed(seeds[..., :1] + call * 0x3504F333 % 2**31)
    return (_mixed(_mixed(places + first) ^ seeds[..., 1:]) >> 8) & (LEVELS - 1)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32 bits (lowbias32, Wellons 2018); shifts are logical."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 15) & 0x1FFFF)


def dropped(masks: Masks, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
    """x·[u ≥ p]/(1 − p), with one u for each entry of `shape`, which broadcasts to x."""
    return x * (_kept(masks, x, p, shape) * (0.0 if p >= 1 else 1 / (1 - p)))


def _kept(masks: Masks, x: Tensor, p: float, shape: torch.Size | None) -> Tensor:
    kept: Tensor = masks.uniform(x.shape if shape is None else shape) >= round(p * LEVELS)
    return kept.to(x.dtype)


def _alpha(masks: Masks, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
    """a·(x·m + α·(1 − m)) + b, which keeps mean 0 and variance 1 (Klambauer et al. 2017)."""
    kept = _kept(masks, x, p, shape)
    a = 0.0 if p >= 1 else 1 / math.sqrt((1 - p) * (1 + p * ALPHA**2))
    return a * (x * kept + ALPHA * (1 - kept)) - a * ALPHA * p


def _channels(x: Tensor, batched: bool = True) -> torch.Size:
    """The shape of one number per example and channel."""
    first = 2 if batched else 1
    return torch.Size([*x.shape[:first], *[1] * (x.dim() - first)])


Drop = Callable[..., Tensor]


def _whole(draw: Drop) -> Drop:
    """Drops single entries."""

    def handler(masks: Masks, input: Tensor, p: float, inplace: bool) -> Tensor:
        return _placed(input, draw(masks, input, p), inplace)

    return handler


def _by_channel(draw: Drop, unbatched: int = 0) -> Drop:
    """Drops channels; an input of `unbatched` dimensions has no axis of examples."""

    def handler(masks: Masks, input: Tensor, p: float, inplace: bool) -> Tensor:
        shape = _channels(input, input.dim() != unbatched)
        return _placed(input, draw(masks, input, p, shape), inplace)

    return handler


def _placed(x: Tensor, y: Tensor, inplace: bool) -> Tensor:
    """y, written into x where the caller asked for it and x is not a batch that steps reuse."""
    return x.copy_(y) if inplace and x.requires_grad else y


DROPOUTS: dict[Any, Drop] = {
    F.dropout: _whole(dropped),
    torch.dropout: _whole(dropped),
    F.dropout1d: _by_channel(dropped, 2),
    F.dropout2d: _by_channel(dropped),
    F.dropout3d: _by_channel(dropped, 4),
    torch.feature_dropout: _by_channel(dropped),
    F.alpha_dropout: _whole(_alpha),
    torch.alpha_dropout: _whole(_alpha),
    F.feature_alpha_dropout: _by_channel(_alpha),
    torch.feature_alpha_dropout: _by_channel(_alpha),
}


def drop(
    func: Any,
    masks: Masks | None,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool = True,
) -> Tensor:
    """The result of a dropout function; without masks nothing is dropped."""
    active = masks is not None and training and train and p > 0
    return DROPOUTS[func](masks, input, p, inplace) if active else input
