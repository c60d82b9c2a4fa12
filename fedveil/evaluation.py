"""evaluation.json: what the final model takes for what, and how well it serves each client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Federated, blocks
from fedveil.engines.task import Parameters, Task
from fedveil.models.losses import correct

MOST_CLIENTS = 10_000
MOST_EXAMPLES = 100_000  # of clients; about as much as a few looks at a test set
MOST_CLASSES = 200  # a larger table would not be read
BATCH = 2000  # examples


@torch.no_grad()
def evaluation(task: Task, x: Tensor, data: Federated) -> dict[str, Any] | None:
    """Confusion on the test examples and accuracy on each client's own; None without classes.

    Where there are many clients, evenly spaced ones are taken.
    """
    if task.loss_name != "cross_entropy":
        return None
    parameters = task.at(x)
    by_client = data.unit == "client"
    return {
        "classes": list(data.class_names or map(str, range(data.classes))),
        "confusion": _confusion(task, parameters, data),
        "client_accuracy": _client_accuracy(task, parameters, data) if by_client else None,
        "of": "training examples of clients",
    }


def _confusion(task: Task, parameters: Parameters, data: Federated) -> list[list[int]] | None:
    """counts[true][answered] over the test examples; every position of a sequence counts."""
    if not len(data.test) or data.classes > MOST_CLASSES:
        return None
    counts = torch.zeros(data.classes * data.classes, dtype=torch.int64)
    for start in range(0, len(data.test), BATCH):
        batch = slice(start, start + BATCH)
        answers = task.outputs(parameters, data.test.inputs[batch]).argmax(-1)
        pairs = data.test.labels[batch] * data.classes + answers
        counts += torch.bincount(pairs.flatten(), minlength=len(counts))
    table: list[list[int]] = counts.reshape(data.classes, data.classes).tolist()
    return table


def _client_accuracy(task: Task, parameters: Parameters, data: Federated) -> dict[str, list[Any]]:
    """Examples and accuracy of evenly spaced clients."""
    offsets = data.offsets.numpy()
    clients = evenly(data.clients, _affordable(data))
    sizes = offsets[clients + 1] - offsets[clients]
    accuracy: list[float] = []
    for first, last in blocks(np.concatenate([[0], np.cumsum(sizes)]), BATCH):
        spans = [np.arange(offsets[c], offsets[c + 1]) for c in clients[first:last]]
        right = np.concatenate(list(_right(task, parameters, data, np.concatenate(spans))))
        starts = np.cumsum([0, *map(len, spans[:-1])])
        accuracy += (np.add.reduceat(right, starts) / sizes[first:last]).tolist()
    return {"examples": sizes.tolist(), "accuracy": [round(value, 4) for value in accuracy]}


def _right(
    task: Task, parameters: Parameters, data: Federated, rows: np.ndarray
) -> Iterator[np.ndarray]:
    """1 for each of these examples that is answered rightly, else 0; a batch at a time."""
    for start in range(0, len(rows), BATCH):
        few = torch.from_numpy(rows[start : start + BATCH])
        outputs = task.outputs(parameters, data.inputs[few])
        yield correct(outputs, data.labels[few]).double().numpy()


def _affordable(data: Federated) -> int:
    mean = len(data.labels) / data.clients
    return max(1, min(MOST_CLIENTS, int(MOST_EXAMPLES / mean)))


def evenly(count: int, most: int) -> np.ndarray:
    """At most so many of 0 … count−1, evenly spaced, with both ends.

    >>> evenly(3, 10), evenly(100, 3)
    (array([0, 1, 2]), array([ 0, 50, 99]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
