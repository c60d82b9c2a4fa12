"""The loop: State, Info, one round. Every algorithm of this project is this one function.

cohort → local → report → memory → bound → quantize → noise → server
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.parts.bound import Bound
from fedveil.parts.memory import ClientMemory
from fedveil.parts.server import Tensors
from fedveil.recipe import Recipe
from fedveil.streams import stream


@dataclass
class State:
    """All that one round hands to the next."""

    round: int
    x: Tensor  # the model, one float32 vector
    server: Tensors
    output: Tensors
    direction: Tensor | None = None  # v̂, the server's side of the memory
    memory: ClientMemory | None = None  # v_i, the clients' side

    @property
    def model(self) -> Tensor:
        """The model that would be handed out now."""
        return self.output["model"]


@dataclass(frozen=True)
class Info:
    """What one round was like. In a deployment these are private data (docs/privacy.md)."""

    round: int
    participants: int
    rejected: int
    norms: Tensor  # ‖w_i‖ of the participants before the bound, rejected ones left out
    scales: Tensor  # s(‖w_i‖) of the same
    signal: float  # ‖Σ messages‖ / denominator
    noise: float  # ‖noise‖ / denominator

    @property
    def shrunk(self) -> float:
        """The fraction of updates that the bound made smaller."""
        return float((self.scales < 1).double().mean()) if len(self.scales) else 0.0

    @property
    def norm(self) -> float:
        """The mean norm before the bound."""
        return float(self.norms.mean()) if len(self.norms) else 0.0


def begin(recipe: Recipe, x: Tensor, data: Federated, rounds: int, key: int | str) -> State:
    """The state before the first round."""
    kept = recipe.memory.kept
    return State(
        round=0,
        x=x,
        server=recipe.server.start(x),
        output=recipe.output.start(x, rounds, stream(key, 0, "output")),
        direction=torch.zeros_like(x) if kept else None,
        memory=ClientMemory(data.clients, len(x)) if kept else None,
    )


def play_round(
    recipe: Recipe, state: State, data: Federated, engine: Engine, key: int | str
) -> tuple[State, Info]:
    """x_{k+1} = server(x_k, (Σ q_i + noise) / public denominator).

    Randomness comes from streams keyed by (key, round, purpose) and is consumed in client order,
    so the result depends neither on grouping nor on the engine.
    """
    k, x = state.round, state.x
    cohort = recipe.cohort.draw(data.clients, stream(key, k, "cohort"))
    total = _sum_of_messages(recipe, state, data, engine, cohort, key)
    denominator = recipe.cohort.expected(data.clients)
    noise = recipe.noise.draw(
        recipe.message(len(x)), len(cohort), denominator, stream(key, k, "noise")
    )
    mean = ((total.sum + noise) / denominator).float()
    remembered = state.direction if state.direction is not None else mean
    direction = recipe.memory.learn(remembered, mean)
    x, server = recipe.server.step(x, recipe.report.descent(direction, x), state.server, k)
    after = State(
        round=k + 1,
        x=x,
        server=server,
        output=recipe.output.follow(state.output, x, k),
        direction=direction if recipe.memory.kept else None,
        memory=state.memory,
    )
    return after, total.info(k, len(cohort), denominator, noise)


@dataclass
class _Total:
    """The sum of a round's messages, and what was seen on the way."""

    sum: Tensor
    rejected: int = 0
    norms: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    def info(self, round: int, participants: int, denominator: float, noise: Tensor) -> Info:
        return Info(
            round=round,
            participants=participants,
            rejected=self.rejected,
            norms=torch.cat([torch.empty(0, dtype=torch.float64), *self.norms]),
            scales=torch.cat([torch.empty(0, dtype=torch.float64), *self.scales]),
            signal=float(self.sum.norm()) / denominator,
            noise=float(noise.norm()) / denominator,
        )


def _sum_of_messages(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    cohort: np.ndarray,
    key: int | str,
) -> _Total:
    """Σ q_i over the cohort, group by group; memory is bounded by the group."""
    k = state.round
    workers = recipe.memory.workers(cohort, data.clients)
    sends = np.isin(workers, cohort, assume_unique=True)
    plan = recipe.local.plan(data.sizes[torch.from_numpy(workers)], k, stream(key, k, "batches"))
    rounding = stream(key, k, "quantize")
    total = _Total(torch.zeros(len(state.x), dtype=torch.float64))
    for start in range(0, len(workers), engine.group_size):
        stop = start + engine.group_size
        group = Group(data, workers[start:stop], plan.group(start, stop))
        _add_messages(recipe, state, engine, group, sends[start:stop], rounding, total)
    return total


def _add_messages(
    recipe: Recipe,
    state: State,
    engine: Engine,
    group: Group,
    sends: np.ndarray,
    rounding: np.random.Generator,
    total: _Total,
) -> None:
    """Local work, report, memory, bound and quantization of one group."""
    updates: Updates = engine.updates(state.x, group)
    updates = updates.affine(*recipe.report.affine(recipe.local.rate(state.round)), state.x)
    remembered = state.memory[group.clients] if state.memory is not None else None
    if remembered is not None:
        updates = DenseUpdates(updates.rows() - remembered)
    norms = updates.norms()
    scales = scales_of(norms, recipe.bound)
    sending, sound = torch.from_numpy(sends), torch.isfinite(norms)
    if remembered is None and not recipe.quantize.rows_needed:
        total.sum += updates.weighted_sum(torch.where(sending, scales, 0.0))
    else:
        rows = bounded_rows(updates, scales)
        rows = recipe.quantize(rows, recipe.bound.norms(len(state.x)), rounding)
        total.sum += rows[sending].sum(dim=0, dtype=torch.float64)
        if state.memory is not None and remembered is not None:
            state.memory[group.clients] = recipe.memory.learn(remembered, rows.float())
    total.rejected += int((sending & ~sound).sum())
    total.norms.append(norms[sending & sound])
    total.scales.append(scales[sending & sound])


def scales_of(norms: Tensor, bound: Bound) -> Tensor:
    """s(‖w_i‖), and 0 for a report that is not finite: it is rejected."""
    sound = torch.isfinite(norms)
    return torch.where(sound, bound.scale(torch.where(sound, norms, 0.0)), 0.0)


def bounded_rows(updates: Updates, scales: Tensor) -> Tensor:
    """b_i = s_i·w_i; a scale of 0 gives 0 even where w_i is not finite."""
    rows = updates.rows() * scales.float()[:, None]
    return torch.where((scales != 0)[:, None], rows, 0.0)
