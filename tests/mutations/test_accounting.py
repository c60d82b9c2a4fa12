"""Mistakes in the accounting of single runs, each caught by integration or enumeration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedveil.accounting import accountant as accounting
from fedveil.accounting import losses, sampled
from tests.mutations.making import Mutation, line, named, require_caught
from tests.unit.accounting import test_accounting as integrated
from tests.unit.accounting import test_losses as enumerated


def wrong_curve(name: str, old: str, new: str) -> Callable[[Any], None]:
    change = line(sampled, name, (old, new))

    def make(patch: pytest.MonkeyPatch) -> None:
        change(patch)
        accounting._one_round.cache_clear()  # what was computed before the mistake

    return make


def check_round(eps: float) -> Callable[[], None]:
    def check() -> None:
        integrated.test_one_fixed_size_round_is_its_dominating_curve(eps)

    return check


def nothing_aside(patch: pytest.MonkeyPatch) -> None:
    real = losses.Renyi.get_delta_for_epsilon

    def delta(self: losses.Renyi, epsilon: float) -> float:
        return real(replace(self, escape=0.0, distance=0.0), epsilon)

    patch.setattr(losses.Renyi, "get_delta_for_epsilon", delta)


MUTATIONS = [
    Mutation(
        "fixed-size rounds accounted in one direction alone",
        wrong_curve(
            "without_replacement",
            "(curve, curve",
            "(curve, functools.partial(addition_curve, ratio, rate)",
        ),
        "test_one_fixed_size_round_is_its_dominating_curve",
        check_round(-0.1),
    ),
    Mutation(
        "fixed-size rounds amplified twice",
        wrong_curve("removal_curve", "rate * gaussian", "rate**2 * gaussian"),
        "test_one_fixed_size_round_is_its_dominating_curve",
        check_round(0.1),
    ),
    Mutation(
        "rare numbers of participations left out",
        line(
            accounting,
            "_attendance",
            ("np.append(times, most), np.append(chances, rare)", "times, chances"),
        ),
        "test_counts_too_rare_to_be_told_apart_are_put_at_the_cap",
        lambda: enumerated.test_counts_too_rare_to_be_told_apart_are_put_at_the_cap(60.0),
    ),
    Mutation(
        "what Rényi bounds set aside left out of δ",
        nothing_aside,
        "test_what_renyi_sets_aside_is_added",
        enumerated.test_what_renyi_sets_aside_is_added,
    ),
]


@pytest.fixture(autouse=True)
def fresh_rounds() -> Any:
    """No test sees what another one's mistake computed."""
    accounting._one_round.cache_clear()
    yield
    accounting._one_round.cache_clear()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
