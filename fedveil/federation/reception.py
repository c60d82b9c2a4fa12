"""reception: check, bound and add up the messages that clients of a federation send in a round.

`loop.run_round` computes the messages of simulated clients. A server receives them from outside and
cannot trust them. It opens a `Reception`, sends each `Invitation`, passes on everything that
arrives, and closes. The rest of the round is the loop's own (`loop.conclude_round`). Floats travel
as safetensors of the model's named parameters, integers as packed bits (`wire`). A client sends the
bounded message of its recipe. If the bound adapts, the server must count short updates. For floats,
the client then sends its update unclipped, and the server clips it. Integer messages have no room
for a long update, so the client clips it and reports in `Message.short` whether it was short.
Closing is the deadline. The time of closing must not depend on what has arrived (docs/privacy.md).
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.engines.bounding import held, held_steps
from fedveil.engines.totals import Measured, Total
from fedveil.errors import UserError
from fedveil.loop import (
    Info,
    State,
    aborted_round,
    bound_of,
    cohort_of,
    conclude_round,
)
from fedveil.parts.bound import TINY
from fedveil.random.streams import Key
from fedveil.recipe import Recipe
from fedveil.wire import Wire

NONCE = 16  # bytes
MOST_EXAMPLES = 2**40  # of one client
HEADER = 2**20  # bytes for names and shapes, in addition to the numbers

Shapes = Mapping[str, tuple[int, ...]]
Reason = Literal[
    "taken", "late", "uninvited", "stale", "replayed", "duplicate", "miscounted", "malformed"
]


@dataclass(frozen=True)
class Invitation:
    """What a client must return with its message, so that it is valid for this round only."""

    client: int
    round: int
    nonce: bytes


@dataclass(frozen=True)
class Message:
    """A message from outside. Nothing in it has been checked."""

    client: int
    round: int
    nonce: bytes
    examples: int  # checked but not used: the influence of a weight by examples is not bounded
    body: bytes
    short: bool | None = None  # whether ‖w‖ ≤ C_k, for integer messages and a bound that adapts


@dataclass(frozen=True)
class Verdict:
    """Whether a message was taken, and why not."""

    reason: Reason
    why: str = ""

    @property
    def taken(self) -> bool:
        """Whether the message is in the sum."""
        return self.reason == "taken"


class Reception:
    """Σ q_i over the valid messages of one round. All others count as zero.

    Whatever arrives, one client changes the sum by at most one message within the recipe's norms.
    Noise and denominator do not depend on what arrives.
    """

    def __init__(
        self, recipe: Recipe, state: State, shapes: Shapes, population: int, key: Key
    ) -> None:
        _refuse_floats_with_noise(recipe)
        _refuse_masked(recipe)
        _refuse_amplified(recipe)
        if (dim := sum(math.prod(shape) for shape in shapes.values())) != len(state.x):
            raise UserError(
                f"reception: the shapes have {dim} numbers, but the model has {len(state.x)}. Give "
                "the shapes of the model's parameters."
            )
        self._recipe, self._state, self._shapes = recipe, state, dict(shapes)
        self._population, self._key = population, key
        self._message = recipe.message(dim, bound_of(recipe, state))
        self._wire = recipe.wire(dim, population)
        kind = torch.float64 if self._wire is None else torch.int64
        noisy = recipe.noise.on_messages
        self._total = Total(torch.zeros(dim, dtype=kind), wire=self._wire, noisy=noisy)
        self._total.message = self._message
        self._told = self._wire is not None and recipe.bound.adapts
        if self._told:
            self._total.short = 0
        self._cohort = cohort_of(recipe, state, population, key)
        self._nonces = {int(client): secrets.token_bytes(NONCE) for client in self._cohort}
        self._sent: set[int] = set()  # members of the cohort that sent in time, taken or not
        self._in_sum: set[int] = set()
        self._closed = False
        self.verdicts: Counter[Reason] = Counter()

    @property
    def invitations(self) -> list[Invitation]:
        """One invitation for each member of the cohort."""
        return [Invitation(c, self._state.round, nonce) for c, nonce in self._nonces.items()]

    @property
    def in_sum(self) -> tuple[int, ...]:
        """The clients whose messages are in the sum."""
        return tuple(sorted(self._in_sum))

    def take(self, message: Message) -> Verdict:
        """Add a message to the sum, or report why not. A refused client may send again in time."""
        verdict = self._refused(message) or self._added(message)
        self.verdicts[verdict.reason] += 1
        return verdict

    def close(self) -> tuple[State, Info]:
        """End the round: noise, denominator and server step; aborted if too few arrived."""
        if self._closed:
            raise UserError("reception: this round is already closed. Open the next one.")
        self._closed = True
        came = len(self._in_sum)
        if came < self._recipe.least_arrivals(self._population):
            return aborted_round(self._recipe, self._state, self._cohort, came)
        rejected = len(self._sent - self._in_sum)
        self._total.groups.append(Measured.unknown(rejected))
        return conclude_round(
            self._recipe, self._state, self._total, self._cohort, came, self._population, self._key
        )

    def _refused(self, message: Message) -> Verdict | None:
        """The verdict on a message that is refused before its body is read."""
        if not _has_its_types(message):
            return Verdict("malformed", "Its client, round, nonce or body has the wrong type.")
        now, nonce = self._state.round, self._nonces.get(message.client)
        if self._closed:
            return Verdict("late", f"Round {now} is closed. Wait for the next invitation.")
        if nonce is None:
            return Verdict("uninvited", f"Client {message.client} is not in round {now}'s cohort.")
        if message.round != now:
            return Verdict(
                "stale", f"The message is for round {message.round}, but this is round {now}."
            )
        if not hmac.compare_digest(nonce, message.nonce):
            return Verdict("replayed", "Its nonce does not match this client's invitation.")
        if message.client in self._in_sum:
            return Verdict("duplicate", "This client's message is already in the sum.")
        self._sent.add(message.client)
        if not _is_count(message.examples):
            return Verdict("miscounted", f"examples is {message.examples!r}; it must be a count.")
        if self._told and not isinstance(message.short, bool):
            return Verdict("malformed", "The field `short` is missing. Set it to true or false.")
        return None

    def _added(self, message: Message) -> Verdict:
        try:
            if self._wire is None:
                self._add_floats(read_floats(message.body, self._shapes))
            else:
                self._add_levels(read_levels(message.body, self._wire, len(self._state.x)))
        except UserError as problem:
            return Verdict("malformed", str(problem))
        self._in_sum.add(message.client)
        if self._total.short is not None:
            self._total.short += bool(message.short)
        self._total.sent += len(message.body)
        return Verdict("taken")

    def _add_floats(self, vector: Tensor) -> None:
        """Add a vector, clipped to the norms of the bound. One within them is not changed."""
        bounded = held(vector[None], self._message)
        self._total.sum += bounded[0].double()
        norm = vector.double().norm()[None]
        left = bounded.double().norm(dim=1) / norm.clamp_min(TINY)
        scale = torch.where(norm > 0, left, 1.0)
        self._total.groups.append(Measured(norm, scale, torch.full_like(norm, torch.nan)))

    def _add_levels(self, levels: np.ndarray) -> None:
        """Add grid steps: bounded again, or refused beyond the noise's maximum magnitude."""
        reach = int(self._message.steps.linf) + self._recipe.noise.max_magnitude(self._message)
        if not self._recipe.noise.on_messages:
            levels = held_steps(levels, self._message.steps)
        elif (farthest := int(np.abs(levels).max(initial=0))) > reach:
            raise UserError(
                f"A coordinate is {farthest} steps, but at most {reach} are possible. The "
                "message was rejected."
            )
        self._total.sum += torch.from_numpy(levels)
        self._total.received = self._total.sum.numpy()


def read_floats(body: bytes, shapes: Shapes) -> Tensor:
    """The float32 vector of a safetensors message with exactly these names and shapes, finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    numbers = sum(math.prod(shape) for shape in shapes.values())
    if len(body) > 4 * numbers + HEADER:
        raise UserError(
            f"A message has {len(body)} bytes, too many for {numbers} numbers. The message "
            "was rejected."
        )
    try:
        leaves = load(body)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as problem:
        raise UserError(
            f"A message is not valid safetensors ({problem}). The message was rejected."
        ) from None
    if leaves.keys() != shapes.keys():
        odd = sorted(leaves.keys() ^ shapes.keys())[0][:80]
        raise UserError(
            f"The parameters of a message do not match the model's, for example '{odd}'. The "
            "message was rejected."
        )
    for name, shape in shapes.items():
        leaf = leaves[name]
        if leaf.shape != shape or leaf.dtype != torch.float32:
            raise UserError(
                f"'{name}' is {leaf.dtype} {tuple(leaf.shape)} in a message; it must be float32 "
                f"{shape}. The message was rejected."
            )
    vector = torch.cat([leaves[name].reshape(-1) for name in shapes])
    if not bool(torch.isfinite(vector).all()):
        raise UserError("A message contains NaN or infinity. The message was rejected.")
    return vector


def write_floats(vector: Tensor, shapes: Shapes) -> bytes:
    """The message that `read_floats` reads."""
    from safetensors.torch import save

    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
    return save({name: part.reshape(shape).clone() for (name, shape), part in parts})


def read_levels(body: bytes, wire: Wire, dim: int) -> np.ndarray:
    """The integers [dim] of a packed message; residues as the integers nearest to zero."""
    packed = np.frombuffer(body, dtype=np.uint8)
    return wire.settle(wire.receive(packed[None], dim)[0])


def write_levels(levels: np.ndarray, wire: Wire) -> bytes:
    """The message that `read_levels` reads."""
    return wire.send(levels[None]).tobytes()


def _has_its_types(message: Message) -> bool:
    whole = type(message.client) is int and type(message.round) is int
    return whole and isinstance(message.nonce, bytes) and isinstance(message.body, bytes)


def _is_count(examples: object) -> bool:
    whole = isinstance(examples, int) and not isinstance(examples, bool)
    return whole and examples in range(MOST_EXAMPLES + 1)


def _refuse_masked(recipe: Recipe) -> None:
    """Refuse view `sum`, where the server must see nothing but the sum."""
    if recipe.view == "sum":
        raise UserError(
            f"{recipe.name} is for view 'sum', but a reception sees every single message, as in "
            "view 'messages'. Use a recipe for that view, or secure aggregation instead."
        )


def _refuse_amplified(recipe: Recipe) -> None:
    """Refuse a guarantee that holds only if every message arrives, which clients cannot ensure."""
    if recipe.noise.at == "client" and recipe.hidden(recipe.view):
        raise UserError(
            f"{recipe.name}: noise from the clients in view '{recipe.view}' is accounted as if "
            "nobody saw who takes part. But a missing message aborts the round, and the models "
            "show that. Use noise at the server, view 'messages', or a cohort with `honest`."
        )


def _refuse_floats_with_noise(recipe: Recipe) -> None:
    if recipe.noise.at == "client" and not recipe.noise.on_messages:
        raise UserError(
            f"{recipe.name}: noise {type(recipe.noise).__name__} at the clients is only simulated, "
            "as one draw for the sum, and cannot be part of a message. Use noise at the server, or "
            "integer noise."
        )
