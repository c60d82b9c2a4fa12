"""Flags that several commands have, and what people type behind them: name=value,value."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil.errors import UserError

Config = Annotated[Path | None, typer.Argument(help="A TOML file; flags win over it.")]
Algorithm = Annotated[
    str | None,
    typer.Option(
        help="See `fedveil algorithms`, or package.module:function; dp_norm_fedavg if none."
    ),
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--set", help="A parameter of the algorithm: --set clip=1.0 (repeatable)."),
]
Dataset = Annotated[str | None, typer.Option(help="See `fedveil datasets`; fashion-mnist if none.")]
OwnData = Annotated[
    Path | None,
    typer.Option(help="Your own CSV or Parquet table, image folder or zip, text, saved data."),
]
ClientColumn = Annotated[str | None, typer.Option(help="The table's column of clients.")]
LabelColumn = Annotated[str | None, typer.Option(help="The table's column to predict.")]
Partition = Annotated[str | None, typer.Option(help="key, iid, shards, majority or dirichlet.")]
Clients = Annotated[
    int | None, typer.Option(help="Number of clients of a named data set. [default: 100]")
]
SimulateClients = Annotated[
    int | None,
    typer.Option(
        help="Make up so many clients for a --path that does not say whose an example is."
    ),
]
DataSettings = Annotated[
    list[str] | None,
    typer.Option("--data", help="A setting of the data: --data alpha=0.1 (repeatable)."),
]
Model = Annotated[
    str | None, typer.Option(help="A model's name, or package.module:Class of your own.")
]
Rounds = Annotated[int | None, typer.Option(help="How many rounds to play; 100 if not said.")]
Epsilon = Annotated[float | None, typer.Option(help="The ε the whole run may spend.")]
Delta = Annotated[
    float | None, typer.Option(help="The δ that goes with it; 1e-5 or less if not said.")
]
NoiseMultiplier = Annotated[
    float | None, typer.Option(help="Instead of ε: noise over the bound of one update.")
]
View = Annotated[str | None, typer.Option(help="Whom ε is kept against: models, sum or messages.")]
Noise = Annotated[str | None, typer.Option(help="seeded (repeatable), or secure (secret, exact).")]
Engine = Annotated[str | None, typer.Option(help="auto, factored, dense or loop.")]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Rounds between checkpoints; at evaluations if not said.")
]
Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", help="Where spending is recorded; FEDVEIL_LEDGER, or your own."),
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, and nothing else.")]

OF_DATA = ("dataset", "path", "client", "label", "partition", "clients", "simulate_clients")


def refuse_no_settings(config: Path | None) -> None:
    """Where a settings file belongs, a run or a table is told its flag."""
    from fedveil.settings import TABLES

    if config is None:
        return
    here = shlex.quote(str(config))
    if (config / "recipe.toml").is_file():
        raise UserError(
            f"{config} is a run's directory; go on with it by `fedveil train --resume {here}`, or "
            f"take its settings: {here}/recipe.toml."
        )
    if config.suffix.lower() in TABLES:
        raise UserError(
            f"{config} is a table, not a file of settings; give it as --path {here} with --client "
            "and --label, its columns."
        )
    if config.is_dir():
        raise UserError(f"{config} is a directory; name a TOML file, or data as `--path {here}`.")


def gathered(
    set_: list[str] | None,
    data_: list[str] | None,
    noise_multiplier: float | None,
    **flags: Any,
) -> dict[str, Any]:
    """Flags as a settings file has them: parameters, data, and the rest; what is None is left out.

    >>> gathered(["clip=1"], None, 0.5, dataset="digits", rounds=3, model=None)
    {'parameters': {'clip': 1, 'noise_multiplier': 0.5}, 'data': {'dataset': 'digits'}, 'rounds': 3}
    """
    parameters = dict(assignment(text) for text in set_ or [])
    parameters |= given(noise_multiplier=noise_multiplier)
    data = dict(assignment(text, "--data", "alpha=0.1") for text in data_ or [])
    data |= given(**{name: flags.pop(name, None) for name in OF_DATA})
    return given(parameters=parameters or None, data=data or None, **flags)


def assignment(text: str, flag: str = "--set", such: str = "clip=1.0") -> tuple[str, Any]:
    """`name=value` with the value as TOML has it, or as a word.

    >>> assignment("clip=1.5"), assignment("local=ig")
    (('clip', 1.5), ('local', 'ig'))
    """
    name, value = _halves(text, flag, such)
    return name, _value(value)


def assignments(text: str, flag: str = "--grid") -> tuple[str, list[Any]]:
    """`name=value,value,…`; a comma within brackets, braces or quotes parts nothing.

    >>> assignments("clip=0.5,1"), assignments("local=ig,[1, 2]")
    (('clip', [0.5, 1]), ('local', ['ig', [1, 2]]))
    """
    name, values = _halves(text, flag, "clip=0.5,1,2")
    parts = _parted(values)
    if not all(parts):
        raise UserError(f"{flag} {text}: write values with commas between, such as clip=0.5,1,2.")
    return name, [_value(part) for part in parts]


def given(**flags: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in flags.items() if value is not None}


def _halves(text: str, flag: str, such: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UserError(f"{flag} {text}: write it as name=value, such as {flag} {such}.")
    return name.strip(), value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _parted(text: str) -> list[str]:
    parts, depth, quoted = [""], 0, ""
    for c in text:
        if quoted:
            quoted = "" if c == quoted else quoted
        elif c in "'\"":
            quoted = c
        depth += 0 if quoted else (c in "[{") - (c in "]}")
        if c == "," and depth == 0 and not quoted:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts]
