"""A saved run to be used: its model, the encoder of its table, and its privacy statement.

Nothing of the training data is needed: model.safetensors says for which inputs it was made.
"""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.data.encoding import TableEncoder
from fedveil.errors import UserError
from fedveil.models.catalog import rebuild
from fedveil.runs.directory import MODEL, RunDirectory, reading
from fedveil.runs.versions import refuse_newer

if TYPE_CHECKING:
    import polars as pl

    from fedveil.data.federated import Federated

    Rows = Tensor | np.ndarray | pl.DataFrame | Mapping[str, Any] | str | Path

BATCH = 1000  # examples at once


@dataclass(frozen=True)
class Interface:
    """What goes into a model and what comes out; both can be seen from the model itself."""

    inputs: tuple[int, ...]  # the shape of one
    tokens: bool  # whether they are token ids, in sequences of any length
    classes: int
    loss: str

    @classmethod
    def of(cls, data: Federated) -> Interface:
        """Of a model that was trained on these data."""
        tokens = not data.inputs.dtype.is_floating_point
        return cls(tuple(data.inputs.shape[1:]), tokens, data.classes, data.loss)

    @classmethod
    def from_json(cls, text: str) -> Interface:
        """What `to_json` wrote."""
        facts = json.loads(text)
        found = cls(tuple(facts["inputs"]), facts["tokens"], facts["classes"], facts["loss"])
        if not all(type(n) is int and n >= 0 for n in (*found.inputs, found.classes)):
            raise ValueError("its inputs or classes are no whole numbers")
        return found

    def to_json(self) -> str:
        """As model.safetensors has it."""
        return json.dumps(asdict(self))

    def fits(self, inputs: Tensor) -> bool:
        """Whether these are examples, one after another."""
        if self.tokens:
            return inputs.dim() == 1 + len(self.inputs)
        return tuple(inputs.shape[1:]) == self.inputs and inputs.dim() > 0


@dataclass(frozen=True, eq=False, repr=False)
class OpenedRun:
    """A run's model and what is known of it; `predict` and `probabilities` use it."""

    path: Path
    model: nn.Module  # in eval mode
    interface: Interface
    encoder: TableEncoder | None  # of a run on a table, if encoder.json is there
    class_names: tuple[str, ...]  # none if they are not known
    summary: dict[str, Any]  # summary.json; empty if it was not passed on
    statement: str  # privacy.txt; empty if it was not passed on

    def __repr__(self) -> str:
        shape, classes = list(self.interface.inputs), self.interface.classes
        return f"<Run {self.path}: {type(self.model).__name__}, inputs {shape}, {classes} classes>"

    def predict(self, rows: Rows) -> list[Any]:
        """For each row its class: by name, or by number where names are not known.

        Rows are a table (a polars DataFrame, a dict of columns, the path of a CSV or Parquet file)
        or a tensor of inputs. A model of numeric targets gives numbers.
        """
        outputs = self._outputs(self._inputs(rows))
        if self.interface.loss != "cross_entropy":
            return list(outputs.flatten().tolist())
        classes = outputs.argmax(-1).numpy()
        if self.class_names:
            classes = np.array(self.class_names, dtype=object)[classes]
        return list(classes.tolist())

    def probabilities(self, rows: Rows) -> Tensor:
        """softmax of the model's outputs, [rows, classes]; for sequences [rows, length, classes].

        They say how sure the model is, not how often it is right.
        """
        if self.interface.loss != "cross_entropy":
            raise UserError(f"{self.path} predicts numbers, which have no classes; use predict.")
        return self._outputs(self._inputs(rows)).softmax(-1)

    def _inputs(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor | np.ndarray):
            inputs = torch.as_tensor(rows)
        else:
            inputs = self._encoded(rows)
        if not self.interface.fits(inputs):
            raise UserError(
                f"The inputs have shape {list(inputs.shape)}, but the model of {self.path} takes "
                f"[rows, {', '.join(map(str, self.interface.inputs))}]; give them in that shape."
            )
        return inputs.to(torch.int64 if self.interface.tokens else torch.float32)

    def _encoded(self, rows: pl.DataFrame | Mapping[str, Any] | str | Path) -> Tensor:
        if self.encoder is None:
            raise UserError(
                f"{self.path} has no encoder.json, for it was not trained on a table or the file "
                "was not passed on; give a tensor of inputs "
                f"[rows, {', '.join(map(str, self.interface.inputs))}]."
            )
        frame = _frame(rows, self.encoder.inferred)
        missing = [c.name for c in self.encoder.columns if c.name not in frame.columns]
        if missing:
            raise UserError(
                f"The table has no column {', '.join(map(repr, missing))}, which the model of "
                f"{self.path} was trained with; add it, with empty values where they are unknown."
            )
        return self.encoder.encode(frame)

    @torch.no_grad()
    def _outputs(self, inputs: Tensor) -> Tensor:
        if not len(inputs):
            raise UserError("There are no rows to predict; give at least one.")
        starts = range(0, len(inputs), BATCH)
        return torch.cat([self.model(inputs[start : start + BATCH]) for start in starts])


def open_run(path: str | Path, model: nn.Module | None = None) -> OpenedRun:
    """The run in a directory, to predict with; the data it was trained on are not needed.

    A model of fedveil's is built by its name, one of the user's own is imported by its name
    `package.module:Class`. One that was given to `train` as an object is given here, too.
    """
    path = Path(path)
    run = RunDirectory.open(path)
    file = path / "recipe.toml"
    with reading(file):
        settings = tomllib.loads(file.read_text(encoding="utf-8"))
    refuse_newer(file, settings.get("fedveil"))
    tensors, facts = run.load_model()
    encoder = _encoder(path / "encoder.json")
    interface = _interface(path, facts, encoder)
    made = _made(path, settings.get("model"), interface, model)
    summary = run.load_summary() if (path / "summary.json").is_file() else {}
    return OpenedRun(
        path=path,
        model=_filled(path, made, tensors).eval(),
        interface=interface,
        encoder=encoder,
        class_names=_names(encoder, summary, interface.classes),
        summary=summary,
        statement=_text(path / "privacy.txt"),
    )


def _made(path: Path, name: Any, interface: Interface, given: nn.Module | None) -> nn.Module:
    """The module without its trained parameters."""
    if given is not None:
        return copy.deepcopy(given)
    if not isinstance(name, str):
        raise UserError(
            f"The model of {path} was given to train as an object, which recipe.toml cannot name; "
            "build the same one and give it: open_run(path, model=Net(…))."
        )
    return rebuild(name, interface.inputs, interface.classes, str(path))


def _filled(path: Path, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as problem:
        lines = [line.strip() for line in str(problem).splitlines()]
        raise UserError(
            f"{path / MODEL} does not fit the model {type(module).__name__}: "
            f"{lines[min(1, len(lines) - 1)]} Give the model that was trained."
        ) from problem
    return module


def _interface(path: Path, facts: str | None, encoder: TableEncoder | None) -> Interface:
    if facts is not None:
        with reading(path / MODEL):
            return Interface.from_json(facts)
    if encoder is not None:
        inputs = (len(encoder.features),)
        return Interface(inputs, False, len(encoder.class_names), "cross_entropy")
    raise UserError(
        f"{path} was saved by an earlier version, which did not write down for which inputs its "
        "model is; build the model, and give it its parameters by "
        f"model.load_state_dict(safetensors.torch.load_file('{path / MODEL}'))."
    )


def _encoder(file: Path) -> TableEncoder | None:
    if not file.is_file():
        return None
    with reading(file):
        return TableEncoder.from_json(file)


def _names(
    encoder: TableEncoder | None, summary: Mapping[str, Any], classes: int
) -> tuple[str, ...]:
    names = summary.get("class_names", []) if encoder is None else encoder.class_names
    return tuple(map(str, names)) if len(names) == classes else ()


def _text(file: Path) -> str:
    with reading(file):
        return file.read_text(encoding="utf-8") if file.is_file() else ""


def _frame(rows: pl.DataFrame | Mapping[str, Any] | str | Path, inferred: bool) -> pl.DataFrame:
    import polars as pl

    from fedveil.data.table import read_frame

    if isinstance(rows, str | Path):
        return read_frame(rows, inferred)
    if isinstance(rows, pl.DataFrame):
        return rows
    if not isinstance(rows, Mapping):
        raise UserError(
            f"A {type(rows).__name__} is no table; give a polars DataFrame, a dict of columns, the "
            "path of a CSV or Parquet file, or a tensor of inputs."
        )
    try:
        return pl.DataFrame(rows)
    except Exception as problem:  # polars raises many kinds
        why = str(problem).partition("\n")[0]
        raise UserError(f"The columns do not make a table ({why}).") from problem
