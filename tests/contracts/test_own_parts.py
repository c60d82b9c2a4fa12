"""A stranger's parts get true statements, and hostile ones cannot make them false."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.accounting.norms import Norms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.session import Session
from fedveil.parts import (
    AdaptiveClip,
    Begin,
    Bound,
    Cohort,
    FixedSize,
    Gaussian,
    Memory,
    Noise,
    Poisson,
    Server,
    Tensors,
)
from fedveil.parts.bound import within
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe
from fedveil.testing import (
    check_bound,
    check_cohort,
    check_memory,
    check_noise,
    check_quantizer,
    check_recipe,
    check_server,
)
from fedveil.testing.recipes import CLIENTS, DIM, check_history, check_neighbours
from fedveil.testing.replay import normal_answers, play
from fedveil.training.prepare import prepare
from fedveil.training.start import finish, resume, train
from tests.contracts import own_parts as own
from tests.system.test_crash import Crash, crashed
from tests.unit.ledger.test_stopping import lost_rounds

DELTA = 1e-5
CLIPPED = algorithms.dp_fedavg(clip=0.7, rate=0.5, noise_multiplier=2.0)
CHECKS: list[tuple[Callable[[Any], None], Any]] = [
    (check_cohort, own.CoinFlips(0.2)),
    (check_cohort, own.CoinFlips(0.5, cap=3)),
    (check_bound, own.BlockClip(0.7)),
    (check_quantizer, own.Rounding(16)),
    (check_noise, own.OwnNoise(2.0)),
    (check_memory, own.Fading()),
    (check_server, own.Nesterov()),
    (check_recipe, own.dp_own(rate=0.5, multiplier=2.0)),
    (check_recipe, own.dp_own(rate=0.5, cap=2, multiplier=2.0)),
    (check_recipe, own.dp_own_memory(rate=0.5, multiplier=2.0)),
]


# A stranger's parts, one of every kind


@pytest.mark.parametrize(("check", "part"), CHECKS, ids=lambda x: getattr(x, "__name__", repr(x)))
def test_a_stranger_s_part_keeps_its_contract(check: Callable[[Any], None], part: Any) -> None:
    check(part)


def told(recipe: Recipe, population: int = 200) -> dict[str, str]:
    return dict(statement(recipe, 30, population, 10, DELTA).entries())


def test_a_statement_describes_a_stranger_s_parts_as_themselves() -> None:
    said = told(own.dp_own(cap=4, multiplier=2.0))
    assert said["Sampling"].startswith("CoinFlips(rate=0.2, cap=4): 40 of 200 clients on average")
    assert "at most 4 times" in said["Sampling"]
    assert said["Noise"].startswith("OwnNoise(multiplier=2.0), added by the server")
    for kind in ("CoinFlips", "BlockClip", "OwnNoise", "Nesterov"):
        assert f"own_parts:{kind}" in said["Assumptions"]
    assert "every client" not in str(said)


def test_a_stranger_s_sampling_is_accounted_as_it_says_and_a_stranger_s_memory_undoes_that() -> (
    None
):
    sampled = own.dp_own(multiplier=2.0)
    assert sampled.event(30, 200) == events.PoissonSampled(0.2, events.GaussianRelease(2.0))
    assert own.dp_own_memory(multiplier=2.0).event(30, 200) == events.GaussianRelease(2.0)


def test_after_a_crash_lost_rounds_raise_a_stranger_s_cap(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(own.dp_own(cap=2), noise=Gaussian(3.0))
    training = lost_rounds(recipe, blobs, tmp_path / "a", monkeypatch)
    result = finish(training)
    size = training.task.dim, blobs.clients
    sampled, known = recipe.event(*size), recipe.release(*size)
    rule = events.Composed(sampled, 8 + 3), events.Composed(known, 2 + 3)
    assert result.guarantee.epsilon == min(accounting.epsilon(way, DELTA) for way in rule)
    said = dict(result.statement.entries())["Sampling"]
    assert said.startswith("CoinFlips(rate=0.2, cap=2): 2.4 of 12 clients on average")
    assert "at most 2 times" in said
    assert "Participations in lost rounds count in addition to this limit." in said


@pytest.mark.parametrize("recipe", [own.dp_own(cap=4), own.dp_own_memory()], ids=["own", "memory"])
def test_a_stranger_s_run_is_resumed_bit_by_bit(
    recipe: Recipe, blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"rounds": 6, "epsilon": 8.0, "delta": DELTA}
    whole = train(recipe, blobs, save=tmp_path / "whole", **options)
    crashed(monkeypatch, Session, "commit", 5)
    with pytest.raises(Crash):
        train(recipe, blobs, save=tmp_path / "again", checkpoint_every=2, seed=0, **options)
    monkeypatch.undo()
    training = resume(prepare(recipe, blobs, **options), tmp_path / "again")
    kept = training.state.parts
    assert kept["server"]["velocity"].abs().sum() > 0
    if recipe.memory.kept:
        assert float(kept["memory"]["rounds"]) == training.state.round
    else:
        assert int(kept["cohort"]["taken"].sum()) > 0
    again = finish(training)
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert again.guarantee.epsilon == whole.guarantee.epsilon


# Bounds that do not keep their word


@dataclass(frozen=True)
class TooLong(Bound):
    """Ten times as long as it says."""

    radial = False

    def rows(self, updates: Tensor) -> Tensor:
        return 10 * updates

    def norms(self, dim: int) -> Norms:
        return within(0.7, dim)


@dataclass(frozen=True)
class Mixing(TooLong):
    """Each row is moved by the mean of all rows."""

    def rows(self, updates: Tensor) -> Tensor:
        return updates.clamp(-0.1, 0.1) + updates.mean(dim=0).clamp(-0.1, 0.1)


@dataclass(frozen=True)
class Undefined(TooLong):
    """0/0 for what it does not like."""

    def rows(self, updates: Tensor) -> Tensor:
        return updates / (updates.abs() < 1).float()


@dataclass(frozen=True)
class ByTheMean(Bound):
    """All are scaled by the mean length."""

    def scale(self, norms: Tensor) -> Tensor:
        return torch.full_like(norms, 0.7) / norms.mean().clamp_min(1e-30)

    def norms(self, dim: int) -> Norms:
        return within(0.7, dim)


@dataclass(frozen=True)
class ShortInL1(Bound):
    """Claims an L1 norm that a scale cannot keep."""

    def scale(self, norms: Tensor) -> Tensor:
        return 0.7 / norms.clamp_min(1e-30)

    def norms(self, dim: int) -> Norms:
        return Norms(dim, l1=0.7, l2=0.7, linf=0.7)


LIARS = [TooLong(), Mixing(), Undefined(), ByTheMean(), ShortInL1()]


@pytest.mark.parametrize("bound", LIARS, ids=repr)
def test_one_client_moves_the_sum_by_no_more_than_a_bound_claims_whatever_it_computes(
    bound: Bound,
) -> None:
    """Every pair of neighbours among adversarial answers, in all three norms."""
    check_neighbours(replace(CLIPPED, bound=bound))
    check_neighbours(replace(CLIPPED, bound=bound, cohort=FixedSize(5)), keys=(1,))


@pytest.mark.parametrize("bound", LIARS, ids=repr)
def test_the_suite_tells_a_bound_s_author(bound: Bound) -> None:
    with pytest.raises(AssertionError, match=type(bound).__name__):
        check_bound(bound)


# Subclasses that change a formula inherit no claim about it


@dataclass(frozen=True)
class FirstHalf(Poisson):
    """Draws the first half in every round."""

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return np.arange(population // 2)


@dataclass(frozen=True)
class Missing(FixedSize):
    """Half of those who were drawn do not come."""

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return super().draw(population, rng, state)[::2]


@dataclass(frozen=True)
class Quiet(Gaussian):
    """No noise at all."""

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        return torch.zeros(message.dim, dtype=torch.float64)


@dataclass(frozen=True)
class Plainly(AdaptiveClip):
    """Follows the counts without noise."""

    def next(self, norm: float, short: int, arrived: int, *rest: Any) -> float:
        return norm * (0.9 if 2 * short > arrived else 1.1)


def test_a_cohort_that_draws_in_another_way_is_not_amplified() -> None:
    recipe = replace(CLIPPED, cohort=FirstHalf(0.5, cap=None))
    assert recipe.event(30, 200) == events.GaussianRelease(2.0)
    assert recipe.adjacency() == "zero-out"  # without a client others would be drawn
    assert told(recipe)["Sampling"].startswith("FirstHalf(rate=0.5, cap=None, honest=None): 100 of")
    assert FirstHalf(0.5).coin(200) is None
    assert (Missing(10).fixed, Missing(10).min_honest(200)) == (False, 1)
    check_cohort(FirstHalf(0.5))  # it promises nothing that is not so


def test_coins_are_called_fair_only_where_they_are_known_to_be() -> None:
    noisy = replace(CLIPPED, noise=Gaussian(2.0, "client"), view="sum")
    for cohort, fair in (
        (Poisson(0.5), True),
        (own.CoinFlips(0.5), False),
        (FirstHalf(0.5), False),
    ):
        said = statement(replace(noisy, cohort=cohort), 30, 200, 10, DELTA)
        assert (said.main.drawn is not None) == fair


def test_noise_that_is_drawn_in_another_way_has_no_guarantee() -> None:
    recipe = replace(CLIPPED, noise=Quiet(2.0))
    assert told(recipe)["Privacy"].startswith(
        "No privacy guarantee: noise Quiet does not define its event."
    )
    with pytest.raises(UserError, match=r"noise Quiet does not define its event\. "):
        calibrated(recipe, Budget(5.0, DELTA), 10, 30, 200)
    with pytest.raises(UserError, match=r"noise Quiet does not define its event\. Use another"):
        calibrated(replace(CLIPPED, noise=Quiet()), Budget(5.0, DELTA), 10, 30, 200)


def test_a_threshold_that_moves_in_another_way_has_no_guarantee() -> None:
    assert told(replace(CLIPPED, bound=Plainly(0.7)))["Privacy"].startswith(
        "No privacy guarantee: bound Plainly does not define what its steps release."
    )


def test_noise_that_does_not_follow_a_moving_threshold_is_refused() -> None:
    @dataclass(frozen=True)
    class Steady(Noise):
        """Of deviation 1, whatever the bound."""

        def draw(self, message: Norms, *rest: Any) -> Tensor:
            return torch.randn(message.dim, dtype=torch.float64)

        def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
            return events.GaussianRelease(1 / sensitivity.l2)

    assert replace(CLIPPED, noise=Steady()).private
    with pytest.raises(UserError, match="and noise Steady do not fit: the bound changes"):
        replace(CLIPPED, bound=AdaptiveClip(0.3), noise=Steady())


def test_a_part_that_inherits_nothing_is_refused_with_what_to_inherit_from() -> None:
    @dataclass(frozen=True)
    class Bare:
        def scale(self, norms: Tensor) -> Tensor:
            return norms

        def norms(self, dim: int) -> Norms:
            return within(1.0, dim)

    with pytest.raises(UserError, match=r"bound Bare does not .*Inherit from fedveil.parts.Bound"):
        replace(CLIPPED, bound=Bare())  # type: ignore[arg-type]


# Draws, quantizers, memories and servers that do not keep their word


@dataclass(frozen=True)
class Drawing(Cohort):
    """Draws what it is told."""

    who: tuple[int, ...]
    cap: int | None = None

    def expected(self, population: int) -> float:
        return float(len(self.who))

    def draw(
        self, population: int, rng: np.random.Generator, state: Tensors | None = None
    ) -> np.ndarray:
        return np.array(self.who)


@pytest.mark.parametrize("who", [(1, 1, 3), (3, 1), (-1, 2), (0, CLIENTS)], ids=repr)
def test_a_client_that_is_drawn_twice_does_not_count_twice(who: tuple[int, ...]) -> None:
    recipe = replace(CLIPPED, cohort=Drawing(who))
    with pytest.raises(UserError, match=r"Drawing drew .*Return each index below"):
        prepared(recipe)
    with pytest.raises(AssertionError, match="Drawing"):
        check_cohort(Drawing((1, 1, 3)))


def prepared(recipe: Recipe, rounds: int = 1) -> None:
    """Rounds of scripted clients, by the loop alone."""
    from fedveil.loop import begin, run_round
    from fedveil.testing.replay import Scripted, people

    data, engine = people(CLIENTS), Scripted(normal_answers(CLIENTS, DIM))
    state = begin(recipe, torch.zeros(DIM), data, rounds, 0)
    for _ in range(rounds):
        state, _ = run_round(recipe, state, data, engine, 0)


def test_a_cap_is_kept_by_the_loop() -> None:
    recipe = replace(CLIPPED, cohort=Drawing((1, 2), cap=2))
    prepared(recipe, 2)
    with pytest.raises(UserError, match=r"Drawing drew a client in more rounds than its cap of 2"):
        prepared(recipe, 3)


@dataclass(frozen=True)
class Outwards(own.Rounding):
    """Three times as many steps as there are."""

    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        return 3 * super().__call__(rows, bound, rng)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class InFloats(own.Rounding):
    """Not whole numbers."""

    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        return rows


def test_a_quantizer_is_held_to_its_norms() -> None:
    recipe = replace(CLIPPED, quantize=Outwards(64))
    check_neighbours(recipe)
    with pytest.raises(AssertionError, match="Outwards"):
        check_quantizer(Outwards(64))
    with pytest.raises(UserError, match=r"InFloats returned .*float32\. Return .*torch.int64"):
        play(replace(CLIPPED, quantize=InFloats(64)), normal_answers(CLIENTS, DIM))


@dataclass(frozen=True)
class Gossip(Memory):
    """Every client remembers the mean of all messages."""

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        return remembered + message.mean(dim=0)


def test_a_memory_sees_one_client_at_a_time() -> None:
    check_history(replace(CLIPPED, memory=Gossip()))
    with pytest.raises(AssertionError, match="what a client remembers depends on other clients"):
        check_memory(Gossip())


@dataclass(frozen=True)
class Forgetful(Server):
    """Keeps its momentum in itself, where no checkpoint finds it."""

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        object.__setattr__(self, "last", getattr(self, "last", 0.0) + descent)
        return x - self.last, state  # type: ignore[attr-defined]


@dataclass(frozen=True)
class InPlace(Server):
    """Changes the model that it was given."""

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        return x.sub_(descent), state


@dataclass(frozen=True)
class Growing(Server):
    """Keeps every direction it has seen."""

    def initial_state(self, begin: Begin) -> Tensors:
        return {"seen": torch.zeros(0, len(begin.x))}

    def step(
        self, x: Tensor, descent: Tensor, state: Tensors, round: int
    ) -> tuple[Tensor, Tensors]:
        return x - descent, {"seen": torch.cat([state["seen"], descent[None]])}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Forgetful(), "gives two models for the same direction"),
        (InPlace(), "in place. Return a new tensor"),
        (Growing(), r"kept seen as \(0, 6\) torch.float32 and then as \(1, 6\)"),
    ],
)
def test_the_suite_tells_a_server_s_author(server: Server, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_server(server)


@dataclass(frozen=True)
class Remembered(own.OwnNoise):
    """A round takes back the noise of the one before it."""

    def initial_state(self, begin: Begin) -> Tensors:
        return {"last": torch.zeros(len(begin.x), dtype=torch.float64)}

    def step(self, message: Norms, arrived: int, expected: float, rng: Any, state: Tensors) -> Any:
        return 0.5 * self.draw(message, arrived, expected, rng) - state["last"], {
            "last": self.draw(message, arrived, expected, rng)
        }

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(float(self.multiplier or 0) * message.l2 / sensitivity.l2)


def test_noise_with_a_state_must_be_new_in_every_round() -> None:
    @dataclass(frozen=True)
    class Declared(Remembered):
        correlated = True

    with pytest.raises(AssertionError, match="does not say that it is correlated"):
        check_noise(Remembered(2.0))
    with pytest.raises(AssertionError, match="given the rounds before, the noise of round"):
        check_noise(Declared(2.0))


def test_a_plan_without_the_size_of_noise_tells_what_to_define() -> None:
    @dataclass(frozen=True)
    class Unsized(own.OwnNoise):
        """Does not say how large it is."""

        event = own.OwnNoise.event
        deviation_of_sum = Noise.deviation_of_sum

    from fedveil.planning.noise import deviation

    with pytest.raises(UserError, match=r"Unsized does not give .*deviation_of_sum"):
        deviation(replace(CLIPPED, noise=Unsized(2.0)), 30, 200, 10)
