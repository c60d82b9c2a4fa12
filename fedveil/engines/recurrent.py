"""nn.LSTM, nn.GRU and nn.RNN computed from their cell equations with linear layers.

torch's own kernels support neither vmap over stacked weights nor interception; linear layers
support both. The results are equal up to the order of float sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

States = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, States], States]  # from W x + b, U h + b and the old states


def _lstm(seen: Tensor, recalled: Tensor, states: States) -> States:
    """c ← σ(f)·c + σ(i)·tanh(g),  h ← σ(o)·tanh(c)."""
    i, f, g, o = (seen + recalled).chunk(4, -1)
    c = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(seen: Tensor, recalled: Tensor, states: States) -> States:
    """h ← (1 − z)·n + z·h  with  n = tanh(n_x + r·n_h)."""
    (r, z, n), (r_h, z_h, n_h) = seen.chunk(3, -1), recalled.chunk(3, -1)
    z = (z + z_h).sigmoid()
    return ((1 - z) * (n + (r + r_h).sigmoid() * n_h).tanh() + z * states[0],)


def _rnn_tanh(seen: Tensor, recalled: Tensor, states: States) -> States:
    """h ← tanh(W x + U h + b)."""
    return ((seen + recalled).tanh(),)


def _rnn_relu(seen: Tensor, recalled: Tensor, states: States) -> States:
    """h ← max(0, W x + U h + b)."""
    return ((seen + recalled).relu(),)


CELLS: dict[Any, Cell] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn_tanh,
    torch.rnn_relu: _rnn_relu,
}


def unrollable(func: Any, args: Sequence[Any]) -> bool:
    """Whether this is a recurrence over whole sequences, with states as wide as its cells."""
    if func not in CELLS or not isinstance(args[2], list | tuple):  # else the sequence is packed
        return False
    _, _, weights, biased, layers, _, _, both_ways, _ = args
    plain = layers * (1 + both_ways) * (4 if biased else 2)  # projections would add more
    return len(weights) == int(plain)


def unrolled(func: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The result of the recurrence: outputs, then the final states."""
    inputs, start, weights, biased, layers, dropout, training, both_ways, batch_first = args
    x = inputs if batch_first else inputs.transpose(0, 1)
    first = tuple(start) if isinstance(start, list | tuple) else (start,)
    each = 4 if biased else 2
    ends: list[States] = []
    for layer in range(layers):
        outputs = []
        for backwards in range(1 + both_ways):
            place = layer * (1 + both_ways) + backwards
            states = tuple(state[place] for state in first)
            mine = weights[place * each : (place + 1) * each]
            output, end = _along(CELLS[func], x, states, mine, bool(backwards))
            outputs.append(output)
            ends.append(end)
        x = torch.cat(outputs, -1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    last = tuple(torch.stack(kind) for kind in zip(*ends, strict=True))
    return x if batch_first else x.transpose(0, 1), *last


def _along(
    cell: Cell, x: Tensor, states: States, weights: Sequence[Tensor], backwards: bool
) -> tuple[Tensor, States]:
    """One layer in one direction: its outputs [n, length, size] and its final states."""
    bias, recurrent_bias = weights[2:] if len(weights) == 4 else (None, None)
    steps = F.linear(x, weights[0], bias).unbind(1)
    outputs = []
    for seen in reversed(steps) if backwards else steps:
        states = cell(seen, F.linear(states[0], weights[1], recurrent_bias), states)
        outputs.append(states[0])
    return torch.stack(outputs[::-1] if backwards else outputs, 1), states
