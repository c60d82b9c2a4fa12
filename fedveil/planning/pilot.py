"""A pilot: the plan played small, to see how long updates are and how far clients agree.

Fewer clients play the planned recipe from the planned start, with as much noise on the mean as the
planned cohort would have, and as much chance of who takes part; what they show of all clients is
then seen through the planned draw (`signal.Spread`). A pilot on private data is a look at them that
no ε covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.data.columns import Column
from fedveil.data.federated import Examples, Federated
from fedveil.engines.updates import taken
from fedveil.errors import UserError
from fedveil.loop import Info, begin, play_round
from fedveil.parts.bound import AdaptiveClip
from fedveil.parts.checks import count
from fedveil.parts.cohort import Cohort, Everyone, Poisson
from fedveil.parts.noise import Gaussian, Silent
from fedveil.parts.quantize import Exact
from fedveil.planning.compute import engine_for
from fedveil.planning.facts import Facts, loaded
from fedveil.planning.noise import deviation
from fedveil.planning.signal import Seen, Spread
from fedveil.recipe import Recipe
from fedveil.streams import run_key

if TYPE_CHECKING:
    from fedveil.settings import DataSettings, Settings

OWN, SYNTHETIC = "own", "synthetic"
CLIENTS, ROUNDS = 200, 50  # at most, unless more are asked for
LEAK = (
    "the pilot looked at private data without noise: what it shows, and settings chosen by it, "
    "are covered by no ε; a pilot on synthetic or public data would cost nothing"
)


@dataclass(frozen=True, eq=False)
class Material:
    """On whom a pilot is played."""

    data: Federated
    source: str
    private: bool = False


def material(name: str, settings: Settings, known: Facts, clients: int = CLIENTS) -> Material:
    """Made-up data, the settings' own, a public data set, or the data of another settings file."""
    count("The pilot", "clients", clients)
    rng = np.random.default_rng(settings.seed)
    if name == SYNTHETIC:
        return Material(_made_up(known, clients, settings.data.alpha), "made-up data")
    if name == OWN:
        if known.data is None:
            raise UserError(
                "--pilot own plays on the data of the settings, but none are named; name them with "
                "--dataset or --path, or use --pilot synthetic."
            )
        return _seen(known, known.data, "the data themselves", clients, rng)
    if name.endswith(".toml"):
        from fedveil.settings import read_settings

        other = read_settings(Path(name), {}).data
        return _seen(known, loaded(other), f"the data of {name}", clients, rng)
    return _seen(known, loaded(_public(name, settings.data)), name, clients, rng)


def _seen(
    known: Facts, data: Federated, source: str, clients: int, rng: np.random.Generator
) -> Material:
    """Some units of real data; those to be trained on are private, whatever they are called."""
    from fedveil.charging import refuse_on_budget

    if known.unit == "client":
        data.refuse_by_example("This pilot")
    refuse_on_budget(data, "a pilot's look at their norms")
    return Material(_fitting(known, data, clients, rng), source, _same(known.data, data))


def _same(own: Federated | None, data: Federated) -> bool:
    """Whether these are the examples to be trained on, however they are split."""
    if own is None or len(own.labels) != len(data.labels):
        return False
    return own is data or own.contents() == data.contents()


def _public(name: str, like: DataSettings) -> DataSettings:
    """A public data set, split over clients as the planned data are."""
    split = like.model_dump(include={"partition", "per_client", "alpha", "examples", "seed"})
    clients = like.simulate_clients or like.clients if like.partition else None
    return type(like)(dataset=name, clients=clients, **split)


def play(
    recipe: Recipe, known: Facts, chosen: Material, rounds: int, limit: int = ROUNDS, seed: int = 0
) -> Seen:
    """The recipe (with settled noise) on the pilot's clients, for its first rounds."""
    count("The pilot", "rounds", limit)
    assert known.task is not None
    data, played = chosen.data, min(rounds, limit)
    small = _small(recipe, known, data.clients)
    engine = engine_for(known.task, data, small.local)
    key = run_key("pilot", seed, small, data.fingerprint())
    state = begin(small, known.task.flatten(), data, rounds, key)
    norms, cosines = [], []
    for _ in range(played):
        state, info = play_round(small, state, data, engine, key)
        if not len(info.norms):
            continue
        norms.append(info.norms * _to_start(small, info))
        cosines.append(_spread(small, data.clients, info).cosine)
    if not norms or not all(math.isfinite(cosine) for cosine in cosines):
        raise UserError(
            "The pilot saw no update of finite length; lower the learning rate, or give it more "
            "clients with --pilot-clients."
        )
    source = f"a pilot of {played} rounds with {data.clients} {known.unit}s of {chosen.source}"
    return Seen(tuple(norms), tuple(cosines), source)


def _small(recipe: Recipe, known: Facts, clients: int) -> Recipe:
    """The recipe for the pilot's clients, with as much noise and as much chance on the mean."""
    cohort = _small_cohort(recipe, known, clients)
    amount = deviation(recipe, known.dim, known.population)
    amount /= recipe.cohort.expected(known.population)
    if amount == 0:
        return replace(recipe, cohort=cohort, quantize=Exact(), noise=Silent())
    bound = recipe.bound.norms(known.dim).l2
    noise = Gaussian(amount * cohort.expected(clients) / bound)
    return replace(recipe, cohort=cohort, quantize=Exact(), noise=noise, view="models")


def _small_cohort(recipe: Recipe, known: Facts, clients: int) -> Cohort:
    """p of the pilot's N with 1/p − 1/N = (1 − q)/r: a draw adds as much chance as the planned one.

    Clients that remember are drawn as often as planned instead.
    """
    expected = recipe.cohort.expected(known.population)
    if recipe.memory.kept:
        rate = max(expected / known.population, min(2 / clients, 1.0))
    else:
        rate = 1 / (1 + clients * (1 - expected / known.population) / expected)
    return Everyone() if rate == 1 else Poisson(rate)


def _to_start(recipe: Recipe, info: Info) -> float:
    """An adaptive bound's norms are told in units of its first threshold."""
    if isinstance(recipe.bound, AdaptiveClip) and info.threshold:
        return recipe.bound.start / info.threshold
    return 1.0


def _spread(recipe: Recipe, clients: int, info: Info) -> Spread:
    square = float((info.scales * info.norms).square().mean())
    return Spread.seen(info.signal, square, recipe.cohort, clients)


def _made_up(known: Facts, clients: int, alpha: float) -> Federated:
    from fedveil.data.synthetic import synthetic

    sample = known.sample
    if sample is None or not sample.inputs.dtype.is_floating_point:
        raise UserError(
            "There are no made-up data for token sequences; name public data with --pilot."
        )
    if sample.loss != "cross_entropy":
        raise UserError("There are no made-up data for numeric targets; use --pilot own.")
    shape = tuple(sample.inputs.shape[1:])
    each = max(1, round(known.examples))
    people = clients
    if known.unit == "example":
        each = min(each, clients)
        people = -(-clients // each)
    made = synthetic(people, each, math.prod(shape), sample.classes, alpha)
    inputs, labels = made.inputs[:].reshape(-1, *shape), made.labels[:]
    data = replace(made, inputs=inputs, labels=labels, test=Examples(inputs[:1], labels[:1]))
    return data.by_example() if known.unit == "example" else data


def _fitting(known: Facts, data: Federated, clients: int, rng: np.random.Generator) -> Federated:
    """Some units of data that the planned model fits."""
    assert known.sample is not None
    wanted = tuple(known.sample.inputs.shape[1:]), known.sample.classes, known.sample.loss
    given = tuple(data.inputs.shape[1:]), data.classes, data.loss
    if wanted != given:
        raise UserError(
            f"The pilot's data '{data.name}' have inputs of shape {list(given[0])} and {given[1]} "
            f"classes, but the planned model is for {list(wanted[0])} and {wanted[1]}; use data "
            "of the same shape, or --pilot synthetic."
        )
    if known.unit == "example":
        data = data.by_example()
    return _some(data, min(clients, data.clients), rng)


def _some(data: Federated, clients: int, rng: np.random.Generator) -> Federated:
    """So many of the units, drawn without replacement."""
    chosen = torch.from_numpy(np.sort(rng.choice(data.clients, clients, replace=False)))
    sizes = data.sizes[chosen]
    ends = sizes.cumsum(0)
    rows = torch.arange(int(ends[-1])) + (data.offsets[chosen] - ends + sizes).repeat_interleave(
        sizes
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    return replace(
        data, inputs=_rows(data.inputs, rows), labels=_rows(data.labels, rows), offsets=offsets
    )


def _rows(column: Column, rows: torch.Tensor) -> torch.Tensor:
    return taken(column, rows)
