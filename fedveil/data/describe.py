"""Sizes and classes per client of a split. For simulations only: it reads private data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedveil.data.federated import Federated, blocks
from fedveil.serialization.arguments import for_python

BLOCK = 2**18  # examples counted at a time


@dataclass(frozen=True)
class ClientTable:
    """Summary of clients × classes. The counts are exact, so they are not private."""

    name: str
    clients: int
    examples: int
    smallest: int
    median: float
    largest: int
    classes_per_client: dict[int, int]  # distinct classes → number of clients; {} for sequences
    class_totals: tuple[int, ...]  # examples of each class; () for sequences and number targets

    def __str__(self) -> str:
        span = f"min {self.smallest}, median {self.median:g}, max {self.largest}"
        lines = [
            f"{self.name}: {self.clients} clients, {self.examples} examples",
            f"examples per client   {span}",
        ]
        if self.class_totals:
            counts = ", ".join(f"{k}: {v}" for k, v in self.classes_per_client.items())
            totals = ", ".join(str(n) for n in self.class_totals)
            lines += [f"clients by classes    {counts}", f"examples per class    {totals}"]
        return "\n".join(lines)


@for_python
def describe(federated: Federated) -> ClientTable:
    """Count clients × classes of the data `federated`. The counts are exact: do not release them.

    >>> import fedveil as fv
    >>> fv.describe(fv.load("digits").split(fv.Iid(100))).clients
    100
    """
    sizes = federated.sizes.numpy()
    spread, totals = _classes(federated, sizes)
    return ClientTable(
        name=federated.name,
        clients=federated.clients,
        examples=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=float(np.median(sizes)),
        largest=int(sizes.max()),
        classes_per_client=spread,
        class_totals=totals,
    )


def _classes(federated: Federated, sizes: np.ndarray) -> tuple[dict[int, int], tuple[int, ...]]:
    """Count a block of clients at a time, so that only their labels are in memory."""
    labels, classes = federated.labels, federated.classes
    if len(labels.shape) != 1 or labels.dtype.is_floating_point:
        return {}, ()
    spread = np.zeros(classes + 1, dtype=np.int64)
    totals = np.zeros(classes, dtype=np.int64)
    for first, last in blocks(federated.offsets.numpy(), BLOCK):
        mine = labels[int(federated.offsets[first]) : int(federated.offsets[last])].numpy()
        owner = np.repeat(np.arange(last - first), sizes[first:last])
        pairs = np.unique(owner * classes + mine)  # the pairs (client, class) that occur
        distinct = np.bincount(pairs // classes, minlength=last - first)
        spread += np.bincount(distinct, minlength=classes + 1)
        totals += np.bincount(mine, minlength=classes)
    counted = {number: int(clients) for number, clients in enumerate(spread) if clients}
    return counted, tuple(totals.tolist())
