"""Rounds as TensorBoard shows them, where the package `tensorboard` is there."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.runs.directory import MODE, saving

if TYPE_CHECKING:
    from fedveil.progress import Watcher
    from fedveil.training import Record, Training

Watch = Callable[["Training", "Record"], None]
# What is not here is a diagnostic.
GROUPS = {"loss": "test", "accuracy": "test", "epsilon": "privacy", "epsilon_planned": "privacy"}


def refuse_absent() -> None:
    """A sentence before the long work, where the package is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "--tensorboard needs the package tensorboard, which is not installed; install it with "
            '`pip install "fedveil[tensorboard]"`.'
        )


@contextmanager
def logged(watcher: Watcher, directory: Path | None) -> Iterator[Watch]:
    """The watcher, and a log of every number of every round in a directory."""
    with watcher as watch:
        if directory is None:
            yield watch
            return
        with _writer(directory) as writer:

            def both(training: Training, record: Record) -> None:
                watch(training, record)
                _log(writer, record)

            yield both


def scalars(record: Record) -> dict[str, float]:
    """A record's numbers by what they are called there; what was not measured is left out."""
    values = asdict(record)
    round = values.pop("round")
    assert round > 0
    return {
        f"{GROUPS.get(name, 'diagnostics')}/{name}": float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def _log(writer: Any, record: Record) -> None:
    for name, value in scalars(record).items():
        writer.add_scalar(name, value, record.round)
    writer.flush()


@contextmanager
def _writer(directory: Path) -> Iterator[Any]:
    from torch.utils.tensorboard import SummaryWriter

    with saving(directory):
        directory.mkdir(MODE, parents=True, exist_ok=True)  # norms and counts are private data
        writer = SummaryWriter(str(directory))
    try:
        yield writer
    finally:
        writer.close()
