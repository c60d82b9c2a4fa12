"""audit: train with canaries and bound the privacy loss from below."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import nn

from fedveil.accounting import events
from fedveil.audit import evidence
from fedveil.audit.bounds import ALPHA
from fedveil.audit.canaries import (
    Canaries,
    CanaryEngine,
    Kind,
    WorkingCanaries,
    with_canaries,
    with_mislabelled,
)
from fedveil.audit.listening import Heard, listening
from fedveil.audit.report import Audit
from fedveil.data.federated import Federated
from fedveil.errors import UserError, unknown
from fedveil.ledger.charging import refuse_on_budget
from fedveil.loop import run_round
from fedveil.models.losses import target_of
from fedveil.privacy.guarantee import VIEWS
from fedveil.random.streams import stream
from fedveil.recipe import Recipe
from fedveil.threads import one_thread_each
from fedveil.training.prepare import prepare
from fedveil.training.run import Training

LEAST, MOST = 10, 100_000  # canaries

Method = Literal["auto", "gaussian", "one-run"]
METHODS = ("auto", "gaussian", "one-run")
KINDS = ("direction", "mislabelled")


def audit(
    recipe: Recipe,
    data: Federated,
    model: str | nn.Module = "softmax",
    rounds: int = 100,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    canaries: int = 500,
    kind: Kind = "direction",
    method: Method = "auto",
    alpha: float = ALPHA,
    engine: str = "auto",
    noise: Literal["seeded", "secure"] = "seeded",
) -> Audit:
    """Train once with canaries among the units, and bound ε from below in every view.

    Uses the fixed-variance Gaussian bound for Gaussian noise, one-run auditing for any other.
    """
    mixed, places = place_canaries(recipe, data, canaries, kind, seed)
    training = prepare(
        recipe, mixed, model, rounds, epsilon, delta, seed, engine, rounds, noise=noise
    )
    return audited(training, places, kind, method, alpha)


def place_canaries(
    recipe: Recipe, data: Federated, count: int, kind: Kind, seed: int
) -> tuple[Federated, np.ndarray]:
    """The recipe's population with canaries, and their positions."""
    if not LEAST <= count <= MOST:
        raise UserError(f"canaries is {count}. Give a whole number from {LEAST} to {MOST}.")
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise and claims no privacy, so there is nothing to audit. "
            "Choose a private algorithm."
        )
    if recipe.by_record:
        raise UserError(
            f"{recipe.name} protects records inside silos, and an audit has no canaries for them. "
            "Audit the step inside a silo: dp_sgd with the same clip, rate and noise."
        )
    if kind not in KINDS:
        raise unknown("kind of canary", kind, KINDS)
    refuse_on_budget(data, "an audit's rounds")
    rng = stream(seed, 0, "places of canaries")
    if recipe.unit == "example" and data.unit == "client":
        data = data.by_example()
    if kind == "direction":
        return with_canaries(data, count, rng)
    if recipe.unit != "example" or target_of(data.loss) != "class":
        raise UserError(
            "Mislabelled canaries need a recipe that protects examples and data with classes. Use "
            "canaries of the kind direction."
        )
    return with_mislabelled(data, count, rng)


def audited(
    training: Training,
    places: np.ndarray,
    kind: Kind = "direction",
    method: Method = "auto",
    alpha: float = ALPHA,
) -> Audit:
    """Run a prepared training whose units at `places` are canaries, and evaluate them."""
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha is {alpha}. Give a number between 0 and 0.5, such as 0.05.")
    by_coins = _by_coins(training, kind, method)
    signs = _coins(training, len(places)) if by_coins else np.ones(len(places))
    make = Canaries if kind == "direction" else WorkingCanaries
    removed = training.recipe.adjacency("models") == "add-remove"
    seen = _play(training, make(places, signs, training.task.dim, training.key, removed))
    look = evidence.by_guesses if by_coins else evidence.by_alignment
    return Audit(
        name=training.recipe.name,
        unit=training.recipe.unit,
        data=training.data.name,
        canaries=len(places),
        population=training.data.clients,
        rounds=training.rounds,
        dim=training.task.dim,
        delta=training.delta,
        alpha=alpha,
        findings=tuple(look(training, seen, view, alpha) for view in VIEWS),
        attendance=evidence.attendance_p(training, seen.taken[seen.canaries.there]),
        cosine=None if by_coins else seen.cosine,
    )


def _by_coins(training: Training, kind: Kind, method: Method) -> bool:
    """Whether coins include canaries; alignment needs all canaries and Gaussian noise."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    release = evidence.sum_release(training, "models")
    fits = isinstance(release, events.GaussianRelease) and kind == "direction"
    if method == "gaussian" and not fits:
        raise UserError(
            "The method gaussian needs Gaussian noise and canaries of the kind direction. Use the "
            "method one-run."
        )
    return method == "one-run" or not fits


def _coins(training: Training, count: int) -> np.ndarray:
    """Fair coins: 1 or 0, or 1 or −1 under replace-one adjacency."""
    other = -1.0 if training.recipe.adjacency("models") == "replace-one" else 0.0
    return np.where(stream(training.key, 0, "coins of canaries").random(count) < 0.5, 1.0, other)


def _play(training: Training, canaries: Canaries) -> evidence.CanaryEvidence:
    """Run all rounds; keeps only sums over canaries."""
    engine = CanaryEngine(training.engine, canaries, training.recipe)
    heard = Heard(canaries, engine, training.recipe.cohort.expected(training.data.clients))
    recipe = listening(training.recipe, heard)
    alike = isinstance(canaries, WorkingCanaries)
    seen = evidence.CanaryEvidence(canaries, evidence.ridge(training) if alike else None)
    while not training.finished:
        k = training.state.round
        engine.begin(k, training.state.x, training.data)
        with one_thread_each():  # the engine accumulates its observations group by group
            training.state, _ = run_round(
                recipe, training.state, training.data, engine, training.key
            )
        seen.take_in(heard, canaries.directions(k))
    return seen
