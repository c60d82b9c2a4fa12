from __future__ import annotations

import numpy as np
import pytest
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


def test_counting_block_by_block_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels, keys = torch.from_numpy(rng.integers(3, size=200)), np.sort(rng.integers(40, size=200))
    federated = dataset(labels, keys.tolist()).split(ByKey())
    at_once = describe(federated)
    for block in (1, 7):
        monkeypatch.setattr("fedveil.data.describe.BLOCK", block)
        assert describe(federated) == at_once
    assert sum(at_once.classes_per_client.values()) == federated.clients


def test_sequences_have_no_classes() -> None:
    table = describe(dataset(torch.zeros(4, 2, dtype=torch.int64), [0, 0, 1, 1]).split(ByKey()))
    assert table.class_totals == ()
    assert len(str(table).splitlines()) == 2
