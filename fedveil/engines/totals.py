"""The sum of a round's messages, and what was measured of each of them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedveil.accounting.norms import Norms
from fedveil.engines.processes import Team
from fedveil.wire import Wire


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured of each message of a round, in order: float64, [messages] each."""

    norms: Tensor  # ‖w_i‖ before the bound; NaN of a rejected one
    scales: Tensor  # ‖b_i‖/‖w_i‖, what the bound left of it
    cosines: Tensor  # of the angle to the last global update; NaN where nobody asked

    @classmethod
    def unknown(cls, messages: int) -> Measured:
        """Of messages of which nothing is known but that they were rejected."""
        return cls.unpacked(torch.full((3, messages), torch.nan, dtype=torch.float64))

    @classmethod
    def joined(cls, parts: Sequence[Measured]) -> Measured:
        """Of several groups, one after the other."""
        return cls.unpacked(torch.cat([cls.unknown(0).packed(), *(p.packed() for p in parts)], 1))

    def packed(self) -> Tensor:
        """As one tensor [3, messages], to be added up over processes."""
        return torch.stack([self.norms, self.scales, self.cosines])

    @classmethod
    def unpacked(cls, rows: Tensor) -> Measured:
        """What `packed` gave."""
        return cls(*rows)

    def of(self, chosen: Tensor) -> Measured:
        """Of some of the messages."""
        return self.unpacked(self.packed()[:, chosen])

    def __len__(self) -> int:
        return len(self.norms)


@dataclass
class Total:
    """The sum of messages, of a group or of a round, and what was seen on the way.

    On a grid sums are whole numbers: of the messages before their noise, and as received.
    """

    sum: Tensor
    received: np.ndarray | None = None
    wire: Wire | None = None
    sent: int = 0
    groups: list[Measured] = field(default_factory=list)
    short: int | None = None  # how many said that they were; None where norms are known
    noisy: bool = False  # whether `sum` has the clients' noise in it, as a server receives it
    message: Norms | None = None  # the norms that each message was held to; None: not known here

    @property
    def measured(self) -> Measured:
        """Of every message in order."""
        return Measured.joined(self.groups)

    @property
    def rejected(self) -> int:
        """How many updates were not finite."""
        return int(self.measured.norms.isnan().sum())

    def no_longer_than(self, threshold: float | None) -> int:
        """How many updates are short; rejected ones count as long."""
        if self.short is not None or threshold is None:
            return self.short or 0
        return int((self.measured.norms <= threshold).sum())

    def add(self, part: Total) -> None:
        """Take in the messages of a group."""
        self.sum += part.sum
        if part.received is not None:
            self.received = part.received + (0 if self.received is None else self.received)
        self.sent += part.sent
        self.groups += part.groups

    def add_up(self, team: Team, sends: np.ndarray, mine: slice) -> None:
        """Become the total of all processes: d numbers, and three for each message.

        What was seen of a message has a place of its own, which only its process fills.
        """
        team.add(self.sum)
        if self.wire is not None:
            self.received = np.zeros_like(self.sum) if self.received is None else self.received
            team.add(torch.from_numpy(self.received))
        first, count = int(sends[: mine.start].sum()), int(sends[mine].sum())
        numbers = torch.zeros(3 * int(sends.sum()) + 1, dtype=torch.float64)
        numbers[-1] = self.sent
        everyone = numbers[:-1].view(3, -1)
        everyone[:, first : first + count] = self.measured.packed()
        team.add(numbers)
        self.groups, self.sent = [Measured.unpacked(everyone)], int(numbers[-1])

    def lengths(
        self, noise: Tensor, released: Tensor, message: Norms, denominator: float
    ) -> tuple[float | None, float | None]:
        """‖Σ q_i‖ and ‖all noise‖ over the denominator; unknown if only the noisy sum is."""
        if self.noisy:
            return None, None
        clean = _as_numbers(self.sum, message)
        plain = self.wire is None and noise.is_floating_point()
        added = noise if plain else released - clean
        return float(clean.norm()) / denominator, float(added.norm()) / denominator

    def released(self, noise: Tensor, message: Norms) -> Tensor:
        """The received sum and the server's noise; whole numbers are added before anything else."""
        total = self.sum
        if self.wire is not None and self.received is not None:
            total = torch.from_numpy(self.wire.settle(self.received))
        if not noise.is_floating_point():
            return _as_numbers(total + noise, message)
        return _as_numbers(total, message) + noise


def _as_numbers(total: Tensor, message: Norms) -> Tensor:
    """A sum as numbers; on a grid it counts steps."""
    return total.double() if message.grid is None else total.double() * message.grid
