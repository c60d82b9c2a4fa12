"""Mistakes in how user-defined parts are held to what they declare, and in our own parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedveil import loop
from fedveil.engines import bounding
from fedveil.errors import UserError
from fedveil.parts import bound, memory, server
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.testing import check_bound, check_memory, check_server
from fedveil.testing.recipes import check_history, check_neighbours, check_streams
from tests.contracts.test_own_parts import (
    CLIPPED,
    Drawing,
    Gossip,
    Mixing,
    Outwards,
    TooLong,
    prepared,
)
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.parts import test_server


def refused(cohort: Drawing, rounds: int) -> None:
    try:
        prepared(replace(CLIPPED, cohort=cohort), rounds)
    except UserError:
        return
    raise AssertionError(f"{cohort} was trained with")


MUTATIONS = [
    Mutation(
        "a stranger's bound is not held to its norms",
        returning(bounding, "held", lambda rows, norms: rows),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, bound=TooLong())),
    ),
    Mutation(
        "a stranger's bound sees all rows",
        line(bounding, "_each", ("not foreign(bound) or not len(rows)", "True")),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, bound=Mixing())),
    ),
    Mutation(
        "a stranger's quantizer is not held to its norms",
        returning(loop, "quantized_row", lambda kind, row, norms, rng: kind(row[None], norms, rng)),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, quantize=Outwards(64))),
    ),
    Mutation(
        "a stranger's memory sees all clients",
        returning(loop, "of_each", lambda kind, function, *rows: function(*rows)),
        "check_history",
        lambda: check_history(replace(CLIPPED, memory=Gossip())),
    ),
    Mutation(
        "a client may be drawn twice",
        returning(loop, "_refuse_repeated", lambda part, drawn, population: None),
        "a draw that is no set",
        lambda: refused(Drawing((1, 1, 3)), 1),
    ),
    Mutation(
        "a stranger's draw may pass its cap",
        line(loop, "cohort_of", ("cohort.cap is not None and", "False and")),
        "a draw beyond the cap",
        lambda: refused(Drawing((1, 3), cap=1), 2),
    ),
    Mutation(
        "first states drawn from the streams of the first round",
        returning(loop, "_first_stream", lambda key, slot: stream(key, 0, slot)),
        "check_streams",
        lambda: check_streams(CLIPPED),
    ),
    Mutation(
        "coordinates cut above the limit",
        line(bound.ClipCoordinates, "rows", ("MARGIN * self.limit", "1.01 * self.limit")),
        "check_bound",
        lambda: check_bound(bound.ClipCoordinates(0.3)),
    ),
    Mutation(
        "an L2 norm of one coordinate for all of them",
        line(bound.ClipCoordinates, "norms", ("l2=self.limit * root", "l2=self.limit")),
        "check_bound",
        lambda: check_bound(bound.ClipCoordinates(0.3)),
    ),
    Mutation(
        "a memory of the mean message",
        line(memory.ErrorCompensation, "learn", ("* message", "* message.mean(0)")),
        "check_memory",
        lambda: check_memory(memory.ErrorCompensation(0.3)),
    ),
    Mutation(
        "momentum updated in place",
        line(
            server.Momentum,
            "step",
            ('self.momentum * state["momentum"] +', 'state["momentum"].mul_(self.momentum) +'),
        ),
        "check_server",
        lambda: check_server(server.Momentum()),
    ),
    Mutation(
        "moments that are not kept",
        line(server._Adaptive, "step", ('"first": first, "second": second', '"first": first')),
        "check_server",
        lambda: check_server(server.Adam()),
    ),
    Mutation(
        "a second moment below zero",
        line(server._Adaptive, "step", ("square.clamp_min(0).sqrt()", "square.sqrt()")),
        "check_server",
        lambda: check_server(server.Yogi(remove_noise=True)),
    ),
    Mutation(
        "the noise of a sum removed from a mean",
        line(Recipe, "noise_of_mean", ("or 0.0) / expected", "or 0.0)")),
        "test_the_variance_that_is_removed_is_that_of_the_loop_s_noise",
        test_server.test_the_variance_that_is_removed_is_that_of_the_loop_s_noise,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
