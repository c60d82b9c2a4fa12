"""The loop: State, Info, one round. Every algorithm of this project is this one function.

cohort → local → report → memory → bound → quantize → noise → server
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated
from fedveil.diagnosis.seen import Seen, direction
from fedveil.diagnosis.walks import walk_again
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.parts.bound import AdaptiveClip, Bound, Clip
from fedveil.parts.memory import ClientMemory
from fedveil.parts.server import Tensors
from fedveil.privacy.norms import Norms
from fedveil.recipe import Recipe
from fedveil.streams import Key, stream
from fedveil.threads import equal_shares, in_order
from fedveil.wire import Wire


@dataclass
class State:
    """All that one round hands to the next."""

    round: int
    x: Tensor  # the model, one float32 vector
    server: Tensors
    output: Tensors
    direction: Tensor | None = None  # v̂, the server's side of the memory
    memory: ClientMemory | None = None  # v_i, the clients' side
    threshold: Tensor | None = None  # C_k of an adaptive bound, one number
    taken: Tensor | None = None  # how often each client has taken part, if that is capped
    moved: Tensor | None = None  # x_k − x_{k−1} of the last release, where diagnostics ask for it

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
    sent: int = 0  # bytes of all messages, as they were packed
    threshold: float | None = None  # the C_k of an adaptive bound
    void: bool = False  # rejected as a whole: too few came for the noise that was promised
    seen: Seen | None = None  # of each participant, where diagnostics are recorded

    @property
    def shrunk(self) -> float:
        """The fraction of updates that the bound made smaller."""
        return float((self.scales < 1).double().mean()) if len(self.scales) else 0.0

    @property
    def norm(self) -> float:
        """The mean norm before the bound."""
        return float(self.norms.mean()) if len(self.norms) else 0.0


def begin(recipe: Recipe, x: Tensor, data: Federated, rounds: int, key: Key) -> State:
    """The state before the first round."""
    kept = recipe.memory.kept
    first = recipe.bound.start if isinstance(recipe.bound, AdaptiveClip) else None
    capped = recipe.cohort.cap is not None
    return State(
        round=0,
        x=x,
        server=recipe.server.start(x),
        output=recipe.output.start(x, rounds, stream(key, 0, "output")),
        direction=torch.zeros_like(x) if kept else None,
        memory=ClientMemory(data.clients, len(x)) if kept else None,
        threshold=None if first is None else torch.tensor([first]).double(),
        taken=torch.zeros(data.clients, dtype=torch.int64) if capped else None,
    )


def play_round(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    key: Key,
    team: Team = ALONE,
    diagnostics: bool = False,
) -> tuple[State, Info]:
    """x_{k+1} = server(x_k, (Σ q_i + noise) / public denominator).

    Randomness comes from streams keyed by (key, round, purpose) and is consumed in client order,
    so the result depends neither on grouping nor on the engine nor on the number of processes,
    nor on whether diagnostics are recorded.
    """
    cohort = cohort_of(recipe, state, data.clients, key)
    taken = counted(state.taken, cohort)
    if len(cohort) < recipe.least_arrivals(data.clients):
        return void_round(recipe, state, taken, len(cohort))
    total = _sum_of_messages(recipe, state, data, engine, cohort, key, team)
    after, info = conclude_round(recipe, state, total, len(cohort), data.clients, taken, key)
    if not diagnostics:
        return after, info
    bound = bound_of(recipe, state)
    walked = walk_again(recipe, bound, state.x, state.round, data, engine, cohort, key, team)
    clip = bound.norm if isinstance(bound, Clip) else None
    norms, scales, cosines = total.seen
    seen = Seen(cohort, norms, scales, cosines, recipe.memory.kept, clip, walked)
    return replace(after, moved=after.x - state.x), replace(info, seen=seen)


def cohort_of(recipe: Recipe, state: State, population: int, key: Key) -> np.ndarray:
    """Who is asked in this round."""
    taken = None if state.taken is None else state.taken.numpy()
    return recipe.cohort.draw(population, stream(key, state.round, "cohort"), taken)


def conclude_round(
    recipe: Recipe,
    state: State,
    total: Total,
    came: int,
    population: int,
    taken: Tensor | None,
    key: Key,
) -> tuple[State, Info]:
    """What a round does with the sum of its messages, wherever they were computed.

    The denominator is public: who did not come, or was rejected, counts as zero.
    """
    k, x = state.round, state.x
    bound = bound_of(recipe, state)
    denominator = recipe.cohort.expected(population)
    message = recipe.message(len(x), bound)
    noise = recipe.noise.draw(message, came, denominator, stream(key, k, "noise"))
    released = total.released(noise, message)
    mean = (released / denominator).float()
    remembered = state.direction if state.direction is not None else mean
    descent = recipe.memory.learn(remembered, mean)
    x, server = recipe.server.step(x, recipe.report.descent(descent, x), state.server, k)
    after = State(
        round=k + 1,
        x=x,
        server=server,
        output=recipe.output.follow(state.output, x, k),
        direction=descent if recipe.memory.kept else None,
        memory=state.memory,
        threshold=_next_threshold(recipe, state, total, came, population, key),
        taken=taken,
    )
    norms, scales, _ = total.seen
    sound = ~norms.isnan()
    signal, added = total.lengths(noise, released, message)
    return after, Info(
        round=k,
        participants=came,
        rejected=total.rejected,
        norms=norms[sound],
        scales=scales[sound],
        signal=signal / denominator,
        noise=added / denominator,
        sent=total.sent,
        threshold=None if state.threshold is None else float(state.threshold),
    )


def counted(taken: Tensor | None, cohort: np.ndarray) -> Tensor | None:
    """One more for everybody who was drawn; what is not capped is not counted."""
    if taken is None:
        return None
    counted = taken.clone()
    counted[torch.from_numpy(cohort)] += 1
    return counted


def void_round(recipe: Recipe, state: State, taken: Tensor | None, came: int) -> tuple[State, Info]:
    """A round without a release: too few came for the noise that the accounting counts on."""
    output = recipe.output.follow(state.output, state.x, state.round)
    after = replace(state, round=state.round + 1, output=output, taken=taken)
    nothing = torch.empty(0, dtype=torch.float64)
    return after, Info(state.round, came, 0, nothing, nothing, 0.0, 0.0, void=True)


def bound_of(recipe: Recipe, state: State) -> Bound:
    """The bound of this round."""
    if isinstance(recipe.bound, AdaptiveClip) and state.threshold is not None:
        return recipe.bound.at(float(state.threshold))
    return recipe.bound


def _next_threshold(
    recipe: Recipe, state: State, total: Total, came: int, population: int, key: Key
) -> Tensor | None:
    """C_{k+1}, from the noisy count of short updates; rejected ones count as long."""
    if not isinstance(recipe.bound, AdaptiveClip) or state.threshold is None:
        return None
    norm = float(state.threshold)
    short = int((total.seen[0] <= norm).sum()) if total.short is None else total.short
    rng = stream(key, state.round, "count")
    expected = recipe.cohort.expected(population)
    return torch.tensor([recipe.bound.next(norm, short, came, expected, rng)]).double()


@dataclass
class Total:
    """The sum of messages, of a group or of a round, and what was seen on the way.

    On a grid sums are whole numbers: of the messages before their noise, and as received.
    """

    sum: Tensor
    received: np.ndarray | None = None
    wire: Wire | None = None
    sent: int = 0
    facts: list[Tensor] = field(default_factory=list)  # [3, messages] each
    short: int | None = None  # how many said that they were; None where `facts` tell

    @property
    def seen(self) -> Tensor:
        """Norm, scale and cosine of every message in order, [3, messages]; the norm of a rejected
        one is NaN, and so is a cosine that nobody asked for."""
        return torch.cat([torch.empty(3, 0, dtype=torch.float64), *self.facts], dim=1)

    @property
    def rejected(self) -> int:
        """How many updates were not finite."""
        return int(self.seen[0].isnan().sum())

    def add(self, part: Total) -> None:
        """Take in the messages of a group."""
        self.sum += part.sum
        if part.received is not None:
            self.received = part.received + (0 if self.received is None else self.received)
        self.sent += part.sent
        self.facts += part.facts

    def add_up(self, team: Team, sends: np.ndarray, mine: slice) -> None:
        """Become the total of all processes: d numbers, and three for each message.

        What was seen of a message has a place of its own, which only its process fills.
        """
        team.add(self.sum)
        if self.wire is not None:
            self.received = np.zeros_like(self.sum) if self.received is None else self.received
            team.add(torch.from_numpy(self.received))
        first, count = int(sends[: mine.start].sum()), int(sends[mine].sum())
        facts = torch.zeros(3 * int(sends.sum()) + 1, dtype=torch.float64)
        facts[-1] = self.sent
        everyone = facts[:-1].view(3, -1)
        everyone[:, first : first + count] = self.seen
        team.add(facts)
        self.facts, self.sent = [everyone], int(facts[-1])

    def lengths(self, noise: Tensor, released: Tensor, message: Norms) -> tuple[float, float]:
        """‖Σ q_i‖, and how long all noise is that was added to it."""
        clean = _in_steps(self.sum, message)
        plain = self.wire is None and noise.is_floating_point()
        added = noise if plain else released - clean
        return float(clean.norm()), float(added.norm())

    def released(self, noise: Tensor, message: Norms) -> Tensor:
        """The received sum and the server's noise; whole numbers are added before anything else."""
        total = self.sum
        if self.wire is not None and self.received is not None:
            total = torch.from_numpy(self.wire.settle(self.received))
        if not noise.is_floating_point():
            return _in_steps(total + noise, message)
        return _in_steps(total, message) + noise


def _in_steps(total: Tensor, message: Norms) -> Tensor:
    """A sum as numbers; on a grid it counts steps."""
    return total.double() if message.grid is None else total.double() * message.grid


def _sum_of_messages(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    cohort: np.ndarray,
    key: Key,
    team: Team,
) -> Total:
    """Σ q_i over the cohort, group by group; memory is bounded by the group."""
    k, dim = state.round, len(state.x)
    workers = recipe.memory.workers(cohort, data.clients)
    sends = np.isin(workers, cohort, assume_unique=True)
    plan = recipe.local.plan(data.sizes[torch.from_numpy(workers)], k, stream(key, k, "batches"))
    wire = recipe.wire(dim, data.clients)
    kind = torch.float64 if wire is None else torch.int64
    total = Total(torch.zeros(dim, dtype=kind), wire=wire)
    last = direction(state.moved)
    work = _Work(recipe, bound_of(recipe, state), state, engine, key, wire, last)
    mine = team.share(workers, data.clients if recipe.memory.kept else None)
    if state.memory is not None:
        state.memory.admit(workers[mine])

    def messages(share: slice) -> Total:
        start, stop = mine.start + share.start, mine.start + share.stop
        group = Group(data, workers[start:stop], plan.group(start, stop))
        return work.messages(group, torch.from_numpy(sends[start:stop]))

    for part in in_order(messages, equal_shares(mine.stop - mine.start, engine.group_size)):
        total.add(part)
    if team.size > 1:
        total.add_up(team, sends, mine)
    return total


@dataclass(frozen=True)
class _Work:
    """Local work, report, memory, bound, quantization and sending, of any group on its own."""

    recipe: Recipe
    bound: Bound
    state: State
    engine: Engine
    key: Key
    wire: Wire | None
    last: Tensor | None = None  # the direction of the last global update, if angles are asked for

    def messages(self, group: Group, sends: Tensor) -> Total:
        """A group's messages, added up; all of it works, those with `sends` also send."""
        recipe, state = self.recipe, self.state
        updates: Updates = self.engine.updates(state.x, group)
        cosines = self._cosines(updates, len(group.clients))
        updates = updates.affine(*recipe.report.affine(recipe.local.rate(state.round)), state.x)
        remembered = state.memory[group.clients] if state.memory is not None else None
        if remembered is not None:
            updates = DenseUpdates(updates.rows() - remembered)
        elif recipe.quantize.rows_needed:
            updates = DenseUpdates(updates.rows())  # norms of the very rows that are sent
        norms = updates.norms()
        scales = scales_of(norms, self.bound)
        sound = torch.isfinite(norms)
        if remembered is None and not recipe.quantize.rows_needed:
            total = Total(updates.weighted_sum(torch.where(sends, scales, 0.0)))
            total.sent = int(sends.sum()) * 4 * len(state.x)
        else:
            quantized = self._quantized(bounded_rows(updates, scales), group.clients)
            total = self._sent(quantized[sends], group.clients[sends.numpy()])
            if state.memory is not None and remembered is not None:
                state.memory[group.clients] = recipe.memory.learn(
                    remembered, self._as_numbers(quantized)
                )
        lengths = torch.where(sound, norms, torch.nan)
        total.facts.append(torch.stack([lengths, scales, cosines])[:, sends])
        return total

    def _cosines(self, updates: Updates, clients: int) -> Tensor:
        """cos ∠(y_i − x_k, x_k − x_{k−1}), NaN where there is no angle."""
        if self.last is None:
            return torch.full((clients,), torch.nan, dtype=torch.float64)
        return (updates.dots(self.last) / updates.norms()).clamp(-1, 1)

    def _quantized(self, rows: Tensor, clients: np.ndarray) -> Tensor:
        """Each client's message on the grid, if there is one, by a stream of its own."""
        quantize, norms = self.recipe.quantize, self.bound.norms(rows.shape[1])
        if not quantize.rows_needed:
            return quantize(rows, norms, self._stream(f"rounding from {clients[0]}"))
        each = [
            quantize(row[None], norms, self._stream(f"rounding of {client}"))
            for row, client in zip(rows, clients, strict=True)
        ]
        return torch.cat(each)

    def _stream(self, purpose: str) -> np.random.Generator:
        return stream(self.key, self.state.round, purpose)

    def _as_numbers(self, quantized: Tensor) -> Tensor:
        """Messages as their clients remember them, before noise."""
        grid = self.recipe.message(quantized.shape[1], self.bound).grid
        return (quantized if grid is None else quantized.mul(grid)).float()

    def _sent(self, quantized: Tensor, clients: np.ndarray) -> Total:
        """Add messages up, as they are or through the wire."""
        if self.wire is None:
            summed = quantized.sum(dim=0, dtype=torch.float64)
            return Total(summed, sent=4 * quantized.numel())
        levels = quantized.numpy()
        if self.recipe.noise.on_messages:
            levels = levels + self._noise(levels.shape[1], clients)
        packed = self.wire.send(levels)
        received = self.wire.receive(packed, levels.shape[1]).sum(axis=0)
        return Total(quantized.sum(dim=0), received, sent=packed.nbytes)

    def _noise(self, dim: int, clients: np.ndarray) -> np.ndarray:
        """Each client's own, from a stream of its own: [clients, dim]."""
        message, each = self.recipe.message(dim, self.bound), self.recipe.noise.each
        rows = [each(message, self._stream(f"noise of {client}")) for client in clients]
        return np.stack(rows) if rows else np.zeros((0, dim), dtype=np.int64)


def scales_of(norms: Tensor, bound: Bound) -> Tensor:
    """s(‖w_i‖), and 0 for a report that is not finite: it is rejected."""
    sound = torch.isfinite(norms)
    return torch.where(sound, bound.scale(torch.where(sound, norms, 0.0)), 0.0)


def bounded_rows(updates: Updates, scales: Tensor) -> Tensor:
    """b_i = s_i·w_i; a scale of 0 gives 0 even where w_i is not finite."""
    rows = updates.rows() * scales.float()[:, None]
    return torch.where((scales != 0)[:, None], rows, 0.0)
