"""What a client refuses: everything but the agreement that it has accepted, once, in its budget."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import algorithms
from fedveil.errors import UserError
from fedveil.federation.agreement import AGREEMENT, ROSTER, Agreement, Roster, write_toml
from fedveil.federation.home import Home
from fedveil.federation.participant import Participant, as_one_client
from fedveil.federation.requests import WORDS, Reply, Request, model_bytes
from fedveil.federation.secagg.primitives import Identity
from fedveil.federation.serve import SERVER, opened
from fedveil.parts.controls import ControlVariates
from fedveil.recipe import Recipe
from tests.unit.federation.hall import (
    CLIENTS,
    CORRELATED,
    MESSAGES,
    MODELS,
    ROUNDS,
    SECAGG,
    Federation,
    Hall,
    examples,
    founded,
    of_client,
)

pytestmark = pytest.mark.usefixtures("one_engine")
OPENING, OTHER = "ab" * 16, "cd" * 16
LIMIT = 2**20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return founded(tmp_path_factory.mktemp("messages"), MESSAGES)


@pytest.fixture
def one(made: Federation, tmp_path: Path) -> Any:
    """A client with a home of its own for this test."""
    import shutil

    home = Home(tmp_path / "home")
    shutil.copytree(made.homes[0].path, home.path)
    me = Participant(home, of_client(made.data, 0))
    yield me
    me.close()


def server_of(made: Federation) -> Identity:
    return Identity((made.directory / SERVER).read_bytes())


def invitation(made: Federation, **changes: Any) -> Request:
    x = torch.zeros(made.agreement.dim)
    honest = Request(
        "invite", made.agreement.hash, OPENING, 0, 0, "00" * 16, -1, 0, (model_bytes(x, {}),)
    )
    return replace(honest, **changes)


def word(one: Participant, made: Federation, request: Request) -> str:
    return Reply.read(one.handle(request.signed(server_of(made))), LIMIT).word


def test_an_honest_invitation_is_answered_once(one: Participant, made: Federation) -> None:
    assert word(one, made, invitation(made)) == "message"
    assert word(one, made, invitation(made)) == "answered"
    assert word(one, made, invitation(made, nonce="11" * 16)) == "answered"


def test_a_restarted_client_knows_what_it_answered(
    one: Participant, made: Federation, tmp_path: Path
) -> None:
    assert word(one, made, invitation(made)) == "message"
    one.close()
    again = Participant(Home(tmp_path / "home"), of_client(made.data, 0))
    assert word(again, made, invitation(made)) == "answered"
    assert word(again, made, invitation(made, round=1)) == "message"
    again.close()


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"agreement": "00" * 32}, "agreement"),
        ({"client": 1}, "client"),
        ({"round": ROUNDS}, "round"),
        ({"kind": "secagg"}, "agreement"),
        ({"parts": ()}, "malformed"),
        ({"parts": (b"no model",)}, "malformed"),
        ({"parts": (model_bytes(torch.zeros(3), {}),)}, "malformed"),
        ({"parts": (model_bytes(torch.full((8,), torch.nan), {}),)}, "malformed"),
        (
            {"parts": (model_bytes(torch.zeros(8), {"bound": {"threshold": torch.ones(1)}}),)},
            "malformed",
        ),
        (
            {"parts": (model_bytes(torch.zeros(8), {"memory": {"control": torch.ones(8)}}),)},
            "malformed",
        ),
        (
            {"parts": (model_bytes(torch.zeros(8), {"noise": {"past": torch.ones(8)}}),)},
            "malformed",
        ),
        ({"opening": "xy"}, "malformed"),
        ({"nonce": ""}, "malformed"),
        ({"counted": -2}, "malformed"),
        ({"since": 1}, "malformed"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else value,
)
def test_another_request_is_refused_with_a_fixed_word_and_not_charged(
    changes: dict[str, Any], refusal: str, one: Participant, made: Federation
) -> None:
    assert word(one, made, invitation(made, **changes)) == refusal
    assert refusal in WORDS
    assert one.spent() == 0.0


def test_only_the_agreement_s_server_is_answered(one: Participant, made: Federation) -> None:
    stranger = Identity(bytes(32))
    assert Reply.read(one.handle(invitation(made).signed(stranger)), LIMIT).word == "signature"
    signed = bytearray(invitation(made).signed(server_of(made)))
    signed[-1] ^= 1  # another model under the same signature
    assert Reply.read(one.handle(bytes(signed)), LIMIT).word == "signature"
    for content in (b"", b"\0" * 64, bytes(100), b"\xff" * 3000):
        assert Reply.read(one.handle(content), LIMIT).word == "signature"
    assert Reply.read(one.handle(bytes(60 * 10**6)), LIMIT).word == "malformed"


def test_a_budget_ends_a_client_s_part_in_it(tmp_path: Path) -> None:
    """ε for one round: a second round, or the same one under another opening, is refused."""
    made = founded(tmp_path, MESSAGES)
    home = made.homes[0]
    me = Participant(home, of_client(made.data, 0))
    assert word(me, made, invitation(made)) == "message"
    single = me.spent()
    me.close()
    home.accept(made.agreement.hash, 1.5 * single)
    me = Participant(home, of_client(made.data, 0))
    assert word(me, made, invitation(made, opening=OTHER)) == "budget"
    assert word(me, made, invitation(made, round=1)) == "budget"
    assert me.spent() == single
    me.close()


def test_hidden_participation_is_charged_for_all_rounds_at_first_contact(tmp_path: Path) -> None:
    made = founded(tmp_path, MODELS)
    hall = Hall({0: made.participant(0).handle})
    training = opened(made.directory, hall)
    planned = training.guarantee().epsilon
    training.close()
    me = Participant(made.homes[1], of_client(made.data, 1))
    assert word(me, made, invitation(made, client=1, round=1)) == "message"
    assert me.spent() == pytest.approx(planned, rel=1e-6)  # also for the round before
    before = me.spent()
    assert word(me, made, invitation(made, client=1, round=2)) == "message"
    assert me.spent() == before  # was charged already
    me.close()


def test_correlated_noise_is_charged_for_all_rounds_of_an_opening(tmp_path: Path) -> None:
    """Later rounds release more of an answer. Another opening begins at its own row."""
    made = founded(tmp_path, CORRELATED)
    hall = Hall({0: made.participant(0).handle})
    training = opened(made.directory, hall)
    planned = training.guarantee().epsilon
    training.close()
    me = Participant(made.homes[1], of_client(made.data, 1))
    assert word(me, made, invitation(made, client=1, round=0)) == "message"
    assert me.spent() == pytest.approx(planned, rel=1e-6)
    before = me.spent()
    assert word(me, made, invitation(made, client=1, round=0)) == "answered"
    assert word(me, made, invitation(made, client=1, round=2)) == "message"
    assert me.spent() == before
    assert word(me, made, invitation(made, client=1, round=2, opening=OTHER, since=2)) == "message"
    assert me.spent() > before
    me.close()


@dataclass(frozen=True)
class Correcting(ControlVariates):
    """Controls that do not say what a client needs."""

    shared = ()


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            replace(
                algorithms.dp_scaffold(noise_multiplier=3.0), memory=Correcting(10), name="own"
            ),
            "which of the server's vectors they need",
        ),
        (
            algorithms.dp_fedavg(rate=0.4, noise="banded", noise_multiplier=3.0),
            "charge turns that they did not see",
        ),
    ],
    ids=["controls", "turns"],
)
def test_what_clients_cannot_carry_or_charge_is_refused(
    recipe: Recipe, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=says):
        founded(tmp_path, recipe)


def test_another_opening_draws_other_noise(tmp_path: Path) -> None:
    made = founded(tmp_path, MESSAGES)
    me = Participant(made.homes[0], of_client(made.data, 0))
    first = Reply.read(me.handle(invitation(made).signed(server_of(made))), LIMIT)
    again = invitation(made, opening=OTHER)
    second = Reply.read(me.handle(again.signed(server_of(made))), LIMIT)
    assert first.word == second.word == "message"
    assert first.body != second.body
    me.close()


def test_failures_stay_with_the_client(
    one: Participant, made: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("patient Smith has 3 rows")

    one._message = broken  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.ERROR):
        content = one.handle(invitation(made).signed(server_of(made)))
    assert b"Smith" not in content
    assert Reply.read(content, LIMIT).word == "failed"
    assert "Smith" in caplog.text  # the owner can read it


def _offered(made: Federation, tmp_path: Path, changed: Agreement) -> Home:
    """A client's home after somebody changed an accepted agreement's files."""
    import shutil

    home = Home(tmp_path / "changed")
    shutil.copytree(made.homes[0].path, home.path)
    kept = home.path / "offers" / made.agreement.hash
    write_toml(kept / AGREEMENT, changed.plain())
    write_toml(kept / ROSTER, changed.roster.plain())
    return home


@pytest.mark.parametrize("what", ["noise", "rounds", "view", "roster", "threshold"])
def test_a_changed_agreement_is_another_one(what: str, made: Federation, tmp_path: Path) -> None:
    agreed = made.agreement
    changed = {
        "noise": lambda: replace(
            agreed,
            recipe=replace(agreed.recipe, noise=replace(agreed.recipe.noise, sigma=1.0)),
        ),
        "rounds": lambda: replace(agreed, rounds=ROUNDS + 1),
        "view": lambda: replace(agreed, recipe=replace(agreed.recipe, view="models")),
        "roster": lambda: replace(agreed, roster=Roster(agreed.roster.seats[::-1])),
        "threshold": lambda: replace(agreed, corrupt=1),
    }[what]()
    assert changed.hash != agreed.hash
    with pytest.raises(UserError, match="was changed since it was checked"):
        Participant(_offered(made, tmp_path, changed), of_client(made.data, 0))


def test_data_of_another_form_are_refused(made: Federation) -> None:
    other = replace(examples(), classes=3)
    with pytest.raises(UserError, match=r"3 classes .* but the agreement has .* 2 classes"):
        as_one_client(other, made.agreement)


def test_a_client_that_is_not_on_the_roster_is_told(made: Federation, tmp_path: Path) -> None:
    stranger = Home.create(tmp_path / "stranger", "stranger", {})
    with pytest.raises(UserError, match="not on the roster of 'people'"):
        stranger.offer(made.directory)
    with pytest.raises(UserError, match="No agreement is accepted"):
        _ = stranger.accepted


def test_view_sum_shows_the_server_no_single_message(tmp_path: Path) -> None:
    """Without secure aggregation, a client of view `sum` sends nothing."""
    made = founded(tmp_path, SECAGG)
    me = made.participant(0)
    assert word(me, made, invitation(made)) == "agreement"
    assert me.spent() == 0.0
    me.close()
    assert made.agreement.clients == CLIENTS
