"""Mistakes about caps and lost rounds, several capped runs, missing messages and rounding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedveil.accounting import integers
from fedveil.federation import reception
from fedveil.ledger import charging
from fedveil.ledger.ledger import Books, Ledger, open_ledger
from fedveil.ledger.session import Session
from fedveil.parts import discrete
from fedveil.parts.cohort import FixedSize
from fedveil.privacy import composition as together
from fedveil.privacy import statement
from fedveil.privacy.composition import ReleasePlan, Way
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.unit.accounting import test_capped, test_integers
from tests.unit.federation import test_reception
from tests.unit.ledger import test_session
from tests.unit.privacy import test_statement


def with_books(check: Callable[[Ledger], None]) -> Callable[[], None]:
    """The check on a ledger of its own."""

    def opened() -> None:
        with tempfile.TemporaryDirectory() as place:
            books = open_ledger(Path(place) / "ledger.sqlite")
            try:
                check(books)
            finally:
                books.close()

    return opened


def check_escapes() -> None:
    discrete._binomial_steps.cache_clear()
    for coordinates in (1, 40):
        test_integers.test_escapes_of_binomial_noise_are_rounded_up(20, coordinates)
        test_integers.test_escapes_of_binomial_noise_are_rounded_up(1000, coordinates)


def check_agreement() -> None:
    for lost in (1, 7):
        test_capped.test_a_plan_and_a_recipe_agree_on_lost_rounds(lost)


def check_received() -> None:
    try:
        test_reception.test_clients_noise_that_is_amplified_is_not_received(FixedSize(6))
    except pytest.fail.Exception as missed:
        raise AssertionError(str(missed)) from missed


def check_noticed(books: Ledger) -> None:
    try:
        test_session.test_other_bytes_are_noticed_across_a_change_of_the_accounting(books)
    except pytest.fail.Exception as missed:
        raise AssertionError(str(missed)) from missed


def check_arrivals() -> None:
    test_statement.test_amplified_client_noise_assumes_that_every_message_arrives(FixedSize(20))


def one_key_alone(patch: pytest.MonkeyPatch) -> None:
    """As it was: digests of the stream with just these plans."""
    at = "self.ledger.released(self._empty.noise, round)"
    mutate(patch, Session, "_differs", (at, "self._stream.digests.get(round, set())"))


def by_key(streams: Any) -> dict[Any, list[int]]:
    """As it was: two versions within a stream of the same plans alone."""
    found = {s.noise: [r for r, digests in s.digests.items() if len(digests) > 1] for s in streams}
    return {noise: rounds for noise, rounds in found.items() if rounds}


ON_TOP = ("rounds_until(self.event.by.rate, cap, chance)", "self.most + lost")

MUTATIONS = [
    Mutation(
        "lost rounds on top of the rounds until the cap | own ε",
        line(Way, "redrawn", ON_TOP),
        "test_no_kill_rule_beats_a_run_s_own_epsilon",
        test_capped.test_no_kill_rule_beats_a_run_s_own_epsilon,
    ),
    Mutation(
        "lost rounds on top of the rounds until the cap | verify",
        line(Way, "redrawn", ON_TOP),
        "test_a_plan_and_a_recipe_agree_on_lost_rounds",
        check_agreement,
    ),
    Mutation(
        "half of the lost rounds raise the cap",
        line(Way, "redrawn", ("self.cap + lost", "self.cap + lost // 2")),
        "test_the_chance_to_miss_a_raised_cap_covers_every_kill_rule",
        test_capped.test_the_chance_to_miss_a_raised_cap_covers_every_kill_rule,
    ),
    Mutation(
        "a run's own ε forgets the rounds that were lost",
        line(charging, "_own_epsilon", ("best.redrawn(lost)", "best")),
        "test_a_run_s_own_epsilon_is_not_below_an_attack_by_killing",
        test_capped.test_a_run_s_own_epsilon_is_not_below_an_attack_by_killing,
    ),
    Mutation(
        "a part of the rounds pays a part of the chance to miss a cap",
        line(Way, "spent", ("self.cap is None or not rounds", "True")),
        "test_a_run_s_own_epsilon_pays_for_a_missed_cap_in_whole",
        lambda: test_capped.test_a_run_s_own_epsilon_pays_for_a_missed_cap_in_whole(300),
    ),
    Mutation(
        "a plan does not record its cap, and none is inferred",
        line(ReleasePlan, "from_plain", ("_relying_on(cap, ways)", "tuple(ways)")),
        "test_plans_without_a_recorded_cap_are_still_read",
        test_capped.test_plans_without_a_recorded_cap_are_still_read,
    ),
    Mutation(
        "several runs are counted by rounds until a cap | finite",
        line(together, "_way", ("if way.cap is None", "if True")),
        "test_two_capped_runs_have_a_finite_epsilon_together",
        test_capped.test_two_capped_runs_have_a_finite_epsilon_together,
    ),
    Mutation(
        "several runs are counted by rounds until a cap | set aside once",
        line(together, "_way", ("if way.cap is None", "if True")),
        "test_what_is_set_aside_once_is_not_used_over_several_runs",
        test_capped.test_what_is_set_aside_once_is_not_used_over_several_runs,
    ),
    Mutation(
        "amplified noise of clients is received",
        returning(reception, "_refuse_amplified", lambda _: None),
        "test_clients_noise_that_is_amplified_is_not_received",
        check_received,
    ),
    Mutation(
        "amplified noise of clients assumes nothing of their messages",
        line(
            statement.Statement,
            "_assumptions",
            ('if self.recipe.noise.at == "client" and', "if False and"),
        ),
        "test_amplified_client_noise_assumes_that_every_message_arrives",
        check_arrivals,
    ),
    Mutation(
        "a round's bytes are compared with those accounted alike | refused",
        one_key_alone,
        "test_other_bytes_are_noticed_across_a_change_of_the_accounting",
        with_books(check_noticed),
    ),
    Mutation(
        "a round's bytes are compared with those accounted alike | noted",
        one_key_alone,
        "test_other_bytes_are_noted_across_a_change_of_the_accounting",
        with_books(test_session.test_other_bytes_are_noted_across_a_change_of_the_accounting),
    ),
    Mutation(
        "a round's bytes are compared with every stream's",
        line(Books, "released", ("if stream.noise == noise", "if True")),
        "test_bytes_of_another_stream_do_not_matter",
        with_books(test_session.test_bytes_of_another_stream_do_not_matter),
    ),
    Mutation(
        "verify compares bytes within one accounting alone",
        lambda patch: patch.setattr("fedveil.ledger.verify.released_twice", by_key),
        "test_other_bytes_are_noted_across_a_change_of_the_accounting",
        with_books(test_session.test_other_bytes_are_noted_across_a_change_of_the_accounting),
    ),
    Mutation(
        "escapes are not rounded up",
        returning(integers, "_rounded_up", lambda values=0: 1.0),
        "test_escapes_of_binomial_noise_are_rounded_up",
        check_escapes,
    ),
    Mutation(
        "the statement names Rényi divergences alone for whole-number noise",
        returning(
            statement.Statement, "_accounting", lambda self: "Rényi divergences for other noise."
        ),
        "test_the_accountant_is_named_for_every_kind_of_noise",
        test_statement.test_the_accountant_is_named_for_every_kind_of_noise,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
