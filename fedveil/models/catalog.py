"""Models by name: fedveil's own, and `package.module:Class` for the user's."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_type_hints

import torch
from torch import nn

from fedveil.data.columns import DataColumn, span
from fedveil.data.federated import Dataset, Federated
from fedveil.errors import UserError, unknown
from fedveil.models.alexnet import AlexNet
from fedveil.models.cnn import SmallCNN
from fedveil.models.gpt import GPT
from fedveil.models.linear import LinearRegression, SoftmaxRegression
from fedveil.models.losses import target_of
from fedveil.models.lstm import CharLSTM
from fedveil.models.mlp import MLP
from fedveil.models.mobilenet import MobileNetV2
from fedveil.models.resnet import ResNet18, ResNet20
from fedveil.models.start import construct, initialise
from fedveil.models.wideresnet import WideResNet
from fedveil.serialization.imports import imported

MODELS: dict[str, str] = {
    "softmax": "softmax (logistic) regression on the flattened input, starting at zero",
    "mlp": "multilayer perceptron with hidden layers 300-300; mlp-256-128 gives other widths",
    "cnn": "small CNN of two convolutions, 26,010 parameters on 1×28×28",
    "alexnet": "AlexNet for small images, 3.3 million parameters",
    "mobilenetv2": "MobileNetV2 for small images with group norm, 2.2 million parameters",
    "resnet18": "ResNet-18 for small images with group norm, 11.2 million parameters",
    "resnet20": "ResNet-20 for small images with group norm, 0.27 million parameters",
    "resnet20-ws": "ResNet-20 with group norm and weight standardization",
    "wrn-40-4": "wide ResNet 40-4, group norm, weight standardization, 8.9 million parameters",
    "lstm": "character model of two LSTM layers of 256, for token sequences",
    "gpt": "small GPT for characters or words, 4 layers of width 128; gpt-2-64 gives other sizes",
    "linear": "linear regression without bias, for numeric targets",
}


@dataclass(frozen=True)
class _Need:
    """What the data require of a model; each method returns it or raises a UserError."""

    model: str
    data: str
    shape: tuple[int, ...]  # of one input
    classes: int

    def features(self) -> int:
        return math.prod(self.shape)

    def channels(self) -> int:
        if len(self.shape) != 3:
            raise UserError(
                f"The model '{self.model}' needs images of shape [channels, height, width], but an "
                f"input of '{self.data}' has shape {list(self.shape)}. Use 'softmax' or 'mlp'."
            )
        return self.shape[0]

    def square(self) -> tuple[int, int]:
        channels = self.channels()
        height, width = self.shape[1:]
        if height != width:
            raise UserError(
                f"The model '{self.model}' needs square images, but those of '{self.data}' are "
                f"{height}×{width}. Pad or crop them, or use 'resnet20'."
            )
        return channels, height


_BUILDERS: dict[str, Callable[[_Need], nn.Module]] = {
    "softmax": lambda need: SoftmaxRegression(need.features(), need.classes),
    "mlp": lambda need: MLP(need.features(), _hidden(need.model), need.classes),
    "cnn": lambda need: SmallCNN(*need.square(), need.classes),
    "alexnet": lambda need: AlexNet(*need.square(), need.classes),
    "mobilenetv2": lambda need: MobileNetV2(need.channels(), need.classes),
    "resnet18": lambda need: ResNet18(need.channels(), need.classes),
    "resnet20": lambda need: ResNet20(need.channels(), need.classes),
    "resnet20-ws": lambda need: ResNet20(need.channels(), need.classes, standardized=True),
    "wrn-40-4": lambda need: WideResNet(need.channels(), need.classes, depth=40, width=4),
    "lstm": lambda need: CharLSTM(need.classes),
    "gpt": lambda need: GPT(need.classes, *_layers(need.model)),
    "linear": lambda need: LinearRegression(need.features()),
}


def build(name: str, data: Dataset | Federated, generator: torch.Generator) -> nn.Module:
    """Build the model `name` for `data`, with initial weights drawn from `generator`.

    The same generator state gives the same weights; torch's global generator does not change.
    `package.module:Class` imports the user's class, also from the current directory, and passes the
    arguments it accepts among `inputs` (the shape of one input) and `classes`.
    """
    shape = tuple(_inputs(data).shape[1:])
    if ":" in name:
        return _build_own(name, shape, data.classes, generator)
    family = _family(name)
    _refuse_misfit(family, data)
    need = _Need(name, data.name, shape, data.classes)
    model = construct(lambda: _BUILDERS[family](need))
    initialise(model, generator)
    return model


def rebuild(name: str, inputs: tuple[int, ...], classes: int, source: str) -> nn.Module:
    """Build the model `name` of a saved run, to be filled with its saved parameters.

    fedveil's own models take no memory before that. A user's model is named by a file, so it is
    called only if it declares that it makes modules.
    """
    if ":" in name:
        _refuse_no_module(name)
        return _build_own(name, inputs, classes, torch.Generator().manual_seed(0))
    family, need = _family(name), _Need(name, source, inputs, classes)
    with torch.device("meta"):
        return _BUILDERS[family](need)


def suggest(data: Dataset | Federated) -> str:
    """The simplest model that fits: softmax, lstm for token sequences, or linear."""
    if target_of(data.loss) != "class":
        single = target_of(data.loss) == "number" and len(_labels(data).shape) == 1
        return "linear" if single else "softmax"
    return "softmax" if _inputs(data).dtype.is_floating_point else "lstm"


def _inputs(data: Dataset | Federated) -> DataColumn:
    return data.train.inputs if isinstance(data, Dataset) else data.inputs


def _labels(data: Dataset | Federated) -> DataColumn:
    return data.train.labels if isinstance(data, Dataset) else data.labels


def _family(name: str) -> str:
    family = "mlp" if re.fullmatch(r"mlp(-[1-9]\d*)+", name) else name
    family = "gpt" if re.fullmatch(r"gpt-[1-9]\d*-[1-9]\d*", name) else family
    if family not in _BUILDERS:
        raise unknown("model", name, [*MODELS, "package.module:Class"])
    return family


def _hidden(name: str) -> tuple[int, ...]:
    widths = name.split("-")[1:]
    return tuple(int(width) for width in widths) or (300, 300)


def _layers(name: str) -> tuple[int, int]:
    """The number of layers and their width."""
    layers, width = (int(number) for number in name.split("-")[1:] or ("4", "128"))
    if width % 8:
        raise UserError(
            f"The model '{name}' has width {width}, which four heads with rotary positions cannot "
            f"share. Use a multiple of 8, such as gpt-{layers}-{width + 8 - width % 8}."
        )
    return layers, width


def _refuse_misfit(family: str, data: Dataset | Federated) -> None:
    """Raise if the kind of the data (tokens, classes, numbers) does not match the model."""
    if family == "linear" and target_of(data.loss) == "class":
        raise UserError(
            f"The model 'linear' predicts numeric targets, but '{data.name}' is trained with the "
            f"loss '{data.loss}'. Use the model '{suggest(data)}'."
        )
    if family in ("lstm", "gpt"):
        _refuse_no_tokens(family, data)
    elif not _inputs(data).dtype.is_floating_point:
        raise UserError(
            f"The model '{family}' needs numbers, but the inputs of '{data.name}' are token ids. "
            "Use the model 'lstm' or 'gpt'."
        )


def _refuse_no_tokens(family: str, data: Dataset | Federated) -> None:
    inputs, labels = _inputs(data), _labels(data)
    if inputs.dtype.is_floating_point or len(inputs.shape) != 2 or labels.shape != inputs.shape:
        raise UserError(
            f"The model '{family}' needs token ids [examples, length] with a label for every "
            f"position, but '{data.name}' has {str(inputs.dtype)[6:]} inputs of shape "
            f"{list(inputs.shape[1:])}. Use the model 'softmax' or 'mlp'."
        )
    low, high = (0, 0) if 0 in inputs.shape else span(inputs)
    if low < 0 or high >= data.classes:
        raise UserError(
            f"'{data.name}' has token ids from {low} to {high}, but a vocabulary of "
            f"{data.classes} needs ids from 0 to {data.classes - 1}. Recode them."
        )


def _build_own(
    name: str, shape: tuple[int, ...], classes: int, generator: torch.Generator
) -> nn.Module:
    make: Callable[..., nn.Module] = imported(name, "model", "class", "mymodels:Net")
    offered = {"inputs": shape, "classes": classes}
    arguments = {key: value for key, value in offered.items() if key in _parameters(make)}
    # Keeps the user's own initialization; a seed from our generator makes it reproducible.
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    try:
        model = construct(lambda: make(**arguments), seed)
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise UserError(
            f"The model '{name}' could not be constructed with ({given}): "
            f"{type(error).__name__}: {error}. Make its other arguments optional."
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"The model '{name}' returned a {type(model).__name__}, not a torch.nn.Module. "
            "Name a class that derives from torch.nn.Module or a function that returns one."
        )
    return model


def _refuse_no_module(name: str) -> None:
    make = imported(name, "model", "class", "mymodels:Net")
    try:
        made = make if isinstance(make, type) else get_type_hints(make).get("return")
    except Exception:  # an annotation can be any expression
        made = None
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UserError(
            f"The model '{name}' of a saved run is neither a torch.nn.Module class nor a function "
            "annotated to return one. Annotate it, or pass the model as an object."
        )


def _parameters(make: Callable[..., nn.Module]) -> set[str]:
    """Names that can be passed by keyword; `*args` and `**kwargs` do not count."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return set()
    return {key for key, parameter in signature.parameters.items() if parameter.kind in named}
