"""Memory that a thread uses again and again, instead of asking for new pages at every step."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_mine = threading.local()


def scratch(role: str, *shape: int) -> Tensor:
    """Room for float32 numbers of this shape; what the thread last kept in this role is gone."""
    held: dict[str, Tensor] = _mine.__dict__.setdefault("held", {})
    count = math.prod(shape)
    if role not in held or len(held[role]) < count:
        held[role] = torch.empty(count)
    return held[role][:count].view(shape)


def free() -> None:
    """Give this thread's memory back."""
    _mine.__dict__.clear()
