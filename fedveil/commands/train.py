"""`fedveil train`: play a run, or what is left of one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import LostError, UserError

if TYPE_CHECKING:
    from fedveil.runs.directory import RunDirectory
    from fedveil.settings import Settings
    from fedveil.training import Training


def train(
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
    rounds: flags.Rounds = None,
    epsilon: flags.Epsilon = None,
    delta: flags.Delta = None,
    noise_multiplier: flags.NoiseMultiplier = None,
    view: flags.View = None,
    per_round: Annotated[
        bool | None, typer.Option("--per-round", help="ε and δ are those of a single round.")
    ] = None,
    noise: flags.Noise = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.")] = None,
    engine: flags.Engine = None,
    out: Annotated[Path | None, typer.Option(help="A new directory; runs/… if none.")] = None,
    checkpoint_every: flags.CheckpointEvery = None,
    diagnostics: Annotated[
        bool | None, typer.Option(help="Record what is seen of clients; not if noise is secure.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run's directory.")] = None,
    ledger: flags.Ledger = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also log every round for TensorBoard, into a directory.")
    ] = None,
) -> None:
    """Train a model, private or not, and save the run."""
    from fedveil.settings import read_settings
    from fedveil.tensorboard import refuse_absent

    asked = flags.gathered(
        set_, data_, noise_multiplier,
        dataset=dataset, path=path, client=client, label=label, partition=partition,
        clients=clients, simulate_clients=simulate_clients, algorithm=algorithm, model=model,
        rounds=rounds, epsilon=epsilon, delta=delta, view=view, per_round=per_round, noise=noise,
        seed=seed, engine=engine, checkpoint_every=checkpoint_every, diagnostics=diagnostics,
    )  # fmt: skip
    if tensorboard is not None:
        refuse_absent()
    flags.refuse_no_settings(config)
    if resume is None:
        _train_anew(read_settings(config, asked), out, ledger, tensorboard)
    elif asked or config is not None or out is not None:
        raise UserError("--resume goes on with a run as it was; it takes no other settings.")
    else:
        _train_on(resume, ledger, tensorboard)


def _train_anew(
    settings: Settings, out: Path | None, ledger: Path | None, board: Path | None
) -> None:
    from fedveil import training as work
    from fedveil.engines.processes import joined
    from fedveil.progress import entry, getting_ready
    from fedveil.resembling import resembling
    from fedveil.runs.directory import RunDirectory, refuse_taken
    from fedveil.settings import prepare, refuse_unnamed_data, resolved

    with joined() as team:
        refuse_unnamed_data(settings, "The settings file", "name them with --dataset or --path")
        if out is not None and team.first:
            refuse_taken(out)  # before the long work
        with getting_ready():
            training = prepare(settings, team=team, ledger=ledger)
        if not team.first:
            with _resumable(out):
                work.follow(training)
            return
        training.enrol(ledger, saved=True)
        if told := resembling(training.data, training.fingerprint, ledger):
            entry("New account", told, width=13)
        if out is None:
            directory = RunDirectory.fresh(Path("runs"), training.recipe.name)
        else:
            directory = RunDirectory.create(out)
        directory.save_settings(resolved(settings, training))
        _play(training, directory, settings, board)


def _train_on(path: Path, ledger: Path | None, board: Path | None) -> None:
    from fedveil import training as work
    from fedveil.engines.processes import joined
    from fedveil.progress import getting_ready
    from fedveil.runs.directory import RunDirectory
    from fedveil.settings import prepare, read_run

    with joined() as team:
        directory = RunDirectory.open(path)
        settings = read_run(path / "recipe.toml")
        with getting_ready():
            training = work.restore(prepare(settings, team=team, ledger=ledger), directory, ledger)
        if team.first:
            _play(training, directory, settings, board)
            return
        with _resumable(path):
            work.follow(training)


def _play(
    training: Training, directory: RunDirectory, settings: Settings, board: Path | None
) -> None:
    """Play what is left; an interrupted run is saved as well and ends with 130, as Ctrl-C does."""
    from fedveil import training as work
    from fedveil.privacy.session import RELEASED_BEFORE
    from fedveil.progress import entry, show_start, show_summary, watcher
    from fedveil.tensorboard import logged

    show_start(training)
    if training.finished:
        print("All rounds of this run are played already.")
    with _resumable(directory.path), logged(watcher(), board) as watch:
        result = work.finish(training, directory, watch)
    if training.session is not None and training.session.differed:
        print()
        entry("Note", RELEASED_BEFORE, width=13)
    show_summary(result, _advice(training, directory.path, settings))
    if not training.finished:
        sys.exit(130)


def _advice(training: Training, path: Path, settings: Settings) -> list[str]:
    from fedveil.settings import resolve_recipe

    if not training.finished:
        return [f"{_resume(path)}   goes on where it stopped"]
    here = shlex.quote(str(path))
    again = f"fedveil train {shlex.quote(str(path / 'recipe.toml'))}"
    lines = [
        f"fedveil diagnose {here}   what held it back, if anything did",
        f"fedveil report {here}   the run as a page",
        f"{again} --seed {settings.seed + 1}   the same with another seed",
    ]
    if training.budget is not None and not resolve_recipe(settings).noise.settled:
        other = training.budget.epsilon / 2
        lines.append(f"{again} --epsilon {other:g}   half the privacy budget")
    return lines


@contextmanager
def _resumable(path: Path | None) -> Iterator[None]:
    """Where a process of a run is lost, say how to go on."""
    try:
        yield
    except LostError as problem:
        command = _resume(path or Path("runs/…"))
        problem.advice = f"go on from its last checkpoint with `{command}`"
        raise


def _resume(path: Path) -> str:
    return f"fedveil train --resume {shlex.quote(str(path))}"
