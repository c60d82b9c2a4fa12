"""A batch costs the bytes of its own examples, whatever the strides of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedveil.data.federated import Dataset, Examples
from fedveil.data.partition import Iid
from fedveil.engines.updates import taken

EXAMPLES = 500


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation writes to new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        known = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        answer = func(*args, **(kwargs or {}))
        new = {_memory(t): t for t in tree_leaves(answer) if isinstance(t, Tensor)}
        self.written += sum(t.nbytes for place, t in new.items() if place not in known)
        return answer


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plain() -> Tensor:
    return torch.arange(EXAMPLES * 48, dtype=torch.float32).reshape(EXAMPLES, 3, 4, 4)


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": plain,
    "a transposed view": lambda: plain().permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "channels last": lambda: plain().to(memory_format=torch.channels_last),
    "every second example": lambda: plain().repeat_interleave(2, dim=0)[::2],
    "examples last": lambda: plain().permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_touches_the_bytes_of_its_examples_alone(layout: str) -> None:
    inputs, rows = LAYOUTS[layout](), torch.tensor([[3, 490], [7, 7]])
    with CountedBytes() as counted:
        batch = taken(inputs, rows)
    assert torch.equal(batch, plain()[rows])
    assert batch.is_contiguous()
    assert batch.nbytes <= counted.written <= 2 * batch.nbytes + rows.nbytes
    assert counted.written < inputs.nbytes / 10  # what a copy of the whole column would exceed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_stores_every_example_as_one_block(layout: str) -> None:
    every = Examples(LAYOUTS[layout](), torch.zeros(EXAMPLES, dtype=torch.int64))
    data = Dataset("images", every, every, 1).split(Iid(10))
    assert data.inputs[:].is_contiguous()
