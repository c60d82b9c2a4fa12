"""`fedveil stats`: release statistics of a table with noise."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from fedveil.commands import flags
from fedveil.errors import UserError

Columns = list[str] | None


def stats(
    path: Annotated[Path, typer.Option(help="Table: a CSV or Parquet file.")],
    client: Annotated[str, typer.Option(help="Column that identifies the client.")],
    epsilon: Annotated[float, typer.Option(help="Privacy budget ε of all these statistics.")],
    delta: Annotated[float | None, typer.Option(help=flags.DELTA)] = None,
    count: Annotated[bool, typer.Option("--count", help="Number of rows.")] = False,
    sum_: Annotated[
        Columns, typer.Option("--sum", help="Sum of a column with a --range (repeatable).")
    ] = None,
    mean: Annotated[
        Columns, typer.Option(help="Mean of clients' means, with a --range (repeatable).")
    ] = None,
    quantiles: Annotated[
        Columns, typer.Option(help="5, 25, 50, 75 and 95% quantiles of a column (repeatable).")
    ] = None,
    histogram: Annotated[
        Columns, typer.Option(help="Sixteen bins of a column (repeatable).")
    ] = None,
    frequent: Annotated[
        Columns, typer.Option(help="Values of a column that many clients have (repeatable).")
    ] = None,
    range_: Annotated[
        Columns, typer.Option("--range", help="Public range: --range age=0,100 (repeatable).")
    ] = None,
    most_rows: Annotated[
        int,
        typer.Option(
            "--max-rows", "--most-rows", help="Maximum rows per client in counts and sums."
        ),
    ] = 100,
    noise: Annotated[
        str, typer.Option(help="Noise source: seeded (for simulations) or secure (for releases).")
    ] = "seeded",
    seed: Annotated[int, typer.Option(help="Random seed; the same seed repeats the release.")] = 0,
    account: Annotated[
        str | None,
        typer.Option(help="Ledger account to charge. [default: the account of the data]"),
    ] = None,
    as_json: flags.AsJson = False,
    ledger: flags.Ledger = None,
) -> None:
    """Release statistics of a table with noise.

    All statistics of one call together are (ε, δ)-differentially private per client. The release
    is recorded in the ledger. For example:

    fedveil stats --path visits.csv --client user_id --epsilon 1 --quantiles age --frequent plan
    """
    from fedveil.commands.progress import entry, show_json
    from fedveil.errors import unknown
    from fedveil.training.statistics import statistics

    if noise not in ("seeded", "secure"):
        raise unknown("noise", noise, ("seeded", "secure"))
    found = inspect.unwrap(statistics)(  # messages name flags here
        path, client, epsilon, delta, count, sum_ or (), mean or (), quantiles or (),
        histogram or (), frequent or (), dict(map(_range, range_ or ())), most_rows, seed,
        noise, ledger, account,
    )  # fmt: skip
    if as_json:
        show_json(found.plain())
        return
    for release in found.releases:
        entry(release.kind.capitalize(), f"{release.column}: {release.line()}".lstrip(": "), 13)
    entry("Privacy", found.sentence, 13)
    if found.note:
        entry("Account", found.note, 13)


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, values = flags.assignments(text, "--range")
    if len(values) != 2 or not all(isinstance(value, int | float) for value in values):
        raise UserError(f"--range {text} is not a range. Write it as in --range age=0,100.")
    return name, (float(values[0]), float(values[1]))
