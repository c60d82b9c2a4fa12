"""Task: a module and a loss as functions of one flat parameter vector."""

from __future__ import annotations

import copy
import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedveil.data.federated import Examples
from fedveil.errors import UserError, unknown
from fedveil.models.losses import LOSSES, SLOPES, correct
from fedveil.models.side_effects import Footprint
from fedveil.threads import one_thread_each

Parameters = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """x ∈ R^dim ↔ the module's named parameters, and the mean loss of a batch."""

    module: nn.Module
    loss_name: str
    shapes: dict[str, torch.Size] = field(init=False)
    loss_of_examples: Callable[[Tensor, Tensor], Tensor] = field(init=False)
    slope_of_losses: Callable[[Tensor, Tensor, Tensor], Tensor] = field(init=False)
    _own: threading.local = field(init=False, default_factory=threading.local)
    _copies: list[tuple[nn.Module, Footprint]] = field(init=False, default_factory=list)
    _witness: list[tuple[Tensor, Examples, Tensor]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.loss_name not in LOSSES:
            raise unknown("loss", self.loss_name, LOSSES)
        shapes = {name: leaf.shape for name, leaf in self._trained()}
        if not shapes:
            raise UserError(
                f"{type(self.module).__name__} has no parameters to train; "
                "give a module with parameters that require gradients."
            )
        self.module.eval()  # a module's training mode is for layers that mix or drop examples
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "loss_of_examples", LOSSES[self.loss_name])
        object.__setattr__(self, "slope_of_losses", SLOPES[self.loss_name])
        self._own.module = self.module

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not frozen; frozen ones stay as the module has them."""
        named = self.module.named_parameters()
        return [(name, leaf) for name, leaf in named if leaf.requires_grad]

    @property
    def dim(self) -> int:
        """How many numbers the model has."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def flatten(self) -> Tensor:
        """The module's parameters as one new float32 vector."""
        leaves = [leaf.detach().reshape(-1) for _, leaf in self._trained()]
        return torch.cat(leaves).to(torch.float32, copy=True)

    @torch.no_grad()
    def fingerprint(self, x: Tensor, example: Tensor) -> str:
        """Of the module and all it holds, the loss, the first model, and how the module answers.

        It is asked about inputs of the example's shape, at x and beside it: two modules may look
        alike and compute different things.
        """
        digest = hashlib.sha256(f"{self.module}{self.shapes}{self.loss_name}".encode())
        probe = torch.ones(2, *example.shape, dtype=example.dtype)
        beside = x + 0.1 * torch.rand(len(x), generator=torch.Generator().manual_seed(0))
        answers = [self.outputs(self.at(model), probe) for model in (x, beside)]
        for part in [*self.module.state_dict().values(), x, *answers]:
            digest.update(part.detach().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def unflatten(self, flat: Tensor) -> Parameters:
        """Views of [..., dim] as named parameters [..., *shape]."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        pieces = torch.split(flat, sizes, dim=-1)
        lead = flat.shape[:-1]
        return {
            name: piece.reshape(lead + shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def at(self, x: Tensor) -> Parameters:
        """The parameters of a copy of x: whatever a module writes into them, x stays as it is."""
        return self.unflatten(x.clone())

    def here(self) -> tuple[nn.Module, dict[int, str]]:
        """This thread's copy of the module, and the names of its trained parameters by id.

        A module is not to be used by two threads at once: `functional_call` puts other parameters
        into it for a while.
        """
        if not hasattr(self._own, "module"):
            self._own.module = _copied(self.module)
            self._copies.append((self._own.module, self._footprint(self._own.module)))
        module: nn.Module = self._own.module
        named = module.named_parameters()
        return module, {id(leaf): name for name, leaf in named if name in self.shapes}

    def watch(self, witness: Examples) -> None:
        """From now on, `refuse_side_effects` refuses a module that calls have changed."""
        modules = {id(module): module for module in (self.module, *(m for m, _ in self._copies))}
        self._copies[:] = [(module, self._footprint(module)) for module in modules.values()]
        x = self.flatten()
        self._witness[:] = [(x, witness, self._answer(self.module, x, witness))]

    def refuse_side_effects(self) -> None:
        """Raise `UserError` if a call has left a trace in any thread's copy of the module.

        Seen where Python can look, and by its answer to examples that it was asked about before.
        """
        for module, before in list(self._copies):
            before.refuse_change(module, self._footprint(module))
            for x, examples, answer in self._witness:
                if not torch.equal(self._answer(module, x, examples), answer):
                    raise UserError(
                        f"The model {type(module).__name__} answers the same examples differently "
                        "after other calls: it keeps something between them, which would carry one "
                        "client's data to others without noise. Use layers that keep no state."
                    )

    def _answer(self, module: nn.Module, x: Tensor, examples: Examples) -> Tensor:
        """A module's loss on examples and its gradient, with equal weights, on one thread."""
        leaves = {name: leaf.requires_grad_() for name, leaf in self.at(x).items()}
        with one_thread_each(), torch.enable_grad():
            outputs = functional_call(module, leaves, (examples.inputs[:],))
            loss = self.loss_of_examples(outputs, examples.labels[:]).sum()
            slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        numbers = torch.cat([loss.detach().reshape(1), *(part.reshape(-1) for part in slopes)])
        return numbers.nan_to_num()

    def _footprint(self, module: nn.Module) -> Footprint:
        return Footprint.of(module, self.shapes)

    def outputs(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """The module's answer under other parameters."""
        module, _ = self.here()
        answer: Tensor = functional_call(module, parameters, (inputs,))
        return answer

    def loss(
        self, parameters: Parameters, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> Tensor:
        """Σ weight·loss of a batch, its mean loss where the weights are equal shares."""
        losses = self.loss_of_examples(self.outputs(parameters, inputs), labels)
        return (losses * weights).sum()

    @torch.no_grad()
    def evaluate(self, x: Tensor, examples: Examples, batch: int = 2000) -> tuple[float, float]:
        """(mean loss, accuracy) on examples; accuracy is NaN for targets that are not classes."""
        parameters = self.at(x)
        loss = right = 0.0
        for start in range(0, len(examples), batch):
            inputs = examples.inputs[start : start + batch]
            labels = examples.labels[start : start + batch]
            outputs = self.outputs(parameters, inputs)
            loss += float(self.loss_of_examples(outputs, labels).sum())
            if self.loss_name == "cross_entropy":
                right += float(correct(outputs, labels).sum())
        count = len(examples) or 1
        return loss / count, right / count if self.loss_name == "cross_entropy" else math.nan


def _copied(module: nn.Module) -> nn.Module:
    """A module for another thread, which shares nothing that a call may change."""
    twin = copy.deepcopy(module)
    for name, part in twin.named_modules():
        if part is module.get_submodule(name):
            raise UserError(
                f"Copies of the model {type(module).__name__} share their part '{name}', so two "
                "threads would compute with each other's parameters. Leave __deepcopy__ out of it."
            )
    return twin
