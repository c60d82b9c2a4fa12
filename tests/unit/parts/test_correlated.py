"""Correlated noise as it is streamed, and the cohorts that it relies on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import toeplitz

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.errors import UserError
from fedveil.federation.reception import Reception
from fedveil.loop import begin, cohort_of, run_round
from fedveil.parts.bound import AdaptiveClip, within
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.correlated import FINE, BandedNoise, BufferedNoise
from fedveil.parts.noise import Gaussian, Noise, RoundedGaussian
from fedveil.parts.part import Begin
from fedveil.parts.quantize import TowardZero
from fedveil.parts.spaced import CyclicPoisson, Separated
from fedveil.privacy import composition
from fedveil.privacy.secure import secured
from fedveil.privacy.statement import statement
from fedveil.random.samplers import rounded_gaussian
from fedveil.testing.replay import Scripted, normal_answers, people

BUFFERED = BufferedNoise(2.0, weights=(0.3, 0.4), decays=(0.5, 0.9))
NOISES = [BandedNoise(2.0, bands=3), BandedNoise(2.0, bands=7), BUFFERED]
GRID = TowardZero().norms(within(0.5, 4000))


def streamed(noise: Noise, rounds: int, dim: int, seed: int = 0) -> np.ndarray:
    """[rounds, dim]: the noise of each round."""
    message = replace(GRID, dim=dim)
    state = noise.initial_state(Begin(torch.zeros(dim), 8, rounds, np.random.default_rng(9)))
    found = []
    for k in range(rounds):
        drawn, state = noise.step(message, 3, 3.0, np.random.default_rng([seed, k]), state)
        found.append(drawn.double().numpy())
    return np.array(found)


def matrix(noise: Any, rounds: int) -> np.ndarray:
    return np.asarray(toeplitz(noise.column.first(rounds), np.eye(1, rounds)[0]))


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_streamed_noise_solves_for_independent_noise(noise: Any) -> None:
    """C·x = z, the noise that a Gaussian draws from the same streams."""
    x = streamed(noise, 6, 50)
    z = streamed(Gaussian(2.0), 6, 50)
    assert matrix(noise, 6) @ x == pytest.approx(z, abs=1e-9)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_the_covariance_is_that_of_the_inverse(noise: Any, integer: bool) -> None:
    """40,000 coordinates: each entry within six of its standard errors."""
    noise, rounds, dim = replace(noise, integer=integer), 5, 40_000
    x = streamed(noise, rounds, dim) * (GRID.grid if integer else 1.0)
    c = matrix(noise, rounds)
    wanted = np.linalg.inv(c.T @ c) * (2.0 * GRID.l2) ** 2
    deviations = np.sqrt(np.diag(wanted))
    error = 6 * np.sqrt((wanted**2 + np.outer(deviations, deviations) ** 2) / dim)
    assert (np.abs(x @ x.T / dim - wanted) <= error).all()


@pytest.mark.parametrize("noise", [*NOISES, Gaussian(2.0)], ids=repr)
def test_the_error_of_prefix_sums_is_the_drawn_one(noise: Any) -> None:
    rounds = 6
    sums = streamed(noise, rounds, 40_000).cumsum(axis=0)
    drawn = np.sqrt((sums**2).mean()) / noise.deviation(GRID)
    assert noise.prefix_error(rounds) == pytest.approx(drawn, rel=0.02)


def test_one_band_is_independent_noise_bit_for_bit() -> None:
    assert np.array_equal(
        streamed(BandedNoise(2.0, bands=1), 5, 40), streamed(Gaussian(2.0), 5, 40)
    )
    whole = BandedNoise(2.0, bands=1, integer=True)
    assert np.array_equal(streamed(whole, 5, 40), streamed(RoundedGaussian(2.0), 5, 40))


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_integers_are_rounded_once(noise: Any) -> None:
    """x_t is round(z_t − past), with the past rounded to 1/64 of a step."""
    x = streamed(replace(noise, integer=True), 6, 300)
    steps = FINE * 2.0 * GRID.l2 / (GRID.grid or 1.0)
    rngs = [np.random.default_rng([0, k]) for k in range(6)]
    z = np.array([rounded_gaussian(steps, 300, rng) for rng in rngs]) / FINE
    assert np.array_equal(x, np.rint(x))
    assert np.abs(matrix(noise, 6) @ x - z).max() <= 0.5 + 0.5 / FINE + 1e-6


@pytest.mark.parametrize("noise", NOISES, ids=repr)
def test_a_saved_state_continues_the_same_noise(noise: Any) -> None:
    """State is all that there is: a copy of the part takes over at any round."""
    message = replace(GRID, dim=30)
    state = noise.initial_state(Begin(torch.zeros(30), 8, 6, np.random.default_rng(9)))
    for k in range(6):
        if k == 4:
            noise, state = replace(noise), {name: leaf.clone() for name, leaf in state.items()}
        drawn, state = noise.step(message, 3, 3.0, np.random.default_rng([0, k]), state)
    assert np.array_equal(drawn.numpy(), streamed(noise, 6, 30)[-1])


# What it is accounted as


def spent(recipe: Any, rounds: int, clients: int = 60) -> float:
    return accounting.epsilon(recipe.spent(10, clients, rounds), 1e-5)


def test_epsilon_falls_with_separation_and_cap() -> None:
    recipe = algorithms.dp_ftrl(clients=5, separation=2, bands=2, noise_multiplier=4.0)
    apart = algorithms.dp_ftrl(clients=5, separation=6, bands=2, noise_multiplier=4.0)
    capped = algorithms.dp_ftrl(clients=5, separation=2, bands=2, cap=2, noise_multiplier=4.0)
    assert spent(recipe, 24) > spent(apart, 24) > spent(capped, 24)
    assert (recipe.max_participations(24), apart.max_participations(24)) == (12, 4)


def test_a_separation_and_bands_follow_from_the_population() -> None:
    recipe = algorithms.dp_ftrl(clients=7, noise_multiplier=4.0).planned(100, 60)
    assert (recipe.cohort, recipe.noise) == (Separated(7, 8), BandedNoise(4.0, bands=8))
    assert recipe.planned(50, 30) == recipe  # what is fixed stays
    with pytest.raises(UserError, match="follows from the rounds of a run"):
        algorithms.dp_ftrl(clients=7, noise_multiplier=4.0).spent(10, 60, 5)


def test_who_takes_part_is_not_hidden_and_zero_out_is_covered() -> None:
    recipe = algorithms.dp_ftrl(clients=5, separation=3, bands=3, noise_multiplier=4.0)
    assert not recipe.hidden("models")
    assert composition.covered(recipe, "models") == ("zero-out",)
    assert composition.covered(replace(recipe, cohort=Everyone()), "models") == (
        "zero-out",
        "add-remove",
    )
    text = statement(recipe, 10, 60, 9, 1e-5).text()
    assert "at least 3 rounds apart. Who takes part need not be secret." in text
    assert "banded square root, 3 bands" in text
    assert "Adjacency: zero-out" in text
    assert "who takes part stays secret" not in text
    assert "enforces the separation between the participations of a client" in text
    assert "The run's checkpoint, which contains past noise." in text


def test_turns_amplify_few_bands_only() -> None:
    turns = algorithms.dp_fedavg(
        rate=0.05, separation=4, bands=4, noise="banded", noise_multiplier=4.0
    )
    assert isinstance(turns.event(10, 60), events.CyclicSampled)
    assert turns.hidden("models")
    wide = replace(turns, noise=BandedNoise(4.0, bands=5))
    assert isinstance(wide.event(10, 60), events.Correlated)
    assert spent(turns, 24) < spent(replace(turns, cohort=Separated(3, 4)), 24) < spent(wide, 24)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"bound": AdaptiveClip(1.0)}, "past noise was drawn for another threshold"),
        ({"cohort": Poisson(0.1)}, "how often and how far apart"),
        ({"cohort": FixedSize(5, cap=2)}, "how often and how far apart"),
        ({"noise": Gaussian(2.0)}, "only correlated noise gains"),
    ],
    ids=str,
)
def test_what_is_not_proved_is_refused(part: dict[str, Any], why: str) -> None:
    recipe = algorithms.dp_ftrl(clients=5, separation=3, bands=3, noise_multiplier=4.0)
    with pytest.raises(UserError, match=why):
        replace(recipe, **part)


def test_an_own_cohort_is_not_believed() -> None:
    class Mine(Separated):
        """Might draw anybody."""

    recipe = algorithms.dp_ftrl(clients=5, separation=3, bands=3, noise_multiplier=4.0)
    with pytest.raises(UserError, match="how often and how far apart"):
        replace(recipe, cohort=Mine(5, 3))


def test_wrong_parameters_are_refused() -> None:
    for make in (
        lambda: algorithms.dp_fedavg(noise="blt", rate=0.1),
        lambda: algorithms.dp_fedavg(noise="banded", rate=0.1, cap=3),
        lambda: algorithms.dp_fedavg(noise="banded", clients=3, levels=8),
        lambda: algorithms.dp_fedavg_adaptive(noise="banded", clients=3),
        lambda: CyclicPoisson(0.3, 4),
        lambda: Separated(5, 3).expected(14),
        lambda: BandedNoise(bands=0),
        lambda: BandedNoise(bands=2, lost=-1),
    ):
        with pytest.raises(UserError):
            make()


def test_secure_noise_pays_for_its_rounding() -> None:
    recipe = algorithms.dp_ftrl(clients=5, separation=3, bands=3, noise_multiplier=4.0)
    plain, secure = spent(recipe, 12), spent(secured(recipe), 12)
    assert plain < secure < plain * (1 + 1e-5)


# Cohorts


@pytest.mark.parametrize("cohort", [Separated(4, 5), Separated(3, 4, cap=3), CyclicPoisson(0.1, 7)])
def test_participations_are_apart_and_at_most_the_cap(cohort: Any) -> None:
    recipe = replace(algorithms.dp_ftrl(bands=2, noise_multiplier=2.0), cohort=cohort)
    state = begin(recipe, torch.zeros(6), people(24), 60, key=3)
    engine, came = Scripted(normal_answers(24, 6)), np.zeros((60, 24), dtype=bool)
    for k in range(60):
        came[k, cohort_of(recipe, state, 24, key=3)] = True
        state, _ = run_round(recipe, state, people(24), engine, key=3)
    for client in came.T:
        assert (np.diff(np.flatnonzero(client)) >= cohort.separation).all()
        assert client.sum() <= (cohort.cap or 60)
    assert came.any(axis=0).all()


def test_a_federation_invites_nobody_too_early() -> None:
    """Who was invited counts, whether or not a message came back."""
    recipe = algorithms.dp_ftrl(clients=2, separation=4, bands=2, noise_multiplier=2.0)
    state, seen = begin(recipe, torch.zeros(6), people(8), 8, key=3), []
    for _ in range(8):
        reception = Reception(recipe, state, {"x": (6,)}, 8, key=3)
        seen.append({invitation.client for invitation in reception.invitations})
        state, _ = reception.close()
    for k in range(8):
        assert len(seen[k]) == 2
        assert not any(seen[k] & seen[j] for j in range(max(k - 3, 0), k))
