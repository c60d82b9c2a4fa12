"""Careless and hostile parts: the loop enforces what the accounting relies on."""

from __future__ import annotations

import math
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
from fedveil.accounting.correlation import square_root
from fedveil.accounting.norms import Norms
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.charging import redrawn
from fedveil.loop import State, begin, client_message, local_plan, run_round
from fedveil.parts import (
    Begin,
    Bound,
    Clip,
    Cohort,
    FixedSize,
    Gaussian,
    Memory,
    Noise,
    NoQuantization,
    Poisson,
    Quantize,
    Tensors,
)
from fedveil.parts.bound import ClipCoordinates, within
from fedveil.parts.local import SGD, Inside, LocalPlan
from fedveil.parts.memory import ErrorCompensation
from fedveil.parts.records import RecordSGD, SiloGaussian
from fedveil.parts.report import Difference
from fedveil.parts.schedule import Constant
from fedveil.parts.spaced import Separated
from fedveil.parts.statistics import Statistics
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.privacy.composition import plan
from fedveil.privacy.statement import statement
from fedveil.recipe import Recipe, View, observed
from fedveil.testing.recipes import CLIENTS, DIM, check_history, check_neighbours
from fedveil.testing.replay import Scripted, WatchedCohort, normal_answers, people, play
from fedveil.training.prepare import prepare
from fedveil.training.start import finish, resume, train
from tests.contracts.test_own_parts import CLIPPED, prepared

DELTA = 1e-5


SILOS = algorithms.silo_dp_fedavg(noise_multiplier=1.0, rate=0.1, steps=2)


# Noise


@dataclass(frozen=True)
class OnMessages(Noise):
    """Noise of each client on its own message, in floating point."""

    at = "client"
    on_messages = True

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        return torch.zeros(message.dim, dtype=torch.float64)

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        return rng.normal(0, 2.0, message.dim)

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2.0 / sensitivity.l2)

    def misfit(self, recipe: Recipe) -> str | None:
        return None


def test_noise_on_each_message_needs_a_grid() -> None:
    with pytest.raises(UserError, match=r"NoQuantization and noise OnMessages do not fit: .*grid"):
        replace(CLIPPED, noise=OnMessages())


@dataclass(frozen=True)
class OneForAll(OnMessages):
    """The same integer for all coordinates."""

    def each(self, message: Norms, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(-9, 9, 1)


def test_noise_of_a_message_has_an_integer_for_each_coordinate() -> None:
    from fedveil.parts import StochasticRound

    for noise in (OnMessages(), OneForAll()):
        recipe = replace(CLIPPED, quantize=StochasticRound(16), noise=noise)
        with pytest.raises(
            UserError, match=r"returned an array .* Return .* \(6,\) and type int64"
        ):
            prepared(recipe)


@dataclass(frozen=True)
class OneNumber(Noise):
    """One number, which would be added to every coordinate."""

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.from_numpy(rng.normal(0, 2.0, 1))

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2.0 / sensitivity.l2)


def test_noise_has_a_number_for_each_coordinate() -> None:
    with pytest.raises(UserError, match=r"OneNumber returned a .* \(1,\) .* Return .* \(6,\)"):
        prepared(replace(CLIPPED, noise=OneNumber()))


# Norms


@dataclass(frozen=True)
class OfOneNumber(Bound):
    """Declares the norms of a single number."""

    def scale(self, norms: Tensor) -> Tensor:
        return 0.7 / norms.clamp_min(1e-30)

    def norms(self, dim: int) -> Norms:
        return within(0.7, 1)


def test_noise_is_drawn_for_all_coordinates_whatever_dimension_a_bound_declares() -> None:
    recipe = replace(CLIPPED, bound=OfOneNumber())
    assert recipe.message(DIM).dim == DIM
    noise = play(recipe, [torch.zeros(DIM)] * CLIENTS, noise="real").total
    assert len(set(noise.tolist())) == DIM


@dataclass(frozen=True)
class Unclear(Bound):
    """Declares norms that are no numbers."""

    radial = False

    def rows(self, updates: Tensor) -> Tensor:
        return 1000 * updates

    def norms(self, dim: int) -> Norms:
        return Norms(dim, math.nan, 0.7, math.nan)


class Sly(Norms):
    """Norms whose sensitivity is a thousandth of them."""

    def sensitivity(self, adjacency: Any) -> Norms:
        return Norms(self.dim, self.l1 / 1000, self.l2 / 1000, self.linf / 1000)


@dataclass(frozen=True)
class SlyClip(Clip):
    """Clip, with a sensitivity of its own."""

    def norms(self, dim: int) -> Norms:
        found = within(self.norm, dim)
        return Sly(dim, found.l1, found.l2, found.linf)


@dataclass(frozen=True)
class Moody(Bound):
    """Declares a thousandth of its norms once it has bounded an update."""

    norm: float = 700.0

    def scale(self, norms: Tensor) -> Tensor:
        object.__setattr__(self, "norm", 0.7)
        return 700 / norms.clamp_min(1e-30)

    def norms(self, dim: int) -> Norms:
        return within(self.norm, dim)


@dataclass(frozen=True)
class Listening(OneNumber):
    """Notes the norms that it is drawn for."""

    heard: float = 0.0

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        object.__setattr__(self, "heard", message.l2)
        return torch.zeros(message.dim, dtype=torch.float64)


def test_norms_are_plain_numbers() -> None:
    with pytest.raises(UserError, match=r"Unclear declares .*must be numbers of at least 0"):
        prepared(replace(CLIPPED, bound=Unclear()))


def test_norms_have_no_sensitivity_of_their_own() -> None:
    sly = replace(CLIPPED, bound=SlyClip(0.7))
    assert sly.release(DIM, CLIENTS) == CLIPPED.release(DIM, CLIENTS)


def test_noise_is_drawn_for_the_norms_that_messages_were_held_to() -> None:
    noise, answers = Listening(), [torch.ones(DIM), *[torch.zeros(DIM)] * (CLIENTS - 1)]
    moody = replace(CLIPPED, bound=Moody(), noise=noise)
    sent = play(moody, answers, members=np.arange(CLIENTS)).total
    assert 0 < float(sent.norm()) <= noise.heard * 1.001


def test_what_is_not_known_to_be_short_enough_is_shortened() -> None:
    from fedveil.engines.bounding import held

    rows = torch.ones(2, DIM)
    assert not held(rows, Norms(DIM, math.nan, 0.7, math.nan)).any()


# Bounds and quantizers


@dataclass(frozen=True)
class Loud(NoQuantization):
    """A thousand times the message, with the norms of the bound."""

    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        return 1000 * rows


@dataclass(frozen=True)
class SmallInMany(NoQuantization):
    """Declares smaller norms in more than two dimensions."""

    def norms(self, bound: Norms) -> Norms:
        share = 1.0 if bound.dim <= 2 else 1e-3
        return replace(bound, l1=bound.l1 * share, l2=bound.l2 * share, linf=bound.linf * share)


@dataclass(frozen=True)
class Buffered(Bound):
    """Returns the same tensor every time."""

    radial = False
    out = torch.zeros(1, DIM)

    def rows(self, updates: Tensor) -> Tensor:
        self.out[:] = updates * min(1.0, 0.7 / max(float(updates.norm()), 1e-30))
        return self.out

    def norms(self, dim: int) -> Norms:
        return within(0.7, dim)


@dataclass(frozen=True)
class BufferedScale(Bound):
    """Returns the same scale every time."""

    out = torch.zeros(1, dtype=torch.float64)

    def scale(self, norms: Tensor) -> Tensor:
        return self.out.copy_(0.5 * norms.clamp_max(1.0))

    def norms(self, dim: int) -> Norms:
        return within(0.7, dim)


@dataclass(frozen=True)
class BufferedSteps(Quantize):
    """Returns the same grid steps every time."""

    out = torch.zeros(1, DIM, dtype=torch.int64)

    def __call__(self, rows: Tensor, bound: Norms, rng: Any) -> Tensor:
        self.out[:] = (rows * 64 / bound.linf).trunc().long()
        return self.out

    def norms(self, bound: Norms) -> Norms:
        return replace(bound, grid=bound.linf / 64)


@dataclass(frozen=True)
class InPlaceScale(Bound):
    """Makes all norms small before it scales."""

    def scale(self, norms: Tensor) -> Tensor:
        norms.fill_(1e-6)
        return torch.full_like(norms, 1e9)

    def norms(self, dim: int) -> Norms:
        return within(0.7, dim)


@dataclass(frozen=True)
class OneColumn(InPlaceScale):
    """One number, which would count in every coordinate."""

    radial = False

    def rows(self, updates: Tensor) -> Tensor:
        return updates[:, :1]


@dataclass(frozen=True)
class Later(Clip):
    """Does not adapt, and is longer in a round than it declares."""

    def at(self, state: Tensors) -> Bound:
        return Clip(1000.0)


REMEMBERING = replace(CLIPPED, memory=ErrorCompensation(0.1), report=Difference())
BROKEN = {
    "quantizer of bounded rows": replace(CLIPPED, bound=ClipCoordinates(0.3), quantize=Loud()),
    "quantizer with a memory": replace(REMEMBERING, quantize=Loud()),
    "quantizer that is short in many dimensions": replace(CLIPPED, quantize=SmallInMany()),
    "bound with a buffer": replace(CLIPPED, bound=Buffered()),
    "scale with a buffer": replace(CLIPPED, bound=BufferedScale()),
    "quantizer with a buffer": replace(CLIPPED, quantize=BufferedSteps()),
    "scale that changes its norms": replace(CLIPPED, bound=InPlaceScale()),
    "bound that changes in a round": observed(CLIPPED, bound=Later(0.7)),
}


@pytest.mark.parametrize("recipe", BROKEN.values(), ids=BROKEN)
def test_one_client_moves_the_sum_by_one_message(recipe: Recipe) -> None:
    check_neighbours(recipe)


def test_a_bound_that_would_change_says_that_it_adapts() -> None:
    @dataclass(frozen=True)
    class Stepping(Clip):
        """Does not adapt, and has a next state."""

        def step(self, state: Tensors, *rest: Any) -> Tensors:
            return state

    for bound, name in ((Later(0.7), "at"), (Stepping(0.7), "step")):
        words = f"defines `{name}`, but does not adapt.*Set adapts = True, or give a field"
        with pytest.raises(UserError, match=words):
            replace(CLIPPED, bound=bound)


@dataclass(frozen=True)
class Warm(Bound):
    """C_k = norm·1.5^k, which is public."""

    norm: float = 1.0
    adapts = True

    def scale(self, norms: Tensor) -> Tensor:
        return Clip(self.norm).scale(norms)

    def norms(self, dim: int) -> Norms:
        return within(self.norm, dim)

    @property
    def threshold(self) -> float:
        return self.norm

    def initial_state(self, begin: Begin) -> Tensors:
        return {"round": torch.zeros(1)}

    def at(self, state: Tensors) -> Bound:
        return Clip(self.norm * 1.5 ** float(state["round"]))

    def step(self, state: Tensors, *rest: Any) -> Tensors:
        return {"round": state["round"] + 1}

    def joined(self, release: events.Release, *rest: Any) -> events.Release:
        return release


@dataclass(frozen=True)
class Laplace(Noise):
    """Follows the bound between two norms."""

    least: float = 0.0
    most: float = math.inf

    def draw(self, message: Norms, arrived: int, expected: float, rng: Any) -> Tensor:
        return torch.from_numpy(rng.laplace(0, 50 * self.followed(message), message.dim))

    def followed(self, message: Norms) -> float:
        return min(max(message.l1, self.least), self.most)

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.ApproximateRelease(sensitivity.l1 / (50 * self.followed(message)), 0.0)


@pytest.mark.parametrize("noise", [Laplace(1.0, 1.0), Laplace(most=1000.0), Laplace(least=1e-3)])
def test_noise_of_any_kind_follows_a_moving_bound(noise: Noise) -> None:
    with pytest.raises(UserError, match="bound Warm and noise Laplace do not fit: the bound chang"):
        replace(CLIPPED, bound=Warm(), noise=noise)


def test_noise_that_follows_a_moving_bound_fits_whatever_its_kind() -> None:
    recipe = replace(CLIPPED, bound=Warm(), noise=Laplace())
    assert recipe.release(DIM, CLIENTS) == events.ApproximateRelease(1 / 50, 0.0)


def test_a_number_does_not_count_in_every_coordinate() -> None:
    for recipe in (replace(CLIPPED, bound=OneColumn()), replace(CLIPPED, memory=FirstColumn())):
        with pytest.raises(UserError, match=r"Column returned a .* \(1, 1\) .* Return .* \(1, 6\)"):
            prepared(recipe)


# Cohorts


@dataclass(frozen=True)
class Same(Cohort):
    """The same clients in every round, at most `cap` times."""

    cap: int | None = 1

    def expected(self, population: int) -> float:
        return 2.0

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        return np.arange(2)


@dataclass(frozen=True)
class OwnState(Same):
    """Keeps something else."""

    def initial_state(self, begin: Begin) -> Tensors:
        return {"mine": torch.zeros(1)}


@dataclass(frozen=True)
class NotCounting(Poisson):
    """Does not count."""

    def step(self, state: Tensors, drawn: np.ndarray) -> Tensors:
        return state


@dataclass(frozen=True)
class Resetting(Same):
    """Sets the count to zero."""

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        assert state is not None
        state["taken"].zero_()
        return np.arange(2)


CAPPED = [Same(), OwnState(), NotCounting(1.0, cap=1), Resetting()]


@pytest.mark.parametrize("cohort", CAPPED, ids=repr)
def test_the_loop_counts_participations_itself(cohort: Cohort) -> None:
    recipe = replace(CLIPPED, cohort=cohort)
    prepared(recipe, 1)
    with pytest.raises(UserError, match="in more rounds than its cap of 1"):
        prepared(recipe, 2)


def test_a_cap_is_a_whole_number() -> None:
    for cap in (0, 1.5, math.nan):
        with pytest.raises(UserError, match="cap"):
            replace(CLIPPED, cohort=Same(cap=cap))  # type: ignore[arg-type]


def test_the_loop_s_count_survives_a_checkpoint(blobs: Federated, tmp_path: Path) -> None:
    recipe, beyond = replace(CLIPPED, cohort=OwnState(cap=3)), "more rounds than its cap of 3"
    with pytest.raises(UserError, match=beyond):
        train(recipe, blobs, rounds=4, save=tmp_path / "a", checkpoint_every=1)
    training = resume(prepare(recipe, blobs, rounds=4), tmp_path / "a")
    assert training.state.parts["loop"]["taken"][:3].tolist() == [3, 3, 0]
    with pytest.raises(UserError, match=beyond):
        finish(training)


@dataclass(frozen=True)
class Amplified(Cohort):
    """Amplifies under the adjacency of a cohort that knows nothing, unless another is given."""

    size: int = 20
    adjacency: Any = "zero-out"
    poisson: bool = False
    fixed = True
    independent = True

    def expected(self, population: int) -> float:
        return float(self.size)

    def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
        return np.sort(rng.choice(population, self.size, replace=False))

    def amplify(self, event: events.Round, population: int) -> events.Round:
        assert isinstance(event, events.GaussianRelease)
        if self.poisson:
            return events.PoissonSampled(self.size / population, event)
        return events.SampledWithoutReplacement(self.size, population, event)


def test_sampling_counts_only_for_the_neighbours_that_it_is_proven_for() -> None:
    fitting = replace(CLIPPED, cohort=Amplified(adjacency="replace-one"))
    assert fitting.event(DIM, 100) == replace(CLIPPED, cohort=FixedSize(20)).event(DIM, 100)
    for cohort, theorem, wanted in (
        (Amplified(), "SampledWithoutReplacement", "replace-one"),
        (Amplified(adjacency="add-remove"), "SampledWithoutReplacement", "replace-one"),
        (Amplified(poisson=True), "PoissonSampled", "add-remove"),
        (Amplified(adjacency="replace-one", poisson=True), "PoissonSampled", "add-remove"),
    ):
        words = f"{theorem} is proven for {wanted} neighbours, but cohort Amplified is accounted"
        with pytest.raises(UserError, match=words):
            replace(CLIPPED, cohort=cohort).spent(DIM, 100, 10)


@dataclass(frozen=True)
class OfRandomSize(Amplified):
    """Of a fixed size by its event only."""

    fixed = False


def test_sampling_counts_only_for_draws_that_it_is_proven_for() -> None:
    for cohort, words in (
        (Amplified(adjacency="add-remove", poisson=True), "drawn independently, .* fixed = True"),
        (OfRandomSize(adjacency="replace-one"), "cohorts of a fixed size, but .* fixed = False"),
    ):
        with pytest.raises(UserError, match=words):
            replace(CLIPPED, cohort=cohort).spent(DIM, 100, 10)


@dataclass(frozen=True)
class Sampling(Noise):
    """Claims sampling, which it does not see."""

    at: Any = "client"

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        return torch.zeros(message.dim, dtype=torch.float64)

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.Dominated(events.PoissonSampled(0.01, events.GaussianRelease(2.0)))


def test_no_part_brings_sampling_that_is_proven_for_other_neighbours() -> None:
    views: tuple[View, ...] = ("models", "messages")
    for view in views:
        with pytest.raises(UserError, match="PoissonSampled is proven for add-remove neighbours"):
            replace(CLIPPED, noise=Sampling()).release(DIM, 100, view)


@dataclass(frozen=True)
class Uncharged(OneNumber):
    """Says that it is not private, and has an event."""

    private = False

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2.0)


@dataclass(frozen=True)
class UnchargedSilos(SiloGaussian):
    """Says that it is not private, and adds noise in silos."""

    private = False
    by_silo = True

    def inside(self, silo: int) -> Noise:
        return Gaussian(1.0)


def test_a_guarantee_is_stated_for_no_run_that_is_not_charged() -> None:
    for recipe in (
        replace(CLIPPED, noise=Uncharged()),
        replace(SILOS, noise=UnchargedSilos((1.0,))),
    ):
        assert not recipe.private
        views: tuple[View, ...] = ("models", "sum", "messages")
        assert all(isinstance(recipe.release(DIM, 8, v), events.NonPrivate) for v in views)
        said = statement(recipe, DIM, 8, 3, DELTA)
        assert math.isinf(said.main.epsilon)
    assert "noise Uncharged declares that it is not private" in str(
        replace(CLIPPED, noise=Uncharged()).event(DIM, 8)
    )


@dataclass(frozen=True)
class Promising(Same):
    """Promises the noise of more clients than it draws."""

    cap: int | None = None

    def min_honest(self, population: int) -> int:
        return 5


def test_a_round_with_less_noise_than_is_accounted_is_aborted() -> None:
    recipe = replace(CLIPPED, cohort=Promising(), noise=Gaussian(2.0, "client"), view="sum")
    assert play(recipe, normal_answers(CLIENTS, DIM)).info.aborted


DRAWS = [[[0], [1]], [False, True], np.array([5, 3, 5], dtype=np.uint64), [0.0, 1.0]]


@pytest.mark.parametrize("drawn", [*map(np.asarray, DRAWS)], ids=repr)
def test_a_draw_is_a_list_of_indexes(drawn: np.ndarray) -> None:
    class Odd(Same):
        def draw(self, *rest: Any) -> np.ndarray:
            return drawn

    with pytest.raises(UserError, match="Return each index below 8 at most once"):
        prepared(replace(CLIPPED, cohort=Odd(None)))


# Claims


class Silent:
    """Keeps subclasses from being told apart."""

    def __init_subclass__(cls, **options: Any) -> None:
        pass


class Unasked(Silent, Poisson):
    """Draws in another way."""

    draw = Same.draw


@dataclass(frozen=True)
class Wrapped:
    """Answers like Poisson, and draws in another way."""

    inner: Cohort = Poisson(0.1)
    draw = Same.draw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


Cohort.register(Wrapped)


def test_a_draw_of_one_s_own_is_not_amplified_whatever_it_inherits() -> None:
    class Unclaimed(Poisson):
        claims = ()
        draw = Same.draw

    @dataclass(frozen=True)
    class TwoSlots(NoQuantization, Poisson):
        draw = Same.draw

    for cohort in (Unclaimed(0.1), TwoSlots(0.1)):
        recipe = replace(CLIPPED, cohort=cohort)
        assert recipe.event(30, 200) == events.GaussianRelease(2.0)
        assert recipe.adjacency() == "zero-out"


def test_claims_that_cannot_be_taken_back_are_refused() -> None:
    with pytest.raises(UserError, match="cohort Unasked takes `describe` from Poisson"):
        replace(CLIPPED, cohort=Unasked(0.1))


@pytest.mark.parametrize(
    "cohort", [Wrapped(), WatchedCohort(Poisson(0.1))], ids=["wrapped", "watched"]
)
def test_a_part_answers_itself(cohort: Any) -> None:
    with pytest.raises(UserError, match="does not define `adjacency`"):
        replace(CLIPPED, cohort=cohort)


# Participations that correlated noise relies on


@dataclass(frozen=True)
class OwnCorrelated(Noise):
    """Noise that is correlated over the rounds."""

    at: Any = "server"
    correlated: bool = True

    def draw(self, message: Norms, *rest: Any) -> Tensor:
        return torch.zeros(message.dim, dtype=torch.float64)

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.Correlated(2.0 * message.l2 / sensitivity.l2, square_root(4))


@dataclass(frozen=True)
class OwnIndependent(OwnCorrelated):
    """Says that it is correlated, and is not."""

    def event(self, message: Norms, sensitivity: Norms, *rest: Any) -> events.Release:
        return events.GaussianRelease(2.0 * message.l2 / sensitivity.l2)


def test_statement_and_ledger_agree_on_lost_rounds() -> None:
    for noise in (OwnCorrelated(), OwnIndependent()):
        recipe = replace(CLIPPED, cohort=Separated(5, separation=4, cap=1), noise=noise)
        charged = plan(recipe, 30, 100, "models").redrawn(8).spent(18)
        stated = redrawn(recipe, 8).spent(30, 100, 18)
        assert accounting.epsilon(stated, DELTA) == accounting.epsilon(charged, DELTA)
        assert accounting.epsilon(stated, DELTA) > accounting.epsilon(
            recipe.spent(30, 100, 10), DELTA
        )


def test_a_cap_does_not_count_where_the_server_is_the_adversary() -> None:
    noise = OwnCorrelated(at="client", correlated=False)
    capped = replace(CLIPPED, cohort=Poisson(0.5, cap=1), noise=noise, view="sum")
    uncapped = replace(capped, cohort=Poisson(0.5))
    assert capped.spent(30, 100, 10) == uncapped.spent(30, 100, 10)


@dataclass(frozen=True)
class Turns(Same):
    """Says that two participations are five rounds apart."""

    cap: int | None = None
    separation: int | None = 5
    spaced = True


@dataclass(frozen=True)
class Near(Separated):
    """Draws in another way."""

    draw = Same.draw


def test_a_separation_of_one_s_own_does_not_count() -> None:
    for cohort in (Turns(), Near(2, separation=5)):
        recipe = replace(CLIPPED, cohort=cohort, noise=OwnCorrelated())
        assert recipe.max_participations(10) == 10
        release = recipe.release(DIM, 100)
        assert isinstance(release, events.Correlated)
        assert release.separation == 1


# Silos


@dataclass(frozen=True)
class Warming(RecordSGD):
    """Samples all records after the first round."""

    by_record = True

    def inside(self, silo: int, round: int, noise: Noise) -> Inside:
        rate = 1.0 if round else 0.1
        return super().inside(silo, round, noise)._replace(cohort=Poisson(rate))


@dataclass(frozen=True)
class Unequal(RecordSGD):
    """Samples all records of all silos but the first."""

    by_record = True

    def inside(self, silo: int, round: int, noise: Noise) -> Inside:
        rate = 1.0 if silo else 0.1
        return super().inside(silo, round, noise)._replace(cohort=Poisson(rate))


@dataclass(frozen=True)
class Quieter(SiloGaussian):
    """Less noise in all silos but the first."""

    by_silo = True

    def inside(self, silo: int) -> Noise:
        return Gaussian(0.1 if silo else 10.0)


def in_silos(kind: type[RecordSGD]) -> Recipe:
    own = SILOS.local
    assert isinstance(own, RecordSGD)
    return replace(SILOS, local=kind(own.learning_rate, own.steps, own.rates, own.clip))


def silo_rounds(kind: type[RecordSGD], rounds: int = 2) -> None:
    from fedveil.testing.silos import Valued

    recipe, data = in_silos(kind), people(3)
    state = begin(recipe, torch.zeros(DIM), data, rounds, 0)
    for _ in range(rounds):
        state, _ = run_round(recipe, state, data, Valued(), 0)


def test_a_silo_releases_in_every_round_what_is_accounted() -> None:
    silo_rounds(Warming, 1)
    silo_rounds(Unequal, 2)
    with pytest.raises(UserError, match=r"silo 0 in round 2 releases .*rate=1.0.* is accounted"):
        silo_rounds(Warming, 2)


def test_every_silo_of_a_stranger_is_accounted() -> None:
    for recipe in (in_silos(Unequal), replace(SILOS, noise=Quieter((1.0,)))):
        release = recipe.release(DIM, 3)
        assert isinstance(release, events.InSilos)
        assert len(release.silos) == 3
        assert release.silos[0] != release.silos[1]


def test_noise_inside_silos_is_added_by_the_silo() -> None:
    @dataclass(frozen=True)
    class Shared(RecordSGD):
        by_record = True

        def inside(self, silo: int, round: int, noise: Noise) -> Inside:
            return super().inside(silo, round, noise)._replace(noise=Gaussian(1.0, "client"))

    with pytest.raises(UserError, match="needs noise of its own"):
        in_silos(Shared).release(DIM, 3)


def test_parts_inside_silos_are_named() -> None:
    @dataclass(frozen=True)
    class Outside(RecordSGD):
        by_record = True

        def inside(self, silo: int, round: int, noise: Noise) -> Inside:
            return super().inside(silo, round, noise)._replace(bound=SlyClip(1.0))

    recipe = in_silos(Outside)
    assert any(name.endswith("SlyClip") for name in recipe.foreign)
    assert "SlyClip" in dict(statement(recipe, DIM, 3, 2, DELTA).entries())["Assumptions"]


def test_noise_inside_silos_is_calibrated_with_the_evaluations() -> None:
    silos = algorithms.silo_dp_fedavg(rate=0.01, steps=5)
    evaluated = replace(silos, view="models", evaluation=Statistics(2.0, 0.0))
    found = calibrated(evaluated, Budget(3.0, DELTA), 10, DIM, 3)
    assert statement(found, DIM, 3, 10, DELTA).main.epsilon <= 3.0


# Local work


@dataclass(frozen=True)
class Neighbours(SGD):
    """Uses the first example of the next client, too."""

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        return LocalPlan(torch.arange(int(sizes[0]) + 1)[None, None], torch.ones(1, 1))


class OnePlan(SGD):
    """Returns the same tensor every time."""

    out = torch.zeros(1, 1, 1, dtype=torch.int64)

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        return LocalPlan(self.out.copy_(sizes.reshape(1, 1, 1) - 1), torch.ones(1, 1))


def test_a_client_uses_its_own_examples() -> None:
    local = Neighbours(Constant(0.1), steps=1)
    with pytest.raises(UserError, match="Neighbours plans examples of other clients"):
        prepared(replace(CLIPPED, local=local, cohort=Poisson(1.0)))
    one = OnePlan(Constant(0.1), steps=1)
    plan = local_plan(one, people(4), np.arange(4), 0, 0)
    assert plan.index.flatten().tolist() == [0, 2, 0, 39]


class BySize(SGD):
    """A momentum that depends on the number of examples."""

    def plan(self, sizes: Tensor, round: int, rng: np.random.Generator) -> LocalPlan:
        return replace(super().plan(sizes, round, rng), momentum=1 / (1 + float(sizes[0])))


def test_a_plan_does_not_depend_on_another_client_s_size() -> None:
    with pytest.raises(UserError, match="differ in momentum"):
        local_plan(BySize(Constant(0.1), steps=1), people(4), np.arange(4), 0, 0)


# Answers that change


def test_calibration_asks_a_part_that_may_change_again() -> None:
    @dataclass(frozen=True)
    class Changing(Cohort):
        adjacency = "add-remove"
        independent = True
        rate: float = 0.01

        def expected(self, population: int) -> float:
            return self.rate * population

        def draw(self, population: int, rng: Any, state: Tensors | None = None) -> np.ndarray:
            return np.flatnonzero(rng.random(population) < self.rate)

        def amplify(self, event: events.Round, population: int) -> events.Round:
            return events.PoissonSampled(self.rate, event)  # type: ignore[arg-type]

    cohort = Changing()
    recipe = replace(CLIPPED, cohort=cohort, noise=Gaussian())
    calibrated(recipe, Budget(1.0, DELTA), 20, DIM, 1000)
    object.__setattr__(cohort, "rate", 0.9)
    found = calibrated(recipe, Budget(1.0, DELTA), 20, DIM, 1000)
    assert statement(found, DIM, 1000, 20, DELTA).main.epsilon <= 1.0


# Memories


@dataclass(frozen=True)
class FirstColumn(Memory):
    """One number, which would count in every coordinate."""

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        return message

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        return update[:, :1]


@dataclass(frozen=True)
class Telling(Memory):
    """Writes what a client computed into the server's state, or into its message."""

    corrects = True

    def learn(self, remembered: Tensor, message: Tensor) -> Tensor:
        return message

    def compare(self, remembered: Tensor, update: Tensor) -> Tensor:
        return update

    def correction(self, remembered: Tensor, state: Tensors) -> Tensor:
        state["direction"].add_(remembered[0])
        return torch.zeros_like(remembered)

    def after(self, remembered: Tensor, update: Tensor, message: Tensor, state: Tensors) -> Tensor:
        state["direction"].add_(update[0])
        message.copy_(update)
        return update

    def step(self, state: Tensors, mean: Tensor) -> tuple[Tensor, Tensors]:
        return state["direction"] + mean, state


TELLING = replace(CLIPPED, memory=Telling(), cohort=Poisson(1.0))


def released(answers: list[Tensor], rounds: int = 2) -> Tensor:
    data = people(CLIENTS)
    state = begin(TELLING, torch.zeros(DIM), data, rounds, 0)
    for _ in range(rounds):
        state, _ = run_round(TELLING, state, data, Scripted(answers), 0)
    return state.x


def require_kept_apart() -> None:
    answers = normal_answers(CLIENTS, DIM)
    moved = released([1e6 * answers[0], *answers[1:]]) - released(answers)
    assert float(moved.norm()) <= 2 * 2 * 0.7 / CLIENTS


def test_a_memory_does_not_write_to_the_server_s_state() -> None:
    require_kept_apart()
    check_history(TELLING)


def test_a_memory_does_not_write_to_a_message() -> None:
    state: State = begin(TELLING, torch.zeros(DIM), people(1), 1, 0)
    engine = Scripted(normal_answers(1, DIM))
    sent = client_message(TELLING, state, people(1), engine, 0, 0, torch.zeros(DIM))
    assert float(sent.numbers.norm()) <= 0.7
