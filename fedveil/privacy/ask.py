"""Solve for ε, noise, rounds or sampling rate of a Gaussian mechanism, without a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedveil.accounting.rounding import rounded_up
from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.checks import count
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.schedule import Constant
from fedveil.privacy.calibrate import Budget, calibrate, largest_cohort, most_rounds, sensible_delta
from fedveil.privacy.statement import Statement, statement
from fedveil.recipe import Recipe, View

MANY = 1_000_000  # clients, if nothing depends on their number


@dataclass(frozen=True)
class Question:
    """A private training with one unknown. If ε is None, it is the unknown."""

    epsilon: float | None = None
    delta: float | None = None
    noise_multiplier: float | None = None
    rounds: int | None = None
    rate: float | None = None
    cohort: int | None = None
    clients: int | None = None
    cap: int | None = None
    view: View = "models"


@dataclass(frozen=True)
class Answer:
    """The solution as text, and the statement of the training."""

    found: str
    statement: Statement


def answer(question: Question) -> Answer:
    """Solve for the unknown: ε, noise, rounds or sampling rate."""
    if question.rounds is not None:
        count("privacy", "rounds", question.rounds)
    recipe, clients = _recipe(question), question.clients or MANY
    delta = question.delta
    if delta is None:
        delta = sensible_delta(clients) if question.clients else 1e-5
    if question.epsilon is None:
        recipe, rounds, found = _spend(question, recipe)
    else:
        budget = Budget(question.epsilon, delta)
        recipe, rounds, found = _solve(question, recipe, budget, clients)
    made = statement(recipe, 1, question.clients or 0, rounds, delta, None)
    return Answer(found or f"ε = {rounded_up(made.main.epsilon)}", made)


def _recipe(question: Question) -> Recipe:
    """A Gaussian mechanism, with noise at the clients in views that see more than models."""
    if question.view != "models" and not question.clients:
        raise UserError(
            f"In view '{question.view}' the clients of a round share the noise, so their number "
            "matters. Give --clients."
        )
    return Recipe(
        "the Gaussian mechanism",
        SGD(Constant(1.0), steps=1),
        _cohort(question),
        bound=Clip(1.0),
        noise=Gaussian(
            question.noise_multiplier, "server" if question.view == "models" else "client"
        ),
        view=question.view,
    )


def _cohort(question: Question) -> Cohort:
    if question.rate is not None and question.cohort is not None:
        raise UserError("Both --rate and --cohort are given. Give one of them.")
    if question.cohort is not None:
        if not question.clients:
            raise UserError(
                "--cohort needs the number of clients it is drawn from. Give --clients."
            )
        return FixedSize(question.cohort, question.cap)
    if question.rate is not None:
        return Poisson(question.rate, question.cap)
    if question.cap is not None:
        raise UserError("--cap needs a sampled cohort. Give --rate or --cohort.")
    return Everyone()


def _spend(question: Question, recipe: Recipe) -> tuple[Recipe, int, str]:
    """ε is the unknown."""
    if question.noise_multiplier is None or question.rounds is None:
        raise UserError(
            "--epsilon is missing, and so is --noise-multiplier or --rounds. Give all but one of "
            "--epsilon, --noise-multiplier, --rounds and --rate (or --cohort)."
        )
    return recipe, question.rounds, ""


def _solve(
    question: Question, recipe: Recipe, budget: Budget, clients: int
) -> tuple[Recipe, int, str]:
    """The noise, the rounds or the rate of a Poisson cohort is the unknown."""
    if question.noise_multiplier is None:
        if question.rounds is None:
            raise UserError("The noise for an epsilon depends on the rounds. Give --rounds.")
        recipe = calibrate(recipe, budget, question.rounds, 1, clients)
        least = rounded_up(recipe.noise.noise_multiplier or 0.0, 6)
        return recipe, question.rounds, f"noise multiplier = {least}"
    if question.rounds is None:
        rounds = most_rounds(recipe, budget, 1, clients)
        return recipe, rounds, f"rounds = {rounds:,}"
    if question.rate is not None or question.cohort is not None:
        raise UserError(
            "--epsilon, --noise-multiplier, --rounds and a cohort are all given. Omit the one to "
            "compute."
        )
    sampled = replace(recipe, cohort=Poisson(0.5))
    recipe = largest_cohort(sampled, budget, question.rounds, 1, clients)
    rate = recipe.cohort.expected(clients) / clients
    largest = math.floor(rate * 1e6) / 1e6
    return recipe, question.rounds, f"rate = {largest or rate:.6g}"
