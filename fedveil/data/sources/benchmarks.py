"""Federated benchmarks in their own layouts: LEAF's JSON and TensorFlow Federated's HDF5."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Dataset, Examples
from fedveil.data.origin import Origin
from fedveil.data.sources.shakespeare import CLASSES, VOCABULARY, encode
from fedveil.errors import UserError

MAX_FILE = 2**31  # bytes of one JSON file
INPUTS = ("pixels", "image", "x", "tokens", "snippets")
LABELS = ("label", "labels", "y")
EXCLUSION = "the number of classes"


def load_leaf(path: Path) -> Dataset:
    """LEAF: {"users": …, "user_data": {user: {"x": …, "y": …}}} in JSON files, train/ and test/.

    Caldas et al. 2018, LEAF: a benchmark for federated settings. Text is read as characters of
    fedveil's public vocabulary, with a label at every position: the next character.
    """
    train, test = path, None
    if path.is_dir() and (path / "train").is_dir():
        train, test = path / "train", path / "test"
    users = dict(_users(train))
    held = dict(_users(test)) if test is not None and test.is_dir() else {}
    return _dataset(path.stem, users, held)


def _users(path: Path) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    files = [path] if path.is_file() else sorted(path.glob("*.json"))
    if not files:
        raise UserError(f"'{path}' has no JSON files. Give a folder in LEAF's layout.")
    for file in files:
        if file.stat().st_size > MAX_FILE:
            raise UserError(f"'{file}' has more than {MAX_FILE:,} bytes. Split it.")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            found = {str(u): content["user_data"][u] for u in content["users"]}
            yield from ((user, _pair(each["x"], each["y"])) for user, each in found.items())
        except (ValueError, KeyError, TypeError) as problem:
            raise UserError(
                f"'{file}' is not in LEAF's layout ({problem!r}). It needs users and user_data "
                "with x and y."
            ) from None


def load_hdf5(path: Path) -> Dataset:
    """TensorFlow Federated: /examples/<client>/<feature>, as in fed_emnist_train.h5."""
    try:
        import h5py
    except ImportError:
        raise UserError(
            f"Reading '{path}' needs h5py, which is not installed. Install it: pip install h5py."
        ) from None
    try:
        with h5py.File(path, "r") as file:
            return from_groups(path.stem, file)
    except OSError as problem:
        raise UserError(f"'{path}' is not a readable HDF5 file ({problem}).") from None


def from_groups(name: str, file: Mapping[str, Any]) -> Dataset:
    """A data set of the groups of an HDF5 file, or of nested dictionaries.

    >>> clients = {"f01": {"pixels": np.zeros((3, 2, 2)), "label": np.array([0, 1, 1])}}
    >>> from_groups("emnist", {"examples": clients | {"f02": clients["f01"]}})
    <Dataset emnist: 6 training and 0 test examples, 2 classes>
    """
    if "examples" not in file:
        raise UserError(f"'{name}' has no group 'examples'. Give a file in TFF's layout.")
    users = {}
    for user in sorted(file["examples"]):
        features = file["examples"][user]
        found = [next((f for f in names if f in features), None) for names in (INPUTS, LABELS)]
        if None in found:
            raise UserError(
                f"Client '{user}' of '{name}' has {', '.join(features)}. One of "
                f"{', '.join(INPUTS)} and one of {', '.join(LABELS)} is needed."
            )
        users[user] = _pair(*(np.asarray(features[f]) for f in found))
    return _dataset(name, users, {})


def _pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    if len(x) and isinstance(x[0], str):
        return _characters(x, y)
    inputs = torch.as_tensor(np.asarray(x))
    labels = torch.as_tensor(np.asarray(y, dtype=np.int64))
    inputs = inputs.to(torch.float32)
    return inputs.unsqueeze(1) if inputs.ndim == 3 else inputs, labels.reshape(len(labels))


def _characters(x: Sequence[str], y: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Windows of one length and the characters that follow them, as ids [n, length].

    >>> inputs, labels = _characters(["To b"], ["e"])
    >>> torch.equal(inputs[0, 1:], labels[0, :-1]), VOCABULARY[labels[0, -1]]
    (True, 'e')
    """
    lengths = {len(window) for window in x}
    if len(lengths) > 1 or any(len(following) != 1 for following in y) or len(x) != len(y):
        raise ValueError("windows must have one length, each followed by one character")
    joined = "".join(window + following for window, following in zip(x, y, strict=True))
    ids = torch.from_numpy(encode(joined)).reshape(len(x), -1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _dataset(
    name: str, users: dict[str, tuple[Tensor, Tensor]], held: dict[str, tuple[Tensor, Tensor]]
) -> Dataset:
    if not users:
        raise UserError(f"'{name}' has no clients.")
    owners = np.repeat(list(users), [len(y) for _, y in users.values()])
    x, y = (torch.cat(part) for part in zip(*users.values(), strict=True))
    test = Examples(x[:0], y[:0])
    if held:
        test_x, test_y = (torch.cat(part) for part in zip(*held.values(), strict=True))
        owner = np.repeat(list(held), [len(labels) for _, labels in held.values()])
        test = Examples(test_x, test_y, owners=owner)
    if y.ndim == 2:
        names = (*VOCABULARY, "other")
        return Dataset(name, Examples(x, y), test, CLASSES, class_names=names, keys=owners)
    classes = int(max(y.max(), test.labels[:].max() if len(test) else 0)) + 1
    origin = Origin(exclusions=(EXCLUSION,))
    return Dataset(name, Examples(x, y), test, classes, keys=owners, origin=origin)
