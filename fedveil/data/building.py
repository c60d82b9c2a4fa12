"""Federated data from what people have in memory: arrays, torch data sets, frames, Hugging Face.

The owner of each example is given, so the clients are real. What is read from all examples (here,
the number of classes where it is not given) is an exclusion of every guarantee.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.data.frames import as_frame
from fedveil.data.origin import Origin
from fedveil.data.partition import ByKey
from fedveil.errors import UserError, told
from fedveil.serialization.arguments import for_python

if TYPE_CHECKING:
    import polars as pl

CHUNK = 100_000  # rows of a Parquet file read at a time


@for_python
def from_arrays(
    inputs: Any,
    labels: Any,
    clients: Any,
    test: tuple[Any, ...] | None = None,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    name: str = "arrays",
    loss: str = "cross_entropy",
    tested_on_clients: bool = True,
) -> Federated:
    """Inputs [n, …], labels [n] and the client of each example [n], as NumPy arrays or tensors.

    `test` has inputs and labels, and as a third array the client of each test example, if it is
    known: a private evaluation needs it. `classes` is the public number of classes; without it,
    the number is read from the labels, which no ε covers. `tested_on_clients` says whether test
    examples may belong to clients.

    >>> x, y = np.zeros((6, 2), np.float32), np.array([0, 1, 0, 1, 1, 0])
    >>> from_arrays(x, y, clients=["a", "a", "b", "b", "c", "c"], classes=2)
    <Federated arrays: 3 clients, 6 examples, 2 classes>
    """
    x, y = _inputs(inputs), _labels(labels, loss)
    owners = _named(clients)
    if owners.ndim != 1:
        raise UserError(
            f"from_arrays: clients is {told(clients)}. Give the client of each example in a list."
        )
    held = Examples(x[:0], y[:0]) if test is None else _held(test, loss, x)
    count, origin = _classes(classes, class_names, y, loss)
    whole = Dataset(
        name, Examples(x, y), held, count, loss, tuple(class_names), owners,
        origin=origin, tested_on_clients=tested_on_clients,
    )  # fmt: skip
    return whole.split(ByKey())


@for_python
def from_torch(
    clients: Any, test: Any = None, classes: int | None = None, name: str = "torch", **options: Any
) -> Federated:
    """One torch Dataset of (input, label) pairs per client: a list, or a dictionary by name.

    >>> pairs = [(torch.zeros(2), 0), (torch.ones(2), 1)]
    >>> from_torch({"a": pairs, "b": pairs}, classes=2)
    <Federated torch: 2 clients, 4 examples, 2 classes>
    """
    if not isinstance(clients, Mapping | Sequence) or isinstance(clients, str):
        raise UserError(
            f"from_torch: clients is {told(clients)}. Give a list of Datasets, one per client, or "
            "a dictionary of them by the client's name."
        )
    named = clients if isinstance(clients, Mapping) else dict(enumerate(clients))
    if not named:
        raise UserError("from_torch: there are no clients. Give at least one Dataset.")
    pieces = [_stacked(each, f"client {key!r}") for key, each in named.items()]
    owners = np.repeat([str(key) for key in named], [len(y) for _, y in pieces])
    x, y = (torch.cat(part) for part in zip(*pieces, strict=True))
    held = None if test is None else _stacked(test, "the test set")
    return from_arrays(x, y, owners, held, classes, name=name, **options)


@for_python
def from_frames(frames: Any, label: str, name: str = "frames", **options: Any) -> Federated:
    """One table per client: a dictionary of polars, pandas or Arrow tables, by the client's name.

    The other arguments are those of `load_table`.

    >>> visits = {"age": [34, 51], "ill": [0, 1]}
    >>> from_frames({"a": visits, "b": visits}, "ill", classes=["0", "1"], test_fraction=0)
    <Federated table: 2 clients, 4 examples, 2 classes>
    """
    import polars as pl

    from fedveil.data.cells import words_of
    from fedveil.data.table import load_table

    if not isinstance(frames, Mapping) or not frames:
        raise UserError("from_frames: give a dictionary of tables by the client's name.")
    parts = []
    for key, each in frames.items():
        plain = as_frame(each)  # types of one client must not decide those of others
        texts = plain.select(words_of(column) for column in plain.get_columns())
        parts.append(texts.with_columns(pl.lit(str(key)).alias(OWNER)))
    try:
        whole = pl.concat(parts, how="diagonal")
    except Exception as error:  # polars raises several kinds
        raise UserError(f"from_frames: the tables do not fit together ({error}).") from None
    return load_table(whole, OWNER, label, **options).split(ByKey())


OWNER = "client (by table)"


@for_python
def from_hf(
    dataset: Any,
    client: str,
    label: str,
    inputs: str | None = None,
    test: Any = None,
    classes: int | Sequence[str] | None = None,
    name: str = "hugging face",
    **options: Any,
) -> Federated:
    """A Hugging Face data set with a column of clients, one of labels and one of inputs.

    Without `inputs`, all other columns are inputs, encoded as those of a table (`load_table`).

    >>> rows = {"who": ["a", "a", "b"], "x": [[0.0, 1.0]] * 3, "y": [0, 1, 1]}
    >>> from_hf(rows, "who", "y", "x", classes=2).clients
    2
    """
    columns = _columns(dataset)
    for column in (client, label, *([] if inputs is None else [inputs])):
        if column not in columns:
            raise UserError(f"from_hf: there is no column '{column}'. Known: {', '.join(columns)}.")
    if inputs is None:
        from fedveil.data.table import load_table

        plain = {column: list(dataset[column]) for column in columns}
        if isinstance(classes, int):
            raise UserError("from_hf: name the classes of a table, or the column of its inputs.")
        table = load_table(plain, client, label, classes=classes, test=test, **options)
        return table.split(ByKey())
    held: tuple[Any, ...] | None = None
    if test is not None:
        if not {inputs, label} <= set(_columns(test)):
            raise UserError(f"from_hf: test needs the columns '{inputs}' and '{label}'.")
        known = [inputs, label, *([client] if client in _columns(test) else [])]
        held = tuple(list(test[column]) for column in known)
    x, y, owners = (list(dataset[column]) for column in (inputs, label, client))
    names = () if classes is None or isinstance(classes, int) else tuple(classes)
    count = classes if isinstance(classes, int) else None
    return from_arrays(x, y, owners, held, count, names, name, **options)


@for_python
def from_parquet(
    path: str | Path,
    client: str,
    label: str,
    inputs: Sequence[str],
    folder: str | Path,
    classes: int,
    test: tuple[Any, Any] | None = None,
) -> Federated:
    """Stream a Parquet file that is sorted by client into a directory, and open it from there.

    `inputs` are numeric columns. Only one client's rows and one chunk of the file are in memory.
    The directory is written by `save_clients` and can be opened again with `open_federated`.
    """
    from fedveil.data.save import save_clients
    from fedveil.data.saved import open_federated

    x = torch.zeros(0, len(inputs))
    none = Examples(x, torch.zeros(0, dtype=torch.int64))
    held = none if test is None else Examples(_inputs(test[0]), _labels(test[1], "cross_entropy"))
    pieces = _by_client(Path(path), client, label, list(inputs))
    save_clients(folder, pieces, held, Path(path).stem, classes, origin=Origin())
    return open_federated(folder)


def _by_client(path: Path, client: str, label: str, inputs: list[str]) -> Iterator[Examples]:
    """The examples of one client after another; a client whose rows are apart is refused."""
    import polars as pl

    seen: set[str] = set()
    pending: list[pl.DataFrame] = []
    current: str | None = None

    def examples() -> Examples:
        rows = pl.concat(pending)
        numbers = torch.from_numpy(rows.select(inputs).cast(pl.Float32).to_numpy().copy())
        return Examples(numbers, torch.from_numpy(rows[label].cast(pl.Int64).to_numpy().copy()))

    for chunk in _chunks(path, [client, label, *inputs]):
        for key, rows in chunk.group_by(client, maintain_order=True):
            owner = str(key[0])
            if current is not None and owner != current:
                yield examples()
                pending = []
                seen.add(current)
                if owner in seen:
                    raise UserError(
                        f"from_parquet: the rows of client '{owner}' are not together. Sort the "
                        f"file by '{client}' first."
                    )
            current = owner
            pending.append(rows)
    if pending:
        yield examples()


def _chunks(path: Path, columns: list[str]) -> Iterator[pl.DataFrame]:
    import polars as pl

    if not path.is_file():
        raise UserError(f"No such file: '{path}'. Give the path of a Parquet file.")
    try:
        whole = pl.scan_parquet(path).select(columns)
        height = int(whole.select(pl.len()).collect().item())
    except Exception as error:  # polars raises many kinds
        raise UserError(f"'{path}' is not readable as Parquet ({str(error)[:150]}).") from None
    for start in range(0, height, CHUNK):
        yield whole.slice(start, CHUNK).collect()


def _held(test: tuple[Any, ...], loss: str, like: Tensor) -> Examples:
    """Test examples: inputs, labels and, if given, the client of each."""
    if not isinstance(test, tuple | list) or len(test) not in (2, 3):
        raise UserError("test must be inputs and labels, or inputs, labels and clients.")
    owners, x = _named(test[2]) if len(test) == 3 else None, _inputs(test[0])
    if x.is_floating_point() and x.shape[1:] != like.shape[1:]:
        raise UserError(
            f"test has inputs of shape {list(x.shape[1:])}, but training inputs are "
            f"{list(like.shape[1:])}. Give both the same shape."
        )
    return Examples(x, _labels(test[1], loss), owners=owners)


def _named(clients: Any) -> np.ndarray:
    """The client of each example, whatever names it."""
    return np.asarray(clients.tolist() if isinstance(clients, Tensor) else clients, dtype=object)


def _inputs(given: Any) -> Tensor:
    if isinstance(given, Mapping):
        raise UserError(
            "from_arrays takes one array of inputs, but inputs is a dictionary. Pack several "
            "inputs with Examples.of(inputs, labels), and pass them to Dataset (docs/models.md)."
        )
    found = _tensor(given, "inputs")
    return found if found.dtype == torch.int64 and found.ndim > 1 else found.to(torch.float32)


def _labels(given: Any, loss: str) -> Tensor:
    found = _tensor(given, "labels")
    if not _of_classes(loss):
        return found.to(torch.float32)
    if found.is_floating_point() and not torch.equal(found, found.round()):
        raise UserError("labels are fractions. Give whole numbers from 0, or another loss.")
    return found.to(torch.int64)


def _of_classes(loss: str) -> bool:
    from fedveil.models.losses import target_of

    return target_of(loss) == "class"


def _tensor(given: Any, name: str) -> Tensor:
    try:
        whole = given if isinstance(given, Tensor) else torch.as_tensor(_writable(given))
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} cannot be made a tensor ({error}). Give numbers.") from None
    if not whole.ndim:
        raise UserError(f"{name} is {told(given)}. Give one row per example.")
    return whole.contiguous()


def _writable(given: Any) -> np.ndarray:
    """As an array that torch may share; frames lend arrays that may not be written."""
    array = np.asarray(given)
    return array if array.flags.writeable else array.copy()


def _stacked(pairs: Iterable[Any], what: str) -> tuple[Tensor, Tensor]:
    """All pairs of a data set, as two tensors."""
    try:
        known = list(pairs) if not hasattr(pairs, "__getitem__") else [*_items(pairs)]
        x = torch.stack([torch.as_tensor(np.asarray(each[0])) for each in known])
        y = torch.stack([torch.as_tensor(np.asarray(each[1])) for each in known])
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise UserError(
            f"from_torch: {what} is not a Dataset of (input, label) pairs of one shape ({error})."
        ) from None
    return x, y


def _items(pairs: Any) -> Iterator[Any]:
    for place in range(len(pairs)):
        yield pairs[place]


def _columns(dataset: Any) -> list[str]:
    names = getattr(dataset, "column_names", None) or (
        list(dataset) if isinstance(dataset, Mapping) else None
    )
    if not isinstance(names, list):
        raise UserError(
            f"from_hf: a {type(dataset).__name__} has no columns. Give one split of a data set, "
            "such as load_dataset(…)['train']."
        )
    return names


def _classes(
    classes: int | None, names: Sequence[str], labels: Tensor, loss: str
) -> tuple[int, Origin]:
    """The number of classes; read from the labels if it is not given."""
    if not _of_classes(loss):
        return classes or 1, Origin()
    if classes is not None or names:
        return classes or len(names), Origin()
    return int(labels.max()) + 1, Origin(exclusions=("the number of classes",))
