"""Chooses an engine for a model: by support, by a cost model, and by a timed trial."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Examples, Federated
from fedveil.engines.dense import DenseEngine
from fedveil.engines.devices import PlacedEngine, room
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.interception import ForwardCost, cost
from fedveil.engines.isolation import made_up, mixing
from fedveil.engines.loop import LoopEngine
from fedveil.engines.task import Task
from fedveil.engines.updates import Engine, Group
from fedveil.engines.where import explained
from fedveil.errors import UserError, unknown
from fedveil.parts.local import SGD, Local
from fedveil.parts.schedule import Constant
from fedveil.threads import one_thread_each

STACKABLE = 5_000_000  # parameters; larger models leave no memory to stack clients
ENGINES = ("auto", "factored", "dense", "loop")
PACE = {"factored": 10e9, "dense": 4e9, "loop": 15e9}  # products per second on a 2020 core
SETTING_OUT = {"factored": 3e-3, "dense": 4e-3, "loop": 2e-3}  # overhead of a group's step, seconds
CLOSE = 4.0  # estimates within this factor of the best are timed
# An engine replaces an earlier one in the list only if it is this many times as fast. Engines
# differ in the last bits: with a smaller factor, a busy machine would make two runs of one seed
# differ.
BETTER = 3.0
WORTH_TIMING = 0.1  # shorter rounds, in seconds, are not timed
REPEATS = 5  # of a trial, alternating between engines; the fastest counts
TRIAL_PRODUCTS = 1e9  # upper limit for one repeat of a trial
TRIAL_SHARE = 0.02  # of the predicted run, for all repeats of a trial
LEAST_TRIAL = 0.5  # seconds that a trial may take in any case
log = logging.getLogger("fedveil")


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, the reason, and the seconds per client of each engine tried."""

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
    rounds: int = 100,
) -> EngineChoice:
    """The engine of this name; `auto` selects the fastest that supports the model.

    The trial uses inputs of zeros, so its timing reveals nothing about anyone's data. Short rounds
    are not timed unless `timed` is set. A trial takes a small part of the predicted time of all
    rounds.
    """
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    trial = _Trial.of(task, data, local or SGD(Constant(0.1), steps=2), participants, rounds)
    if name != "auto":
        engine = trial.engine(name)
        if name != "loop" and (problem := trial.problem(engine)):
            raise UserError(
                f"The engine '{name}' does not support this model: {problem}. Engine 'auto' uses "
                "one that does."
            )
        return EngineChoice(engine, "requested", {})
    return trial.quickest(timed)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Synthetic clients with the shapes and the local work of the real ones."""

    task: Task
    data: Federated
    local: Local
    cost: ForwardCost | None
    unserved: str  # why the factored engine does not support the model; empty if it does
    participants: float
    width: int  # examples per step
    rounds: int = 100

    @classmethod
    def of(
        cls, task: Task, data: Federated, local: Local, participants: float, rounds: int
    ) -> _Trial:
        largest = data.sizes.max().reshape(1)
        plan = local.plan(largest, 0, np.random.default_rng(0))
        found, unserved = None, ""
        try:
            with _refusing_fallbacks():
                found = cost(task, made_up(data, 1).inputs[:].to(task.device))
        except Exception as problem:  # a user's own module may raise anything
            unserved = explained(problem)
        return cls(task, data, local, found, unserved, participants, plan.index.shape[2], rounds)

    def engine(self, name: str) -> Engine:
        """The engine of this name, with a suitable group size, on the device of the model."""
        device = self.task.device
        space = room(device)
        least = 1 + int(SETTING_OUT[name] * PACE[name] / max(1.0, self.products))
        engine: Engine = LoopEngine(self.task)
        if name == "factored":
            known = self.cost or ForwardCost(1, 1, 0)
            sized = FactoredEngine.sized(self.task, known, self.width, space)
            engine = replace(sized, least_group=least)
        elif name == "dense":
            engine = replace(DenseEngine.sized(self.task, space), least_group=least)
        return PlacedEngine.on(engine, device)

    def problem(self, engine: Engine) -> str:
        """The error when a few synthetic clients take two steps; empty if there is none."""
        try:
            with _refusing_fallbacks():
                return mixing(self.task, engine, self.data)
        except Exception as problem:  # a user's own module may raise anything
            return explained(problem)

    def group(self, clients: int, size: int) -> Group:
        """A group of clients with `size` examples of zeros each."""
        count = clients * size
        inputs = torch.zeros(count, *self.data.inputs.shape[1:], dtype=self.data.inputs.dtype)
        labels = torch.zeros(count, *self.data.labels.shape[1:], dtype=self.data.labels.dtype)
        stand_in = Federated(
            "zeros", inputs, labels, torch.arange(clients + 1) * size,
            Examples(inputs[:1], labels[:1]), self.data.classes, self.data.loss,
        )  # fmt: skip
        plan = self.local.plan(stand_in.sizes, 0, np.random.default_rng(0))
        if not plan.repeated:  # only the first step differs; repeated batches gain from later steps
            plan = replace(plan, index=plan.index[:, :2], rates=plan.rates[:, :2])
        return Group(stand_in, np.arange(clients), plan)

    def estimate(self, engine: Engine) -> float:
        """Seconds per client and step: arithmetic, plus a share of the group's overhead."""
        together = 1.0 if engine.name == "loop" else min(engine.group_size, self.participants)
        return self.products / PACE[engine.name] + SETTING_OUT[engine.name] / max(1.0, together)

    def round_of(self, engine: Engine) -> float:
        """Seconds per round, by the same estimate."""
        steps = self.local.plan(self.data.sizes.max().reshape(1), 0, np.random.default_rng(0)).steps
        return self.estimate(engine) * steps * self.participants

    @property
    def products(self) -> float:
        """Products per client and step: forward, and twice as many backward."""
        each = self.cost.products if self.cost else 2 * self.task.dim
        return 3.0 * each * self.width

    def crowd(self, engine: Engine) -> Group:
        """A group for this engine, reduced where a full one would be slow."""
        steps = len(self.group(1, 1).plan.rates[0])
        limit = min(TRIAL_PRODUCTS, self.allowed(engine) * PACE[engine.name] / REPEATS)
        clients = max(1, int(limit / max(1.0, steps * self.products)))
        clients = int(min(clients, engine.group_size, max(1.0, self.participants)))
        return self.group(clients, int(self.data.sizes.double().median()))

    def allowed(self, engine: Engine) -> float:
        """Seconds that a trial may take: a small part of the predicted run."""
        return max(LEAST_TRIAL, TRIAL_SHARE * self.rounds * self.round_of(engine))

    def timed(self, engines: list[Engine]) -> dict[str, float]:
        """Seconds per client and step for each engine."""
        x, groups = self.task.flatten(), [self.crowd(engine) for engine in engines]
        best = dict.fromkeys((engine.name for engine in engines), math.inf)
        allowed, started = self.allowed(engines[0]), time.perf_counter()
        log.info("timing engines %s for at most %.1f s", ", ".join(best), allowed)
        with one_thread_each():  # as in a round, where each core has its own group
            for repeat in range(REPEATS):
                if repeat and time.perf_counter() - started > allowed:
                    break
                for engine, group in zip(engines, groups, strict=True):
                    seconds = _seconds(engine, x, group, self.task.device)
                    each = seconds / (group.plan.steps * len(group.clients))
                    best[engine.name] = min(best[engine.name], each)
        return best

    def quickest(self, timed: bool) -> EngineChoice:
        """The fastest engine by estimate, then by trial; earlier engines are preferred.

        Where rounds are short, an engine that no other can beat by much is taken without checking
        the others.
        """
        rest = self._serving()
        first = next(rest)
        least = min(self.estimate(self.engine(name)) for name in ENGINES[1:])
        short = not timed and self.round_of(first) < WORTH_TIMING
        if short and self.estimate(first) <= CLOSE * least:
            return EngineChoice(first, "rounds are too short for the engine to matter", {})
        serving = [first, *rest]
        best = min(self.estimate(engine) for engine in serving)
        close = [engine for engine in serving if self.estimate(engine) <= CLOSE * best]
        if len(close) == 1:
            return EngineChoice(
                close[0], "the only engine that supports this model at reasonable cost", {}
            )
        if not timed and self.round_of(close[0]) < WORTH_TIMING:
            return EngineChoice(close[0], "rounds are too short for the engine to matter", {})
        seconds = self.timed(close)
        taken = close[0]
        for engine in close[1:]:
            if seconds[taken.name] > BETTER * seconds[engine.name]:
                taken = engine
        told = ", ".join(f"{name} {1e3 * one:.3g} ms" for name, one in seconds.items())
        return EngineChoice(taken, f"fastest in a trial: a client's step took {told}", seconds)

    def _serving(self) -> Iterator[Engine]:
        """Engines that support this model; logs one line for each that does not."""
        for name in ENGINES[1:]:
            engine = self.engine(name)
            problem = self._refusal(engine)
            if problem:
                log.info("engine %s not used: %s", name, problem)
            else:
                yield engine

    def _refusal(self, engine: Engine) -> str:
        if engine.name == "loop":
            return ""
        if self.task.dim > STACKABLE:
            return f"{self.task.dim:,} parameters are too many to stack for several clients"
        if engine.name == "factored" and self.unserved:
            return self.unserved
        return self.problem(engine)


@contextmanager
def _refusing_fallbacks() -> Iterator[None]:
    """Raise where torch warns that vmap would fall back to a loop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


def _seconds(engine: Engine, x: Tensor, group: Group, device: torch.device) -> float:
    """The time of one group; on a CPU without the time in which other processes have the core."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    started = clock()
    engine.updates(x, group).norms()
    return clock() - started
