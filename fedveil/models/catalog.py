"""Models by name: the ones that come along, and `package.module:Class` for the user's own."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_type_hints

import torch
from torch import nn

from fedveil.data.columns import Column, span
from fedveil.data.federated import Dataset, Federated
from fedveil.errors import UserError, unknown
from fedveil.imports import imported
from fedveil.models.alexnet import AlexNet
from fedveil.models.cnn import SmallCNN
from fedveil.models.linear import LinearRegression, SoftmaxRegression
from fedveil.models.lstm import CharLSTM
from fedveil.models.mlp import MLP
from fedveil.models.mobilenet import MobileNetV2
from fedveil.models.resnet import ResNet18, ResNet20
from fedveil.models.start import construct, initialise
from fedveil.models.wideresnet import WideResNet

MODELS: dict[str, str] = {
    "softmax": "softmax (logistic) regression on the flattened input, starting at zero",
    "mlp": "multilayer perceptron with hidden layers 300-300; mlp-256-128 gives other widths",
    "cnn": "small CNN of two convolutions, 26,010 parameters on 1×28×28",
    "alexnet": "AlexNet for small images, 3.3 million parameters",
    "mobilenetv2": "MobileNetV2 for small images with group norm, 2.2 million parameters",
    "resnet18": "ResNet-18 for small images with group norm, 11.2 million parameters",
    "resnet20": "ResNet-20 for small images with group norm, 0.27 million parameters",
    "wrn-40-4": "wide ResNet 40-4, group norm, weight standardization, 8.9 million parameters",
    "lstm": "character model of two LSTM layers of 256, for token sequences",
    "linear": "linear regression without bias, for numeric targets",
}


@dataclass(frozen=True)
class _Need:
    """What the data ask of a model; each method gives it or refuses with a sentence."""

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
                f"input of '{self.data}' has shape {list(self.shape)}; use 'softmax' or 'mlp'."
            )
        return self.shape[0]

    def square(self) -> tuple[int, int]:
        channels = self.channels()
        height, width = self.shape[1:]
        if height != width:
            raise UserError(
                f"The model '{self.model}' needs square images, but those of '{self.data}' are "
                f"{height}×{width}; pad or crop them, or use 'resnet20'."
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
    "wrn-40-4": lambda need: WideResNet(need.channels(), need.classes, depth=40, width=4),
    "lstm": lambda need: CharLSTM(need.classes),
    "linear": lambda need: LinearRegression(need.features()),
}


def build(name: str, data: Dataset | Federated, generator: torch.Generator) -> nn.Module:
    """The model called `name`, sized for `data`, its initial weights drawn from `generator`.

    The same generator state gives the same weights; torch's global generator is left as it was.
    `package.module:Class` imports the user's class, from the current directory too, and hands it
    the arguments among `inputs` (the shape of one input) and `classes` that it has.
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
    """The model called `name` as a run had it, for parameters that are there already.

    One that comes along takes no memory before it gets them. A file names the user's own, so it
    is called only if it says itself that it makes modules.
    """
    if ":" in name:
        _refuse_no_module(name)
        return _build_own(name, inputs, classes, torch.Generator().manual_seed(0))
    family, need = _family(name), _Need(name, source, inputs, classes)
    with torch.device("meta"):
        return _BUILDERS[family](need)


def suggest(data: Dataset | Federated) -> str:
    """The name of the plainest model that fits: softmax, lstm for token sequences, or linear."""
    if data.loss == "half_squared":
        return "linear"
    return "softmax" if _inputs(data).dtype.is_floating_point else "lstm"


def _inputs(data: Dataset | Federated) -> Column:
    return data.train.inputs if isinstance(data, Dataset) else data.inputs


def _labels(data: Dataset | Federated) -> Column:
    return data.train.labels if isinstance(data, Dataset) else data.labels


def _family(name: str) -> str:
    family = "mlp" if re.fullmatch(r"mlp(-[1-9]\d*)+", name) else name
    if family not in _BUILDERS:
        raise unknown("model", name, [*MODELS, "package.module:Class"])
    return family


def _hidden(name: str) -> tuple[int, ...]:
    widths = name.split("-")[1:]
    return tuple(int(width) for width in widths) or (300, 300)


def _refuse_misfit(family: str, data: Dataset | Federated) -> None:
    """Raise where the kind of the data (tokens, classes, numbers) is not the model's kind."""
    if (family == "linear") != (data.loss == "half_squared"):
        kind = "numeric targets" if family == "linear" else "classes"
        raise UserError(
            f"The model '{family}' predicts {kind}, but '{data.name}' is trained with the loss "
            f"'{data.loss}'; use the model '{suggest(data)}'."
        )
    if family == "lstm":
        _refuse_no_tokens(data)
    elif not _inputs(data).dtype.is_floating_point:
        raise UserError(
            f"The model '{family}' needs numbers, but the inputs of '{data.name}' are token ids; "
            "use the model 'lstm'."
        )


def _refuse_no_tokens(data: Dataset | Federated) -> None:
    inputs, labels = _inputs(data), _labels(data)
    if inputs.dtype.is_floating_point or len(inputs.shape) != 2 or labels.shape != inputs.shape:
        raise UserError(
            f"The model 'lstm' needs token ids [examples, length] with a label for every position, "
            f"but '{data.name}' has {str(inputs.dtype)[6:]} inputs of shape "
            f"{list(inputs.shape[1:])}; use the model 'softmax' or 'mlp'."
        )
    low, high = (0, 0) if 0 in inputs.shape else span(inputs)
    if low < 0 or high >= data.classes:
        raise UserError(
            f"'{data.name}' has token ids from {low} to {high}, but a vocabulary of "
            f"{data.classes} means ids from 0 to {data.classes - 1}; recode them."
        )


def _build_own(
    name: str, shape: tuple[int, ...], classes: int, generator: torch.Generator
) -> nn.Module:
    make: Callable[..., nn.Module] = imported(name, "model", "class", "mymodels:Net")
    offered = {"inputs": shape, "classes": classes}
    arguments = {key: value for key, value in offered.items() if key in _parameters(make)}
    # The user's own initialisation is kept; a seed from our generator makes it repeatable.
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    try:
        model = construct(lambda: make(**arguments), seed)
    except Exception as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise UserError(
            f"The model '{name}' could not be constructed with ({given}): "
            f"{type(error).__name__}: {error}; make its other arguments optional."
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"The model '{name}' gave a {type(model).__name__}, not a torch.nn.Module; "
            "name a class that derives from torch.nn.Module or a function that returns one."
        )
    return model


def _refuse_no_module(name: str) -> None:
    make = imported(name, "model", "class", "mymodels:Net")
    try:
        made = make if isinstance(make, type) else get_type_hints(make).get("return")
    except Exception:  # an annotation is any expression
        made = None
    if not (isinstance(made, type) and issubclass(made, nn.Module)):
        raise UserError(
            f"The model '{name}' of a saved run is no class of torch.nn.Module, and no function "
            "annotated to return one; annotate it, or give the model as an object."
        )


def _parameters(make: Callable[..., nn.Module]) -> set[str]:
    """Names that can be passed by keyword; `*args` and `**kwargs` promise nothing."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return set()
    return {key for key, parameter in signature.parameters.items() if parameter.kind in named}
