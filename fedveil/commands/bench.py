"""`fedveil bench`: time every engine on a user's own model, and show which one `auto` takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.engines.choose import EngineChoice
    from fedveil.engines.updates import Engine
    from fedveil.training.run import Training

LONGEST = 120.0  # seconds that the rounds of one engine may take by what the trial says


@dataclass(frozen=True)
class Timing:
    """How fast one engine is, or why it was not timed."""

    engine: str
    group: int = 0  # clients at a time
    seconds: float | None = None  # of a round
    problem: str = ""


@flags.from_settings(*flags.ALGORITHM, *flags.DATA, "model")
def bench(
    config: flags.Config = None,
    asked: flags.Asked = flags.NOTHING,
    rounds: Annotated[
        int, typer.Option(help="Number of timed rounds per engine, after one for warm-up.")
    ] = 3,
) -> None:
    """Time every engine on your own model and clients.

    Also shows which engine `auto` chooses, and why.
    """
    from fedveil.commands.progress import entry, getting_ready
    from fedveil.ledger.charging import refuse_on_budget
    from fedveil.training.settings import (
        from_settings,
        read_settings,
        refuse_unnamed_data,
        resolve_recipe,
    )

    if rounds < 1:
        raise UserError(f"--rounds {rounds}: it must be at least 1.")
    settings = read_settings(config, asked)
    refuse_unnamed_data(settings, "The settings file", "Name them with --dataset or --path")
    if settings.epsilon is None and not resolve_recipe(settings).noise.calibrated:
        settings = settings.model_copy(update={"epsilon": 5.0})  # any amount takes as long
    with getting_ready():
        training = from_settings(settings.model_copy(update={"engine": "auto"}))
        refuse_on_budget(training.data, "a benchmark's rounds")
    choice = _choice(training, "auto")
    entry("", headline(training), width=0)
    for timing in timings(training, choice, rounds):
        entry(timing.engine, described(timing), width=12)
    entry("auto", f"chooses {choice.engine.name}: {choice.reason}", width=12)


def headline(training: Training) -> str:
    """What is timed."""
    import torch

    expected = training.recipe.cohort.expected(training.data.clients)
    return (
        f"{training.recipe.name} on {training.data.name}: {training.task.dim:,} parameters, "
        f"{expected:,.0f} of {training.data.clients:,} {training.data.unit}s per round, "
        f"{torch.get_num_threads()} threads"
    )


def described(timing: Timing) -> str:
    """A line of the table."""
    if timing.seconds is None:
        return timing.problem
    each = "client" if timing.group == 1 else "clients"
    return f"{timing.seconds:.3g} s per round, in groups of up to {timing.group} {each}"


def timings(training: Training, choice: EngineChoice, rounds: int) -> Iterator[Timing]:
    """One engine after the other; one that would take too long is estimated from its trial."""
    from fedveil.engines.choose import ENGINES

    for name in ENGINES[1:]:
        try:
            engine = _choice(training, name).engine
        except UserError as problem:
            yield Timing(name, problem=str(problem))
            continue
        expected = _expected(training, choice, name)
        if expected is not None and expected * (rounds + 1) > LONGEST:
            text = f"about {expected:.2g} s per round, estimated from a trial"
            yield Timing(name, problem=text)
        else:
            yield Timing(name, engine.group_size, _timed(training, engine, rounds))


def _choice(training: Training, name: str) -> EngineChoice:
    from fedveil.engines.choose import choose
    from fedveil.training.run import local_work

    return choose(name, training.task, *local_work(training.recipe, training.data), timed=True)


def _expected(training: Training, choice: EngineChoice, name: str) -> float | None:
    """Seconds of a round, from a client's step in the trial or by the slowest that was tried."""
    import numpy as np
    import torch

    from fedveil.training.run import local_work

    if not choice.seconds:
        return None
    step = choice.seconds.get(name, max(choice.seconds.values()))
    data, local, units = local_work(training.recipe, training.data)
    steps = local.plan(data.sizes.max().reshape(1), 0, np.random.default_rng(0)).steps
    if training.recipe.by_record:  # as many units in each step of each silo
        steps *= training.recipe.local.inner_steps * training.data.clients
    return step * steps * units / torch.get_num_threads()


def _timed(training: Training, engine: Engine, rounds: int) -> float:
    from fedveil.loop import begin, run_round

    recipe, data, key = training.recipe, training.data, training.key
    state = begin(recipe, training.state.x, data, rounds + 1, key)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        state, _ = run_round(recipe, state, data, engine, key)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
