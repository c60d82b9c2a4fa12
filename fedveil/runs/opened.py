"""Open a saved run to predict with: its model, the encoder of its table, and its statement.

The training data are not needed, because model.safetensors records the shape of its inputs.
"""

from __future__ import annotations

import copy
import json
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
from fedveil.models.loss import Target
from fedveil.models.losses import target_of
from fedveil.models.outputs import logits_of
from fedveil.runs.saved import MODEL, SavedRun, reading
from fedveil.serialization.arguments import for_python

if TYPE_CHECKING:
    import polars as pl

    from fedveil.data.federated import Federated

    Rows = Tensor | np.ndarray | pl.DataFrame | Mapping[str, Any] | str | Path

BATCH = 1000  # examples at once


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model. Both are visible in the model itself."""

    inputs: tuple[int, ...]  # shape of one input
    tokens: bool  # whether inputs are token ids, in sequences of any length
    classes: int
    loss: str

    @classmethod
    def of(cls, data: Federated) -> Interface:
        """The interface of a model trained on these data."""
        tokens = not data.inputs.dtype.is_floating_point
        return cls(tuple(data.inputs.shape[1:]), tokens, data.classes, data.loss)

    @classmethod
    def from_json(cls, text: str) -> Interface:
        """Read the output of `to_json`."""
        facts = json.loads(text)
        found = cls(tuple(facts["inputs"]), facts["tokens"], facts["classes"], facts["loss"])
        if not all(type(n) is int and n >= 0 for n in (*found.inputs, found.classes)):
            raise ValueError("its inputs or classes are not whole numbers")
        return found

    @property
    def target(self) -> Target:
        """Whether the model predicts classes, binary labels or numbers."""
        return target_of(self.loss)

    def to_json(self) -> str:
        """The interface as model.safetensors stores it."""
        return json.dumps(asdict(self))

    def fits(self, inputs: Tensor) -> bool:
        """Whether these inputs have the right shape, [rows, …]."""
        if self.tokens:
            return inputs.dim() == 1 + len(self.inputs)
        return tuple(inputs.shape[1:]) == self.inputs and inputs.dim() > 0


def threshold_at(shares: Tensor, alert_rate: float) -> float:
    """The probability that a share `alert_rate` of the rows reaches, at least one row.

    >>> threshold_at(torch.tensor([0.1, 0.4, 0.2, 0.3]), 0.5)
    0.30000001192092896
    """
    if not isinstance(alert_rate, int | float) or not 0 < alert_rate <= 1:
        raise UserError(f"The alert rate is {alert_rate!r}. Give a share above 0 and at most 1.")
    count = max(1, round(alert_rate * len(shares)))
    return float(shares.sort(descending=True).values[count - 1])


@dataclass(frozen=True, eq=False, repr=False)
class OpenedRun:
    """The model of a run, for `predict` and `probabilities`, with its summary and statement."""

    path: Path
    model: nn.Module  # in eval mode
    interface: Interface
    encoder: TableEncoder | None  # encoder.json, for a run on a table
    class_names: tuple[str, ...]  # empty if unknown
    summary: dict[str, Any]  # summary.json; empty if the file is missing
    statement: str  # privacy.txt; empty if the file is missing

    def __repr__(self) -> str:
        shape, classes = list(self.interface.inputs), self.interface.classes
        return f"<Run {self.path}: {type(self.model).__name__}, inputs {shape}, {classes} classes>"

    def predict(
        self, rows: Rows, threshold: float | None = None, alert_rate: float | None = None
    ) -> list[Any]:
        """The class of each row: its name, or its number if names are unknown.

        Rows are a table (a polars DataFrame, a dict of columns, the path of a CSV or Parquet file)
        or a tensor of inputs. A model for numeric targets returns numbers. The answer is the most
        probable class. Of two classes, it is the second if its probability reaches `threshold`,
        or for the share `alert_rate` of the rows with the highest probabilities.
        """
        if threshold is not None or alert_rate is not None:
            return self._alerted(self.probabilities(rows), threshold, alert_rate)
        outputs = self._outputs(self._inputs(rows))
        if self.interface.target != "class":
            return self._numbers(outputs)
        return self._named(outputs.argmax(-1).numpy())

    def _alerted(
        self, shares: Tensor, threshold: float | None, alert_rate: float | None
    ) -> list[Any]:
        if threshold is not None and alert_rate is not None:
            raise UserError("Both a threshold and an alert rate are given. Give one of them.")
        if shares.dim() != 2 or shares.shape[1] != 2:
            raise UserError(
                f"{self.path} does not answer one of two classes, so it has neither a threshold "
                "nor an alert rate. Use the probabilities."
            )
        least = threshold if alert_rate is None else threshold_at(shares[:, 1], alert_rate)
        if not isinstance(least, int | float) or not 0 <= least <= 1:
            raise UserError(f"The threshold is {least!r}. Give a probability from 0 to 1.")
        return self._named((shares[:, 1] >= least).long().numpy())

    def _named(self, classes: np.ndarray) -> list[Any]:
        if self.class_names:
            classes = np.array(self.class_names, dtype=object)[classes]
        return list(classes.tolist())

    def _unscaled(self, outputs: Tensor) -> Tensor:
        """Numbers in the unit of the label column."""
        if self.encoder is None:
            return outputs
        found: Tensor = self.encoder.restored(outputs)
        return found

    def _numbers(self, outputs: Tensor) -> list[Any]:
        """Numbers, or 1 and 0 for binary labels; a list for each row if there are several."""
        found = (
            (outputs > 0).long() if self.interface.target == "label" else self._unscaled(outputs)
        )
        whole = found.reshape(len(found), -1)
        return list((whole[:, 0] if whole.shape[1] == 1 else whole).tolist())

    def probabilities(self, rows: Rows) -> Tensor:
        """Softmax of the model's outputs: [rows, classes], or [rows, length, classes].

        They are not calibrated: they do not tell how often the model is right.
        """
        if self.interface.target == "label":
            return self._outputs(self._inputs(rows)).sigmoid()
        if self.interface.target != "class":
            raise UserError(
                f"{self.path} predicts numbers, so there are no class probabilities. Use predict."
            )
        return self._outputs(self._inputs(rows)).softmax(-1)

    def _inputs(self, rows: Rows) -> Tensor:
        if isinstance(rows, Tensor | np.ndarray):
            inputs = torch.as_tensor(rows)
        else:
            inputs = self._encoded(rows)
        if not self.interface.fits(inputs):
            raise UserError(
                f"The inputs have shape {list(inputs.shape)}, but the model of {self.path} takes "
                f"[rows, {', '.join(map(str, self.interface.inputs))}]. Give inputs of that shape."
            )
        return inputs.to(torch.int64 if self.interface.tokens else torch.float32)

    def _encoded(self, rows: pl.DataFrame | Mapping[str, Any] | str | Path) -> Tensor:
        if self.encoder is None:
            raise UserError(
                f"{self.path} has no encoder.json: the run was not trained on a table, or the file "
                f"is missing. In Python, fedveil.open_run('{self.path}').predict takes a tensor of "
                f"inputs of shape [rows, {', '.join(map(str, self.interface.inputs))}]."
            )
        frame = _frame(rows, self.encoder.inferred)
        missing = [c.name for c in self.encoder.columns if c.name not in frame.columns]
        if missing:
            raise UserError(
                f"The table has no column {', '.join(map(repr, missing))}, which the model of "
                f"{self.path} was trained with. Add it, with empty cells for unknown values."
            )
        return self.encoder.encode(frame)

    @torch.no_grad()
    def _outputs(self, inputs: Tensor) -> Tensor:
        if not len(inputs):
            raise UserError("There are no rows to predict. Give at least one.")
        starts = range(0, len(inputs), BATCH)
        parts = [logits_of(self.model(inputs[k : k + BATCH]), self.model) for k in starts]
        return torch.cat(parts)


@for_python
def open_run(path: str | Path, model: nn.Module | None = None) -> OpenedRun:
    """Open the run in the directory `path` to predict with. Its training data are not needed.

    A model of fedveil is built by its name, and a model of your own is imported by its name
    `package.module:Class`. A model that was passed to `train` as an object must be passed here too.

    >>> open_run("runs/a").predict("new.csv")  # doctest: +SKIP
    ['no', 'yes']
    """
    run = SavedRun.open(Path(path))
    path, name = run.path, run.settings.get("model")
    tensors, facts = run.model()
    encoder = run.encoder
    interface = _interface(path, facts, encoder)
    made = _made(path, name, interface, model)
    summary = run.summary if run.ended else {}
    return OpenedRun(
        path=path,
        model=_filled(path, made, tensors).eval(),
        interface=interface,
        encoder=encoder,
        class_names=_names(encoder, summary, interface.classes),
        summary=summary,
        statement=run.statement,
    )


def _made(path: Path, name: Any, interface: Interface, given: nn.Module | None) -> nn.Module:
    """The module without its trained parameters."""
    if given is not None:
        return copy.deepcopy(given)
    if not isinstance(name, str):
        raise UserError(
            f"The model of {path} was passed to train as an object, so recipe.toml does not name "
            "it. Build the same model and pass it: open_run(path, model=Net(…))."
        )
    return rebuild(name, interface.inputs, interface.classes, str(path))


def _filled(path: Path, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    try:
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as problem:
        lines = [line.strip() for line in str(problem).splitlines()]
        raise UserError(
            f"{path / MODEL} does not fit the model {type(module).__name__}: "
            f"{lines[min(1, len(lines) - 1)]} Pass the model that was trained."
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
        f"{path} was saved by an earlier version, which did not record the inputs of the model. "
        "Build the model and load its parameters with "
        f"model.load_state_dict(safetensors.torch.load_file('{path / MODEL}'))."
    )


def _names(
    encoder: TableEncoder | None, summary: Mapping[str, Any], classes: int
) -> tuple[str, ...]:
    names = summary.get("class_names", []) if encoder is None else encoder.class_names
    return tuple(map(str, names)) if len(names) == classes else ()


def _frame(rows: Any, inferred: bool) -> pl.DataFrame:
    import polars as pl

    from fedveil.data.frames import as_frame, read_frame

    if isinstance(rows, str | Path):
        return read_frame(rows, inferred)
    if isinstance(rows, pl.DataFrame) or hasattr(rows, "columns"):
        return as_frame(rows)
    if not isinstance(rows, Mapping):
        raise UserError(
            f"Rows of type {type(rows).__name__} are not a table. Give a polars, pandas or Arrow "
            "table, a dict of columns, the path of a CSV or Parquet file, or a tensor of inputs."
        )
    try:
        return pl.DataFrame(rows)
    except Exception as problem:  # polars raises many kinds
        why = str(problem).partition("\n")[0]
        raise UserError(
            f"The columns do not form a table ({why}). Give columns of equal length."
        ) from problem
