"""Mistakes in silos: in what their steps draw, in what is accounted, and in personal models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedveil import loop, recipe
from fedveil.accounting import accountant
from fedveil.ledger import ledger
from fedveil.parts import memory, records
from fedveil.privacy import calibrate, composition
from fedveil.testing.silos import check_silos
from tests.contracts.examples import PRIVATE
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.ledger import test_silos as charged
from tests.unit.training import test_silos


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """What a mutated function computed is not found in a cache by later tests."""
    yield
    calibrate.calibrate.cache_clear()


def averaging() -> None:
    check_silos(PRIVATE["silo_dp_fedavg"], lambda step: None)


def calibrated() -> None:
    calibrate.calibrate.cache_clear()  # neither the right noise may be remembered nor the wrong
    try:
        test_silos.test_silos_are_calibrated_to_their_own_budgets()
    finally:
        calibrate.calibrate.cache_clear()


def enumerated() -> None:
    test_silos.test_the_accounted_delta_covers_every_way_to_sample(0.3, 0.8, 3)


MUTATIONS = [
    Mutation(
        "all silos draw from one key",
        line(loop._SiloWork, "update", ('f"silo {silo} in round {k}"', 'f"round {k}"')),
        "check_silos",
        averaging,
    ),
    Mutation(
        "all rounds of a silo draw from one key",
        line(loop._SiloWork, "update", ('f"silo {silo} in round {k}"', 'f"silo {silo}"')),
        "check_silos",
        averaging,
    ),
    Mutation(
        "one more step than is accounted",
        line(
            loop._SiloWork, "update", ("range(local.inner_steps)", "range(local.inner_steps + 1)")
        ),
        "check_silos",
        averaging,
    ),
    Mutation(
        "steps without noise but the last",
        line(
            loop._SiloWork,
            "update",
            ("here = replace(there, x=pulled)", "here = replace(there, x=start)"),
        ),
        "check_silos",
        averaging,
    ),
    Mutation(
        "a silo works on the records of all",
        line(loop._SiloWork, "update", ("self.data.records_of(silo)", "self.data.by_example()")),
        "check_silos",
        averaging,
    ),
    Mutation(
        "a round is accounted as one step",
        line(recipe.Recipe, "release", ("self.local.inner_steps", "1")),
        "test_the_accounted_delta_covers_every_way_to_sample",
        enumerated,
    ),
    Mutation(
        "silos are accounted at the mean rate",
        line(
            records.RecordSGD,
            "inside",
            ("Poisson(of_silo(self.rates, silo))", "Poisson(self.rates[0])"),
        ),
        "test_each_silo_has_the_epsilon_of_its_own_dp_sgd",
        test_silos.test_each_silo_has_the_epsilon_of_its_own_dp_sgd,
    ),
    Mutation(
        "every silo has the noise of the first",
        line(
            records.SiloGaussian,
            "inside",
            ("of_silo(self.multipliers, silo)", "self.multipliers[0]"),
        ),
        "test_each_silo_has_the_epsilon_of_its_own_dp_sgd",
        test_silos.test_each_silo_has_the_epsilon_of_its_own_dp_sgd,
    ),
    Mutation(
        "the best silo counts instead of the worst",
        returning(accountant, "Worst", accountant.Best),
        "test_an_event_of_silos_without_a_guarantee_has_none",
        test_silos.test_an_event_of_silos_without_a_guarantee_has_none,
    ),
    Mutation(
        "several runs compose at the best silo",
        line(composition, "_once", ("times * np.max(", "times * np.min(")),
        "test_several_runs_compose_at_the_worst_silo",
        test_silos.test_several_runs_compose_at_the_worst_silo,
    ),
    Mutation(
        "silos of another split are taken for other records",
        line(ledger, "apart", ("len(splits) == 1", "splits")),
        "test_runs_that_tell_other_silos_apart_add_up_at_their_worst",
        lambda: charged.test_runs_that_tell_other_silos_apart_add_up_at_their_worst(True),
    ),
    Mutation(
        "every silo is charged as the first one",
        line(composition, "_of_silo", ("event.silos[silo]", "event.silos[0]")),
        "test_each_silo_is_charged_its_own_epsilon",
        charged.test_each_silo_is_charged_its_own_epsilon,
    ),
    Mutation(
        "a silo is charged for the run that came last",
        line(
            ledger,
            "spent_by_silo",
            ("of_silo.setdefault(silo, []).append(own)", "of_silo[silo] = [own]"),
        ),
        "test_a_silo_in_two_runs_is_charged_for_both",
        charged.test_a_silo_in_two_runs_is_charged_for_both,
    ),
    Mutation(
        "runs whose silos differ count as rounds of one kind",
        line(composition, "_adds_up", ("len(set(way.event.silos)) == 1", "True")),
        "test_rounds_of_silos_that_differ_are_not_one_kind_over_several_runs",
        charged.test_rounds_of_silos_that_differ_are_not_one_kind_over_several_runs,
    ),
    Mutation(
        "the noise is calibrated for one step per round",
        line(calibrate, "_in_each_silo", ("rounds * recipe.local.inner_steps", "rounds")),
        "test_silos_are_calibrated_to_their_own_budgets",
        calibrated,
    ),
    Mutation(
        "budgets of silos are ignored",
        line(calibrate, "_in_each_silo", (" * recipe.noise.share(silo)", "")),
        "test_silos_are_calibrated_to_their_own_budgets",
        calibrated,
    ),
    Mutation(
        "personal models are pulled away from the mean",
        line(loop._SiloWork, "update", ("(here.x - x)", "(x - here.x)")),
        "test_a_stronger_pull_keeps_personal_models_together",
        test_silos.test_a_stronger_pull_keeps_personal_models_together,
    ),
    Mutation(
        "the pull ignores the model of the server",
        line(loop._SiloWork, "update", ("(here.x - x)", "here.x")),
        "test_a_step_is_written_out_by_hand",
        test_silos.test_a_step_is_written_out_by_hand,
    ),
    Mutation(
        "absent silos are forgotten in the mean",
        line(memory.PersonalModels, "step", ('state["share"] * mean', "mean")),
        "test_the_server_keeps_the_mean_of_personal_models",
        test_silos.test_the_server_keeps_the_mean_of_personal_models,
    ),
    Mutation(
        "the noise is added to the sum of messages again",
        line(records.SiloGaussian, "draw", ("torch.zeros", "torch.ones")),
        "test_the_server_averages_what_silos_send",
        test_silos.test_the_server_averages_what_silos_send,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
