"""A random active server with a corrupt client learns no sum of too few honest clients."""

from __future__ import annotations

import pytest

from tests.unit.federation.secagg.attack import Attack, LentClient, UnevenLists, violations

ATTACKS = 100


@pytest.fixture(scope="module")
def attacks() -> list[Attack]:
    return [Attack(seed).play() for seed in range(ATTACKS)]


def test_a_random_active_server_learns_no_small_sum(attacks: list[Attack]) -> None:
    assert list(violations(attacks)) == []


@pytest.mark.parametrize("kind", [UnevenLists, LentClient])
def test_a_server_with_a_plan_learns_no_small_sum(kind: type[Attack]) -> None:
    assert list(violations(kind(seed).play() for seed in range(3))) == []


def test_the_attacks_get_far(attacks: list[Attack]) -> None:
    """Were every attack refused early, nothing would have been tested."""
    some = attacks[:60]
    assert sum(bool(attack.sums) for attack in some) >= 10
    assert sum(len(attack.signatures) > 1 for attack in some) >= 10
    assert sum(len({s.hash for s in attack.entered.values()}) > 1 for attack in some) >= 10
