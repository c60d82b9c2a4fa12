"""Mistakes in correlated noise, its cohorts, and what is charged for it."""

from __future__ import annotations

import pytest

from fedveil import recipe
from fedveil.accounting import correlation, events
from fedveil.parts import correlated, spaced
from fedveil.privacy import composition
from fedveil.testing import check_cohort, check_noise
from fedveil.testing.recipes import check_recipe
from tests.contracts.examples import PRIVATE
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.accounting import test_correlation
from tests.unit.ledger import test_correlated as charged
from tests.unit.parts import test_correlated

BANDED, BUFFERED = test_correlated.NOISES[0], test_correlated.BUFFERED


def fresh() -> None:
    correlation.energy.cache_clear()


def enumerated() -> None:
    fresh()
    for separation, most in test_correlation.LIMITS:
        test_correlation.test_sensitivity_is_that_of_the_worst_pattern(
            test_correlation.COLUMNS[2], separation, most
        )


def lost_rounds() -> None:
    fresh()
    test_correlation.test_lost_rounds_cost_no_more_than_is_charged(test_correlation.COLUMNS[1])


def apart() -> None:
    test_correlated.test_participations_are_apart_and_at_most_the_cap(spaced.Separated(4, 5))


def increasing() -> None:
    for wrong in ({"coefficients": (1.0, 0.5, 0.6)}, {"coefficients": (1.0, -0.5)}):
        try:
            correlation.Column(**wrong)
        except correlation.UserError:
            continue
        raise AssertionError(f"{wrong} was taken")


MUTATIONS = [
    Mutation(
        "participations a round further apart than they are",
        line(
            correlation, "_worst", ("range(0, rows, separation)", "range(0, rows, separation + 1)")
        ),
        "test_sensitivity_is_that_of_the_worst_pattern",
        enumerated,
    ),
    Mutation(
        "a unit that takes part once",
        line(correlation, "_worst", ("separation)[:limit]", "separation)[:1]")),
        "test_sensitivity_is_that_of_the_worst_pattern",
        enumerated,
    ),
    Mutation(
        "a stream that takes over forgets past participations",
        line(correlation, "_worst", ("for before in range(limit + 1)", "for before in (0,)")),
        "test_sensitivity_is_that_of_the_worst_pattern",
        enumerated,
    ),
    Mutation(
        "lost rounds that cost nothing",
        line(events.Correlated, "whole", ("if lost:", "if False:")),
        "test_lost_rounds_cost_no_more_than_is_charged",
        lost_rounds,
    ),
    Mutation(
        "a lost round that costs as much as a message of its own round",
        line(
            events.Correlated,
            "whole",
            ("largest_row(self.column, self.first + rounds, *limits) ** 2", "0.5"),
        ),
        "test_lost_rounds_cost_no_more_than_is_charged",
        lost_rounds,
    ),
    Mutation(
        "any column is taken",
        returning(correlation.Column, "__post_init__", lambda self: None),
        "test_a_column_for_which_nothing_is_proved_is_refused",
        increasing,
    ),
    Mutation(
        "past noise subtracted with the wrong coefficients",
        line(correlated.BandedNoise, "_past", ("coefficients[1:]", "coefficients[:-1]")),
        "test_streamed_noise_solves_for_independent_noise",
        lambda: test_correlated.test_streamed_noise_solves_for_independent_noise(BANDED),
    ),
    Mutation(
        "past noise kept in the wrong order",
        line(
            correlated.BandedNoise,
            "_after",
            ('noise[None], state["past"][:-1]', 'state["past"][1:], noise[None]'),
        ),
        "test_streamed_noise_solves_for_independent_noise",
        lambda: test_correlated.test_streamed_noise_solves_for_independent_noise(BANDED),
    ),
    Mutation(
        "buffers that forget after the new noise",
        line(
            correlated.BufferedNoise,
            "_after",
            ('decays * state["buffers"] + noise', 'decays * (state["buffers"] + noise)'),
        ),
        "test_streamed_noise_solves_for_independent_noise",
        lambda: test_correlated.test_streamed_noise_solves_for_independent_noise(BUFFERED),
    ),
    Mutation(
        "correlated noise halved",
        line(correlated._Correlated, "_less", ("mul_(self.deviation", "mul_(0.5 * self.deviation")),
        "check_noise",
        lambda: check_noise(BANDED),
    ),
    Mutation(
        "integers that are not rounded to the nearest",
        line(correlated._Correlated, "_whole_less", ("fine + FINE // 2", "fine")),
        "test_integers_are_rounded_once",
        lambda: test_correlated.test_integers_are_rounded_once(BANDED),
    ),
    Mutation(
        "rounding that costs nothing",
        line(correlated._Correlated, "event", ("drift = self.drift *", "drift = 0.0 *")),
        "test_secure_noise_pays_for_its_rounding",
        test_correlated.test_secure_noise_pays_for_its_rounding,
    ),
    Mutation(
        "clients that come back a round too early",
        line(
            spaced.Separated, "draw", (">= (self.separation or 1)", ">= (self.separation or 1) - 1")
        ),
        "test_participations_are_apart_and_at_most_the_cap",
        apart,
    ),
    Mutation(
        "a cap that is not kept by a separated cohort",
        line(
            spaced.Separated,
            "draw",
            ("may = below_cap(population, self.cap, state)", "may = np.ones(population, bool)"),
        ),
        "check_cohort",
        lambda: check_cohort(spaced.Separated(4, 10, cap=3)),
    ),
    Mutation(
        "turns amplify any number of bands",
        line(spaced.CyclicPoisson, "amplify", ("bands <= self.separation", "True")),
        "test_turns_amplify_few_bands_only",
        test_correlated.test_turns_amplify_few_bands_only,
    ),
    Mutation(
        "turns at the rate of a round",
        line(
            spaced.CyclicPoisson,
            "amplify",
            ("CyclicSampled(self.turn,", "CyclicSampled(self.rate,"),
        ),
        "check_turns",
        lambda: check_turns(),
    ),
    Mutation(
        "turns sampled after lost rounds",
        line(
            events.CyclicSampled,
            "whole",
            ("if self.event.first or self.event.lost:", "if self.event.first:"),
        ),
        "test_turns_are_sampled_releases",
        test_correlation.test_turns_are_sampled_releases,
    ),
    Mutation(
        "two runs counted as one long run",
        line(
            composition, "_adds_up", ("way.most is None and not over_the_run", "way.most is None")
        ),
        "test_two_runs_are_not_one_long_run",
        charged.test_two_runs_are_not_one_long_run,
    ),
    Mutation(
        "a stream that takes over is charged as a new run",
        line(
            composition.ReleasePlan,
            "resumed",
            ("_over_the_run(way.event, first=round)", "_over_the_run(way.event, first=0)"),
        ),
        "test_a_stream_that_takes_over_pays_for_its_own_rows",
        charged.test_a_stream_that_takes_over_pays_for_its_own_rows,
    ),
    Mutation(
        "correlated noise said to be hidden by sampling",
        line(
            recipe.Recipe,
            "hidden",
            ("if self.noise.correlated and not self.cohort.cyclic:", "if False:"),
        ),
        "test_who_takes_part_is_not_hidden_and_zero_out_is_covered",
        test_correlated.test_who_takes_part_is_not_hidden_and_zero_out_is_covered,
    ),
    Mutation(
        "a removed unit that changes who else is drawn",
        line(
            composition,
            "covered",
            ('recipe.noise.at == "server" and recipe.cohort.independent', "True"),
        ),
        "test_who_takes_part_is_not_hidden_and_zero_out_is_covered",
        test_correlated.test_who_takes_part_is_not_hidden_and_zero_out_is_covered,
    ),
    Mutation(
        "participations that are not limited are accounted as if they were",
        returning(correlated._Correlated, "misfit", lambda self, recipe: None),
        "test_an_own_cohort_is_not_believed",
        lambda: not_believed(),
    ),
    Mutation(
        "correlated noise that is drawn for one round alone",
        line(correlated._Correlated, "step", ("self._past(state)", "None")),
        "test_streamed_noise_solves_for_independent_noise",
        lambda: test_correlated.test_streamed_noise_solves_for_independent_noise(BANDED),
    ),
]


def check_turns() -> None:
    """A unit's turn comes up as often as is accounted."""
    check_recipe(PRIVATE["dp_norm_fedavg in turns"])
    event = PRIVATE["dp_norm_fedavg in turns"].event(6, 8)
    assert isinstance(event, events.CyclicSampled)
    assert event.rate >= 0.6 * (1 - 1e-9), f"turns come up with 0.6, accounted {event.rate}"


def not_believed() -> None:
    try:
        test_correlated.test_an_own_cohort_is_not_believed()
    except pytest.fail.Exception as missed:
        raise AssertionError(str(missed)) from missed


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        require_caught(mutation, monkeypatch)
    finally:
        fresh()
