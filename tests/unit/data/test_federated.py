"""The same examples are known again, in memory, in files or made on demand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedveil.data import federated
from fedveil.data.federated import Federated
from fedveil.data.save import save_federated
from fedveil.data.saved import open_federated
from fedveil.data.synthetic import synthetic


def shuffled(data: Federated) -> Federated:
    """The same examples for two clients, in another order, in memory."""
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
    halves = torch.tensor([0, len(order) // 2, len(order)])
    inputs, labels = data.inputs[order], data.labels[order]
    return Federated(data.name, inputs, labels, halves, data.test, data.classes)


def test_contents_are_those_of_the_examples_wherever_they_are(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_federated(blobs, tmp_path / "saved")
    made = synthetic(clients=7, examples=3, features=5)
    wanted = [blobs.contents(), made.contents()]
    assert len({*wanted, blobs.fingerprint()}) == 3
    monkeypatch.setattr(federated, "BLOCK", 7)  # one example at a time
    for data, known in zip((blobs, made), wanted, strict=True):
        assert shuffled(data).contents() == known
        assert data.by_example().contents() == known
    assert open_federated(tmp_path / "saved").contents() == wanted[0]


def test_one_number_changed_is_other_contents(blobs: Federated) -> None:
    inputs = blobs.inputs[:].clone()
    inputs[3, 2] += 1e-6
    data = Federated("blobs", inputs, blobs.labels, blobs.offsets, blobs.test, 3)
    assert data.contents() != blobs.contents()


def test_a_large_population_is_not_read_to_be_known_in_another_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(*_: object) -> None:
        pytest.fail("it was read")

    data = synthetic(clients=1_000_000)
    monkeypatch.setattr("fedveil.data.synthetic.Inputs.__getitem__", read)
    monkeypatch.setattr("fedveil.data.synthetic.Labels.__getitem__", read)
    assert data.contents() == data.by_example().contents()
    assert data.contents() != synthetic(clients=1_000_000, seed=1).contents()
