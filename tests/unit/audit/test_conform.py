"""conform: an aggregator that keeps its claims passes, each broken clause is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.audit.conform import conform
from fedveil.errors import UserError
from fedveil.loop import begin, run_round
from fedveil.parts.report import Difference
from fedveil.testing.replay import Scripted, people
from tests.conftest import Run


class Right:
    """(Σ clip(u_i) + noise)/cohort."""

    name = "right"
    clip, noise_multiplier, cohort = 0.5, 1.5, 20

    def __call__(
        self, updates: Sequence[np.ndarray], counts: Sequence[int], seed: int
    ) -> np.ndarray:
        rng = np.random.default_rng(seed)
        total = sum(
            self.weight(count) * self.bounded(u) for u, count in zip(updates, counts, strict=True)
        )
        noise = self.noise(len(updates[0]), rng)
        return np.asarray((total + noise) / self.denominator(len(updates)))

    def weight(self, count: int) -> float:
        return 1.0

    def bounded(self, update: np.ndarray) -> np.ndarray:
        norm = float(np.linalg.norm(update.astype(np.float64)))
        if not math.isfinite(norm) or norm == 0:
            return np.zeros(len(update))
        return np.asarray(update.astype(np.float64) * min(1.0, self.clip / norm))

    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=dim) * self.noise_multiplier * self.clip

    def denominator(self, came: int) -> float:
        return float(self.cohort)


class Adapting(Right):
    """With a threshold that follows the median, its count noised and accounted."""

    name = "adapting"

    def __init__(self) -> None:
        self.threshold, self.first = self.clip, self.clip

    def __call__(
        self, updates: Sequence[np.ndarray], counts: Sequence[int], seed: int
    ) -> np.ndarray:
        rng = np.random.default_rng([seed, 1])
        self.first, short = self.threshold, 0
        self.clip = self.threshold
        for update in updates:
            short += float(np.linalg.norm(update)) <= self.threshold
        released = super().__call__(updates, counts, seed)
        noisy = short - len(updates) / 2 + rng.normal() * 2.0
        self.threshold *= math.exp(-0.2 * noisy / self.cohort * self.sign)
        return released

    sign = 1.0

    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        multiplier = (self.noise_multiplier**-2 - (2 * 2.0) ** -2) ** -0.5
        return rng.normal(size=dim) * multiplier * self.first


class Ours:
    """One round of this project's own loop."""

    name = "fedveil's own"
    clip, noise_multiplier, cohort = 0.5, 1.5, 20

    def __call__(
        self, updates: Sequence[np.ndarray], counts: Sequence[int], seed: int
    ) -> np.ndarray:
        recipe = algorithms.dp_fedavg(
            clip=self.clip,
            noise_multiplier=self.noise_multiplier,
            rate=1.0,
            report=Difference(),
        )
        answers = [torch.from_numpy(update) for update in updates]
        missing = self.cohort - len(answers)
        answers += [torch.zeros(len(answers[0]))] * missing  # they stayed away
        data, dim = people(len(answers)), len(answers[0])
        state = begin(recipe, torch.zeros(dim), data, 1, key=seed)
        state, _ = run_round(recipe, state, data, Scripted(answers), key=seed)
        return state.x.numpy()


@cache
def broken(make: Callable[[], Any]) -> set[str]:
    """The clauses that are not kept, by the first words."""
    return {verdict.clause for verdict in conform(make) if not verdict.kept}


@pytest.mark.parametrize("make", [Right, Adapting, Ours], ids=lambda make: make.name)
def test_an_aggregator_that_keeps_its_claims_passes(make: Any) -> None:
    verdicts = conform(make)
    assert len(verdicts) == (12 if make is Adapting else 9)
    assert all(verdict.kept for verdict in verdicts), [v for v in verdicts if not v.kept]


class Weighs(Right):
    def weight(self, count: int) -> float:
        return count / 10


class Divides(Right):
    def denominator(self, came: int) -> float:
        return float(came)


class Whispers(Right):
    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        return super().noise(dim, rng) / 2


class Forgets(Right):
    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        noise = super().noise(dim, rng) * math.sqrt(2)
        noise[::2] = 0
        return noise


class Repeats(Right):
    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        return super().noise(dim, np.random.default_rng(0))


class Trusts(Right):
    def bounded(self, update: np.ndarray) -> np.ndarray:
        return np.nan_to_num(update.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


class PassesNan(Right):
    def bounded(self, update: np.ndarray) -> np.ndarray:
        norm = float(np.linalg.norm(update))
        return np.asarray(update * (self.clip / norm if norm > self.clip else 1.0))


class Flees(Adapting):
    sign = -1.0


class Lags(Adapting):
    """Noise of the next threshold, when that is smaller."""

    def noise(self, dim: int, rng: np.random.Generator) -> np.ndarray:
        return super().noise(dim, rng) * 0.8


class Counts(Adapting):
    """A count without noise."""

    def __call__(
        self, updates: Sequence[np.ndarray], counts: Sequence[int], seed: int
    ) -> np.ndarray:
        before = self.threshold
        released = super().__call__(updates, counts, seed)
        short = sum(float(np.linalg.norm(u)) <= before for u in updates)
        self.threshold = before * math.exp(-0.2 * (short / self.cohort - 0.5))
        return released


@pytest.mark.parametrize(
    ("make", "clause"),
    [
        (Weighs, "A client with many examples"),
        (Divides, "With half of the clients"),
        (Whispers, "Noise on the mean has at least"),
        (Whispers, "Canaries find no more"),
        (Forgets, "Noise is Gaussian and the same"),
        (Repeats, "No two rounds"),
        (Trusts, "One client moves the mean"),
        (Trusts, "Canaries find no more"),
        (PassesNan, "An update with NaN"),
        (Flees, "A threshold far below"),
        (Lags, "Noise covers the threshold"),
        (Counts, "Sum and count together"),
    ],
)
def test_a_broken_clause_is_named(make: Any, clause: str) -> None:
    assert any(name.startswith(clause) for name in broken(make))


def test_an_error_on_hostile_input_is_a_broken_clause() -> None:
    class Divided(Right):
        def bounded(self, update: np.ndarray) -> np.ndarray:
            return np.asarray(update * min(1.0, self.clip / math.hypot(*update.tolist())))

    verdicts = {v.clause: v for v in conform(Divided)}
    zero = verdicts["A zero update is accepted"]
    assert not zero.kept
    assert "ZeroDivisionError" in zero.measured


def test_a_hostile_round_may_be_refused() -> None:
    class Strict(Right):
        def __call__(self, updates: Any, counts: Any, seed: int) -> np.ndarray:
            if len(set(counts)) > 1 or len(updates) != self.cohort:
                raise ValueError("not today")
            return super().__call__(updates, counts, seed)

    kept = {v.clause: v for v in conform(Strict)}
    assert kept["A client with many examples moves the mean no more than any other"].kept
    assert (
        "refused"
        in kept[
            "With half of the clients the mean is half as long: the denominator is fixed"
        ].measured
    )


def test_an_adapter_that_fails_on_an_ordinary_round_is_not_judged() -> None:
    class Unfinished(Right):
        def __call__(self, *_: Any) -> np.ndarray:
            raise RuntimeError("no run id")

    class Odd(Right):
        def __call__(self, *_: Any) -> np.ndarray:
            return np.zeros(3)

    with pytest.raises(UserError, match="ordinary round with RuntimeError: no run id"):
        conform(Unfinished)
    with pytest.raises(UserError, match=r"returns the shape \[3\]"):
        conform(Odd)


ADAPTER = """
import numpy as np

class Mine:
    name = "mine"
    clip, noise_multiplier, cohort = 1.0, 1.0, 10
    weigh = False

    def __call__(self, updates, counts, seed):
        total = np.zeros(len(updates[0]))
        for update, count in zip(updates, counts):
            norm = np.linalg.norm(update)
            if np.isfinite(norm) and norm > 0:
                total += update * min(1.0, 1.0 / norm) * (count / 10 if self.weigh else 1)
        noise = np.random.default_rng(seed).normal(size=len(total))
        return (total + noise) / self.cohort

class Weighing(Mine):
    name, weigh = "weighing", True
"""


def test_the_command_runs_an_adapter_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(ADAPTER + "AGGREGATORS = [Mine]\n")
    done = run("conform", "good.py")
    assert done.code == 0, done
    assert "BROKEN" not in done.out
    assert done.out.count("  kept") == 9
    (tmp_path / "bad.py").write_text(ADAPTER + "AGGREGATORS = [Mine, Weighing]\n")
    done = run("conform", "bad.py")
    assert done.code == 1
    mine, _, weighing = done.out.partition("weighing")
    assert "BROKEN" not in mine
    assert "BROKEN   A client with many examples" in weighing


def test_the_command_refuses_what_is_no_adapter(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "failed with" in refused("conform", "nowhere.py")
    (tmp_path / "empty.py").write_text("")
    assert "no list AGGREGATORS" in refused("conform", "empty.py")
    (tmp_path / "half.py").write_text("class A: name = 'a'\nAGGREGATORS = [A]\n")
    assert "clip, noise_multiplier, cohort" in refused("conform", "half.py")
