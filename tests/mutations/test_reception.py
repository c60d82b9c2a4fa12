"""Mistakes in what a server takes in from outside."""

from __future__ import annotations

import pytest

from fedveil import reception, training

from .. import test_reception as received
from .making import Mutation, line, named, require_caught


def check_bound() -> None:
    for vector, norm in ((7.0, 1.0), (1.005, 1.0), (1 + 2.0**-20, 1.0), (0.5, 0.5)):
        received.test_the_server_bounds_again(received.filled(vector), norm)


MUTATIONS = [
    Mutation(
        "messages up to 1 % too long let through",
        line(reception.Reception, "_add_floats", ("norm <= limit", "norm <= 1.01 * limit")),
        "test_the_server_bounds_again",
        check_bound,
    ),
    Mutation(
        "long messages cut to 1 % more than the bound",
        line(reception.Reception, "_add_floats", ("Clip(limit)", "Clip(1.01 * limit)")),
        "test_the_server_bounds_again",
        check_bound,
    ),
    Mutation(
        "messages not bounded again",
        line(reception.Reception, "_add_floats", ("if norm <= limit else", "if True else")),
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
        ("    charging.reserve(self)\n", ""),
        (
            "    released = charging.check",
            "    charging.reserve(self)\n    released = charging.check",
        ),
    )
    mutation = Mutation("a round played before it is reserved", late, "served", check)
    require_caught(mutation, monkeypatch)
