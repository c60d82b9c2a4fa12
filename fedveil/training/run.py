"""Training: a run in progress. Each round is reserved in the ledger, trained and committed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from fedveil.accounting import accountant as accounting
from fedveil.data.federated import Federated
from fedveil.engines.choose import choose
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.errors import UserError
from fedveil.ledger import charging
from fedveil.ledger.charging import Charge, Enrolment
from fedveil.ledger.session import Session
from fedveil.ledger.tracing import Trace
from fedveil.loop import Info, State, bound_of, own_models, run_round
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.local import Local
from fedveil.privacy.answers import require_accounted
from fedveil.privacy.guarantee import Guarantee
from fedveil.privacy.statement import Statement, statement
from fedveil.random.streams import Key
from fedveil.recipe import Recipe, View
from fedveil.runs.directory import RunDirectory
from fedveil.runs.participants import ParticipantRows
from fedveil.training.private_evaluation import EvaluationPlan, can_map, evaluate_privately
from fedveil.training.records import Record
from fedveil.training.scoring import Evaluation, answers, scored
from fedveil.training.spec import RunSpec
from fedveil.training.state import RunState

Source = Callable[["Training"], tuple[State, Info]]  # computes a round


@dataclass
class Training:
    """A run in progress: its spec, its state, and the engine that computes it.

    `prepare` builds one at round 0. `start` and `resume` enter it in the ledger and on disk.
    """

    spec: RunSpec
    progress: RunState
    engine: Engine
    engine_reason: str = ""  # why this engine was chosen
    team: Team = ALONE  # the processes that compute it
    ledger: Path | None = None  # None: the user's default ledger
    source: Source | None = None  # None: clients are simulated
    directory: RunDirectory | None = None  # None: the run is not saved
    _planned: dict[int, float] = field(default_factory=dict)  # planned ε by number of lost rounds

    @property
    def recipe(self) -> Recipe:
        """The recipe, with calibrated noise."""
        return self.spec.recipe

    @property
    def data(self) -> Federated:
        """The training data."""
        return self.spec.data

    @property
    def task(self) -> Task:
        """The model and its loss."""
        return self.spec.task

    @property
    def rounds(self) -> int:
        """The number of planned rounds."""
        return self.spec.rounds

    @property
    def delta(self) -> float:
        """The δ of the guarantee."""
        return self.spec.delta

    @property
    def key(self) -> Key:
        """The key of the random streams."""
        return self.spec.key

    @property
    def state(self) -> State:
        """The state of the loop."""
        return self.progress.loop

    @state.setter
    def state(self, state: State) -> None:
        self.progress.loop = state

    @property
    def records(self) -> list[Record]:
        """One record for each round so far."""
        return self.progress.records

    @property
    def participants(self) -> ParticipantRows:
        """The participants of recent rounds that are not on disk yet."""
        return self.progress.participants

    @property
    def session(self) -> Session | None:
        """The session with the ledger; None for a run that is not recorded."""
        enrolment = self.progress.enrolment
        return None if enrolment is None else enrolment.session

    @property
    def finished(self) -> bool:
        """Whether all rounds are trained, or the run has stopped by its own rule."""
        return self.state.round >= self.rounds or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        """Whether the last `patience` evaluations brought no better result."""
        return self.state.round < self.rounds and self._stale(self.records)

    def _stale(self, records: Sequence[Record]) -> bool:
        main, patience = self.spec.metrics.main, self.spec.patience
        if patience is None:
            return False
        column = main.name if main.name in ("accuracy", "loss") else "metric"
        found = [getattr(record, column) for record in records]
        sign = 1 if main.higher_is_better else -1
        scores = [sign * v for v in found if v is not None and not math.isnan(v)]
        before, recent = scores[:-patience], scores[-patience:]
        return bool(before) and max(recent) <= max(before)

    def model_of(self, client: int) -> Tensor:
        """The client's own model, if clients keep any (`Memory.personal`), or the common one."""
        state, memory = self.state, self.recipe.memory
        if state.memory is None or not memory.personal:
            return state.model
        return own_models(self.recipe, state, state.memory[np.array([client])])[0]

    def enrol(
        self, ledger: Path | None = None, saved: bool = False, trace: Trace | None = None
    ) -> Enrolment:
        """Enrol the run in the ledger, if it must be recorded and may continue."""
        self.ledger = ledger or self.ledger
        enrolment = charging.enrol(self.spec, self.state, self.ledger, saved, trace)
        self.progress.enrolment = enrolment
        return enrolment

    def close(self) -> None:
        """Release the locks on the directory and on the data."""
        if self.directory is not None:
            self.directory.release()
        if self.session is not None:
            self.session.close()

    def step(self) -> Record:
        """Reserve a round in the ledger, train it, publish it, and commit it."""
        self._refuse_finished()
        enrolment = self.progress.enrolment or self.enrol()
        started, round = time.perf_counter(), self.state.round
        self._require_accounted()
        charging.reserve(enrolment, self.spec, round)
        self.team.lead("play", self.state.x)
        state, info = self.play()
        released = charging.check(enrolment, round, state)
        self.state = state  # published: from here on it is visible
        record = self._record(info, time.perf_counter() - started)
        self.records.append(record)
        self.participants.add(record.round, info.seen)
        charging.commit(enrolment, info.round, released)
        return record

    def _require_accounted(self) -> None:
        """Refuse a round whose bound, if it adapts, is not covered by what is accounted."""
        bound = bound_of(self.recipe, self.state)
        require_accounted(self.recipe, bound, *self.spec.size, self.spec.answers)

    def _refuse_finished(self) -> None:
        """Refuse rounds and evaluations that the plan, and so the guarantee, does not have."""
        if self.finished:
            raise UserError(
                f"The run has ended after {self.state.round} rounds, and its guarantee covers no "
                "more. Start a new run with more rounds, or with more patience."
            )

    def play(self) -> tuple[State, Info]:
        """Compute this process's part of one round."""
        return (self.source or simulated)(self)

    def use_engine(self, name: str, reason: str) -> None:
        """Use the engine of the resumed run, because engines differ in the last bits."""
        if name != self.engine.name:
            self.engine = choose(name, self.task, *local_work(self.recipe, self.data)).engine
        self.engine_reason = reason

    def charge(self) -> Charge:
        """The recipe and the rounds that the statement accounts for."""
        return charging.charged(self.spec, self.session, self.state.round)

    def guarantee(self, view: View | None = None) -> Guarantee:
        """The guarantee in this view. [default: the recipe's view]

        It covers all planned rounds, so it holds whenever the run is stopped.
        """
        return self.statement().towards(view or self.recipe.view)

    def statement(self) -> Statement:
        """The guarantee in each view, which holds whenever the run is stopped."""
        spec, charge, enrolment = self.spec, self.charge(), self.progress.enrolment
        begun = enrolment is not None or self.state.round
        made = statement(
            charge.recipe,
            *spec.size,
            charge.rounds,
            spec.delta,
            spec.secret,
            spec.diagnostics,
            spec.data.origin,
            charge.course if begun else None,
            charging.recorded(enrolment),
            spec.setting,
            spec.task.trained,
        )
        return made.limited(spec.budget.epsilon) if charge.course.limited and spec.budget else made

    def running_epsilon(self) -> float:
        """The ε of the rounds so far, valid only if the stopping round was fixed in advance."""
        charge = self.charge()
        spent = charge.recipe.spent(*self.spec.size, charge.drawn)
        return accounting.epsilon(spent, self.delta)

    def _record(self, info: Info, seconds: float) -> Record:
        done = info.round + 1
        record = Record(
            done, info.participants, info.rejected, info.norm, info.clipped_fraction,
            info.signal, info.noise, seconds, info.sent, info.threshold, info.aborted,
            **self._diagnosed(info),
        )  # fmt: skip
        if not self.evaluates(done):
            return record
        if self.spec.evaluation is not None:
            record = self._evaluated_privately(record, self.spec.evaluation)
        elif len(self.data.test):
            loss, accuracy = self.task.evaluate(self.state.model, self.data.test)
            record = replace(record, loss=loss, accuracy=accuracy, metric=self._metric())
        if not self.recipe.private:
            return record
        return replace(
            record, epsilon=self.running_epsilon(), epsilon_planned=self._planned_epsilon()
        )

    def _evaluated_privately(self, record: Record, plan: EvaluationPlan) -> Record:
        """Noisy results, if a crash has not used up their share: none is drawn a second time."""
        done, final = record.round, record.round == self.rounds
        if not self._unspent(plan, final):
            return record
        found = self.progress.evaluation = self._evaluation(plan, done, final)
        main = found.main
        other = None if main.name in ("accuracy", "loss") else main.value
        values = {m.name: math.nan if m.value is None else m.value for m in found.metrics}
        loss, accuracy = values["loss"], values.get("accuracy", math.nan)
        low, high = main.low, main.high
        record = replace(
            record, loss=loss, accuracy=accuracy, metric=other, metric_low=low, metric_high=high
        )
        if not final and self._stale([*self.records, record]) and self._unspent(plan, final=True):
            self.progress.evaluation = self._evaluation(plan, done, final=True)
        return record

    def _evaluation(self, plan: EvaluationPlan, done: int, final: bool) -> Evaluation:
        return evaluate_privately(
            plan, self.spec.metrics, self.task, self.state.model, self.data, self.key, done, final,
            self.engine.name != "loop" and can_map(self.task, self.data),
        )  # fmt: skip

    def _unspent(self, plan: EvaluationPlan, final: bool) -> bool:
        """Whether lost rounds left the share of this evaluation."""
        if self.session is None:
            return True

        def drawn(last: bool) -> int:
            return self.session.lost(  # type: ignore[union-attr]
                lambda r: self.evaluates(r + 1) and (r + 1 == self.rounds) == last
            )

        if final:  # with patience, any lost evaluation may have been followed by the final one
            return not (drawn(last=True) or (plan.patience and drawn(last=False)))
        known = sum(record.loss is not None for record in self.records)
        return drawn(last=False) + known + 1 < len(plan.rounds)

    def _metric(self) -> float | None:
        """The chosen metric on the test examples; None if accuracy and loss are enough."""
        main = self.spec.metrics.main
        if main.name in ("accuracy", "loss"):
            return None
        return scored(main, answers(self.task, self.state.model, self.data))

    def evaluates(self, done: int) -> bool:
        """Whether the model is evaluated after this many rounds."""
        return done in self.spec.evaluated

    def _planned_epsilon(self) -> float:
        """The ε of the guarantee, computed again only after more rounds were lost."""
        lost = 0 if self.session is None else self.session.redrawn
        if lost not in self._planned:
            self._planned[lost] = self.guarantee().epsilon
        return self._planned[lost]

    def _diagnosed(self, info: Info) -> dict[str, float | None]:
        """Diagnostics of the clients, and the distance to the optimum if it is known."""
        if not self.spec.diagnostics:
            return {}
        x, optimum = self.state.x, self.data.optimum
        found = {} if info.seen is None else info.seen.summary()
        if optimum is not None and optimum.x.shape == x.shape:
            found["heterogeneity"] = float(optimum.gaps.mean())
            found["distance"] = float((x.double() - optimum.x).norm())
            found["along"], found["across"] = optimum.projected(x)
        if len(x) == 2:
            found["position_0"], found["position_1"] = x.tolist()
        return found


def local_work(recipe: Recipe, data: Federated) -> tuple[Federated, Local, float]:
    """What an engine computes at a time: units, their local work, and how many there are."""
    if not recipe.by_record:
        return data, recipe.local, recipe.cohort.expected(data.clients)
    step, largest = recipe.inside(0), int(data.sizes.max())
    return data.by_example(), step.local, step.cohort.expected(largest)


def simulated(training: Training) -> tuple[State, Info]:
    """One round of the loop with simulated clients."""
    training.task.refuse_change()  # by an evaluation, which would carry test examples to clients
    with refusing_randomness(training.task.module):
        played = run_round(
            training.recipe, training.state, training.data, training.engine, training.key,
            training.team, training.spec.diagnostics,
        )  # fmt: skip
    training.task.refuse_side_effects()
    return played
