"""A pretend GPU: its tensors compute on the CPU, and refuse tensors of the CPU.

It has values, so whole rounds run on it and can be compared. As on a real GPU, an operation on both
kinds of tensors raises, except for numbers (0 dimensions), and so does `.numpy()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretend"
READS = torch.ops.aten._local_scalar_dense.default  # such as .item() and bool()
WAITED: list[str] = []  # operations for which the CPU must wait for the device
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class MixedDevicesError(RuntimeError):
    """An operation got tensors of the CPU and of the pretend GPU."""


class OnDevice(Tensor):
    """A tensor of the pretend GPU; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        made: OnDevice = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=f"{NAME}:0",
        )  # fmt: skip
        made.held = held
        return made

    def __init__(self, held: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {}, frozenset())


class Pretending(TorchDispatchMode):
    """Creates tensors of the pretend GPU where it is asked for."""

    def __init__(self, refused: frozenset[torch.dtype]) -> None:
        super().__init__()
        self.refused = refused  # types that the device does not have

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and asking costs more than the operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if OnDevice not in types and kwargs.get("device") is None:  # on the CPU alone
            return func(*args, **kwargs)
        return _computed(func, args, kwargs, self.refused)


def _computed(func: Any, args: Any, kwargs: dict[str, Any], refused: frozenset[Any]) -> Any:
    mine: list[OnDevice] = []
    others: list[Tensor] = []

    def plain(x: Tensor) -> Tensor:
        if isinstance(x, OnDevice):
            mine.append(x)
            return x.held
        if x.dim() > 0:
            others.append(x)
        return x

    bare, named = _mapped(plain, args), _mapped(plain, kwargs)
    if mine and others and func not in COPIES:
        raise MixedDevicesError(f"{func} got tensors of the device and of the CPU")
    asked = kwargs.get("device")
    there = bool(mine) if asked is None else torch.device(asked).type == NAME
    if func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], OnDevice)
    if asked is not None:
        named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
    if mine and (func is READS or not there):
        WAITED.append(str(func))
    answer = func(*bare, **named)
    if mine and torch.Tag.inplace_view in func.tags:  # such as squeeze_: the wrapper changes too
        with no_dispatch():
            func(*args, **kwargs)
    if not there:
        return answer
    known = {id(x.held): x for x in mine}

    def placed(x: Tensor) -> Tensor:
        if x.dtype in refused:
            raise TypeError(f"the device has no {x.dtype}")
        return known[id(x)] if id(x) in known else OnDevice(x)

    return _mapped(placed, answer)


def _mapped(change: Callable[[Tensor], Tensor], x: Any) -> Any:
    """x with every tensor changed, in tuples, lists and dictionaries too."""
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, (tuple, list)):
        return type(x)(_mapped(change, each) for each in x)
    if isinstance(x, dict):
        return {key: _mapped(change, each) for key, each in x.items()}
    return x


@cache
def _register() -> None:
    """Make the device known to torch, once in a process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("pretend")


@contextmanager
def pretending(*refused: torch.dtype) -> Iterator[torch.device]:
    """The pretend GPU, on one thread; a type in `refused` raises there, as float64 on MPS."""
    _register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Backward passes on this thread too: torch starts the threads of devices only once.
        with torch.autograd.set_multithreading_enabled(False), Pretending(frozenset(refused)):
            yield torch.device(NAME, 0)
    finally:
        torch.set_num_threads(threads)
