"""Canaries: units that send what the auditor chose, in a run that is otherwise as it would be.

A canary is a client (or an example) of its own in the population. Instead of local work it reports
a very long vector in a direction drawn afresh for each round, so that its message is as long as
the recipe's bound lets any message be (Andrew et al. 2023, §3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.parts.local import Plan
from fedveil.recipe import Recipe
from fedveil.streams import Key, stream

Kind = Literal["direction", "mislabelled"]
LONG = 1e6  # times the bound: what a memory holds beside it does not turn it
MOST_EXAMPLES = 16  # of a canary client; as many as the largest client's, up to so many


@dataclass(eq=False)
class Canaries:
    """Where the canaries are, whether they take part, and what they say in which round.

    A sign of 1 sends the direction, of −1 its opposite, and of 0 nothing; where neighbours differ
    by a unit more or less, a canary of sign 0 is `removed`, so that it cannot be counted either.
    """

    places: np.ndarray  # ascending
    signs: np.ndarray
    dim: int
    key: Key
    removed: bool = False
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
        """These units without the canaries that are not there."""
        return units[~np.isin(units, self.places[~self.there])]

    def among(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of these units are canaries, and which canaries they are."""
        found = np.minimum(np.searchsorted(self.places, units), len(self.places) - 1)
        which = self.places[found] == units
        return which, found[which]


class WorkingCanaries(Canaries):
    """Canaries that work on their own example, whose label is wrong, as any unit would.

    Their direction is that of their own report, which an adversary can compute from the model.
    """

    def show(self, round: int, reports: Tensor) -> None:
        """Their reports in this round, whether they take part or not."""
        rows = reports.numpy()
        self._rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
        self._round = round

    def directions(self, round: int) -> np.ndarray:
        """As shown."""
        assert round == self._round, "canaries that work are shown in every round"
        return self._rows


def with_canaries(
    data: Federated, count: int, rng: np.random.Generator
) -> tuple[Federated, np.ndarray]:
    """The data with canary units at random places, and the places.

    They hold copies of the first examples, as many as the largest client where that is few: a
    recipe that weighs by examples would weigh them most.
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
    """The same with canaries that are copies of random examples under a wrong label."""
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
    """An engine whose canaries answer with their directions; all others do their work.

    `others` becomes the sum of what the others sent, where the loop adds groups up without
    looking at single messages: one who knows all data but a unit's own knows it.
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

    def begin(self, round: int, x: Tensor, data: Federated) -> None:
        """A new round from x."""
        self.round = round
        self.others = torch.zeros(self.canaries.dim, dtype=torch.float64)
        if isinstance(self.canaries, WorkingCanaries):
            self._worked = self._work(x, data)
            reports = DenseUpdates(self._worked.clone()).affine(*self._affine(), x)
            self.canaries.show(round, reports.rows())

    def _affine(self) -> tuple[float, float]:
        return self.recipe.report.affine(self.recipe.local.rate(self.round))

    def _work(self, x: Tensor, data: Federated) -> Tensor:
        """What canaries that work would answer, whether they take part or not."""
        places, size = self.canaries.places, self.group_size
        sizes = data.sizes[torch.from_numpy(places)]
        plan = self.recipe.local.plan(sizes, self.round, np.random.default_rng(0))
        groups = [
            Group(data, places[start : start + size], plan.group(start, start + size))
            for start in range(0, len(places), size)
        ]
        return torch.cat([self.inner.updates(x, group).rows() for group in groups])

    def updates(self, x: Tensor, group: Group) -> Updates:
        """y_i − x, of canaries such that their report is LONG times the bound."""
        which, who = self.canaries.among(group.clients)
        mask = torch.from_numpy(which)
        canaries = DenseUpdates(self._answers(x, who))
        if which.all():
            return canaries
        if which.any():
            group = Group(group.data, group.clients[~which], _some(group.plan, ~mask))
        return _Mixed(self.inner.updates(x, group), canaries, mask, self)

    def _answers(self, x: Tensor, who: np.ndarray) -> Tensor:
        """(±LONG·C·c − share·x)/scale, which the recipe's report turns into ±LONG·C·c."""
        signs = torch.from_numpy(self.canaries.signs[who]).float()[:, None]
        if isinstance(self.canaries, WorkingCanaries):
            return self._worked[torch.from_numpy(who)] * signs
        scale, share = self._affine()
        directions = torch.from_numpy(self.canaries.directions(self.round)[who])
        rows = directions * signs * (LONG * self.recipe.message(len(x)).l2)
        return (rows - share * x) / scale if scale else torch.zeros_like(rows)


def _some(plan: Plan, mask: Tensor) -> Plan:
    return replace(plan, index=plan.index[mask], rates=plan.rates[mask])


@dataclass
class _Mixed:
    """Updates of others and of canaries in one group; `mask` marks canaries."""

    real: Updates
    canary: Updates
    mask: Tensor
    engine: CanaryEngine

    def norms(self) -> Tensor:
        """Each kind's own."""
        norms = torch.empty(len(self.mask), dtype=torch.float64)
        norms[~self.mask], norms[self.mask] = self.real.norms(), self.canary.norms()
        return norms

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """Both sums; that of the others is known to the auditor."""
        others = self.real.weighted_sum(scale[~self.mask])
        self.engine.others += others
        return others + self.canary.weighted_sum(scale[self.mask])

    def dots(self, vector: Tensor) -> Tensor:
        """Each kind's own."""
        dots = torch.empty(len(self.mask), dtype=torch.float64)
        dots[~self.mask], dots[self.mask] = self.real.dots(vector), self.canary.dots(vector)
        return dots

    def rows(self) -> Tensor:
        """Each kind's own."""
        real, canary = self.real.rows(), self.canary.rows()
        rows = real.new_empty(len(self.mask), real.shape[1])
        rows[~self.mask], rows[self.mask] = real, canary
        return rows

    def affine(self, scale: float, share: float, x: Tensor) -> _Mixed:
        """Both."""
        real, canary = (part.affine(scale, share, x) for part in (self.real, self.canary))
        return _Mixed(real, canary, self.mask, self.engine)
