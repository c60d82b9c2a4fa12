"""The rows of a table: which are complete, their clients and classes, and which are held out.

Each decision about a row depends on that row and on public settings only. The exception is
`found_classes`, which reads the classes from all rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from fedveil.data.cells import cells_of, distinct, merging, names_of, words_of
from fedveil.data.encoding import check_column
from fedveil.errors import UserError

if TYPE_CHECKING:
    import polars as pl

MAX_CLASSES = 100
MAX_NAME = 1_000  # characters in a client's name


def complete(
    frame: pl.DataFrame, client: str, label: str, file: str
) -> tuple[pl.DataFrame, np.ndarray, list[str]]:
    """Client and class of each row as text, and which rows have both."""
    import polars as pl

    check_column(frame, client, "client column")
    check_column(frame, label, "label column")
    if client == label:
        raise UserError(f"'{client}' is both the client and the label column. Name two columns.")
    if merging(frame[client]):
        raise UserError(
            f"The client column '{client}' holds floats of 2^53 or more, which cannot represent "
            "every whole number. Store it as text or as whole numbers."
        )
    words = pl.DataFrame([names_of(frame[client]), cells_of(frame[label])])
    named = words[client].str.len_chars().fill_null(0).to_numpy() <= MAX_NAME
    there = (words[client].is_not_null() & words[label].is_not_null()).to_numpy()
    if not (named & there).any():
        raise UserError(f"No row of '{file}' has both '{client}' and '{label}'. Fill them in.")
    notes = []
    if not there.all():
        gone = int((~there).sum())
        notes.append(f"Left out {gone} rows without a value in '{client}' or '{label}'.")
    if not named.all():
        gone = int((~named).sum())
        notes.append(
            f"Left out {gone} rows whose '{client}' has more than {MAX_NAME:,} characters."
        )
    return words, named & there, notes


def declared_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Declared classes as written, each once."""
    import polars as pl

    names = words_of(pl.Series("classes", [str(name) for name in classes], dtype=pl.String))
    if names.null_count() or not distinct(names.to_list()) or len(names) < 2:
        raise UserError(f"classes is {list(classes)}. Name two or more classes, each once.")
    return tuple(names.to_list())


def found_classes(words: pl.DataFrame, label: str) -> tuple[str, ...]:
    """The classes in the data: numbers in numeric order, then text in alphabetical order."""
    import polars as pl

    found = words[label].drop_nulls().unique()
    numbers = found.cast(pl.Float64, strict=False)
    if bool((numbers.is_not_null() & (numbers != numbers.round())).any()):
        raise UserError(
            f"The label column '{label}' holds fractions or NaN. Name a column of classes."
        )
    if len(found) > MAX_CLASSES:
        raise UserError(
            f"The label column '{label}' has {len(found)} distinct values, more than "
            f"{MAX_CLASSES} classes. Name a column of classes, or group its values first."
        )
    if len(found) < 2:
        raise UserError(
            f"The label column '{label}' is '{found[0]}' in every row. Name a column with two "
            "classes."
        )
    return ordered(found.to_list())


def ordered(names: Sequence[str]) -> tuple[str, ...]:
    """Numbers in numeric order, then text in alphabetical order.

    >>> ordered(["no", "10", "9"])
    ('9', '10', 'no')
    """
    import polars as pl

    words = pl.Series("word", list(names), dtype=pl.String)
    numbers = words.cast(pl.Float64, strict=False).alias("number")
    order = pl.DataFrame([numbers, words]).sort(["number", "word"], nulls_last=True)
    return tuple(order["word"].to_list())


def of_classes(
    places: list[int | None], kept: np.ndarray, class_names: tuple[str, ...], label: str
) -> tuple[np.ndarray, list[str]]:
    """Only the rows of these classes; each row is decided on its own."""
    known = np.array([place is not None for place in places])
    gone = int((kept & ~known).sum())
    if not (kept & known).any():
        raise UserError(
            f"No row's '{label}' is one of the classes {', '.join(class_names)}. Declare others."
        )
    if not gone:
        return kept, []
    return kept & known, [f"Left out {gone} rows whose '{label}' is not one of the classes."]


def row_digests(frame: pl.DataFrame) -> np.ndarray:
    """64 bits of BLAKE2b of each row's cells, independent of column order and types; uint64 [n]."""
    import polars as pl

    cells = [cells_of(column).fill_null("") for column in frame.get_columns()]
    joined = pl.DataFrame(cells).select(
        pl.concat_list(pl.all()).list.sort().list.join("\x1f").alias("row")
    )
    digests = b"".join(
        hashlib.blake2b(row.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for row in joined["row"]
    )
    return np.frombuffer(digests, dtype=">u8").astype(np.uint64)


def content_of(frame: pl.DataFrame, client: str) -> str:
    """SHA-256 of the rows in any order, with the name and the place of every cell's column.

    Statistics are a function of this, so it is part of the key of their noise. `row_digests` is
    not enough: it does not say which column a cell is in.
    """
    import polars as pl

    known = [names_of(frame[client]), *map(cells_of, frame.get_columns())]
    sized = [(c.str.len_bytes().cast(pl.String) + ":" + c).fill_null("-") for c in known]
    table = pl.DataFrame([column.alias(str(place)) for place, column in enumerate(sized)])
    whole = hashlib.sha256(json.dumps([client, *frame.columns]).encode())
    for row in table.select(pl.concat_str(pl.all())).to_series().sort():
        whole.update(row.encode())
    return whole.hexdigest()


def check_clients(keys: np.ndarray, client: str) -> None:
    """Refuse a column with fewer than two clients."""
    if len(np.unique(keys)) < 2:
        raise UserError(
            f"The client column '{client}' is '{keys[0]}' in every row. Federated training needs "
            "at least two clients: name the column that identifies people or devices."
        )


def held_out(rows: np.ndarray, keys: np.ndarray, fraction: float, seed: int, by: str) -> np.ndarray:
    """Which rows are held out: by a hash of the seed and of the row's client, or of the row.

    Joint draws, over all clients or over a client's rows, would let one row change the use of
    others. So the number of held-out clients is random.
    """
    salt = hashlib.blake2b(f"fedveil/held out/{seed}".encode(), digest_size=16).digest()
    if by == "rows":
        texts = [row.tobytes() for row in rows]
        drawn = np.array([_uniform(text, salt) for text in texts])
        return np.asarray(drawn < np.uint64(fraction * 2**64))
    names, codes = np.unique(keys, return_inverse=True)
    drawn = np.array([_uniform(name.encode("utf-8", "surrogatepass"), salt) for name in names])
    return np.asarray((drawn < np.uint64(fraction * 2**64))[codes])


def _uniform(text: bytes, salt: bytes) -> np.uint64:
    return np.uint64(
        int.from_bytes(hashlib.blake2b(text, key=salt, digest_size=8).digest(), "little")
    )


def identity_of(rows: np.ndarray, client: str = "") -> str:
    """SHA-256 of the rows in any order, and of which column names the client, if that counts."""
    whole = hashlib.sha256(np.sort(rows).astype("<u8").tobytes())
    whole.update(client.encode())
    return whole.hexdigest()


def undeclared(label: str, class_names: tuple[str, ...]) -> list[str]:
    """A note on classes that are read from the data without noise."""
    named = ",".join(class_names[:3]) + ("…" if len(class_names) > 3 else "")
    return [
        f"The classes of '{label}' are read from the data, and no ε covers them. If they are "
        f"public, declare them: --data classes={named}"
    ]


def pictures(frame: pl.DataFrame, besides: tuple[str, ...]) -> list[str]:
    """A note on columns of images, whose bytes or file names would be read as text."""
    from fedveil.data.sources.images import SUFFIXES

    for name in (name for name in frame.columns if name not in besides):
        cell = next(iter(frame[name].drop_nulls().head(1)), None)
        if isinstance(cell, dict):
            cell = cell.get("bytes") or cell.get("path")
        path = isinstance(cell, str) and PurePosixPath(cell).suffix.lower() in SUFFIXES
        if path or isinstance(cell, bytes):
            return [f"If '{name}' has images, give --data image={name} to train on them."]
    return []


def remarks(
    keys: np.ndarray, labels: np.ndarray, names: tuple[str, ...], testing: np.ndarray, own: bool
) -> list[str]:
    """Notes for the holder of the data: imbalance, hold-out, clients with a single row."""
    notes = []
    if names:
        counts = np.bincount(labels)
        top = int(counts.argmax())
        share = counts[top] / len(labels)
        notes.append(f"The largest class, '{names[top]}', has {share:.0%} of the rows.")
    if own and not testing.any():
        notes.append("No rows are held out for testing. Give --test FILE, or another data seed.")
    clients, rows = np.unique(keys, return_counts=True)
    if rows.max() == 1:
        notes.append(
            "Every client has a single row: ε protects rows, not people. If a person has several "
            "rows, name the column that identifies the person."
        )
    without = np.setdiff1d(clients, keys[~testing])
    if len(without):
        notes.append(f"{len(without)} clients are held out for testing: they have only test rows.")
    return notes
