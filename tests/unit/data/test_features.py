"""Features of a frozen network: each is a function of its own example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedveil.data import features
from fedveil.data.catalog import load
from fedveil.data.features import extracted
from fedveil.data.partition import Shards
from fedveil.errors import UserError


class Centred(nn.Module):
    """Mixes its batch."""

    def forward(self, x: Tensor) -> Tensor:
        """The inputs minus the batch's mean."""
        return x - x.mean(dim=0)


def test_inputs_become_features_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    whole = load("digits")
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.Dropout(0.5), nn.ReLU())
    monkeypatch.setattr(features, "BATCH", 100)  # the last batch is shorter
    found = extracted(whole, module)
    assert module.training
    module.eval()
    assert torch.allclose(found.train.inputs[:], module(whole.train.inputs[:]), atol=1e-5)
    assert found.test.inputs.shape == (len(whole.test), 5)
    assert torch.equal(found.train.labels[:], whole.train.labels[:])
    assert found.origin == whole.origin
    assert found.split(Shards(10, 5)).inputs.shape[1:] == (5,)


def test_a_module_that_mixes_its_batch_is_refused() -> None:
    with pytest.raises(UserError, match="depend on the others in its batch"):
        extracted(load("digits"), Centred())
