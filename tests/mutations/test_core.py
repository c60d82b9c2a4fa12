"""Mistakes that must be caught: each is made on purpose, and a named guard must notice it.

A guard is a check of the contracts, and passes on the code as it is. A mistake is a line of that
code changed; should the line go, its mutation fails loudly and must be written anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedveil import algorithms, loop
from fedveil.accounting import events, norms
from fedveil.data.federated import Examples, Federated
from fedveil.engines import bounding
from fedveil.errors import UserError
from fedveil.loop import State, begin
from fedveil.parts import bound, cohort, discrete, noise, quantize
from fedveil.parts.report import Difference
from fedveil.privacy.calibrate import Budget, calibrated
from fedveil.privacy.guarantee import Guarantee
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.testing.bounds import check_bound
from fedveil.testing.cohorts import check_cohort
from fedveil.testing.noises import check_noise
from fedveil.testing.quantizers import check_quantizer
from fedveil.testing.recipes import (
    CLIENTS,
    DIM,
    check_amplification,
    check_attendance,
    check_broken_clients,
    check_cap,
    check_count,
    check_denominator,
    check_empty_cohort,
    check_fresh_noise,
    check_history,
    check_neighbours,
    check_noise_follows_threshold,
    check_noise_of_rounds,
    check_outsiders,
    check_views,
    check_wire,
)
from fedveil.testing.replay import Scripted, normal_answers, people
from fedveil.training import prepare as training
from tests.contracts.examples import PRIVATE
from tests.contracts.test_contracts import OTHERS, check_remark, check_runs_share_no_noise, noise_of
from tests.mutations.making import Mutation, line, mutate, named, require_caught, returning

SERVER = algorithms.dp_fedavg(rate=0.2, noise_multiplier=2.0)


# ------------------------------------------------------------------------- guards of whole runs


def small() -> Federated:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(24, 5)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 24))
    return Federated("small", inputs, labels, torch.arange(0, 25, 2), Examples(inputs, labels), 3)


def check_other_epsilon() -> None:
    """Runs with another ε have other noise, not the same at another scale."""
    check_runs_share_no_noise(small(), OTHERS["epsilon"])


def check_secret_noise() -> None:
    """Two secure runs of the same settings have unrelated noise."""
    recipe = algorithms.fed_alpha_normec(noise_multiplier=2.0)
    runs = [training.prepare(recipe, small(), rounds=3, noise="secure", seed=4) for _ in range(2)]
    alike = float(noise_of(runs[0]) @ noise_of(runs[1]))
    assert abs(alike) < 0.99, f"two secure runs drew the same noise ({alike:.3f}): it is seeded"


def check_outsiders_of(name: str) -> Callable[[], None]:
    return lambda: check_outsiders(PRIVATE[name], normal_answers(CLIENTS, DIM))


def check_budget_is_kept() -> None:
    """The published TDL is refused by any budget: it has no guarantee to meet it with."""
    recipe = algorithms.dp_norm_fedavg_qtdl(5, calibration="das2021", claimed_epsilon=0.5)
    try:
        calibrated(recipe, Budget(50.0, 1e-2), 1, DIM, CLIENTS)
    except UserError:
        return
    raise AssertionError("QTDL with the published m met a budget")


# --------------------------------------------------------------------------- the adaptive clip


def lengths(clients: int = 200) -> np.ndarray:
    """Lengths of updates with a known median, spread over more than a decade."""
    return np.exp(np.random.default_rng(1).normal(size=clients))


def threshold_after(rounds: int, factor: float) -> float:
    """Where the threshold stands that began at factor·median, over the median."""
    norms_ = lengths()
    median = float(np.median(norms_))
    recipe = algorithms.dp_fedavg_adaptive(
        start=factor * median, clip_rate=0.4, rate=0.5, noise_multiplier=1.0, report=Difference()
    )
    directions = torch.nn.functional.normalize(torch.stack(normal_answers(len(norms_), DIM)))
    rows = list(directions * torch.from_numpy(norms_).float()[:, None])
    data, engine = people(len(rows)), Scripted(rows, group_size=256)
    state: State = begin(recipe, torch.zeros(DIM), data, rounds, key=2)
    for _ in range(rounds):
        state, _ = loop.run_round(recipe, state, data, engine, key=2)
    return float(state.parts["bound"]["threshold"]) / median


def check_finds_the_median() -> None:
    """From a thousandth and from a thousand times the median, the threshold comes to it."""
    for factor in (1e-3, 1.0, 1e3):
        found = threshold_after(70, factor)
        assert 0.75 < found < 1.33, f"from {factor:g} medians the clip went to {found:.3g} of them"


def test_an_adaptive_clip_with_its_sign_flipped_runs_away(monkeypatch: pytest.MonkeyPatch) -> None:
    flipped_sign(monkeypatch)
    assert threshold_after(70, 1e-3) < 1e-6
    assert threshold_after(70, 1e3) > 1e6


# ---------------------------------------------------------------------------------- mistakes


def skipped_clip(patch: pytest.MonkeyPatch) -> None:
    for module in (loop, bounding):
        patch.setattr(module, "scales_of", lambda lengths, *_: torch.ones_like(lengths))


flipped_sign = line(bound.AdaptiveClip, "next", ("-self.rate *", "self.rate *"))


def noise_before_the_clip(patch: pytest.MonkeyPatch) -> None:
    noisy = (
        "updates = DenseUpdates(updates.rows() + self.recipe.noise.draw(\n"
        "            self.recipe.message(len(state.x)), 1, 1.0,"
        " stream(self.key, 0, 'early')).float())\n"
        "        norms = updates.norms()"
    )
    mutate(patch, loop._Work, "messages", ("norms = updates.norms()", noisy))
    mutate(
        patch, loop, "conclude_round", ("released(noise, message)", "released(0 * noise, message)")
    )


def shuffled(fixed: bool) -> Callable[[Any], None]:
    """Every unit once an epoch: batches of a shuffled population, cut one after the other."""
    order: list[int] = []
    once: list[int] = []

    def draw(self: Any, population: int, rng: np.random.Generator, taken: Any = None) -> np.ndarray:
        if not order:
            fresh = once if fixed and once else rng.permutation(population).tolist()
            once[:] = fresh
            order.extend(fresh)
        size = round(self.rate * population)
        return np.sort([order.pop() for _ in range(min(size, len(order)))]).astype(int)

    return returning(cohort.Poisson, "draw", draw)


def same_noise_each_round(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        loop, "stream", lambda key, k, what: stream(key, 0 if "noise" in what else k, what)
    )


def sold_as_private(patch: pytest.MonkeyPatch) -> None:
    """Das et al. 2021, Thm. 1 taken at its word."""

    def event(self: Any, message: norms.Norms, *rest: Any) -> events.Release:
        return events.ApproximateRelease(self.epsilon, 2.0**-message.dim)

    patch.setattr(discrete.PublishedLaplace, "event", event)


def silent_when_empty(patch: pytest.MonkeyPatch) -> None:
    real = noise.Gaussian.draw

    def draw(self: Any, message: Any, arrived: int, expected: float, rng: Any) -> torch.Tensor:
        return real(self, message, arrived, expected, rng) * (1.0 if arrived else 0.0)

    patch.setattr(noise.Gaussian, "draw", draw)


def scales_that_let_nan_pass(patch: pytest.MonkeyPatch) -> None:
    """As if by `if norm > C: shrink`, which NaN is not."""

    def scales(norms: torch.Tensor, bound: Any, dim: int) -> torch.Tensor:
        return torch.where(norms > bound.norm, bound.norm / norms, 1.0)

    for module in (loop, bounding):
        patch.setattr(module, "scales_of", scales)


def fixed_size_as_poisson(self: cohort.FixedSize, event: Any, population: int) -> events.Round:
    return events.PoissonSampled(self.clients / population, event)


def of(guard: Callable[[Recipe], Any], name: str) -> Callable[[], Any]:
    return lambda: guard(PRIVATE[name])


def on(guard: Callable[[Any], None], part: Any) -> Callable[[], None]:
    return lambda: guard(part)


MUTATIONS = [
    # The issue's own list.
    Mutation(
        "Gaussian noise halved",
        line(noise.Gaussian, "draw", ("mul_(self", "mul_(0.5 * self")),
        "check_noise",
        on(check_noise, noise.Gaussian(2.0)),
    ),
    Mutation(
        "Gaussian noise halved in a run",
        line(noise.Gaussian, "draw", ("mul_(self", "mul_(0.5 * self")),
        "check_noise_of_rounds",
        of(check_noise_of_rounds, "dp_fedavg"),
    ),
    Mutation(
        "rounded Gaussian noise halved",
        line(noise.RoundedGaussian, "draw", ("/ grid_of(message)", "/ grid_of(message) / 2")),
        "check_noise",
        on(check_noise, noise.RoundedGaussian(2.0)),
    ),
    Mutation(
        "noise on messages halved",
        line(
            discrete._OnMessages, "each", ("draw(message.dim, rng)", "draw(message.dim, rng) // 2")
        ),
        "check_noise",
        on(check_noise, discrete.DiscreteGaussian(20.0, 200)),
    ),
    Mutation(
        "discrete Gaussian table of half the width",
        line(
            discrete.DiscreteGaussian,
            "table",
            ("calibrated_amount(self, self.sigma)", "self.sigma / 2"),
        ),
        "check_noise",
        on(check_noise, discrete.DiscreteGaussian(20.0, 200)),
    ),
    Mutation(
        "clip skipped",
        skipped_clip,
        "check_bound",
        on(check_bound, bound.Clip(1.0)),
    ),
    Mutation(
        "clip skipped in a run",
        skipped_clip,
        "check_neighbours",
        of(check_neighbours, "dp_fedavg"),
    ),
    Mutation(
        "realised denominator",
        line(
            loop,
            "conclude_round",
            ("= expected_of(recipe.cohort, population)", "= float(max(came, 1))"),
        ),
        "check_denominator",
        of(check_denominator, "dp_fedavg"),
    ),
    Mutation(
        "noise added before the clip",
        noise_before_the_clip,
        "check_noise_of_rounds",
        of(check_noise_of_rounds, "dp_fedavg"),
    ),
    Mutation(
        "weights by example count",
        line(
            loop._Work,
            "messages",
            (
                "scales_of(norms, self.bound, self.limits.bounded)",
                "scales_of(norms, self.bound, self.limits.bounded)"
                " * group.data.sizes[torch.from_numpy(group.clients)]",
            ),
        ),
        "check_neighbours",
        of(check_neighbours, "dp_fedavg of a fixed size"),
    ),
    Mutation(
        "shuffled batches accounted as Poisson",
        shuffled(fixed=False),
        "check_cohort",
        on(check_cohort, cohort.Poisson(0.2)),
    ),
    Mutation(
        "a fixed partition accounted as Poisson",
        shuffled(fixed=True),
        "check_cohort",
        on(check_cohort, cohort.Poisson(0.2)),
    ),
    Mutation(
        "δ of 1/n and more unremarked",
        returning(Guarantee, "warning", lambda self: ""),
        "check_remark",
        on(check_remark, SERVER),
    ),
    Mutation(
        "noise reused in every round",
        same_noise_each_round,
        "check_fresh_noise",
        of(check_fresh_noise, "dp_fedavg"),
    ),
    Mutation(
        "clients' noise reused in every round",
        same_noise_each_round,
        "check_fresh_noise",
        of(check_fresh_noise, "dp_norm_fedavg_discrete"),
    ),
    Mutation(
        "noise reused in runs with another ε",
        returning(training, "run_key", lambda seed, *facts: str(seed)),
        "check_runs_share_no_noise",
        check_other_epsilon,
    ),
    Mutation(
        "adaptive clip with its sign flipped",
        flipped_sign,
        "check_finds_the_median",
        check_finds_the_median,
    ),
    Mutation(
        "TDL with the paper's m sold as private",
        sold_as_private,
        "check_noise",
        on(check_noise, discrete.PublishedLaplace(epsilon=0.5)),
    ),
    Mutation(
        "TDL with the paper's m under a budget",
        sold_as_private,
        "check_budget_is_kept",
        check_budget_is_kept,
    ),
    # And more of the kind.
    Mutation(
        "replace-one sensitivity without its factor 2",
        returning(norms.Norms, "sensitivity", lambda self, adjacency: self),
        "check_neighbours",
        of(check_neighbours, "dp_fedavg of a fixed size"),
    ),
    Mutation(
        "top-up of client-side noise left out",
        line(noise.Gaussian, "draw", ("max(arrived / expected, 1.0)", "(arrived / expected)")),
        "check_noise",
        on(check_noise, noise.Gaussian(2.0, "client")),
    ),
    Mutation(
        "cap ignored by the draw",
        returning(
            cohort, "below_cap", lambda population, cap, taken: np.ones(population, dtype=bool)
        ),
        "check_cohort",
        on(check_cohort, cohort.Poisson(0.5, cap=3)),
    ),
    Mutation(
        "participations not counted",
        returning(cohort.Cohort, "step", lambda self, state, drawn: state),
        "check_cap",
        of(check_cap, "dp_fedavg capped"),
    ),
    Mutation(
        "conditional rounding without retry",
        returning(quantize, "_too_long", lambda steps, longest: torch.zeros(len(steps)).bool()),
        "check_quantizer",
        on(check_quantizer, quantize.ConditionalRound(16)),
    ),
    Mutation(
        "rounding outwards",
        line(
            quantize,
            "_rounded",
            ("torch.floor(exact + uniform)", "torch.floor(exact + uniform + 1)"),
        ),
        "check_quantizer",
        on(check_quantizer, quantize.StochasticRound(16)),
    ),
    Mutation(
        "a modular sum of too few bits",
        line(Recipe, "wire", ("bits + math.ceil(math.log2(largest))", "bits")),
        "check_wire",
        of(check_wire, "dp_norm_fedavg_secagg"),
    ),
    Mutation(
        "Poisson amplification claimed for client-side noise",
        returning(Recipe, "hidden", lambda self, view: view == "models"),
        "check_amplification",
        of(check_amplification, "dp_fedavg with noise at the clients"),
    ),
    Mutation(
        "amplification in a view that shows who takes part",
        returning(Recipe, "hidden", lambda self, view: True),
        "check_views",
        of(check_views, "dp_fedavg of a fixed size with noise at the clients"),
    ),
    Mutation(
        "the server's noise counted against the server",
        line(Recipe, "_exposed", ('self.noise.at == "server" and view', "False and view")),
        "check_views",
        of(check_views, "dp_fedavg"),
    ),
    Mutation(
        "the count's noise left out of the event",
        returning(bound.AdaptiveClip, "joined", lambda self, release, adjacency, expected: release),
        "check_count",
        of(check_count, "dp_fedavg_adaptive"),
    ),
    Mutation(
        "the count's noise left out",
        line(bound.AdaptiveClip, "next", ("(halves + noise)", "halves")),
        "check_count",
        of(check_count, "dp_fedavg_adaptive"),
    ),
    Mutation(
        "noise that stays at the first threshold",
        line(
            loop,
            "conclude_round",
            ("total.message or recipe.message(len(x), bound)", "recipe.message(len(x))"),
        ),
        "check_noise_follows_threshold",
        of(check_noise_follows_threshold, "dp_fedavg_adaptive"),
    ),
    Mutation(
        "a secure run with a seeded stream",
        line(training, "prepare", ('SecretKey.agreed(team.secret) if noise == "secure" else ', "")),
        "check_secret_noise",
        check_secret_noise,
    ),
    Mutation(
        "NaN passes the clip",
        scales_that_let_nan_pass,
        "check_broken_clients",
        of(check_broken_clients, "dp_fedavg"),
    ),
    Mutation(
        "no margin for rounding in the bound",
        lambda patch: patch.setattr(bound, "MARGIN", 1.0),
        "check_bound",
        on(check_bound, bound.Clip(1.0)),
    ),
    Mutation(
        "an empty round without noise",
        silent_when_empty,
        "check_empty_cohort",
        of(check_empty_cohort, "dp_fedavg"),
    ),
    Mutation(
        "rounds with too few arrivals released",
        returning(Recipe, "least_arrivals", lambda self, population: 0),
        "check_noise_of_rounds",
        of(check_noise_of_rounds, "dp_norm_fedavg_secagg"),
    ),
    Mutation(
        "a Poisson cohort sure of its expected size",
        line(cohort.Poisson, "min_honest", ("self.honest or 1", "int(self.rate * population)")),
        "check_cohort",
        on(check_cohort, cohort.Poisson(0.2)),
    ),
    Mutation(
        "a fixed size accounted as Poisson",
        returning(cohort.FixedSize, "amplify", fixed_size_as_poisson),
        "check_cohort",
        on(check_cohort, cohort.FixedSize(10)),
    ),
    Mutation(
        "a fixed size drawn with replacement",
        line(cohort.FixedSize, "draw", ("replace=False", "replace=True")),
        "check_cohort",
        on(check_cohort, cohort.FixedSize(10)),
    ),
    Mutation(
        "capped draws accounted as independent",
        line(cohort.FixedSize, "coin", ("None if self.cap is not None else ", "")),
        "check_attendance",
        of(check_attendance, "dp_fedavg of a fixed size, capped"),
    ),
    Mutation(
        "one noise for all clients",
        line(loop._Work, "noise", ("noise of {c}", "noise of all")),
        "check_fresh_noise",
        of(check_fresh_noise, "dp_norm_fedavg_secagg"),
    ),
    Mutation(
        "those who only work counted as sent",
        line(
            loop,
            "sum_of_messages",
            ("np.isin(workers, cohort, assume_unique=True)", "np.ones(len(workers), dtype=bool)"),
        ),
        "check_outsiders",
        check_outsiders_of("fed_alpha_normec of everyone"),
    ),
    Mutation(
        "memory subtracted after the bound",
        line(
            loop._Work,
            "messages",
            ("self.compared(own, remembered)", "DenseUpdates(own)"),
            ("self._sent(quantized[sends]", "self._sent((quantized - remembered)[sends]"),
        ),
        "check_history",
        of(check_history, "fed_alpha_normec of everyone"),
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught_by_its_guard(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_caught(mutation, monkeypatch)


def test_the_mistakes_of_the_list_are_all_made() -> None:
    made = " ".join(mutation.mistake for mutation in MUTATIONS)
    for mistake in (
        "noise halved", "clip skipped", "realised denominator", "noise added before the clip",
        "weights by example count", "shuffled batches accounted as Poisson", "unremarked",
        "noise reused in every round", "another ε", "sign flipped", "paper's m sold as private",
    ):  # fmt: skip
        assert mistake in made, f"nothing makes the mistake '{mistake}'"
