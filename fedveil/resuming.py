"""A run that may be stopped at any moment: what it writes down, and how it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import UserError
from fedveil.runs.directory import RunDirectory, reading
from fedveil.runs.participants import refuse_broken

if TYPE_CHECKING:
    from fedveil.training import Record, Training


@contextmanager
def at_work(training: Training, directory: RunDirectory | None) -> Iterator[None]:
    """Alone in the run's directory, which knows the ledger before the first round is reserved."""
    try:
        if directory is not None:
            directory.claim()
        if not training.enrolled:
            trace = None if directory is None else directory.load_trace()
            training.enrol(None, directory is not None, trace)
        if directory is not None and training.state.round == 0:
            directory.save_engine(training.engine.name, training.engine_reason)
            checkpoint(training, directory)
        elif directory is not None and training.session is not None and not training.finished:
            directory.save_trace(training.session.trace())
        yield
    finally:
        if directory is not None:
            directory.release()
        if training.session is not None:
            training.session.close()


def due(training: Training, record: Record) -> bool:
    """Whether a checkpoint is to be written after this round."""
    if training.checkpoint_every:
        return record.round % training.checkpoint_every == 0
    return record.loss is not None


def checkpoint(training: Training, directory: RunDirectory) -> None:
    """The ledger's position, metrics, clients, the state: each may be ahead of the next one."""
    training.team.lead("gather", training.state.x)
    training.team.gather(training.state.memory)
    if training.session is not None:
        directory.save_trace(training.session.trace())
    directory.save_metrics([asdict(record) for record in training.records])
    training.participants.save(directory)
    directory.save_checkpoint(training.state, training.identity)


def restore(training: Training, directory: RunDirectory, ledger: Path | None = None) -> Training:
    """Go on from a run's checkpoint; the streams depend on the round, so it is the same run."""
    if not training.team.first:
        _load(training, directory)
        return training
    directory.claim()
    try:
        _load(training, directory)
        training.enrol(ledger, True, directory.load_trace())
        if not training.finished:
            directory.forget_results()  # they would tell of fewer rounds than will be played
    except BaseException:
        directory.release()
        raise
    return training


def _load(training: Training, directory: RunDirectory) -> None:
    from fedveil.training import Record

    refuse_broken(directory)
    if training.engine_asked == "auto" and (known := directory.load_engine()) is not None:
        training.use_engine(*known)
    rows = directory.load_metrics()
    if rows or directory.has_checkpoint():  # else it was stopped before its first round
        training.state = directory.load_checkpoint(training.state, training.identity)
    with reading(directory.path / "metrics.parquet"):
        training.records = [Record(**row) for row in rows[: training.state.round]]
        if [record.round for record in training.records] != list(
            range(1, training.state.round + 1)
        ):
            raise ValueError(f"it does not have rounds 1 to {training.state.round}")


def checked_every(rounds: int | None) -> int:
    """How often to write a checkpoint; 0 for whenever the run is evaluated."""
    if rounds is not None and (not isinstance(rounds, int) or rounds < 1):
        raise UserError(f"checkpoint_every is {rounds}; it must be at least 1 round.")
    return rounds or 0
