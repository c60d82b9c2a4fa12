"""The key of a run with a user's model and loss is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

OWN = """
import functools, re
import torch
from torch import nn
import fedveil as fv
from fedveil import algorithms
from fedveil.training.prepare import prepare

CAP, WORDS = 3.0, {"alpha", "beta", "gamma", "delta"}

class Options:
    def __init__(self):
        self.words, self.pattern, self.owner = set(WORDS), re.compile("a+"), object()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.options, self.kinds = Options(), frozenset({"a", "b", ("c", "d")})
        self.layer = nn.LSTM(2, 2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.GELU())
        self.act = functools.partial(torch.clamp, max=CAP)
        self.head.register_forward_hook(lambda module, given, found: found.clamp(max=CAP))

    def forward(self, x):
        known = {word: len(word) for word in sorted(WORDS) if word in {"alpha", "beta", "eta"}}
        return self.head(self.act(self.layer(x[:, None])[0][:, 0])) * len(known)

def loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets).clamp(max=CAP) * len(WORDS)

torch.manual_seed(0)
inputs, labels = torch.rand(8, 2), torch.tensor([0, 1] * 4)
data = fv.Federated.from_arrays(inputs, labels, [0, 0, 1, 1, 2, 2, 3, 3])
recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=3.0)
print(prepare(recipe, data, Net(), rounds=1, delta=1e-5, loss=loss).spec.identity)
"""


def test_the_key_of_a_model_of_one_s_own_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever addresses, the order of sets, and whether its code was compiled before."""
    (tmp_path / "own.py").write_text(OWN)
    keys = {
        subprocess.run(
            [sys.executable, "-c", "import own"],
            cwd=tmp_path, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 32
