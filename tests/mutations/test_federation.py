"""Mistakes in what a client of a federation checks before anything leaves it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import recipe as recipes
from fedveil.accounting import accountant, events
from fedveil.data.origin import Origin
from fedveil.errors import UserError
from fedveil.federation import agreement as agreements
from fedveil.federation import participant as clients
from fedveil.federation import requests
from fedveil.federation.agreement import AGREEMENT, ROSTER, Agreement, Roster, write_toml
from fedveil.federation.home import ANSWERED, Accepted, Home
from fedveil.federation.own_ledger import Answered, OwnLedger
from fedveil.federation.participant import Participant
from fedveil.federation.requests import Reply, Request, model_bytes
from fedveil.federation.secagg import messages
from fedveil.federation.secagg.primitives import Identity
from fedveil.ledger.session import Session
from fedveil.parts.cohort import Poisson
from fedveil.parts.noise import Gaussian
from fedveil.privacy.guarantee import guarantee
from fedveil.recipe import Recipe
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.federation import test_holes as holes
from tests.unit.federation import test_silo as silos
from tests.unit.federation.conftest import one_engine  # noqa: F401  (a fixture)
from tests.unit.federation.hall import (
    ADAPTIVE,
    CORRELATED,
    MESSAGES,
    MODELS,
    ROUNDS,
    SECAGG,
    Federation,
    examples,
    founded,
    of_client,
)
from tests.unit.federation.test_participant import LIMIT, OPENING, OTHER, invitation, server_of

pytestmark = pytest.mark.usefixtures("one_engine")
RECIPES = {
    "messages": MESSAGES, "models": MODELS, "sum": SECAGG, "adaptive": ADAPTIVE,
    "correlated": CORRELATED,
}  # fmt: skip


def _place() -> Path:
    """A directory that is gone when this process ends."""
    place = tempfile.mkdtemp(prefix="mutations-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Path(place)


@cache
def made(view: str) -> Federation:
    return founded(_place(), RECIPES[view])


@cache
def wards() -> Agreement:
    return silos.founded(_place(), "messages").agreement


@contextmanager
def copied(view: str) -> Iterator[Home]:
    """A home that only this guard uses."""
    with tempfile.TemporaryDirectory() as place:
        home = Home(Path(place) / "home")
        shutil.copytree(made(view).homes[0].path, home.path)
        yield home


@contextmanager
def client(view: str = "messages", home: Home | None = None) -> Iterator[Participant]:
    with copied(view) as own:
        me = Participant(home or own, of_client(made(view).data, 0))
        try:
            yield me
        finally:
            me.close()


@contextmanager
def refusing(text: str = "") -> Iterator[None]:
    """A `UserError` with this text is raised inside."""
    said = ""
    try:
        yield
    except UserError as problem:
        said = str(problem)
    assert said, f"nothing was refused: {text}"
    assert text in said


def reply(me: Participant, view: str, request: Request) -> Reply:
    return Reply.read(me.handle(request.signed(server_of(made(view)))), LIMIT)


def refused(wanted: str, view: str = "messages", **changes: Any) -> Callable[[], None]:
    """A request with something else in it is refused with its word, and costs nothing."""

    def check() -> None:
        with client(view) as me:
            answer = reply(me, view, invitation(made(view), **changes))
            assert (answer.word, answer.body, me.spent()) == (wanted, b"", 0.0)

    return check


def unsigned() -> None:
    with client() as me:
        content = invitation(made("messages")).signed(Identity(bytes(32)))
        assert Reply.read(me.handle(content), LIMIT).word == "signature"


def changed_on_its_way() -> None:
    with client() as me:
        content = bytearray(invitation(made("messages")).signed(server_of(made("messages"))))
        content[-1] ^= 1
        assert Reply.read(me.handle(bytes(content)), LIMIT).word == "signature"


def too_large() -> None:
    with client() as me:
        padded = invitation(made("messages"), parts=(bytes(2**21),))
        assert reply(me, "messages", padded).word == "malformed"
        assert me.handle(padded.signed(Identity(bytes(32)))) == Reply("malformed").packed()


def once() -> None:
    with client() as me:
        assert reply(me, "messages", invitation(made("messages"))).word == "message"
        assert me.spent() > 0
        assert reply(me, "messages", invitation(made("messages"))).word == "answered"


def once_after_a_restart(view: str) -> Callable[[], None]:
    def check() -> None:
        with copied(view) as home:
            for wanted in ("message", "answered"):
                with client(view, home) as me:
                    assert reply(me, view, invitation(made(view))).word == wanted

    return check


def once_without_the_note() -> None:
    with copied("messages") as home:
        with client("messages", home) as me:
            assert reply(me, "messages", invitation(made("messages"))).word == "message"
        (home.path / ANSWERED).unlink()
        with client("messages", home) as me:
            assert reply(me, "messages", invitation(made("messages"))).word == "answered"


def cut_short() -> None:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / ANSWERED
        file.write_text('["ab')
        Answered(file, "hash").add(OPENING, 1)
        assert Answered(file, "hash").has(OPENING, 1)


def holes_in(name: str, *given: Any) -> Callable[[], None]:
    """A test of tests/unit/federation/test_holes.py, in a directory of its own."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as place:
            getattr(holes, name)(Path(place), *given)

    return check


def each_opening_is_charged() -> None:
    with client() as me:
        reply(me, "messages", invitation(made("messages")))
        once = me.spent()
        reply(me, "messages", invitation(made("messages"), opening=OTHER))
        assert me.spent() > once


def each_opening_has_its_noise() -> None:
    with client() as me:
        bodies = {
            reply(me, "messages", invitation(made("messages"), opening=opening)).body
            for opening in (OPENING, OTHER)
        }
        assert len(bodies) == 2


def within_the_budget() -> None:
    with copied("messages") as home:
        home.accept(made("messages").agreement.hash, 0.01)
        with client("messages", home) as me:
            assert reply(me, "messages", invitation(made("messages"))).word == "budget"


def whole_runs_are_charged_where_noise_is_correlated() -> None:
    with client("correlated") as me:
        ask = invitation(made("correlated"))
        assert reply(me, "correlated", ask).word == "message"
        agreed = made("correlated").agreement
        said = guarantee(agreed.recipe, agreed.dim, agreed.units, agreed.rounds, agreed.delta)
        assert me.spent() == pytest.approx(said.epsilon, rel=1e-6)


def resumed_runs_are_charged_from_their_row() -> None:
    """A run of two participations at least two rounds apart: its last row has both in it."""
    with client("correlated") as me:
        ask = invitation(made("correlated"), round=2, since=2)
        assert reply(me, "correlated", ask).word == "message"
        agreed = made("correlated").agreement
        event = agreed.recipe.release(agreed.dim, agreed.units)
        assert isinstance(event, events.Correlated)
        row = events.Composed(replace(event, first=2), 1)
        assert me.spent() == pytest.approx(accountant.epsilon(row, agreed.delta), rel=1e-6)


def whole_runs_are_charged_where_taking_part_is_hidden() -> None:
    with client("models") as one, client("models") as other:
        reply(one, "models", invitation(made("models")))
        reply(other, "models", invitation(made("models"), round=2, since=2))
        assert one.spent() == other.spent()
        with client("models") as third:
            reply(third, "models", invitation(made("models"), redrawn=2))
            assert third.spent() > one.spent()


def side_effects_end_the_round() -> None:
    def found(task: object) -> None:
        raise UserError("The model keeps state between calls.")

    with client() as me, pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(me._task), "refuse_side_effects", found)
        assert reply(me, "messages", invitation(made("messages"))) == Reply("failed")


def randomness_is_refused() -> None:
    with client() as me, pytest.MonkeyPatch.context() as patch:
        patch.setattr(me, "_computed", lambda *given: (torch.rand(1), real(*given))[1])
        real = Participant._computed.__get__(me)
        assert reply(me, "messages", invitation(made("messages"))) == Reply("failed")


def in_masks(round: int) -> Callable[[], None]:
    """A masked message is charged, and only for the round that the request names."""

    def check() -> None:
        with client("sum") as me:
            made_of: list[Any] = []

            def answer(asked: bytes, model: bytes, levels: Callable[[Any], Any]) -> bytes:
                made_of.append(levels(_Round(round)))
                return messages.refusal("stage")

            me._member(OPENING).answer = answer  # type: ignore[method-assign]
            x = model_bytes(torch.zeros(made("sum").agreement.dim), {})
            asked = invitation(made("sum"), kind="secagg", parts=(b"asked", x))
            word = reply(me, "sum", asked).word
            assert (word, len(made_of)) == (("secagg", 1) if round == 0 else ("round", 0))
            assert (me.spent() > 0) == (round == 0)

    return check


class _Round:
    def __init__(self, round: int) -> None:
        self.round = round


def stale_models_are_forgotten() -> None:
    """A model of an earlier round is not the one that a later round is computed on."""
    with client("sum") as me:
        seen: list[bytes] = []

        def answer(asked: bytes, model: bytes, levels: object) -> bytes:
            seen.append(model)
            return messages.refusal("stage")

        me._member(OPENING).answer = answer  # type: ignore[method-assign,assignment]
        first = invitation(made("sum"), kind="secagg", parts=(b"asked", b"a model"))
        reply(me, "sum", first)
        reply(me, "sum", replace(first, round=1, parts=(b"asked",)))
        assert seen[0] != seen[1]


def other(what: str, view: str = "messages") -> Callable[[], None]:
    """An agreement whose files were changed after it was checked."""

    def check() -> None:
        agreed = made(view).agreement
        changed = {
            "rounds": lambda: replace(agreed, rounds=ROUNDS + 1),
            "dim": lambda: replace(agreed, dim=agreed.dim + 1),
        }[what]()
        with copied(view) as home:
            hash = agreed.hash if what == "rounds" else changed.hash
            kept = home.path / "offers" / hash
            kept.mkdir(exist_ok=True)
            write_toml(kept / AGREEMENT, changed.plain())
            write_toml(kept / ROSTER, changed.roster.plain())
            if what == "dim":
                home.accept(hash, 100.0)
            with refusing(), client(view, home):
                pass

    return check


def one_process() -> None:
    with copied("messages") as home, client("messages", home):
        with refusing("in use"), client("messages", home):
            pass
        with refusing("in use"):
            home.accept(made("messages").agreement.hash, 1.0)


def one_unit() -> None:
    with copied("messages") as home:
        with client("messages", home) as me:
            reply(me, "messages", invitation(made("messages")))
        with refusing("has answered as a client"):
            OwnLedger(home, wards(), Accepted(wards().hash, 8.0, 1e-3))


def whole_rosters() -> None:
    agreed = made("messages").agreement
    fewer = replace(agreed, roster=Roster(agreed.roster.seats[:-1]))
    with copied("messages") as home:
        kept = home.path / "offers" / fewer.hash
        kept.mkdir()
        write_toml(kept / AGREEMENT, fewer.plain())
        write_toml(kept / ROSTER, fewer.roster.plain())
        with refusing("of 5 clients"):
            home.accept(fewer.hash, 8.0)


def data_of_another_form() -> None:
    with refusing("3 classes"):
        clients.as_one_client(replace(examples(), classes=3), made("messages").agreement)


def records_encoded_by_records() -> None:
    told = replace(examples(), origin=Origin(exclusions=("the means of age",)))
    with refusing("read from the silo's records"):
        clients.as_one_client(told, wards())


def caps_in_silos() -> None:
    with refusing("no cap"):
        replace(wards().recipe, cohort=Poisson(0.4, cap=1))


def unfit(agreed: Callable[[], Agreement], **changes: Any) -> Callable[[], None]:
    def check() -> None:
        with refusing():
            replace(agreed(), **changes)

    return check


def with_recipe(agreed: Callable[[], Agreement], **changes: Any) -> Callable[[], None]:
    def check() -> None:
        recipe: Recipe = replace(agreed().recipe, **changes)
        with refusing():
            replace(agreed(), recipe=recipe)

    return check


def agreed() -> Agreement:
    return made("messages").agreement


def vector(size: int = 8, fill: float = 0.0, **bound: torch.Tensor) -> tuple[bytes, ...]:
    return (model_bytes(torch.full((size,), fill), {"bound": bound}),)


IS_HEAD = (requests, "_is_head")
MISTAKES: list[tuple[str, Callable[[Any], None], Callable[[], None]]] = [
    # who asks
    ("signatures", line(Request, "read", ("not is_signed(", "not is_signed and (")), unsigned),
    (
        "all bytes signed",
        line(Request, "read", ("is_signed(server, signature, SIGNED + frame)", "frame")),
        changed_on_its_way,
    ),
    ("the size", line(Request, "read", ("len(content) > most", "False")), too_large),
    # what is asked
    (
        "the agreement",
        line(Participant, "_check", ("request.agreement != self.accepted.hash", "False")),
        refused("agreement", agreement="00" * 32),
    ),
    (
        "the client",
        line(Participant, "_check", ("request.client != self.index", "False")),
        refused("client", client=1),
    ),
    (
        "the number of rounds",
        line(Participant, "_check", ("request.round >= self.agreement.rounds", "False")),
        refused("round", round=ROUNDS),
    ),
    (
        "the view",
        line(
            Participant,
            "_check",
            ('(request.kind == "secagg") != self.agreement.secure_sum', "False"),
        ),
        refused("agreement", "sum"),
    ),
    ("fields", returning(*IS_HEAD, lambda head: True), refused("malformed", counted=-2)),
    (
        "rounds before the first",
        line(*IS_HEAD, ('and 0 <= head["since"] <= head["round"]', "")),
        refused("malformed", "models", since=1),
    ),
    (
        "endless redrawn rounds",
        line(*IS_HEAD, ('and 0 <= head["redrawn"] < MOST_REDRAWN', "")),
        refused("malformed", redrawn=2**16),
    ),
    (
        "one model",
        line(Participant, "_plain", ("len(request.parts) != 1", "False")),
        refused("malformed", parts=(*vector(), b"")),
    ),
    (
        "the model's size",
        line(requests, "_is_vector", ("value.shape == (dim,) and ", "")),
        refused("malformed", parts=vector(3)),
    ),
    (
        "finite models",
        line(requests, "_is_vector", (" and bool(torch.isfinite(value).all())", "")),
        refused("malformed", parts=vector(fill=torch.nan)),
    ),
    (
        "a finite threshold",
        returning(requests, "_is_number", lambda value: True),
        refused("malformed", "adaptive", parts=vector(threshold=torch.tensor([torch.inf]))),
    ),
    (
        "the state of the bound",
        line(Participant, "_state", ("found.keys() != wanted.keys()", "False")),
        refused("malformed", parts=vector(threshold=torch.ones(1))),
    ),
    # what it costs
    (
        "charging",
        line(OwnLedger, "charge", ("self._reserve(opening, round, since, redrawn)", "pass")),
        once,
    ),
    (
        "charging a message",
        line(
            Participant,
            "_plain",
            (
                "self._ledger.charge(request.opening, request.round, request.since, "
                "request.redrawn)",
                "pass",
            ),
        ),
        once,
    ),
    (
        "charging a masked message",
        line(
            Participant,
            "_masked",
            ("self._ledger.charge(request.opening, context.round)", "pass"),
        ),
        in_masks(0),
    ),
    (
        "the round of a masked message",
        line(Participant, "_masked", ("context.round != request.round", "False")),
        in_masks(1),
    ),
    (
        "the model of a masked message",
        line(Participant, "_masked", ("of != [request.opening, request.round]", "False")),
        stale_models_are_forgotten,
    ),
    (
        "the budget",
        line(OwnLedger, "__init__", ("self._grant(Budget(accepted.epsilon, ", "str((1, ")),
        within_the_budget,
    ),
    (
        "charging every opening",
        line(OwnLedger, "_facts", ('f"secret {agreed.hash} {opening}"', '"secret"')),
        each_opening_is_charged,
    ),
    (
        "the run of a round that was reserved before",
        line(Session, "_committed", ("entry = self._add()", "entry = self._entry")),
        holes_in("test_a_client_that_starts_again_keeps_its_ledger", MODELS),
    ),
    (
        "messages that were sent bare",
        line(
            OwnLedger, "_seen", ("max(view, self._agreement.recipe.view, key=VIEWS.index)", "view")
        ),
        holes_in("test_a_message_that_was_sent_bare_is_not_charged_as_a_secure_sum"),
    ),
    (
        "the agreement of an opening",
        line(OwnLedger, "_facts", ('f"secret {agreed.hash} {opening}"', 'f"secret {opening}"')),
        holes_in("test_an_opening_of_two_agreements_is_charged_for_both"),
    ),
    (
        "hidden rounds",
        line(OwnLedger, "_reserve", ("if self._in_advance:", "if False:")),
        whole_runs_are_charged_where_taking_part_is_hidden,
    ),
    (
        "later rounds of correlated noise",
        line(OwnLedger, "_reserve", ("if self._in_advance:", "if self._hidden:")),
        whole_runs_are_charged_where_noise_is_correlated,
    ),
    (
        "the first row of a resumed run",
        line(OwnLedger, "_facts", (".resumed(since)", "")),
        resumed_runs_are_charged_from_their_row,
    ),
    (
        "hidden rounds of earlier openings",
        line(OwnLedger, "_reserve", ("self._agreement.rounds + missed", "self._agreement.rounds")),
        whole_runs_are_charged_where_taking_part_is_hidden,
    ),
    (
        "hidden rounds that were lost",
        line(OwnLedger, "_reserve", ("since + redrawn", "since")),
        whole_runs_are_charged_where_taking_part_is_hidden,
    ),
    # once
    (
        "answers of this process",
        line(
            OwnLedger,
            "charge",
            ("self._answered.has(opening, round) or self._charged(opening, round)", "False"),
        ),
        once,
    ),
    (
        "answers of an earlier process",
        line(OwnLedger, "charge", ("self._answered.add(opening, round)", "pass")),
        once_after_a_restart("models"),
    ),
    (
        "answers in the ledger",
        line(OwnLedger, "charge", (" or self._charged(opening, round)", "")),
        once_without_the_note,
    ),
    ("a torn note", line(Answered, "add", ("\\n{line}", "{line}")), cut_short),
    (
        "noise of an opening",
        line(
            Participant,
            "_key",
            ("if opening not in self._keys:", "if not self._keys:"),
            ("return self._keys[opening]", "return next(iter(self._keys.values()))"),
        ),
        each_opening_has_its_noise,
    ),
    ("the lock of a home", returning(Home, "lock", lambda home: _Open()), one_process),
    ("one unit", returning(OwnLedger, "_refuse_other_unit", lambda *given: None), one_unit),
    # what was agreed to
    (
        "changed files",
        line(Home, "offered", ("agreement.hash != found[0]", "False")),
        other("rounds"),
    ),
    (
        "another number of parameters",
        line(Participant, "_enter", ("self._task.dim != self.agreement.dim", "False")),
        other("dim"),
    ),
    ("whole rosters", line(Home, "accept", ("not agreement.complete", "False")), whole_rosters),
    (
        "the form of data",
        line(clients, "as_one_client", ("found != wanted", "False")),
        data_of_another_form,
    ),
    (
        "a silo's encoding",
        returning(clients, "_refuse_read", lambda data: None),
        records_encoded_by_records,
    ),
    (
        "an agreement's own path",
        line(agreements, "_refuse_unfit", ("if name not in ENCODING:", "if False:")),
        unfit(wards, data={"path": "/private.csv"}),
    ),
    (
        "simulated noise",
        returning(agreements, "_refuse_simulated_noise", lambda *given: None),
        with_recipe(agreed, noise=Gaussian(3.0, at="client")),
    ),
    (
        "silos that trust the server",
        line(agreements, "_refuse_unfit", ('recipe.in_silos and recipe.view == "models"', "False")),
        with_recipe(wards, view="models"),
    ),
    (
        "silos without caps",
        line(recipes, "_refuse_unfit_for_silos", ("cohort.cap is not None or ", "")),
        caps_in_silos,
    ),
    # what a model does
    (
        "side effects",
        line(Participant, "_message", ("self._task.refuse_side_effects()", "pass")),
        side_effects_end_the_round,
    ),
    (
        "randomness",
        line(
            Participant,
            "_message",
            ("with refusing_randomness(self._task.module):", "if True:"),
        ),
        randomness_is_refused,
    ),
]


class _Open:
    """A lock that holds nobody back."""

    def take(self, patience: float = 0.0) -> None: ...

    def release(self) -> None: ...

    @contextmanager
    def held(self, patience: float) -> Iterator[None]:
        yield


MUTATIONS = [Mutation(f"without {what}", make, "client", check) for what, make, check in MISTAKES]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
