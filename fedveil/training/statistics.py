"""statistics: release statistics of a table with noise, charged to the ledger."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedveil.accounting import accountant as accounting
from fedveil.accounting.events import NonPrivate
from fedveil.accounting.rounding import rounded_up, short
from fedveil.aggregates.allowance import Allowance
from fedveil.aggregates.desk import Desk, deviation
from fedveil.aggregates.frequent import frequent_values, threshold
from fedveil.aggregates.histogram import COARSE, NoisyHistogram, histogram, refined
from fedveil.aggregates.moments import CONFIDENT, mean, row_count, total
from fedveil.data import rows
from fedveil.data.cells import cells_of, names_of
from fedveil.data.encoding import check_column, numbers_of
from fedveil.data.federated import Examples, Federated
from fedveil.data.frames import named_frame
from fedveil.data.sketch import sketched
from fedveil.data.table import several
from fedveil.errors import UserError
from fedveil.ledger.entering import entered
from fedveil.ledger.ledger import VIEWS, Account, Facts, ledger_path
from fedveil.ledger.resembling import resembling
from fedveil.ledger.session import Session
from fedveil.parts.statistics import Statistics
from fedveil.privacy.composition import ReleasePlan, Way
from fedveil.random.streams import SecretKey, run_key, stream
from fedveil.serialization.arguments import for_python

if TYPE_CHECKING:
    import polars as pl

BINS = 10  # of a histogram
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
COARSE_SHARE = 0.3  # of a release whose range is not declared, to find it
MOST_ROWS = 100  # of one client that count
REPRODUCIBLE = "Simulated: anyone who knows the seed can reproduce it."
SEEN = "the server sees what each client contributes"


@dataclass(frozen=True)
class Release:
    """One released statistic: its values by name, and what its error bar means."""

    kind: str
    column: str
    values: Mapping[str, float]
    error: float
    meaning: str  # of the error

    def line(self) -> str:
        """The values as text."""
        found = ", ".join(f"{name}: {self._shown(value)}" for name, value in self.values.items())
        return f"{found or 'none'} ({self.meaning} ± {rounded_up(self.error)})"

    def _shown(self, value: float) -> str:
        """A value with the digits that its error leaves; a quantile's error is not in its unit."""
        if self.kind == "quantiles" or not 0 < self.error < math.inf:
            return short(value, 4)
        return f"{value:,.{max(1 - math.floor(math.log10(self.error)), 0)}f}"


@dataclass(frozen=True)
class StatisticsReport:
    """Released statistics, and the guarantee that covers all of them together."""

    releases: tuple[Release, ...]
    epsilon: float
    delta: float
    clients: int
    account: str
    noise: str  # seeded or secure
    note: str = ""  # on other data with a budget that these resemble

    @property
    def sentence(self) -> str:
        """The guarantee, and what it assumes of the seed."""
        seeded = f" {REPRODUCIBLE}" if self.noise == "seeded" else ""
        return (
            f"These statistics together are ({rounded_up(self.epsilon)}, {rounded_up(self.delta)})"
            "-differentially private per client against anyone who sees them but no client's "
            "contribution (view models). Adjacency: add/remove and zero-out. Public: the number of "
            f"clients ({self.clients:,}) and the column names.{seeded}"
        )

    def __repr__(self) -> str:
        return f"<StatisticsReport: {len(self.releases)} releases, epsilon {self.epsilon:.4g}>"

    def text(self) -> str:
        """Everything as plain text."""
        lines = [f"{r.kind} {r.column}".strip() + f": {r.line()}" for r in self.releases]
        return "\n".join([*lines, self.sentence]) + "\n"

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "releases": [
                {"kind": r.kind, "column": r.column, "values": dict(r.values), "error": r.error,
                 "meaning": r.meaning}
                for r in self.releases
            ],
            "unit": "client",
            "view": "models",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "clients": self.clients,
            "account": self.account,
            "noise": self.noise,
            "note": self.note,
            "sentence": self.sentence,
        }  # fmt: skip

    def to_frame(self) -> pl.DataFrame:
        """One row for each released value, as a polars frame."""
        import polars as pl

        found = [
            {"statistic": r.kind, "column": r.column, "name": n, "value": v, "error": r.error}
            for r in self.releases
            for n, v in r.values.items()
        ]
        return pl.DataFrame(found)


@for_python
def statistics(
    table: Any,
    client: str,
    epsilon: float,
    delta: float | None = None,
    count: bool = False,
    sum: Sequence[str] | str = (),
    mean: Sequence[str] | str = (),
    quantiles: Sequence[str] | str = (),
    histogram: Sequence[str] | str = (),
    frequent: Sequence[str] | str = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    most_rows: int = MOST_ROWS,
    seed: int = 0,
    noise: Literal["seeded", "secure"] = "seeded",
    ledger: str | Path | None = None,
    account: str | None = None,
) -> StatisticsReport:
    """Release statistics of a table that together are (ε, δ)-DP per client.

    `table` is the path of a CSV or Parquet file, or a polars, pandas or Arrow table; `client` the
    column that identifies clients. Each of the others names columns. `sum` and `mean` need a public
    range; quantiles and histograms find one with a part of their noise. A mean is that of the
    clients' own means. Of a client, at most `most_rows` rows count for counts and sums. The release
    is recorded in the ledger before it is drawn, and refused beyond a budget of the data. Seeded
    noise is for simulations: use noise='secure' for statistics that are released.

    Args:
        table: Path of a CSV or Parquet file, or a polars, pandas or Arrow table.
        client: Column that identifies clients.
        epsilon: ε of all statistics together.
        delta: δ of all statistics together. [default: 1e-5, or 0.1/n if smaller]
        count: Count rows and clients.
        sum: Columns whose sum is released.
        mean: Columns whose mean is released.
        quantiles: Columns whose quantiles are released.
        histogram: Columns whose histogram is released.
        frequent: Columns whose values are released that enough clients have.
        ranges: Public range of each column, `{"age": (0, 100)}`.
        most_rows: Rows of a client that count.
        seed: Seed of seeded noise.
        noise: 'secure' draws noise from the operating system's randomness.
        ledger: Ledger that records the release. [default: the user's ledger]
        account: Named account of the ledger that is charged.

    >>> ages = {"who": [f"p{i}" for i in range(500)], "age": [20 + i % 50 for i in range(500)]}
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = statistics(ages, "who", 2.0, mean=["age"], ranges={"age": (0, 100)},
    ...                        ledger=f"{folder}/ledger.sqlite")
    >>> 40 < found.releases[0].values["mean"] < 50
    True
    """
    asked = [
        *([("count", "")] if count else []),
        *(("sum", column) for column in several(sum)),
        *(("mean", column) for column in several(mean)),
        *(("quantiles", column) for column in several(quantiles)),
        *(("histogram", column) for column in several(histogram)),
        *(("frequent", column) for column in several(frequent)),
    ]
    known = _read(table, client, [c for _, c in asked if c], ranges or {}, most_rows)
    if not asked:
        raise UserError("No statistic was requested. Name at least one, such as mean or frequent.")
    for column in {*several(sum), *several(mean), *known.ranges}:
        known.limits(column)  # refused before anything is charged
    at = accounting.sensible_delta(known.data.clients) if delta is None else delta
    granted = Allowance.alone(epsilon, at)
    facts = [seed, known.content, granted, asked, sorted((ranges or {}).items()), most_rows]
    key = SecretKey() if noise == "secure" else run_key("statistics", *facts)
    desk = Desk(granted, stream(key, 0, "statistics"))
    where = ledger_path(None if ledger is None else Path(ledger))
    session = _session(known.data, granted, at, key, where, account)
    try:
        session.reserve(0)
        share = granted.precision / len(asked)
        aside = granted.escape / max(1, len(several(frequent)))
        found = tuple(MAKERS[kind](desk, known, column, share, aside) for kind, column in asked)
        digest = hashlib.sha256(repr(found).encode()).hexdigest()[:32]
        session.commit(0, digest, once=True)
        session.end("models", 1, _epsilon(granted, at))
    finally:
        session.close()
    named, note = str(session.facts.account), resembling(known.data, account, where)
    return StatisticsReport(found, epsilon, at, known.data.clients, named, noise, note)


@dataclass(frozen=True, eq=False)
class _Known:
    frame: pl.DataFrame
    units: np.ndarray
    ranges: Mapping[str, tuple[float, float]]
    most_rows: int
    data: Federated
    content: str  # identifies everything in the table that statistics can depend on

    def numbers(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Units and values of the cells that are numbers."""
        values = numbers_of(cells_of(self.frame[column]))
        there = np.isfinite(values)
        return self.units[there], values[there]

    def limits(self, column: str) -> tuple[float, float]:
        """The public range of a column."""
        if column not in self.ranges:
            raise UserError(
                f"The sum or mean of '{column}' needs a public range: --range {column}=0,100 "
                "(ranges in Python). Values beyond it are clipped."
            )
        low, high = self.ranges[column]
        if not low < high:
            raise UserError(f"The range of '{column}' is {low} to {high}. Give low < high.")
        return float(low), float(high)


def _read(
    table: Any,
    client: str,
    columns: Sequence[str],
    ranges: Mapping[str, tuple[float, float]],
    most_rows: int,
) -> _Known:
    name, frame = named_frame(table)
    check_column(frame, client, "client column")
    for column in (*columns, *ranges):
        check_column(frame, column, "column")
    if most_rows < 1:
        raise UserError(f"most_rows is {most_rows}. Give a whole number, at least 1.")
    keys = names_of(frame[client])
    there = keys.is_not_null().to_numpy()
    if not there.any():
        raise UserError(f"No row has a value in '{client}'. Name the column of clients.")
    names, units = np.unique(np.array(keys.filter(there).to_list(), str), return_inverse=True)
    frame, digests = frame.filter(there), rows.row_digests(frame)
    data = _charged(Path(name).stem, client, names, digests)
    return _Known(frame, units, ranges, most_rows, data, rows.content_of(frame, client))


def _charged(name: str, client: str, names: np.ndarray, digests: np.ndarray) -> Federated:
    """The table as the ledger knows it: its rows and its clients. Its examples are placeholders."""
    nothing, labels = torch.zeros(len(names), 1), torch.zeros(len(names), dtype=torch.int64)
    return Federated(
        name, nothing, labels, torch.arange(len(names) + 1), Examples(nothing[:0], labels[:0]), 2,
        names=names, source=rows.identity_of(digests, client), rows=rows.identity_of(digests),
        sketch=sketched(digests),
    )  # fmt: skip


def _session(
    data: Federated,
    granted: Allowance,
    delta: float,
    key: SecretKey | str,
    ledger: Path,
    account: str | None,
) -> Session:
    """Enter the release in the ledger; a budget that it exceeds refuses it."""
    charged = Account.of(data, account)
    with entered(ledger, charged, data) as books:
        token = secrets.token_hex(16)
        name = f"secret {token}" if isinstance(key, SecretKey) else f"seeded {key}"
        facts = Facts(
            account=charged, data=data.name, population=data.clients, recipe="statistics",
            stream=name, rounds=1, delta=delta, plans=_plans(granted), people=books.people(data),
        )  # fmt: skip
        return Session(books, facts, token, contents=data.contents)


def _plans(granted: Allowance) -> dict[Any, ReleasePlan]:
    release = Statistics(granted.precision**-0.5, granted.escape).event("zero-out")
    ours = ReleasePlan((Way(release, None),), ("zero-out", "add-remove"))
    seen = ReleasePlan((Way(NonPrivate(SEEN), None),), ("zero-out",))
    return {view: ours if view == "models" else seen for view in VIEWS}


def _epsilon(granted: Allowance, delta: float) -> float:
    event = Statistics(granted.precision**-0.5, granted.escape).event("zero-out")
    return accounting.epsilon(event, delta)


def _count(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    found = row_count(desk, known.units, known.most_rows, precision)
    return Release("count", column, {"rows": found.value}, found.error, "95% of draws are within")


def _sum(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    low, high = known.limits(column)
    units, values = known.numbers(column)
    limit = known.most_rows * max(abs(low), abs(high))
    found = total(desk, units, np.clip(values, low, high), limit, precision)
    return Release("sum", column, {"sum": found.value}, found.error, "95% of draws are within")


def _mean(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    found = mean(desk, *known.numbers(column), known.limits(column), precision)
    return Release("mean", column, {"mean": found.value}, found.error, "95% of draws are within")


def _bins(desk: Desk, known: _Known, column: str, precision: float) -> NoisyHistogram:
    """Sixteen bins over the declared range, or over one that is found first."""
    units, values = known.numbers(column)
    if column in known.ranges:
        edges = np.linspace(*known.limits(column), 17)
        return histogram(desk, units, values, edges, precision)
    coarse = histogram(desk, units, values, COARSE, COARSE_SHARE * precision)
    found = refined(coarse)
    if found is None:
        raise UserError(
            f"With this much noise, '{column}' shows no range: too few clients have numbers there. "
            f"Declare it (--range {column}=0,100), or give a larger epsilon."
        )
    return histogram(desk, units, values, found, (1 - COARSE_SHARE) * precision)


def _quantiles(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    bins = _bins(desk, known, column, precision)
    values = {f"{q:.0%}": bins.quantile(q) for q in QUANTILES}
    return Release(
        "quantiles", column, values, bins.rank_error(), "rank error as a share of clients"
    )


def _histogram(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    bins = _bins(desk, known, column, precision)
    names = [f"{a:.4g} to {b:.4g}" for a, b in zip(bins.edges, bins.edges[1:], strict=False)]
    values = dict(zip(names, map(float, bins.weights), strict=True))
    return Release(
        "histogram", column, values, CONFIDENT * bins.sigma, "clients, 95% of draws within"
    )


def _frequent(desk: Desk, known: _Known, column: str, precision: float, aside: float) -> Release:
    cells = cells_of(known.frame[column])
    there = np.flatnonzero(cells.is_not_null().to_numpy())
    told = np.array(cells.gather(there).to_list(), dtype=str)
    found = frequent_values(desk, known.units[there], told, precision, aside)
    least = threshold(precision, aside)
    meaning = f"noisy client counts, threshold {least:.3g}, 95% of draws within"
    values = {each.value: each.weight for each in found}
    return Release("frequent", column, values, CONFIDENT * deviation(precision), meaning)


MAKERS: dict[str, Callable[[Desk, _Known, str, float, float], Release]] = {
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "quantiles": _quantiles,
    "histogram": _histogram,
    "frequent": _frequent,
}
