"""What a plan needs to know of model and data: public numbers alone, from settings or flags."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import REAL, Origin
from fedveil.engines.task import Task
from fedveil.errors import UserError, unknown
from fedveil.models.catalog import build, suggest
from fedveil.parts.checks import count
from fedveil.streams import torch_generator

if TYPE_CHECKING:
    from fedveil.settings import DataSettings, Settings

CLIENTS, EXAMPLES, CLASSES = 100, 20, 10  # where nothing is said, as in `fedveil train`
SHAPE = (1, 28, 28)
LENGTH = 80  # tokens of a sequence


@dataclass(frozen=True)
class Asked:
    """What flags say beside the settings."""

    dim: int | None = None
    shape: str | None = None
    classes: int | None = None
    examples: int | None = None  # of each client
    pilot: str | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """Sizes of a population and a model."""

    clients: int
    examples: float  # of each client, on average
    unit: str
    dim: int
    model: str = ""  # none where only its dimension is known
    task: Task | None = None
    sample: Federated | None = None  # a few zeros of the right shape and kind
    data: Federated | None = None  # the settings' own, if they are loaded

    @property
    def population(self) -> int:
        """How many units there are to protect."""
        return round(self.clients * self.examples) if self.unit == "example" else self.clients

    @property
    def origin(self) -> Origin:
        """Of the units, where data are named; else a plan is about data yet to be collected."""
        if self.data is None:
            return REAL
        return self.data.origin.by_example() if self.unit == "example" else self.data.origin


def facts(settings: Settings, asked: Asked, unit: str) -> Facts:
    """From the data where they are named, else from what is said of them."""
    if asked.dim is not None and settings.model is not None:
        raise UserError("Both a model and its dimension are given; give one of them.")
    named = settings.data.dataset is not None or settings.data.path is not None
    if asked.dim is not None:
        return _of_dimension(settings, asked, unit, asked.dim)
    if named:
        return _of_data(settings, asked, unit)
    clients, examples = _sizes(settings, asked, unit)
    sample = _zeros(settings.model or "softmax", asked)
    return _with_model(settings, sample, Facts(clients, examples, unit, 1))


def _of_dimension(settings: Settings, asked: Asked, unit: str, dim: int) -> Facts:
    count("The plan", "dim", dim)
    for name in ("shape", "classes", "pilot"):
        if getattr(asked, name) is not None:
            raise UserError(
                f"--{name} needs a model, but only its dimension is given; give --model instead."
            )
    clients, examples = _sizes(settings, asked, unit)
    return Facts(clients, examples, unit, dim)


def _of_data(settings: Settings, asked: Asked, unit: str) -> Facts:
    """Of the data a plan reads how many clients and examples there are, shape and classes."""
    for name in ("shape", "classes", "examples"):
        if getattr(asked, name) is not None:
            raise UserError(f"The data are named, so they say --{name} themselves; leave it out.")
    data = loaded(settings.data)
    if unit == "client":
        data.refuse_by_example(settings.algorithm)
    known = Facts(data.clients, len(data.labels) / data.clients, unit, 1, data=data)
    return _with_model(settings, _few(data), known)


def loaded(settings: DataSettings) -> Federated:
    """The data, where they are here: a plan downloads nothing."""
    from fedveil.data.catalog import CATALOG
    from fedveil.settings import SYNTHETIC, load_data

    name = settings.dataset
    if settings.path is None and name is not None and name != SYNTHETIC:
        if name not in CATALOG:
            raise unknown("data set", name, CATALOG)
        if not CATALOG[name].here():
            raise UserError(
                f"'{name}' is not here, and a plan downloads nothing; put it where `fedveil "
                "datasets` looks, or give --clients, --shape and --classes instead."
            )
    return load_data(settings)


def _with_model(settings: Settings, sample: Federated, known: Facts) -> Facts:
    name = settings.model or suggest(sample)
    task = Task(build(name, sample, torch_generator(settings.seed, "model")), sample.loss)
    return replace(known, dim=task.dim, model=name, task=task, sample=sample)


def _sizes(settings: Settings, asked: Asked, unit: str) -> tuple[int, int]:
    """Clients, and examples of each; all examples are one client's where examples are the unit."""
    alone = 1 if unit == "example" and asked.examples is not None else CLIENTS
    clients = alone if settings.data.clients is None else settings.data.clients
    examples = settings.data.examples or EXAMPLES if asked.examples is None else asked.examples
    count("The plan", "clients", clients)
    count("The plan", "examples", examples)
    return clients, examples


def _few(data: Federated) -> Federated:
    """Two examples of zeros like these."""
    inputs = torch.zeros(2, *data.inputs.shape[1:], dtype=data.inputs.dtype)
    labels = torch.zeros(2, *data.labels.shape[1:], dtype=data.labels.dtype)
    return _federated(data.name, inputs, labels, data.classes, data.loss)


def _zeros(model: str, asked: Asked) -> Federated:
    """Two examples of zeros of the shape that was said."""
    shape, classes = _shape(asked.shape), CLASSES if asked.classes is None else asked.classes
    count("The plan", "classes", classes)
    if model == "lstm":
        tokens = torch.zeros(2, *(shape if asked.shape else (LENGTH,)), dtype=torch.int64)
        return _federated("the plan", tokens, tokens, classes, "cross_entropy")
    inputs = torch.zeros(2, *shape)
    if model == "linear":
        return _federated("the plan", inputs.flatten(1), torch.zeros(2), 1, "half_squared")
    return _federated("the plan", inputs, torch.zeros(2, dtype=torch.int64), classes)


def _federated(
    name: str, inputs: torch.Tensor, labels: torch.Tensor, classes: int, loss: str = "cross_entropy"
) -> Federated:
    offsets = torch.tensor([0, 1, 2])
    return Federated(name, inputs, labels, offsets, Examples(inputs, labels), classes, loss)


def _shape(text: str | None) -> tuple[int, ...]:
    """`1x28x28` as numbers.

    >>> _shape("3x32x32"), _shape(None)
    ((3, 32, 32), (1, 28, 28))
    """
    if text is None:
        return SHAPE
    parts = text.lower().replace("×", "x").split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError(f"--shape {text}: write an input's sizes with x between, such as 1x28x28.")
    return tuple(int(part) for part in parts)
