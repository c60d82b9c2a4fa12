"""`fedveil train`: start a run, or resume one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.accounting.rounding import short
from fedveil.commands import flags
from fedveil.errors import LostError, UserError

if TYPE_CHECKING:
    from fedveil.training.loggers import Logger
    from fedveil.training.run import Training
    from fedveil.training.settings import Settings

RUNS = Path("runs")  # where a run is saved that names no directory


@flags.from_settings(
    *flags.ALGORITHM, *flags.DATA, "model", "loss", "rounds", "seed", "engine", "device",
    *flags.GUARANTEE, "per_round", "noise", "account", "metric", "evaluate_every", "patience",
    "checkpoint_every", "diagnostics",
)  # fmt: skip
def train(
    config: flags.Config = None,
    asked: flags.Asked = flags.NOTHING,
    out: Annotated[
        Path | None, typer.Option(help="New directory for the run. [default: runs/…]")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Resume the run in this directory.")] = None,
    ledger: flags.Ledger = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also log every round for TensorBoard in this directory.")
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option(help="Also log every round to this MLflow directory or URI.")
    ] = None,
    wandb: Annotated[
        Path | None,
        typer.Option(help="Also log every round for Weights & Biases here, offline."),
    ] = None,
    log_diagnostics: Annotated[
        bool,
        typer.Option("--log-diagnostics", help="Also log diagnostics, which are private data."),
    ] = False,
) -> None:
    """Train a model, with or without privacy, and save the run."""
    from fedveil.training.settings import read_settings

    log = _log(tensorboard, mlflow, wandb, log_diagnostics)
    flags.refuse_no_settings(config)
    if resume is None:
        _train_anew(read_settings(config, asked), out, ledger, log)
    elif asked or config is not None or out is not None:
        raise UserError("--resume uses the run's own settings; it takes no other settings.")
    else:
        _train_on(resume, ledger, log)


@dataclass(frozen=True)
class Log:
    """Where rounds are logged, and whether with diagnostics."""

    loggers: tuple[Logger, ...] = ()
    diagnostics: bool = False


def _log(
    tensorboard: Path | None, mlflow: str | None, wandb: Path | None, diagnostics: bool
) -> Log:
    """The loggers that were asked for, if their packages are installed."""
    if not (tensorboard or mlflow or wandb):
        return Log()
    from fedveil.training.loggers import MLflow, TensorBoard, WandB, check_loggers

    found: list[Logger] = [] if tensorboard is None else [TensorBoard(tensorboard)]
    found += [] if mlflow is None else [MLflow(mlflow)]
    found += [] if wandb is None else [WandB(wandb)]
    check_loggers(found)
    return Log(tuple(found), diagnostics)


def _train_anew(settings: Settings, out: Path | None, ledger: Path | None, log: Log) -> None:
    from fedveil.commands.progress import entry, getting_ready
    from fedveil.engines.processes import joined
    from fedveil.ledger.resembling import resembling
    from fedveil.runs.directory import refuse_taken
    from fedveil.training.settings import from_settings, refuse_unnamed_data
    from fedveil.training.start import start

    with joined() as team:
        refuse_unnamed_data(settings, "The settings file", "Name them with --dataset or --path")
        if out is not None and team.first:
            refuse_taken(out)  # before the long work
        with getting_ready():
            training = from_settings(settings, team=team, ledger=ledger)
            start(training, out, under=RUNS)
        if team.first and (note := resembling(training.data, settings.account, ledger)):
            entry("Account", note, width=13)
        _finish(training, out, settings, log)


def _train_on(path: Path, ledger: Path | None, log: Log) -> None:
    from fedveil.commands.progress import getting_ready
    from fedveil.engines.processes import joined
    from fedveil.runs.saved import RECIPE, SavedRun
    from fedveil.training.settings import from_settings, read_run
    from fedveil.training.start import resume

    with joined() as team:
        settings = read_run(SavedRun.open(path).file(RECIPE))
        with getting_ready():
            training = resume(from_settings(settings, team=team, ledger=ledger, run=path), path)
        _finish(training, path, settings, log)


def _finish(training: Training, out: Path | None, settings: Settings, log: Log) -> None:
    """Train the remaining rounds; an interrupted run is saved too, and exits with code 130."""
    from fedveil.commands.progress import entry, show_start, show_summary, watcher
    from fedveil.ledger.session import RELEASED_BEFORE, REPEATED
    from fedveil.training.loggers import logged
    from fedveil.training.start import finish, follow

    if training.directory is None:  # a process that another one leads
        with _resumable(out):
            follow(training)
        return
    path = training.directory.path
    show_start(training)
    if training.finished:
        print("This run is already finished.")
    with (
        _resumable(path),
        watcher() as shown,
        logged(log.loggers, shown, training, log.diagnostics) as watch,
    ):
        result = finish(training, watch)
    if (session := training.session) is not None and (session.differed or session.repeats_earlier):
        print()
        entry("Note", RELEASED_BEFORE if session.differed else REPEATED, width=13)
    show_summary(result, _advice(training, path, settings))
    if not training.finished:
        sys.exit(130)


def _advice(training: Training, path: Path, settings: Settings) -> list[str]:
    from fedveil.training.settings import resolve_recipe

    if not training.finished:
        return [f"{_resume(path)}   resume where it stopped"]
    here = shlex.quote(str(path))
    again = f"fedveil train {shlex.quote(str(path / 'recipe.toml'))}"
    lines = [
        f"fedveil diagnose {here}   find out what limited the run",
        f"fedveil report {here}   an HTML report of the run",
        f"{again} --seed {settings.seed + 1}   the same run with another seed",
    ]
    if training.spec.budget is not None and not resolve_recipe(settings).noise.calibrated:
        other = training.spec.budget.epsilon / 2
        lines.append(f"{again} --epsilon {short(other)}   the same run with half the budget")
    return lines


@contextmanager
def _resumable(path: Path | None) -> Iterator[None]:
    """Say how to resume a run that lost a process."""
    try:
        yield
    except LostError as problem:
        command = _resume(path or Path("runs/…"))
        problem.advice = f"Resume from its last checkpoint with `{command}`"
        raise


def _resume(path: Path) -> str:
    return f"fedveil train --resume {shlex.quote(str(path))}"
