"""train: start or resume a run, train its remaining rounds, and write the result."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.engines.task import Task
from fedveil.errors import UserError
from fedveil.ledger import charging
from fedveil.ledger.session import BudgetError
from fedveil.privacy.answers import ChangedError
from fedveil.runs.directory import RunDirectory, refuse_taken
from fedveil.runs.saved import SavedRun
from fedveil.training.checkpoint import checkpoint, load, write_result, write_round, write_start
from fedveil.training.interrupt import stop_after_interrupt
from fedveil.training.loggers import Logger, check_loggers, logged
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.result import Result
from fedveil.training.run import Training
from fedveil.training.scoring import Evaluation, answers, evaluated
from fedveil.training.spec import RunSpec

Watch = Callable[[Training, Record], None]


def start(training: Training, save: Path | None = None, under: Path | None = None) -> Training:
    """Enter a new run in the ledger and create its directory. A refused run creates none.

    Statistics of the data are charged before the directory exists, since it has them. The run is
    saved at `save`, or in a new directory `under` another, or not at all. Of several processes,
    only the first one does this.
    """
    if training.recipe.in_silos and training.source is None:
        raise UserError(
            f"{training.recipe.name} protects records inside silos, which add the noise "
            "themselves. Run it as a federation: `fedveil federate new --records N`."
        )
    if not training.team.first:
        return training
    if save is not None:
        refuse_taken(save)
    with _closed_on_failure(training):
        enrolment = training.enrol(saved=save is not None or under is not None)
        charging.reserve_statistics(enrolment, training.spec)
        if save is not None:
            training.directory = RunDirectory.create(save)
        elif under is not None:
            training.directory = RunDirectory.fresh(under, training.recipe.name)
        if training.directory is not None:
            training.directory.claim()
            training.directory.save_settings(training.spec.plain())
        write_start(training)
    return training


def resume(training: Training, path: Path) -> Training:
    """Load the last checkpoint of a run and enter it in the ledger again.

    Random streams are keyed by the round, so the resumed run equals an uninterrupted one. Of
    several processes, all but the first only load the checkpoint.
    """
    directory = RunDirectory.open(path)
    if not training.team.first:
        load(training, directory)
        return training
    directory.claim()
    training.directory = directory
    with _closed_on_failure(training):
        load(training, directory)
        training.enrol(saved=True, trace=SavedRun(path).trace)
        if not training.finished:
            directory.forget_results()  # they cover fewer rounds than will be trained
        write_start(training)
    return training


@contextmanager
def _closed_on_failure(training: Training) -> Iterator[None]:
    try:
        yield
    except BaseException:
        training.close()
        raise


def finish(training: Training, watch: Watch | None = None) -> Result:
    """Train the remaining rounds, with checkpoints on the way and the result at the end.

    If a budget ends the run, the trained rounds are saved before the error is raised.
    """
    if training.progress.enrolment is None:
        start(training)  # without a directory
    refusal: BudgetError | None = None
    try:
        with stop_after_interrupt() as stopped:
            while not (training.finished or stopped() or training.team.wished or refusal):
                try:
                    record = training.step()
                except BudgetError as problem:
                    refusal = problem
                    continue
                except ChangedError:
                    if len(training.records) == training.state.round:
                        checkpoint(training)
                    raise
                if watch is not None:
                    watch(training, record)
                write_round(training, record)
            result = conclude(training)
            _note_end(training, result)
            write_result(training, result)
    finally:
        training.close()
    training.team.lead("end", training.state.x)
    if refusal is not None:
        refusal.result = result
        raise refusal
    return result


def _note_end(training: Training, result: Result) -> None:
    """Enter the run's guarantee in the ledger, so that `verify` can check it."""
    if training.session is not None:
        said = result.guarantee
        limited = said.course is not None and said.course.limited
        training.session.end(said.view, said.rounds, said.epsilon, limited)


def follow(training: Training) -> None:
    """The work of every process but the first: its part of each round, until the run ends."""
    team = training.team
    with stop_after_interrupt() as stopped:
        while (order := team.follow(stopped(), training.state.x)) != "end":
            if order == "play":
                training.state, _ = training.play()
            else:
                team.gather(training.state.memory)


def conclude(training: Training) -> Result:
    """The released model with its evaluation and its privacy statement."""
    spec, x = training.spec, training.state.model
    loss, accuracy = _final_scores(training)
    evaluate = functools.partial(_evaluated, training.spec, x.clone())
    if spec.evaluation is not None:
        evaluate = functools.partial(_noisy, training.progress.evaluation)
    _load(spec.task, x)
    return Result(
        recipe=spec.recipe,
        model=spec.task.module,
        data=spec.data.name,
        accuracy=accuracy,
        loss=loss,
        statement=training.statement(),
        records=tuple(training.records),
        rounds=spec.rounds,
        seed=spec.seed,
        engine=training.engine.name,
        engine_reason=training.engine_reason,
        path=None if training.directory is None else training.directory.path,
        fingerprint=spec.fingerprint,
        class_names=spec.data.class_names,
        stopped_early=training.stopped_early,
        tested=len(spec.data.test) > 0,
        evaluate=evaluate,
        model_of=functools.partial(_own_model, training) if spec.recipe.memory.personal else None,
    )


def _final_scores(training: Training) -> tuple[float, float]:
    """Loss and accuracy of the model; with noise, those of the last evaluated round."""
    if training.spec.evaluation is None:
        return training.task.evaluate(training.state.model, training.data.test)
    found = training.progress.evaluation
    if found is None:
        return math.nan, math.nan
    values = {m.name: m.value for m in found.metrics}
    loss, accuracy = (values.get(name) for name in ("loss", "accuracy"))
    return math.nan if loss is None else loss, math.nan if accuracy is None else accuracy


def _noisy(found: Evaluation | None) -> Evaluation | None:
    """What was released: nothing is evaluated again."""
    return found


def _evaluated(spec: RunSpec, x: Tensor) -> Evaluation | None:
    """All metrics of the model x on the test examples; None without any."""
    if not len(spec.data.test):
        return None
    found = answers(spec.task, x, spec.data)
    return evaluated(found, spec.metrics, spec.data.class_names)


def _own_model(training: Training, client: int) -> nn.Module:
    """A copy of the module with the parameters of a client's own model."""
    task = training.task
    module = copy.deepcopy(task.module)
    with torch.no_grad():
        for name, leaf in task.unflatten(training.model_of(client)).items():
            module.get_parameter(name).copy_(leaf)
    return module


def _load(task: Task, x: Tensor) -> None:
    with torch.no_grad():
        for name, leaf in task.unflatten(x).items():
            task.module.get_parameter(name).copy_(leaf)


def train(
    *given: Any,
    save: str | Path | None = None,
    watch: Watch | None = None,
    ledger: str | Path | None = None,
    log: Sequence[Logger] = (),
    log_diagnostics: bool = False,
    **settings: Any,
) -> Result:
    """Train from start to end without printing; `given` and `settings` are those of `prepare`."""
    check_loggers(log)
    settings["ledger"] = None if ledger is None else Path(ledger)
    started = start(prepare(*given, **settings), None if save is None else Path(save))
    with logged(log, watch, started, log_diagnostics) as watching:
        return finish(started, watching)
