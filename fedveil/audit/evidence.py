"""Turns what a run's canaries revealed into lower bounds on ε and p-values of its proof."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedveil.accounting import accountant as accounting
from fedveil.accounting import events
from fedveil.audit import bounds, guessing
from fedveil.audit.canaries import Canaries, WorkingCanaries
from fedveil.audit.listening import Heard
from fedveil.audit.report import EpsilonEstimate, LowerBound, ViewFinding
from fedveil.loop import bound_of
from fedveil.privacy.guarantee import VIEWS, guarantee
from fedveil.recipe import View, observed
from fedveil.training.run import Training

POINTS = 25  # of a claimed privacy profile
TYPICAL = 30.0  # beyond this ε more guesses do not help

GAUSSIAN = (
    "that noise is isotropic and Gaussian, that messages add up, that cohorts are drawn as "
    "accounted, that their accounting is tight, and that the auditor knows what the others sent"
)
ONE_RUN = "nothing about the mechanism except that fair coins decide which canaries take part"
CURVE = "fair coins, and that the whole run's trade-off curve is that of a Gaussian release"
COSINE = "what the bound assumes"
PROJECTED = (
    "that noise projected on a random direction is nearly Gaussian (how nearly is not bounded), "
    "that messages add up, and that accounting is tight"
)


class CanaryEvidence:
    """What a run revealed about its canaries: alignments, scores by view, participations."""

    def __init__(self, canaries: Canaries, ridge: float | None = None) -> None:
        self.canaries = canaries
        self.ridge = ridge  # separates canaries with similar directions
        self.aligned: list[bounds.Aligned] = []  # of releases
        self.own: list[bounds.Aligned] = []  # of canaries' own messages
        self.scores = {view: np.zeros(len(canaries.places)) for view in VIEWS}
        self.taken = np.zeros(len(canaries.places), dtype=np.int64)

    @property
    def cosine(self) -> float:
        """Approximate mean cosine of a canary with the releases in which it took part."""
        return bounds.estimated_mu(self.aligned) / math.sqrt(self.canaries.dim)

    def take_in(self, heard: Heard, directions: np.ndarray) -> None:
        """Add one round: alignment of canaries with the release and with their own messages."""
        who = heard.who
        self.taken[who] += 1
        if heard.release is None or not np.isfinite(heard.release).all():
            return
        signed = directions[who] * self.canaries.signs[who][:, None]
        self.aligned += bounds.Aligned.of(signed.sum(axis=0), heard.release)
        size = float(np.linalg.norm(heard.release)) or 1.0
        dots = directions @ (heard.release / size).astype(np.float32)
        if self.ridge is not None:
            alike = directions @ directions.T + self.ridge * np.eye(len(directions))
            dots = np.linalg.solve(alike, dots)
        self.scores["models"] += dots
        self.scores["sum"][who] += dots[who]
        for canary, row, sent in zip(who, signed, heard.sent(), strict=False):
            self.scores["messages"][canary] += float(directions[canary] @ sent)
            self.own += bounds.Aligned.of(row, sent)


# ------------------------------------------------------------------------------ claims


def proven(training: Training, view: View) -> float:
    """The ε claimed for this run in a view."""
    size = (training.task.dim, training.data.clients, training.rounds)
    return guarantee(training.recipe, *size, training.delta, view).epsilon


def sum_release(training: Training, view: View) -> events.Release:
    """The claimed release of one round's sum, without the count of an adaptive clip."""
    recipe, dim, population = training.recipe, training.task.dim, training.data.clients
    if recipe.noise.at == "server" and view != "models":
        return recipe.release(dim, population, view)
    message = recipe.message(dim)
    sensitivity = message.sensitivity(recipe.adjacency(view))
    noise_shares, expected = (
        recipe.noise_shares(population, view),
        recipe.cohort.expected(population),
    )
    return recipe.noise.event(message, sensitivity, noise_shares, expected)


def unaudited(training: Training, view: View) -> ViewFinding | None:
    """The finding for a view without a claim or without a simulation; None for any other view."""
    claimed = proven(training, view)
    if not math.isfinite(claimed):
        release = training.recipe.release(training.task.dim, training.data.clients, view)
        why = release.reason if isinstance(release, events.NonPrivate) else "ε is not finite"
        return ViewFinding(view, claimed, silent=f"there is no proven ε, because {why}")
    if training.recipe.noise.correlated:
        why = "its noise is one release over the run, and the audit tests single rounds"
        return ViewFinding(view, claimed, silent=why)
    if view == "messages" and not training.recipe.noise.on_messages:
        why = "the simulation draws the clients' noise as one vector, so there are no messages"
        return ViewFinding(view, claimed, silent=why)
    return None


def ridge(training: Training) -> float | None:
    """(noise/message)² over a canary's probability to take part, as in the best linear estimate."""
    release = sum_release(training, "models")
    if not isinstance(release, events.GaussianRelease):
        return None
    share = training.recipe.cohort.expected(training.data.clients) / training.data.clients
    return (release.ratio * factor(training, "models")) ** 2 * 2 / share


def factor(training: Training, view: View) -> float:
    """The number of messages by which neighbours' sums differ: 1, or 2 under replace-one."""
    message = training.recipe.message(training.task.dim)
    return message.sensitivity(training.recipe.adjacency(view)).l2 / message.l2


# ------------------------------------------------------------------------------ Gaussian noise


@dataclass
class _Measured:
    """A noise with a measured release."""

    inner: Any
    ratio: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def event(self, *_: object) -> events.Release:
        return events.GaussianRelease(self.ratio)


def epsilon_at(training: Training, mu: float, view: View) -> float:
    """ε of the run if a message stood out by μ deviations in every round, all else unchanged.

    For the sum alone: the count of an adaptive clip is not audited.
    """
    if mu <= 0:
        return 0.0
    recipe = training.recipe
    bound = bound_of(recipe, training.state)  # which counts nothing by itself
    noise: Any = _Measured(recipe.noise, 1 / (mu * factor(training, view)))
    measured = observed(recipe, noise=noise, bound=bound)
    spent = measured.spent(training.task.dim, training.data.clients, training.rounds, view)
    if isinstance(spent, events.Composed) and isinstance(spent.event, events.GaussianRelease):
        return bounds.gaussian_epsilon(math.sqrt(spent.count) / spent.event.ratio, training.delta)
    with np.errstate(over="ignore"):  # almost no noise: probabilities with an infinite ratio
        return accounting.epsilon(spent, training.delta)


def _estimate(
    training: Training, aligned: list[bounds.Aligned], view: View, method: str, assumes: str
) -> EpsilonEstimate:
    return EpsilonEstimate(
        epsilon_at(training, bounds.estimated_mu(aligned), view), method, assumes
    )


def by_alignment(training: Training, seen: CanaryEvidence, view: View, alpha: float) -> ViewFinding:
    """The fixed-variance Gaussian bound: μ of one canary in one round, composed as accounted."""
    if (nothing := unaudited(training, view)) is not None:
        return nothing
    release = sum_release(training, view)
    assert isinstance(release, events.GaussianRelease)
    lower = bounds.alignment_mu(seen.aligned, alpha)
    return ViewFinding(
        view,
        proven(training, view),
        (LowerBound(epsilon_at(training, lower, view), "gaussian", GAUSSIAN),),
        _estimate(training, seen.aligned, view, "mean cosine", COSINE),
        bounds.alignment_p(seen.aligned, 1 / (release.ratio * factor(training, view))),
    )


# ------------------------------------------------------------------------------ coins


def by_guesses(training: Training, seen: CanaryEvidence, view: View, alpha: float) -> ViewFinding:
    """One-run auditing: the number of coins guessed right, against what privacy allows."""
    if (nothing := unaudited(training, view)) is not None:
        return nothing
    claimed, delta = proven(training, view), training.delta
    expected = bounds.gaussian_mu(min(claimed, TYPICAL), delta)
    made = guessing.number_of_guesses(len(seen.canaries.places), expected)
    guesses = guessing.guess(seen.scores[view], seen.canaries.signs > 0, made)
    curve = bounds.gaussian_epsilon(guessing.trade_off_mu(guesses, alpha), delta)
    any_mechanism = guessing.one_run_epsilon(guesses, delta, alpha)
    aligned = seen.own if view == "messages" else seen.aligned
    projected = _estimate(training, aligned, view, "projection", PROJECTED)
    return ViewFinding(
        view,
        claimed,
        (LowerBound(any_mechanism, "one-run", ONE_RUN), LowerBound(curve, "f-DP", CURVE)),
        None if isinstance(seen.canaries, WorkingCanaries) else projected,
        _claim_p(training, guesses, claimed, view),
    )


def _claim_p(training: Training, guesses: guessing.Guesses, claimed: float, view: View) -> float:
    """The p-value of the claim, by its (ε, δ) or by its whole profile, whichever is smaller."""
    size = (training.task.dim, training.data.clients, training.rounds)
    spent = training.recipe.spent(*size, view)
    grid = np.linspace(0.0, min(1.5 * claimed, guessing.MOST), POINTS)
    profile = [(float(e), accounting.delta(spent, float(e))) for e in grid]
    single = guessing.profile_p(guesses, [(min(claimed, guessing.MOST), training.delta)])
    whole = guessing.trade_off_p(guesses, guessing.profile_inverse(profile))
    return min(2 * min(single, whole), 1.0)


# ------------------------------------------------------------------------------ participation


def attendance_p(training: Training, taken: np.ndarray) -> float:
    """The p-value of the canaries' participations, if none exceeds the accounted rate.

    Tests the total, and the number of canaries with c participations or more, for every c. Counts
    from fixed-size draws are below those of coins in convex order, so their tails are at most e
    times a binomial's (docs/audit.md, "Attendance").
    """
    from scipy.stats import binom

    rounds, count, rate = training.rounds, len(taken), accounted_rate(training)
    if int(taken.max(initial=0)) > training.recipe.max_participations(rounds, "models"):
        return 0.0
    together = float(binom.sf(int(taken.sum()) - 1, count * rounds, rate))
    times = np.arange(1, rounds + 1)
    often = (taken[None, :] >= times[:, None]).sum(axis=1)
    worst = float(binom.sf(often - 1, count, binom.sf(times - 1, rounds, rate)).min())
    looks = 2 * math.e if training.recipe.cohort.fixed else 2.0
    return min(looks * together, looks * rounds * worst, 1.0)


def accounted_rate(training: Training) -> float:
    """The smallest participation rate that an accounting of `models` relies on; 1 if none does."""
    event = training.recipe.event(training.task.dim, training.data.clients, "models")
    return min(_rates(event.ways if isinstance(event, events.Proven) else (event,)))


def _rates(ways: tuple[events.Round, ...]) -> Iterator[float]:
    for way in ways:
        match way.by if isinstance(way, events.Dominated) else way:
            case events.PoissonSampled(rate):
                yield min(rate, 1.0)
            case events.SampledWithoutReplacement(cohort, population):
                yield cohort / population
            case _:
                yield 1.0
