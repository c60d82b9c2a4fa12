"""Mistakes in messages on their way."""

from __future__ import annotations

import pytest

from fedveil.recipe import Recipe
from tests.mutations.making import Mutation, line, named, require_caught
from tests.unit import test_recipe as wired

MUTATIONS = [
    Mutation(
        "residues of one bit too few",
        line(Recipe, "wire", ("math.ceil(math.log2(largest))", "int(math.log2(largest))")),
        "test_residues_hold_the_sum_of_a_whole_cohort",
        wired.test_residues_hold_the_sum_of_a_whole_cohort_and_are_no_wider_than_they_need,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
