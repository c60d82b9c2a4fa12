"""RunState: everything that changes from round to round."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedveil.ledger.charging import Enrolment
from fedveil.loop import State
from fedveil.runs.participants import ParticipantRows
from fedveil.training.records import Record
from fedveil.training.scoring import Evaluation


@dataclass
class RunState:
    """The state of the loop, the records so far, and the enrolment in the ledger."""

    loop: State
    records: list[Record] = field(default_factory=list)
    participants: ParticipantRows = field(default_factory=ParticipantRows)
    enrolment: Enrolment | None = None  # None before the run is enrolled
    evaluation: Evaluation | None = None  # the last one with noise
