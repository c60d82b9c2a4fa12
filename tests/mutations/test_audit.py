"""Mistakes that would let an audit see less, or something else, than the run shows."""

from __future__ import annotations

import pytest

from fedveil.audit import canaries
from tests.mutations.making import Mutation, line, named, require_caught
from tests.unit.audit import test_canaries as canary

MUTATIONS = [
    Mutation(
        "canaries with the same directions in every round",
        line(canaries.Canaries, "directions", ("self.key, round,", "self.key, 0,")),
        "test_directions_are_unit_vectors_drawn_afresh_and_found_again",
        canary.test_directions_are_unit_vectors_drawn_afresh_and_found_again,
    ),
    Mutation(
        "canaries drawn from the noise's stream",
        line(canaries.Canaries, "directions", ('"canaries"', '"noise"')),
        "test_canaries_draw_from_streams_of_their_own",
        canary.test_canaries_draw_from_streams_of_their_own,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
