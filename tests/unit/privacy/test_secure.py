"""Secure noise: the same recipe and guarantee, in whole numbers from secret streams."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.noise import RoundedGaussian
from fedveil.parts.quantize import TowardZero
from fedveil.privacy.secure import secured
from fedveil.random.streams import SecretKey
from fedveil.recipe import Recipe
from fedveil.training.checkpoint import checkpoint
from fedveil.training.prepare import prepare
from fedveil.training.start import finish, resume, start, train

RECIPES = [
    algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=2.0),
    algorithms.dp_norm_fedavg(clients=4, noise_multiplier=2.0),
    algorithms.dp_fedavg_adaptive(rate=0.5, noise_multiplier=2.0),
    algorithms.fed_alpha_normec(rate=0.5, noise_multiplier=2.0),
    algorithms.dp_sgd(clip=0.7, rate=0.2, noise_multiplier=2.0),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_guarantee_is_the_same(recipe) -> None:
    safe = secured(recipe)
    assert isinstance(safe.noise, RoundedGaussian)
    assert safe.spent(10, 100, 5) == recipe.spent(10, 100, 5)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_sum_moves_as_it_does_without(recipe, blobs: Federated) -> None:
    """Cutting to a grid of C/2²⁴ is all that changes of the clean sum."""
    plain = prepare(recipe, blobs, rounds=1)
    safe = prepare(secured(recipe), blobs, rounds=1)
    safe.spec = dataclasses.replace(safe.spec, key=plain.key)
    assert safe.step().signal == pytest.approx(plain.step().signal, rel=1e-5, abs=1e-6)


def test_what_is_released_lies_on_the_grid(blobs: Federated) -> None:
    """Seen through a coarse grid, which a float32 model can hold; a Gaussian's float is off it."""
    recipe = algorithms.dp_fedavg(
        clip=1.0, rate=0.5, noise_multiplier=1.0, learning_rate=1.0, server_rate=1.0
    )
    assert secured(recipe).quantize == TowardZero(2**24)
    coarse = dataclasses.replace(secured(recipe), quantize=TowardZero(2**8))

    def off_the_grid(one: Recipe) -> float:
        run = prepare(one, blobs, rounds=1)
        before = run.state.x.clone()
        run.step()
        steps = (before.double() - run.state.x.double()) * 6 * 2**8
        return float((steps - steps.round()).abs().max())

    assert off_the_grid(coarse) < 0.01
    assert off_the_grid(recipe) > 0.1
    assert isinstance(prepare(recipe, blobs, noise="secure").key, SecretKey)


def test_two_secure_runs_share_nothing(blobs: Federated) -> None:
    one, two = (train(RECIPES[0], blobs, rounds=2, seed=1, noise="secure") for _ in range(2))
    assert one.records[0].noise != two.records[0].noise
    assert one.statement.secure
    again, same = (train(RECIPES[0], blobs, rounds=2, seed=1) for _ in range(2))
    assert again.records[0].noise == same.records[0].noise
    assert not again.statement.secure


def test_the_key_is_not_in_the_run_s_directory(blobs: Federated, tmp_path) -> None:
    run = prepare(RECIPES[0], blobs, rounds=1, noise="secure")
    result = finish(start(run, tmp_path / "a"))
    assert isinstance(run.key, SecretKey)
    written = b"".join(file.read_bytes() for file in (tmp_path / "a").iterdir())
    assert run.spec.identity.encode() in written  # what is public is found
    for secret in (run.key._secret, run.key._secret.hex().encode()):
        assert secret not in written
    assert math.isfinite(result.guarantee.epsilon)


def test_a_secure_run_goes_on_with_a_new_key(blobs: Federated, tmp_path) -> None:
    first = prepare(RECIPES[0], blobs, rounds=3, noise="secure")
    start(first, tmp_path / "a").step()
    checkpoint(first)
    saved, noise = first.state.x, first.step().noise
    first.close()
    second = prepare(RECIPES[0], blobs, rounds=3, noise="secure")
    resume(second, tmp_path / "a")
    assert torch.equal(second.state.x, saved)
    assert second.step().noise != noise


def test_whole_number_noise_stays_as_it_is() -> None:
    recipe = algorithms.dp_norm_fedavg_secagg(5, sigma=3.0, support=20)
    assert secured(recipe) is recipe
    rounded = algorithms.dp_fedavg(levels=8, noise_multiplier=1.0)
    assert secured(rounded) is rounded


def test_what_cannot_be_made_secure_is_refused() -> None:
    with pytest.raises(UserError, match="only simulated"):
        secured(algorithms.dp_fedavg(noise_at="client"))
    with pytest.raises(UserError, match="adds no noise"):
        secured(algorithms.fedavg())


def test_another_kind_of_noise_is_refused(blobs: Federated) -> None:
    with pytest.raises(UserError, match="Did you mean 'secure'"):
        prepare(RECIPES[0], blobs, noise="secured")  # type: ignore[arg-type]
