"""reception: what clients of a federation send in a round, checked, bounded again and added up.

`loop.play_round` computes its clients' messages itself; a server gets them from outside and cannot
trust them. It opens a `Reception`, sends each `Invitation`, hands over all that arrives, and
closes: from there on the round is the loop's own (`loop.conclude_round`). Floats travel as
safetensors of the model's named parameters, whole numbers as packed bits (`wire`). A client sends
what its recipe's bound has made. Under `AdaptiveClip` the server has to count short updates: of
floats a client sends its report as it is, and the server clips it; whole numbers have no room for
a long report, so a client clips it and says in `Message.short` whether it was short.
Closing is the deadline. When to close must not depend on what has arrived (docs/privacy.md).
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

from fedveil.errors import UserError
from fedveil.loop import (
    Info,
    State,
    Total,
    bound_of,
    cohort_of,
    conclude_round,
    counted,
    void_round,
)
from fedveil.parts.bound import MARGIN, AdaptiveClip, Clip
from fedveil.privacy.norms import Norms
from fedveil.recipe import Recipe
from fedveil.streams import Key
from fedveil.wire import Wire

NONCE = 16  # bytes
MOST_EXAMPLES = 2**40  # of one client
HEADER = 2**20  # bytes that names and shapes may take beside the numbers

Shapes = Mapping[str, tuple[int, ...]]
Reason = Literal[
    "taken", "late", "uninvited", "stale", "replayed", "duplicate", "miscounted", "malformed"
]


@dataclass(frozen=True)
class Invitation:
    """What a client must give back with its message, so that it counts for this round alone."""

    client: int
    round: int
    nonce: bytes


@dataclass(frozen=True)
class Message:
    """What came from outside: nothing in it has been checked."""

    client: int
    round: int
    nonce: bytes
    examples: int  # checked and not used: a weight by examples would have no bounded influence
    body: bytes
    short: bool | None = None  # under AdaptiveClip with whole numbers: ‖w‖ ≤ C_k before the clip


@dataclass(frozen=True)
class Verdict:
    """What became of a message; why, where it was refused."""

    reason: Reason
    why: str = ""

    @property
    def taken(self) -> bool:
        """Whether it is in the sum."""
        return self.reason == "taken"


class Reception:
    """Σ q_i over the messages of one round that are what they should be; all others count as zero.

    Whatever arrives, one client changes the sum by at most one message within the recipe's norms,
    once; noise and denominator do not depend on it.
    """

    def __init__(
        self, recipe: Recipe, state: State, shapes: Shapes, population: int, key: Key
    ) -> None:
        _refuse_floats_with_noise(recipe)
        _refuse_masked(recipe)
        _refuse_amplified(recipe)
        if (dim := sum(math.prod(shape) for shape in shapes.values())) != len(state.x):
            raise UserError(
                f"reception: the shapes make {dim} numbers, but the model has {len(state.x)}; "
                "give the shapes of the model's own parameters."
            )
        self._recipe, self._state, self._shapes = recipe, state, dict(shapes)
        self._population, self._key = population, key
        self._message = recipe.message(dim, bound_of(recipe, state))
        self._wire = recipe.wire(dim, population)
        kind = torch.float64 if self._wire is None else torch.int64
        self._total = Total(torch.zeros(dim, dtype=kind), wire=self._wire)
        self._told = self._wire is not None and isinstance(recipe.bound, AdaptiveClip)
        if self._told:
            self._total.short = 0
        self._cohort = cohort_of(recipe, state, population, key)
        self._nonces = {int(client): secrets.token_bytes(NONCE) for client in self._cohort}
        self._sent: set[int] = set()  # of the cohort, in time, whether or not it was taken
        self._in_sum: set[int] = set()
        self._closed = False
        self.verdicts: Counter[Reason] = Counter()

    @property
    def invitations(self) -> list[Invitation]:
        """One for each member of the cohort."""
        return [Invitation(c, self._state.round, nonce) for c, nonce in self._nonces.items()]

    def take(self, message: Message) -> Verdict:
        """Add a message to the sum, or say why not; a refused client may send again in time."""
        verdict = self._refused(message) or self._added(message)
        self.verdicts[verdict.reason] += 1
        return verdict

    def close(self) -> tuple[State, Info]:
        """The round's end: noise, denominator and step of the loop; void if too few came."""
        if self._closed:
            raise UserError("reception: this round is closed already; open the next one.")
        self._closed = True
        taken = counted(self._state.taken, self._cohort)
        came = len(self._in_sum)
        if came < self._recipe.least_arrivals(self._population):
            return void_round(self._recipe, self._state, taken, came)
        rejected = len(self._sent - self._in_sum)
        self._total.facts.append(torch.full((3, rejected), torch.nan, dtype=torch.float64))
        return conclude_round(
            self._recipe, self._state, self._total, came, self._population, taken, self._key
        )

    def _refused(self, message: Message) -> Verdict | None:
        """What can be said before the body is read."""
        if not _has_its_types(message):
            return Verdict("malformed", "Its client, round, nonce or body is of another type.")
        now, nonce = self._state.round, self._nonces.get(message.client)
        if self._closed:
            return Verdict("late", f"Round {now} is closed; wait for the next invitation.")
        if nonce is None:
            return Verdict("uninvited", f"Client {message.client} is not in round {now}'s cohort.")
        if message.round != now:
            return Verdict("stale", f"It is for round {message.round}, but this is round {now}.")
        if not hmac.compare_digest(nonce, message.nonce):
            return Verdict("replayed", "Its nonce is not that of this client's invitation.")
        if message.client in self._in_sum:
            return Verdict("duplicate", "This client's message is in the sum already.")
        self._sent.add(message.client)
        if not _is_count(message.examples):
            return Verdict("miscounted", f"examples is {message.examples!r}, which is no count.")
        if self._told and not isinstance(message.short, bool):
            return Verdict("malformed", "It does not say whether the update was short.")
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
        """min(1, C/‖m‖)·m for the C that the bound promises; what keeps it is untouched."""
        norm = vector.double().norm()
        limit = self._message.l2
        scale = torch.ones_like(norm) if norm <= limit else Clip(limit).scale(norm)
        self._total.sum += vector.mul(scale.float()).double()
        self._total.facts.append(
            torch.stack([norm, scale, torch.full_like(norm, torch.nan)])[:, None]
        )

    def _add_levels(self, levels: np.ndarray) -> None:
        """Whole steps: bounded again, or, where they carry noise, kept within its reach."""
        reach = int(self._message.steps.linf) + self._recipe.noise.reach(self._message)
        if not self._recipe.noise.on_messages:
            levels = within(levels, self._message.steps)
        elif (farthest := int(np.abs(levels).max(initial=0))) > reach:
            raise UserError(
                f"A coordinate is {farthest} steps, but none can be above {reach}; reject it."
            )
        self._total.sum += torch.from_numpy(levels)
        self._total.received = self._total.sum.numpy()


def read_floats(body: bytes, shapes: Shapes) -> Tensor:
    """The float32 vector of a safetensors message with just these names and shapes, all finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    numbers = sum(math.prod(shape) for shape in shapes.values())
    if len(body) > 4 * numbers + HEADER:
        raise UserError(f"A message has {len(body)} bytes, too many for {numbers} numbers.")
    try:
        leaves = load(body)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as problem:
        raise UserError(f"A message is not safetensors ({problem}); reject it.") from None
    if leaves.keys() != shapes.keys():
        odd = sorted(leaves.keys() ^ shapes.keys())[0][:80]
        raise UserError(f"A message has the wrong parameters, '{odd}' for one; reject it.")
    for name, shape in shapes.items():
        leaf = leaves[name]
        if leaf.shape != shape or leaf.dtype != torch.float32:
            raise UserError(
                f"'{name}' came as {leaf.dtype} {tuple(leaf.shape)}, but is float32 {shape}; "
                "reject it."
            )
    vector = torch.cat([leaves[name].reshape(-1) for name in shapes])
    if not bool(torch.isfinite(vector).all()):
        raise UserError("A message holds NaN or an infinity; reject it.")
    return vector


def write_floats(vector: Tensor, shapes: Shapes) -> bytes:
    """What `read_floats` reads."""
    from safetensors.torch import save

    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
    return save({name: part.reshape(shape).clone() for (name, shape), part in parts})


def read_levels(body: bytes, wire: Wire, dim: int) -> np.ndarray:
    """The whole numbers [dim] of a packed message; residues as the numbers nearest to zero."""
    packed = np.frombuffer(body, dtype=np.uint8)
    return wire.settle(wire.receive(packed[None], dim)[0])


def write_levels(levels: np.ndarray, wire: Wire) -> bytes:
    """What `read_levels` reads."""
    return wire.send(levels[None]).tobytes()


def within(levels: np.ndarray, steps: Norms) -> np.ndarray:
    """Cut towards zero until ‖·‖₁, ‖·‖₂ and ‖·‖∞ are kept; what keeps them is untouched."""
    size = np.abs(levels.astype(np.float64))
    lengths = (size.sum(), math.sqrt(float((size * size).sum())), size.max(initial=0.0))
    limits = (steps.l1, steps.l2, steps.linf)
    if all(length <= limit for length, limit in zip(lengths, limits, strict=True)):
        return levels
    share = min(limit / length for length, limit in zip(lengths, limits, strict=True) if length)
    return np.asarray(np.trunc(levels * (share * MARGIN)), dtype=np.int64)


def _has_its_types(message: Message) -> bool:
    whole = type(message.client) is int and type(message.round) is int
    return whole and isinstance(message.nonce, bytes) and isinstance(message.body, bytes)


def _is_count(examples: object) -> bool:
    whole = isinstance(examples, int) and not isinstance(examples, bool)
    return whole and examples in range(MOST_EXAMPLES + 1)


def _refuse_masked(recipe: Recipe) -> None:
    """What one who must see the sum alone is not to see."""
    if recipe.view == "sum":
        raise UserError(
            f"{recipe.name} is for view 'sum', but a reception sees every message by itself, which "
            "is view 'messages'; use a recipe for that view, or secure aggregation in its place."
        )


def _refuse_amplified(recipe: Recipe) -> None:
    """What holds only if every message arrives, which nobody can promise of clients."""
    if recipe.noise.at == "client" and recipe.hidden(recipe.view):
        raise UserError(
            f"{recipe.name}: noise of the clients towards view '{recipe.view}' is accounted as if "
            "nobody saw who takes part, but a missing message aborts the round, which the models "
            "show. Use noise at the server, view 'messages', or a cohort with `honest`."
        )


def _refuse_floats_with_noise(recipe: Recipe) -> None:
    if recipe.noise.at == "client" and not recipe.noise.on_messages:
        raise UserError(
            f"{recipe.name}: noise {type(recipe.noise).__name__} at the clients is drawn with the "
            "sum in a simulation and has no form as a message; use noise at the server, or a noise "
            "of whole numbers."
        )
