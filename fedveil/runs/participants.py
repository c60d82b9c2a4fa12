"""clients.parquet: one row per participant and round. It is private data."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fedveil.engines.seen import Seen
from fedveil.runs.directory import RunDirectory
from fedveil.runs.saved import CLIENTS, reading

if TYPE_CHECKING:
    from pathlib import Path

    from polars import DataFrame

MOST = 2**20  # rows in memory: 32 MB
GROUP = 2**16  # rows per row group of the file


class ParticipantRows:
    """The rows that are not on disk yet. Beyond `MOST` rows the oldest rounds are dropped."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Seen]] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def crowded(self) -> bool:
        """Whether a run that is saved should write the rows to disk now."""
        return self._rows > MOST // 2

    def add(self, round: int, seen: Seen | None) -> None:
        """Add the participants of a round, counted from 1."""
        if seen is None:
            return
        self._waiting.append((round, seen))
        self._rows += len(seen.clients)
        while self._rows > MOST and len(self._waiting) > 1:
            self._rows -= len(self._waiting.popleft()[1].clients)

    def table(self) -> DataFrame:
        """The rows in memory, in the columns of clients.parquet."""
        import polars

        return polars.concat([_columns(round, seen) for round, seen in self._waiting])

    def save(self, directory: RunDirectory) -> None:
        """Append the rows to the file, and replace rows of rounds that were trained again."""
        import polars

        if not self._waiting:
            return
        path, rows, first = directory.path / CLIENTS, self.table().lazy(), self._waiting[0][0]
        if path.is_file():
            with reading(path):
                earlier = polars.scan_parquet(path).filter(polars.col("round") < first)
                rows = polars.concat([earlier, rows])
                directory.write(CLIENTS, lambda place: _sink(rows, place))
        else:
            directory.write(CLIENTS, lambda place: _sink(rows, place))
        self._waiting.clear()
        self._rows = 0


def refuse_broken(directory: RunDirectory) -> None:
    """Refuse to resume a run whose clients.parquet cannot be read."""
    import polars

    path = directory.path / CLIENTS
    if path.is_file():
        with reading(path):
            polars.read_parquet_schema(path)


def _sink(rows: object, place: Path) -> None:
    from polars import LazyFrame

    assert isinstance(rows, LazyFrame)
    rows.sink_parquet(place, compression="zstd", row_group_size=GROUP)


def _columns(round: int, seen: Seen) -> DataFrame:
    import polars

    count = len(seen.clients)
    numbers = {"norm": seen.norms, "scale": seen.scales, "cosine": seen.cosines}
    error = seen.norms if seen.remembers else seen.norms.new_full((count,), float("nan"))
    columns = {name: leaf.float().numpy() for name, leaf in numbers.items()}
    frame = polars.DataFrame(
        {
            "round": polars.Series([round], dtype=polars.Int32).new_from_index(0, count),
            "client": polars.Series(seen.clients).cast(polars.Int32),
            **columns,
            "memory_error": error.float().numpy(),
        }
    )
    return frame.with_columns(polars.col(polars.Float32).fill_nan(None))
