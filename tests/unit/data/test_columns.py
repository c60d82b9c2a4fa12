"""A column on demand is indexed as a tensor is."""

from __future__ import annotations

import pytest
import torch

from fedveil.data.columns import OnDemand, digest, positions, span
from fedveil.data.federated import blocks

INDEXES = [
    0,
    -1,
    slice(None),
    slice(2, 5),
    slice(5, 2),
    slice(-3, None),
    slice(8, None, -2),
    torch.tensor(4),
    torch.tensor([], dtype=torch.int64),
    torch.tensor([[1, 1], [8, -9]]),
]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_positions_are_those_that_a_tensor_would_give(index: int | slice | torch.Tensor) -> None:
    every = torch.arange(9)
    reversed_ = isinstance(index, slice) and index.step == -2  # which tensors do not know
    wanted = torch.tensor([8, 6, 4, 2, 0]) if reversed_ else every[index]
    assert torch.equal(positions(index, 9), wanted)


@pytest.mark.parametrize("index", [9, -10, torch.tensor([3, 9]), torch.tensor([True, False])])
def test_what_is_no_position_is_an_index_error(index: int | torch.Tensor) -> None:
    with pytest.raises(IndexError):
        positions(index, 9)


def test_a_tensor_is_no_column_on_demand_and_tells_its_span_and_digest() -> None:
    tensor = torch.tensor([[3, -2], [7, 0]])
    assert not isinstance(tensor, OnDemand)
    assert span(tensor) == (-2, 7)
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor + 1)


def test_blocks_are_all_clients_in_order_and_as_large_as_they_may_be() -> None:
    sizes = torch.tensor([3, 1, 1, 9, 2, 2, 2, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).numpy()
    found = list(blocks(offsets, 5))
    assert found == [(0, 3), (3, 4), (4, 6), (6, 8)]
