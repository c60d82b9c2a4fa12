"""The settings of a run: read from a TOML file and flags (flags win), turned into a training."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.errors import UserError, unknown
from fedveil.serialization.versions import refuse_newer

if TYPE_CHECKING:
    from fedveil.data.federated import Federated
    from fedveil.engines.processes import Team
    from fedveil.recipe import Recipe
    from fedveil.training.run import Training

MAX_BYTES = 2**20  # per settings file
MAX_DOTS = 300  # per line: parsing time is quadratic in the parts of a dotted key
DATASET = "fashion-mnist"  # the default
SYNTHETIC = "synthetic"
WRITTEN = {  # the form of settings that are tables
    "ranges": "{age=[0,100]}",
    "categories": '{plan=["free","plus"]}',
    "dates": '{born=["1900-01-01","2020-12-31"]}',
}
PROBLEMS = ("das2022-quadratics", "zhang2022-table4", "zhang2022-claim21")


class DataSettings(BaseModel):
    """The data, and how to split them over clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str | None = Field(
        default=None, description=f"Data set: a name from `fedveil datasets`. [default: {DATASET}]"
    )
    path: Path | None = Field(
        default=None,
        description="Your own data: a CSV or Parquet table, an image folder or zip, a text, or "
        "saved data.",
    )
    client: str | None = Field(
        default=None, description="Column of the table that identifies the client."
    )
    label: str | None = Field(default=None, description="Column of the table to predict.")
    target: Literal["class", "number"] | None = Field(
        default=None,
        description="What the label column of the table holds: class or number. [default: number "
        "if the loss is one of numbers, else class]",
    )
    ranges: dict[str, tuple[float, float]] = Field(
        default_factory=dict, description="Public range of each numeric column of the table."
    )
    categories: dict[str, tuple[str, ...]] = Field(
        default_factory=dict, description="Public categories of each text column of the table."
    )
    dates: dict[str, tuple[str, str]] = Field(
        default_factory=dict, description="Public first and last day of each date column."
    )
    columns: tuple[str, ...] = Field(
        default=(), description="Columns of the table to use as inputs. [default: all]"
    )
    drop: tuple[str, ...] = Field(
        default=(), description="Columns of the table not to use as inputs."
    )
    holdout: Literal["clients", "rows"] | None = Field(
        default=None,
        description="Hold out clients or rows of a table for testing. [default: clients]",
    )
    test: Path | None = Field(
        default=None, description="Table of test rows. [default: a fifth of the clients]"
    )
    buckets: int | None = Field(
        default=None, description="Hash buckets for text columns without categories. [default: 16]"
    )
    standardize: bool = Field(
        default=False,
        description="Scale columns by the data's own means and deviations, which leaks.",
    )
    image: str | None = Field(
        default=None,
        description="Column of the table with images: bytes, or paths below the table's folder.",
    )
    size: tuple[int, int] | None = Field(
        default=None, description="Height and width of images, such as 64x64. [default: 32x32]"
    )
    color: bool | None = Field(
        default=None, description="Whether images are in color. [default: true]"
    )
    partition: str | None = Field(
        default=None,
        description="How to split the data over clients: key, iid, shards, majority, overlapping "
        "or dirichlet. [default: key if the data identify their clients, otherwise iid]",
    )
    clients: int | None = Field(
        default=None, description="Number of clients of a named data set. [default: 100]"
    )
    simulate_clients: int | None = Field(
        default=None,
        description="Number of clients to simulate, for a --path that does not identify its "
        "clients.",
    )
    per_client: int = Field(default=5, description="Shards per client.")
    alpha: float = Field(default=0.5, description="Concentration of the Dirichlet distribution.")
    examples: int | None = Field(
        default=None,
        description="Examples per client. [default: 500 with majority classes or overlapping "
        "clients, 20 if synthetic]",
    )
    held_out: float | None = Field(
        default=None,
        description="Share of the training examples to test on, instead of the test examples.",
    )
    start: Literal["far", "near"] | None = Field(
        default=None, description="Where das2022-quadratics starts: far or near. [default: far]"
    )
    features: int | None = Field(
        default=None, description="Number of features of synthetic data. [default: 784]"
    )
    classes: int | tuple[str, ...] | None = Field(
        default=None,
        description="Number of classes of synthetic data [default: 10]; the public class names of "
        "your own data.",
    )
    seed: int = Field(default=0, ge=0, description="Seed of the split.")

    @field_validator("classes", "columns", "drop", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """Accept names as `--data classes=no,yes` or as a list such as [0, 1]."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(","))
        return tuple(map(_word, given)) if isinstance(given, list | tuple) else given

    @field_validator("size", mode="before")
    @classmethod
    def _sized(cls, given: Any) -> Any:
        """Accept a size as `--data size=64x64`."""
        parts = re.split("[x,]", given) if isinstance(given, str) else []
        return tuple(map(int, parts)) if parts and all(map(str.isdecimal, parts)) else given

    @field_validator("categories", mode="before")
    @classmethod
    def _words(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: tuple(map(_word, values)) if isinstance(values, list | tuple) else values
            for name, values in given.items()
        }


def _word(value: Any) -> Any:
    """A TOML number or boolean as the text of a table cell."""
    return value if isinstance(value, str) else json.dumps(value)


class Settings(BaseModel):
    """Everything `fedveil train` needs. TOML keys and flags have the same names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fedveil: str | None = Field(default=None, description="Version that wrote the file.")
    algorithm: str = Field(
        default="dp_norm_fedavg",
        description="Algorithm: a name from `fedveil algorithms`, or package.module:function.",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameter of the algorithm, such as --set steps=5 (repeatable).",
    )
    data: DataSettings = Field(
        default=DataSettings(),
        description="Setting of the data, such as --data alpha=0.1 (repeatable).",
    )
    model: str | None = Field(
        default=None,
        description="Model: a name, or package.module:Class. [default: softmax, linear or lstm, "
        "whichever fits the data]",
    )
    rounds: int = Field(default=100, description="Number of training rounds.")
    epsilon: float | None = Field(default=None, description="Privacy budget ε of a run.")
    delta: float | None = Field(
        default=None,
        description="Privacy budget δ. [default: 1e-5, or 0.1/clients if smaller]",
    )
    view: Literal["models", "sum", "messages"] | None = Field(
        default=None,
        description="What the adversary sees: released models, the secure sum of a round, or every "
        "message (models, sum or messages). [default: the algorithm's view, usually models]",
    )
    stats_epsilon: float | None = Field(
        default=None,
        ge=0,
        le=200,
        description="ε of a table's statistics (ranges, categories, classes) alone; 0 for none. "
        "[default: leaves 95% of ε for training]",
    )
    private_evaluation: float | None = Field(
        default=None,
        gt=0,
        le=200,
        description="Add noise to all evaluations, with this ε for the evaluations alone. The "
        "run's ε covers them and the training. [default: exact evaluations, which no ε covers]",
    )
    per_round: bool = Field(
        default=False, description="Apply ε and δ to each round, not to the run."
    )
    noise: Literal["seeded", "secure"] = Field(
        default="seeded",
        description="Noise source: seeded (reproducible) or secure (secret, exact).",
    )
    loss: str | None = Field(
        default=None,
        description="Loss: cross_entropy, focal, binary, mse, huber or half_squared, with "
        "parameters as in 'cross_entropy(weights=[1,30])', or package.module:function. [default: "
        "cross_entropy, or half_squared for numeric targets]",
    )
    metric: str | None = Field(
        default=None,
        description="Metric that ranks runs: accuracy, auc, average_precision, balanced_accuracy, "
        "f1, rmse, r2, … (docs/metrics.md), or package.module:function. [default: accuracy, or "
        "loss for numeric targets]",
    )
    seed: int = Field(default=0, description="Random seed; the same seed repeats the run.")
    engine: str = Field(default="auto", description="Engine: auto, factored, dense or loop.")
    device: str = Field(
        default="auto", description="Device of local training: auto, cpu, cuda, cuda:1 or mps."
    )
    evaluate_every: int | None = Field(default=None, description="Rounds between evaluations.")
    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many evaluations without improvement. ε remains that of all "
        "planned rounds. [default: never]",
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Rounds between checkpoints. [default: at every evaluation]",
    )
    account: str | None = Field(
        default=None,
        min_length=1,
        max_length=100,
        description="Ledger account to charge the run to. Use one account for all data about the "
        "same people. [default: the account of the data]",
    )
    diagnostics: bool | None = Field(
        default=None,
        description="Record per-client diagnostics, which are private data. [default: on, unless "
        "noise is secure]",
    )
    recipe: dict[str, Any] | None = Field(
        default=None, description="Resolved recipe, used instead of algorithm and parameters."
    )
    federation: str | None = Field(
        default=None, description="Hash of the agreement, for the run of a federation."
    )


RECIPE_FLAGS = {
    "algorithm", "parameters", "rounds", "epsilon", "delta", "view", "per_round", "noise",
    "stats_epsilon", "private_evaluation",
}  # fmt: skip


def read_settings(file: Path | None, flags: Mapping[str, Any]) -> Settings:
    """The settings of a file, overridden by flags. A changed algorithm replaces the [recipe]."""
    plain = {} if file is None else _read_toml(file)
    refuse_newer(file or Path(), plain.get("fedveil"))
    plain.pop("engine_reason", None)  # written by versions before 0.2
    for name in ("data", "parameters"):
        if not isinstance(plain.get(name, {}), dict):
            raise UserError(f"{file}: {name} is not a table. Write it as [{name}].")
    if "algorithm" in flags or ("algorithm" in plain and RECIPE_FLAGS & flags.keys()):
        plain.pop("recipe", None)
    if "recipe" in plain and "parameters" in flags:
        raise UserError(
            f"{file} has a [recipe] but no algorithm, so --set has no parameters to change. Edit "
            "the [recipe] in the file."
        )
    if flags.get("algorithm", plain.get("algorithm")) != plain.get("algorithm"):
        plain.pop("parameters", None)
    merged = {**plain, **flags}
    for name in ("data", "parameters"):
        merged[name] = {**plain.get(name, {}), **flags.get(name, {})}
    try:
        return _targeted(Settings.model_validate(merged))
    except ValidationError as problem:
        raise _sentence(problem, file) from problem


def _targeted(settings: Settings) -> Settings:
    """A loss of numbers implies that the label column of a table holds numbers."""
    data, loss = settings.data, settings.loss
    if loss is None or data.path is None or data.target is not None:
        return settings
    from fedveil.data.frames import is_table
    from fedveil.models.losses import Own, loss_named

    known = loss_named(loss)
    if isinstance(known, Own) or known.target == "class" or not is_table(data.path):
        return settings
    data = data.model_copy(update={"target": "number"})
    return settings.model_copy(update={"data": data})


def read_run(file: Path) -> Settings:
    """The settings of a run to resume. They must name its data."""
    settings = read_settings(file, {})
    refuse_unnamed_data(settings, f"{file}", "Resume it from Python")
    return settings


def refuse_unnamed_data(settings: Settings, what: str, advice: str) -> None:
    """Refuse a run started from Python whose settings do not name its data; none are guessed."""
    if settings.federation is not None:
        raise UserError(
            f"{what} is of a federation, whose data are with its clients. Start or resume it with "
            "`flwr run` on the federation's directory."
        )
    if settings.recipe is not None and settings.data.dataset is None and settings.data.path is None:
        raise UserError(
            f"{what} does not name the data of the run. Runs started from Python may not name "
            f"them. {advice}."
        )


def resolve_recipe(settings: Settings) -> Recipe:
    """The saved recipe, or the algorithm called with its parameters."""
    from fedveil.algorithms.calling import call
    from fedveil.serialization.codec import recipe_from_plain

    if settings.recipe is None:
        recipe = call(settings.algorithm, settings.parameters)
        return recipe if settings.view is None else replace(recipe, view=settings.view)
    recipe = recipe_from_plain(settings.recipe)
    if not _unnamed_recipe(settings):
        _refuse_edited(settings, recipe)
    return recipe if settings.view is None else replace(recipe, view=settings.view)


def _refuse_edited(settings: Settings, recipe: Recipe) -> None:
    """Refuse a [recipe] that differs from its algorithm in more than calibrated values."""
    from fedveil.privacy.secure import secured

    named = resolve_recipe(settings.model_copy(update={"recipe": None}))
    if settings.noise == "secure":
        named = secured(named)
    bound, cohort = named.bound.found_as(recipe.bound), named.cohort.found_as(recipe.cohort)
    named = replace(named, bound=bound, cohort=cohort, statistics=recipe.statistics)
    named = replace(named, evaluation=recipe.evaluation)
    if replace(named, noise=recipe.noise) != recipe:
        raise UserError(
            "The [recipe] of these settings does not match their algorithm and parameters. Delete "
            "the [recipe] tables to build them again, or delete the algorithm to keep them."
        )


def from_settings(
    settings: Settings,
    data: Federated | None = None,
    team: Team | None = None,
    ledger: Path | None = None,
    run: Path | None = None,
) -> Training:
    """The training that the settings describe, at round 0; `run` is that of a run to resume."""
    from fedveil.engines.processes import ALONE
    from fedveil.models.catalog import suggest
    from fedveil.training.prepare import prepare
    from fedveil.training.sources import load_for

    recipe = resolve_recipe(settings)  # before loading data, so that mistakes are reported at once
    data = load_for(settings, run) if data is None else data
    return prepare(
        recipe,
        data,
        settings.model or suggest(data),
        settings.rounds,
        settings.epsilon,
        settings.delta,
        settings.seed,
        settings.engine,
        settings.evaluate_every,
        start=None if data.optimum is None else data.optimum.start,
        noise=settings.noise,
        per_round=settings.per_round,
        team=team or ALONE,
        diagnostics=settings.diagnostics,
        ledger=ledger,
        checkpoint_every=settings.checkpoint_every,
        account=settings.account,
        named=_named(settings),
        loss=settings.loss,
        metric=settings.metric,
        device=settings.device,
        private_evaluation=settings.private_evaluation,
        patience=settings.patience,
    )


def _named(settings: Settings) -> dict[str, Any]:
    """The settings that recipe.toml repeats: the names of algorithm and data, and the options."""
    own = {"algorithm", "parameters"} if _unnamed_recipe(settings) else set()
    own |= {"device"} if settings.device == "auto" else set()
    plain = settings.model_dump(mode="json", exclude_none=True, exclude=own)
    if settings.data.path is not None:
        plain["data"]["path"] = str(settings.data.path.resolve())
    else:
        plain["data"]["dataset"] = settings.data.dataset or DATASET
    return plain


def _unnamed_recipe(settings: Settings) -> bool:
    """Whether the settings have a [recipe] without the algorithm that built it."""
    return settings.recipe is not None and "algorithm" not in settings.model_fields_set


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(
                f"{file} is larger than 1 MB, so it is not a settings file. Give a TOML file."
            )
        text = file.read_text(encoding="utf-8")
        if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise UserError(
                f"{file} has a line with more than {MAX_DOTS} dots. Settings do not nest that "
                "deeply. Correct that line."
            )
        return tomllib.loads(text)
    except OSError as problem:
        raise UserError(
            f"Could not read {file}: {problem.strerror}. Give the path of a TOML settings file, or "
            "only flags."
        ) from problem
    except UserError:
        raise
    except (ValueError, RecursionError) as problem:  # also for bad UTF-8 and overlong numbers
        raise UserError(f"{file} is not valid TOML: {problem}.") from problem


def _sentence(problem: ValidationError, file: Path | None) -> UserError:
    first = problem.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        of_data = first["loc"][0] == "data"
        what = f"setting{' of the data' if of_data else ''} in {file or 'the flags'} named"
        group = DataSettings if of_data else Settings
        return unknown(what, str(first["loc"][-1]), group.model_fields)
    plain = isinstance(first["input"], str | int | float)  # a nested value may be too deep to print
    given = str(first["input"])[:40] if plain else "…"
    if first["type"] == "dict_type":
        form = WRITTEN.get(str(first["loc"][-1]), "{name=value}")
        return UserError(
            f"{file or 'The flags'}: {where} is '{given}', which is not a table. Write it as "
            f"'{form}'."
        )
    return UserError(
        f"{file or 'The flags'}: {where} is '{given}', but {first['msg'][:1].lower()}"
        f"{first['msg'][1:]}."
    )
