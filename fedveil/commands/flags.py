"""Flags: those of the settings come from their model, and what people type is parsed here."""

from __future__ import annotations

import functools
import inspect
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import click
import typer
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from fedveil.data.frames import is_table
from fedveil.errors import UserError
from fedveil.training.settings import DataSettings, Settings

Config = Annotated[
    Path | None, typer.Argument(help="Settings file (TOML). Flags take precedence over it.")
]
Ledger = Annotated[
    Path | None,
    typer.Option(
        "--ledger", help="Ledger of privacy spending. [default: $FEDVEIL_LEDGER, or the user's own]"
    ),
]
Asked = Mapping[str, Any]  # the given settings, in the form of a settings file
NOTHING: Asked = MappingProxyType({})
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON only.")]

Cohort = Annotated[
    int | None,
    typer.Option(
        help="Clients per round, drawn without replacement (fixed size).",
        rich_help_panel="Algorithm",
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Probability that a client takes part in a round (Poisson sampling).",
        rich_help_panel="Algorithm",
    ),
]
DELTA = Settings.model_fields["delta"].description

ALGORITHM = ("algorithm", "parameters")
DATA = (
    "dataset", "path", "client", "label", "columns", "drop", "holdout", "test", "partition",
    "clients", "simulate_clients", "data",
)  # fmt: skip
RELEASE = ("epsilon", "delta", "noise_multiplier", "view")
GUARANTEE = (*RELEASE, "stats_epsilon", "private_evaluation")
GROUPS = {  # of flags in a command's help; a command's own options have none
    "Algorithm": ALGORITHM,
    "Data": DATA,
    "Training": ("model", "loss", "rounds", "seed", "engine", "device"),
    "Privacy": (*GUARANTEE, "per_round", "noise", "account"),
    "Evaluation": ("metric", "evaluate_every", "patience"),
}
OPTIONS = {"parameters": ("--set",), "per_round": ("--per-round",)}  # where not --name
KEYWORD = inspect.Parameter.KEYWORD_ONLY
NOISE_MULTIPLIER = FieldInfo(  # a parameter of the algorithm, not a setting of the run
    annotation=float | None,
    default=None,
    description="Noise multiplier, instead of ε: standard deviation of the noise divided by the "
    "bound on one update.",
)


class Command(TyperCommand):
    """A command whose help lists its options by group, in the order in which they are given."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments, then each group, then the command's own options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            group = getattr(parameter, "rich_help_panel", None) or "Options"
            if isinstance(parameter, click.Argument):
                group = "Arguments"
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(group, []).append(record)
        for name in sorted(sections, key=["Arguments", *GROUPS, "Options"].index):
            with formatter.section(name):
                formatter.write_dl(sections[name])


def from_settings(*names: str, **help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `asked` by one flag for each named setting.

    The command receives the given ones as `asked`, in the form of a settings file. `help` replaces
    the model's description where a command differs in what it accepts, or in the default.
    """

    def complete(command: Callable[..., None]) -> Callable[..., None]:
        parameters = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name == "asked":
                parameters += [_flag(name, help.get(name)) for name in names]
            else:
                parameters.append(own.replace(kind=KEYWORD))

        @functools.wraps(command)
        def call(**given: Any) -> None:
            asked = gathered({name: given.pop(name, None) for name in names})
            command(asked=asked, **given)

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return complete


def _flag(name: str, help: str | None = None) -> inspect.Parameter:
    """A setting as an option that is None unless it is given."""
    field = _field(name)
    group = next((group for group, names in GROUPS.items() if name in names), None)
    option = typer.Option(
        *OPTIONS.get(name, ()), help=help or described(field), rich_help_panel=group
    )
    kind = Annotated[_typed(field.annotation) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, KEYWORD, default=None, annotation=kind)


def _field(name: str) -> FieldInfo:
    if name == "noise_multiplier":
        return NOISE_MULTIPLIER
    model = DataSettings if name in DATA and name != "data" else Settings
    return model.model_fields[name]


def _typed(annotation: Any) -> Any:
    """The type of a flag: choices are words, which the settings check; tables are name=value."""
    if get_origin(annotation) is dict or annotation is DataSettings:
        return list[str]
    if get_origin(annotation) is tuple:
        return str  # names with commas between them
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType]
    choice = Literal in (get_origin(annotation), *map(get_origin, kinds))
    return str if choice else kinds[0] if kinds else annotation


def described(field: FieldInfo) -> str:
    """A field's description and, where it has one, its default.

    >>> described(Settings.model_fields["rounds"])
    'Number of training rounds. [default: 100]'
    """
    stated = isinstance(field.default, str | int | float) and field.default is not False
    return f"{field.description} [default: {field.default}]" if stated else f"{field.description}"


def refuse_no_settings(config: Path | None) -> None:
    """Name the right flag for a run or a table given in place of a settings file."""
    if config is None:
        return
    here = shlex.quote(str(config))
    if (config / "recipe.toml").is_file():
        raise UserError(
            f"{config} is a run's directory, not a settings file. Resume the run with `fedveil "
            f"train --resume {here}`, or pass its settings: {here}/recipe.toml."
        )
    if is_table(config):
        raise UserError(
            f"{config} is a table, not a settings file. Pass it as --path {here}, and its columns "
            "as --client and --label."
        )
    if config.is_dir():
        raise UserError(
            f"{config} is a directory, not a settings file. Pass a TOML file, or data as "
            f"`--path {here}`."
        )


def gathered(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as a settings file has them; what is None is left out.

    >>> gathered({"parameters": ["clip=1"], "noise_multiplier": 0.5, "dataset": "digits"})
    {'parameters': {'clip': 1, 'noise_multiplier': 0.5}, 'data': {'dataset': 'digits'}}
    """
    asked = given(**flags)
    parameters = dict(assignment(text) for text in asked.pop("parameters", []))
    data = dict(assignment(text, "--data", "alpha=0.1") for text in asked.pop("data", []))
    for name in [*asked]:
        if name == "noise_multiplier":
            parameters[name] = asked.pop(name)
        elif name in DATA:
            data[name] = asked.pop(name)
    return given(parameters=parameters or None, data=data or None, **asked)


def assignment(text: str, flag: str = "--set", such: str = "clip=1.0") -> tuple[str, Any]:
    """`name=value` with the value as TOML has it, or as a word.

    >>> assignment("clip=1.5"), assignment("local=ig")
    (('clip', 1.5), ('local', 'ig'))
    """
    name, value = _halves(text, flag, such)
    return name, _value(value)


def assignments(text: str, flag: str = "--grid") -> tuple[str, list[Any]]:
    """`name=value,value,…`; a comma within brackets, braces or quotes does not separate.

    >>> assignments("clip=0.5,1"), assignments("local=ig,[1, 2]")
    (('clip', [0.5, 1]), ('local', ['ig', [1, 2]]))
    """
    name, values = _halves(text, flag, "clip=0.5,1,2")
    parts = _parted(values)
    if not all(parts):
        raise UserError(f"{flag} {text}: a value is missing. Write them as in clip=0.5,1,2.")
    return name, [_value(part) for part in parts]


def given(**flags: Any) -> dict[str, Any]:
    """The flags that are not None."""
    return {name: value for name, value in flags.items() if value is not None}


def _halves(text: str, flag: str, such: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip():
        raise UserError(f"{flag} {text}: not of the form name=value. Write it as in {flag} {such}.")
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
