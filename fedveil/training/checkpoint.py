"""Write a training to its directory, and load it from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from fedveil.runs.directory import RunDirectory
from fedveil.runs.opened import Interface
from fedveil.runs.participants import refuse_broken
from fedveil.runs.saved import CHECKPOINT, METRICS, SUMMARY, SavedRun, reading
from fedveil.training.evaluation import evaluation
from fedveil.training.records import Record
from fedveil.training.result import Result
from fedveil.training.run import Training
from fedveil.training.scoring import Evaluation, MeasuredMetric
from fedveil.training.spec import RunSpec

NOWHERE = (None, None)  # of an interval that a record does not have


def write_start(training: Training) -> None:
    """Write the position in the ledger, and the state of a new run, before reserving a round."""
    directory = training.directory
    if directory is not None and training.state.round == 0:
        directory.save_engine(training.engine.name, training.engine_reason)
        _save_encoder(training)  # a resumed run must not draw its statistics again
        checkpoint(training)
    elif directory is not None and training.session is not None and not training.finished:
        directory.save_trace(training.session.trace())


def write_round(training: Training, record: Record) -> None:
    """Write a checkpoint after a round if one is due, or client rows if memory has too many."""
    if training.directory is None:
        return
    if _due(training, record):
        checkpoint(training)
    elif training.participants.crowded:
        training.participants.save(training.directory)


def _due(training: Training, record: Record) -> bool:
    """Whether a checkpoint is due after this round."""
    if training.spec.checkpoint_every:
        return record.round % training.spec.checkpoint_every == 0
    return training.evaluates(record.round)


def checkpoint(training: Training) -> None:
    """Write ledger position, metrics, clients and state; each may be ahead of the next."""
    directory = training.directory
    if directory is None:
        return
    training.team.lead("gather", training.state.x)
    training.team.gather(training.state.memory)
    if training.session is not None:
        directory.save_trace(training.session.trace())
    directory.save_metrics([asdict(record) for record in training.records])
    training.participants.save(directory)
    directory.save_checkpoint(training.state, training.spec.identity)


def write_result(training: Training, result: Result) -> None:
    """Write the last state, the model, the summary and the statement."""
    directory, data = training.directory, training.data
    if directory is None:
        return
    checkpoint(training)
    directory.save_model(result.model.state_dict(), Interface.of(data).to_json())
    _save_encoder(training)
    directory.save_summary(result.summary())
    directory.save_statement(result.statement.text())
    if training.spec.diagnostics:  # the evaluation has data of single clients
        own = training.model_of if training.recipe.memory.personal else None
        private = training.spec.evaluation is not None
        silos = training.model_of if training.recipe.by_record else None
        found = evaluation(training.task, training.state.model, data, own, private, silos)
        if found is not None:
            directory.save_evaluation(found)


def _save_encoder(training: Training) -> None:
    if training.directory is not None and training.data.encoder is not None:
        training.directory.save_encoder(training.data.encoder)


def load(training: Training, directory: RunDirectory) -> None:
    """Load the state and the records of the last checkpoint."""
    refuse_broken(directory)
    saved = SavedRun(directory.path)
    if training.spec.engine == "auto" and (known := saved.engine) is not None:
        training.use_engine(*known)
    rows = saved.rows
    if rows or saved.has(CHECKPOINT):  # else the run was stopped before its first round
        training.state = saved.state(training.state, training.spec.identity)
    played = training.state.round
    with reading(saved.file(METRICS)):
        training.progress.records = [Record(**row) for row in rows[:played]]
        if [record.round for record in training.records] != list(range(1, played + 1)):
            raise ValueError(f"it does not contain rounds 1 to {played}")
    if training.spec.evaluation is not None:
        training.progress.evaluation = _released(training, saved)


def _released(training: Training, saved: SavedRun) -> Evaluation | None:
    """The last noisy evaluation, which is not drawn again: in full if the run has ended."""
    known = saved.summary.get("evaluation") if training.finished and saved.ended else None
    if known is None:
        return of_records(training.spec, training.records)
    with reading(saved.file(SUMMARY)):
        return Evaluation.from_plain(known)


def of_records(spec: RunSpec, records: Sequence[Record]) -> Evaluation | None:
    """What the last evaluated round shows of its noisy evaluation."""
    last = next((r for r in reversed(records) if r.loss is not None), None)
    if last is None or spec.evaluation is None:
        return None
    main = spec.metrics.main
    values = {"accuracy": last.accuracy, "loss": last.loss, main.name: last.metric}
    if main.name in ("accuracy", "loss"):
        values[main.name] = getattr(last, main.name)
    ends = {main.name: (last.metric_low, last.metric_high)}
    metrics = tuple(
        MeasuredMetric(m.name, value, *ends.get(m.name, NOWHERE), None, m.higher_is_better, m.share)
        for m in spec.metrics.every
        if (value := _finite(values.get(m.name))) is not None
    )
    target, unit = spec.task.loss_of_examples.target, spec.data.unit
    return Evaluation(main.name, target, 0, metrics, (), unit, spec.evaluation.epsilon)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
