"""evaluation.json: the confusion matrix of the final model, and its accuracy per client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Examples, Federated, blocks
from fedveil.engines.task import Parameters, Task

MOST_CLIENTS = 10_000
MOST_EXAMPLES = 100_000  # of clients; takes about as long as a few evaluations on a test set
MOST_CLASSES = 200  # a larger matrix is not readable
BATCH = 2000  # examples at a time


@torch.no_grad()
def evaluation(
    task: Task,
    x: Tensor,
    data: Federated,
    own: Callable[[int], Tensor] | None = None,
    private: bool = False,
    silos: Callable[[int], Tensor] | None = None,
) -> dict[str, Any] | None:
    """The confusion matrix of the test examples and the accuracy on each client's own examples.

    None without classes. Of many clients, evenly spaced ones are evaluated. `own` gives the model
    of each client, if clients have models of their own. With `private` evaluations there is no
    matrix: nothing about test examples is computed without noise. `silos` gives the model by which
    each silo is scored on the test records that it held out, if these name their silo.
    """
    if task.loss_of_examples.target != "class":
        return None
    parameters = task.at(x)
    by_client = data.unit == "client"
    if own is None:
        accuracy = _client_accuracy(task, parameters, data) if by_client else None
    else:
        accuracy = _own_accuracy(task, own, data)
    return {
        "classes": list(data.class_names or map(str, range(data.classes))),
        "confusion": None if private else _confusion(task, parameters, data),
        "client_accuracy": accuracy,
        "of": "training examples of clients" + ("" if own is None else ", by their own models"),
        **({} if silos is None or private else _held_out(task, silos, data)),
    }


def _confusion(task: Task, parameters: Parameters, data: Federated) -> list[list[int]] | None:
    """counts[true][predicted] over the test examples, and over every position of a sequence."""
    if not len(data.test) or data.classes > MOST_CLASSES:
        return None
    counts = torch.zeros(data.classes * data.classes, dtype=torch.int64)
    for start in range(0, len(data.test), BATCH):
        batch = slice(start, start + BATCH)
        inputs = data.test.inputs[batch].to(task.device, copy=True)
        answers = task.outputs(parameters, inputs).argmax(-1).cpu()
        labels = data.test.labels[batch]
        pairs = (labels * data.classes + answers)[task.loss_of_examples.counted(labels)]
        counts += torch.bincount(pairs, minlength=len(counts))
    table: list[list[int]] = counts.reshape(data.classes, data.classes).tolist()
    return table


def _client_accuracy(task: Task, parameters: Parameters, data: Federated) -> dict[str, list[Any]]:
    """The number of examples and the accuracy of evenly spaced clients."""
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


def _own_accuracy(
    task: Task, own: Callable[[int], Tensor], data: Federated
) -> dict[str, list[Any]]:
    """The number of examples of evenly spaced clients, and the accuracy of their own models."""
    offsets, accuracy, sizes = data.offsets.numpy(), [], []
    for client in evenly(data.clients, _affordable(data)):
        rows = np.arange(offsets[client], offsets[client + 1])
        right = np.concatenate(list(_right(task, task.at(own(int(client))), data, rows)))
        accuracy.append(round(float(right.mean()), 4))
        sizes.append(len(rows))
    return {"examples": sizes, "accuracy": accuracy}


def _held_out(task: Task, model: Callable[[int], Tensor], data: Federated) -> dict[str, Any]:
    """The number of test records of each silo, and the accuracy on them by the silo's model."""
    owners, names = data.test.owners, data.names
    if owners is None or names is None:
        return {}
    sizes: list[int] = []
    accuracy: list[float | None] = []
    for silo in evenly(data.clients, MOST_CLIENTS):
        rows = torch.from_numpy(np.flatnonzero(owners.astype(str) == str(names[silo])))
        sizes.append(len(rows))
        some = Examples(data.test.inputs[rows], data.test.labels[rows], data.test.layout)
        found = task.evaluate(model(int(silo)), some)[1] if len(rows) else None
        accuracy.append(None if found is None else round(float(found), 4))
    return {"held_out": {"examples": sizes, "accuracy": accuracy}}


def _right(
    task: Task, parameters: Parameters, data: Federated, rows: np.ndarray
) -> Iterator[np.ndarray]:
    """1 for each correctly predicted example, else 0, one batch at a time."""
    for start in range(0, len(rows), BATCH):
        few = torch.from_numpy(rows[start : start + BATCH])
        outputs = task.outputs(parameters, data.inputs[few].to(task.device)).cpu()
        right = task.loss_of_examples.correct(outputs, data.labels[few])
        assert right is not None
        yield right.double().numpy()


def _affordable(data: Federated) -> int:
    mean = len(data.labels) / data.clients
    return max(1, min(MOST_CLIENTS, int(MOST_EXAMPLES / mean)))


def evenly(count: int, most: int) -> np.ndarray:
    """At most `most` of 0 … count−1, evenly spaced, with both ends.

    >>> evenly(3, 10), evenly(100, 3)
    (array([0, 1, 2]), array([ 0, 50, 99]))
    """
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
