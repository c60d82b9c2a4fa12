"""The commands as Python functions, with the names of the flags as arguments.

fv.train, fv.plan, fv.compare, fv.diagnose, fv.report, fv.resume, fv.privacy
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor, nn

from fedveil.commands import flags
from fedveil.commands.compared import ComparisonOutcome
from fedveil.commands.progress import (
    Unseen,
    entry,
    getting_ready,
    seen,
    show_start,
    waiting,
    watcher,
)
from fedveil.errors import UserError, told, unknown
from fedveil.models.loss import Loss
from fedveil.serialization.arguments import for_python, in_python
from fedveil.serialization.codec import check_value, hints_of
from fedveil.training.loggers import Logger
from fedveil.training.metrics import Metric, Score

if TYPE_CHECKING:
    from fedveil.commands.compare import Execution
    from fedveil.comparing.members import Comparison
    from fedveil.data.federated import Federated
    from fedveil.diagnosis.diagnose import Diagnosis
    from fedveil.planning.plan import Plan
    from fedveil.privacy.statement import Statement
    from fedveil.recipe import Recipe
    from fedveil.training.records import Record
    from fedveil.training.result import Result
    from fedveil.training.run import Training
    from fedveil.training.settings import Settings

SIZES = ("dim", "shape", "classes", "examples", "pilot")
QUESTION = ("cosine", "norm", "pilot_clients", "pilot_rounds", "theory", "constants")


@for_python
def train(
    recipe: Recipe,
    data: Federated,
    model: str | nn.Module = "softmax",
    rounds: int = 100,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    engine: str = "auto",
    evaluate_every: int | None = None,
    save: str | Path | None = None,
    watch: Callable[[Training, Record], None] | None = None,
    noise: Literal["seeded", "secure"] = "seeded",
    per_round: bool = False,
    checkpoint_every: int | None = None,
    ledger: str | Path | None = None,
    diagnostics: bool | None = None,
    loss: str | Loss | Callable[[Tensor, Tensor], Tensor] | None = None,
    metric: str | Metric | Score | None = None,
    metrics: Mapping[str, Score] | Iterable[Metric] | None = None,
    log: Sequence[Logger] = (),
    log_diagnostics: bool = False,
    device: str = "auto",
    account: str | None = None,
    private_evaluation: float | None = None,
    patience: int | None = None,
    quiet: bool = False,
) -> Result:
    """Train with noise calibrated to (ε, δ), or with the recipe's own noise and report its ε.

    Ctrl-C ends the run after the current round and keeps the rounds so far in the result and on
    disk. A private run that is saved is recorded in the ledger. Every run respects a budget that is
    set for the data.

    Args:
        recipe: The algorithm, such as `fv.algorithms.dp_fedavg(clip=1.0)`.
        data: Examples of clients, such as `fv.load("digits").split(fv.Iid(100))`.
        model: Name of a model, `package.module:Class`, or a `torch.nn.Module`.
        rounds: Number of training rounds.
        epsilon: ε that the noise is calibrated to. [default: the recipe's own noise]
        delta: δ of the guarantee. [default: 1e-5, or 0.1/n if smaller]
        seed: Seed of the model, the cohorts and seeded noise.
        engine: How updates are computed: auto, factored, dense or loop.
        evaluate_every: Rounds between two evaluations. [default: 20 evaluations per run]
        save: New directory for the run. [default: the run is not saved]
        watch: Function that is called with the training and a record after every round.
        noise: 'secure' draws integer noise from the operating system's randomness.
        per_round: Calibrate the noise of a single round to (ε, δ).
        checkpoint_every: Rounds between two checkpoints. [default: at every evaluation]
        ledger: Ledger that records the run. [default: the user's ledger]
        diagnostics: Record private diagnostics. [default: unless noise is secure]
        loss: Name such as 'focal(gamma=2)', or your function (outputs, targets) → [n].
        metric: Metric that ranks runs: 'auc', 'r2', …, a `fv.Metric`, or your function.
        metrics: Your own metrics, `{"name": function}`.
        log: Loggers that every round is sent to: `fv.loggers.TensorBoard`, `MLflow`, `WandB`.
        log_diagnostics: Also log diagnostics, which are private data.
        device: Where clients train: auto, cpu, cuda, cuda:1 or mps.
        account: Named account of the ledger that is charged.
        private_evaluation: ε of noisy evaluations, which `epsilon` covers too. [default: exact]
        patience: Stop after this many evaluations without a better result.
        quiet: Show no progress. By default it is shown on a terminal and in Jupyter.

    >>> import fedveil as fv
    >>> data = fv.load("digits").split(fv.Iid(clients=50))
    >>> train(fv.algorithms.dp_fedavg(clip=1.0, rate=0.5), data, rounds=2, epsilon=8.0).rounds
    2
    """
    from fedveil.ledger.resembling import resembling
    from fedveil.training.loggers import check_loggers
    from fedveil.training.prepare import prepare
    from fedveil.training.start import start

    check_loggers(log)
    if watch is not None and not callable(watch):
        raise UserError(f"train: watch is {told(watch)}. Give a function (training, record).")
    known = len(getattr(data, "notes", ()))
    with getting_ready() if seen(quiet) else nullcontext():
        training = prepare(
            recipe, data, model, rounds, epsilon, delta, seed, engine, evaluate_every,
            noise=noise, per_round=per_round, diagnostics=diagnostics,
            ledger=None if ledger is None else Path(ledger), checkpoint_every=checkpoint_every,
            device=device, account=account, loss=loss, metric=metric, metrics=metrics,
            private_evaluation=private_evaluation, patience=patience,
        )  # fmt: skip
        start(training, None if save is None else Path(save))
    warnings = list(training.data.notes[known:])
    if not quiet and (note := resembling(training.data, account, training.ledger)):
        warnings.append(note)
        if seen(quiet):
            entry("Account", note, width=13)
    return _finished(training, quiet, warnings, watch, log, log_diagnostics)


def _finished(
    training: Training,
    quiet: bool,
    warnings: Sequence[str],
    watch: Callable[[Training, Record], None] | None,
    log: Sequence[Logger],
    log_diagnostics: bool,
) -> Result:
    """Train the remaining rounds. Where progress is not shown, warnings are logged."""
    from fedveil.training.loggers import logged
    from fedveil.training.start import finish

    shows = seen(quiet)
    if shows:
        show_start(training, in_python)
    else:
        for warning in () if quiet else warnings:
            logging.getLogger("fedveil").warning(in_python(warning))
    with watcher() if shows else Unseen() as display:

        def each(training: Training, record: Record) -> None:
            display(training, record)
            if watch is not None:
                watch(training, record)

        with logged(log, each, training, log_diagnostics) as watching:
            return finish(training, watching)


@for_python
def plan(
    config: str | Path | None = None,
    cohort: int | None = None,
    rate: float | None = None,
    dim: int | None = None,
    shape: str | Sequence[int] | None = None,
    classes: int | None = None,
    examples: int | None = None,
    pilot: str | None = None,
    **settings: Any,
) -> Plan:
    """Predict whether a run will work, before training anything.

    `config` is a settings file. `cohort` clients, or each with probability `rate`, take part in a
    round. `dim`, `shape`, `classes` and `examples` describe model and data that are not named.
    `pilot` measures updates on public data. Other arguments are those of `fedveil plan`:
    algorithm, clients, rounds, epsilon, delta, model, dataset, path, client, label, cosine, norm,
    and the algorithm's own parameters.

    >>> plan(clients=3000, rate=0.2, rounds=200, epsilon=5.0, dim=7850).verdict.word
    'will work'
    """
    from fedveil.commands.plan import sampling
    from fedveil.planning.facts import SizeOptions
    from fedveil.planning.plan import PlanOptions, make

    question = {name: settings.pop(name) for name in QUESTION if name in settings}
    for name, value in question.items():
        check_value(value, hints_of(PlanOptions)[name], f"plan: {name}")
    asked = _asked(settings)
    made = _settings(config, asked)
    if drawn := sampling(made.algorithm, cohort, rate):
        asked["parameters"] = {**asked.get("parameters", {}), **drawn}
        made = _settings(config, asked)
    written = shape if shape is None or isinstance(shape, str) else "x".join(map(str, shape))
    sizes = SizeOptions(dim, written, classes, examples, pilot)
    return make(made, PlanOptions(sizes, **question))


@for_python
def compare(
    algorithms: Sequence[str] | str = (),
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 3,
    out: str | Path | None = None,
    jobs: int | None = None,
    ledger: str | Path | None = None,
    configs: Sequence[str | Path] = (),
    cut: bool = False,
    select_privately: bool = False,
    expect: float | None = None,
    law: Literal["geometric", "logarithmic", "poisson"] | None = None,
    eta: float | None = None,
    quiet: bool = False,
    **settings: Any,
) -> ComparisonOutcome:
    """Train algorithms × settings × seeds at the same privacy budget and compare them.

    Data are named, as on the command line: dataset, path, client, label, clients, …; other
    arguments are rounds, epsilon, delta, model, metric and the algorithms' parameters.

    Args:
        algorithms: Names of algorithms, or `module:function` for your own.
        grid: Parameters of the algorithms and the values to vary, `{"clip": [0.5, 1.0]}`.
        seeds: Number of seeds, or the seeds themselves.
        out: New directory for the runs. [default: comparisons/…]
        jobs: Number of runs at a time. [default: number of cores]
        ledger: Ledger that records the runs. [default: the user's ledger]
        configs: Settings files to train instead of, or in addition to, `algorithms`.
        cut: Train only as many runs as the budget of the data set allows.
        select_privately: Train a random number of randomly drawn runs, and keep only the best.
        expect: Expected number of runs to draw. [default: twice the members]
        law: Distribution of that number. [default: geometric]
        eta: η of a truncated negative binomial distribution, above -1, instead of `law`.
        quiet: Show no progress. By default it is shown on a terminal and in Jupyter.
        settings: Settings of all runs.

    >>> outcome = compare(["dp_fedavg", "dp_norm_fedavg"], epsilon=4.0, clients=100,
    ...                   dataset="digits", out="comparisons/a")  # doctest: +SKIP
    """
    from fedveil.commands import compare as command
    from fedveil.comparing.members import planned

    selection = flags.given(expect=expect, law=law, eta=eta)
    if selection and not select_privately:
        raise UserError(f"{next(iter(selection))} needs select_privately=True. Pass both.")
    names = [algorithms] if isinstance(algorithms, str) else list(algorithms)
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    axes = [(name, _values(name, values)) for name, values in (grid or {}).items()]
    comparison = planned([*map(Path, configs)], names, _asked(settings), axes, numbers)
    if select_privately:
        comparison = command.selecting(comparison, **selection)
    where = None if out is None else Path(out)
    books = None if ledger is None else Path(ledger)
    execution = command.Execution(command.workers(jobs), books, cut, as_json=not seen(quiet))
    command.refuse_taken(where)
    command.check_budget(comparison, execution)
    return _compared(comparison, command.new_directory(comparison, where), execution)


def _compared(comparison: Comparison, directory: Path, execution: Execution) -> ComparisonOutcome:
    """Train what is left of a comparison, and read its outcome."""
    from fedveil.commands import compare as command
    from fedveil.commands.comparison_runs import save_selection, summed_up, train_members
    from fedveil.comparing.selecting import forget, select

    jobs, books, quiet = execution.jobs, execution.ledger, execution.as_json
    if comparison.selection is not None:
        command.refuse_second_draw(directory)
        waits = nullcontext() if quiet else waiting("Training a secret number of runs …")
        with waits:
            chosen, run, price = select(comparison, directory, jobs, books)
        save_selection(comparison, directory, chosen, run, price)
        forget(directory)
        return ComparisonOutcome.read(directory)
    pool = train_members(comparison, directory, jobs, books, execution.cut, quiet)
    summed_up(comparison, directory, books)
    if pool.problems:
        name, problem = next(iter(pool.problems.items()))
        raise UserError(f"{len(pool.problems)} runs did not finish, the first is {name}: {problem}")
    return ComparisonOutcome.read(directory)


@for_python
def diagnose(run: str | Path) -> Diagnosis:
    """Find problems of a saved run, and what to try: `.wrong` has the problems, with advice.

    >>> diagnose("runs/a").wrong  # doctest: +SKIP
    """
    from fedveil.diagnosis.diagnose import diagnose as examine

    return examine(Path(run))


@for_python
def report(
    runs: str | Path | Sequence[str | Path], out: str | Path | None = None, open: bool = False
) -> Path:
    """Write an HTML report of runs or of a comparison, and return its path.

    The page works offline. Like the runs, it contains private data. `out` is the file to write
    [default: report.html in the run's directory], and `open` shows it in a browser.

    >>> report("runs/a")  # doctest: +SKIP
    """
    from fedveil.commands.report import refuse_taken, write
    from fedveil.reporting.load import load_story
    from fedveil.reporting.page import page

    paths = [Path(runs)] if isinstance(runs, str | Path) else [Path(run) for run in runs]
    if not paths:
        raise UserError("There is no run to report on. Give the directory of a run.")
    place = Path(out) if out else (paths[0] if len(paths) == 1 else Path()) / "report.html"
    refuse_taken(place)
    write(place, page(load_story(paths)))
    if open:
        import webbrowser

        webbrowser.open(place.resolve().as_uri())
    return place


@for_python
def resume(
    path: str | Path, data: Any = None, ledger: str | Path | None = None, quiet: bool = False
) -> Result | ComparisonOutcome:
    """Resume a saved run from its last checkpoint, or a comparison, and train what is left.

    Args:
        path: Directory of the run or the comparison.
        data: The Federated of a run from Python whose settings do not name its data.
        ledger: Ledger that records the run. [default: the user's ledger]
        quiet: Show no progress. By default it is shown on a terminal and in Jupyter.

    >>> resume("runs/a")  # doctest: +SKIP
    """
    from fedveil.commands import compare as command
    from fedveil.comparing.members import FILE, read_comparison
    from fedveil.data.federated import Federated
    from fedveil.runs.saved import RECIPE, SavedRun
    from fedveil.training.settings import from_settings, read_run, read_settings
    from fedveil.training.start import resume as resumed

    place, books = Path(path), None if ledger is None else Path(ledger)
    if (place / FILE).is_file():
        execution = command.Execution(command.workers(None), books, False, not seen(quiet))
        return _compared(read_comparison(place), place, execution)
    if data is not None and not isinstance(data, Federated):
        raise UserError(f"resume: data is {told(data)}. Give the Federated of the run.")
    file = SavedRun.open(place).file(RECIPE)
    settings = read_run(file) if data is None else read_settings(file, {})
    training = from_settings(settings, data, ledger=books, run=place)
    return _finished(resumed(training, place), quiet, (), None, (), False)


@for_python
def privacy(
    run: str | Path | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    rounds: int | None = None,
    rate: float | None = None,
    cohort: int | None = None,
    clients: int | None = None,
    cap: int | None = None,
    view: str = "models",
) -> Statement:
    """The privacy statement of a run or a settings file, or of a Gaussian mechanism.

    Without a run, give all but one of epsilon, noise_multiplier, rounds and rate (or cohort of
    clients): the missing one is computed.

    >>> found = privacy(epsilon=5.0, delta=1e-5, rate=0.2, rounds=200)
    >>> 2.6 < found.multiplier < 2.8
    True
    """
    from fedveil.commands.privacy import stated
    from fedveil.privacy.ask import Question, answer
    from fedveil.privacy.guarantee import VIEWS

    asked = flags.given(
        epsilon=epsilon, delta=delta, noise_multiplier=noise_multiplier, rounds=rounds, rate=rate,
        cohort=cohort, clients=clients, cap=cap,
    )  # fmt: skip
    if run is not None:
        if asked:
            raise UserError("A run or a settings file needs no other arguments. Leave them out.")
        return stated(Path(run))[1]
    if view not in VIEWS:
        raise unknown("view", view, VIEWS)
    return answer(Question(**asked, view=view)).statement


def _values(name: str, values: Any) -> list[Any]:
    """The values of a parameter in a grid."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UserError(f"compare: grid has {name} = {told(values)}. Give a list of values.")
    return list(values)


def _settings(config: str | Path | None, asked: Mapping[str, Any]) -> Settings:
    from fedveil.training.settings import read_settings

    return read_settings(None if config is None else Path(config), asked)


def _asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the form of a settings file; other names are algorithm parameters."""
    from fedveil.training.settings import DataSettings, Settings

    asked: dict[str, Any] = {"data": {}, "parameters": {}}
    for name, value in given.items():
        if isinstance(value, np.ndarray | Tensor):
            raise UserError(f"{name} is {told(value)}. Give a number, a text or a list.")
        if name in ("data", "parameters"):
            if not isinstance(value, Mapping):
                raise UserError(f"{name} is {value!r}. Give a dictionary of settings.")
            asked[name] |= dict(value)
        elif name in Settings.model_fields:
            asked[name] = value
        else:
            where = "data" if name in DataSettings.model_fields else "parameters"
            asked[where][name] = value
    return {name: value for name, value in asked.items() if not isinstance(value, dict) or value}
