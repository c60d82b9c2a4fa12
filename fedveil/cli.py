"""The command line. Heavy libraries are loaded by the commands that need them."""

from __future__ import annotations

import io
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil import budget_cli, runs_cli
from fedveil.audit import commands as audit_commands
from fedveil.bench import bench
from fedveil.comparing import command as compare_command
from fedveil.diagnosis.commands import diagnose
from fedveil.errors import LostError, UserError
from fedveil.flags import assignment as _assignment
from fedveil.flags import given as _given
from fedveil.planning.commands import plan
from fedveil.ranks import end_at_once, one_voice, tells
from fedveil.reporting.command import report

if TYPE_CHECKING:
    from fedveil.privacy.statement import Statement
    from fedveil.runs.directory import RunDirectory
    from fedveil.settings import Settings
    from fedveil.training import Training

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(budget_cli.app, name="budget")


def main() -> None:
    """Run a command, and end."""
    try:
        _main()
    except SystemExit as ended:
        end_at_once(ended)
        raise


def _main() -> None:
    """Run a command; bad input ends with one sentence and exit code 2, Ctrl-C with 130.

    Of the processes that torchrun started one speaks; if one is lost, the others end with 1.
    """
    for sink in (sys.stdout, sys.stderr):
        if isinstance(sink, io.TextIOWrapper):
            sink.reconfigure(errors="replace")  # an ε must not end a run on an ASCII terminal
    # Threads that wait asleep: spinning ones make a busy machine many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with one_voice():
            app()
    except UserError as problem:
        if tells(problem):
            sentence = "".join(c if c.isprintable() else " " for c in str(problem))
            print(f"fedveil: {sentence}", file=sys.stderr)
        sys.exit(1 if isinstance(problem, LostError) else 2)


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Train models over many people's data with a privacy guarantee that is true."""
    if version:
        from fedveil import __version__

        print(f"fedveil {__version__}")
        raise typer.Exit


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; flags win over it.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="See `fedveil algorithms`; dp_norm_fedavg if none.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of the algorithm: --set clip=1.0 (repeatable)."),
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="See `fedveil datasets`; fashion-mnist if none.")
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(help="Your own CSV or Parquet table, image folder or zip, text, saved data."),
    ] = None,
    client: Annotated[str | None, typer.Option(help="The table's column of clients.")] = None,
    label: Annotated[str | None, typer.Option(help="The table's column to predict.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="key, iid, shards, majority or dirichlet.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="How many clients there are; 100 if not said.")
    ] = None,
    data_: Annotated[
        list[str] | None,
        typer.Option("--data", help="A setting of the data: --data alpha=0.1 (repeatable)."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model's name, or package.module:Class of your own.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How many rounds to play; 100 if not said.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="The ε the whole run may spend.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="The δ that goes with it; 1e-5 or less if not said.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Instead of ε: noise over the bound of one update.")
    ] = None,
    view: Annotated[
        str | None, typer.Option(help="Whom ε is kept against: models, sum or messages.")
    ] = None,
    per_round: Annotated[
        bool | None, typer.Option("--per-round", help="ε and δ are those of a single round.")
    ] = None,
    noise: Annotated[
        str | None, typer.Option(help="seeded (repeatable), or secure (secret and exact).")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same run.")] = None,
    engine: Annotated[str | None, typer.Option(help="auto, factored, dense or loop.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new directory; runs/… if none.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Rounds between checkpoints; at evaluations if not said.")
    ] = None,
    diagnostics: Annotated[
        bool | None, typer.Option(help="Record what is seen of clients; not if noise is secure.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run's directory.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Where spending is recorded; FEDVEIL_LEDGER, or your own.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(help="Also log every round for TensorBoard, into a directory.")
    ] = None,
) -> None:
    """Train a model, private or not, and save the run."""
    from fedveil.settings import read_settings
    from fedveil.tensorboard import refuse_absent

    parameters = dict(_assignment(text) for text in set_ or [])
    settings_of_data = dict(_assignment(text, "--data", "alpha=0.1") for text in data_ or [])
    if noise_multiplier is not None:
        parameters["noise_multiplier"] = noise_multiplier
    data = settings_of_data | _given(
        dataset=dataset,
        path=path,
        client=client,
        label=label,
        partition=partition,
        clients=clients,
    )
    flags = _given(
        algorithm=algorithm,
        parameters=parameters or None,
        data=data or None,
        model=model,
        rounds=rounds,
        epsilon=epsilon,
        delta=delta,
        view=view,
        per_round=per_round,
        noise=noise,
        seed=seed,
        engine=engine,
        checkpoint_every=checkpoint_every,
        diagnostics=diagnostics,
    )
    if tensorboard is not None:
        refuse_absent()
    if resume is None:
        _train_anew(read_settings(config, flags), out, ledger, tensorboard)
    elif flags or config is not None or out is not None:
        raise UserError("--resume goes on with a run as it was; it takes no other settings.")
    else:
        _train_on(resume, ledger, tensorboard)


@app.command()
def privacy(
    target: Annotated[
        Path | None, typer.Argument(help="A run's directory, or a TOML file; none for a question.")
    ] = None,
    epsilon: Annotated[float | None, typer.Option(help="What may be spent.")] = None,
    delta: Annotated[float | None, typer.Option(help="1e-5 or less if not said.")] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise on the sum over the bound of one message.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Poisson: the chance to take part in a round.")
    ] = None,
    cohort: Annotated[
        int | None, typer.Option(help="Fixed size: how many take part in a round.")
    ] = None,
    clients: Annotated[int | None, typer.Option(help="How many clients there are.")] = None,
    cap: Annotated[int | None, typer.Option(help="How often one takes part at most.")] = None,
    view: Annotated[str, typer.Option(help="models, sum or messages.")] = "models",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Say what a run, a recipe or a Gaussian mechanism guarantees, view by view.

    Without a target, give all but one of epsilon, noise multiplier, rounds and rate: that one is
    found. For example: fedveil privacy --epsilon 5 --delta 1e-5 --rate 0.2 --rounds 200
    """
    import json

    from fedveil.progress import entry

    asked = _given(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=noise_multiplier,
        rounds=rounds,
        rate=rate,
        cohort=cohort,
        clients=clients,
        cap=cap,
    )
    if target is not None and asked:
        raise UserError(
            "A run or a recipe says all by itself; leave the options out, or the target."
        )
    found, statement = _stated(target) if target is not None else _answered(asked, view)
    if as_json:
        plain = statement.plain() | ({"found": found} if found else {})
        print(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
        return
    if found:
        entry("Found", found, width=13)
    for label, text in statement.entries():
        entry(label, text, width=13)


@app.command()
def datasets(
    path: Annotated[Path | None, typer.Argument(help="A directory of saved data.")] = None,
) -> None:
    """List the data sets by name, and whether they are here; with a PATH, check and describe it."""
    from fedveil.data.catalog import CATALOG
    from fedveil.progress import entry

    if path is not None:
        _describe(path)
        return
    for known in CATALOG.values():
        here = "here" if known.here() else "not here"
        entry(f"{known.name:17} {here}", known.summary, width=28)
        entry("", known.citation, width=28)
    print()
    entry("Your own", "--path table.csv --client user_id --label y", width=28)
    entry("", "--path images.zip (or a directory) with a folder for each class", width=28)
    entry("", "--path roles.txt, a text of roles and what they say", width=28)
    entry("", "--path saved, a directory made by fedveil.save_federated", width=28)


@app.command()
def algorithms(name: Annotated[str | None, typer.Argument()] = None) -> None:
    """List the algorithms with their citations; with a NAME, its rule and parameters."""
    from fedveil.algorithms import ALGORITHMS
    from fedveil.citations import described
    from fedveil.errors import unknown
    from fedveil.progress import entry

    if name is not None and name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    for method in [ALGORITHMS[name]] if name else ALGORITHMS.values():
        text = described(method)
        entry(text.name, "", width=0)
        entry("", text.rule, width=4)
        entry("", text.citation, width=4)
        for line in text.parameters if name else [", ".join(text.names)]:
            entry("", line, width=4)


audit_commands.register(app)
compare_command.register(app)
runs_cli.register(app)
app.command()(bench)
app.command()(plan)
app.command()(diagnose)
app.command()(report)


def _describe(path: Path) -> None:
    """Read all of a saved directory, and count its clients and classes."""
    from fedveil.data.describe import describe
    from fedveil.data.saved import open_federated, verify_federated

    verify_federated(path)
    print(f"{describe(open_federated(path))}\nEverything in {path} is as it was saved.")


def _answered(asked: dict[str, Any], view: str) -> tuple[str, Statement]:
    """A question without any run."""
    from fedveil.errors import unknown
    from fedveil.privacy.ask import Question, answer
    from fedveil.privacy.statement import VIEWS

    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    found = answer(Question(**asked, view=view))
    return found.found, found.statement


def _stated(target: Path) -> tuple[str, Statement]:
    """A run's statement, computed anew from its recipe; or that of a recipe still to be run."""
    from fedveil.charging import redrawn
    from fedveil.privacy.statement import statement
    from fedveil.runs.directory import RunDirectory, reading
    from fedveil.settings import prepare, read_settings, refuse_unnamed_data, resolve_recipe

    if target.is_dir():
        run = RunDirectory.open(target)
        known = run.load_summary()
        _refuse_selected(target, known)
        with reading(target / "summary.json"):
            facts = known["privacy"]
            played = max(facts["rounds"], run.rounds_played())
            size = (facts["dimension"], facts["population"], played, facts["delta"])
            told = (facts["randomness"] == "secure", facts.get("diagnostics"))
            lost = max(facts["rounds"] - known["rounds"], 0)
        recipe = redrawn(resolve_recipe(read_settings(target / "recipe.toml", {})), lost)
        return "", statement(recipe, *size, *told)
    settings = read_settings(target, {})
    refuse_unnamed_data(settings, "The settings file", "ask about the run's directory instead")
    with _getting_ready():
        training = prepare(settings)
    return "", training.statement(settings.rounds)


def _refuse_selected(target: Path, summary: dict[str, Any]) -> None:
    """What the best of several runs costs is not what its recipe says."""
    if "selection" in summary:
        raise UserError(
            f"{target} was selected among several runs, so its recipe does not tell its guarantee; "
            f"read {target / 'privacy.txt'}."
        )


def _train_anew(
    settings: Settings, out: Path | None, ledger: Path | None, board: Path | None
) -> None:
    from fedveil import training as work
    from fedveil.engines.processes import joined
    from fedveil.runs.directory import RunDirectory, refuse_taken
    from fedveil.settings import prepare, refuse_unnamed_data, resolved

    with joined() as team:
        refuse_unnamed_data(settings, "The settings file", "name them with --dataset or --path")
        if out is not None and team.first:
            refuse_taken(out)  # before the long work
        with _getting_ready():
            training = prepare(settings, team=team)
        if not team.first:
            with _resumable(out):
                work.follow(training)
            return
        training.enrol(ledger, saved=True)
        if out is None:
            directory = RunDirectory.fresh(Path("runs"), training.recipe.name)
        else:
            directory = RunDirectory.create(out)
        directory.save_settings(resolved(settings, training))
        _play(training, directory, settings, board)


def _train_on(path: Path, ledger: Path | None, board: Path | None) -> None:
    from fedveil import training as work
    from fedveil.engines.processes import joined
    from fedveil.runs.directory import RunDirectory
    from fedveil.settings import prepare, read_run

    with joined() as team:
        directory = RunDirectory.open(path)
        settings = read_run(path / "recipe.toml")
        with _getting_ready():
            training = work.restore(prepare(settings, team=team), directory, ledger)
        if team.first:
            _play(training, directory, settings, board)
            return
        with _resumable(path):
            work.follow(training)


def _getting_ready() -> AbstractContextManager[object]:
    from fedveil.progress import waiting

    return waiting("Loading the data and settling the noise …")


def _play(
    training: Training, directory: RunDirectory, settings: Settings, board: Path | None
) -> None:
    """Play what is left; an interrupted run is saved as well and ends with 130, as Ctrl-C does."""
    from fedveil import training as work
    from fedveil.progress import show_start, show_summary, watcher
    from fedveil.tensorboard import logged

    show_start(training)
    if training.finished:
        print("All rounds of this run are played already.")
    with _resumable(directory.path), logged(watcher(), board) as watch:
        result = work.finish(training, directory, watch)
    show_summary(result, _advice(training, directory.path, settings))
    if not training.finished:
        sys.exit(130)


def _advice(training: Training, path: Path, settings: Settings) -> list[str]:
    from fedveil.settings import resolve_recipe

    if not training.finished:
        return [f"{_resume(path)}   goes on where it stopped"]
    again = f"fedveil train {shlex.quote(str(path / 'recipe.toml'))}"
    lines = [f"fedveil diagnose {shlex.quote(str(path))}   what held it back, if anything did"]
    lines += [f"{again} --seed {settings.seed + 1}   the same with another seed"]
    if training.budget is not None and not resolve_recipe(settings).noise.settled:
        other = training.budget.epsilon / 2
        lines.append(f"{again} --epsilon {other:g}   half the privacy budget")
    return [*lines, "fedveil algorithms   what else could be trained"]


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
