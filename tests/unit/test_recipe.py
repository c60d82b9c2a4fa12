"""Recipes: broken ones are refused, the privacy chain says what runs."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fedveil import algorithms
from fedveil.accounting import events
from fedveil.errors import UserError
from fedveil.parts.bound import AdaptiveClip, Clip, Unbounded
from fedveil.parts.cohort import Everyone, FixedSize, Poisson
from fedveil.parts.discrete import Binomial, TruncatedDiscreteLaplace
from fedveil.parts.local import SGD
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.noise import Gaussian, NoNoise
from fedveil.parts.quantize import StochasticRound
from fedveil.parts.report import Difference, Model, PseudoGradient
from fedveil.parts.schedule import Constant
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.privacy.guarantee import VIEWS, guarantee
from fedveil.recipe import Recipe, View

LOCAL = SGD(Constant(0.1), steps=1)


@pytest.mark.parametrize(
    ("parts", "both"),
    [
        ({"noise": Gaussian(1.0)}, ("Unbounded", "Gaussian")),
        ({"bound": Unbounded(), "quantize": StochasticRound(4)}, ("Unbounded", "StochasticRound")),
        ({"bound": Clip(1.0), "noise": Binomial(4)}, ("NoQuantization", "Binomial")),
        (
            {"bound": Clip(1.0), "noise": TruncatedDiscreteLaplace(0.1, 5)},
            ("NoQuantization", "TruncatedDiscreteLaplace"),
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
        (
            {"bound": AdaptiveClip(), "noise": Gaussian(1.0, "client")},
            ("AdaptiveClip", "Gaussian at the clients"),
        ),
        (
            {"bound": Clip(1.0), "noise": Gaussian(1.0), "cohort": Poisson(0.5, honest=3)},
            ("Poisson with honest", "Gaussian at the server"),
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(parts, both) -> None:
    with pytest.raises(UserError) as refusal:
        Recipe("mine", LOCAL, **parts)
    assert all(name in str(refusal.value) for name in both)
    assert ". Use " in str(refusal.value)


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
    assert recipe.event(10, 100) == events.GaussianRelease(10.0)  # the server tops it up
    assert recipe.event(10, 100, "messages") == events.GaussianRelease(10.0 / 5)
    assert recipe.adjacency() == "zero-out"


def test_smooth_normalization_has_sensitivity_one() -> None:
    recipe = algorithms.fed_alpha_normec(rate=0.5, noise_multiplier=2.0)
    assert recipe.event(7, 100) == events.PoissonSampled(0.5, events.GaussianRelease(2.0))


def test_every_algorithm_s_cohort_and_accounting_share_one_adjacency() -> None:
    sampled = set()
    for method in algorithms.ALGORITHMS.values():
        required = {"clients": 5} if "clients" in method.__annotations__ else {}
        recipe = method(**required).planned(rounds=20, population=100)
        if not recipe.noise.calibrated:
            recipe = recipe.with_noise(2.0, dim=10, population=100, epsilon=1.0, delta=1e-5)
        event = recipe.event(10, 100, "models")
        for way in event.ways if isinstance(event, events.Proven) else (event,):
            kind = way.by if isinstance(way, events.Dominated) else way
            if isinstance(kind, events.PoissonSampled):
                assert recipe.adjacency("models") == "add-remove"
            if isinstance(kind, events.SampledWithoutReplacement):
                assert recipe.adjacency("models") == "replace-one"
            if isinstance(kind, events.Correlated):
                assert recipe.adjacency("models") == "zero-out"
            sampled.add((type(kind).__name__, recipe.name))
    kinds = {"PoissonSampled": {"dp_sgd", "dp_lsgd", "dp_scaffold"}, "Correlated": {"dp_ftrl"}}
    kinds["SampledWithoutReplacement"] = {
        "dp_fedavg", "dp_fedavg_adaptive", "dp_fedavg_coordinatewise", "dp_norm_fedavg",
        "dp_norm_fedavg_qtdl", "dp_norm_fedavg_binomial", "dp_norm_fedavg_discrete",
        "dp_norm_fedavg_secagg", "dp_fedadagrad", "dp_fedadam", "dp_fedyogi",
    }  # fmt: skip
    for kind, names in kinds.items():
        assert {name for found, name in sampled if found == kind} == names


def test_a_guarantee_names_unit_adjacency_view_and_rounds() -> None:
    recipe = algorithms.dp_sgd(clip=1.0, rate=0.1, noise_multiplier=2.0)
    sentence = guarantee(recipe, 10, 1000, 20, 1e-5).sentence()
    for word in ("per example", "add/remove", "Rounds: 20.", "(1,000)", "every released model"):
        assert word in sentence
    assert "too large" not in sentence


def test_a_large_delta_is_remarked_upon() -> None:
    recipe = algorithms.dp_sgd(clip=1.0, rate=0.1, noise_multiplier=2.0)
    assert "at least 1/1,000" in guarantee(recipe, 10, 1000, 20, 1e-3).sentence()


def test_no_guarantee_says_why() -> None:
    assert guarantee(algorithms.fedavg(), 10, 100, 5, 1e-5).sentence() == (
        "No privacy guarantee: updates are not clipped."
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
    assert algorithms.dp_fedavg(learning_rate=0.02).report == PseudoGradient()


def test_full_participation_of_fed_alpha_normec_is_everyone() -> None:
    assert algorithms.fed_alpha_normec(rate=1.0).cohort == Everyone()
    assert algorithms.fed_alpha_normec(rate=0.5).cohort == Poisson(0.5)


# Views


def test_the_sum_holds_the_noise_of_those_who_are_sure_to_come() -> None:
    recipe = algorithms.dp_fedavg(clip=2.0, clients=25, noise_multiplier=10.0, noise_at="client")
    assert recipe.event(10, 100, "sum") == events.GaussianRelease(10.0 / 2)
    fewer = dataclasses.replace(recipe, cohort=FixedSize(25, honest=9))
    assert fewer.event(10, 100, "sum") == events.GaussianRelease(10.0 / 2 * 3 / 5)
    random = dataclasses.replace(recipe, cohort=Poisson(0.25))
    assert random.event(10, 100, "sum") == events.GaussianRelease(10.0 / 5)
    promised = dataclasses.replace(recipe, cohort=Poisson(0.25, honest=16))
    assert promised.event(10, 100, "sum") == events.GaussianRelease(10.0 * 4 / 5)


def test_whoever_sees_more_never_has_a_smaller_epsilon() -> None:
    for recipe in (
        algorithms.dp_fedavg(clients=25, noise_multiplier=40.0, noise_at="client"),
        algorithms.dp_fedavg(rate=0.25, noise_multiplier=40.0, noise_at="client"),
        algorithms.dp_norm_fedavg_secagg(25, sigma=30.0, support=400),
        algorithms.dp_norm_fedavg_discrete(25, sigma=300.0, support=4000),
        algorithms.dp_norm_fedavg_binomial(25, levels=4, trials=20_000),
        algorithms.dp_norm_fedavg_qtdl(25, levels=4, alpha=0.01, support=4000),
    ):
        views = [guarantee(recipe, 10, 100, 5, 1e-5, view).epsilon for view in VIEWS]
        assert views == sorted(views), recipe.name
        assert views[0] < math.inf


def test_a_cap_that_the_adversary_keeps_counts_for_nothing() -> None:
    """In views sum and messages the server is the adversary, and may ask a client every round."""
    capped = algorithms.dp_norm_fedavg_secagg(25, sigma=30.0, support=400, cap=3)
    free = algorithms.dp_norm_fedavg_secagg(25, sigma=30.0, support=400)
    for view in ("sum", "messages"):
        found = guarantee(capped, 10, 100, 20, 1e-5, view)
        assert found.epsilon == guarantee(free, 10, 100, 20, 1e-5, view).epsilon
        kept = guarantee(free, 10, 100, 3, 1e-5, view).epsilon
        assert (found.cap, found.capped) == (3, kept)
        assert found.drawn is None  # a cap makes a fixed cohort's coins depend on each other
        told = "If clients themselves refuse to take part in more than 3 rounds, ε is"
        assert told in found.sentence()
    trusted = guarantee(capped, 10, 100, 20, 1e-5, "models")
    assert trusted.epsilon == guarantee(free, 10, 100, 3, 1e-5, "sum").epsilon
    assert (trusted.cap, trusted.capped) == (None, None)


@pytest.mark.parametrize("view", ["sum", "messages"])
def test_fair_coins_do_not_count_on_an_adversary_s_cap_either(view: View) -> None:
    capped = algorithms.dp_norm_fedavg_discrete(rate=0.1, sigma=300.0, support=4000, cap=4)
    free = algorithms.dp_norm_fedavg_discrete(rate=0.1, sigma=300.0, support=4000)
    assert capped.participation_mixture(10, 100, 50, view) == free.participation_mixture(
        10, 100, 50, view
    )
    assert capped.participation_mixture(10, 100, 50, "models").most == 4


def test_noise_is_calibrated_without_a_cap_that_the_adversary_keeps() -> None:
    capped, free = (
        calibrated(algorithms.dp_norm_fedavg_secagg(25, cap=cap), Budget(8.0, 1e-5), 20, 10, 100)
        for cap in (3, None)
    )
    assert capped.noise == free.noise


def test_a_cap_helps_the_models_too_where_it_is_worth_more_than_sampling() -> None:
    once = algorithms.dp_fedavg(rate=0.5, noise_multiplier=2.0, cap=1)
    spent = once.spent(10, 100, 50)
    assert isinstance(spent, events.Either)
    sampled = events.PoissonSampled(0.5, events.GaussianRelease(2.0))
    assert spent.ways[:2] == (
        events.Composed(sampled, 50),
        events.Composed(events.GaussianRelease(2.0), 1),
    )
    for way in spent.ways[2:]:  # until the cap is reached
        assert isinstance(way.event, events.Dominated)
        assert way.event.by == sampled
        assert way.count < 50
    single = algorithms.dp_fedavg(rate=1.0, noise_multiplier=2.0)
    assert guarantee(once, 10, 100, 50, 1e-5).epsilon == pytest.approx(
        guarantee(single, 10, 100, 1, 1e-5).epsilon, rel=1e-3
    )


def test_a_capped_cohort_of_fixed_size_is_not_amplified() -> None:
    recipe = algorithms.dp_fedavg(clients=10, noise_multiplier=3.0, cap=2)
    assert recipe.event(10, 100) == events.GaussianRelease(1.5)


def test_the_count_of_an_adaptive_clip_is_in_the_event() -> None:
    recipe = algorithms.dp_fedavg_adaptive(rate=0.1, noise_multiplier=3.0, count_noise=2.0)
    joint = (3.0**-2 + (2 * 2.0) ** -2) ** -0.5
    assert recipe.release(10, 100).ratio == pytest.approx(joint)  # type: ignore[union-attr]
    replaced = algorithms.dp_fedavg_adaptive(clients=10, noise_multiplier=3.0, count_noise=2.0)
    assert replaced.release(10, 100).ratio == pytest.approx(joint / 2)  # type: ignore[union-attr]


def test_a_round_counts_with_those_who_were_promised_only() -> None:
    recipe = algorithms.dp_norm_fedavg_secagg(rate=0.2, honest=15)
    assert recipe.least_arrivals(100) == 15
    assert algorithms.dp_norm_fedavg_secagg(20).least_arrivals(100) == 20
    assert algorithms.dp_fedavg(rate=0.2).least_arrivals(100) == 0
    with pytest.raises(UserError, match="there are only 10"):
        recipe.least_arrivals(10)


def test_silence_is_not_private_in_any_view() -> None:
    assert NoNoise().calibrated
    for view in VIEWS:
        assert math.isinf(guarantee(algorithms.clipped_fedavg(), 10, 100, 1, 1e-5, view).epsilon)


def test_residues_hold_the_sum_of_a_whole_cohort_and_are_no_wider_than_they_need() -> None:
    spare = []
    for clients, support in itertools.product((2, 3, 5, 8), (40, 57, 90, 127)):
        recipe = algorithms.dp_norm_fedavg_secagg(clients=clients, sigma=9.0, support=support)
        wire, message = recipe.wire(8, 20), recipe.message(8)
        assert wire is not None
        assert wire.modular
        most = clients * (int(message.steps.linf) + recipe.noise.max_magnitude(message))
        for total in (most, -most):
            assert wire.settle(np.array([total])).tolist() == [total]
        spare.append(2 ** (wire.bits - 1) / most)
    assert 1 < min(spare) < 2 < max(spare) <= 4


def test_noise_that_some_may_not_bring_is_not_amplified() -> None:
    """Whether the unit or one who brings no noise was drawn shows in the amount of noise."""
    trusted = dataclasses.replace(
        algorithms.dp_fedavg(noise_multiplier=2.0, noise_at="client"), cohort=FixedSize(25)
    )
    fewer = dataclasses.replace(trusted, cohort=FixedSize(25, honest=9))
    assert isinstance(trusted.event(7, 100), events.SampledWithoutReplacement)
    assert fewer.event(7, 100) == fewer.release(7, 100)
    assert fewer.adjacency() == "replace-one"
    at_server = dataclasses.replace(fewer, cohort=FixedSize(25), noise=Gaussian(2.0))
    assert at_server.hidden("models")
