"""Convolutions for a group of clients at once, as products with patches.

Images are stored channels last. A patch is then a few long runs of memory, all patches of a client
are the rows of one matrix, and following operations such as pooling are faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fedveil.engines.layers import Shift, Use, joined
from fedveil.engines.scratch import scratch
from fedveil.engines.stores import Pace, Reordered, Store, Written

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """Kernel size, stride, padding and dilation of a convolution."""

    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: Pair = (0, 0)

    def around(self, images: Tensor, padding: Pair | str) -> tuple[Tensor, Window]:
        """The images and their window, where padding may be given by name."""
        if not isinstance(padding, str):
            return images, replace(self, padding=padding)
        if padding == "valid":
            return images, self
        more = [gap * (size - 1) for gap, size in zip(self.dilation, self.kernel, strict=True)]
        half = (more[0] // 2, more[1] // 2)
        if more == [2 * half[0], 2 * half[1]]:
            return images, replace(self, padding=half)
        wider = F.pad(images, (half[1], more[1] - half[1], half[0], more[0] - half[0]))
        return wider, self

    def places(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        return self._along(0, height), self._along(1, width)

    def _along(self, axis: int, size: int) -> int:
        seen = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        return (size + 2 * self.padding[axis] - seen) // self.stride[axis] + 1

    def patches(self, images: Tensor, role: str) -> Tensor:
        """[n, channels, height, width] → [n·places, kernel·kernel·channels], stored as `role`."""
        count, channels, height, width = images.shape
        (up, left), (high, wide) = self.padding, self.places(height, width)
        padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, left, left, up, up)).contiguous()
        image, row, pixel, _ = padded.stride()
        steps = (row * self.stride[0], pixel * self.stride[1])
        gaps = (row * self.dilation[0], pixel * self.dilation[1])
        size = (count, high, wide, *self.kernel, channels)
        seen = padded.as_strided(size, (image, *steps, *gaps, 1))
        return scratch(role, images.device, *size).copy_(seen).view(count * high * wide, -1)

    def fold(self, patches: Tensor, shape: torch.Size) -> Tensor:
        """Add patches back to their pixels: the transpose of `patches`."""
        count, channels, height, width = shape
        pieces, bags = _bags(self, count, height, width, patches.device)
        pixels = F.embedding_bag(
            pieces, patches.reshape(-1, channels), bags, mode="sum", include_last_offset=True
        )
        return pixels.view(count, height, width, channels).permute(0, 3, 1, 2)


@lru_cache(maxsize=64)
def _bags(
    window: Window, count: int, height: int, width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The patch entries that belong to each pixel: their indexes, and where each pixel's start."""
    one = torch.arange(1, height * width + 1).float().reshape(1, 1, height, width)
    pixel = window.patches(one, "places").flatten().long() - 1  # of each entry; −1 in the padding
    inside = torch.nonzero(pixel >= 0).flatten()
    pieces = inside[pixel[inside].argsort(stable=True)]
    each = torch.bincount(pixel[inside], minlength=height * width)
    images = torch.arange(count)[:, None]
    bags = torch.cat([torch.zeros(1, dtype=torch.long), each.repeat(count).cumsum(0)])
    return (pieces + len(pixel) * images).flatten().int().to(device), bags.int().to(device)


@dataclass(frozen=True, eq=False)
class Source:
    """Examples that steps reuse: `batch` holds these `rows` of them."""

    examples: Tensor
    rows: Tensor
    batch: Tensor
    version: int = field(init=False)  # of the batch, as it was taken

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.batch._version)

    def is_batch(self, x: Tensor) -> bool:
        """Whether these numbers are the step's batch itself, which nothing has written to."""
        batch, place = self.batch, (x.data_ptr(), x.shape, x.stride())
        same = place == (batch.data_ptr(), batch.shape, batch.stride())
        return same and batch._version == self.version


@dataclass
class ConvLayer:
    """y = patches·(W + Δ_i)ᵀ + b + β_i: shared weights at first, each client's own later."""

    name: str
    weight: Tensor  # [out, in, height, width]
    clients: int
    bias: Shift | None
    window: Window
    repeated: bool  # whether every step of the plan uses the same batch
    store: Written = field(init=False)  # [out, height·width·in]
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    made: dict[str, Tensor] = field(default_factory=dict)  # patches for later steps, by role
    uses: int = 0  # in this step

    def __post_init__(self) -> None:
        flat = self.weight.permute(0, 2, 3, 1).reshape(len(self.weight), -1)
        self.store = Written(flat, self.clients)

    def use(self, source: Source | None) -> Use:
        """One use in this step's forward pass; its inputs may be the step's own batch."""
        kept: list[tuple[Tensor, torch.Size]] = []
        role = f"{self.name}, use {self.uses}"
        self.uses += 1

        def forward(x: Tensor, constant: bool) -> Tensor:
            known = source if source is not None and source.is_batch(x) else None
            patches = self._patches(x, role, constant, known)
            kept.append((patches, x.shape))
            return self._product(patches, x.shape)

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            patches, shape = kept.pop()
            slope = g.permute(0, 2, 3, 1).reshape(self.clients, -1, g.shape[1])
            self.pending.append((slope, patches))
            return self.window.fold(self._back(slope), shape) if wanted else None

        return Use(forward, backward)

    def _patches(self, x: Tensor, role: str, constant: bool, source: Source | None) -> Tensor:
        """[clients, positions, height·width·in]; computed once for inputs that steps reuse."""
        again = role if constant and self.repeated else f"{role}, all" if source else ""
        if again and again in self.made:
            patches = self.made[again]
        else:
            images = x if source is None else source.examples
            patches = self.window.patches(images, again or role)
        if again:
            self.made[again] = patches
        if source is not None:
            each = patches.view(len(source.examples), -1)
            room = scratch(role, x.device, len(x), each.shape[1])
            patches = torch.index_select(each, 0, source.rows, out=room)
        return patches.view(self.clients, -1, self.store.shared.shape[1])

    def _product(self, patches: Tensor, shape: torch.Size) -> Tensor:
        out, (high, wide) = len(self.weight), self.window.places(*shape[2:])
        size = (shape[0], out, high, wide)
        images = torch.empty(size, device=patches.device, memory_format=torch.channels_last)
        y = images.permute(0, 2, 3, 1).view(self.clients, -1, out)
        shift = patches.new_zeros(1, out) if self.bias is None else self.bias.each
        if self.store.weights is None:
            torch.addmm(shift, patches.flatten(0, 1), self.store.shared.T, out=y.flatten(0, 1))
        else:
            torch.baddbmm(shift[:, None], patches, self.store.weights.transpose(1, 2), out=y)
        return images

    def _back(self, slope: Tensor) -> Tensor:
        room = scratch(
            "slopes of patches", slope.device, *slope.shape[:2], self.store.shared.shape[1]
        )
        if self.store.weights is None:
            torch.mm(slope.flatten(0, 1), self.store.shared, out=room.flatten(0, 1))
            return room
        return torch.bmm(slope, self.store.weights, out=room)

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        used, self.pending, self.uses = self.pending, [], 0
        if used:
            slope, patches = joined(used)
            self.store.absorb_product(slope, patches, pace)
        else:
            shared = self.store.shared
            self.store.absorb(shared.new_zeros(self.clients, *shared.shape), pace)
        if self.bias is not None:
            if used:
                self.bias.leave(slope.sum(dim=1))
            self.bias.absorb(pace)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, in the module's order, and the bias's."""
        out, inputs, height, width = self.weight.shape
        shape = (out, height, width, inputs)
        store: Store = Reordered(self.store.finished(pace), shape, (0, 3, 1, 2))
        return {self.name: store} | ({} if self.bias is None else self.bias.finished(pace))


@dataclass
class GroupedConvLayer:
    """Grouped channels: one convolution with `clients` times as many groups.

    Patches would have a few channels each, too small for fast products.
    """

    name: str
    weight: Tensor  # [out, in/groups, height, width]
    clients: int
    bias: Shift | None
    window: Window
    groups: int
    store: Written = field(init=False)
    pending: Tensor | None = None  # gradient of the weights, [clients, *shape]

    def __post_init__(self) -> None:
        self.store = Written(self.weight, self.clients)

    def use(self) -> Use:
        """One use in this step's forward pass."""
        kept: list[Tensor] = []

        def forward(x: Tensor, constant: bool) -> Tensor:
            kept.append(self._beside(x))
            y = self._apart(F.conv2d(kept[0], self._weights(), None, *self._where()))
            if self.bias is None:
                return y
            shift = self.bias.each.expand(self.clients, -1)
            return y + shift.repeat_interleave(len(x) // self.clients, 0)[:, :, None, None]

        def backward(g: Tensor, wanted: bool) -> Tensor | None:
            return self._back(g, kept.pop(), wanted)

        return Use(forward, backward)

    def _where(self) -> tuple[Pair, Pair, Pair, int]:
        window = self.window
        return window.stride, window.padding, window.dilation, self.clients * self.groups

    def _weights(self) -> Tensor:
        each = self.store.weights
        shared = self.weight.expand(self.clients, *self.weight.shape)
        return (shared if each is None else each).flatten(0, 1)

    def _beside(self, x: Tensor) -> Tensor:
        """[clients·width, channels, …] → [width, clients·channels, …]."""
        return self._by_client(x).transpose(0, 1).flatten(1, 2)

    def _apart(self, x: Tensor) -> Tensor:
        """The inverse of `_beside`."""
        split = x.reshape(len(x), self.clients, -1, *x.shape[2:])
        return split.transpose(0, 1).flatten(0, 1)

    def _by_client(self, x: Tensor) -> Tensor:
        """[clients·width, …] → [clients, width, …]."""
        return x.reshape(self.clients, -1, *x.shape[1:])

    def _back(self, g: Tensor, images: Tensor, wanted: bool) -> Tensor | None:
        stride, padding, dilation, groups = self._where()
        back, slope, _ = torch.ops.aten.convolution_backward(
            *(self._beside(g), images, self._weights(), None, stride, padding, dilation),
            *(False, (0, 0), groups, (wanted, True, False)),
        )
        slope = self._by_client(slope)
        self.pending = slope if self.pending is None else self.pending + slope
        if self.bias is not None:
            self.bias.leave(self._by_client(g.sum(dim=(2, 3))).sum(dim=1))
        return self._apart(back) if wanted else None

    def absorb(self, pace: Pace) -> None:
        """Walk."""
        slope, self.pending = self.pending, None
        if slope is None:
            slope = self.weight.new_zeros(self.clients, *self.weight.shape)
        self.store.absorb(slope, pace)
        if self.bias is not None:
            self.bias.absorb(pace)

    def finished(self, pace: Pace) -> dict[str, Store]:
        """The weight's store, and the bias's."""
        store: Store = self.store.finished(pace)
        return {self.name: store} | ({} if self.bias is None else self.bias.finished(pace))
