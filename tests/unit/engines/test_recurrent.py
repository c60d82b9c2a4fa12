"""torch's own recurrent layers, made of linear ones, on all engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedveil.data.federated import Examples, Federated
from fedveil.engines.choose import choose
from fedveil.engines.dense import DenseEngine
from fedveil.engines.factored import FactoredEngine
from fedveil.engines.loop import LoopEngine
from fedveil.engines.rewriting import Rewriting
from fedveil.engines.task import Task
from fedveil.engines.updates import Group
from fedveil.models.start import construct
from fedveil.parts.local import SGD
from fedveil.parts.schedule import Constant

KINDS = {
    "lstm": lambda: nn.LSTM(4, 5, batch_first=True),
    "two lstms both ways": lambda: nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True),
    "lstm without bias, time first": lambda: nn.LSTM(4, 5, bias=False),
    "two grus": lambda: nn.GRU(4, 5, num_layers=2, batch_first=True),
    "gru both ways, time first": lambda: nn.GRU(4, 2, bidirectional=True),
    "rnn of tanh": lambda: nn.RNN(4, 5, batch_first=True),
    "rnn of relu": lambda: nn.RNN(4, 5, nonlinearity="relu", batch_first=True),
}


class Reader(nn.Module):
    """A recurrence over rows; its outputs and its last states decide."""

    def __init__(self, recurrence: nn.RNNBase) -> None:
        super().__init__()
        self.recurrence = recurrence
        width = recurrence.hidden_size * (2 if recurrence.bidirectional else 1)
        self.head = nn.Linear(width + recurrence.hidden_size, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.recurrence.batch_first else x.transpose(0, 1)
        outputs, states = self.recurrence(rows)
        outputs = outputs if self.recurrence.batch_first else outputs.transpose(0, 1)
        last = states[-1] if isinstance(states, tuple) else states
        return self.head(torch.cat([outputs.mean(1), last[-1]], -1))


def task_of(kind: str) -> Task:
    return Task(construct(lambda: Reader(KINDS[kind]()), seed=3), "cross_entropy")


def population() -> Federated:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.normal(size=(20, 6, 4)).astype(np.float32))
    labels = torch.from_numpy(rng.integers(0, 3, 20))
    offsets = torch.tensor([0, 4, 9, 20])
    return Federated("rows", inputs, labels, offsets, Examples(inputs, labels), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_equations_give_what_torch_gives(kind: str) -> None:
    recurrence = construct(KINDS[kind], seed=1)
    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    expected = parts(recurrence(x))
    with Rewriting():
        found = parts(recurrence(x))
    assert len(found) == len(expected)
    for mine, torchs in zip(found, expected, strict=True):
        assert mine.shape == torchs.shape
        assert torch.allclose(mine, torchs, atol=1e-6)


def parts(answer: object) -> list[Tensor]:
    """Outputs and states, one after the other."""
    return [answer] if isinstance(answer, Tensor) else [x for part in answer for x in parts(part)]


@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree(kind: str) -> None:
    data, task = population(), task_of(kind)
    for local in (SGD(Constant(0.5), steps=3), SGD(Constant(0.5), steps=4, batch=3, momentum=0.9)):
        plan = local.plan(data.sizes, 0, np.random.default_rng(0))
        group, x = Group(data, np.arange(3), plan), task.flatten()
        expected = LoopEngine(task).updates(x, group).rows()
        assert expected.norm() > 0.1
        for engine in (DenseEngine(task, 8), FactoredEngine(task, 8)):
            found = engine.updates(x, group)
            assert torch.allclose(found.rows(), expected, atol=1e-5)
            assert torch.allclose(found.norms(), expected.double().norm(dim=1), rtol=1e-4)


def test_no_engine_is_ruled_out_by_a_recurrence() -> None:
    choice = choose("auto", task_of("lstm"), population(), SGD(Constant(0.1), steps=2), timed=True)
    assert {"factored", "dense"} <= set(choice.seconds)
