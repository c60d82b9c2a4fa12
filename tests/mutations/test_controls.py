"""Mistakes in memories that correct or average gradients."""

from __future__ import annotations

import pytest

from fedveil import loop
from fedveil.parts import controls
from fedveil.testing import check_memory
from fedveil.testing.recipes import check_history, check_streams
from tests.contracts.examples import PRIVATE
from tests.mutations.making import Mutation, line, named, require_caught, returning
from tests.unit.parts import test_controls


def published() -> None:
    test_controls.test_scaffold_is_the_published_algorithm(2, "loop")


def clip21() -> None:
    test_controls.test_clip21_is_the_published_algorithm(100.0)


def leaking() -> None:
    check_history(PRIVATE["dp_scaffold"])
    check_streams(PRIVATE["dp_scaffold"])


MUTATIONS = [
    Mutation(
        "a control that forgets the server's",
        line(controls.ControlVariates, "after", (' - state["control"]', "")),
        "test_scaffold_is_the_published_algorithm",
        published,
    ),
    Mutation(
        "the server's control moves by the whole mean",
        line(controls.ControlVariates, "step", ('state["share"] * (mean', "(mean")),
        "test_scaffold_is_the_published_algorithm",
        published,
    ),
    Mutation(
        "gradients corrected in the wrong direction",
        line(
            controls.ControlVariates,
            "correction",
            ('state["control"] - remembered', 'remembered - state["control"]'),
        ),
        "test_scaffold_is_the_published_algorithm",
        published,
    ),
    Mutation(
        "gradients that are not corrected",
        returning(loop._Work, "_corrected", lambda self, group, remembered: group),
        "test_scaffold_is_the_published_algorithm",
        published,
    ),
    Mutation(
        "controls that are added to messages after the bound",
        line(
            loop._Work,
            "messages",
            (
                "total = self._sent(quantized[sends]",
                "quantized = quantized + (0 if remembered is None else remembered)\n"
                "        total = self._sent(quantized[sends]",
            ),
        ),
        "check_history",
        leaking,
    ),
    Mutation(
        "momentum that is not kept",
        line(controls.DoubleMomentum, "after", ("[newest, self", "[momentum, self")),
        "test_clip21_is_the_published_algorithm",
        clip21,
    ),
    Mutation(
        "a broken gradient that is remembered",
        line(
            controls.DoubleMomentum, "after", ("torch.where(sound, ", "torch.where(sound | True, ")
        ),
        "test_a_broken_gradient_leaves_the_memory_finite",
        test_controls.test_a_broken_gradient_leaves_the_memory_finite,
    ),
    Mutation(
        "a memory of other clients' messages",
        line(
            controls.ControlVariates,
            "learn",
            ("message / self.steps", "message.mean(dim=0) / self.steps"),
        ),
        "check_memory",
        lambda: check_memory(controls.ControlVariates(5)),
    ),
    Mutation(
        "a correction by other clients' controls",
        line(
            controls.ControlVariates,
            "correction",
            ('state["control"] - remembered', "remembered.mean(dim=0) - remembered"),
        ),
        "check_memory",
        lambda: check_memory(controls.ControlVariates(5)),
    ),
    Mutation(
        "cohorts of a fixed size with memory of participants",
        returning(controls, "_refused_draws", lambda memory, recipe: None),
        "test_what_is_not_proved_is_refused",
        lambda: refused(),
    ),
]


def refused() -> None:
    recipe = PRIVATE["dp_scaffold"]
    try:
        test_controls.test_what_is_not_proved_is_refused(
            recipe, {"cohort": test_controls.FixedSize(3)}, "who was drawn"
        )
    except pytest.fail.Exception as missed:
        raise AssertionError(str(missed)) from missed


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_the_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)
