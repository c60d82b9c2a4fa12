"""`fedveil predict`: the predictions of a saved model for the rows of a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedveil.errors import UserError

if TYPE_CHECKING:
    from polars import DataFrame

    from fedveil.runs.opened import OpenedRun


def predict(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    table: Annotated[Path, typer.Argument(help="Table with the run's input columns.")],
    out: Annotated[
        Path | None,
        typer.Option(help="CSV or Parquet file to write. [default: CSV on standard output]"),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add a column with each class's probability.")
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(help="Predict the second of two classes from this probability upwards."),
    ] = None,
    alert_rate: Annotated[
        float | None,
        typer.Option(help="Predict the second of two classes for this share of the rows."),
    ] = None,
) -> None:
    """Predict the label of every row of a table.

    The training data are not needed. Columns that the model does not use are ignored. If one of
    two classes is rare, the model may predict the frequent class for every row. Use its ranking
    instead: --alert-rate flags the highest-ranked rows, and prints the threshold that it used.
    """
    from fedveil.commands.progress import entry
    from fedveil.runs.opened import open_run, threshold_at

    if out is not None and out.exists():
        raise UserError(f"{out} exists. Choose another --out.")
    opened = open_run(run)
    found = predictions(opened, table, probabilities, threshold, alert_rate)
    if alert_rate is not None and threshold is None:
        used = threshold_at(opened.probabilities(table)[:, 1], alert_rate)
        print(f"Threshold used: {used:.6g}. Reuse it with --threshold.", file=sys.stderr)
    if out is None:
        sys.stdout.write(found.write_csv())
        return
    _write(found, out)
    entry("", f"{out}   {found.height:,} rows", width=0)


def predictions(
    run: OpenedRun,
    table: Path,
    probabilities: bool,
    threshold: float | None = None,
    alert_rate: float | None = None,
) -> DataFrame:
    """A row per row of the table: the prediction and, if asked for, probabilities."""
    from polars import DataFrame, Series

    label = "prediction" if run.encoder is None else run.encoder.label
    columns = [Series(label, run.predict(table, threshold, alert_rate))]
    if probabilities:
        shares = run.probabilities(table)
        wide = shares.reshape(len(shares), -1).T.tolist()
        names = run.class_names or [str(number) for number in range(len(wide))]
        named = zip(names, wide, strict=True)
        columns += [Series(f"probability of {name}", values) for name, values in named]
    return DataFrame(columns)


def _write(found: DataFrame, out: Path) -> None:
    from fedveil.runs.directory import saving

    partial = out.with_name(f".{out.name}.partial")
    with saving(out):
        try:
            if out.suffix.lower() == ".parquet":
                found.write_parquet(partial)
            else:
                found.write_csv(partial)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
