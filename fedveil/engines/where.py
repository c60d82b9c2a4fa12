"""Says why a model cannot run: the reason, the line or layer that stands in the way, the change."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

from torch import nn

from fedveil.models.references import LIBRARIES

# Messages of torch (by a pattern), what they mean for a model, and what to change.
KNOWN = (
    (
        r"calling \.item\(\)",
        "it reads the value of a tensor with .item(), which differs between examples",
        "Keep it as a tensor",
    ),
    (
        "data-dependent control flow",
        "it branches on the value of a tensor, which differs between examples",
        "Compute both sides and choose with torch.where",
    ),
    (
        "dynamic shape",
        "the number of selected entries depends on their values",
        "Keep all entries and multiply by the mask, or use torch.where",
    ),
    (
        "doesn't have storage|Cannot access data pointer",
        "it leaves torch, such as with .numpy()",
        "Use operations of torch",
    ),
    (
        "accessing `data`",
        "it reads or writes .data",
        "Use the tensor itself, and write to no parameter",
    ),
    (
        "override the setup_context staticmethod|generate_vmap_rule",
        "its autograd.Function has no rule for vmap",
        "Define setup_context, and set generate_vmap_rule = True",
    ),
    (
        "does not require grad",
        "its outputs have no gradient",
        "Return numbers computed from the parameters, without .detach() or argmax",
    ),
    (
        "leaf Variable that requires grad is being used in an in-place|being modified inplace",
        "it writes to a parameter",
        "Compute a new tensor instead",
    ),
    (
        "not implemented for sparse tensors",
        "it has sparse gradients",
        "Use sparse=False",
    ),
    (
        "deepcopy protocol",
        "an attribute is a tensor that was computed from parameters",
        "Use torch.nn.utils.parametrizations, such as their weight_norm",
    ),
    (
        r"batching rule for aten::_*(?P<name>\w+)",
        "torch.func.vmap does not support {name}",
        "Use other operations",
    ),
)


def explained(problem: BaseException) -> str:
    """Why a model cannot run, the line that stands in the way, and the change if one is known."""
    message = str(problem).partition("\n")[0].rstrip(". ") or type(problem).__name__
    for pattern, reason, change in KNOWN:
        if found := re.search(pattern, message):
            return f"{reason.format(**found.groupdict())}{place_of(problem)}. {change}"
    return f"{message}{place_of(problem)}"


def place_of(problem: BaseException) -> str:
    """', at forward (net.py, line 12: y = x[x > 0])', or the layer if only libraries have lines.

    Empty if there is neither.
    """
    line = layer = ""
    for frame, number in traceback.walk_tb(problem.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in LIBRARIES:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and not list(owner.children()):
                layer = f", in the layer {owner}"
            continue
        code = frame.f_code
        text = linecache.getline(code.co_filename, number, frame.f_globals).strip()
        where = f"{Path(code.co_filename).name}, line {number}" + (f": {text}" if text else "")
        line = f", at {code.co_name} ({where})"
    return line or layer
