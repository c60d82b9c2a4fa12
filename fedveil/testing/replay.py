"""Rounds of the loop with scripted clients, seen from inside: the sum before and after its noise.

A round can be run again with the same randomness and one thing changed: a client's answer, who
comes, whether there is noise. What a round shows is what the loop itself computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import mode
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil import loop
from fedveil.accounting.norms import Adjacency, Norms
from fedveil.data.federated import Examples, Federated
from fedveil.engines.updates import DenseUpdates, Engine, Group
from fedveil.loop import Info, State, begin
from fedveil.parts.bound import Bound
from fedveil.parts.memory import ClientMemory
from fedveil.parts.part import Tensors
from fedveil.random.streams import Key
from fedveil.recipe import Recipe, View, observed

SIZES = (1, 3, 1, 40, 2, 1, 5, 2)  # examples of each client: no message may weigh by them


@dataclass
class Scripted:
    """An engine whose clients answer with given differences y_i − x, whatever x is."""

    answers: Sequence[Tensor]
    name: str = "scripted"
    group_size: int = 4
    least_group: int = 1

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """The answers of a group; one of a wrong shape is a broken one."""
        return DenseUpdates.of([self.answers[client] for client in group.clients], len(x))


@functools.cache
def people(clients: int) -> Federated:
    """Clients with very different numbers of examples, which are all zero."""
    sizes = np.resize(SIZES, clients)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    inputs, labels = (
        torch.zeros(int(sizes.sum()), 1),
        torch.zeros(int(sizes.sum()), dtype=torch.long),
    )
    return Federated("people", inputs, labels, offsets, Examples(inputs, labels), 2)


@dataclass
class Watched:
    """A part that does what another one does, and records what a round makes of it."""

    inner: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def stranger(self) -> Any:
        """It is as foreign as the part that it stands for."""
        return self.inner


@dataclass
class WatchedMemory(Watched):
    """A memory that records the noisy mean of each round."""

    means: list[Tensor] = field(default_factory=list)

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        """As the memory itself."""
        self.means.append(mean.clone())
        stepped: tuple[Tensor, Tensors] = self.inner.step(state, mean)
        return stepped


@dataclass
class WatchedNoise(Watched):
    """A noise that can be left out, and that records what messages carry."""

    amount: str = "real"  # or "none", or "most": as much as a message can carry
    own: list[np.ndarray] = field(default_factory=list)

    def step(
        self, message: Norms, arrived: int, expected: float, rng: Any, state: Tensors
    ) -> tuple[Tensor, Tensors]:
        """What meets the sum."""
        drawn, after = self.inner.step(message, arrived, expected, rng, state)
        return (drawn if self.amount == "real" else torch.zeros_like(drawn)), after

    def each(self, message: Norms, rng: Any) -> np.ndarray:
        """What a message carries."""
        drawn: np.ndarray = self.inner.each(message, rng)
        if self.amount != "real":
            drawn = np.full_like(
                drawn, self.inner.max_magnitude(message) if self.amount == "most" else 0
            )
        self.own.append(drawn)
        return drawn


@dataclass
class WatchedCohort(Watched):
    """A cohort that records its draws, or that is told who comes."""

    members: np.ndarray | None = None
    drawn: list[np.ndarray] = field(default_factory=list)

    def draw(self, population: int, rng: Any, state: Any = None) -> np.ndarray:
        """The cohort's own draw, unless members are given."""
        who: np.ndarray = self.inner.draw(population, rng, state)
        self.drawn.append(who if self.members is None else self.members)
        return self.drawn[-1]


@dataclass
class WatchedBound(Watched):
    """A bound that adapts, and that records the count of each round, Σ(b_i − ½)."""

    counts: list[float] = field(default_factory=list)

    def step(self, state: Tensors, short: int, arrived: int, expected: float, rng: Any) -> Tensors:
        """As the bound itself."""
        self.counts.append(short - arrived / 2)
        after: Tensors = self.inner.step(state, short, arrived, expected, rng)
        return after


@dataclass(frozen=True)
class Replayed:
    """What one round showed."""

    sum: Tensor | None  # mean · public denominator, float64 [dim]; None if the round was void
    members: np.ndarray
    own: list[np.ndarray]  # each member's noise in grid steps, where messages carry it
    count: float | None  # of an adaptive clip, before its noise
    state: State
    info: Info

    @property
    def total(self) -> Tensor:
        """The released sum."""
        assert self.sum is not None, "the round was aborted and released nothing"
        return self.sum


def play(
    recipe: Recipe,
    answers: Sequence[Tensor],
    key: Key = 0,
    state: State | None = None,
    noise: str = "none",
    members: np.ndarray | None = None,
    data: Federated | None = None,
    engine: Engine | None = None,
) -> Replayed:
    """One round, from a state or from the start; the state that is given stays as it is.

    `noise` is "real", "none", or "most": the most that messages can carry. With `members`, these
    clients come instead of the cohort that is drawn.
    """
    data = data or people(len(answers))
    dim = mode(len(answer) for answer in answers)
    memory, cohort = WatchedMemory(recipe.memory), WatchedCohort(recipe.cohort, members)
    bound, amount = WatchedBound(recipe.bound), WatchedNoise(recipe.noise, noise)
    watched: Any = {"memory": memory, "cohort": cohort}
    if recipe.bound.adapts:
        watched["bound"] = bound
    if recipe.private:
        watched["noise"] = amount
    copy = begin(recipe, torch.zeros(dim), data, 1, key) if state is None else copied(state)
    after, info = loop.run_round(
        observed(recipe, **watched), copy, data, engine or Scripted(answers), key
    )
    mean = memory.means[-1] if memory.means else None
    total = None if mean is None else mean.double() * recipe.cohort.expected(data.clients)
    count = bound.counts[-1] if bound.counts else None
    return Replayed(total, cohort.drawn[-1], amount.own, count, after, info)


def copied(state: State) -> State:
    """The same state with client memory of its own, which rounds write to."""
    if state.memory is None:
        return replace(state)
    everyone = np.arange(len(state.memory))
    memory = ClientMemory(len(everyone), state.memory.width)
    memory[everyone] = state.memory[everyone]
    return replace(state, memory=memory)


def forgotten(state: State | None, client: int) -> State | None:
    """The state as if one client had never been there: nothing of it is remembered."""
    if state is None or state.memory is None:
        return state
    without = copied(state)
    assert without.memory is not None
    without.memory[np.array([client])] = torch.zeros(1, state.memory.width)
    return without


def bound_of(recipe: Recipe, state: State | None) -> Bound:
    """The bound that a round from this state is held to."""
    return recipe.bound if state is None else loop.bound_of(recipe, state)


def normal_answers(clients: int, dim: int, seed: int = 0, length: float = 10.0) -> list[Tensor]:
    """Long answers in random directions."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=dim) * length).float() for _ in range(clients)]


def adversarial(dim: int) -> list[Tensor]:
    """Answers that test a bound: long and short, in one coordinate and in all, broken ones."""
    one = torch.zeros(dim)
    one[0] = 1.0
    every = torch.ones(dim)
    signs = torch.tensor([(-1.0) ** j for j in range(dim)])
    scales = (-1e30, -1e3, 1e3, 1e30)
    lengths = [scale * shape for shape in (one, every, signs) for scale in scales]
    small = [1e-3 * every, -1e-3 * one, 1e-30 * every, 1e-42 * signs]
    return [torch.zeros(dim), *lengths, *small, *broken(dim)]


def broken(dim: int) -> list[Tensor]:
    """Answers that are no update at all."""
    values = (float("nan"), float("inf"), -float("inf"))
    rows = [torch.ones(dim) for _ in values]
    for row, value in zip(rows, values, strict=True):
        row[-1] = value
    return [*rows, torch.full((dim,), 3.4e38) * 10, torch.ones(dim + 1), torch.ones(dim).long()]


def swapped(answers: Sequence[Tensor], client: int, answer: Tensor) -> list[Tensor]:
    """The same answers but one."""
    return [answer if other == client else row for other, row in enumerate(answers)]


def adjacencies(recipe: Recipe) -> set[Adjacency]:
    """Under which any view with a guarantee is accounted; of a recipe without, the first view."""
    views: tuple[View, ...] = ("models", "sum", "messages")
    seen = views[:1] if recipe.noise.at == "server" else views
    return {recipe.adjacency(view) for view in seen}
