"""The logits among the outputs of a module: a tensor, a tuple, a dictionary or a ModelOutput."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fedveil.errors import UserError


def logits_of(outputs: object, module: nn.Module) -> Tensor:
    """A tensor itself, the entry `logits` of a mapping, or the first tensor of a tuple.

    >>> import torch
    >>> logits_of({"loss": None, "logits": torch.ones(2)}, nn.Identity())
    tensor([1., 1.])
    """
    if isinstance(outputs, Tensor):
        return outputs
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif isinstance(outputs, tuple | list):
        named = getattr(outputs, "logits", None)  # a named tuple
        found = (
            next((x for x in outputs if isinstance(x, Tensor)), None) if named is None else named
        )
    if not isinstance(found, Tensor):
        raise UserError(
            f"The model {type(module).__name__} returns a {type(outputs).__name__} without logits. "
            "Return a tensor, a tuple that starts with one, or a dictionary with 'logits'."
        )
    return found
