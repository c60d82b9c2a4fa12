"""`fedveil bench`: every engine on a user's own model, and the one that `auto` takes."""

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
    from fedveil.engines.choose import Choice
    from fedveil.engines.updates import Engine
    from fedveil.training import Training

LONGEST = 120.0  # seconds that the rounds of one engine may take by what the trial says


@dataclass(frozen=True)
class Timing:
    """How quick one engine is, or why it was not played."""

    engine: str
    group: int = 0  # clients at once
    seconds: float | None = None  # of a round
    problem: str = ""


def bench(
    config: flags.Config = None,
    algorithm: flags.Algorithm = None,
    set_: flags.Parameters = None,
    dataset: flags.Dataset = None,
    path: flags.OwnData = None,
    client: flags.ClientColumn = None,
    label: flags.LabelColumn = None,
    partition: flags.Partition = None,
    clients: flags.Clients = None,
    simulate_clients: flags.SimulateClients = None,
    data_: flags.DataSettings = None,
    model: flags.Model = None,
    rounds: Annotated[int, typer.Option(help="Timed for each engine, after one more.")] = 3,
) -> None:
    """Time every engine on your own model and clients.

    And say which one `auto` takes, and why.
    """
    from fedveil.charging import refuse_on_budget
    from fedveil.progress import entry, getting_ready
    from fedveil.settings import prepare, read_settings, refuse_unnamed_data, resolve_recipe

    if rounds < 1:
        raise UserError(f"--rounds {rounds}: at least one round is needed to time it.")
    asked = flags.gathered(
        set_, data_, None,
        dataset=dataset, path=path, client=client, label=label, partition=partition,
        clients=clients, simulate_clients=simulate_clients, algorithm=algorithm, model=model,
    )  # fmt: skip
    settings = read_settings(config, asked)
    refuse_unnamed_data(settings, "The settings file", "name them with --dataset or --path")
    if settings.epsilon is None and not resolve_recipe(settings).noise.settled:
        settings = settings.model_copy(update={"epsilon": 5.0})  # any amount takes as long
    with getting_ready():
        training = prepare(settings.model_copy(update={"engine": "auto"}))
        refuse_on_budget(training.data, "a benchmark's rounds")
    choice = _choice(training, "auto")
    entry("", headline(training), width=0)
    for timing in timings(training, choice, rounds):
        entry(timing.engine, told(timing), width=12)
    entry("auto", f"takes {choice.engine.name}: {choice.reason}", width=12)


def headline(training: Training) -> str:
    """What is timed."""
    import torch

    expected = training.recipe.cohort.expected(training.data.clients)
    return (
        f"{training.recipe.name} on {training.data.name}: {training.task.dim:,} parameters, "
        f"{expected:,.0f} of {training.data.clients:,} {training.data.unit}s a round, "
        f"{torch.get_num_threads()} threads"
    )


def told(timing: Timing) -> str:
    """A line of the table."""
    if timing.seconds is None:
        return timing.problem
    each = "client" if timing.group == 1 else "clients"
    return f"{timing.seconds:.3g} s a round, in groups of up to {timing.group} {each}"


def timings(training: Training, choice: Choice, rounds: int) -> Iterator[Timing]:
    """Engine after engine; one that would take too long is told by its trial."""
    from fedveil.engines.choose import ENGINES

    for name in ENGINES[1:]:
        try:
            engine = _choice(training, name).engine
        except UserError as problem:
            yield Timing(name, problem=str(problem))
            continue
        expected = _expected(training, choice, name)
        if expected is not None and expected * (rounds + 1) > LONGEST:
            text = f"about {expected:.2g} s a round by its trial, not played"
            yield Timing(name, problem=text)
        else:
            yield Timing(name, engine.group_size, _played(training, engine, rounds))


def _choice(training: Training, name: str) -> Choice:
    from fedveil.engines.choose import choose

    recipe, data = training.recipe, training.data
    expected = recipe.cohort.expected(data.clients)
    return choose(name, training.task, data, recipe.local, expected, timed=True)


def _expected(training: Training, choice: Choice, name: str) -> float | None:
    """Seconds of a round, from a client's step in the trial or by the slowest that was tried."""
    import numpy as np
    import torch

    if not choice.seconds:
        return None
    step = choice.seconds.get(name, max(choice.seconds.values()))
    largest = training.data.sizes.max().reshape(1)
    steps = training.recipe.local.plan(largest, 0, np.random.default_rng(0)).steps
    clients = training.recipe.cohort.expected(training.data.clients)
    return step * steps * clients / torch.get_num_threads()


def _played(training: Training, engine: Engine, rounds: int) -> float:
    from fedveil.loop import begin, play_round

    recipe, data, key = training.recipe, training.data, training.key
    state = begin(recipe, training.state.x, data, rounds + 1, key)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        state, _ = play_round(recipe, state, data, engine, key)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])
