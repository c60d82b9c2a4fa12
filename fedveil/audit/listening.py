"""What a run with canaries shows: parts that do the same as a recipe's own and are overheard.

The loop is not changed and knows nothing of it. What is heard is what the threat model of
differential privacy grants: the release, and all messages but the canaries'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.audit.canaries import Canaries, CanaryEngine
from fedveil.privacy.norms import Norms
from fedveil.recipe import Recipe


@dataclass
class Heard:
    """One round: the release less what others sent, which canaries took part, what they sent.

    `release` is in units of the server's change of direction; None for a void round. Messages are
    heard with their noise where each carries its own.
    """

    canaries: Canaries
    engine: CanaryEngine
    denominator: float
    release: np.ndarray | None = None
    who: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    messages: list[np.ndarray] = field(default_factory=list)
    noise: list[np.ndarray] = field(default_factory=list)
    _others: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _members: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _workers: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _passed: Counter[str] = field(default_factory=Counter)

    def begin(self, members: np.ndarray) -> None:
        """A round with this cohort, who also do the work unless `works` says otherwise."""
        self._members = self._workers = members
        self.who = self.canaries.among(members)[1]
        self.release, self.messages, self.noise = None, [], []
        self._others, self._passed = np.zeros(self.canaries.dim), Counter()

    def works(self, workers: np.ndarray) -> None:
        """Who works in this round; messages come in their order."""
        self._workers = workers

    def hears_messages(self, rows: Tensor, grid: float) -> None:
        """The next workers' messages before noise, in steps of the grid."""
        units = self._next("messages", self._workers, len(rows))
        canary = self.canaries.among(units)[0]
        sends = np.isin(units, self._members)
        steps = rows.numpy()
        self.messages += list(steps[canary & sends])
        self._others += grid * steps[~canary & sends].sum(axis=0, dtype=np.float64)

    def hears_noise(self, drawn: np.ndarray) -> None:
        """The next member's own noise."""
        units = self._next("noise", self._members, 1)
        if self.canaries.among(units)[0].all():
            self.noise.append(drawn)

    def hears_release(self, change: Tensor, rate: float) -> None:
        """The server's change of direction, `rate` times the released mean."""
        others = torch.from_numpy(self._others) + self.engine.others
        self.release = (change.double() - rate * others / self.denominator).numpy()

    def sent(self) -> list[np.ndarray]:
        """The canaries' messages with their noise, as they left their clients."""
        return [row + own for row, own in zip(self.messages, self.noise, strict=False)]

    def _next(self, what: str, units: np.ndarray, count: int) -> np.ndarray:
        start = self._passed[what]
        self._passed[what] += count
        return units[start : start + count]


@dataclass
class _Overheard:
    """A part that does what another one does, while somebody listens."""

    inner: Any
    heard: Heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Cohort(_Overheard):
    def draw(self, population: int, rng: np.random.Generator, taken: Any = None) -> np.ndarray:
        members = self.heard.canaries.present(self.inner.draw(population, rng, taken))
        self.heard.begin(members)
        return members


class _Memory(_Overheard):
    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        workers: np.ndarray = self.inner.workers(cohort, population)
        self.heard.works(workers)
        return workers

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        learned: Tensor = self.inner.learn(remembered, message)
        if message.dim() == 1:  # the server's side, from which all that is released follows
            change = learned - remembered if self.inner.kept else learned
            self.heard.hears_release(change, self.inner.beta if self.inner.kept else 1.0)
        return learned


class _Quantize(_Overheard):
    def __call__(self, rows: Tensor, bound: Norms, rng: np.random.Generator) -> Tensor:
        messages: Tensor = self.inner(rows, bound, rng)
        self.heard.hears_messages(messages, self.inner.norms(bound).grid or 1.0)
        return messages


class _Noise(_Overheard):
    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        drawn: np.ndarray = self.inner.each(message, rng)
        self.heard.hears_noise(drawn)
        return drawn


def listening(recipe: Recipe, heard: Heard) -> Recipe:
    """The recipe with parts that do the same and are overheard."""
    parts: dict[str, Any] = {
        "cohort": _Cohort(recipe.cohort, heard),
        "memory": _Memory(recipe.memory, heard),
        "quantize": _Quantize(recipe.quantize, heard),
        "noise": _Noise(recipe.noise, heard),
    }
    return replace(recipe, **parts)
