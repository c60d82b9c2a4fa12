"""Mistakes in how user-defined parts are held to what they declare, and in our own parts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import loop, synthetic
from fedveil import recipe as recipe_module
from fedveil.engines import asking, bounding
from fedveil.errors import UserError
from fedveil.ledger import charging
from fedveil.parts import bound, cohort, memory, noise, part, server, values
from fedveil.privacy.answers import ChangedError
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.serialization import code
from fedveil.testing import check_bound, check_memory, check_noise, check_server
from fedveil.testing.recipes import check_history, check_neighbours, check_streams
from fedveil.training import own_laws, own_randomness
from fedveil.training import run as training_run
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
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
from tests.unit.algorithms import test_own_algorithm
from tests.unit.engines import test_asking as asked
from tests.unit.parts import test_server, test_values
from tests.unit.privacy import test_answers
from tests.unit.training import test_own_laws as laws
from tests.unit.training.test_own_randomness import Entropy, Reseeded, Shuffled


def refused(rounds: int = 1, **parts: Any) -> None:
    try:
        prepared(replace(CLIPPED, **parts), rounds)
    except UserError:
        return
    raise AssertionError(f"{parts} were trained with")


def unbuilt(**parts: Any) -> None:
    try:
        replace(CLIPPED, **parts)
    except UserError:
        return
    raise AssertionError(f"{parts} made a recipe")


def unaccounted(**parts: Any) -> None:
    try:
        replace(CLIPPED, **parts).spent(6, 100, 10)
    except UserError:
        return
    raise AssertionError(f"{parts} were accounted")


def unready(**parts: Any) -> None:
    try:
        own_randomness.refuse_own_randomness(replace(CLIPPED, **parts), torch.zeros(6), 12, 4)
    except UserError:
        return
    raise AssertionError(f"{parts} were ready")


def unlawful(**parts: Any) -> None:
    laws.Seen.largest = 1.0
    try:
        own_laws.refuse_other_laws(replace(laws.RECIPE, **parts), torch.zeros(18), 20, 4)
    except UserError:
        return
    raise AssertionError(f"{parts} were accepted")


def silo_refused(kind: type) -> None:
    try:
        hostile.silo_rounds(kind)
    except UserError:
        return
    raise AssertionError("a round was trained that is not accounted")


def seeing_all(owner: ModuleType) -> Callable[[Any], None]:
    """All rows at once, and not copied."""
    return returning(owner, "of_each", lambda part, function, *rows, **options: function(*rows))


def changed(ask: Callable[[Training], Any]) -> Callable[[], None]:
    """A guard: what is asked of a run is refused once one of its parts has changed."""

    def check() -> None:
        recipe = replace(test_answers.BASE, noise=test_answers.Telling(1.0))
        data = synthetic(clients=4, examples=3, features=2, classes=2)
        training = prepare(recipe, data, rounds=2, engine="loop")
        with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
            training.enrol(Path(place) / "ledger.sqlite")
            patch.setattr(test_answers.Telling, "scale", 9.0)
            try:
                ask(training)
            except ChangedError:
                return
        raise AssertionError("a part has changed, and nothing was refused")

    return check


def enrolled(training: Training) -> charging.Enrolment:
    assert training.progress.enrolment is not None
    return training.progress.enrolment


def moved() -> None:
    """A round at a threshold at which it releases more than is accounted is refused."""
    recipe = replace(test_answers.BASE, bound=hostile.Warm(), noise=test_answers.OnlyInTwo())
    data = synthetic(clients=4, examples=3, features=2, classes=2)
    training = prepare(recipe, data, rounds=2, engine="loop")
    with tempfile.TemporaryDirectory() as place:
        training.enrol(Path(place) / "ledger.sqlite")
        training.step()
        try:
            training.step()
        except ChangedError:
            return
    raise AssertionError("a round was trained that is not accounted")


MUTATIONS = [
    Mutation(
        "rounds reserved for parts that have changed",
        line(charging, "reserve", ("    terms.require_unchanged()\n", "")),
        "a reserve",
        changed(lambda training: charging.reserve(enrolled(training), training.spec, 0)),
    ),
    Mutation(
        "rounds published of parts that have changed",
        line(charging, "check", ("    enrolment.terms.require_unchanged()\n", "")),
        "the check before a round is published",
        changed(lambda training: charging.check(enrolled(training), 0, training.state)),
    ),
    Mutation(
        "a statement of parts that have changed",
        line(charging, "charged", ("    terms.require_unchanged()\n", "")),
        "a statement",
        changed(Training.statement),
    ),
    Mutation(
        "runs enrolled with parts that have changed",
        line(charging, "enrol", ("    terms.require_unchanged()\n", "")),
        "an enrolment",
        changed(Training.enrol),
    ),
    Mutation(
        "thresholds that are not accounted",
        line(training_run.Training, "step", ("    self._require_accounted()\n", "")),
        "a round at another threshold",
        moved,
    ),
    Mutation(
        "a stranger's bound is not held to its norms",
        returning(bounding, "held", lambda rows, norms: rows),
        "check_neighbours",
        lambda: check_neighbours(replace(CLIPPED, bound=TooLong())),
    ),
    Mutation(
        "a stranger's bound sees all rows",
        seeing_all(bounding),
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
        seeing_all(loop),
        "check_history",
        lambda: check_history(replace(CLIPPED, memory=Gossip())),
    ),
    Mutation(
        "a client may be drawn twice",
        returning(asking, "_a_set", lambda part, drawn, population: drawn),
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
        lambda: refused(2, cohort=hostile.NotCounting(1.0, cap=1)),
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
        "fields that do not identify a part",
        returning(recipe_module, "refuse_unplain", lambda part: None),
        "an array of limits",
        lambda: unbuilt(bound=test_values.Each(np.ones(2))),
    ),
    Mutation(
        "a part that its fields do not build again",
        returning(values, "_refuse_changed", lambda part: None),
        "a field that is divided by 100 each time",
        lambda: unbuilt(bound=test_values.Percent(150.0)),
    ),
    Mutation(
        "settings beside the fields of a part",
        returning(values, "_refuse_hidden", lambda part: None),
        "limits beside a norm",
        lambda: unbuilt(bound=test_values.Hiding(1.0, (1.0, 2.0))),
    ),
    Mutation(
        "values of a function that are not in the key of its class",
        returning(code, "_captured", lambda kind: []),
        "test_classes_of_one_function_are_told_apart_by_what_they_captured",
        test_own_algorithm.test_classes_of_one_function_are_told_apart_by_what_they_captured,
    ),
    Mutation(
        "sampling that is proven for other neighbours",
        returning(Recipe, "_proven", lambda self, event, *given: event),
        "test_sampling_counts_only_for_the_neighbours_that_it_is_proven_for",
        lambda: unaccounted(cohort=hostile.Amplified()),
    ),
    Mutation(
        "coins that are claimed for a cohort of a fixed size",
        line(Recipe, "_proven", ("if sized != self.cohort.fixed:", "if False:")),
        "a fixed size that is sampled by coins",
        lambda: unaccounted(cohort=hostile.Amplified(adjacency="add-remove", poisson=True)),
    ),
    Mutation(
        "an event of noise that is not private",
        line(Recipe, "release", ("not self.private and", "False and")),
        "test_a_guarantee_is_stated_for_no_run_that_is_not_charged",
        hostile.test_a_guarantee_is_stated_for_no_run_that_is_not_charged,
    ),
    Mutation(
        "a moving bound with noise of another kind than Gaussian",
        returning(bound, "alike", lambda one, other: not hasattr(one, "ratio") or one == other),
        "Laplace noise of one scale",
        lambda: unbuilt(bound=hostile.Warm(), noise=hostile.Laplace(1.0, 1.0)),
    ),
    Mutation(
        "a moving bound at two thresholds only",
        returning(bound, "LEVELS", (1.0, 10.0)),
        "Laplace noise up to a bound",
        lambda: unbuilt(bound=hostile.Warm(), noise=hostile.Laplace(most=1000.0)),
    ),
    Mutation(
        "a bound that does not say that it adapts",
        returning(bound.Bound, "_unused", lambda self: None),
        "a bound of a round",
        lambda: unbuilt(bound=hostile.Later(0.7)),
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
        line(Recipe, "_noisy", ("self.lost or release.lost", "release.lost")),
        "test_statement_and_ledger_agree_on_lost_rounds",
        hostile.test_statement_and_ledger_agree_on_lost_rounds,
    ),
    Mutation(
        "a cap of correlated noise that the adversary keeps",
        line(Recipe, "_noisy", ('if view == "models" else (1, None)', "")),
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
        returning(asking, "refuse_other_shape", lambda *answer: None),
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
        line(loop, "_server_side", ("copied(kept) if foreign(recipe.memory) else kept", "kept")),
        "test_a_memory_does_not_write_to_the_server_s_state",
        hostile.require_kept_apart,
    ),
    Mutation(
        "a stranger's memory writes to messages",
        seeing_all(loop),
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
        returning(asking, "copied", lambda value: value),
        "check_neighbours",
        lambda: check_neighbours(hostile.BROKEN["bound with a buffer"]),
    ),
    Mutation(
        "a server step in the tensors of the loop",
        line(asking, "ask", ("(*copied(given))", "(*given)")),
        "test_a_part_that_writes_to_what_it_is_given_changes_nothing_else",
        lambda: asked.test_a_part_that_writes_to_what_it_is_given_changes_nothing_else("server"),
    ),
    Mutation(
        "an answer that the part still holds",
        line(asking, "ask", ("return copied(getattr", "return (getattr")),
        "test_a_part_keeps_no_tensor_of_the_loop",
        asked.test_a_part_keeps_no_tensor_of_the_loop,
    ),
    Mutation(
        "noise in float32",
        returning(asking, "refuse_unfit_noise", lambda noise, drawn, dim: None),
        "noise of few digits",
        lambda: refused(noise=asked.WRONG["noise in float32"][0].noise),
    ),
    Mutation(
        "a draw from a global random generator",
        returning(asking, "refusing_draws", lambda part: contextlib.nullcontext()),
        "test_every_part_is_held_to_its_own_stream",
        lambda: refused(bound=asked.DRAWING["Bound"].bound),
    ),
    Mutation(
        "noise that no stream repeats",
        returning(noise, "normals", lambda dim, rng: np.random.default_rng().normal(size=dim)),
        "check_noise",
        lambda: check_noise(noise.Gaussian(2.0)),
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
        "sampling at a smaller rate than the cohort's own",
        line(recipe_module, "contradiction", ("if drawn >= expected:", "if True:")),
        "unaccounted",
        lambda: unaccounted(cohort=laws.Drawn(said=0.002)),
    ),
    Mutation(
        "coins of units that may depend on each other",
        line(recipe_module, "contradiction", ("if not cohort.independent:", "if False:")),
        "unaccounted",
        lambda: unaccounted(cohort=laws.Percent()),
    ),
    Mutation(
        "cohorts whose sizes have another variance",
        line(own_laws, "_check_sizes", ("not 0.2 < np.var(sizes) / spread < 4", "False")),
        "unlawful",
        lambda: unlawful(cohort=laws.Drawn("fixed")),
    ),
    Mutation(
        "a cohort that one client is always in",
        line(own_laws, "_check_sizes", ("if taken.max() >", "if 0 >")),
        "unlawful",
        lambda: unlawful(cohort=laws.OneAlways()),
    ),
    Mutation(
        "a cohort that is judged by its first round alone",
        line(own_laws, "_check_cohort", ("range(5)", "range(0)")),
        "unlawful",
        lambda: unlawful(cohort=laws.Drawn("ever more")),
    ),
    Mutation(
        "noise below its event",
        line(own_laws, "_check_amount", ("if found < ENOUGH * needed:", "if False:")),
        "unlawful",
        lambda: unlawful(noise=laws.Own("a tenth")),
    ),
    Mutation(
        "one number for all coordinates",
        line(own_laws, "_check_amount", ("if message.dim > 1 and", "if False and")),
        "unlawful",
        lambda: unlawful(noise=laws.Own("one number")),
    ),
    Mutation(
        "noise of the sum that counts for each client",
        returning(own_laws, "_check_shares", lambda *_: None),
        "unlawful",
        lambda: unlawful(noise=laws.Own(at="client"), view="messages"),
    ),
    Mutation(
        "noise that takes back that of the round before",
        line(own_laws, "_check_later_rounds", ("if not torch.equal(one, other):", "if False:")),
        "unlawful",
        lambda: unlawful(noise=laws.Differences(2.0), cohort=cohort.Everyone()),
    ),
    Mutation(
        "a bound that remembers other clients",
        line(own_laws, "_check_bound", ("if not torch.equal(", "if False and not torch.equal(")),
        "unlawful",
        lambda: unlawful(bound=laws.Running()),
    ),
    Mutation(
        "a threshold that follows a count without noise",
        returning(own_laws, "_refuse_unaccounted_counts", lambda *_: None),
        "unlawful",
        lambda: unlawful(bound=laws.Counting(0.7)),
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
