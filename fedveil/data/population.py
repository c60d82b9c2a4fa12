"""population: the public facts about clients whose examples are elsewhere, as a `Federated`.

A federation's server has no examples. Model, noise, guarantee and ledger need only public facts:
how many clients there are, and the shapes of an example. Reading an example is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Never

import torch

from fedveil.data.columns import Index
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import REAL, Origin
from fedveil.errors import UserError
from fedveil.models.losses import target_of


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A column that clients keep to themselves: its shape is known, its entries are not."""

    shape: torch.Size
    dtype: torch.dtype
    account: str  # identifies whose examples they are
    limits: tuple[float, float]
    elsewhere: ClassVar = True

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index, /) -> Never:
        raise UserError(
            "The examples of a federation are with its clients and cannot be read here. Compute "
            "with them in the clients' own processes."
        )

    def digest(self) -> str:
        """Identifies the owners, not the examples."""
        return self.account

    def span(self) -> tuple[float, float]:
        """The limits that the public facts imply."""
        return self.limits


def population(
    name: str,
    clients: int,
    inputs: tuple[int, ...],
    classes: int,
    account: str,
    loss: str = "cross_entropy",
    tokens: bool = False,
    class_names: tuple[str, ...] = (),
    test: Examples | None = None,
    origin: Origin = REAL,
    unit: str = "client",
) -> Federated:
    """`clients` units with examples of these shapes; `account` identifies who they are.

    >>> population("ward", 12, (3,), 2, "a study of twelve")
    <Federated ward: 12 clients, examples elsewhere, 2 classes>
    """
    kind = torch.int64 if tokens else torch.float32
    target = torch.int64 if target_of(loss) == "class" else torch.float32
    wide = inputs if tokens else ()
    most = max(classes - 1, 0)
    given = Elsewhere(torch.Size((clients, *inputs)), kind, account, (0, most))
    asked = Elsewhere(torch.Size((clients, *wide)), target, account, (0, most))
    nothing = Examples(torch.zeros(0, *inputs, dtype=kind), torch.zeros(0, *wide, dtype=target))
    return Federated(
        name, given, asked, torch.arange(clients + 1), test or nothing, classes, loss,
        unit, class_names=class_names, origin=origin,
    )  # fmt: skip
