"""A small GPT for characters or words: causal attention with rotary positions, tied embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def rotated(x: Tensor) -> Tensor:
    """Turn each pair of features at position t by the angle t·10000^(−2i/size).  Su et al. 2021.

    [n, heads, length, size] → the same shape; products of two positions depend on their distance.
    """
    length, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class TransformerBlock(nn.Module):
    """x ← x + attention(norm(x)),  x ← x + mlp(norm(x)).  Radford et al. 2019, §2.3."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, width] → the same shape."""
        parts = self.attention(self.norm(x)).chunk(3, -1)
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        moved: Tensor = x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))
        return moved


class GPT(nn.Module):
    """Logits of the next token at every position; output and input embeddings are one table.

    With 4 layers of width 128: 793,344 parameters, and 128 for each token of the vocabulary.
    """

    def __init__(self, vocabulary: int, layers: int = 4, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def start_weights(self) -> None:
        """Small embeddings; projections scaled so that the residual stream keeps its size."""
        self.embedding.weight.mul_(0.02)
        for block in self.blocks.children():
            assert isinstance(block, TransformerBlock)
            for layer in (block.projection, block.contract):
                layer.weight.mul_(1 / math.sqrt(2 * len(self.blocks)))

    def forward(self, x: Tensor) -> Tensor:
        """int64 [n, length] → [n, length, vocabulary]."""
        return F.linear(self.norm(self.blocks(self.embedding(x))), self.embedding.weight)
