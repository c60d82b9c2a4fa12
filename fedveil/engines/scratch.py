"""Buffers that a thread reuses instead of allocating new memory at every step."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

_mine = threading.local()


def scratch(role: str, device: torch.device, *shape: int) -> Tensor:
    """A float32 buffer of this shape; overwrites what the thread last stored under this role."""
    held: dict[tuple[str, torch.device], Tensor] = _mine.__dict__.setdefault("held", {})
    count, place = math.prod(shape), (role, device)
    if place not in held or len(held[place]) < count:
        held[place] = torch.empty(count, device=device)
    return held[place][:count].view(shape)


def free() -> None:
    """Release this thread's buffers."""
    _mine.__dict__.clear()
