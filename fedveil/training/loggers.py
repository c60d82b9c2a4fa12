"""Loggers: send the numbers of every round to TensorBoard, MLflow or Weights & Biases.

Test scores and ε are sent. Diagnostics (norms, counts, angles) are private data of the clients and
are sent only if asked for.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedveil.errors import UserError
from fedveil.runs.directory import MODE, saving

if TYPE_CHECKING:
    from fedveil.training.records import Record
    from fedveil.training.run import Training

Watch = Callable[["Training", "Record"], None]
Send = Callable[[int, Mapping[str, float]], None]  # a round and its numbers
# Every other number is a diagnostic.
GROUPS = {
    "loss": "test", "accuracy": "test", "metric": "test", "metric_low": "test",
    "metric_high": "test", "epsilon": "privacy", "epsilon_planned": "privacy",
}  # fmt: skip


class Logger(Protocol):
    """A place to which the numbers of a run are sent."""

    def check(self) -> None:
        """Refuse before the long work if a package is not installed."""

    def run(self, facts: Mapping[str, Any]) -> Any:
        """A context manager of one run with these settings, which gives a `Send`."""


@dataclass(frozen=True)
class TensorBoard:
    """Event files in a directory, for `tensorboard --logdir`."""

    directory: str | Path

    def check(self) -> None:
        """Refuse if tensorboard is not installed."""
        _require("tensorboard", "tensorboard")

    @contextmanager
    def run(self, facts: Mapping[str, Any]) -> Iterator[Send]:
        """A writer of scalars."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(_private(self.directory)))

        def send(round: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, round)
            writer.flush()

        try:
            yield send
        finally:
            writer.close()


@dataclass(frozen=True)
class MLflow:
    """A run in an experiment of MLflow; a directory is a file store, else a tracking URI."""

    store: str | Path
    experiment: str = "fedveil"

    def check(self) -> None:
        """Refuse if mlflow is not installed."""
        _require("mlflow", "mlflow")

    @contextmanager
    def run(self, facts: Mapping[str, Any]) -> Iterator[Send]:
        """A run with these parameters, which ends as finished or failed."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self._uri())
        known = client.get_experiment_by_name(self.experiment)
        where = client.create_experiment(self.experiment) if known is None else known.experiment_id
        mine = client.create_run(where).info.run_id
        for name, value in facts.items():
            client.log_param(mine, name, value)

        def send(round: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                client.log_metric(mine, name, value, step=round)

        try:
            yield send
        except BaseException:
            client.set_terminated(mine, "FAILED")
            raise
        client.set_terminated(mine, "FINISHED")

    def _uri(self) -> str:
        if "://" in str(self.store) or str(self.store).startswith("file:"):
            return str(self.store)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a directory was asked for
        return _private(self.store).resolve().as_uri()


@dataclass(frozen=True)
class WandB:
    """An offline run of Weights & Biases in a directory; `wandb sync` uploads it later."""

    directory: str | Path
    project: str = "fedveil"

    def check(self) -> None:
        """Refuse if wandb is not installed."""
        _require("wandb", "wandb")

    @contextmanager
    def run(self, facts: Mapping[str, Any]) -> Iterator[Send]:
        """An offline run with these settings: nothing leaves the machine."""
        import wandb

        mine = wandb.init(
            mode="offline", dir=str(_private(self.directory)), project=self.project,
            config=dict(facts), reinit="create_new",
            settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True),
        )  # fmt: skip

        def send(round: int, values: Mapping[str, float]) -> None:
            mine.log(dict(values), step=round)

        failed = True
        try:
            yield send
            failed = False
        finally:
            mine.finish(exit_code=int(failed))


@contextmanager
def logged(
    loggers: Sequence[Logger], watch: Watch | None, training: Training, diagnostics: bool = False
) -> Iterator[Watch]:
    """A watch that also sends the numbers of every round to all loggers."""
    with ExitStack() as stack:
        sends = [stack.enter_context(logger.run(facts_of(training))) for logger in loggers]

        def both(training: Training, record: Record) -> None:
            if watch is not None:
                watch(training, record)
            for send in sends:
                send(record.round, scalars(record, diagnostics))

        yield both


def facts_of(training: Training) -> dict[str, Any]:
    """The settings that every logger records: no names of data files, classes or clients."""
    spec = training.spec
    return {
        "algorithm": spec.recipe.name,
        "rounds": spec.rounds,
        "model": spec.model or "own",
        "parameters": spec.dim,
        "delta": spec.delta,
        **({} if spec.allowed is None else {"epsilon": spec.allowed}),
        "loss": spec.data.loss,
        "metric": spec.metrics.main.name,
        "engine": spec.engine,
    }


def scalars(record: Record, diagnostics: bool = False) -> dict[str, float]:
    """A record's numbers by their names; what was not measured is left out."""
    values = asdict(record)
    values.pop("round")
    return {
        f"{GROUPS.get(name, 'diagnostics')}/{name}": float(value)
        for name, value in values.items()
        if (diagnostics or name in GROUPS) and value is not None and math.isfinite(value)
    }


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Refuse what is not a logger, and packages that are not installed."""
    for logger in loggers:
        if isinstance(logger, type) or not hasattr(logger, "run") or not hasattr(logger, "check"):
            raise UserError(
                f"log has {logger!r}, which is not a logger. Give objects such as "
                "loggers.TensorBoard('logs')."
            )
        logger.check()


def _private(directory: str | Path) -> Path:
    """The directory, created for its owner only."""
    path = Path(directory)
    with saving(path):
        path.mkdir(MODE, parents=True, exist_ok=True)
    return path


def _require(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"--{extra} needs the package {package}, which is not installed. Install it with "
            f'`pip install "fedveil[{extra}]"`.'
        )
