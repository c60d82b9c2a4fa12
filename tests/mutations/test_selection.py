"""Mistakes in choosing the best of several runs privately."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest

from fedveil.comparing import selecting
from fedveil.privacy import selection
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning
from tests.mutations.test_core import small
from tests.unit.comparing import test_selecting as selected
from tests.unit.privacy import test_selection as counted


def check_draws() -> None:
    with tempfile.TemporaryDirectory() as place:
        selected.test_members_are_drawn_evenly_and_every_run_has_a_seed_of_its_own(Path(place))


def check_stream() -> None:
    for other in (("another", "two"), ("one", "another")):
        with tempfile.TemporaryDirectory() as place:
            selected.test_whatever_decides_the_best_run_names_the_stream(Path(place), other)


def check_handed_out() -> None:
    with tempfile.TemporaryDirectory() as place:
        selected.test_of_the_best_run_nothing_is_handed_out_that_tells_of_single_clients(
            small(), Path(place), diagnostics=True
        )


def check_views() -> None:
    selected.test_whoever_sees_messages_has_no_guarantee_in_the_ledger(small())


def check_spread() -> None:
    counted.test_the_chances_are_a_law_with_the_stated_mean(selection.law_of("geometric", 4.0))


def nearly_fixed(patch: pytest.MonkeyPatch) -> None:
    """K is one of the two whole numbers next to its mean."""

    def drawn(law: selection.Law, rng: np.random.Generator) -> int:
        return int(law.mean + rng.random())

    for owner in (selection, selecting, counted):
        patch.setattr(owner, "drawn", drawn)


def charged_as_models(patch: pytest.MonkeyPatch) -> None:
    shown = '"{}": ReleasePlan((Way(shown, None),), holds)'
    release = '"{}": ReleasePlan((Way(price.release, None),), holds)'
    changes = [(shown.format(view), release.format(view)) for view in ("sum", "messages")]
    mutate(patch, selecting, "_facts", *changes)


MUTATIONS = [
    Mutation("K is nearly fixed", nearly_fixed, "check_spread", check_spread),
    Mutation(
        "the first member is drawn always",
        line(
            selecting,
            "_draws",
            ("int(rng.integers(len(comparison.members)))", "0"),
        ),
        "check_draws",
        check_draws,
    ),
    Mutation(
        "all drawn runs have one seed, and so one noise",
        line(selecting, "_draws", ("int(rng.integers(2**31))", "comparison.seeds[0]")),
        "check_draws",
        check_draws,
    ),
    Mutation(
        "a selection by other test examples draws the same runs",
        line(selecting, "_draws", ("facts, members, tested)", "facts, members)")),
        "check_stream",
        check_stream,
    ),
    Mutation(
        "only the first member names a selection's stream",
        line(selecting, "_draws", ("facts, members, tested)", "facts, members[0], tested)")),
        "check_stream",
        check_stream,
    ),
    Mutation(
        "the best run's clients are handed out",
        returning(selecting, "KEPT", ("clients.parquet", *selecting.KEPT)),
        "check_handed_out",
        check_handed_out,
    ),
    Mutation(
        "a selection charged towards all views as towards models",
        charged_as_models,
        "check_views",
        check_views,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
