"""Parts whose draws contradict what they are accounted as are refused before the first round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import events
from fedveil.accounting.correlation import square_root
from fedveil.accounting.norms import Norms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts import Bound, Cohort, Everyone, Noise
from fedveil.parts.bound import AdaptiveClip, ProbedClip, within
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.parts.noise import Gaussian
from fedveil.parts.part import Tensors
from fedveil.recipe import Recipe
from fedveil.training.own_laws import refuse_other_laws
from fedveil.training.prepare import prepare
from tests.contracts import own_parts as own

RECIPE = algorithms.dp_fedavg(clip=0.7, rate=0.2, noise_multiplier=2.0)
DIM, CLIENTS = 18, 20


def refused(**parts: Any) -> str:
    with pytest.raises(UserError) as caught:
        refuse_other_laws(replace(RECIPE, **parts), torch.zeros(DIM), CLIENTS, 10)
    return str(caught.value)


def unfit(**parts: Any) -> str:
    with pytest.raises(UserError) as caught:
        replace(RECIPE, **parts).spent(DIM, CLIENTS, 10)
    return str(caught.value)


@dataclass(frozen=True)
class Drawn(Cohort):
    """Amplified as coins of `rate`; what is drawn is up to `how`."""

    how: str = "coins"
    rate: float = 0.2
    said: float = 0.2
    adjacency = "add-remove"
    independent = True

    def expected(self, population: int) -> float:
        return self.rate * population

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        coins = rng.random(population)
        match self.how:
            case "fixed":
                return np.sort(rng.choice(population, round(self.rate * population), replace=False))
            case "every fifth":
                return np.arange(int(rng.integers(5)), population, 5)
            case "three always":
                coins[:3] = 0.0
            case "ever more" if state and state["rounds"] > 0:
                coins *= self.rate / 0.9
        return np.flatnonzero(coins < self.rate)

    def initial_state(self, begin: Any) -> Tensors:
        return {"rounds": torch.tensor(0)}

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        return {"rounds": state["rounds"] + 1}

    def amplify(self, event: events.Round, population: int) -> events.Round:
        assert isinstance(event, events.GaussianRelease)
        return events.PoissonSampled(self.said, event)


def test_a_cohort_that_draws_as_it_says_passes() -> None:
    for cohort in (Drawn(), own.CoinFlips(0.2), own.CoinFlips(0.2, cap=1)):
        refuse_other_laws(replace(RECIPE, cohort=cohort), torch.zeros(DIM), CLIENTS, 10)


@pytest.mark.parametrize("rate", [1e-5, 0.001, 0.05, 0.5, 0.97])
@pytest.mark.parametrize("population", [7, 1000, 20_000])
def test_no_honest_cohort_of_any_size_is_refused(rate: float, population: int) -> None:
    recipe = replace(RECIPE, cohort=Drawn(rate=rate, said=rate))
    refuse_other_laws(recipe, torch.zeros(DIM), population, 10)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("fixed", "sizes vary by 0, but independent draws vary by 3.2"),
        ("every fifth", "sizes vary by 0, but"),
        ("three always", "but expects 4"),
        ("ever more", "but expects 4"),
    ],
)
def test_draws_without_the_law_of_their_theorem_are_refused(how: str, says: str) -> None:
    message = refused(cohort=Drawn(how))
    assert message.startswith("Cohort Drawn drew ")
    assert says in message


@dataclass(frozen=True)
class OneAlways(Cohort):
    """Four clients, of whom the first is always there."""

    adjacency = "replace-one"
    fixed = True

    def expected(self, population: int) -> float:
        return 4.0

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        return np.append(0, np.sort(1 + rng.choice(population - 1, 3, replace=False)))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        return FixedSize(4).amplify(event, population)


def test_a_client_that_is_always_drawn_is_not_amplified() -> None:
    assert "drew one unit in 64 of 64 rounds, but the rate is 0.2" in refused(cohort=OneAlways())


class Percent(Drawn):
    independent = False


@dataclass(frozen=True)
class Larger(FixedSize):
    """Amplified as if four were drawn of a larger population, or under a cap."""

    population: int = 10_000
    adjacency = "replace-one"
    fixed = True

    def amplify(self, event: events.Round, population: int) -> events.Round:
        assert isinstance(event, events.GaussianRelease)
        return events.SampledWithoutReplacement(1, self.population, event)


@pytest.mark.parametrize(
    ("cohort", "says"),
    [
        (Percent(), "If they are, set independent = True"),
        (Drawn(said=0.002), "amplifies as if 0.04 of 20 units were drawn, but expects 4"),
        (Larger(4), "has cap = None and draws from 10000 of 20"),
        (Larger(4, population=20), "amplifies as if 1 of 20 units were drawn, but expects 4"),
        (Larger(1, cap=2, population=20), "has cap = 2"),
    ],
)
def test_a_theorem_that_contradicts_the_cohort_s_own_answers_is_refused(cohort, says) -> None:
    assert says in unfit(cohort=cohort)


def test_coins_below_the_expected_number_are_refused() -> None:
    class Coins(Drawn):
        def coin(self, population: int) -> float:
            return 0.01

    with pytest.raises(UserError, match=r"in `coin` .* probability 0.01, but in `expected` .* 0.2"):
        replace(RECIPE, cohort=Coins()).participation_mixture(DIM, CLIENTS, 10)


def test_turns_amplify_noise_with_no_more_bands_than_rounds_between_them() -> None:
    """Their claim of ε = 0.86 over two rounds is at least 1.27 in truth."""
    two = events.Correlated(2.0, square_root(2), separation=1)
    with pytest.raises(UserError, match="at most separation = 1 bands"):
        events.CyclicSampled(0.2, two)
    assert events.CyclicSampled(0.2, replace(two, separation=2))


# Noise


@dataclass(frozen=True)
class Own(Noise):
    """N(0, (2·C)²) in each coordinate, unless it makes a mistake."""

    mistake: str = ""
    at: Any = "server"

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        z = torch.from_numpy(rng.normal(0, 2 * message.l2, message.dim))
        first = torch.arange(len(z)) == 0
        match self.mistake:
            case "a tenth":
                return 0.1 * z
            case "by arrivals":
                return z * arrived / expected
            case "one number":
                return z[:1].expand(len(z))
            case "one coordinate":
                return z * first
            case "much in one coordinate":
                return 5 * z * first
            case _:
                return z

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2 * message.l2 / sensitivity.l2)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("a tenth", "a standard deviation of 0.14"),
        ("by arrivals", "when 0 of 4 clients arrived"),
        ("one number", "the same noise to neighbouring"),
        ("one coordinate", "a standard deviation of 0.3"),
        ("much in one coordinate", "no noise to most coordinates"),
    ],
)
def test_noise_below_its_event_is_refused(mistake: str, says: str) -> None:
    assert says in refused(noise=Own(mistake))


def test_enough_noise_passes_in_any_dimension() -> None:
    for dim in (1, 2, 50, 20_000):
        refuse_other_laws(replace(RECIPE, noise=Own()), torch.zeros(dim), CLIENTS, 10)


def test_clients_whose_noise_counts_alone_bring_it_each() -> None:
    message = refused(noise=Own(at="client"), view="messages")
    assert "the noise of 4 clients together has a standard deviation of 1.4" in message
    assert "Account for noise_shares" in message


@dataclass(frozen=True)
class Differences(Gaussian):
    """z_k − z_{k−1}, accounted as independent."""

    at: Any = "server"

    def initial_state(self, begin: Any) -> Tensors:
        return {"last": torch.zeros(len(begin.x), dtype=torch.float64)}

    def step(
        self, message: Norms, arrived: int, expected: float, rng: Any, state: Tensors
    ) -> tuple[Tensor, Tensors]:
        z = super().draw(message, arrived, expected, rng)
        return z - state["last"], {"last": z}

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2 * message.l2 / sensitivity.l2)


class Fading(Differences):
    """Less noise in every round."""

    def initial_state(self, begin: Any) -> Tensors:
        return {"rounds": torch.tensor(1.0)}

    def step(
        self, message: Norms, arrived: int, expected: float, rng: Any, state: Tensors
    ) -> tuple[Tensor, Tensors]:
        z = self.draw(message, arrived, expected, rng) / state["rounds"]
        return z, {"rounds": state["rounds"] + 1}


def test_noise_that_depends_on_earlier_rounds_is_refused() -> None:
    everyone = {"cohort": Everyone()}
    assert "depends on the noise of earlier rounds" in refused(noise=Differences(2.0), **everyone)
    assert "a standard deviation of 0.7" in refused(noise=Fading(2.0), **everyone)


# Bounds


class Seen:
    largest = 1.0


@dataclass(frozen=True)
class Running(Bound):
    """Clips at half the largest norm so far, which other clients have had."""

    def norms(self, dim: int) -> Norms:
        return within(1.0, dim)

    def scale(self, norms: Tensor) -> Tensor:
        Seen.largest = max(Seen.largest, float(norms.max()))
        return 1 / norms.clamp_min(Seen.largest / 2)


def test_a_bound_that_remembers_other_updates_is_refused() -> None:
    assert "otherwise after one of norm 1e+06" in refused(bound=Running())


@dataclass(frozen=True)
class Counting(AdaptiveClip):
    """A threshold that follows the count without noise."""

    def joined(self, release: Any, *rest: Any) -> Any:
        return release

    def next(self, norm: float, short: int, arrived: int, *rest: Any) -> float:
        return norm * (0.5 + short / max(arrived, 1))


def test_a_threshold_that_follows_an_unaccounted_count_is_refused() -> None:
    assert "`joined` accounts for nothing" in refused(bound=Counting(0.7))
    assert Counting(0.7).released == ", whatever the bound's steps release"


@dataclass(frozen=True)
class Probing(Bound):
    """Its threshold is measured on the data."""

    norm: float = 0.0

    @property
    def awaits_probe(self) -> bool:  # type: ignore[override]
        return self.norm == 0

    def probed_at(self, mean_norm: float) -> Probing:
        return replace(self, norm=float(f"{mean_norm:.4g}"))

    def scale(self, norms: Tensor) -> Tensor:
        return (self.norm / norms.clamp_min(1e-30)).clamp_max(1.0)

    def norms(self, dim: int) -> Norms:
        return within(self.norm, dim)


class Honest(Probing):
    leaks = True


class Kept(Honest):
    def found_as(self, saved: Bound) -> Bound:
        return saved


def test_a_probed_threshold_is_a_leak_and_can_be_read_again(blobs: Federated) -> None:
    def ready(bound: Bound) -> Recipe:
        return prepare(replace(RECIPE, bound=bound), blobs, rounds=2, delta=1e-3).recipe

    with pytest.raises(
        UserError, match=r"Bound Probing has its threshold measured .* leaks = True"
    ):
        ready(Probing())
    with pytest.raises(UserError, match=r"Bound Honest became .* Define `found_as`"):
        ready(Honest())
    assert ready(Kept()).bound.leaks
    assert ready(ProbedClip()).bound.leaks


# What fails


class Failing(Poisson):
    """Reads a key that is not there."""

    independent = True

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        return np.array({}["mine"])


class Trusting(Poisson):
    """Relies on more clients than there are."""

    def min_honest(self, population: int) -> int:
        return 10**9


def test_what_a_part_raises_is_one_sentence_with_its_name(blobs: Federated) -> None:
    for cohort, says in (
        (Failing(0.2), "Cohort Failing failed with KeyError: 'mine'"),
        (Trusting(0.2), "Cohort Trusting relies on 1000000000 of 12 clients"),
    ):
        with pytest.raises(UserError, match=says):
            prepare(replace(RECIPE, cohort=cohort), blobs, rounds=2, delta=1e-3)
