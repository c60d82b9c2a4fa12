"""Several inputs of an example in one row of bytes, such as token ids and an attention mask.

Columns, groups and engines handle one tensor of inputs. `Layout` packs several into bytes and gives
them back to the module, exactly, in the form it expects: named or in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedveil.errors import UserError

Inputs = Mapping[str, Tensor] | Sequence[Tensor]
ALIGNED = 8  # bytes: every field starts at a multiple, so that it can be viewed as its type


@dataclass(frozen=True)
class Field:
    """One input of an example."""

    name: str  # '' for inputs in order
    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int = field(default=1, compare=False)  # the largest integer, for synthetic examples

    @property
    def bytes(self) -> int:
        """Without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """With padding."""
        return -(-self.bytes // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Layout:
    """The inputs of an example and their places in a row of bytes.

    >>> layout = Layout.of({"ids": torch.ones(2, 3, dtype=torch.long), "mask": torch.ones(2, 3)})
    >>> {name: tuple(x.shape) for name, x in layout.unpack(layout.full(4, 1)).items()}
    {'ids': (4, 3), 'mask': (4, 3)}
    """

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, inputs: Inputs) -> Layout:
        """The layout of tensors [n, …] with equal n."""
        named = isinstance(inputs, Mapping)
        parts = inputs.items() if isinstance(inputs, Mapping) else [("", x) for x in inputs]
        found = [_field(name, x) for name, x in parts]
        if not found or (named and not all(each.name for each in found)):
            raise UserError("The inputs are empty or have an empty name. Give at least one tensor.")
        counts = {len(x) for _, x in parts}
        if len(counts) > 1:
            raise UserError(
                f"The inputs have {sorted(counts)} examples. Give every input for every example."
            )
        return cls(tuple(found))

    def joined(self, other: Layout) -> Layout:
        """The layout of more examples, whose integers may be larger."""
        if other != self:
            raise UserError(
                f"Some examples have the inputs {other}, and others {self}. Give all the same ones."
            )
        pairs = zip(self.fields, other.fields, strict=True)
        return Layout(tuple(replace(one, high=max(one.high, two.high)) for one, two in pairs))

    @property
    def width(self) -> int:
        """Bytes of a packed example."""
        return sum(each.room for each in self.fields)

    @property
    def named(self) -> bool:
        """Whether a module gets its inputs by name."""
        return bool(self.fields[0].name)

    def pack(self, inputs: Inputs) -> Tensor:
        """Rows of bytes, uint8 [n, bytes]."""
        given = Layout.of(inputs)
        if given != self:
            raise UserError(
                f"The inputs are {given}, but the data have {self}. Give the same ones."
            )
        parts = list(inputs.values()) if isinstance(inputs, Mapping) else list(inputs)
        rows = [
            torch.nn.functional.pad(
                x.contiguous().reshape(len(x), -1).view(torch.uint8), (0, each.room - each.bytes)
            )
            for each, x in zip(self.fields, parts, strict=True)
        ]
        return torch.cat(rows, 1)

    def unpack(self, rows: Tensor) -> dict[str, Tensor] | tuple[Tensor, ...]:
        """The inputs of packed examples [n, bytes], by name or in order."""
        parts, start = [], 0
        for each in self.fields:
            piece = rows[..., start : start + each.bytes].contiguous().view(each.dtype)
            parts.append(piece.reshape(*rows.shape[:-1], *each.shape))
            start += each.room
        if not self.named:
            return tuple(parts)
        return {each.name: x for each, x in zip(self.fields, parts, strict=True)}

    def full(self, count: int, value: int) -> Tensor:
        """Packed examples whose numbers are all this one."""
        return self._made(lambda each: torch.full((count, *each.shape), value, dtype=each.dtype))

    def synthetic(
        self, count: int, scale: float, generator: torch.Generator, mean: float = 0.0
    ) -> Tensor:
        """Packed examples: normal numbers of this scale and mean, integers in the data's range.

        A mask starts with 1, so that no example is masked as a whole.
        """

        def made(each: Field) -> Tensor:
            numbers = torch.zeros(count, *each.shape)
            if each.dtype.is_floating_point:
                return numbers.normal_(mean, scale, generator=generator).to(each.dtype)
            numbers.random_(each.high + 1, generator=generator)
            if each.high <= 1 and each.shape:
                numbers[..., 0] = 1
            return numbers.to(each.dtype)

        return self._made(made)

    def _made(self, make: Callable[[Field], Tensor]) -> Tensor:
        parts = [make(each) for each in self.fields]
        names = [each.name for each in self.fields]
        return self.pack(dict(zip(names, parts, strict=True)) if self.named else parts)

    def __str__(self) -> str:
        kinds = [f"{list(each.shape)} {str(each.dtype)[6:]}" for each in self.fields]
        names = [f"{each.name}: " if each.name else "" for each in self.fields]
        return ", ".join(f"{name}{kind}" for name, kind in zip(names, kinds, strict=True))


def _field(name: str, x: object) -> Field:
    if not isinstance(x, Tensor) or x.dim() < 1:
        raise UserError(
            f"The input '{name}' is a {type(x).__name__}, not a tensor with a row for every "
            "example. Give a tensor."
        )
    whole = not x.is_floating_point() and x.numel() > 0
    high = max(0, int(x.max())) if whole else 1
    return Field(name, tuple(x.shape[1:]), x.dtype, high)
