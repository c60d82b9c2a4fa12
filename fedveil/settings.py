"""Settings of a run: from a TOML file and flags (flags win), to data, recipe and training."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedveil.errors import UserError, unknown
from fedveil.runs.versions import refuse_newer

if TYPE_CHECKING:
    from fedveil.data.federated import Dataset, Federated
    from fedveil.data.partition import Partitioner
    from fedveil.engines.processes import Team
    from fedveil.recipe import Recipe
    from fedveil.training import Training

MAX_BYTES = 2**20  # of a settings file
MAX_DOTS = 300  # in a line: the parser's time grows with the square of a dotted key's parts
DATASET = "fashion-mnist"  # where none is named
SYNTHETIC = "synthetic"
TABLES = (".csv", ".tsv", ".parquet")


class DataSettings(BaseModel):
    """Which data, and how they are split over clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str | None = None  # a name from `fedveil datasets`
    path: Path | None = None  # a table (CSV, Parquet), image folder or zip, text, saved data
    client: str | None = None  # a table's columns
    label: str | None = None
    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)  # public, of columns
    categories: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # public, of columns
    buckets: int | None = None  # for text without categories: 16
    standardize: bool = False  # scale a table's columns by the data's own means and deviations
    size: tuple[int, int] | None = None  # of images, height and width: 32, 32
    color: bool | None = None  # of images: true
    partition: str | None = None
    clients: int | None = None  # of named data sets
    simulate_clients: int | None = None  # to make up, for data that do not name their clients
    per_client: int = 5  # shards of a client
    alpha: float = 0.5  # of the Dirichlet distribution, also of synthetic data
    examples: int | None = None  # of a client: 500 with majority classes, 20 in synthetic data
    features: int | None = None  # of synthetic data: 784
    classes: int | tuple[str, ...] | None = None  # of synthetic data: 10; public, of one's own
    seed: int = Field(default=0, ge=0)

    @field_validator("classes", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        """`--data classes=no,yes` is a list of names, and so is [0, 1]."""
        if isinstance(given, str):
            return tuple(name.strip() for name in given.split(","))
        return tuple(map(_word, given)) if isinstance(given, list | tuple) else given

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
    """A number or truth value of TOML as a table's cell has it."""
    return value if isinstance(value, str) else json.dumps(value)


class Settings(BaseModel):
    """Everything `fedveil train` needs; the same names in TOML and as flags."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fedveil: str | None = None  # the version that wrote the file
    algorithm: str = "dp_norm_fedavg"
    parameters: dict[str, Any] = Field(default_factory=dict)
    data: DataSettings = DataSettings()
    model: str | None = None
    rounds: int = 100
    epsilon: float | None = None
    delta: float | None = None
    view: Literal["models", "sum", "messages"] | None = None  # whom the budget is kept against
    per_round: bool = False  # whether epsilon and delta are those of a single round
    noise: Literal["seeded", "secure"] = "seeded"
    seed: int = 0
    engine: str = "auto"
    evaluate_every: int | None = None
    checkpoint_every: int | None = Field(default=None, ge=1)  # rounds; None: at every evaluation
    diagnostics: bool | None = None  # recorded or not; None: unless noise is secure
    recipe: dict[str, Any] | None = None  # resolved; used instead of algorithm and parameters


RECIPE_FLAGS = {
    "algorithm", "parameters", "rounds", "epsilon", "delta", "view", "per_round", "noise",
}  # fmt: skip


def read_settings(file: Path | None, flags: Mapping[str, Any]) -> Settings:
    """A file's settings with the flags on top; a changed recipe is resolved anew."""
    plain = {} if file is None else _read_toml(file)
    refuse_newer(file or Path(), plain.get("fedveil"))
    plain.pop("engine_reason", None)  # of runs before 0.2, which took it down here
    for name in ("data", "parameters"):
        if not isinstance(plain.get(name, {}), dict):
            raise UserError(f"{file}: {name} must be a table, written [{name}].")
    if "algorithm" in flags or ("algorithm" in plain and RECIPE_FLAGS & flags.keys()):
        plain.pop("recipe", None)
    if "recipe" in plain and "parameters" in flags:
        raise UserError(f"{file} has a [recipe] and no algorithm to set parameters of; edit it.")
    if flags.get("algorithm", plain.get("algorithm")) != plain.get("algorithm"):
        plain.pop("parameters", None)
    merged = {**plain, **flags}
    for name in ("data", "parameters"):
        merged[name] = {**plain.get(name, {}), **flags.get(name, {})}
    try:
        return Settings.model_validate(merged)
    except ValidationError as problem:
        raise _sentence(problem, file) from problem


def read_run(file: Path) -> Settings:
    """The settings of a run that goes on; they must name its data."""
    settings = read_settings(file, {})
    refuse_unnamed_data(settings, f"{file}", "go on with it from Python")
    return settings


def refuse_unnamed_data(settings: Settings, what: str, advice: str) -> None:
    """A recipe that a run from Python wrote down does not name its data, and none is guessed."""
    if settings.recipe is not None and settings.data.dataset is None and settings.data.path is None:
        raise UserError(
            f"{what} does not say which data the run had, as one started from Python may not; "
            f"{advice}."
        )


def resolve_recipe(settings: Settings) -> Recipe:
    """The recipe written down, or the algorithm called with its parameters."""
    from fedveil.algorithms.calling import call
    from fedveil.runs.codec import recipe_from_plain

    if settings.recipe is None:
        recipe = call(settings.algorithm, settings.parameters)
        return recipe if settings.view is None else replace(recipe, view=settings.view)
    recipe = recipe_from_plain(settings.recipe)
    if "algorithm" in settings.model_fields_set:
        _refuse_edited(settings, recipe)
    return recipe if settings.view is None else replace(recipe, view=settings.view)


def _refuse_edited(settings: Settings, recipe: Recipe) -> None:
    """A file may hold the recipe twice; then both must say the same, but for what was settled."""
    from fedveil.parts.bound import ProbedClip
    from fedveil.privacy.secure import secured

    named = resolve_recipe(settings.model_copy(update={"recipe": None}))
    if settings.noise == "secure":
        named = secured(named)
    if isinstance(named.bound, ProbedClip) and isinstance(recipe.bound, ProbedClip):
        named = replace(named, bound=replace(named.bound, norm=recipe.bound.norm))
    if replace(named, noise=recipe.noise) != recipe:
        raise UserError(
            "The [recipe] of these settings is not what their algorithm and parameters make; "
            "delete the [recipe] tables to have them made anew, or the algorithm to keep them."
        )


def load_data(settings: DataSettings) -> Federated:
    """The data set by clients; by example where nobody says whose an example is."""
    from fedveil.data.saved import is_saved

    _refuse_foreign(settings)
    if settings.path is None and settings.dataset == SYNTHETIC:
        return _synthetic(settings)
    if settings.path is not None and settings.dataset is None and is_saved(settings.path):
        return _opened(settings, settings.path)
    dataset = _load(settings)
    if settings.path is not None and settings.simulate_clients is None:
        if dataset.keys is None:
            _refuse_unasked(settings)
            return dataset.by_example()
        if settings.client is None and settings.partition not in (None, "key"):
            _refuse_unasked(settings)
    return dataset.split(_partitioner(settings, dataset), settings.seed)


def prepare(
    settings: Settings,
    data: Federated | None = None,
    team: Team | None = None,
    ledger: Path | None = None,
) -> Training:
    """A training that stands at round 0."""
    from fedveil import training
    from fedveil.engines.processes import ALONE
    from fedveil.models.catalog import suggest

    recipe = resolve_recipe(settings)  # before the data: a mistake there should be heard at once
    data = load_data(settings.data) if data is None else data
    prepared = training.prepare(
        recipe,
        data,
        settings.model or suggest(data),
        settings.rounds,
        settings.epsilon,
        settings.delta,
        settings.seed,
        settings.engine,
        settings.evaluate_every,
        noise=settings.noise,
        per_round=settings.per_round,
        team=team or ALONE,
        diagnostics=settings.diagnostics,
        ledger=ledger,
    )
    prepared.checkpoint_every = settings.checkpoint_every or 0
    return prepared


def resolved(settings: Settings, training: Training) -> dict[str, Any]:
    """The settings as they ran, for recipe.toml."""
    from fedveil import __version__
    from fedveil.models.catalog import suggest
    from fedveil.runs.codec import to_plain

    plain = settings.model_dump(mode="json", exclude_none=True)
    if settings.data.path is not None:
        plain["data"]["path"] = str(settings.data.path.resolve())
    else:
        plain["data"]["dataset"] = _name(training.data.name, settings.data.dataset or DATASET)
    return {
        **plain,
        "fedveil": __version__,
        "model": settings.model or suggest(training.data),
        "delta": training.delta,
        "evaluate_every": training.evaluate_every,
        "recipe": to_plain(training.recipe),
    }


def _name(loaded: str, asked: str) -> str:
    """The data set that was loaded: digits may have stood in for one that could not be had."""
    from fedveil.data.catalog import CATALOG

    return loaded if loaded in CATALOG else asked


def _load(settings: DataSettings) -> Dataset:
    from fedveil.data import catalog
    from fedveil.data.table import load_table

    if settings.path is None:
        _refuse_columns(settings, settings.dataset or DATASET)
        return catalog.load(settings.dataset or DATASET)
    if settings.dataset is not None:
        raise UserError(
            f"Both dataset '{settings.dataset}' and the path {settings.path} are given; give one."
        )
    named = settings.classes if isinstance(settings.classes, tuple) else None
    if settings.path.suffix.lower() not in TABLES:
        _refuse_columns(settings, settings.path)
        return catalog.load_path(settings.path, settings.size, settings.color, named, settings.seed)
    if settings.client is None or settings.label is None:
        raise UserError(
            f"The table {settings.path} needs to know its columns: "
            "give --client (whose row it is) and --label (what to predict)."
        )
    return load_table(
        settings.path,
        settings.client,
        settings.label,
        seed=settings.seed,
        ranges=settings.ranges,
        categories=settings.categories,
        classes=named,
        standardize=settings.standardize,
        **({} if settings.buckets is None else {"buckets": settings.buckets}),
    )


def _synthetic(settings: DataSettings) -> Federated:
    from fedveil.data.synthetic import synthetic

    _refuse_columns(settings, SYNTHETIC)
    _refuse_dealing(SYNTHETIC, partition=settings.partition)
    names = ("examples", "features", "classes", "alpha", "seed")
    given = {name: getattr(settings, name) for name in names} | {"clients": _number(settings)}
    return synthetic(**{name: value for name, value in given.items() if value is not None})


def _opened(settings: DataSettings, path: Path) -> Federated:
    from fedveil.data.saved import open_federated

    _refuse_columns(settings, path)
    _refuse_dealing(
        str(path),
        partition=settings.partition,
        clients=settings.clients,
        simulate_clients=settings.simulate_clients,
    )
    return open_federated(path)


def _refuse_dealing(source: str, **settings: object) -> None:
    """Data that are split over clients already are not split anew."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise UserError(
            f"{source} says itself whose an example is; leave {' and '.join(given)} out."
        )


def _refuse_unasked(settings: DataSettings) -> None:
    """Of a user's own data no clients are made up unless that is asked for."""
    if settings.clients is not None or settings.partition is not None:
        raise UserError(
            f"{settings.path} would be split over made-up clients, and a guarantee for them "
            "protects nobody real; give --simulate-clients N instead of --clients to do so, or "
            "leave partition and clients out and train with an example-level recipe such as dp_sgd."
        )


def _refuse_foreign(settings: DataSettings) -> None:
    """Settings that these data do not have."""
    synthetic = settings.path is None and settings.dataset == SYNTHETIC
    if settings.features is not None and not synthetic:
        raise UserError(f"features is set for the data set '{SYNTHETIC}' only; leave it out.")
    if isinstance(settings.classes, int) != synthetic and settings.classes is not None:
        raise UserError(
            f"classes is a number for the data set '{SYNTHETIC}', and a list of names, such as "
            "classes=no,yes, for a --path of your own; other data sets have their own."
        )
    if settings.classes is not None and settings.path is None and not synthetic:
        raise UserError(f"'{settings.dataset or DATASET}' has its own classes; leave them out.")
    table = settings.path is not None and settings.path.suffix.lower() in TABLES
    for name in ("ranges", "categories", "buckets", "standardize"):
        if getattr(settings, name) and not table:
            raise UserError(f"{name} is set for a table ({', '.join(TABLES)}) only; leave it out.")
    if (settings.size is not None or settings.color is not None) and (
        settings.path is None or table
    ):
        raise UserError("size and color are set for a --path of images only; leave them out.")
    if settings.clients is not None and settings.simulate_clients is not None:
        raise UserError("Both clients and simulate_clients are given; give one of them.")


def _number(settings: DataSettings) -> int | None:
    """Of the clients that are made up."""
    return settings.clients if settings.simulate_clients is None else settings.simulate_clients


def _refuse_columns(settings: DataSettings, source: object) -> None:
    if settings.client is not None or settings.label is not None:
        raise UserError(
            f"{source} is not a table, so it has no client or label column; leave --client and "
            f"--label out, or give the --path of a table ({', '.join(TABLES)})."
        )


def _partitioner(settings: DataSettings, dataset: Dataset) -> Partitioner:
    from fedveil.data.partition import ByKey, Dirichlet, Iid, MajorityClasses, Shards

    keyed, number = dataset.keys is not None, _number(settings)
    if keyed and number is not None and settings.partition is None:
        raise UserError(
            f"'{dataset.name}' says itself which client an example belongs to; leave clients out, "
            "or name a partition to deal its examples out anew."
        )
    name = settings.partition or ("key" if keyed else "iid")
    if settings.client is not None and name != "key":
        raise UserError(
            f"Rows of {settings.path} belong to the clients of column '{settings.client}'; "
            f"partition '{name}' would tear them apart, and the guarantee would not cover a "
            "client's rows together; leave partition out."
        )
    clients = 100 if number is None else number
    examples = 500 if settings.examples is None else settings.examples
    if name == "key" and dataset.keys is None:
        raise UserError(
            f"'{dataset.name}' does not say which client an example belongs to; "
            "use partition 'iid', 'shards', 'majority' or 'dirichlet' with a number of clients."
        )
    makers: dict[str, Callable[[], Partitioner]] = {
        "key": ByKey,
        "iid": lambda: Iid(clients),
        "shards": lambda: Shards(clients, settings.per_client),
        "majority": lambda: MajorityClasses(clients, examples),
        "dirichlet": lambda: Dirichlet(clients, settings.alpha),
    }
    if name not in makers:
        raise unknown("partition", name, makers)
    return makers[name]()


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file} is larger than 1 MB; a settings file is a few lines of TOML.")
        text = file.read_text(encoding="utf-8")
        if any(line.count(".") > MAX_DOTS for line in text.splitlines()):
            raise UserError(f"{file} has a line with more than {MAX_DOTS} dots; nothing nests so.")
        return tomllib.loads(text)
    except OSError as problem:
        raise UserError(f"Could not read {file}: {problem.strerror}.") from problem
    except UserError:
        raise
    except (ValueError, RecursionError) as problem:  # also of text and of numbers too long
        raise UserError(f"{file} is not valid TOML: {problem}.") from problem


def _sentence(problem: ValidationError, file: Path | None) -> UserError:
    first = problem.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        of_data = first["loc"][0] == "data"
        what = f"setting{' of the data' if of_data else ''} in {file or 'the flags'} named"
        group = DataSettings if of_data else Settings
        return unknown(what, str(first["loc"][-1]), group.model_fields)
    plain = isinstance(first["input"], str | int | float)  # what is nested may be so too deeply
    given = str(first["input"])[:40] if plain else "…"
    return UserError(
        f"{file or 'The flags'}: {where} is '{given}', but {first['msg'][:1].lower()}"
        f"{first['msg'][1:]}."
    )
