"""Questions about the Gaussian mechanism without any run: give all but one, get the one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedveil.errors import UserError
from fedveil.parts.bound import Clip
from fedveil.parts.cohort import Cohort, Everyone, FixedSize, Poisson
from fedveil.parts.local import SGD
from fedveil.parts.noise import Gaussian
from fedveil.parts.schedule import Constant
from fedveil.privacy.calibrate import Budget, largest_cohort, most_rounds, sensible_delta, settle
from fedveil.privacy.statement import Statement, rounded_up, statement
from fedveil.recipe import Recipe, View

MANY = 1_000_000  # clients, where nothing depends on their number


@dataclass(frozen=True)
class Question:
    """What is known of a private training; what is None is asked for, ε first of all."""

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
    """What was found, in a sentence, and the statement it leads to."""

    found: str
    statement: Statement


def answer(question: Question) -> Answer:
    """Solve for the one thing that is missing: ε, noise, rounds or cohort."""
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
    return Answer(found or f"epsilon = {rounded_up(made.main.epsilon)}", made)


def _recipe(question: Question) -> Recipe:
    """A Gaussian mechanism; who sees more than models gets noise from the clients."""
    if question.view != "models" and not question.clients:
        raise UserError(
            f"In view '{question.view}' noise is shared between the clients of a round; say how "
            "many there are with --clients."
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
        raise UserError("Both a rate and a cohort are given; give one of them.")
    if question.cohort is not None:
        if not question.clients:
            raise UserError("A cohort of fixed size is drawn from a population; give --clients.")
        return FixedSize(question.cohort, question.cap)
    if question.rate is not None:
        return Poisson(question.rate, question.cap)
    if question.cap is not None:
        raise UserError("A cap needs a cohort that is drawn; give --rate or --cohort.")
    return Everyone()


def _spend(question: Question, recipe: Recipe) -> tuple[Recipe, int, str]:
    """ε itself is asked for."""
    if question.noise_multiplier is None or question.rounds is None:
        raise UserError(
            "Give all but one of --epsilon, --noise-multiplier, --rounds and --rate (or --cohort); "
            "without --epsilon, noise multiplier and rounds are needed."
        )
    return recipe, question.rounds, ""


def _solve(
    question: Question, recipe: Recipe, budget: Budget, clients: int
) -> tuple[Recipe, int, str]:
    """Noise, rounds, or the rate of a Poisson cohort."""
    if question.noise_multiplier is None:
        if question.rounds is None:
            raise UserError("To find the noise for an epsilon, give --rounds as well.")
        recipe = settle(recipe, budget, question.rounds, 1, clients)
        assert isinstance(recipe.noise, Gaussian)
        least = rounded_up(recipe.noise.multiplier or 0.0, 6)
        return recipe, question.rounds, f"noise multiplier = {least}"
    if question.rounds is None:
        rounds = most_rounds(recipe, budget, 1, clients)
        return recipe, rounds, f"rounds = {rounds:,}"
    if question.rate is not None or question.cohort is not None:
        raise UserError(
            "Epsilon, noise multiplier, rounds and cohort are all given; leave out the one to find."
        )
    sampled = replace(recipe, cohort=Poisson(0.5))
    recipe = largest_cohort(sampled, budget, question.rounds, 1, clients)
    assert isinstance(recipe.cohort, Poisson)
    largest = math.floor(recipe.cohort.rate * 1e6) / 1e6
    return recipe, question.rounds, f"rate = {largest or recipe.cohort.rate:.6g}"
