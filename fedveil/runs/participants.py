"""clients.parquet: a row for each participant of each round; private data, as its name says."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from fedveil.diagnosis.seen import Seen
from fedveil.runs.directory import RunDirectory, reading

if TYPE_CHECKING:
    from pathlib import Path

    from polars import DataFrame

NAME = "clients.parquet"
MOST = 2**20  # rows in memory: 32 MB
GROUP = 2**16  # rows of a row group in the file


class Participants:
    """The rows that are not on disk yet; of more than `MOST` the oldest rounds are let go."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, Seen]] = deque()
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def crowded(self) -> bool:
        """Whether it is time to save them, if they are to be saved at all."""
        return self._rows > MOST // 2

    def add(self, round: int, seen: Seen | None) -> None:
        """The participants of a round, which is counted from 1."""
        if seen is None:
            return
        self._waiting.append((round, seen))
        self._rows += len(seen.clients)
        while self._rows > MOST and len(self._waiting) > 1:
            self._rows -= len(self._waiting.popleft()[1].clients)

    def table(self) -> DataFrame:
        """The rows in memory, as clients.parquet has them."""
        import polars

        return polars.concat([_columns(round, seen) for round, seen in self._waiting])

    def save(self, directory: RunDirectory) -> None:
        """Append them to the file; rows of rounds that are played again are replaced."""
        import polars

        if not self._waiting:
            return
        path, rows, first = directory.path / NAME, self.table().lazy(), self._waiting[0][0]
        if path.is_file():
            with reading(path):
                earlier = polars.scan_parquet(path).filter(polars.col("round") < first)
                rows = polars.concat([earlier, rows])
                directory.write(NAME, lambda place: _sink(rows, place))
        else:
            directory.write(NAME, lambda place: _sink(rows, place))
        self._waiting.clear()
        self._rows = 0


def refuse_broken(directory: RunDirectory) -> None:
    """Before a run goes on whose rows could not be added to the file."""
    import polars

    path = directory.path / NAME
    if path.is_file():
        with reading(path):
            polars.read_parquet_schema(path)


def load(directory: RunDirectory, rounds: int) -> DataFrame | None:
    """The rows of the first so many rounds; None for a run that recorded none."""
    import polars

    path = directory.path / NAME
    if not path.is_file():
        return None
    with reading(path):
        return polars.scan_parquet(path).filter(polars.col("round") <= rounds).collect()


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
