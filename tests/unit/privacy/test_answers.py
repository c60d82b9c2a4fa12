"""A run is stated by what its parts answered before its first round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.parts import Cohort, Gaussian, Noise, Poisson, Tensors
from fedveil.privacy.answers import ChangedError, answers
from fedveil.runs.saved import SavedRun
from fedveil.training import prepare as preparing
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, start
from tests.contracts.test_hostile_parts import Warm

BASE = algorithms.dp_fedavg(noise_multiplier=1.0, rate=0.5, steps=1)


@dataclass(frozen=True)
class Warmup(Noise):
    """Little noise in the first rounds: it grows with the number of draws."""

    multiplier: float = 0.3
    drawn: ClassVar[list[float]] = []

    @property
    def now(self) -> float:
        return self.multiplier * 1.3 ** len(self.drawn)

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        noise = rng.normal(0, self.now * message.l2, message.dim)
        self.drawn.append(1.0)
        return torch.from_numpy(noise)

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(self.now * message.l2 / sensitivity.l2)


@dataclass(frozen=True)
class Telling(Gaussian):
    """Describes itself as it likes, with noise as it likes."""

    scale: ClassVar[float] = 1.0

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(self.scale * message.l2 / sensitivity.l2)

    def describe(self) -> str:
        return f"Gaussian noise of {self.scale} messages"


@dataclass(frozen=True)
class Switching(Cohort):
    """Amplifies once it is told to."""

    amplifies: ClassVar[bool] = False
    adjacency = "add-remove"
    independent = True

    def expected(self, population: int) -> float:
        return 0.5 * population

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return Poisson(0.5).draw(population, rng)

    def amplify(self, event: events.Round, population: int) -> events.Round:
        return Poisson(0.5).amplify(event, population) if self.amplifies else event


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Warmup, "drawn", [])
    return


CHANGED = r"noise Warmup has changed .*GaussianRelease\(ratio=0.3\) and is .*0.39\d*\)\. Keep"


def started(data: Federated, path: Path | None, rounds: int = 4, **parts: Any) -> Training:
    return start(prepare(replace(BASE, **parts), data, rounds=rounds, checkpoint_every=3), path)


def test_a_part_that_changes_with_its_use_is_refused_before_it_is_charged(
    blobs: Federated, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="Warmup draws randomness of its own: two equal streams"):
        started(blobs, tmp_path / "a", noise=Warmup())
    assert not (tmp_path / "a").exists()


def test_a_round_in_which_a_part_changes_is_not_published(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trial in (
        "rehearse",
        "refuse_own_randomness",
        "refuse_other_laws",
    ):  # as if it began to change later
        monkeypatch.setattr(preparing, trial, lambda *given: None)
    training = started(blobs, tmp_path / "a", noise=Warmup())
    before = training.state.x.clone()
    with pytest.raises(ChangedError, match=CHANGED):
        finish(training)
    assert torch.equal(training.state.x, before)
    assert (training.state.round, training.records) == (0, [])
    assert not (tmp_path / "a" / "privacy.txt").exists()


@pytest.mark.parametrize("saved", [True, False])
def test_a_part_that_changed_between_rounds_is_refused_and_the_rounds_so_far_are_kept(
    saved: bool, blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = started(blobs, tmp_path / "a" if saved else None, noise=Telling(1.0))
    done: list[int] = []

    def watch(training: Training, record: Any) -> None:
        done.append(record.round)
        if record.round == 2:
            monkeypatch.setattr(Telling, "scale", 9.0)

    with pytest.raises(ChangedError, match="noise Telling has changed since the run was prepared"):
        finish(training, watch)
    assert done == [1, 2]
    if saved:
        assert [row["round"] for row in SavedRun(tmp_path / "a").rows] == done


def test_no_statement_is_made_of_other_answers(
    blobs: Federated, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = started(blobs, None, noise=Telling(1.0))
    training.step()
    said = training.statement().main.epsilon
    monkeypatch.setattr(Telling, "scale", 9.0)
    for ask in (training.statement, training.guarantee, training.running_epsilon):
        with pytest.raises(ChangedError, match="noise Telling has changed"):
            ask()
    monkeypatch.setattr(Telling, "scale", 1.0)
    assert training.statement().main.epsilon == said


def test_the_part_that_changed_is_named(blobs: Federated, monkeypatch: pytest.MonkeyPatch) -> None:
    training = started(blobs, None, cohort=Switching())
    monkeypatch.setattr(Switching, "amplifies", True)
    with pytest.raises(ChangedError, match=r"cohort Switching .*: the plan in view models was"):
        training.step()
    assert training.state.round == 0


def test_a_part_that_changed_before_its_run_is_enrolled_is_refused(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = prepare(replace(BASE, noise=Telling(1.0)), blobs, rounds=4)
    monkeypatch.setattr(Telling, "scale", 9.0)
    with pytest.raises(ChangedError, match="noise Telling has changed"):
        start(training, tmp_path / "a")


def test_fedveil_s_own_parts_are_asked_nothing_more() -> None:
    assert answers(BASE, 30, 200) == {}
    assert ("noise", "describe") in answers(replace(BASE, noise=Telling(1.0)), 30, 200)


@dataclass(frozen=True)
class OnlyInTwo(Noise):
    """Follows the bound in two dimensions, in which recipes are checked, but not in the model's."""

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.from_numpy(rng.normal(0, 2, message.dim))

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        follows = message.l2 if message.dim == 2 else 1.0
        return events.GaussianRelease(2.0 * follows / sensitivity.l2)


def test_a_round_at_a_threshold_that_is_not_accounted_is_refused(blobs: Federated) -> None:
    fitting = started(blobs, None, bound=Warm())
    assert finish(fitting).records[-1].threshold == 1.5**3
    training = started(blobs, None, bound=Warm(), noise=OnlyInTwo())
    training.step()
    words = r"bound Warm .*releases GaussianRelease\(ratio=1.33.* but GaussianRelease\(ratio=2.0\)"
    with pytest.raises(ChangedError, match=words):
        training.step()
    assert training.state.round == 1
