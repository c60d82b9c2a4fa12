"""Recipes: broken ones are refused, the privacy chain says what runs."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fedveil import algorithms
from fedveil.errors import UserError
from fedveil.parts.bound import Clip, Unbounded
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.local import SGD
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import Binomial, Gaussian, TruncatedDiscreteLaplace
from fedveil.parts.quantize import StochasticRound
from fedveil.parts.report import Difference, GradientScale, Model
from fedveil.parts.schedule import Constant
from fedveil.privacy import events
from fedveil.privacy.statement import guarantee
from fedveil.recipe import Recipe

LOCAL = SGD(Constant(0.1), steps=1)


@pytest.mark.parametrize(
    ("parts", "both"),
    [
        ({"noise": Gaussian(1.0)}, ("Unbounded", "Gaussian")),
        ({"bound": Unbounded(), "quantize": StochasticRound(4)}, ("Unbounded", "StochasticRound")),
        ({"bound": Clip(1.0), "noise": Binomial(4)}, ("Exact", "Binomial")),
        (
            {"bound": Clip(1.0), "noise": TruncatedDiscreteLaplace(0.1, 5)},
            ("Exact", "TruncatedDiscreteLaplace"),
        ),
        ({"report": Model(), "memory": ErrorCompensation(0.1)}, ("ErrorCompensation", "Model")),
        (
            {
                "bound": Clip(1.0),
                "noise": Gaussian(1.0),
                "cohort": FixedSize(3),
                "memory": ErrorCompensation(0.1),
            },
            ("participants", "FixedSize"),
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(parts, both) -> None:
    with pytest.raises(UserError) as refusal:
        Recipe("mine", LOCAL, **parts)
    assert all(name in str(refusal.value) for name in both)
    assert "use" in str(refusal.value)


def test_what_the_models_and_the_messages_show() -> None:
    recipe = algorithms.dp_fedavg(clip=2.0, rate=0.1, noise_multiplier=3.0)
    assert recipe.event(10, 100) == events.PoissonSampled(0.1, events.GaussianRelease(3.0))
    assert recipe.adjacency() == "add-remove"
    assert isinstance(recipe.event(10, 100, "messages"), events.NonPrivate)


def test_replacing_a_client_moves_the_sum_twice_as_far() -> None:
    recipe = algorithms.dp_fedavg(clip=2.0, clients=10, noise_multiplier=3.0)
    release = events.GaussianRelease(1.5)
    assert recipe.event(10, 100) == events.SampledWithoutReplacement(10, 100, release)
    assert recipe.adjacency() == "replace-one"


def test_a_message_with_its_own_share_of_noise() -> None:
    recipe = algorithms.dp_fedavg(clip=2.0, clients=25, noise_multiplier=10.0, noise_at="client")
    assert recipe.event(10, 100, "messages") == events.GaussianRelease(10.0 / 5 / 2)
    assert isinstance(recipe.event(10, 100), events.SampledWithoutReplacement)


def test_client_noise_in_a_cohort_of_random_size_is_not_amplified() -> None:
    """The amount of noise would tell how many came (docs/privacy.md, "Client-side noise")."""
    recipe = algorithms.dp_fedavg(rate=0.25, noise_multiplier=10.0, noise_at="client")
    assert recipe.event(10, 100) == events.GaussianRelease(10.0 / 5)
    assert recipe.event(10, 100) == recipe.event(10, 100, "messages")
    assert recipe.adjacency() == "zero-out"


def test_smooth_normalization_has_sensitivity_one() -> None:
    recipe = algorithms.fed_alpha_normec(rate=0.5, noise_multiplier=2.0)
    assert recipe.event(7, 100) == events.PoissonSampled(0.5, events.GaussianRelease(2.0))


def test_every_algorithm_s_cohort_and_accounting_share_one_adjacency() -> None:
    sampled = set()
    for method in algorithms.ALGORITHMS.values():
        required = {"clients": 5} if "clients" in method.__annotations__ else {}
        if "trials" in method.__annotations__:
            required["trials"] = 10
        recipe = method(**required)
        if not recipe.noise.settled:
            recipe = recipe.with_noise(2.0, dim=10, delta=1e-5)
        event = recipe.event(10, 100)
        if isinstance(event, events.PoissonSampled):
            assert recipe.adjacency() == "add-remove"
        if isinstance(event, events.SampledWithoutReplacement):
            assert recipe.adjacency() == "replace-one"
        sampled.add((type(event).__name__, recipe.name))
    kinds = {"PoissonSampled": {"dp_sgd", "dp_lsgd"}}
    kinds["SampledWithoutReplacement"] = {"dp_fedavg", "dp_norm_fedavg", "dp_norm_fedavg_qtdl"}
    for kind, names in kinds.items():
        assert {name for found, name in sampled if found == kind} == names


def test_a_guarantee_names_unit_adjacency_view_and_rounds() -> None:
    recipe = algorithms.dp_sgd(clip=1.0, rate=0.1, noise_multiplier=2.0)
    sentence = guarantee(recipe, 10, 1000, 20, 1e-5).sentence()
    for word in ("one example", "add-remove", "20 rounds", "1,000 examples", "released models"):
        assert word in sentence
    assert "too large" not in sentence


def test_a_large_delta_is_remarked_upon() -> None:
    recipe = algorithms.dp_sgd(clip=1.0, rate=0.1, noise_multiplier=2.0)
    assert "at least 1/1,000" in guarantee(recipe, 10, 1000, 20, 1e-3).sentence()


def test_no_guarantee_says_why() -> None:
    assert guarantee(algorithms.fedavg(), 10, 100, 5, 1e-5).sentence() == (
        "No privacy guarantee: a message is not bounded."
    )
    clipped = guarantee(algorithms.clipped_fedavg(clip=1.0), 10, 100, 5, 1e-5)
    assert "no noise" in clipped.sentence()
    assert math.isinf(clipped.epsilon)


def test_recipes_are_values() -> None:
    one, two = algorithms.dp_fedavg(clip=1.0), algorithms.dp_fedavg(clip=1.0)
    assert one == two
    assert one != dataclasses.replace(one, bound=Clip(2.0))
    assert "Clip(norm=1.0)" in repr(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.bound = Clip(3.0)  # type: ignore[misc]


def test_zhang_s_alg_3_is_dp_fedavg_with_differences_and_a_fixed_cohort() -> None:
    recipe = algorithms.dp_fedavg(clip=0.5, clients=80, report=Difference())
    assert recipe.cohort == FixedSize(80)
    assert recipe.server.rate == Constant(1.0)
    assert algorithms.dp_fedavg(learning_rate=0.02).server.rate == Constant(0.02)
    assert algorithms.dp_fedavg(learning_rate=0.02).report == GradientScale()


def test_full_participation_of_fed_alpha_normec_is_everyone() -> None:
    assert algorithms.fed_alpha_normec(rate=1.0).cohort == Everyone()
    assert algorithms.fed_alpha_normec(rate=0.5).cohort == Poisson(0.5)
