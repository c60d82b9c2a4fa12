"""Loads a table with a client column and a label column as a data set."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedveil.accounting.accountant import sensible_delta
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import Desk
from fedveil.data import rows
from fedveil.data.cells import names_of, numbered, spelled
from fedveil.data.declared import (
    Categories,
    Dates,
    Declared,
    Ranges,
    fitted,
    listed,
    public,
    taken,
)
from fedveil.data.encoding import BUCKETS, TableEncoder, check_column
from fedveil.data.federated import Dataset, Examples
from fedveil.data.frames import named_frame, with_types
from fedveil.data.learning import BudgetShares, TrainingRows, learned, learned_classes
from fedveil.data.origin import Origin
from fedveil.data.sketch import sketched
from fedveil.data.targets import NumericTargets, numeric_targets, others, refuse_classes
from fedveil.errors import UserError, unknown
from fedveil.random.streams import Key, SecretKey, run_key, stream
from fedveil.serialization.arguments import for_python

if TYPE_CHECKING:
    import polars as pl


@for_python
def load_table(
    path: Any,
    client: str,
    label: str,
    test_fraction: float = 0.2,
    seed: int = 0,
    ranges: Ranges | None = None,
    categories: Categories | None = None,
    classes: Sequence[Any] | None = None,
    buckets: int = BUCKETS,
    standardize: bool = False,
    dates: Dates | None = None,
    columns: Sequence[str] = (),
    drop: Sequence[str] = (),
    holdout: Literal["clients", "rows"] = "clients",
    test: Any = None,
    stats_epsilon: float | None = None,
    stats_delta: float | None = None,
    noise: Literal["seeded", "secure"] = "seeded",
    target: Literal["class", "number"] = "class",
) -> Dataset:
    """Load a table: the path of a CSV or Parquet file, or a polars, pandas or Arrow table.

    `client` and `label` name the columns that identify a client and that is to be predicted.
    With `stats_epsilon`, classes, ranges and categories that are not declared are learned from
    noisy statistics, which are (stats_epsilon, stats_delta)-DP per client by themselves
    [default of stats_delta: the usual δ]. Every ε of a training on the data then covers them.
    Without it, columns without a declaration are encoded in fixed public bins, and classes are
    read from the data, which no ε covers (`Dataset.origin`). `columns` names the only inputs,
    `drop` columns that are none. About a `test_fraction` of the clients, or of the rows
    (`holdout`), is held out, unless `test` gives a table of test rows. With target='number', the
    label is a number, scaled to 0…1 by its range if `ranges` declares one. `ranges`, `categories`,
    `dates` and `classes` declare public values. `buckets` is the number of inputs of text without
    categories. `standardize` uses means and frequent values of all rows, which no ε covers. `seed`
    decides the hold-out and the noise, which is secret with noise='secure'.

    >>> from fedveil import ByKey
    >>> visits = {"who": ["a", "b", "c"] * 4, "age": [34, 51, 29] * 4, "ill": [0, 1, 1] * 4}
    >>> table = load_table(visits, "who", "ill", holdout="rows", classes=["0", "1"])
    >>> table.split(ByKey()).clients
    3
    """
    if isinstance(classes, str):
        raise UserError(f"classes is {classes!r}. Give a list of names, such as ['no', 'yes'].")
    options = TableOptions(
        client=client, label=label, test_fraction=test_fraction, seed=seed, ranges=ranges or {},
        categories=categories or {}, dates=dates or {},
        classes=None if classes is None else spelled(classes), buckets=buckets,
        standardize=standardize, columns=several(columns), drop=several(drop), holdout=holdout,
        target=target,
    )  # fmt: skip
    if stats_epsilon is None:
        return read_table(path, options, test=test).dataset
    granted = alone(stats_epsilon, stats_delta, seed, noise)
    return read_table(path, options, granted, test).dataset


def several(names: Sequence[str] | str) -> tuple[str, ...]:
    """Names in a list, or a single one.

    >>> several("age"), several(["age", "bmi"])
    (('age',), ('age', 'bmi'))
    """
    return (names,) if isinstance(names, str) else tuple(names)


def alone(
    epsilon: float, delta: float | None, seed: int, noise: str
) -> Callable[[int, str], StatisticsNoise | None]:
    """Statistics that are (ε, δ)-DP by themselves; none for ε = 0."""

    def granted(clients: int, subject: str) -> StatisticsNoise | None:
        if epsilon == 0:
            return None
        at = sensible_delta(clients) if delta is None else delta
        return keyed(Allowance.alone(epsilon, at), seed, noise, subject)

    return granted


def keyed(allowance: Allowance, seed: int, noise: str, subject: str) -> StatisticsNoise:
    """The allowance with the key of its noise: secret, or of the seed, the subject and the cost.

    The subject identifies everything that the statistics are computed from, so two different
    releases never share noise.
    """
    if noise == "secure":
        return StatisticsNoise(allowance, SecretKey())
    return StatisticsNoise(allowance, run_key("statistics", seed, subject, allowance))


@dataclass(frozen=True, eq=False)
class EncodedTable:
    """A table's data set and the encoder of its inputs."""

    dataset: Dataset
    encoder: TableEncoder


@dataclass(frozen=True)
class StatisticsNoise:
    """What statistics of the table may cost, and the key of their noise."""

    allowance: Allowance
    key: Key


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Public settings of a table: its columns, what is declared about them, and the hold-out."""

    client: str
    label: str
    test_fraction: float = 0.2
    seed: int = 0
    ranges: Ranges = field(default_factory=dict)
    categories: Categories = field(default_factory=dict)
    dates: Dates = field(default_factory=dict)
    classes: tuple[str, ...] | None = None
    buckets: int = BUCKETS
    standardize: bool = False
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    holdout: Literal["clients", "rows"] = "clients"
    target: Literal["class", "number"] = "class"  # what the label column holds

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction < 1:
            raise UserError(
                f"test_fraction is {self.test_fraction}. Give a number from 0 to below 1."
            )
        if self.holdout not in ("clients", "rows"):
            raise unknown("hold-out", str(self.holdout), ("clients", "rows"))
        if self.target not in ("class", "number"):
            raise unknown("target", str(self.target), ("class", "number"))
        if self.target == "number":
            refuse_classes(self.classes, self.label)

    def class_names(self) -> tuple[str, ...] | None:
        """The declared classes; none for a numeric label, and None if they are not declared."""
        if self.target == "number":
            return ()
        return None if self.classes is None else rows.declared_classes(self.classes)

    def declared(self, class_names: tuple[str, ...]) -> Declared:
        """The declarations about the columns."""
        return Declared(
            self.client, self.label, class_names, others(self.ranges, self.label)
            if self.target == "number" else self.ranges, self.categories, self.buckets,
            self.dates, self.columns, self.drop,
        )  # fmt: skip


def read_table(
    source: Any,
    options: TableOptions,
    noise: Callable[[int, str], StatisticsNoise | None] | None = None,
    test: Any = None,
    encoder: TableEncoder | None = None,
    own: bool = False,
) -> EncodedTable:
    """Rows → inputs float32 [n, features], labels 0…k−1, keys = client column.

    A row's inputs, label, key and part (training or test) are functions of that row, of the
    options, and of statistics with noise. `noise` gives their allowance and key for a number of
    clients and what they are computed from; None: there are no statistics. Then columns without a
    declaration are encoded in fixed public bins, and classes are read from the data, with two
    exceptions that `Dataset.origin` names: the classes, and with `standardize` the data's own
    means, deviations and categories. `test` is a table of test rows. A given encoder is used as it
    is. A table of a client's `own` may hold that client only, and none of its rows are held out.
    """
    title, frame = named_frame(source)
    words, kept, notes = rows.complete(frame, options.client, options.label, title)
    notes += rows.pictures(frame, (options.client, options.label, *options.drop))
    numbers = numbers_of(frame, options, encoder)
    if numbers is not None:
        notes += numbers.notes(kept)
        kept = kept & numbers.known
    keys = _keys(words[options.client], kept)
    if not own:
        rows.check_clients(keys[kept], options.client)
    digests = rows.row_digests(frame)
    testing = np.zeros(len(kept), dtype=bool)
    if test is None and not own:
        how = options.test_fraction, options.seed, options.holdout
        testing = rows.held_out(digests, keys, *how)
    training = kept & ~testing
    if not training.any():
        raise UserError(
            "No row is left to train on: all clients are held out. Give another data seed, or "
            "--holdout rows."
        )
    found = _encoder(frame, words, keys, training, kept, options, noise, encoder)
    names: tuple[str, ...] = ()
    if numbers is not None:
        scaled = replace(found.encoder, target_range=numbers.range)
        found, labels = replace(found, encoder=scaled), numbers.column[kept]
    else:
        names = found.encoder.class_names
        places = numbered(words[options.label], names)
        kept, more = rows.of_classes(places, kept, names, options.label)
        notes += more
        labels = torch.tensor([place for place, there in zip(places, kept, strict=True) if there])
    inputs, part = found.encoder.encode(found.frame.filter(kept)), testing[kept]
    tested = Examples(inputs[part], labels[part], owners=keys[kept][part])
    shared = bool(part.any())
    if test is not None:
        tested, shared = _tested(test, found.encoder, options, keys[kept])
    dataset = Dataset(
        Path(title).stem,
        Examples(inputs[~part], labels[~part]),
        tested,
        len(names) or 1,
        "cross_entropy" if numbers is None else "half_squared",
        class_names=names,
        keys=keys[kept][~part],
        notes=(
            *(*notes, *found.notes),
            *rows.remarks(keys[kept], labels.numpy(), names, part, test is None and not own),
        ),
        encoder=found.encoder.to_json(),
        origin=found.origin,
        sketch=sketched(digests[kept]),
        source=rows.identity_of(digests, options.client),
        rows=rows.identity_of(digests),
        tested_on_clients=shared,
        keyed_by=options.client,
    )
    return EncodedTable(dataset, found.encoder)


def _keys(clients: pl.Series, kept: np.ndarray) -> np.ndarray:
    """The client of each row; none of rows that are left out, which may be of any length."""
    found = zip(clients.to_list(), kept, strict=True)
    return np.array([client if there else "" for client, there in found], dtype=str)


def numbers_of(
    frame: pl.DataFrame, options: TableOptions, encoder: TableEncoder | None
) -> NumericTargets | None:
    """The numeric targets of a table; None for classes."""
    if options.target != "number":
        return None
    ranges = dict(options.ranges)
    if encoder is not None and encoder.target_range is not None:
        ranges[options.label] = encoder.target_range
    return numeric_targets(frame[options.label], options.label, ranges)


@dataclass(frozen=True, eq=False)
class _Found:
    """An encoder, the frame in the form that it takes, notes on it, and what was read for it."""

    encoder: TableEncoder
    frame: pl.DataFrame
    notes: list[str]
    origin: Origin


def _encoder(
    frame: pl.DataFrame,
    words: pl.DataFrame,
    keys: np.ndarray,
    training: np.ndarray,
    kept: np.ndarray,
    options: TableOptions,
    noise: Callable[[int, str], StatisticsNoise | None] | None,
    given: TableEncoder | None,
) -> _Found:
    """The given encoder, or one that is learned with noise, fitted without, or public."""
    if given is not None:
        origin = Origin(statistics=given.statistics, released=given.released)
        return _Found(given, frame, [], origin)
    units = np.unique(keys[training], return_inverse=True)[1]
    if noise is not None and not options.standardize:
        subject = run_key(options, rows.content_of(frame.filter(training), options.client))
        granted = noise(int(units.max()) + 1, subject)
        if granted is not None:
            return _learned(frame, words, training, units, options, granted)
    known = options.class_names()
    declared = known is not None
    names = rows.found_classes(words.filter(kept), options.label) if known is None else known
    exclusions = [] if declared else [f"the classes of '{options.label}'"]
    notes = [] if declared else rows.undeclared(options.label, names)
    declarations = options.declared(names)
    if not options.standardize:
        encoder, told = public(frame, declarations)
        return _Found(encoder, frame, told + notes, Origin(exclusions=tuple(exclusions)))
    typed = with_types(frame)
    encoder, told = fitted(typed, training, declarations)
    exclusions += taken(encoder, declarations)
    return _Found(encoder, typed, told + notes, Origin(exclusions=tuple(exclusions)))


def _learned(
    frame: pl.DataFrame,
    words: pl.DataFrame,
    training: np.ndarray,
    units: np.ndarray,
    options: TableOptions,
    noise: StatisticsNoise,
) -> _Found:
    """Classes and columns that are not declared, from noisy statistics of the training rows."""
    names = known = options.class_names()
    declared = options.declared(names or ())
    declared.check(frame)
    open_ = [name for name in declared.inputs(frame) if declared.column(name) is None]
    share = BudgetShares(len(open_), names is None)
    desk = Desk(noise.allowance, stream(noise.key, 0, "statistics"))
    if names is None:
        labels = words.filter(training)[options.label].to_list()
        names = rows.ordered(learned_classes(desk, units, labels, share, options.label))
    trained = TrainingRows(frame.filter(training), units)
    encoder, notes = learned(desk, trained, options.declared(names), share)
    released: tuple[str, ...] = () if known is not None else (f"the classes of '{options.label}'",)
    if open_:
        released += (f"the types, ranges and categories of {listed(open_)}",)
    spent = desk.spent()
    drawn = "" if spent is None else _name_of(noise, options, frame)
    encoder = replace(encoder, statistics=spent, released=tuple(released), noise=drawn)
    return _Found(encoder, frame, notes, Origin(statistics=spent, released=encoder.released))


def _name_of(noise: StatisticsNoise, options: TableOptions, frame: pl.DataFrame) -> str:
    """A name of the noise, by public facts: it is published with the encoder."""
    if isinstance(noise.key, SecretKey):
        return secrets.token_hex(8)
    return run_key(options, frame.columns, noise.allowance)


def _tested(
    source: Any, encoder: TableEncoder, options: TableOptions, trained: np.ndarray
) -> tuple[Examples, bool]:
    """The examples of a test table, and whether any belongs to a client of the training table."""
    name, frame = named_frame(source)
    check_column(frame, options.label, "label column of the test table")
    numbers = numbers_of(frame, options, encoder)
    places = numbered(frame[options.label], encoder.class_names)
    known = np.array([place is not None for place in places]) if numbers is None else numbers.known
    if not known.any():
        raise UserError(f"No row of the test table '{name}' has a known '{options.label}'.")
    frame = with_types(frame) if encoder.inferred else frame
    labels = torch.tensor([place for place in places if place is not None])
    labels = labels if numbers is None else numbers.column[known]
    both, owners = True, None
    if options.client in frame.columns:
        clients = names_of(frame[options.client])
        both = bool(set(clients.drop_nulls().to_list()) & set(trained.tolist()))
        owners = _owners(clients.filter(known).to_list())
    return Examples(encoder.encode(frame.filter(known)), labels, owners=owners), both


def _owners(clients: list[str | None]) -> np.ndarray | None:
    """The client of each test row; None if a row does not name one."""
    return None if None in clients else np.array(clients, dtype=str)
