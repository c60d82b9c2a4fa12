"""Mistakes in what is known of a run that is resumed: its recipe, its releases, its charges."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from fedveil.ledger import charging
from fedveil.ledger.ledger import open_ledger
from fedveil.ledger.session import Session
from fedveil.parts.server import Momentum
from fedveil.serialization import codec
from tests.mutations.making import Mutation, mutate, named, require_caught, returning
from tests.mutations.test_core import small
from tests.system import test_crash as crash
from tests.unit.ledger import test_session as reserved
from tests.unit.serialization import test_codec as written


def without_threshold(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, charging, "digest", ("found.update(released.", "found.copy().update(released."))
    patch.setattr(crash, "digest", charging.digest)  # which the guard knows by name


def check_zeros() -> None:
    written.test_a_zero_survives_toml_where_the_default_is_another_number(Momentum(momentum=0.0))


def without_zeros(patch: pytest.MonkeyPatch) -> None:
    mutate(patch, codec, "to_plain", ("if value is not None}", "if value}"))
    patch.setattr(written, "to_plain", codec.to_plain)  # which the guard knows by name


REDRAWN = Session.redrawn.fget


def check_redrawn() -> None:
    with tempfile.TemporaryDirectory() as place:
        books = open_ledger(Path(place) / "ledger.sqlite")
        reserved.test_a_secret_stream_is_charged_anew(books)
        books.close()


MUTATIONS = [
    Mutation("zeros left out of recipe.toml", without_zeros, "check_zeros", check_zeros),
    Mutation(
        "lost rounds counted up to three",
        returning(Session, "redrawn", property(lambda self: min(REDRAWN(self), 3))),
        "test_a_secret_stream_is_charged_anew",
        check_redrawn,
    ),
    Mutation(
        "an adaptive threshold left out of a release's digest",
        without_threshold,
        "test_the_digest_of_a_release_holds_all_that_is_released",
        lambda: crash.test_the_digest_of_a_release_holds_all_that_is_released(small()),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
