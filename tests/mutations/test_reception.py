"""Mistakes in what a server takes in from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedveil.engines import bounding
from fedveil.federation import reception
from fedveil.training import run as training
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.unit.federation import test_reception as received


def check_bound() -> None:
    for vector, norm in ((7.0, 1.0), (1.005, 1.0), (1 + 2.0**-20, 1.0), (0.5, 0.5)):
        received.test_the_server_bounds_again(received.filled(vector), norm)


def held_with(change: tuple[str, str]) -> Callable[[Any], None]:
    """The server shortens by another rule than the loop."""

    def make(patch: pytest.MonkeyPatch) -> None:
        mutate(patch, bounding, "held", change)
        patch.setattr(reception, "held", bounding.held)

    return make


MUTATIONS = [
    Mutation(
        "messages up to 1 % too long let through",
        held_with(("(share >= 1)", "(share >= 1 / 1.01)")),
        "test_the_server_bounds_again",
        check_bound,
    ),
    Mutation(
        "long messages cut to 1 % more than the bound",
        held_with(("MARGIN * share", "1.01 * share")),
        "test_the_server_bounds_again",
        check_bound,
    ),
    Mutation(
        "messages not bounded again",
        returning(reception, "held", lambda rows, norms: rows),
        "test_the_server_bounds_again",
        check_bound,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)


def test_a_round_played_before_it_is_reserved_is_caught(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        received.test_a_served_round_is_reserved_in_the_ledger_before_anyone_is_asked(
            tmp_path_factory.mktemp("served")
        )

    late = line(
        training.Training,
        "step",
        ("    charging.reserve(enrolment, self.spec, round)\n", ""),
        (
            "    released = charging.check",
            "    charging.reserve(enrolment, self.spec, round)\n    released = charging.check",
        ),
    )
    mutation = Mutation("a round played before it is reserved", late, "served", check)
    require_caught(mutation, monkeypatch)
