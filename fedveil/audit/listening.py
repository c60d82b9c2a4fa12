"""Observes a run with canaries through parts that behave like the recipe's own.

The loop is unchanged and unaware of it. The auditor sees what the threat model of differential
privacy grants: the release, and all messages except the canaries'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.audit.canaries import Canaries, CanaryEngine
from fedveil.parts.memory import Memory
from fedveil.parts.part import Tensors, foreign
from fedveil.recipe import Recipe, observed


@dataclass
class Heard:
    """One round: the release minus what others sent, which canaries took part, what they sent.

    `release` is in units of the server's change of direction; None for an aborted round. Messages
    include their noise if each carries its own.
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
        """Start a round with this cohort, who also do the work unless `works` says otherwise."""
        self._members = self._workers = members
        self.who = self.canaries.among(members)[1]
        self.release, self.messages, self.noise = None, [], []
        self._others, self._passed = np.zeros(self.canaries.dim), Counter()

    def works(self, workers: np.ndarray) -> None:
        """Set who works in this round; messages arrive in their order."""
        self._workers = workers

    def hears_messages(self, rows: Tensor, grid: float) -> None:
        """Record the next workers' messages before noise, in grid steps."""
        units = self._next("messages", self._workers, len(rows))
        canary = self.canaries.among(units)[0]
        sends = np.isin(units, self._members)
        steps = rows.numpy()
        self.messages += list(steps[canary & sends])
        self._others += grid * steps[~canary & sends].sum(axis=0, dtype=np.float64)

    def chosen(self, what: str, remembered: Tensor, update: Tensor, memory: Memory) -> Tensor:
        """The next workers' updates, of canaries so that the memory leaves their direction."""
        canary = self.canaries.among(self._next(what, self._workers, len(update)))[0]
        if not self.canaries.chosen:
            return update
        asked = memory.update_for(remembered, update)
        return torch.where(torch.from_numpy(canary)[:, None], asked, update)

    def hears_noise(self, drawn: np.ndarray) -> None:
        """Record the next member's own noise."""
        units = self._next("noise", self._members, 1)
        if self.canaries.among(units)[0].all():
            self.noise.append(drawn)

    def hears_release(self, change: Tensor, rate: float) -> None:
        """Record the server's change of direction, `rate` times the released mean."""
        others = torch.from_numpy(self._others) + self.engine.others
        self.release = (change.double() - rate * others / self.denominator).numpy()

    def sent(self) -> list[np.ndarray]:
        """The canaries' messages with their noise, as sent."""
        return [row + own for row, own in zip(self.messages, self.noise, strict=False)]

    def _next(self, what: str, units: np.ndarray, count: int) -> np.ndarray:
        start = self._passed[what]
        self._passed[what] += count
        return units[start : start + count]


@dataclass
class _Overheard:
    """A part that behaves like another one while it is observed."""

    inner: Any
    heard: Heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def stranger(self) -> Any:
        """It is as foreign as the part that it stands for."""
        return self.inner


class _Cohort(_Overheard):
    def draw(self, population: int, rng: np.random.Generator, state: Any = None) -> np.ndarray:
        members = self.heard.canaries.present(self.inner.draw(population, rng, state))
        self.heard.begin(members)
        return members


class _Memory(_Overheard):
    def workers(self, cohort: np.ndarray, population: int) -> np.ndarray:
        workers: np.ndarray = self.inner.workers(cohort, population)
        self.heard.works(workers)
        return workers

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        chosen = self.heard.chosen("compared", remembered, update, self.inner)
        compared: Tensor = self.inner.compare(remembered, chosen)
        return compared

    def after(self, remembered: Tensor, update: Tensor, message: Tensor, state: Tensors) -> Tensor:
        chosen = self.heard.chosen("kept", remembered, update, self.inner)
        kept: Tensor = self.inner.after(remembered, chosen, message, state)
        return kept

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        """The server's side determines everything released: the mean, as our memories keep it."""
        direction, after = self.inner.step(state, mean)
        if foreign(self.inner):
            self.heard.hears_release(mean, 1.0)
        elif "direction" in state:
            self.heard.hears_release(direction - state["direction"], self.inner.rate)
        else:
            self.heard.hears_release(direction, 1.0)
        return direction, after


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
    """The recipe with observed parts of the same behaviour."""
    parts: dict[str, Any] = {
        "cohort": _Cohort(recipe.cohort, heard),
        "memory": _Memory(recipe.memory, heard),
        "quantize": _Quantize(recipe.quantize, heard),
        "noise": _Noise(recipe.noise, heard),
    }
    return observed(recipe, **parts)
