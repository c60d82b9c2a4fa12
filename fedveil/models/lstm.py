"""A character model of stacked LSTM layers, written from the cell's equations."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LSTMLayer(nn.Module):
    """c ← σ(f)·c + σ(i)·tanh(g),  h ← σ(o)·tanh(c)  with  (i, f, g, o) = W x + U h + b.

    Equal to one layer of `nn.LSTM` from a zero state (gates in the same order), with one bias
    instead of the sum of two.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, inputs] → [n, length, hidden]."""
        projected = self.input(x)  # over the whole sequence: one large product, not `length` small
        h = c = projected.new_zeros(len(x), self.recurrent.in_features)
        states = []
        for step in projected.unbind(1):
            i, f, g, o = (step + self.recurrent(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, 1)


class CharLSTM(nn.Module):
    """Embedding, `layers` LSTM layers, linear: logits of the next token at every position.

    The Shakespeare model of Reddi et al. 2021: 820,522 parameters with its vocabulary of 90.
    """

    def __init__(
        self, vocabulary: int, embedding: int = 8, hidden: int = 256, layers: int = 2
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = (embedding, *[hidden] * (layers - 1))
        self.layers = nn.Sequential(*(LSTMLayer(width, hidden) for width in widths))
        self.fc = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """int64 [n, length] → [n, length, vocabulary]."""
        logits: Tensor = self.fc(self.layers(self.embedding(x)))
        return logits
