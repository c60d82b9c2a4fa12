"""Mistakes in how user-defined parts are held to what they declare, and in our own parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedveil import loop
from fedveil import recipe as recipe_module
from fedveil.engines import bounding
from fedveil.errors import UserError
from fedveil.parts import bound, memory, noise, part, server
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.testing import check_bound, check_memory, check_server
from fedveil.testing.recipes import check_history, check_neighbours, check_streams
from fedveil.training import own_randomness
from tests.contracts import test_hostile_parts as hostile
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
from tests.unit.training.test_own_randomness import Entropy, Reseeded, Shuffled


def refused(rounds: int = 1, **parts: Any) -> None:
    try:
        prepared(replace(CLIPPED, **parts), rounds)
    except UserError:
        return
    raise AssertionError(f"{parts} were trained with")


def unready(**parts: Any) -> None:
    try:
        own_randomness.refuse_own_randomness(replace(CLIPPED, **parts), torch.zeros(6), 12, 4)
    except UserError:
        return
    raise AssertionError(f"{parts} were found ready")


def silo_refused(kind: type) -> None:
    try:
        hostile.silo_rounds(kind)
    except UserError:
        return
    raise AssertionError("a round was trained that is not accounted")


MUTATIONS = [
    Mutation(
        "a stranger's bound is not held to its norms",
        returning(bounding, "held", lambda rows, norms: rows),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, bound=TooLong())),
    ),
    Mutation(
        "a stranger's bound sees all rows",
        line(bounding, "of_each", ("not foreign(part) or not len(rows[0])", "True")),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, bound=Mixing())),
    ),
    Mutation(
        "a stranger's quantizer is not held to its norms",
        returning(loop, "quantized_row", lambda kind, row, to, rng: kind(row[None], to[0], rng)),
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
        lambda: refused(cohort=Drawing((1, 1, 3))),
    ),
    Mutation(
        "a stranger's draw may pass its cap",
        line(loop, "cohort_of", ("cohort.cap is not None and", "False and")),
        "a draw beyond the cap",
        lambda: refused(2, cohort=Drawing((1, 3), cap=1)),
    ),
    Mutation(
        "a stranger counts its own participations",
        line(loop, "_taken", ('LOOP if foreign(recipe.cohort) else "cohort"', '"cohort"')),
        "a draw beyond the cap",
        lambda: refused(2, cohort=hostile.Resetting()),
    ),
    Mutation(
        "aborted and completed rounds that the loop does not count",
        line(loop, "_after_draw", ("if LOOP in parts:", "if False:")),
        "a draw beyond the cap",
        lambda: refused(2, cohort=hostile.NotCounting(1.0, cap=1)),
    ),
    Mutation(
        "claims that a stranger inherits in silence",
        line(recipe_module, "_refuse_unanswering", ("if not foreign(definer) and", "if False and")),
        "an amplified draw of one's own",
        lambda: refused(cohort=hostile.Unasked(0.1)),
    ),
    Mutation(
        "only the claims of a stranger's first base",
        returning(part, "claims_of", lambda kind: set(kind.claims)),
        "test_a_draw_of_one_s_own_is_not_amplified_whatever_it_inherits",
        hostile.test_a_draw_of_one_s_own_is_not_amplified_whatever_it_inherits,
    ),
    Mutation(
        "answers of another part",
        returning(recipe_module, "definers_of", lambda kind, name: [object]),
        "a wrapped cohort",
        lambda: refused(cohort=hostile.Wrapped()),
    ),
    Mutation(
        "a silo's step that is accounted as in round 0",
        line(Recipe, "accounted_inside", ("if now != accounted:", "if False:")),
        "a silo that samples more in later rounds",
        lambda: silo_refused(hostile.Warming),
    ),
    Mutation(
        "a stranger's silos accounted by the first one",
        line(Recipe, "insides", ("(None if self._alike else silos)", "None")),
        "test_every_silo_of_a_stranger_is_accounted",
        hostile.test_every_silo_of_a_stranger_is_accounted,
    ),
    Mutation(
        "lost rounds of a stranger's correlated noise",
        line(Recipe, "release", ("self.lost or release.lost", "release.lost")),
        "test_statement_and_ledger_agree_on_lost_rounds",
        hostile.test_statement_and_ledger_agree_on_lost_rounds,
    ),
    Mutation(
        "a cap of correlated noise that the adversary keeps",
        line(Recipe, "release", ('if view == "models" else (1, None)', "")),
        "test_a_cap_does_not_count_where_the_server_is_the_adversary",
        hostile.test_a_cap_does_not_count_where_the_server_is_the_adversary,
    ),
    Mutation(
        "a stranger's separation",
        lambda patch: patch.setattr(Recipe, "separation", property(lambda r: r.cohort.separation)),
        "test_a_separation_of_one_s_own_does_not_count",
        hostile.test_a_separation_of_one_s_own_does_not_count,
    ),
    Mutation(
        "noise on messages without a grid",
        line(noise.Noise, "misfit", ("self.needs_grid or self.on_messages", "self.needs_grid")),
        "noise on float messages",
        lambda: refused(noise=hostile.OnMessages()),
    ),
    Mutation(
        "a stranger's noise that says itself whether it fits",
        line(
            recipe_module, "_refuse_misfits", ("if foreign(part) else None", "if False else None")
        ),
        "noise on float messages",
        lambda: refused(noise=hostile.OnMessages()),
    ),
    Mutation(
        "one number of noise for all coordinates",
        returning(loop, "refuse_other_shape", lambda part, found, wanted: None),
        "noise of one number",
        lambda: refused(noise=hostile.OneNumber()),
    ),
    Mutation(
        "the dimension that a stranger's bound declares",
        returning(recipe_module, "declared", lambda part, norms, dim: norms),
        "test_noise_is_drawn_for_all_coordinates_whatever_dimension_a_bound_declares",
        hostile.test_noise_is_drawn_for_all_coordinates_whatever_dimension_a_bound_declares,
    ),
    Mutation(
        "a sensitivity that a stranger's norms compute",
        returning(recipe_module, "declared", lambda part, norms, dim: norms),
        "test_norms_have_no_sensitivity_of_their_own",
        hostile.test_norms_have_no_sensitivity_of_their_own,
    ),
    Mutation(
        "norms that are asked for again when noise is drawn",
        line(loop, "conclude_round", ("total.message or recipe", "recipe")),
        "test_noise_is_drawn_for_the_norms_that_messages_were_held_to",
        hostile.test_noise_is_drawn_for_the_norms_that_messages_were_held_to,
    ),
    Mutation(
        "unclear norms that shorten nothing",
        line(bounding, "held", ("(share >= 1)", "~(share < 1)")),
        "test_what_is_not_known_to_be_short_enough_is_shortened",
        hostile.test_what_is_not_known_to_be_short_enough_is_shortened,
    ),
    Mutation(
        "a stranger's memory writes to the server's state",
        line(loop, "_server_side", ("not foreign(recipe.memory)", "True")),
        "test_a_memory_does_not_write_to_the_server_s_state",
        hostile.require_kept_apart,
    ),
    Mutation(
        "a stranger's memory writes to messages",
        returning(loop, "of_each", lambda kind, function, *rows: function(*rows)),
        "test_a_memory_does_not_write_to_a_message",
        hostile.test_a_memory_does_not_write_to_a_message,
    ),
    Mutation(
        "a stranger's quantizer that is not applied",
        returning(loop, "by_message", lambda kind: kind.rows_needed),
        "check_neighbours",
        lambda: check_neighbours(hostile.BROKEN["quantizer of bounded rows"]),
    ),
    Mutation(
        "a stranger's quantizer without rows",
        returning(bounding, "by_message", lambda kind: kind.rows_needed),
        "check_neighbours",
        lambda: check_neighbours(hostile.BROKEN["quantizer that is short in many dimensions"]),
    ),
    Mutation(
        "a stranger's tensor that is not copied",
        line(bounding, "of_each", ("function(*each).clone()", "function(*each)")),
        "check_neighbours",
        lambda: check_neighbours(hostile.BROKEN["bound with a buffer"]),
    ),
    Mutation(
        "a bound of a round that does not adapt",
        line(loop, "bound_of", ("if recipe.bound.adapts else recipe.bound", "")),
        "check_neighbours",
        lambda: check_neighbours(hostile.BROKEN["bound that changes in a round"]),
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
        "randomness of a part's own",
        returning(own_randomness, "repeatable", lambda draw: True),
        "unready",
        lambda: unready(noise=Entropy(3.0)),
    ),
    Mutation(
        "noise that is the same in every round",
        returning(own_randomness, "varied", lambda draw: True),
        "unready",
        lambda: unready(noise=Reseeded(3.0)),
    ),
    Mutation(
        "amplified clients that do not come from the round's stream",
        returning(own_randomness, "_refuse_constant_cohort", lambda *_: None),
        "unready",
        lambda: unready(cohort=Shuffled()),
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
