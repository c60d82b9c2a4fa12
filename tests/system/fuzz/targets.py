"""One function for each parser: bytes in, and nothing but `UserError` may come out.

`seeds` are whole and nearly whole inputs to start from. Where reading and writing are inverse, a
target checks that too. Files go to one directory of the process, in memory if there is such.
"""

from __future__ import annotations

import gzip
import math
import pickle
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from fedveil import algorithms, wire
from fedveil.data.encoding import TableEncoder
from fedveil.data.federated import Examples, Federated
from fedveil.data.sources.cifar import read_binary_batch, read_python_batch
from fedveil.data.sources.idx import read_idx
from fedveil.data.table import TableOptions, read_table
from fedveil.errors import UserError
from fedveil.federation.reception import read_floats, read_levels, write_floats, write_levels
from fedveil.loop import begin
from fedveil.runs.directory import RunDirectory
from fedveil.runs.saved import CHECKPOINT, SavedRun
from fedveil.training.settings import read_settings, resolve_recipe
from tests.system.fuzz import federation, secagg

SHAPES = {"weight": (2, 3), "bias": (2,)}
MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Target:
    """A parser under test."""

    read: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@cache
def folder() -> Path:
    """A directory of this process's own."""
    made = tempfile.mkdtemp(prefix="fuzz-", dir=MEMORY if MEMORY.is_dir() else None)
    return Path(made)


def written(name: str, content: bytes) -> Path:
    path = folder() / name
    path.write_bytes(content)
    return path


def settings(content: bytes) -> None:
    """TOML: the file, its types, and the recipe it describes."""
    resolve_recipe(read_settings(written("settings.toml", content), {}))


def table(content: bytes) -> None:
    """CSV: a table with the columns 'client' and 'label'; its encoder comes back from its text."""
    options = TableOptions(client="client", label="label", holdout="rows")
    read = read_table(written("table.csv", content), options)
    assert bool(torch.isfinite(read.dataset.train.inputs).all())
    assert TableEncoder.from_json(read.encoder.to_json()) == read.encoder


def idx(content: bytes) -> None:
    """IDX, gzipped or not; what is read is no larger than what is there."""
    array = read_idx(content)
    if content[:2] != b"\x1f\x8b":
        assert array.nbytes <= len(content)


def cifar(content: bytes) -> None:
    """A python batch or, after a first byte of 1 or 3, a binary one; of CIFAR-100 from 2 on."""
    kind = content[0] % 4 if content else 0
    classes = 100 if kind >= 2 else 10
    read = read_binary_batch if kind % 2 else read_python_batch
    pixels, labels = read(content[1:], classes)
    assert pixels.shape == (len(labels), 3, 32, 32)


@cache
def _run() -> tuple[RunDirectory, Federated]:
    inputs, labels = torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)
    offsets = torch.arange(3)
    data = Federated("two", inputs, labels, offsets, Examples(inputs, labels), 2)
    return RunDirectory(folder()), data


def tensors(content: bytes) -> None:
    """Safetensors: a client's message, and a run's checkpoint.

    With a first byte of 1 the length of the header is put right, so that what it says is read.
    """
    kind, content = content[:1], content[1:]
    if kind == b"\1":
        head, _, numbers = content.partition(b"\n")
        content = len(head).to_bytes(8, "little") + head + numbers
    try:
        vector = read_floats(content, SHAPES)
        assert torch.equal(read_floats(write_floats(vector, SHAPES), SHAPES), vector)
    except UserError:
        run, data = _run()
        written(CHECKPOINT, content)
        state = begin(algorithms.fedavg(), torch.zeros(8), data, 1, key=0)
        _ = SavedRun(run.path).rounds
        SavedRun(run.path).state(state)


def packed(content: bytes) -> None:
    """Packed messages: a format of 1 to 64 bits, how many coordinates, and the bytes."""
    if len(content) < 11:
        return
    low, dim, bits = struct.unpack("<qHB", content[:11])
    modular = bool(dim & 1)
    form = wire.Wire(bits % 66, 0 if modular else low, modular)
    levels = read_levels(content[11:], form, dim >> 1)
    assert levels.shape == (dim >> 1,)
    assert write_levels(levels, form) == content[11:]


def _settings_seeds() -> list[bytes]:
    names = [f'algorithm = "{name}"\n'.encode() for name in algorithms.ALGORITHMS]
    whole = b"""rounds = 3
epsilon = 4.0
delta = 1e-5
view = "models"
[data]
dataset = "digits"
clients = 10
partition = "iid"
ranges = { age = [0, 1] }
[parameters]
clip = 1.0
rate = 0.5
learning_rate = { kind = "Constant", value = 0.1 }
"""
    recipe = b"""[recipe]
name = "mine"
[recipe.local]
kind = "SGD"
steps = 2
learning_rate = 0.1
[recipe.cohort]
kind = "Poisson"
rate = 0.1
[recipe.bound]
kind = "Clip"
norm = 1.0
[recipe.noise]
kind = "Gaussian"
multiplier = 1.0
"""
    return [*names, whole, recipe, b"seed = nan\n", b"[data]\nseed = -1\n", b"a = " + b"[" * 200]


def _table_seeds() -> list[bytes]:
    return [
        b"client,label,age,city\n1,a,3,x\n2,b,,y\n2,a,5,x\n3,b,1e9,z\n",
        b"client;label;v\n1;0;1,5\n2;1;2\n1;1;?\n2;0;NaN\n",
        b"client,label,when\n1,0,2020-01-01\n2,1,2021-01-01\n",
        b"client,label,t\n1,0,true\n2,1,false\n3,1,\n",
        "client,label,ä\n1,0,ö\n2,1,ü\n".encode("latin1"),
        b'client,label,q\n1,0,"a\nb"\n2,1,"c""d"\n',
        b"\xef\xbb\xbfclient\tlabel\tx\n1\t0\t1\n2\t1\tinf\n",
        b"client,label,x\n1,0,1e308\n2,1,-1e308\n3,1,9223372036854775808\n",
    ]


def _idx_seeds() -> list[bytes]:
    small = b"\0\0\x08\x03" + struct.pack(">3I", 1, 2, 2) + bytes(4)
    wide = b"\0\0\x0e\x01" + struct.pack(">I", 2) + struct.pack(">2d", 1.5, math.nan)
    lying = b"\0\0\x0d\x02" + struct.pack(">2I", 2**31, 2**31)
    return [small, wide, lying, gzip.compress(small, mtime=0), gzip.compress(bytes(2000), mtime=0)]


def _cifar_seeds() -> list[bytes]:
    pixels = np.arange(3072, dtype=np.uint8).reshape(1, -1)
    seeds = []
    for protocol in (2, 4):
        ten = {b"data": pixels, b"labels": [3], b"filenames": [b"a.png"]}
        hundred = {"data": pixels, "fine_labels": [99], "coarse_labels": [1]}
        seeds += [b"\0" + pickle.dumps(ten, protocol), b"\2" + pickle.dumps(hundred, protocol)]
        seeds.append(b"\0" + pickle.dumps({b"data": pixels[:, :9], b"labels": [True]}, protocol))
    return [*seeds, b"\1" + bytes(3073), b"\3" + bytes(3074)]


def _tensor_seeds() -> list[bytes]:
    whole = save({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    head = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    facts = '{"round": 1, "identity": "", "digest": ""}'
    state = {"x": torch.zeros(8), "output.model": torch.zeros(8)}
    saved = save(state, {"facts": facts})
    size = int.from_bytes(saved[:8], "little")
    return [
        b"\0" + whole,
        b"\1" + head + b"\n" + bytes(32),
        b"\0" + saved,
        b"\1" + saved[8 : 8 + size] + b"\n" + saved[8 + size :],
        b'\1{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}\n',
    ]


def _packed_seeds() -> list[bytes]:
    forms = [(9, -5, 7), (1, 0, 3), (62, 0, 2), (13, -(2**12), 16)]
    return [
        struct.pack("<qHB", low, dim << 1, bits)
        + wire.pack(np.full((1, dim), low), bits, low).tobytes()
        for bits, low, dim in forms
    ]


TARGETS = {
    "toml": Target(settings, _settings_seeds),
    "csv": Target(table, _table_seeds),
    "idx": Target(idx, _idx_seeds),
    "cifar": Target(cifar, _cifar_seeds),
    "safetensors": Target(tensors, _tensor_seeds),
    "packed": Target(packed, _packed_seeds),
    "secagg_requests": Target(secagg.requests, secagg.request_seeds),
    "secagg_replies": Target(secagg.replies, secagg.reply_seeds),
    "frames": Target(federation.framed, federation.frame_seeds),
    "requests": Target(federation.requests, federation.request_seeds),
    "replies": Target(federation.replies, federation.reply_seeds),
    "models": Target(federation.models, federation.model_seeds),
    "masked": Target(federation.masked, federation.masked_seeds),
}


def survives(name: str, content: bytes) -> None:
    """Read it; a refusal is an answer, anything else is a defect."""
    with suppress(UserError):
        TARGETS[name].read(content)
