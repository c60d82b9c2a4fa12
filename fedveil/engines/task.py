"""Task: a module and a loss as functions of one flat parameter vector."""

from __future__ import annotations

import copy
import hashlib
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fedveil.data.federated import Examples
from fedveil.data.fields import Layout
from fedveil.engines.dropout import Masks, RecordedMasks, example_seeds
from fedveil.engines.rewriting import FUSED, Rewriting, Unfused
from fedveil.errors import UserError
from fedveil.models.contents import Contents, contents
from fedveil.models.loss import Loss
from fedveil.models.losses import Own, as_loss
from fedveil.models.outputs import logits_of
from fedveil.models.side_effects import Footprint, draws
from fedveil.threads import one_thread_each

Parameters = dict[str, Tensor]
Footprints = tuple[Footprint, Footprint]  # of a module and of the loss


@dataclass(frozen=True, eq=False)
class Task:
    """x ∈ R^dim ↔ the module's named parameters, and the mean loss of a batch."""

    module: nn.Module
    loss_name: str
    layout: Layout | None = None  # of several inputs
    given: Loss | None = None  # instead of the loss of that name
    dtype: torch.dtype | None = None  # to which numeric inputs are converted
    shapes: dict[str, torch.Size] = field(init=False)
    loss_of_examples: Loss = field(init=False)
    slope_of_losses: Callable[[Tensor, Tensor, Tensor], Tensor] = field(init=False)
    contents: Contents | None = field(init=False, default=None)  # of a module not of fedveil's
    _own: threading.local = field(init=False, default_factory=threading.local)
    _copies: list[tuple[nn.Module, Footprints]] = field(init=False, default_factory=list)
    _witness: list[tuple[Tensor, Examples, Tensor]] = field(init=False, default_factory=list)
    _training: tuple[str, ...] = field(init=False)  # submodules given in training mode
    _dropouts: dict[tuple[object, ...], list[torch.Size]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        loss = self.given or as_loss(self.loss_name, "number")
        shapes = {name: leaf.shape for name, leaf in self._trained()}
        if not shapes:
            raise UserError(
                f"{type(self.module).__name__} has no parameters to train. "
                "Give a module with parameters that require gradients."
            )
        training = tuple(name for name, part in self.module.named_modules() if part.training)
        object.__setattr__(self, "_training", training)
        self.module.eval()  # except in local steps of a model with dropout (`local_steps`)
        object.__setattr__(self, "shapes", shapes)
        object.__setattr__(self, "loss_of_examples", loss)
        object.__setattr__(self, "slope_of_losses", loss.slope)
        self._own.module = self.module

    def read_contents(self) -> None:
        """Read what the module holds now, which identifies it."""
        with self.in_training():
            object.__setattr__(self, "contents", contents(self.module))

    def to(self, device: torch.device) -> Task:
        """The task on a device; itself if it is there already."""
        if self.device == device:
            return self
        return Task(self._copy().to(device), self.loss_name, self.layout, self.given)

    def _in_float64(self) -> Task:
        return Task(self._copy().double(), self.loss_name, self.layout, self.given, torch.float64)

    def _copy(self) -> nn.Module:
        module = copy.deepcopy(self.module)
        for name in self._training:
            module.get_submodule(name).training = True
        return module

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters; frozen ones keep the module's values."""
        named = self.module.named_parameters()
        return [(name, leaf) for name, leaf in named if leaf.requires_grad]

    @property
    def trained(self) -> str | None:
        """Which parameters are trained, in words; None if all are."""
        every = dict(self.module.named_parameters())
        if len(self.shapes) == len(every):
            return None
        names = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in self.shapes)
        total = sum(leaf.numel() for leaf in every.values())
        return (
            f"{self.dim:,} of {total:,} parameters, in {len(self.shapes)} of {len(every)} tensors: "
            f"{', '.join(names)}. All other parameters are frozen."
        )

    @property
    def dim(self) -> int:
        """Number of trained parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def flatten(self) -> Tensor:
        """The module's parameters as one new float32 vector."""
        leaves = [leaf.detach().reshape(-1) for _, leaf in self._trained()]
        return torch.cat(leaves).to("cpu", torch.float32, copy=True)

    def fingerprint(self, x: Tensor, example: Tensor) -> str:
        """Digest of the module and its state, the loss, the first model and the module's outputs.

        The outputs are those for inputs of the example's shape, at x and near it: two modules may
        look alike and compute different functions.
        """
        digest = hashlib.sha256(f"{self.module}{self.shapes}{self.loss_name}".encode())
        for part in [*self.module.state_dict().values(), x]:
            digest.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        probe = torch.ones(2, *example.shape, dtype=example.dtype)
        if self.layout is not None:
            probe = self.layout.full(2, 1)
        digest.update(alike_everywhere(partial(Task._probed, x=x, probe=probe), self))
        return digest.hexdigest()

    def answers(self, x: Tensor, examples: Examples) -> list[Tensor]:
        """Outputs for examples, their loss, and for each parameter a projection of its gradient."""
        module, _ = self.here()
        numbers = self._answer(module, x, examples)
        weights = torch.rand(len(numbers) - 1, generator=torch.Generator().manual_seed(0))
        products = self.unflatten(numbers[1:] * weights).values()
        slopes = torch.stack([numbers[0], *(part.sum() for part in products)])
        with torch.no_grad():
            return [self.outputs(self.at(x), examples.inputs[:].to(self.device)), slopes]

    @torch.no_grad()
    def _probed(self, x: Tensor, probe: Tensor) -> list[Tensor]:
        """Outputs at x, near it and, if the module drops anything, at x with fixed masks."""
        beside = x + 0.1 * torch.rand(len(x), generator=torch.Generator().manual_seed(0))
        answers = [self.outputs(self.at(model), probe) for model in (x, beside)]
        masks = self._fixed_masks(probe)
        if masks is not None:
            with self.local_steps(masks):
                answers.append(self.outputs(self.at(x), probe))
        return answers

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
        """The parameters in a copy of x: whatever a module writes to them, x does not change."""
        return self.unflatten(x.clone().to(self.device, self.dtype))

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._trained()[0][1].device

    def here(self) -> tuple[nn.Module, dict[int, str]]:
        """This thread's copy of the module, and the names of its trained parameters by id.

        Two threads must not use a module at once: `functional_call` temporarily replaces its
        parameters.
        """
        if not hasattr(self._own, "module"):
            self._own.module = _copied(self.module)
            self._copies.append((self._own.module, self._footprints(self._own.module)))
        module: nn.Module = self._own.module
        named = module.named_parameters()
        return module, {id(leaf): name for name, leaf in named if name in self.shapes}

    def watch(self, witness: Examples) -> None:
        """From now on, state of the module or the loss that has changed between calls is refused.

        `refuse_change` looks for it after every client, `refuse_side_effects` after every round.
        """
        modules = {id(module): module for module in (self.module, *(m for m, _ in self._copies))}
        self._copies[:] = [(module, self._footprints(module)) for module in modules.values()]
        x = self.flatten()
        self._witness[:] = [(x, witness, self._answer(self.module, x, witness))]

    def unwatch(self) -> None:
        """Allow changes, such as of a table that an engine's first call fills."""
        self._witness.clear()

    def refuse_change(self) -> None:
        """Raise `UserError` if what this thread's calls can reach is not as it was before them.

        Made between clients, so that state which is reset before the round ends is found too.
        """
        module = self._own.module if self._witness else None
        for one, before in list(self._copies):
            if one is module:
                for footprint in before:
                    footprint.refuse_change(briefly=True)

    def refuse_side_effects(self) -> None:
        """Raise `UserError` if a call has changed the state of any thread's copy, or of the loss.

        Compares the state that Python can reach, and the outputs for examples evaluated before.
        """
        for module, before in list(self._copies):
            for footprint in before:
                footprint.refuse_change()
            for x, examples, answer in self._witness:
                if not self._repeats(answer, module, x, examples):
                    raise UserError(
                        f"{self._title} gives different outputs for the same examples after other "
                        "calls. It keeps state between calls, which would carry one client's data "
                        "to others without noise. Use layers that keep no state."
                    )

    def _repeats(self, answer: Tensor, module: nn.Module, x: Tensor, examples: Examples) -> bool:
        """Whether a module and the loss answer the same again."""
        try:
            return torch.equal(self._answer(module, x, examples), answer)
        except Exception:  # state of another shape, where there was none
            return False

    @property
    def _title(self) -> str:
        model, loss = f"The model {type(self.module).__name__}", self.loss_of_examples
        return f"{model} with the loss {loss.function}" if isinstance(loss, Own) else model

    def _answer(self, module: nn.Module, x: Tensor, examples: Examples) -> Tensor:
        """A module's loss on examples and its gradient, with equal weights, on one thread."""
        leaves = {name: leaf.requires_grad_() for name, leaf in self.at(x).items()}
        inputs, labels = (
            column[:].to(self.device, copy=True) for column in (examples.inputs, examples.labels)
        )
        masks = self._fixed_masks(inputs)
        with one_thread_each(), torch.enable_grad(), self.local_steps(masks, module):
            outputs = self.called(module, inputs, leaves)
            loss = self.loss_of_examples(outputs, labels).sum()
            slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        numbers = torch.cat([loss.detach().reshape(1), *(part.reshape(-1) for part in slopes)])
        return numbers.nan_to_num()

    def _footprints(self, module: nn.Module) -> Footprints:
        """Of a thread's copy of the module, and of the loss, which threads share."""
        loss = self.loss_of_examples
        known = loss.resolved() if isinstance(loss, Own) else loss
        name = loss.function if isinstance(loss, Own) else loss.name
        model = f"The model {type(module).__name__}"
        return Footprint.of(module, model, self.shapes), Footprint.of(known, f"The loss {name}")

    def dropouts(self, shape: torch.Size, dtype: torch.dtype) -> list[torch.Size]:
        """The shape of one example in each call of active dropout; empty if nothing is dropped.

        Found on an example of zeros, so that it depends on its shape and type only.
        """
        facts = (shape, dtype)
        if self._training and facts not in self._dropouts:
            zeros = torch.zeros(1, *shape, dtype=dtype, device=self.device)
            self._dropouts[facts] = self._recorded(zeros)
        return self._dropouts.get(facts, [])

    def _recorded(self, inputs: Tensor) -> list[torch.Size]:
        recorded = RecordedMasks(torch.zeros(2, dtype=torch.int32, device=inputs.device))
        try:
            random = draws(lambda: self._trained_on(inputs, recorded, self._training))
        except Exception:  # a user's own module may raise anything
            if len(inputs) == 1:  # some modules need several examples
                return self._recorded(torch.cat([inputs, inputs]))
            return recorded.shapes
        found = list(recorded.shapes)
        if random and not draws(lambda: self._trained_on(inputs, recorded, ())):
            self._refuse_random_layer(inputs, recorded)
        return found

    @torch.no_grad()
    def _trained_on(self, inputs: Tensor, masks: Masks, training: tuple[str, ...]) -> None:
        """Call the module with these submodules in training mode."""
        module, _ = self.here()
        with Rewriting(masks), _in_training(module, training):
            self.called(module, inputs)

    def _refuse_random_layer(self, inputs: Tensor, masks: Masks) -> None:
        """Name the innermost layer that draws random numbers of its own in training mode."""
        for name in reversed(self._training):
            if draws(partial(self._trained_on, inputs, masks, (name,))):
                break
        kind = type(self.module.get_submodule(name)).__name__
        layer = f"Layer '{name}' ({kind})" if name else f"The model {kind}"
        raise UserError(
            f"{layer} draws from a global random generator in training mode, which "
            "would depend on other clients. Use torch's dropout on tensors, which draws from the "
            "client's own stream, or put this layer into evaluation mode with .eval()."
        )

    @contextmanager
    def local_steps(self, masks: Masks | None, module: nn.Module | None = None) -> Iterator[None]:
        """Training mode with these dropout masks, for the submodules that were given in it.

        Without masks, the module stays in evaluation mode.
        """
        if masks is None:
            yield
            return
        with Rewriting(masks), self.in_training(module):
            yield

    @contextmanager
    def in_training(self, module: nn.Module | None = None) -> Iterator[None]:
        """Training mode for the submodules that were given in it."""
        with _in_training(self.here()[0] if module is None else module, self._training):
            yield

    def _fixed_masks(self, inputs: Tensor) -> Masks | None:
        """The same masks for the same number of examples, to compare answers of the module."""
        single = self.dropouts(inputs.shape[1:], inputs.dtype)
        seeds = example_seeds(np.zeros(1, np.uint64), 0, len(inputs))[0]
        return Masks(seeds.to(inputs.device), single) if single else None

    def outputs(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """The module's outputs with these parameters."""
        module, _ = self.here()
        with Unfused() if self._fused else nullcontext():
            return self.called(module, inputs, parameters)

    def called(
        self, module: nn.Module, inputs: Tensor, parameters: Parameters | None = None
    ) -> Tensor:
        """The logits that a module returns for inputs, with its own or with these parameters."""
        given = (inputs,) if self.layout is None else self.layout.unpack(inputs)
        if self.dtype is not None:
            given = tree_map(self._converted, given)
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        if parameters is None:
            return logits_of(module(*args, **kwargs), module)
        return logits_of(functional_call(module, parameters, args, kwargs), module)

    def _converted(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype) if numbers.is_floating_point() else numbers

    @cached_property
    def _fused(self) -> bool:
        return any(isinstance(part, FUSED) for part in self.module.modules())

    def loss(
        self, parameters: Parameters, inputs: Tensor, labels: Tensor, weights: Tensor
    ) -> Tensor:
        """Σ weight·loss of a batch; the mean loss if the weights are equal and sum to 1."""
        losses = self.loss_of_examples(self.outputs(parameters, inputs), labels)
        return (losses * weights).sum()

    @torch.no_grad()
    def evaluate(self, x: Tensor, examples: Examples, batch: int = 2000) -> tuple[float, float]:
        """(mean loss, accuracy) on examples; accuracy is NaN for targets that are not classes.

        Without examples, both are NaN.
        """
        if not len(examples):
            return math.nan, math.nan
        parameters = self.at(x)
        loss = right = 0.0
        for start in range(0, len(examples), batch):
            some = slice(start, start + batch)
            inputs = examples.inputs[some].to(self.device, copy=True)  # a module may write to it
            labels = examples.labels[some].to(self.device)
            outputs = self.outputs(parameters, inputs)
            loss += float(self.loss_of_examples(outputs, labels).sum())
            hits = self.loss_of_examples.correct(outputs, labels)
            right += math.nan if hits is None else float(hits.sum())
        count = len(examples)
        return loss / count, right / count


def alike_everywhere(answers: Callable[[Task], list[Tensor]], task: Task) -> bytes:
    """What a task answers, in bytes that are the same on every processor.

    Processors round float32 differently, so the answers are computed in float64 and rounded to a
    billionth of the largest. A module that cannot compute in float64 answers in all its own bits.
    """
    try:
        found = [_rounded(part.double()) for part in answers(task._in_float64())]
    except Exception:  # a user's own module may raise anything
        found = answers(task)
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in found)


def _rounded(numbers: Tensor) -> Tensor:
    """[largest, …], the largest to nine digits and the others as multiples of its billionth."""
    finite = numbers[numbers.isfinite()].abs()
    largest = float(f"{float(finite.max()):.8e}") if finite.numel() else 0.0
    steps = (numbers / (largest or 1.0) * 1e9).round() + 0.0  # no negative zero
    steps = steps.nan_to_num(nan=2e9, posinf=3e9, neginf=-3e9)
    return torch.cat([torch.tensor([largest], dtype=numbers.dtype), steps.reshape(-1)])


@contextmanager
def _in_training(module: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Training mode for the submodules of these names."""
    parts = [module.get_submodule(name) for name in names]
    for part in parts:
        part.training = True
    try:
        yield
    finally:
        for part in parts:
            part.training = False


def _copied(module: nn.Module) -> nn.Module:
    """A copy of the module for another thread, which shares no state that a call may change."""
    frozen = {id(leaf): leaf for leaf in module.parameters() if not leaf.requires_grad}
    twin = copy.deepcopy(module, dict(frozen))  # shares them; a write to one would be noticed
    for name, part in twin.named_modules():
        if part is module.get_submodule(name):
            raise UserError(
                f"Copies of the model {type(module).__name__} share their submodule '{name}', so "
                "two threads would compute with each other's parameters. Remove its __deepcopy__."
            )
    return twin
