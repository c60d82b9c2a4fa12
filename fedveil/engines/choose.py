"""Choose an engine for a model: by what it serves, by a model of its cost, and by a timed trial."""

from __future__ import annotations

import logging
import math
import time
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Examples, Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import Cost, FactoredEngine, NotServedError, cost
from fedveil.engines.isolation import mixing
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.errors import UserError, unknown
from fedveil.parts.local import SGD, Local
from fedveil.parts.schedule import Constant
from fedveil.threads import one_thread_each

STACKABLE = 5_000_000  # a model with more numbers leaves no room to stack clients
ENGINES = ("auto", "factored", "dense", "loop")
PACE = {"factored": 10e9, "dense": 4e9, "loop": 15e9}  # products a second, on a core of 2020
SETTING_OUT = {"factored": 3e-3, "dense": 4e-3, "loop": 2e-3}  # seconds of a step, for a group
CLOSE = 4.0  # times the best estimate: still worth a trial
# Times as quick as an engine before it in the list, to be taken instead. Engines differ in the last
# bits; nearer to 1, a busy machine would make two runs of one seed differ.
BETTER = 3.0
WORTH_TIMING = 0.1  # seconds of a round, below which no trial is made
REPEATS = 5  # of a trial, all engines in turn, of which the quickest counts
TRIAL_PRODUCTS = 1e9  # what one repeat of a trial may cost
log = logging.getLogger("fedveil")


@dataclass(frozen=True)
class Choice:
    """An engine, why it was taken, and how long a client took each engine that was tried."""

    engine: Engine
    reason: str
    seconds: dict[str, float]


def choose(
    name: str,
    task: Task,
    data: Federated,
    local: Local | None = None,
    participants: float = 256,
    timed: bool = False,
) -> Choice:
    """The engine of this name; `auto` takes the quickest of those that serve the model.

    The trial is made on inputs of zeros: how long they take tells nothing of anybody's data. Short
    rounds are not worth it, unless it is asked for.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    trial = _Trial.of(task, data, local or SGD(Constant(0.1), steps=2), participants)
    if name != "auto":
        engine = trial.engine(name)
        if name != "loop" and (problem := trial.problem(engine)):
            raise UserError(f"The engine '{name}' does not serve this model: {problem}.")
        return Choice(engine, "asked for", {})
    return trial.quickest(timed)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Clients that do not exist, with the shapes and the local work of those that do."""

    task: Task
    data: Federated
    local: Local
    cost: Cost | None
    unserved: str  # why the factored engine does not serve the model, if it does not
    participants: float
    width: int  # examples of a step

    @classmethod
    def of(cls, task: Task, data: Federated, local: Local, participants: float) -> _Trial:
        largest = data.sizes.max().reshape(1)
        plan = local.plan(largest, 0, np.random.default_rng(0))
        found, unserved = None, ""
        try:
            found = cost(task, torch.zeros_like(data.inputs[:1]))
        except (NotServedError, RuntimeError) as problem:
            unserved = str(problem).partition("\n")[0]
        return cls(task, data, local, found, unserved, participants, plan.index.shape[2])

    def engine(self, name: str) -> Engine:
        """The engine of this name, with groups of a sensible size."""
        if name == "factored":
            known = self.cost or Cost(1, 1, 0)
            return FactoredEngine.sized(self.task, known, self.width)
        return DenseEngine.sized(self.task) if name == "dense" else LoopEngine(self.task)

    def problem(self, engine: Engine) -> str:
        """What goes wrong when a few made-up clients take two steps, or nothing."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns where it would stack one by one
                return mixing(self.task, engine, self.data)
        except (RuntimeError, UserWarning, NotServedError) as problem:
            return str(problem).partition("\n")[0]

    def group(self, clients: int, size: int) -> Group:
        """So many clients with so many examples of zeros each."""
        count = clients * size
        inputs = torch.zeros(count, *self.data.inputs.shape[1:], dtype=self.data.inputs.dtype)
        labels = torch.zeros(count, *self.data.labels.shape[1:], dtype=self.data.labels.dtype)
        stand_in = Federated(
            "zeros", inputs, labels, torch.arange(clients + 1) * size,
            Examples(inputs[:1], labels[:1]), self.data.classes, self.data.loss,
        )  # fmt: skip
        plan = self.local.plan(stand_in.sizes, 0, np.random.default_rng(0))
        if not plan.repeated:  # steps are alike but for the first; others gain by coming back
            plan = replace(plan, index=plan.index[:, :2], rates=plan.rates[:, :2])
        return Group(stand_in, np.arange(clients), plan)

    def estimate(self, engine: Engine) -> float:
        """Seconds of a client's step: arithmetic, and its share of what a group's step takes."""
        together = 1.0 if engine.name == "loop" else min(engine.group_size, self.participants)
        return self.products / PACE[engine.name] + SETTING_OUT[engine.name] / max(1.0, together)

    def round_of(self, engine: Engine) -> float:
        """Seconds of a round, by the same estimate."""
        steps = self.local.plan(self.data.sizes.max().reshape(1), 0, np.random.default_rng(0)).steps
        return self.estimate(engine) * steps * self.participants

    @property
    def products(self) -> float:
        """Of a client's step; forward, and twice as much backward."""
        each = self.cost.products if self.cost else 2 * self.task.dim
        return 3.0 * each * self.width

    def crowd(self, engine: Engine) -> Group:
        """A group of this engine, or as much of it as is quick."""
        steps = len(self.group(1, 1).plan.rates[0])
        affordable = TRIAL_PRODUCTS / max(1.0, steps * self.products)
        clients = max(1, int(min(engine.group_size, self.participants, affordable)))
        return self.group(clients, int(self.data.sizes.max()))

    def timed(self, engines: list[Engine]) -> dict[str, float]:
        """Seconds of a client's step with each engine."""
        x, groups = self.task.flatten(), [self.crowd(engine) for engine in engines]
        best = dict.fromkeys((engine.name for engine in engines), math.inf)
        with one_thread_each():  # as in a round, where each core has a group of its own
            for _ in range(REPEATS):
                for engine, group in zip(engines, groups, strict=True):
                    each = _seconds(engine, x, group) / (group.plan.steps * len(group.clients))
                    best[engine.name] = min(best[engine.name], each)
        return best

    def quickest(self, timed: bool) -> Choice:
        """By estimate, then by trial; an earlier engine of the list needs no proof of its own."""
        serving = list(self._serving())
        best = min(self.estimate(engine) for engine in serving)
        close = [engine for engine in serving if self.estimate(engine) <= CLOSE * best]
        if len(close) == 1:
            return Choice(close[0], "alone serves this model at a sensible cost", {})
        if not timed and self.round_of(close[0]) < WORTH_TIMING:
            return Choice(close[0], "rounds are too short for the engine to matter", {})
        seconds = self.timed(close)
        taken = close[0]
        for engine in close[1:]:
            if seconds[taken.name] > BETTER * seconds[engine.name]:
                taken = engine
        told = ", ".join(f"{name} {1e3 * one:.3g} ms" for name, one in seconds.items())
        return Choice(taken, f"quickest in a trial: a client's step took {told}", seconds)

    def _serving(self) -> list[Engine]:
        """Engines that run this model, and one log line for each that does not."""
        found: list[Engine] = []
        for name in ENGINES[1:]:
            engine = self.engine(name)
            problem = self._refusal(engine)
            if problem:
                log.info("not engine %s, since %s", name, problem)
            else:
                found.append(engine)
        return found

    def _refusal(self, engine: Engine) -> str:
        if engine.name == "loop":
            return ""
        if self.task.dim > STACKABLE:
            return f"{self.task.dim:,} numbers are too many to hold for several clients at once"
        if engine.name == "factored" and self.unserved:
            return self.unserved
        return self.problem(engine)


def _seconds(engine: Engine, x: Tensor, group: Group) -> float:
    started = time.perf_counter()
    engine.updates(x, group).norms()
    return time.perf_counter() - started
