"""The loop: State, Info, and one round. Every algorithm of this project is this one function.

cohort → local → report → memory → bound → quantize → noise → server
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Limits
from fedveil.data.federated import Federated
from fedveil.engines.asking import (
    affine_of,
    bound_after,
    bound_at,
    called,
    cohort_after,
    copied,
    descent_of,
    direction_of,
    draw_of,
    expected_of,
    first_state,
    held_to_its_stream,
    model_after,
    noise_of_client,
    noise_of_round,
    of_each,
    output_after,
    plan_of,
    width_of,
    workers_of,
)
from fedveil.engines.bounding import bounded_rows, by_rows, quantized_row, scales_of
from fedveil.engines.dropout import DropoutStreams
from fedveil.engines.processes import ALONE, Team
from fedveil.engines.seen import Seen, direction
from fedveil.engines.totals import Measured, Total
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.engines.walks import walk_again
from fedveil.errors import UserError
from fedveil.parts.bound import Bound
from fedveil.parts.cohort import Cohort
from fedveil.parts.local import Local, LocalPlan
from fedveil.parts.memory import ClientMemory
from fedveil.parts.part import Begin, Tensors, foreign
from fedveil.parts.quantize import by_message
from fedveil.random.streams import Key, derived, stream
from fedveil.recipe import Recipe
from fedveil.threads import equal_shares, in_order, one_thread_each
from fedveil.wire import Wire

LOOP = "loop"  # the slot of what the loop itself keeps, in `State.parts`


@dataclass
class State:
    """The state between rounds: the model, and the state of each part by slot."""

    round: int
    x: Tensor  # the model, one float32 vector
    parts: dict[str, Tensors]
    memory: ClientMemory | None = None  # v_i, which clients keep themselves
    moved: Tensor | None = None  # x_k − x_{k−1} of the last release, for diagnostics

    @property
    def model(self) -> Tensor:
        """The model that the output part would release now."""
        return self.parts["output"]["model"]


@dataclass(frozen=True)
class Info:
    """Measurements of one round. In a deployment they are private data (docs/privacy.md)."""

    round: int
    participants: int
    rejected: int
    norms: Tensor  # ‖w_i‖ of the participants before the bound, without rejected ones
    scales: Tensor  # s(‖w_i‖) of the same participants
    signal: float | None  # ‖Σ messages‖ / denominator; None if only the noisy sum is known
    noise: float | None  # ‖noise‖ / denominator
    sent: int = 0  # bytes of all packed messages
    threshold: float | None = None  # C_k of an adaptive bound
    aborted: bool = False  # too few clients arrived for the required noise
    seen: Seen | None = None  # per-client diagnostics, if they are recorded

    @property
    def clipped_fraction(self) -> float | None:
        """The fraction of updates that the bound scaled down; None if clients keep it private."""
        return self._mean((self.scales < 1).double())

    @property
    def norm(self) -> float | None:
        """The mean norm before the bound; None if clients keep it private."""
        return self._mean(self.norms)

    def _mean(self, values: Tensor) -> float | None:
        if len(values):
            return float(values.mean())
        return None if self.participants > self.rejected else 0.0


def begin(recipe: Recipe, x: Tensor, data: Federated, rounds: int, key: Key) -> State:
    """The state before the first round."""
    expected = expected_of(recipe.cohort, data.clients)
    public = expected, recipe.noise_of_mean(len(x), data.clients)
    parts = {
        slot: first_state(part, Begin(x, data.clients, rounds, _first_stream(key, slot), *public))
        for slot, part in recipe.parts.items()
    }
    if recipe.cohort.cap is not None and foreign(recipe.cohort):
        parts[LOOP] = {"taken": torch.zeros(data.clients, dtype=torch.int64)}
    kept = recipe.memory.kept
    memory = ClientMemory(data.clients, width_of(recipe.memory, len(x))) if kept else None
    return State(0, x, parts, memory)


def _first_stream(key: Key, slot: str) -> np.random.Generator:
    """The random stream for a part's initial state, which no round draws from."""
    return stream(key, 0, slot if slot == "output" else f"first {slot}")  # output: as in 0.1


@dataclass
class _Ones:
    """An engine whose clients answer 1 in every coordinate, without a look at their examples."""

    name: str = "ones"
    group_size: int = 1
    least_group: int = 1

    def updates(self, x: Tensor, group: Group) -> DenseUpdates:
        """y_i − x = 1."""
        return DenseUpdates(torch.ones(len(group.clients), len(x)))


def rehearse(recipe: Recipe, state: State, data: Federated) -> None:
    """Refuse a recipe whose user-defined parts cannot compute a round, before it is charged.

    One client's message and the second half of a round are computed from made-up updates, with
    random streams that no round uses, and forgotten.
    """
    if not recipe.foreign or recipe.in_silos:
        return
    key, clients, engine = "rehearsal", data.clients, _Ones()
    cohort = cohort_of(recipe, state, clients, key)
    workers_of(recipe.memory, cohort, clients)
    if not recipe.by_record:
        before = None if state.memory is None else torch.zeros(state.memory.width)
        client_message(recipe, state, data, engine, key, 0, before)
    kind = torch.float64 if recipe.wire(len(state.x), clients) is None else torch.int64
    total = Total(torch.zeros(len(state.x), dtype=kind))
    after, _ = conclude_round(recipe, state, total, cohort, len(cohort), clients, key)
    if foreign(recipe.server) and state.x.isfinite().all() and not after.x.isfinite().all():
        raise UserError(
            f"{called(recipe.server)} returned a model that is not finite for finite noise. Return "
            "a finite model."
        )


def run_round(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    key: Key,
    team: Team = ALONE,
    diagnostics: bool = False,
) -> tuple[State, Info]:
    """x_{k+1} = server(x_k, (Σ q_i + noise) / public denominator).

    Randomness comes from streams keyed by (key, round, purpose) and is consumed in client order.
    The result therefore does not depend on grouping, engine, number of processes or diagnostics.
    """
    cohort = cohort_of(recipe, state, data.clients, key)
    if len(cohort) < recipe.least_arrivals(data.clients):
        return aborted_round(recipe, state, cohort, len(cohort))
    total = sum_of_messages(recipe, state, data, engine, cohort, key, team)
    after, info = conclude_round(recipe, state, total, cohort, len(cohort), data.clients, key)
    if not diagnostics:
        return after, info
    bound = bound_of(recipe, state)
    walked = walk_again(recipe, bound, state.x, state.round, data, engine, cohort, key, team)
    found = total.measured
    seen = Seen(
        cohort, found.norms, found.scales, found.cosines,
        recipe.memory.kept and recipe.memory.compares, bound.threshold, walked,
    )  # fmt: skip
    return replace(after, moved=after.x - state.x), replace(info, seen=seen)


def cohort_of(recipe: Recipe, state: State, population: int, key: Key) -> np.ndarray:
    """The cohort of this round: a set of clients below their participation cap."""
    cohort, kept = recipe.cohort, state.parts["cohort"]
    drawn = draw_of(cohort, population, stream(key, state.round, "cohort"), kept)
    if cohort.cap is not None and (_taken(recipe, state)[drawn] >= cohort.cap).any():
        raise UserError(
            f"Cohort {type(cohort).__name__} drew a client in more rounds than its cap of "
            f"{cohort.cap}. Exclude clients whose state['taken'] has reached the cap."
        )
    return drawn


def _taken(recipe: Recipe, state: State) -> Tensor:
    """The participations of each unit; in a user-defined cohort, by the loop's own count."""
    return state.parts[LOOP if foreign(recipe.cohort) else "cohort"]["taken"]


def _after_draw(recipe: Recipe, parts: dict[str, Tensors], drawn: np.ndarray) -> dict[str, Tensors]:
    """The state of the cohort after a draw, and the loop's own count."""
    after = {"cohort": cohort_after(recipe.cohort, parts["cohort"], drawn)}
    if LOOP in parts:
        after[LOOP] = Cohort.step(recipe.cohort, parts[LOOP], drawn)
    return after


def conclude_round(
    recipe: Recipe,
    state: State,
    total: Total,
    cohort: np.ndarray,
    came: int,
    population: int,
    key: Key,
) -> tuple[State, Info]:
    """The second half of a round, from the sum of messages to the next state.

    The denominator is public. A client that did not arrive, or was rejected, counts as zero.
    """
    k, x, kept = state.round, state.x, dict(state.parts)
    bound = bound_of(recipe, state)
    denominator = expected_of(recipe.cohort, population)
    message = total.message or recipe.message(len(x), bound)
    rng = stream(key, k, "noise")
    drawn = noise_of_round(recipe.noise, message, came, denominator, rng, kept["noise"])
    noise, kept["noise"] = drawn
    released = total.released(noise, message)
    mean = (released / denominator).float()
    direction, kept["memory"] = direction_of(recipe.memory, kept["memory"], mean)
    descent = descent_of(recipe.report, direction, x)
    x, kept["server"] = model_after(recipe.server, x, descent, kept["server"], k)
    kept["output"] = output_after(recipe.output, kept["output"], x, k)
    kept |= _after_draw(recipe, kept, cohort)
    if recipe.bound.adapts:
        count = stream(key, k, "count")
        short = total.no_longer_than(bound.threshold)
        kept["bound"] = bound_after(recipe.bound, kept["bound"], short, came, denominator, count)
    found = total.measured
    sound = ~found.norms.isnan()
    signal, added = total.lengths(noise, released, message, denominator)
    scales = found.scales[sound]
    if recipe.by_record:  # messages have noise in them, and silos do not tell whom they clipped
        signal, added, scales = None, None, scales[:0]
    return State(k + 1, x, kept, state.memory), Info(
        round=k,
        participants=came,
        rejected=total.rejected,
        norms=found.norms[sound],
        scales=scales,
        signal=signal,
        noise=added,
        sent=total.sent,
        threshold=bound.threshold if recipe.bound.adapts else None,
    )


def aborted_round(
    recipe: Recipe, state: State, cohort: np.ndarray, came: int
) -> tuple[State, Info]:
    """A round without a release: too few clients arrived for the noise that is accounted."""
    kept = {
        **state.parts,
        "output": output_after(recipe.output, state.parts["output"], state.x, state.round),
        **_after_draw(recipe, state.parts, cohort),
    }
    nothing = torch.empty(0, dtype=torch.float64)
    info = Info(state.round, came, 0, nothing, nothing, 0.0, 0.0, aborted=True)
    return replace(state, round=state.round + 1, parts=kept), info


@dataclass(frozen=True, eq=False)
class ClientMessage:
    """One client's part of a round: what it sends, and what it remembers once that is counted."""

    numbers: Tensor  # [dim]: float32, or int64 grid steps with the client's own noise
    short: bool | None  # whether ‖w‖ ≤ C_k, for a bound that adapts
    memory: Tensor | None  # v_i after this message


def client_message(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    key: Key,
    client: int,
    remembered: Tensor | None = None,
) -> ClientMessage:
    """q_i + noise_i of one client, computed from its own data by the code of a simulated round.

    `data` has this client only, and `client` is its index in the population. With the key of a
    simulation, the message is the one that the simulation adds up.
    """
    bound = bound_of(recipe, state)
    limits = recipe.limits(len(state.x), bound)
    work = _Work(recipe, bound, limits, state, engine, key, None)
    alone, named = np.array([0]), np.array([client])
    plan = local_plan(recipe.local, data, alone, state.round, key, named)
    group = Group(data, alone, plan, DropoutStreams(key, state.round, named))
    before = None if remembered is None else remembered[None]
    with one_thread_each():  # as in a simulation, whose last bits depend on it
        own = work.updates(group, before).rows()
    updates = work.compared(own, before)
    rows, _, norms = work.rows(updates, named)
    if recipe.bound.adapts and rows.is_floating_point():
        rows = updates.rows()  # the server counts short updates and clips (`reception`)
    short = float(norms[0]) <= bound.threshold if bound.threshold is not None else None
    after = None if before is None else work.after(before, own, rows)[0]
    if recipe.noise.on_messages:
        rows = rows + torch.from_numpy(work.noise(rows.shape[1], named))
    return ClientMessage(rows[0], short if recipe.bound.adapts else None, after)


def local_plan(
    local: Local,
    data: Federated,
    clients: np.ndarray,
    round: int,
    key: Key,
    named: np.ndarray | None = None,
) -> LocalPlan:
    """The local plans of some clients. A random one is drawn from a stream of its client.

    `named` are the clients' indexes in the population, if `data` counts them differently.
    """
    sizes, named = data.sizes[torch.from_numpy(clients)], clients if named is None else named
    if not local.random and not foreign(local):
        return local.plan(sizes, round, stream(key, round, f"batches from {named[0]}"))
    each = zip(sizes, named, strict=True)
    return LocalPlan.joined(
        [plan_of(local, size, round, stream(key, round, f"batches of {i}")) for size, i in each]
    )


def bound_of(recipe: Recipe, state: State) -> Bound:
    """The bound of this round."""
    return bound_at(recipe.bound, state.parts["bound"]) if recipe.bound.adapts else recipe.bound


def own_models(recipe: Recipe, state: State, remembered: Tensor) -> Tensor:
    """The models that clients keep themselves, from what they remember (`Memory.personal`)."""
    memory = recipe.memory

    def model(rows: Tensor) -> Tensor:
        return memory.model(rows, _server_side(recipe, state))

    return of_each(memory, model, remembered, width=len(state.x))


def _server_side(recipe: Recipe, state: State) -> Tensors:
    """The server's state of the memory. One from outside gets a copy: clients only read it."""
    kept = state.parts["memory"]
    return copied(kept) if foreign(recipe.memory) else kept


def sum_of_messages(
    recipe: Recipe,
    state: State,
    data: Federated,
    engine: Engine,
    cohort: np.ndarray,
    key: Key,
    team: Team,
) -> Total:
    """Σ q_i over the cohort, group by group, so that one group must fit in memory."""
    dim = len(state.x)
    workers = workers_of(recipe.memory, cohort, data.clients)
    sends = np.isin(workers, cohort, assume_unique=True)
    wire = recipe.wire(dim, data.clients)
    kind = torch.float64 if wire is None else torch.int64
    bound, last = bound_of(recipe, state), direction(state.moved)
    limits = recipe.limits(dim, bound)
    total = Total(torch.zeros(dim, dtype=kind), wire=wire, message=limits.message)
    work = _Work(recipe, bound, limits, state, engine, key, wire, last)
    mine = team.share(workers, data.clients if recipe.memory.kept else None)
    if state.memory is not None:
        state.memory.admit(workers[mine])

    def messages(share: slice) -> Total:
        start, stop = mine.start + share.start, mine.start + share.stop
        clients = workers[start:stop]
        plan = local_plan(recipe.local, data, clients, state.round, key)
        group = Group(data, clients, plan, DropoutStreams(key, state.round, clients))
        return work.messages(group, torch.from_numpy(sends[start:stop]))

    count = mine.stop - mine.start
    shares = equal_shares(count, engine.group_size, engine.least_group)
    if recipe.by_record:  # one silo after the other, each on all cores
        shares = [slice(silo, silo + 1) for silo in range(count)]
    for part in map(messages, shares) if recipe.by_record else in_order(messages, shares):
        total.add(part)
    if team.size > 1:
        total.add_up(team, sends, mine)
    return total


@dataclass(frozen=True, eq=False)
class _SiloWork:
    """Local work of silos: rounds of this same loop over a silo's own records."""

    recipe: Recipe
    state: State
    data: Federated
    engine: Engine
    key: Key

    def update(self, silo: int, start: Tensor) -> Tensor:
        """y − start after the silo's steps, each by a noisy mean gradient and the pull to x.

        Each silo has a key of its own in each round, so no step repeats another's noise.
        The pull depends on x and on noisy steps only, so it costs no privacy.
        """
        x, local, k = self.state.x, self.recipe.local, self.state.round
        own, key = self.data.records_of(silo), derived(self.key, f"silo {silo} in round {k}")
        inside = self.recipe.accounted_inside(silo, k, len(x))
        here = begin(inside, start, own, local.inner_steps, key)
        for _ in range(local.inner_steps):
            there, _ = run_round(inside, here, own, self.engine, key)
            pulled = there.x - local.rate(k) * local.pull * (here.x - x) if local.pull else there.x
            here = replace(there, x=pulled)
        return here.x - start


@dataclass(frozen=True)
class _Work:
    """Local work, report, memory, bound, quantization and sending, for one group at a time."""

    recipe: Recipe
    bound: Bound
    limits: Limits  # what its messages are held to, and their noise is drawn for
    state: State
    engine: Engine
    key: Key
    wire: Wire | None
    last: Tensor | None = None  # the direction of the last global update, for diagnostics

    def messages(self, group: Group, sends: Tensor) -> Total:
        """The sum of a group's messages. All clients work, and those with `sends` also send."""
        state, clients = self.state, group.clients
        remembered = state.memory[clients] if state.memory is not None else None
        moved = self._moved(group, remembered)
        cosines = self._cosines(moved, len(clients))
        updates = self._reported(moved)
        if remembered is None and not self._rows_needed:
            norms = updates.norms()
            scales = scales_of(norms, self.bound, self.limits.bounded)
            total = Total(updates.weighted_sum(torch.where(sends, scales, 0.0)))
            total.sent = int(sends.sum()) * 4 * len(state.x)
        else:
            own = updates.rows()
            quantized, scales, norms = self.rows(self.compared(own, remembered), clients)
            total = self._sent(quantized[sends], clients[sends.numpy()])
            if state.memory is not None and remembered is not None:
                state.memory[clients] = self.after(remembered, own, quantized)
        lengths = torch.where(torch.isfinite(norms), norms, torch.nan)
        total.groups.append(Measured(lengths, scales, cosines).of(sends))
        return total

    def updates(self, group: Group, remembered: Tensor | None = None) -> Updates:
        """u_i, the reported updates of a group."""
        return self._reported(self._moved(group, remembered))

    def _moved(self, group: Group, remembered: Tensor | None) -> Updates:
        """y_i − x of a group, by the engine, or by rounds over the records of each silo."""
        if not self.recipe.by_record:
            return self.engine.updates(self.state.x, self._corrected(group, remembered))
        work = _SiloWork(self.recipe, self.state, group.data, self.engine, self.key)
        starts = self.state.x.expand(len(group.clients), -1)
        if remembered is not None and self.recipe.memory.personal:
            starts = own_models(self.recipe, self.state, remembered)
        each = zip(group.clients, starts, strict=True)
        return DenseUpdates(torch.stack([work.update(int(silo), y) for silo, y in each]))

    def compared(self, own: Tensor, remembered: Tensor | None) -> DenseUpdates:
        """w_i, the updates as they are bounded: compared with what clients remember."""
        if remembered is None:
            return DenseUpdates(own)
        memory = self.recipe.memory
        compared = of_each(memory, memory.compare, remembered, own, width=own.shape[1])
        return DenseUpdates(compared.to(own.dtype))

    def rows(self, updates: Updates, clients: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Quantized messages without noise, their scales, and ‖w_i‖ of exactly these rows."""
        norms = updates.norms()
        bounded, scales = bounded_rows(updates, norms, self.bound, self.limits.bounded)
        return self._quantized(bounded, clients), scales, norms

    def after(self, remembered: Tensor, own: Tensor, quantized: Tensor) -> Tensor:
        """What clients remember after their messages."""
        memory = self.recipe.memory

        def after(before: Tensor, update: Tensor, message: Tensor) -> Tensor:
            return memory.after(before, update, message, _server_side(self.recipe, self.state))

        return of_each(memory, after, remembered, own, self.as_numbers(quantized))

    def _corrected(self, group: Group, remembered: Tensor | None) -> Group:
        """The group with what its clients' memory adds to their gradients."""
        memory, state = self.recipe.memory, self.state
        if remembered is None or not memory.corrects:
            return group

        def correct(rows: Tensor) -> Tensor:
            return memory.correction(rows, _server_side(self.recipe, state))

        correction = of_each(memory, correct, remembered, width=len(state.x))
        return replace(group, plan=replace(group.plan, correction=correction))

    @property
    def _rows_needed(self) -> bool:
        return by_rows(self.bound, self.recipe.quantize, self.limits.bounded)

    def _reported(self, updates: Updates) -> Updates:
        recipe, state = self.recipe, self.state
        return updates.affine(*affine_of(recipe.report, recipe.local, state.round), state.x)

    def _cosines(self, updates: Updates, clients: int) -> Tensor:
        """cos ∠(y_i − x_k, x_k − x_{k−1}), NaN if undefined."""
        if self.last is None:
            return torch.full((clients,), torch.nan, dtype=torch.float64)
        return (updates.dots(self.last) / updates.norms()).clamp(-1, 1)

    def _quantized(self, rows: Tensor, clients: np.ndarray) -> Tensor:
        """Each client's message, quantized with its own random stream."""
        quantize, limits = self.recipe.quantize, self.limits
        if not by_message(quantize):
            return quantize(rows, limits.bounded, self._stream(f"rounding from {clients[0]}"))
        with held_to_its_stream(quantize):
            each = [
                quantized_row(quantize, row, limits, self._stream(f"rounding of {client}"))
                for row, client in zip(rows, clients, strict=True)
            ]
        return torch.cat(each)

    def _stream(self, purpose: str) -> np.random.Generator:
        return stream(self.key, self.state.round, purpose)

    def as_numbers(self, quantized: Tensor) -> Tensor:
        """Messages as clients remember them, without noise."""
        grid = self.limits.message.grid
        return (quantized if grid is None else quantized.mul(grid)).float()

    def _sent(self, quantized: Tensor, clients: np.ndarray) -> Total:
        """Add up messages, directly or through the wire format."""
        if self.wire is None:
            summed = quantized.sum(dim=0, dtype=torch.float64)
            return Total(summed, sent=4 * quantized.numel())
        levels = quantized.numpy()
        if self.recipe.noise.on_messages:
            levels = levels + self.noise(levels.shape[1], clients)
        packed = self.wire.send(levels)
        received = self.wire.receive(packed, levels.shape[1]).sum(axis=0)
        return Total(quantized.sum(dim=0), received, sent=packed.nbytes)

    def noise(self, dim: int, clients: np.ndarray) -> np.ndarray:
        """The noise of each client, [clients, dim], each from its own random stream."""
        noise, message = self.recipe.noise, self.limits.message
        with held_to_its_stream(noise):
            rows = [noise_of_client(noise, message, self._stream(f"noise of {c}")) for c in clients]
        return np.stack(rows) if rows else np.zeros((0, dim), dtype=np.int64)
