"""Planted bugs are noticed, every one; correct recipes raise no alarm, not one."""

from __future__ import annotations

import pytest

from fedveil.algorithms import ALGORITHMS
from fedveil.data.catalog import load
from fedveil.data.federated import Federated
from fedveil.data.partition import Iid
from tests.contracts import examples
from tests.statistics.audit.planted import (
    LISTED,
    MORE,
    PLANTED,
    Planted,
    by_audit,
    by_noise,
    noticed,
)

# An audit has no canaries inside silos (tests/unit/training/test_silos.py).
PRIVATE = {name: recipe for name, recipe in examples.PRIVATE.items() if not recipe.by_record}

SEEN_BY = {  # under every seed; the contract suite is asked about those that nobody else sees
    "audit of a run": {
        "noise halved", "clip skipped", "weights by example count", "noise of σ/√d",
        "noise of the mean on the sum", "a bound for each layer", "clip by the mean length",
        "the clients' memory released", "a quantizer beyond its bound",
        "the first clients in every round", "amplified at half the rate",
    },
    "test of its noise": {
        "noise halved", "reused noise", "TDL with the paper's m sold as private",
        "no noise on half of the model", "cut Laplace noise accounted as Gaussian",
        "one seed for all clients' noise",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def crowd() -> Federated:
    return load("digits").split(Iid(100))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.mistake)
def test_a_planted_bug_is_noticed(planted: Planted, crowd: Federated) -> None:
    watchers = [who for who, seen in SEEN_BY.items() if planted.mistake in seen]
    found = noticed(planted, crowd, watchers or ["contract suite"])
    assert all(found.values()), f"not noticed: {planted.mistake}, {found}"


def test_the_list_and_ten_more_are_planted() -> None:
    assert len(LISTED) == 10
    assert len(MORE) >= 10
    assert {planted.mistake for planted in PLANTED} >= set().union(*SEEN_BY.values())


@pytest.mark.parametrize("name", PRIVATE)
def test_a_correct_recipe_raises_no_alarm(name: str, crowd: Federated) -> None:
    assert not by_audit(PRIVATE[name], crowd, rounds=4)


def test_correct_recipes_are_those_of_all_private_algorithms() -> None:
    made = {recipe.name for recipe in PRIVATE.values()}
    assert made == {
        name
        for name in ALGORITHMS
        if name.startswith("dp_") or "normec" in name or name == "clip21_sgd2m"
    }
    assert len(PRIVATE) >= 12


@pytest.mark.parametrize("name", ["dp_fedavg", "dp_norm_fedavg_discrete", "dp_fedavg secured"])
def test_the_noise_of_a_correct_recipe_raises_no_alarm(name: str) -> None:
    assert not by_noise(PRIVATE[name])
