"""LoRA: low-rank adapters beside frozen layers.  Hu et al. 2022.

Only the adapters are trained, so only they have noise, messages and memory for each client.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.serialization.arguments import for_python


class LowRank(nn.Module):
    """y = layer(x) + (α/r)·x·Aᵀ·Bᵀ with a frozen layer, A [r, in] and B [out, r].

    B starts at 0, so the first outputs are those of the layer.
    """

    def __init__(self, layer: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.layer = layer
        self.scale = alpha / rank
        size, out = _sizes(layer)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        self.down = nn.Parameter(weight.new_zeros(rank, size))
        self.up = nn.Parameter(weight.new_zeros(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] → […, out]."""
        inner = nn.functional.linear(x, self.down)
        added: Tensor = self.layer(x) + nn.functional.linear(inner, self.up) * self.scale
        return added

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The layer with W + (α/r)·BA as its weight."""
        layer = copy.deepcopy(self.layer)
        change = self.up @ self.down * self.scale
        weight = layer.weight
        assert isinstance(weight, Tensor)
        weight.add_(change.T if _turned(layer) else change)
        return layer


@for_python
def lora(
    model: nn.Module,
    rank: int = 8,
    targets: Sequence[str] | None = None,
    alpha: float | None = None,
    freeze_a: bool = False,
    also: Sequence[str] = (),
    seed: int = 0,
) -> nn.Module:
    """A copy of the model in which only adapters of this rank are trained.

    `targets` are layer names, or their last parts; by default all linear layers (nn.Linear and
    Hugging Face's Conv1D). `also` names layers that are trained as they are, such as a new head.
    alpha is α, by default the rank. With `freeze_a` only B is trained (FFA-LoRA, Sun et al. 2024):
    the update is then linear in what is trained, so noise is not multiplied by itself, and messages
    are about half as long.

    >>> small = lora(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), rank=2, targets=["0"])
    >>> [name for name, leaf in small.named_parameters() if leaf.requires_grad]
    ['0.down', '0.up']
    """
    if rank < 1:
        raise UserError(f"The rank is {rank}; it must be at least 1.")
    adapted = copy.deepcopy(model)
    names = _chosen(adapted, targets)
    trained = {name for name, _ in adapted.named_modules() if _named(name, also)}
    for name, leaf in adapted.named_parameters():
        leaf.requires_grad_(any(name.startswith(f"{part}.") for part in trained))
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        layer = LowRank(adapted.get_submodule(name), rank, rank if alpha is None else alpha)
        _start(layer, generator)
        layer.down.requires_grad_(not freeze_a)
        parent, _, last = name.rpartition(".")
        setattr(adapted.get_submodule(parent), last, layer.train(layer.layer.training))
    return adapted


@for_python
def merge(model: nn.Module) -> nn.Module:
    """A copy of the model whose adapters are added to the weights of their layers."""
    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LowRank):
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, layer.merged())
    return plain


def _start(layer: LowRank, generator: torch.Generator) -> None:
    """A ~ U(±1/√in), B = 0; drawn on the CPU, so that every device starts equal."""
    bound = 1 / math.sqrt(layer.down.shape[1])
    fresh = torch.empty(layer.down.shape).uniform_(-bound, bound, generator=generator)
    with torch.no_grad():
        layer.down.copy_(fresh)


def _chosen(model: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """The names of the layers that get adapters."""
    inside = _hidden(model)
    linear = {name: part for name, part in model.named_modules() if _linear(part)}
    linear = {name: part for name, part in linear.items() if name and name not in inside}
    for target in targets or ():
        if not any(_named(name, [target]) for name in linear):
            have = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise UserError(
                f"The model {type(model).__name__} has no linear layer '{target}' that an adapter "
                f"can be added to. Choose among its layers: {have}."
            )
    found = [name for name in linear if targets is None or _named(name, targets)]
    if not found:
        raise UserError(
            f"The model {type(model).__name__} has no linear layer that can be adapted. Use a "
            "model with nn.Linear layers."
        )
    return found


def _hidden(model: nn.Module) -> set[str]:
    """Layers whose weights nn.MultiheadAttention reads itself, without calling them."""
    return {
        f"{name}.{child}".lstrip(".")
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention)
        for child, _ in part.named_children()
    }


def _named(name: str, parts: Sequence[str]) -> bool:
    """Whether a layer has one of these names, or ends with one."""
    return any(name == part or name.endswith(f".{part}") for part in parts)


def _linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or _turned(layer)


def _turned(layer: nn.Module) -> bool:
    """Whether this is Hugging Face's Conv1D, whose weight is [in, out]."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """The numbers of inputs and outputs."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    first, second = weight.shape
    return (first, second) if _turned(layer) else (second, first)
