"""audit: play a run with canaries in it, and say how much privacy it has lost at least."""

from __future__ import annotations

from typing import Literal

import numpy as np
from torch import nn

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
from fedveil.charging import refuse_on_budget
from fedveil.data.federated import Federated
from fedveil.errors import UserError, unknown
from fedveil.loop import play_round
from fedveil.privacy import events
from fedveil.privacy.statement import VIEWS
from fedveil.recipe import Recipe
from fedveil.streams import stream
from fedveil.threads import one_thread_each
from fedveil.training import Training, prepare

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

    By the fixed-variance Gaussian bound where noise is Gaussian, else by one-run auditing.
    """
    mixed, places = place_canaries(recipe, data, canaries, kind, seed)
    training = prepare(
        recipe, mixed, model, rounds, epsilon, delta, seed, engine, rounds, noise=noise
    )
    return audited(training, places, kind, method, alpha)


def place_canaries(
    recipe: Recipe, data: Federated, count: int, kind: Kind, seed: int
) -> tuple[Federated, np.ndarray]:
    """The recipe's population with canaries in it, and where they are."""
    if not LEAST <= count <= MOST:
        raise UserError(f"canaries is {count}; it must be a whole number from {LEAST} to {MOST}.")
    if not recipe.private:
        raise UserError(
            f"{recipe.name} adds no noise and promises nothing, so there is nothing to audit; "
            "choose a private algorithm."
        )
    if kind not in KINDS:
        raise unknown("kind of canary", kind, KINDS)
    refuse_on_budget(data, "an audit's rounds")
    rng = stream(seed, 0, "places of canaries")
    if recipe.unit == "example" and data.unit == "client":
        data = data.by_example()
    if kind == "direction":
        return with_canaries(data, count, rng)
    if recipe.unit != "example" or data.loss != "cross_entropy":
        raise UserError(
            "Mislabelled canaries are examples with a wrong class, for recipes that protect "
            "examples; use canaries of the kind direction."
        )
    return with_mislabelled(data, count, rng)


def audited(
    training: Training,
    places: np.ndarray,
    kind: Kind = "direction",
    method: Method = "auto",
    alpha: float = ALPHA,
) -> Audit:
    """Play a prepared training whose units at `places` are canaries, and look at what it shows."""
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha is {alpha}; it must lie between 0 and 0.5, such as 0.05.")
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
    """Whether canaries are put in by coins; a bound by alignment needs them all, and Gaussians."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    release = evidence.sum_release(training, "models")
    fits = isinstance(release, events.GaussianRelease) and kind == "direction"
    if method == "gaussian" and not fits:
        raise UserError(
            "The method gaussian needs Gaussian noise and canaries of the kind direction; use the "
            "method one-run."
        )
    return method == "one-run" or not fits


def _coins(training: Training, count: int) -> np.ndarray:
    """Fair coins: 1 or 0, or 1 or −1 where a neighbour sends something else."""
    other = -1.0 if training.recipe.adjacency("models") == "replace-one" else 0.0
    return np.where(stream(training.key, 0, "coins of canaries").random(count) < 0.5, 1.0, other)


def _play(training: Training, canaries: Canaries) -> evidence.Seen:
    """All rounds; only sums over canaries are kept."""
    engine = CanaryEngine(training.engine, canaries, training.recipe)
    heard = Heard(canaries, engine, training.recipe.cohort.expected(training.data.clients))
    recipe = listening(training.recipe, heard)
    alike = isinstance(canaries, WorkingCanaries)
    seen = evidence.Seen(canaries, evidence.ridge(training) if alike else None)
    while not training.finished:
        k = training.state.round
        engine.begin(k, training.state.x, training.data)
        with one_thread_each():  # the engine adds up what it sees, group after group
            training.state, _ = play_round(
                recipe, training.state, training.data, engine, training.key
            )
        seen.take_in(heard, canaries.directions(k))
    return seen
