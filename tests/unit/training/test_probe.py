"""Zhang's probe for a clipping threshold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts.bound import Clip, ProbedClip
from fedveil.parts.report import Difference
from fedveil.training.prepare import prepare
from fedveil.training.start import train


def test_the_threshold_is_half_the_mean_length_of_a_bare_run(blobs: Federated) -> None:
    """As `fedavg` records it: the same local work, without bound or noise."""
    bare = train(algorithms.fedavg(steps=3), blobs, rounds=1)
    recipe = algorithms.clipped_fedavg(clip="probe", steps=3)
    found = prepare(recipe, blobs, rounds=1).recipe.bound
    assert isinstance(found, ProbedClip)
    assert found.norm == pytest.approx(0.5 * bare.records[0].norm, rel=5e-4)


def test_all_rounds_are_averaged(blobs: Federated) -> None:
    bare = train(algorithms.fedavg(steps=3), blobs, rounds=4)
    recipe = algorithms.clipped_fedavg(clip="probe", steps=3)
    found = prepare(recipe, blobs, rounds=4).recipe.bound
    norms = [record.norm for record in bare.records]
    assert found.norm == pytest.approx(0.5 * sum(norms) / 4, rel=5e-4)
    assert norms[0] != pytest.approx(norms[3], rel=0.05)


def test_it_bounds_as_clip_does_and_the_statement_says_that_it_leaks(blobs: Federated) -> None:
    recipe = algorithms.dp_fedavg(clip="probe", rate=0.9, report=Difference())
    result = train(recipe, blobs, rounds=2, epsilon=8.0)
    bound = result.recipe.bound
    assert bound.norms(7) == Clip(bound.norm).norms(7)
    assert "No ε covers it" in dict(result.statement.entries())["Leak"]
    plain = train(algorithms.dp_fedavg(rate=0.9), blobs, rounds=2, epsilon=8.0)
    assert "Leak" not in dict(plain.statement.entries())


def test_a_run_that_diverges_has_no_threshold(blobs: Federated) -> None:
    recipe = algorithms.clipped_fedavg(clip="probe", steps=5)
    broken = dataclasses.replace(blobs, inputs=torch.full_like(blobs.inputs, torch.nan))
    with pytest.raises(UserError, match="no update had a finite norm"):
        prepare(recipe, broken, rounds=1)


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError, match="must be a number or 'probe'"):
        algorithms.dp_fedavg(clip="prob")  # type: ignore[arg-type]
