from __future__ import annotations

import numpy as np
import torch

from fedveil.data.describe import describe
from fedveil.data.federated import Dataset, Examples
from fedveil.data.partition import ByKey


def dataset(labels: torch.Tensor, keys: list[int]) -> Dataset:
    part = Examples(torch.zeros(len(labels), 1), labels)
    return Dataset("tiny", part, part, 3, keys=np.array(keys))


def test_counts() -> None:
    federated = dataset(torch.tensor([0, 0, 1, 2, 2, 2]), [0, 0, 0, 0, 1, 2]).split(ByKey())
    table = describe(federated)
    assert (table.clients, table.examples) == (3, 6)
    assert (table.smallest, table.median, table.largest) == (1, 1.0, 4)
    assert table.classes_per_client == {1: 2, 3: 1}
    assert table.class_totals == (2, 1, 3)
    assert str(table) == (
        "tiny: 3 clients, 6 examples\n"
        "examples per client   min 1, median 1, max 4\n"
        "clients by classes    1: 2, 3: 1\n"
        "examples per class    2, 1, 3"
    )


def test_sequences_have_no_classes() -> None:
    table = describe(dataset(torch.zeros(4, 2, dtype=torch.int64), [0, 0, 1, 1]).split(ByKey()))
    assert table.class_totals == ()
    assert len(str(table).splitlines()) == 2
