"""Devices: local training on a GPU; data, noise, sums and state stay on the CPU.

An engine runs where its model is. A group's batches are copied there, and only norms, sums and, if
a part needs them, rows come back: a few transfers for each group, none for each client.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedveil.engines.ranks import machine_size
from fedveil.engines.task import Task
from fedveil.engines.updates import DenseUpdates, Engine, Group, Updates
from fedveil.errors import UserError

CPU = torch.device("cpu")
SHARE = 0.5  # of a device's free memory that a group may fill


def device_of(name: str) -> torch.device:
    """The device of this name; `auto` is the first of cuda, mps and cpu that is available.

    In a process started by torchrun, `cuda` is the GPU of the process's local rank. Two processes
    never share a GPU: NCCL, which adds their sums, does not allow it.

    >>> device_of("cpu")
    device(type='cpu')
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise UserError(
            f"There is no device '{name}'. Use auto, cpu, cuda, cuda:1 (any number) or mps."
        )
    if name == "auto":
        name = "cuda" if _count() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("The device 'mps' is not available here. Use device 'cpu' or 'auto'.")
    if not name.startswith("cuda"):
        return torch.device(name)
    _refuse_sharing(name, machine_size())
    index = int(name.partition(":")[2] or os.environ.get("LOCAL_RANK", "0"))
    if index >= _count():
        raise UserError(
            f"The device 'cuda:{index}' is not available: torch finds {_count()} CUDA devices. "
            "Use another number, or device 'cpu' or 'auto'."
        )
    return torch.device("cuda", index)


def _refuse_sharing(name: str, processes: int) -> None:
    """Refuse fewer GPUs than processes on this machine."""
    if processes > 1 and ":" in name:
        raise UserError(
            f"The device '{name}' is one GPU, but torchrun started {processes} processes on this "
            "machine, and each needs its own. Use device 'cuda', which takes the GPU of each "
            "process's local rank."
        )
    if processes > max(1, _count()):
        raise UserError(
            f"torchrun started {processes} processes on this machine, but torch finds {_count()} "
            "CUDA devices, and each process needs its own. Start fewer processes "
            "(--nproc-per-node), or use device 'cpu'."
        )


def has_float64(device: torch.device) -> bool:
    """Whether a device computes with float64; MPS does not."""
    return device.type != "mps"


def refuse_float64(task: Task, device: torch.device) -> None:
    """Refuse a model or inputs of float64 on a device that does not have it."""
    if has_float64(device):
        return
    named = [*task.module.named_parameters(), *task.module.named_buffers()]
    found = [f"'{name}' of the model" for name, leaf in named if leaf.dtype == torch.float64]
    fields = () if task.layout is None else task.layout.fields
    found += [f"the input '{each.name}'" for each in fields if each.dtype == torch.float64]
    if found:
        raise UserError(
            f"The device '{device.type}' has no float64, which is the type of {found[0]}. Convert "
            "it to float32 (model.float()), or use device 'cpu'."
        )


def _count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def room(device: torch.device) -> int | None:
    """float32 numbers that a group may fill on a device; None on the CPU, where caches decide."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.mem_get_info(device)[0]) // 4
    if device.type == "mps":
        used = torch.mps.driver_allocated_memory()
        return int(SHARE * max(0, torch.mps.recommended_max_memory() - used)) // 4
    return None


@dataclass(frozen=True, eq=False)
class PlacedEngine:
    """An engine whose model is on another device than the loop."""

    inner: Engine
    device: torch.device
    float64: bool = True  # whether the device has it; MPS does not

    @classmethod
    def on(cls, engine: Engine, device: torch.device) -> Engine:
        """The engine itself on the CPU, or placed on another device."""
        return engine if device == CPU else cls(engine, device, has_float64(device))

    @property
    def name(self) -> str:
        """The name of the engine inside."""
        return self.inner.name

    @property
    def group_size(self) -> int:
        """That of the engine inside."""
        return self.inner.group_size

    @property
    def least_group(self) -> int:
        """That of the engine inside."""
        return self.inner.least_group

    def updates(self, x: Tensor, group: Group) -> Updates:
        """Computed on the device. One without float64 gives its rows to the CPU."""
        found = self.inner.updates(x.to(self.device), replace(group, device=self.device))
        if not self.float64:
            return DenseUpdates(found.rows().to(CPU))
        return PlacedUpdates(found, self.device)


@dataclass(frozen=True, eq=False)
class PlacedUpdates:
    """Updates on a device, whose norms, sums and rows come back to the CPU."""

    held: Updates
    device: torch.device

    def norms(self) -> Tensor:
        """As the engine's, on the CPU."""
        return self.held.norms().to(CPU)

    def weighted_sum(self, scale: Tensor) -> Tensor:
        """As the engine's, on the CPU."""
        return self.held.weighted_sum(scale.to(self.device)).to(CPU)

    def dots(self, vector: Tensor) -> Tensor:
        """As the engine's, on the CPU."""
        return self.held.dots(vector.to(self.device)).to(CPU)

    def rows(self) -> Tensor:
        """As the engine's, on the CPU."""
        return self.held.rows().to(CPU)

    def affine(self, scale: float, share: float, x: Tensor) -> Updates:
        """On the device."""
        return PlacedUpdates(self.held.affine(scale, share, x.to(self.device)), self.device)
