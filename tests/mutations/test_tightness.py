"""Mistakes in the accounting by dominating Gaussians: each must be caught by a named guard."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events, integers, losses, sampled, tilted
from fedveil.parts import cohort, discrete, part
from fedveil.parts.cohort import Poisson
from fedveil.parts.discrete import Binomial, DiscreteGaussian, TruncatedDiscreteLaplace
from fedveil.privacy import composition as together
from fedveil.recipe import Recipe
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.accounting import (
    test_accounting,
    test_capped,
    test_dominated,
    test_first,
    test_losses,
    test_sampled,
    test_tilted,
)
from tests.unit.accounting.test_dominated import CHANGES
from tests.unit.test_recipe import (
    test_noise_that_some_may_not_bring_is_not_amplified as amplified_noise,
)


def anew(check: Callable[[], None]) -> Callable[[], None]:
    """The check on steps and losses that are computed afresh, and not kept."""

    def afresh() -> None:
        forget()
        try:
            check()
        finally:
            forget()

    return afresh


def forget() -> None:
    for kept in ("_binomial_steps", "_gaussian_steps", "_laplace_steps"):
        getattr(discrete, kept).cache_clear()
    accounting._one_round.cache_clear()


def enumerated(noise: test_dominated.Law, change: int, noise_shares: int = 1) -> Callable[[], None]:
    covers = test_dominated.test_every_dominating_gaussian_covers_every_neighbour
    return anew(lambda: covers(noise, noise_shares, CHANGES[change]))


def exact_masses(ratio: float = 1.0, rate: float = 0.1) -> None:
    exact = test_sampled.test_masses_have_the_exact_curve_at_the_grid_and_no_lower_one_between
    exact(ratio, rate)


def tiny_deltas(first: float = math.inf) -> None:
    test_tilted.test_delta_is_relative_to_the_tail_at_every_order(1.0, 0.01, 0.05, first)


def huge_pure() -> None:
    exact = 1000 + math.log(0.5)
    found = accounting.subsampled(events.ApproximateRelease(1000.0, 0.0), 0.5).epsilon
    assert found >= exact


SETTINGS = [
    Mutation(
        "the step across zero is counted by half",
        line(integers, "steps_of", ("2 * z[:1]", "z[:1]")),
        "enumeration of Laplace moves",
        enumerated(TruncatedDiscreteLaplace(1.5, 12), 0),
    ),
    Mutation(
        "the steepest step is the last one",
        line(integers, "steps_of", ("np.maximum.accumulate(rises + slack)", "rises + slack")),
        "enumeration of Laplace moves",
        enumerated(TruncatedDiscreteLaplace(0.3, 12), 1),
    ),
    Mutation(
        "rough weights are taken for exact ones",
        line(integers, "steps_of", ("+ 2 * MILLS * rough", "")),
        "weights within a factor",
        anew(lambda: test_dominated.test_weights_that_are_off_by_a_factor_are_covered(0.05)),
    ),
    Mutation(
        "no margin for rounding",
        line(integers, "steps_of", ("rises + slack", "rises - slack")),
        "sixty digits",
        anew(test_dominated.test_steps_are_not_below_their_exact_values),
    ),
    Mutation(
        "moves are measured by their largest coordinate",
        line(integers, "dominating", ("* steps.l2)", "* steps.linf)")),
        "enumeration of moves in two coordinates",
        enumerated(DiscreteGaussian(1.0, 12), 2),
    ),
    Mutation(
        "long moves escape as seldom as short ones",
        line(
            integers,
            "core_escape",
            ("law.tails[core - reach : core][::-1]", "law.tails[core - 1 :][:1].repeat(reach)"),
        ),
        "enumeration of binomial moves",
        enumerated(Binomial(20), 1),
    ),
    Mutation(
        "escapes are not counted",
        line(integers, "_any_escape", ("found = -math", "found = 0.0 * -math")),
        "enumeration of binomial moves",
        enumerated(Binomial(20), 1),
    ),
    Mutation(
        "rounds set aside once",
        line(
            accounting,
            "_composed",
            ("first), count * escape, count * distance)", "first), escape, distance)"),
        ),
        "what is set aside in every round",
        test_dominated.test_what_is_set_aside_is_paid_in_every_round,
    ),
    Mutation(
        "a distance is paid on one side",
        line(losses, "_aside", ("(1 + math.exp(min(epsilon, 700.0)))", "1")),
        "what is set aside in every round",
        test_dominated.test_what_is_set_aside_is_paid_in_every_round,
    ),
    Mutation(
        "a mixture sets aside once",
        line(
            accounting,
            "_attended",
            ("Aside(loss, mean * escape, mean * distance)", "Aside(loss, escape, distance)"),
        ),
        "participation mixture",
        test_dominated.test_a_participation_mixture_sets_aside_as_often_as_one_takes_part,
    ),
    Mutation(
        "sampling scales the distance as well",
        line(
            cohort,
            "_sampled",
            (
                "escape=rate * event.escape",
                "escape=rate * event.escape, distance=rate * event.distance",
            ),
        ),
        "escapes and distances when sampled",
        test_dominated.test_escapes_are_scaled_by_the_chance_to_be_drawn_and_distances_are_not,
    ),
    Mutation(
        "the ledger forgets what the rest weighs",
        line(together, "_once", (".orders + grown", ".orders")),
        "divergence of what did not escape",
        test_dominated.test_a_divergence_holds_for_the_law_that_did_not_escape,
    ),
    Mutation(
        "the ledger prefers a proof that sets much aside",
        line(together, "_cheapest", ("if proof.escape <= most", "if proof.escape <= 1")),
        "choice between proofs",
        test_dominated.test_a_ledger_chooses_between_proofs_by_the_event_alone,
    ),
    Mutation(
        "noise that some may not bring is amplified",
        line(Recipe, "hidden", ("and self.cohort.honest is None", "")),
        "honest clients of a fixed cohort",
        amplified_noise,
    ),
    Mutation(
        "a cap is taken for reached one round early",
        line(cohort, "rounds_until", ("    return high", "    return max(high - 1, 1)")),
        "the least rounds that reach a cap",
        lambda: test_capped.test_the_rounds_are_the_least_that_reach_the_cap(0.3, 7, 1e-8),
    ),
    Mutation(
        "a cap that is not reached is not set aside",
        line(Poisson, "until_cap", (", distance=chance / rounds", "")),
        "a run far beyond its cap",
        lambda: test_capped.test_the_chance_that_the_cap_is_not_reached_is_set_aside(),
    ),
    Mutation(
        "any cohort is taken to come up as often as its rate says",
        returning(part, "claims_of", lambda kind: {"describe"}),
        "other cohorts",
        test_capped.test_a_short_run_and_other_cohorts_are_counted_as_before,
    ),
    Mutation(
        "a fixed-size curve of one direction",
        line(
            sampled,
            "without_replacement",
            ("(curve, curve", "(curve, functools.partial(addition_curve, ratio, rate)"),
        ),
        "the exact curve of masses",
        exact_masses,
    ),
    Mutation(
        "additions have the losses of removals",
        line(sampled, "poisson", ("_connected(addition, removal", "_connected(removal, addition")),
        "the exact curve of masses",
        exact_masses,
    ),
    Mutation(
        "masses below ε = 0 carry the rounding of 1 − e^ε",
        line(
            sampled,
            "_connected",
            (
                "[under, curve",
                "[under - np.expm1(below * interval) + np.expm1(below * interval), curve",
            ),
        ),
        "masses that sum to one",
        lambda: test_sampled.test_masses_sum_to_one(1.0, 1e-5),
    ),
    Mutation(
        "a rule for narrow intervals on wide ones",
        returning(sampled, "SMALL", 10.5),
        "the exact curve of masses",
        lambda: exact_masses(0.1, 0.3),
    ),
    Mutation(
        "mass beyond 1 is composed",
        line(sampled.Dense, "self_compose", ("<= EXCESS", "<= 1")),
        "spurious mass",
        lambda: test_sampled.test_mass_beyond_one_and_no_numbers_have_no_finite_epsilon(1e-9),
    ),
    Mutation(
        "the tails of a composition are cut too short",
        line(
            sampled.Dense, "_essential", ("tilts @ self._probs) + margin)", "tilts @ self._probs))")
        ),
        "mass of the tails",
        test_sampled.test_the_tails_that_are_left_out_hold_no_more_mass_than_said,
    ),
    Mutation(
        "the mass of the tails of a composition is dropped",
        line(sampled.Dense, "self_compose", ("tail_mass_truncation - math", "-math")),
        "mass of the tails",
        test_sampled.test_the_tails_that_are_left_out_hold_no_more_mass_than_said,
    ),
    Mutation(
        "a count without a guarantee loses nothing",
        line(losses.InfiniteLoss, "get_delta_for_epsilon", ("return 1.0", "return 0.0")),
        "a rare count without a guarantee",
        lambda: test_losses.test_a_count_without_a_guarantee_loses_no_more_than_its_chance(
            (1.0, 1e-9)
        ),
    ),
    Mutation(
        "losses of a pure release are a tenth too small",
        line(sampled, "approximate", ("Dense(epsilon,", "Dense(0.9 * epsilon,")),
        "binomial sums",
        anew(
            lambda: test_accounting.test_pure_releases_have_the_epsilon_of_a_binomial_sum(
                0.0305, 1000, math.inf
            )
        ),
    ),
    Mutation(
        "losses after a Gaussian release do not count",
        line(losses.AfterGaussian, "_delta", ("epsilon - losses", "epsilon - 0 * losses")),
        "binomial sums",
        lambda: test_accounting.test_pure_releases_have_the_epsilon_of_a_binomial_sum(
            0.0305, 1000, 3.0
        ),
    ),
    Mutation(
        "infinite losses after a Gaussian release do not count",
        line(losses.AfterGaussian, "_delta", ("masses._infinity_mass + ", "")),
        "what both releases lose for certain",
        test_first.test_infinite_losses_count_after_a_first_release,
    ),
    Mutation(
        "moments that are a tenth too small",
        line(
            sampled.Dense, "divergences", ("np.maximum(logs, 0.0)", "0.9 * np.maximum(logs, 0.0)")
        ),
        "divergences of the release",
        lambda: test_sampled.test_divergences_are_not_below_those_of_the_release(1.0, 0.1),
    ),
    Mutation(
        "rounding of tilted masses does not count",
        line(tilted.Tail, "delta", ("(found + self.slack)", "found")),
        "direct convolution",
        tiny_deltas,
    ),
    Mutation(
        "tilted masses are tilted back in one round only",
        line(tilted.Tail, "of", ("scale = count * (moment", "scale = (moment")),
        "direct convolution",
        tiny_deltas,
    ),
    Mutation(
        "the moment of a first release is left out",
        line(tilted.Tail, "of", ("+ error) + before", "+ error)")),
        "direct convolution",
        lambda: tiny_deltas(3.0),
    ),
    Mutation(
        "infinite losses of tilted rounds do not count",
        line(tilted.Tail, "delta", ("self.infinite + ", "")),
        "pure releases",
        test_tilted.test_infinite_losses_count_in_every_round,
    ),
    Mutation(
        "moments of one round for all",
        line(accounting, "_by_moments", ("count * largest", "largest")),
        "long compositions at small δ",
        lambda: test_accounting.test_a_delta_that_rounding_would_swallow_has_a_tight_epsilon(
            0.5, 1000.0, 10**6, 1e-12, 3.449
        ),
    ),
    Mutation(
        "sampling a huge ε is computed with a smaller one",
        line(
            accounting,
            "subsampled",
            ("if amplified <= MOST_PURE", "amplified = min(amplified, MOST_PURE)\n    if True"),
        ),
        "a huge pure ε",
        huge_pure,
    ),
    Mutation(
        "ε is read one loss too low",
        line(
            sampled.Dense,
            "get_epsilon_for_delta",
            ("losses = (last - np", "losses = (last - 1 - np"),
        ),
        "the library's ε",
        lambda: test_sampled.test_epsilon_is_the_library_s_on_every_small_grid(1, -2, 0.01),
    ),
]


@pytest.mark.parametrize("mutation", SETTINGS, ids=named)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
