"""The key of a run with a user's model and loss is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    keys = {_printed(tmp_path, seed) for seed in ("1", "2")}
    assert len(keys) == 1
    assert len(keys.pop().strip()) == 32


REPEATED = """
import functools, sys
import torch
from torch import nn
import fedveil as fv
from fedveil import algorithms
from fedveil.training.prepare import prepare

MASKS = {}

def mask(n):
    if n not in MASKS:
        MASKS[n] = torch.ones(n, n).tril()
    return MASKS[n]

@functools.singledispatch
def dispatched(n):
    return mask(n)

class Net(nn.Module):
    known = {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)
        CONFIG

    def forward(self, x):
        import helper
        n = x.shape[1]
        self.known.setdefault(n, n)
        return self.layer(x @ mask(n) @ dispatched(n) * helper.SCALE)

torch.manual_seed(0)
inputs, labels = torch.rand(8, 2), torch.tensor([0, 1] * 4)
data = fv.Federated.from_arrays(inputs, labels, [0, 0, 1, 1, 2, 2, 3, 3])
recipe = algorithms.dp_fedavg(clip=1.0, noise_multiplier=3.0)
keys = [prepare(recipe, data, Net(), rounds=1, delta=1e-5).spec.identity for _ in range(3)]
assert len(set(keys)) == 1, keys
print(keys[0])
"""
PYDANTIC = """
import pydantic

class Config(pydantic.BaseModel):
    limit: float = 3.0
    names: list[str] = ["a", "b"]

    @pydantic.field_validator("limit")
    @classmethod
    def positive(cls, value):
        return abs(value)
"""


@pytest.mark.parametrize("config", ["", PYDANTIC], ids=["plain", "pydantic"])
def test_the_key_does_not_depend_on_earlier_calls(config: str, tmp_path: Path) -> None:
    """Such as those that fill a table by shape, load a module, or find a function for a type."""
    if config:
        pytest.importorskip("pydantic")
    text = REPEATED.replace("CONFIG", "self.config = Config()" if config else "pass")
    (tmp_path / "own.py").write_text(config + text)
    (tmp_path / "helper.py").write_text("SCALE = 2.0")
    keys = {_printed(tmp_path, seed) for seed in ("1", "2")}
    assert len(keys) == 1
    if config:
        (tmp_path / "own.py").write_text((config + text).replace("abs(value)", "-value"))
    else:
        (tmp_path / "helper.py").write_text("SCALE = 4.00")
    assert _printed(tmp_path, "1") not in keys


def _printed(folder: Path, seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", "import own"],
        cwd=folder, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
        text=True, check=True,
    ).stdout  # fmt: skip
