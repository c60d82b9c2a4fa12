"""Holes that a hostile review found in federations. Each test failed before its hole was closed."""

from __future__ import annotations

import logging
import math
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedveil.accounting import accountant
from fedveil.data.origin import Origin
from fedveil.errors import UserError
from fedveil.federation.agreement import AGREEMENT, ROSTER, Agreement, Roster, write_toml
from fedveil.federation.described import seen_by_server, stated
from fedveil.federation.founding import Trust, enrol, found
from fedveil.federation.home import ANSWERED, MEMORY, PUBLIC, Accepted, read_seat
from fedveil.federation.own_ledger import Answered, OwnLedger
from fedveil.federation.participant import Participant, as_one_client
from fedveil.federation.requests import Reply, Request
from fedveil.federation.rounds import Served
from fedveil.federation.serve import opened
from fedveil.ledger.charging import redrawn
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.parts.noise import Gaussian
from fedveil.parts.statistics import Statistics
from fedveil.recipe import Recipe
from fedveil.runs.opened import Interface
from fedveil.serialization.imports import imported
from tests.unit.federation import test_silo as silos
from tests.unit.federation.hall import (
    CLIENTS,
    CORRELATED,
    DELTA,
    MESSAGES,
    MODELS,
    PLAIN,
    ROUNDS,
    SECAGG,
    Federation,
    Hall,
    examples,
    founded,
    of_client,
)
from tests.unit.federation.hall import (
    MEMORY as WITH_MEMORY,
)
from tests.unit.federation.test_participant import OPENING, invitation, word

BARE = Gaussian(3.0, at="client")
pytestmark = pytest.mark.usefixtures("one_engine")


@pytest.fixture(scope="module")
def silo_agreement(tmp_path_factory: pytest.TempPathFactory) -> Agreement:
    return silos.founded(tmp_path_factory.mktemp("silos"), "messages").agreement


def test_two_processes_of_one_client_do_not_run_at_once(tmp_path: Path) -> None:
    """The second would not know what the first answers, and answer it again for one charge."""
    made = founded(tmp_path, MESSAGES)
    first = made.participant(0)
    with pytest.raises(UserError, match="in use by process"):
        made.participant(0)
    first.close()
    made.participant(0).close()


def test_a_budget_is_not_changed_under_a_running_client(tmp_path: Path) -> None:
    """A smaller ε that takes effect some other day is not what its owner was told."""
    made = founded(tmp_path, MESSAGES)
    me = made.participant(0)
    with pytest.raises(UserError, match="in use by process"):
        made.homes[0].accept(made.agreement.hash, 1.0)
    me.close()
    made.homes[0].accept(made.agreement.hash, 1.0)


def test_an_answer_is_remembered_after_a_write_that_a_full_disk_cut_short(tmp_path: Path) -> None:
    (tmp_path / ANSWERED).write_text(f'["hash", "{OPENING}", 0]\n["hash", "{OPENING[:7]}')
    Answered(tmp_path / ANSWERED, "hash").add(OPENING, 1)
    again = Answered(tmp_path / ANSWERED, "hash")
    assert again.has(OPENING, 0)
    assert again.has(OPENING, 1)


def test_a_round_that_the_ledger_has_is_not_answered_if_its_note_is_lost(tmp_path: Path) -> None:
    """Whoever restores an older copy of one file gets no second answer for one charge."""
    made = founded(tmp_path, MESSAGES)
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "message"
    me.close()
    (made.homes[0].path / ANSWERED).unlink()
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "answered"
    me.close()


def test_rounds_of_openings_without_contact_are_charged_at_the_first_one(tmp_path: Path) -> None:
    """Hidden participation: a client that was not asked before a restart was sampled there too."""
    made = founded(tmp_path, MODELS)
    agreed = made.agreement
    me = made.participant(0)
    late = invitation(made, round=2, since=2)
    assert word(me, made, late) == "message"
    planned = agreed.recipe.spent(agreed.dim, CLIENTS, ROUNDS)
    assert me.spent() == pytest.approx(accountant.epsilon(planned, DELTA), rel=1e-6)
    me.close()


def test_rounds_that_the_server_drew_again_are_charged_at_the_first_contact(
    tmp_path: Path,
) -> None:
    made = founded(tmp_path, MODELS)
    agreed = made.agreement
    me = made.participant(0)
    late = invitation(made, round=1, since=1, redrawn=2)
    assert word(me, made, late) == "message"
    more = agreed.recipe.spent(agreed.dim, CLIENTS, ROUNDS + 2)
    spent = me.spent()
    assert spent == pytest.approx(accountant.epsilon(more, DELTA), rel=1e-6)
    assert word(me, made, replace(late, round=2)) == "message"
    assert me.spent() == spent
    me.close()


def test_a_cap_does_not_count_the_participations_of_rounds_that_were_lost(tmp_path: Path) -> None:
    """As in the server's statement: a unit may take part in lost rounds beyond its cap."""
    capped = replace(MODELS, cohort=Poisson(0.8, cap=1))
    made = founded(tmp_path, capped)
    agreed = made.agreement
    me = made.participant(0)
    assert word(me, made, invitation(made, round=1, since=1, redrawn=2)) == "message"
    more = redrawn(agreed.recipe, 2).spent(agreed.dim, CLIENTS, ROUNDS + 2)
    assert me.spent() >= accountant.epsilon(more, DELTA) * (1 - 1e-6)
    me.close()


def test_the_server_names_the_rounds_that_it_drew_again(tmp_path: Path) -> None:
    made = founded(tmp_path, MODELS)
    hall = Hall({})
    lost = opened(made.directory, hall)
    lost.step()
    assert lost.session is not None
    lost.session.reserve(1)  # and dies: neither round is in its checkpoint
    lost.close()
    again = opened(made.directory, hall)
    hall.sent.clear()
    again.step()
    server = bytes.fromhex(made.agreement.server)
    asked = [Request.read(request, server, 2**20) for _, request in hall.sent]
    assert {(one.round, one.since, one.redrawn) for one in asked} == {(0, 0, 2)}
    again.close()


@pytest.mark.parametrize("recipe", [MESSAGES, SECAGG], ids=["messages", "sum"])
def test_noise_that_is_only_simulated_is_not_agreed_to(recipe: Recipe, tmp_path: Path) -> None:
    """A Gaussian at the clients has a finite ε, but no client adds it: messages left bare."""
    agreed = founded(tmp_path, recipe).agreement
    assert math.isfinite(replace(recipe, noise=BARE).release(8, CLIENTS).ratio)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="noise in a federation is secret integers"):
        replace(agreed, recipe=replace(agreed.recipe, noise=BARE))


@pytest.mark.parametrize("noise", [Gaussian(3.0), BARE], ids=["server", "client"])
def test_a_silo_adds_integers_only(noise: Gaussian, silo_agreement: Agreement) -> None:
    """Floating-point noise on a sum of integers shows the sum in its last bits."""
    with pytest.raises(UserError, match="noise in a federation is secret integers"):
        replace(silo_agreement, recipe=replace(silo_agreement.recipe, noise=noise))


def test_a_cap_that_no_silo_keeps_counts_for_nothing() -> None:
    """A silo draws each round anew, so 'reached its cap' never holds. It was accounted."""
    with pytest.raises(UserError, match="no cap"):
        replace(silos.SGD, unit="record", view="messages", cohort=Poisson(0.4, cap=1))


def test_a_silo_s_records_are_not_encoded_by_each_other(silo_agreement: Agreement) -> None:
    """Means, categories or classes read from all records change with one record, without noise."""
    told = replace(examples(), origin=Origin(exclusions=("the means of age",)))
    with pytest.raises(UserError, match="the means of age were read from the silo's records"):
        as_one_client(told, silo_agreement)


def test_a_silo_s_records_are_not_encoded_by_statistics_that_nobody_charges(
    silo_agreement: Agreement,
) -> None:
    """Noisy statistics cost ε too. A silo's ledger has its rounds only."""
    told = replace(examples(), origin=Origin(statistics=Statistics(0.1, 1e-6)))
    with pytest.raises(UserError, match="which its ledger does not charge"):
        as_one_client(told, silo_agreement)


def test_a_client_s_own_statistics_are_its_own(tmp_path: Path) -> None:
    """Where all of a client's data are one unit, what is read from them is part of the unit."""
    told = replace(examples(), origin=Origin(exclusions=("the means of age",)))
    as_one_client(told, founded(tmp_path, MESSAGES).agreement)


@pytest.mark.parametrize("data", [{"path": "/private.csv"}, {"standardize": True}, {"clients": 2}])
def test_an_agreement_says_how_columns_are_encoded_and_not_which_data_are_read(
    data: dict[str, Any], silo_agreement: Agreement
) -> None:
    with pytest.raises(UserError, match="an agreement cannot set"):
        replace(silo_agreement, data=data)


@pytest.mark.parametrize(
    ("name", "value"),
    [("inputs", 3), ("inputs", ["a"]), ("class_names", [1]), ("epsilon", math.nan)],
)
def test_an_agreement_from_a_stranger_is_read_or_refused(
    name: str, value: Any, tmp_path: Path
) -> None:
    """A sentence, and not a traceback, for its owner."""
    made = founded(tmp_path, MESSAGES)
    write_toml(made.directory / AGREEMENT, {**made.agreement.plain(), name: value})
    with pytest.raises(UserError):
        made.homes[0].offer(made.directory)


def test_records_and_clients_are_not_charged_to_separate_budgets(
    tmp_path: Path, silo_agreement: Agreement
) -> None:
    """A record is in the client's own messages as well: two accounts would each say too little."""
    made = founded(tmp_path, MESSAGES)
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "message"
    me.close()
    with pytest.raises(UserError, match="has answered as a client"):
        OwnLedger(made.homes[0], silo_agreement, Accepted(silo_agreement.hash, 8.0, DELTA))


def test_silos_do_not_send_to_a_server_that_they_would_have_to_trust(
    silo_agreement: Agreement,
) -> None:
    with pytest.raises(UserError, match="Silos do not trust the server"):
        replace(silo_agreement, recipe=replace(silo_agreement.recipe, view="models"))


def test_looking_at_an_agreement_does_not_run_code_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "federation.toml").write_text("")
    (tmp_path / "shipped.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no module 'shipped'"):
        imported("shipped:Part", "part", "class", "soft:SoftClip")


def test_a_roster_with_empty_seats_is_not_accepted(tmp_path: Path) -> None:
    """Its number of clients amplifies and divides, but these clients do not exist."""
    made = founded(tmp_path, MESSAGES)
    fewer = Roster(made.agreement.roster.seats[:-1])
    write_toml(made.directory / ROSTER, fewer.plain())
    home = made.homes[0]
    offered = home.offer(made.directory)
    with pytest.raises(UserError, match="4 of 5 clients"):
        home.accept(offered.hash, 8.0)


def test_a_memory_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    made = founded(tmp_path, WITH_MEMORY)
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "message"
    me.close()
    mode = (made.homes[0].path / MEMORY).stat().st_mode
    assert stat.S_IMODE(mode) == 0o600


def test_a_client_cannot_write_into_the_server_s_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = founded(tmp_path, MESSAGES)
    hall = Hall({0: lambda request: Reply("ok\nRound 9 of 9").packed()})
    training = opened(made.directory, hall)
    with caplog.at_level(logging.WARNING):
        training.step()
    assert "Round 9" not in caplog.text
    assert isinstance(training.source, Served)
    assert dict(training.source.refusals) == {"malformed": 1}
    training.close()


@pytest.fixture
def wards(tmp_path: Path) -> Iterator[tuple[Federation, list[Participant]]]:
    made = silos.founded(tmp_path, "messages")
    people = [silos.silo(made, index) for index in range(CLIENTS)]
    yield made, people
    for one in people:
        one.close()


def test_a_silo_s_sum_counts_in_the_round_that_asked_for_it(
    wards: tuple[Federation, list[Participant]],
) -> None:
    made, people = wards
    kept: list[bytes] = []

    def replayed(request: bytes) -> bytes:
        kept.append(people[0].handle(request))
        return kept[0]

    handlers = {index: one.handle for index, one in enumerate(people)} | {0: replayed}
    training = opened(made.directory, Hall(handlers))
    training.step()
    training.step()
    assert [record.participants for record in training.records] == [CLIENTS, CLIENTS - 1]
    training.close()


@pytest.mark.parametrize("recipe", [MODELS, CORRELATED], ids=["hidden", "correlated"])
def test_a_client_that_starts_again_keeps_its_ledger(tmp_path: Path, recipe: Recipe) -> None:
    """All rounds are charged at first contact, so the second process has nothing to reserve."""
    made = founded(tmp_path, recipe)
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "message"
    spent = me.spent()
    me.close()
    again = made.participant(0)
    assert word(again, made, invitation(made, round=2)) == "message"
    assert again.spent() == spent
    again.close()
    made.participant(0).close()  # its ledger can be read


def test_a_message_that_was_sent_bare_is_not_charged_as_a_secure_sum(tmp_path: Path) -> None:
    """The ε of a client is over all federations, whatever their views are."""
    bare = founded(tmp_path, MESSAGES)
    me = bare.participant(0)
    for round in range(ROUNDS):
        assert word(me, bare, invitation(bare, round=round)) == "message"
    spent = me.spent()
    me.close()
    summed = tmp_path / "summed"
    data = Interface.of(bare.data)
    found(
        summed, "people", SECAGG, data, CLIENTS, "softmax", ROUNDS, delta=DELTA, trust=Trust(2, 0)
    )
    agreement = enrol(summed, [read_seat(home.path / PUBLIC) for home in bare.homes])
    bare.homes[0].accept(bare.homes[0].offer(summed).hash, 200.0)
    again = Participant(bare.homes[0], of_client(bare.data, 0))
    assert agreement.recipe.view == "sum"
    assert again.spent() >= spent
    again.close()


def test_a_smaller_budget_is_not_accepted_while_a_client_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would start with the larger one, and not notice."""
    made = founded(tmp_path, MESSAGES)
    home = made.homes[0]

    def loading(*_: Any) -> Any:
        home.accept(made.agreement.hash, 1.0)

    monkeypatch.setattr("fedveil.federation.participant.make_task", loading)
    with pytest.raises(UserError, match="in use"):
        made.participant(0)
    assert home.accepted.epsilon == 200.0
    home.accept(made.agreement.hash, 1.0)  # the client that did not start has let go of its home


def test_an_opening_of_two_agreements_is_charged_for_both(tmp_path: Path) -> None:
    """A server may name its openings alike. Each agreement's answers have their own noise."""
    first = founded(tmp_path / "first", MODELS)
    me = first.participant(0)
    assert word(me, first, invitation(first)) == "message"
    spent = me.spent()
    me.close()
    directory = tmp_path / "second"
    data = Interface.of(first.data)
    found(directory, "others", MODELS, data, CLIENTS, "softmax", ROUNDS, delta=DELTA)
    agreement = enrol(directory, [read_seat(home.path / PUBLIC) for home in first.homes])
    first.homes[0].accept(first.homes[0].offer(directory).hash, 200.0)
    second = replace(first, directory=directory, agreement=agreement)
    again = second.participant(0)
    assert word(again, second, invitation(second)) == "message"
    both = agreement.recipe.spent(agreement.dim, CLIENTS, 2 * ROUNDS)  # all, at first contact
    assert again.spent() >= accountant.epsilon(both, DELTA) > 1.2 * spent
    again.close()


def test_statements_promise_what_is_enforced(tmp_path: Path) -> None:
    """A server that starts again is limited by each client's own ε, and draws as it likes."""
    some = replace(MESSAGES, cohort=FixedSize(3))
    text = stated(founded(tmp_path, some).agreement).text()
    assert "or more rounds" not in text
    assert "up to its own ε, which then holds" in text
    assert "If the server samples participants fairly, which is not verified in this view" in text
    bare = replace(
        founded(tmp_path / "bare", PLAIN).agreement, recipe=replace(PLAIN, view="messages")
    )
    assert "without noise" in seen_by_server(bare)
