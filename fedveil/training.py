"""train: settle the noise, play the rounds, evaluate, save; the work of `fedveil train`."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedveil import charging
from fedveil.charging import Entered, Trace
from fedveil.data.federated import Federated
from fedveil.engines.choose import choose
from fedveil.engines.isolation import made_up, refuse_memory
from fedveil.engines.loop import LoopEngine
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine
from fedveil.errors import UserError, unknown
from fedveil.evaluation import evaluation
from fedveil.interrupt import stop_after_interrupt
from fedveil.loop import Info, State, begin, play_round
from fedveil.models.catalog import build
from fedveil.models.check import refuse_unfit
from fedveil.models.side_effects import refusing_randomness
from fedveil.parts.bound import ProbedClip
from fedveil.privacy import accounting
from fedveil.privacy.accounting import check_delta
from fedveil.privacy.calibrate import Budget, sensible_delta, settled
from fedveil.privacy.secure import secured
from fedveil.privacy.session import BudgetError, Session
from fedveil.privacy.statement import Guarantee, Statement, statement
from fedveil.probe import probed
from fedveil.recipe import Recipe, View
from fedveil.records import Record
from fedveil.result import Result
from fedveil.resuming import at_work, checked_every, checkpoint, due, restore
from fedveil.runs.codec import identified, to_plain
from fedveil.runs.directory import RunDirectory, refuse_taken
from fedveil.runs.opened import Interface
from fedveil.runs.participants import Participants
from fedveil.streams import Key, SecretKey, run_key, torch_generator

__all__ = ["Record", "Result", "Training", "checkpoint", "finish", "prepare", "restore", "train"]

EVALUATIONS = 20  # how often at most a run looks at its test accuracy, unless told otherwise


@dataclass
class Training:
    """A run in progress: what is fixed, the state, and the records so far."""

    recipe: Recipe  # with settled noise
    data: Federated
    task: Task
    engine: Engine
    rounds: int
    seed: int
    key: Key  # of the run's random streams
    identity: str  # of all that must stay as it is when the run goes on
    delta: float
    budget: Budget | None
    state: State
    evaluate_every: int
    fingerprint: str  # of the data
    engine_reason: str = ""  # why this engine
    engine_asked: str = "auto"  # what the user asked for; the choice itself is private
    records: list[Record] = field(default_factory=list)
    team: Team = ALONE  # the processes that work on it
    checkpoint_every: int = 0  # rounds; 0 for whenever the run is evaluated
    session: Session | None = None  # with the ledger
    entered: Entered | None = None  # when the ledger was asked
    diagnostics: bool = False  # whether what is seen of clients is recorded
    participants: Participants = field(default_factory=Participants)
    _planned: dict[int, float] = field(default_factory=dict)  # ε, by how many rounds were lost

    def enrol(
        self, ledger: Path | None = None, saved: bool = False, trace: Trace | None = None
    ) -> None:
        """Ask the ledger whether the run is to be recorded, and whether it may go on."""
        entered = Entered.of(self, ledger, trace)
        self.session = charging.enrol(self, ledger, saved, trace)
        self.entered = entered

    @property
    def enrolled(self) -> bool:
        """Whether the ledger was asked."""
        return self.entered is not None

    def step(self) -> Record:
        """Reserve a round in the ledger, play it, publish it, and commit it."""
        if not self.enrolled:
            self.enrol()
        started = time.perf_counter()
        charging.reserve(self)
        self.team.lead("play", self.state.x)
        state, info = self._play()
        released = charging.check(self, state)
        self.state = state  # published: from here on it can be seen
        record = self._record(info, time.perf_counter() - started)
        self.records.append(record)
        self.participants.add(record.round, info.seen)
        charging.commit(self, info.round, released)
        return record

    def _play(self) -> tuple[State, Info]:
        """This process's part of one round."""
        with refusing_randomness(self.task.module):
            played = play_round(
                self.recipe, self.state, self.data, self.engine, self.key, self.team,
                self.diagnostics,
            )  # fmt: skip
        self.task.refuse_side_effects()
        return played

    def use_engine(self, name: str, reason: str) -> None:
        """Compute with the engine that a resumed run had: engines differ in the last bits."""
        if name != self.engine.name:
            expected = self.recipe.cohort.expected(self.data.clients)
            self.engine = choose(name, self.task, self.data, self.recipe.local, expected).engine
        self.engine_reason = reason

    @property
    def finished(self) -> bool:
        """Whether all rounds are played."""
        return self.state.round >= self.rounds

    def guarantee(self, view: View | None = None) -> Guarantee:
        """What the run guarantees towards one with this view (the recipe's own if none).

        For all rounds that were planned: it holds whenever the run is stopped.
        """
        return self.statement().towards(view or self.recipe.view)

    def statement(self) -> Statement:
        """What the run guarantees towards each view, whenever it is stopped."""
        charge = charging.charged(self)
        begun = self.enrolled or self.state.round
        made = statement(
            charge.recipe,
            self.task.dim,
            self.data.clients,
            charge.rounds,
            self.delta,
            isinstance(self.key, SecretKey),
            self.diagnostics,
            self.data.origin,
            charge.course if begun else None,
            charging.recorded(self),
        )
        return made.limited(self.budget.epsilon) if charge.course.limited and self.budget else made

    def running_epsilon(self) -> float:
        """ε of the rounds so far: valid only if it was fixed in advance to stop here."""
        charge = charging.charged(self)
        spent = charge.recipe.spent(self.task.dim, self.data.clients, charge.drawn)
        return accounting.epsilon(spent, self.delta)

    def _record(self, info: Info, seconds: float) -> Record:
        done = info.round + 1
        record = Record(
            done, info.participants, info.rejected, info.norm, info.shrunk,
            info.signal, info.noise, seconds, info.sent, info.threshold, info.void,
            **self._diagnosed(info),
        )  # fmt: skip
        if done % self.evaluate_every and done != self.rounds:
            return record
        loss, accuracy = self.task.evaluate(self.state.model, self.data.test)
        record = replace(record, loss=loss, accuracy=accuracy)
        if not self.recipe.private:
            return record
        return replace(
            record, epsilon=self.running_epsilon(), epsilon_planned=self._planned_epsilon()
        )

    def _planned_epsilon(self) -> float:
        """Of the guarantee; computed again only where more rounds were lost."""
        lost = 0 if self.session is None else self.session.redrawn
        if lost not in self._planned:
            self._planned[lost] = self.guarantee().epsilon
        return self._planned[lost]

    def _diagnosed(self, info: Info) -> dict[str, float | None]:
        """What was seen of the clients, and where the model is, if the optimum is known."""
        if not self.diagnostics:
            return {}
        x, optimum = self.state.x, self.data.optimum
        found = {} if info.seen is None else info.seen.summary()
        if optimum is not None and optimum.x.shape == x.shape:
            found["heterogeneity"] = float(optimum.gaps.mean())
            found["distance"] = float((x.double() - optimum.x).norm())
        if len(x) == 2:
            found["position_0"], found["position_1"] = x.tolist()
        return found


def prepare(
    recipe: Recipe,
    data: Federated,
    model: str | nn.Module = "softmax",
    rounds: int = 100,
    epsilon: float | None = None,
    delta: float | None = None,
    seed: int = 0,
    engine: str = "auto",
    evaluate_every: int | None = None,
    start: Tensor | None = None,
    noise: Literal["seeded", "secure"] = "seeded",
    per_round: bool = False,
    team: Team = ALONE,
    diagnostics: bool | None = None,
    ledger: Path | None = None,
) -> Training:
    """Check everything, calibrate the noise to (ε, δ) if one is given, and stand at round 0.

    With per_round the budget is that of a single round; what all of them cost is reported.
    Diagnostics are recorded unless noise is secure; they are private data (docs/diagnosis.md). In
    the ledger is looked up whether the data may be looked at without noise, where a recipe does.
    """
    _check_arguments(recipe, data, rounds, evaluate_every)
    if noise not in ("seeded", "secure"):
        raise unknown("noise", noise, ("seeded", "secure"))
    if recipe.unit == "example" and data.unit == "client":
        data = data.by_example()
    recipe.cohort.expected(data.clients)  # refuses a cohort larger than the population
    if isinstance(model, str):
        module = build(model, data, torch_generator(seed, "model"))
    else:
        module = copy.deepcopy(model)  # the caller's stays at its start, so a second run is equal
    refuse_unfit(module)
    task = Task(module, data.loss)
    _check_fit(task, data)
    delta = sensible_delta(data.clients) if delta is None else delta
    check_delta(delta)
    budget = None if epsilon is None else Budget(epsilon, delta)
    x = task.flatten() if start is None else start.clone()
    refuse_memory(task, LoopEngine(task), data)
    choice = choose(engine, task, data, recipe.local, recipe.cohort.expected(data.clients))
    working = choice.engine
    refuse_memory(task, working, data)
    if isinstance(recipe.bound, ProbedClip) and not recipe.bound.probed:
        charging.refuse_on_budget(data, "a look at its norms without noise", ledger)
        recipe = probed(recipe, x, data, working, rounds, seed, team)
    if noise == "secure":
        recipe = secured(recipe)
    recipe = settled(recipe, budget, 1 if per_round else rounds, task.dim, data.clients)
    model_facts = task.fingerprint(x, data.inputs[0])
    fingerprint = data.fingerprint()
    identity = run_key(seed, identified(recipe), rounds, model_facts, fingerprint, noise, delta)
    team.require_same(identity)
    key = SecretKey.agreed(team.secret) if noise == "secure" else identity
    return Training(
        recipe=recipe,
        data=data,
        task=task,
        engine=working,
        engine_reason=choice.reason,
        engine_asked=engine,
        rounds=rounds,
        seed=seed,
        key=key,
        identity=identity,
        delta=delta,
        budget=None if per_round else budget,
        state=begin(recipe, x, data, rounds, key),
        evaluate_every=evaluate_every or math.ceil(rounds / EVALUATIONS),
        team=team,
        fingerprint=fingerprint,
        diagnostics=noise != "secure" if diagnostics is None else diagnostics,
    )


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
) -> Result:
    """Train under (ε, δ), or with the recipe's own noise, whose ε is then reported.

    noise='secure' draws from the operating system's randomness, in whole numbers. Ctrl-C ends the
    run after the current round, with the work so far in the result and on disk. A private run that
    is saved is recorded in the ledger, and a budget set for the data is kept by every run.
    """
    books = None if ledger is None else Path(ledger)
    training = prepare(
        recipe, data, model, rounds, epsilon, delta, seed, engine, evaluate_every,
        noise=noise, per_round=per_round, diagnostics=diagnostics, ledger=books,
    )  # fmt: skip
    training.checkpoint_every = checked_every(checkpoint_every)
    place = None if save is None else refuse_taken(Path(save))
    training.enrol(books, saved=place is not None)
    directory = None if place is None else RunDirectory.create(place)
    if directory is not None:
        directory.save_settings(_settings(training, model))
    return finish(training, directory, watch)


def finish(
    training: Training,
    directory: RunDirectory | None = None,
    watch: Callable[[Training, Record], None] | None = None,
) -> Result:
    """Play the rounds that are left; save every so often and at the end.

    Where a budget ends the run, what was played is saved before the refusal is raised.
    """
    refusal: BudgetError | None = None
    with at_work(training, directory), stop_after_interrupt() as stopped:
        while not (training.finished or stopped() or training.team.wished or refusal):
            try:
                record = training.step()
            except BudgetError as problem:
                refusal = problem
                continue
            if watch is not None:
                watch(training, record)
            if directory is not None and due(training, record):
                checkpoint(training, directory)
            elif directory is not None and training.participants.crowded:
                training.participants.save(directory)
        result = conclude(training, directory)
        if training.session is not None:
            said = result.guarantee
            limited = said.course is not None and said.course.limited
            training.session.end(said.view, said.rounds, said.epsilon, limited)
        if directory is not None:
            checkpoint(training, directory)
            interface = Interface.of(training.data)
            directory.save_model(result.model.state_dict(), interface.to_json())
            if training.data.encoder is not None:
                directory.save_encoder(training.data.encoder)
            directory.save_summary(result.summary())
            directory.save_statement(result.statement.text())
            if training.diagnostics:  # it tells of single clients
                _evaluate(training, directory)
    training.team.lead("end", training.state.x)
    if refusal is not None:
        refusal.result = result
        raise refusal
    return result


def _evaluate(training: Training, directory: RunDirectory) -> None:
    found = evaluation(training.task, training.state.model, training.data)
    if found is not None:
        directory.save_evaluation(found)


def follow(training: Training) -> None:
    """What a process other than the first does: its part of each round, until it is told to end."""
    team = training.team
    with stop_after_interrupt() as stopped:
        while (order := team.follow(stopped(), training.state.x)) != "end":
            if order == "play":
                training.state, _ = training._play()
            else:
                team.gather(training.state.memory)


def conclude(training: Training, directory: RunDirectory | None = None) -> Result:
    """The model handed out, evaluated, with what it cost."""
    x = training.state.model
    loss, accuracy = training.task.evaluate(x, training.data.test)
    _load(training.task, x)
    return Result(
        recipe=training.recipe,
        model=training.task.module,
        data=training.data.name,
        accuracy=accuracy,
        loss=loss,
        statement=training.statement(),
        records=tuple(training.records),
        rounds=training.rounds,
        seed=training.seed,
        engine=training.engine.name,
        engine_reason=training.engine_reason,
        path=None if directory is None else directory.path,
        fingerprint=training.fingerprint,
        class_names=training.data.class_names,
    )


def _check_arguments(
    recipe: Recipe, data: Federated, rounds: int, evaluate_every: int | None
) -> None:
    if type(recipe) is not Recipe:  # a subclass could account for other than it does
        raise UserError(f"recipe is {recipe!r}; give a Recipe, such as algorithms.fedavg().")
    if not isinstance(data, Federated):
        raise UserError(
            f"data is a {type(data).__name__}, not split over clients yet; give a Federated, such "
            "as load('digits').split(Iid(100))."
        )
    if recipe.unit == "client":
        data.refuse_by_example(recipe.name)
    if not isinstance(rounds, int) or rounds < 1:
        raise UserError(f"rounds is {rounds}; at least one round is needed to train.")
    if evaluate_every is not None and evaluate_every < 1:
        raise UserError(f"evaluate_every is {evaluate_every}; it must be at least 1 round.")


def _check_fit(task: Task, data: Federated) -> None:
    """Try the model on made-up examples, so that a misfit is a sentence before the first round."""
    few = made_up(data, 2)
    try:
        task.evaluate(task.flatten(), few)
    except Exception as problem:  # a user's own module may raise anything
        why = str(problem).partition("\n")[0].rstrip(".")
        raise UserError(
            f"The model {type(task.module).__name__} does not fit '{data.name}', whose inputs have "
            f"shape {list(data.inputs.shape[1:])} and {data.classes} classes: {why}."
        ) from problem


def _settings(training: Training, model: str | nn.Module) -> dict[str, Any]:
    """recipe.toml of a run started from Python: all but the data, which it cannot name."""
    from fedveil import __version__

    secure = isinstance(training.key, SecretKey)
    return {
        "fedveil": __version__,
        "rounds": training.rounds,
        "seed": training.seed,
        "delta": training.delta,
        "engine": training.engine_asked,
        "evaluate_every": training.evaluate_every,
        "noise": "secure" if secure else "seeded",
        **({"diagnostics": training.diagnostics} if training.diagnostics == secure else {}),
        **({"checkpoint_every": training.checkpoint_every} if training.checkpoint_every else {}),
        **({"epsilon": training.budget.epsilon} if training.budget else {}),
        **({"model": model} if isinstance(model, str) else {}),
        "recipe": to_plain(training.recipe),
    }


def _load(task: Task, x: Tensor) -> None:
    with torch.no_grad():
        for name, leaf in task.unflatten(x).items():
            task.module.get_parameter(name).copy_(leaf)
