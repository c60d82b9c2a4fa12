"""Randomness of a part's own is refused before the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import events
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts import SGD, Cohort, Constant, Server
from fedveil.parts.checks import repeatable, varied
from fedveil.parts.noise import Gaussian, Noise
from fedveil.parts.part import Begin, Tensors
from fedveil.parts.records import SiloGaussian
from fedveil.recipe import Recipe
from fedveil.training.own_randomness import refuse_own_randomness
from fedveil.training.prepare import prepare
from tests.contracts import own_parts as own

DELTA = 1e-5
RECIPE = own.dp_own_memory(multiplier=3.0)


def ready(recipe: Recipe, data: Federated) -> None:
    prepare(recipe, data, rounds=4, delta=DELTA)


@dataclass(frozen=True)
class Entropy(own.OwnNoise):
    """Noise from the operating system's entropy."""

    def draw(self, message: Any, arrived: int, expected: float, rng: Any) -> Tensor:
        return super().draw(message, arrived, expected, np.random.default_rng())


@dataclass(frozen=True)
class GlobalTorch(own.OwnNoise):
    """Noise from torch's global generator."""

    def draw(self, message: Any, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.randn(message.dim, dtype=torch.float64)


@dataclass(frozen=True)
class Reseeded(own.OwnNoise):
    """The same noise in every round."""

    def draw(self, message: Any, arrived: int, expected: float, rng: Any) -> Tensor:
        return super().draw(message, arrived, expected, np.random.default_rng(1))


@dataclass(frozen=True)
class OwnCoins(own.CoinFlips):
    """Clients by coins of its own."""

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        return super().draw(population, np.random.default_rng(), state)


@dataclass(frozen=True)
class Shuffled(Cohort):
    """A third of the clients, in an order that is drawn before the first round."""

    amplifies: bool = True
    adjacency = "add-remove"

    def expected(self, population: int) -> float:
        return population / 3

    def initial_state(self, begin: Begin) -> Tensors:
        order = torch.from_numpy(begin.rng.permutation(begin.population))
        return {"order": order, "round": torch.tensor(0)}

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        assert state is not None
        size = population // 3
        first = int(state["round"]) % 3 * size
        return np.sort(state["order"][first : first + size].numpy())

    def amplify(self, event: events.Round, population: int) -> events.Round:
        gaussian = isinstance(event, events.GaussianRelease) and self.amplifies
        return events.PoissonSampled(1 / 3, event) if gaussian else event


@dataclass(frozen=True)
class Dithered(own.Rounding):
    """Rounds with numbers of its own."""

    def __call__(self, rows: Tensor, bound: Any, rng: Any) -> Tensor:
        own = np.random.default_rng()
        return super().__call__(rows + torch.from_numpy(own.random(rows.shape)), bound, rng)


@dataclass(frozen=True)
class OwnBatches(SGD):
    """Batches of its own."""

    def plan(self, sizes: Tensor, round: int, rng: Any) -> Any:
        return super().plan(sizes, round, np.random.default_rng())


@dataclass(frozen=True)
class Restless(Server):
    """Starts from numbers of its own."""

    def initial_state(self, begin: Begin) -> Tensors:
        return {"start": torch.from_numpy(np.random.default_rng().random(3))}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        return x - descent, state


OWN = {
    "cohort": (OwnCoins(0.2), "clients"),
    "local": (OwnBatches(Constant(0.1), steps=2, batch=2), "plans"),
    "quantize": (Dithered(), "roundings"),
    "noise": (Entropy(3.0), "noise"),
    "server": (Restless(), "initial states"),
}


@pytest.mark.parametrize("slot", OWN)
def test_randomness_of_a_part_s_own_is_refused(slot: str, blobs: Federated) -> None:
    part, what = OWN[slot]
    match = f"{type(part).__name__} draws randomness of its own: two equal streams gave different"
    with pytest.raises(UserError, match=f"{match} {what}. Draw only from the rng"):
        ready(replace(RECIPE, **{slot: part}), blobs)


def test_a_global_generator_is_named(blobs: Federated) -> None:
    with pytest.raises(UserError, match="Noise GlobalTorch draws from torch's global random"):
        ready(replace(RECIPE, noise=GlobalTorch(3.0)), blobs)


def test_noise_that_is_the_same_in_every_round_is_refused(blobs: Federated) -> None:
    with pytest.raises(UserError, match="Reseeded adds the same noise whatever the stream"):
        ready(replace(RECIPE, noise=Reseeded(3.0)), blobs)


def test_coins_from_the_state_of_a_cohort_do_not_amplify(blobs: Federated) -> None:
    """A round that is drawn again would have the same clients."""
    with pytest.raises(UserError, match="Shuffled draws the same clients whatever the stream"):
        ready(Recipe(**parts_of(Shuffled())), blobs)
    ready(Recipe(**parts_of(Shuffled(amplifies=False))), blobs)


def parts_of(cohort: Cohort) -> dict[str, Any]:
    base = own.dp_own(multiplier=3.0)
    return {"name": "shuffled", "local": base.local, "cohort": cohort, "bound": base.bound,
            "noise": base.noise, "server": base.server}  # fmt: skip


@dataclass(frozen=True)
class LoudSilo(SiloGaussian):
    """The second silo draws from the operating system's entropy."""

    by_silo = True

    def inside(self, silo: int) -> Noise:
        return Entropy(3.0) if silo == 1 else Gaussian(3.0)


def test_parts_inside_silos_are_tried_too() -> None:
    base = algorithms.silo_dp_fedavg(noise_multiplier=3.0, steps=1)
    refuse_own_randomness(base, torch.zeros(6), 3, 4)
    with pytest.raises(UserError, match="Entropy draws randomness of its own"):
        refuse_own_randomness(replace(base, noise=LoudSilo((3.0,))), torch.zeros(6), 3, 4)


def test_parts_that_draw_from_their_stream_are_ready(blobs: Federated) -> None:
    ready(RECIPE, blobs)
    ready(own.dp_own(cap=2, multiplier=3.0), blobs)
    everyone = replace(own.dp_own(multiplier=3.0), cohort=own.CoinFlips(1.0))
    ready(everyone, blobs)  # surely the same clients


def test_draws_are_compared_bit_by_bit() -> None:
    assert repeatable(
        lambda rng: {"a": torch.tensor([np.nan]), "b": (1, None, np.float64(rng.random()))}
    )
    assert not varied(lambda rng: torch.tensor([np.nan], dtype=torch.bfloat16))
    assert varied(lambda rng: [torch.tensor(rng.random())])
    state = np.random.default_rng(0)
    assert not repeatable(lambda rng: state.random())
