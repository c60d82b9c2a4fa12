"""Canaries: units that send updates chosen by the auditor, in an otherwise unchanged run.

A canary is a client (or an example) of its own in the population. Instead of training it sends a
very long vector in a new direction in each round, so that its message is as long as the
recipe's bound allows (Andrew et al. 2023, §3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.parts.local import LocalPlan
from fedveil.random.streams import Key, stream
from fedveil.recipe import Recipe

Kind = Literal["direction", "mislabelled"]
LONG = 1e6  # times the bound: the content of a memory does not change its direction
MOST_EXAMPLES = 16  # per canary client; fewer if the largest client has fewer


@dataclass(eq=False)
class Canaries:
    """The positions of the canaries, whether they take part, and what they send in each round.

    Sign 1 sends the direction, −1 its opposite, and 0 nothing. Under add/remove adjacency a canary
    of sign 0 is `removed`, so that it is not counted either.
    """

    places: np.ndarray  # increasing
    signs: np.ndarray
    dim: int
    key: Key
    removed: bool = False
    chosen: ClassVar[bool] = True  # whether their messages are chosen, whatever a memory holds
    _round: int = -1
    _rows: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))

    def directions(self, round: int) -> np.ndarray:
        """Unit vectors, uniform on the sphere and independent of all else: float32 [count, dim]."""
        if round != self._round:
            rng = stream(self.key, round, "canaries")
            rows = rng.standard_normal((len(self.places), self.dim), dtype=np.float32)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            self._round, self._rows = round, rows
        return self._rows

    @property
    def there(self) -> np.ndarray:
        """Which canaries are in the population."""
        return np.asarray((self.signs != 0) | (not self.removed))

    def present(self, units: np.ndarray) -> np.ndarray:
        """These units without the removed canaries."""
        return units[~np.isin(units, self.places[~self.there])]

    def among(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these units are canaries, and the indexes of those canaries."""
        found = np.minimum(np.searchsorted(self.places, units), len(self.places) - 1)
        which = self.places[found] == units
        return which, found[which]


class WorkingCanaries(Canaries):
    """Canaries that train on their own mislabelled example, as any unit would.

    Their direction is that of their own update, which an adversary can compute from the model.
    """

    chosen = False

    def show(self, round: int, reports: Tensor) -> None:
        """Set their updates of this round, whether they take part or not."""
        rows = reports.numpy()
        self._rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        self._round = round

    def directions(self, round: int) -> np.ndarray:
        """The directions of the updates set by `show`."""
        assert round == self._round, "show must be called in every round"
        return self._rows


def with_canaries(
    data: Federated, count: int, rng: np.random.Generator
) -> tuple[Federated, np.ndarray]:
    """The data with canary units at random positions, and the positions.

    They hold copies of the first examples, as many as the largest client up to a limit: a recipe
    that weights by examples would give them the largest weight.
    """
    size = 1 if data.unit == "example" else min(int(data.sizes.max()), MOST_EXAMPLES)
    places = np.sort(rng.choice(data.clients + count, count, replace=False))
    canary = np.zeros(data.clients + count, dtype=bool)
    canary[places] = True
    sizes = np.full(len(canary), size)
    sizes[~canary] = data.sizes.numpy()
    of_canary = np.repeat(canary, sizes)
    source = np.arange(len(of_canary)) % len(data.labels)
    source[~of_canary] = np.arange(len(data.labels))
    rows = torch.from_numpy(source)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    mixed = replace(data, inputs=data.inputs[rows], labels=data.labels[rows], offsets=offsets)
    return mixed, places


def with_mislabelled(
    data: Federated, count: int, rng: np.random.Generator
) -> tuple[Federated, np.ndarray]:
    """The same with canaries that are copies of random examples with a wrong label."""
    mixed, places = with_canaries(data, count, rng)
    copies = torch.from_numpy(rng.integers(len(data.labels), size=count))
    away = torch.from_numpy(rng.integers(1, max(data.classes, 2), size=(count,)))
    away = away.reshape(-1, *[1] * (len(data.labels.shape) - 1))
    rows = mixed.offsets[torch.from_numpy(places)]
    inputs, labels = mixed.inputs[:], mixed.labels[:]
    inputs[rows] = data.inputs[copies]
    labels[rows] = (data.labels[copies] + away) % data.classes
    return replace(mixed, inputs=inputs, labels=labels), places


@dataclass
class CanaryEngine:
    """An engine whose canaries return their directions; all other clients train.

    `others` becomes the sum of what the others sent, where the loop adds up groups without reading
    single messages: an adversary who knows all data except one unit's knows this sum.
    """

    inner: Engine
    canaries: Canaries
    recipe: Recipe
    round: int = 0
    others: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    _worked: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @property
    def name(self) -> str:
        """The inner engine's."""
        return self.inner.name

    @property
    def group_size(self) -> int:
        """The inner engine's."""
        return self.inner.group_size

    @property
    def least_group(self) -> int:
        """The inner engine's."""
        return self.inner.least_group

    def begin(self, round: int, x: Tensor, data: Federated) -> None:
        """Start a new round from x."""
        self.round = round
        self.others = torch.zeros(self.canaries.dim, dtype=torch.float64)
        if isinstance(self.canaries, WorkingCanaries):
            self._worked = self._work(x, data)
            reports = DenseUpdates(self._worked.clone()).affine(*self._affine(), x)
            self.canaries.show(round, reports.rows())

    def _affine(self) -> tuple[float, float]:
        return self.recipe.report.affine(self.recipe.local.rate(self.round))

    def _work(self, x: Tensor, data: Federated) -> Tensor:
        """The updates of training canaries, whether they take part or not."""
        places, size = self.canaries.places, self.group_size
        sizes = data.sizes[torch.from_numpy(places)]
        plan = self.recipe.local.plan(sizes, self.round, np.random.default_rng(0))
        groups = [
            Group(data, places[start : start + size], plan.group(start, start + size))
            for start in range(0, len(places), size)
        ]
        return torch.cat([self.inner.updates(x, group).rows() for group in groups])

    def updates(self, x: Tensor, group: Group) -> Updates:
        """y_i − x, chosen for canaries so that their update is LONG times the bound."""
        which, who = self.canaries.among(group.clients)
        mask = torch.from_numpy(which)
        canaries = DenseUpdates(self._answers(x, who))
        if which.all():
            return canaries
        if which.any():
            group = Group(group.data, group.clients[~which], _some(group.plan, ~mask))
        return _Mixed(self.inner.updates(x, group), canaries, mask, self)

    def _answers(self, x: Tensor, who: np.ndarray) -> Tensor:
        """(±LONG·C·c − share·x)/scale, which the recipe's report maps to ±LONG·C·c."""
        signs = torch.from_numpy(self.canaries.signs[who]).float()[:, None]
        if isinstance(self.canaries, WorkingCanaries):
            return self._worked[torch.from_numpy(who)] * signs
        scale, share = self._affine()
        directions = torch.from_numpy(self.canaries.directions(self.round)[who])
        rows = directions * signs * (LONG * self.recipe.message(len(x)).l2)
        return (rows - share * x) / scale if scale else torch.zeros_like(rows)


def _some(plan: LocalPlan, mask: Tensor) -> LocalPlan:
    correction = None if plan.correction is None else plan.correction[mask]
    return replace(plan, index=plan.index[mask], rates=plan.rates[mask], correction=correction)


@dataclass
class _Mixed:
    """Updates of clients and canaries in one group; `mask` marks canaries."""

    real: Updates
    canary: Updates
    mask: Tensor
    engine: CanaryEngine

    def norms(self) -> Tensor:
        """The norms of both kinds."""
        norms = torch.empty(len(self.mask), dtype=torch.float64)
        norms[~self.mask], norms[self.mask] = self.real.norms(), self.canary.norms()
        return norms

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """The sum of both kinds; the auditor knows that of the others."""
        others = self.real.weighted_sum(scale[~self.mask])
        self.engine.others += others
        return others + self.canary.weighted_sum(scale[self.mask])

    def dots(self, vector: Tensor) -> Tensor:
        """The products of both kinds."""
        dots = torch.empty(len(self.mask), dtype=torch.float64)
        dots[~self.mask], dots[self.mask] = self.real.dots(vector), self.canary.dots(vector)
        return dots

    def rows(self) -> Tensor:
        """The rows of both kinds."""
        real, canary = self.real.rows(), self.canary.rows()
        rows = real.new_empty(len(self.mask), real.shape[1])
        rows[~self.mask], rows[self.mask] = real, canary
        return rows

    def affine(self, scale: float, share: float, x: Tensor) -> _Mixed:
        """Both."""
        real, canary = (part.affine(scale, share, x) for part in (self.real, self.canary))
        return _Mixed(real, canary, self.mask, self.engine)
