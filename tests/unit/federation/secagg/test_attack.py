"""A random active server with a corrupt client learns no sum of too few honest clients."""

from __future__ import annotations

import pytest

from tests.unit.federation.secagg.attack import Attack, LentClient, UnevenLists, violations

ATTACKS = 100


def test_a_random_active_server_learns_no_small_sum() -> None:
    assert violations(range(ATTACKS)) == []


@pytest.mark.parametrize("kind", [UnevenLists, LentClient])
def test_a_server_with_a_plan_learns_no_small_sum(kind: type[Attack]) -> None:
    assert violations(range(3), kind) == []


def test_the_attacks_get_far() -> None:
    """Were every attack refused early, nothing would have been tested."""
    attacks = [Attack(seed).play() for seed in range(60)]
    assert sum(bool(attack.sums) for attack in attacks) >= 10
    assert sum(len(attack.signatures) > 1 for attack in attacks) >= 10
    assert sum(len({s.hash for s in attack.entered.values()}) > 1 for attack in attacks) >= 10
