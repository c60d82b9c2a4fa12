"""Load the data that settings name, and split them over clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.data.frames import TABLES, is_table, require_file
from fedveil.errors import UserError, unknown
from fedveil.training.settings import DATASET, PROBLEMS, SYNTHETIC, DataSettings, Settings

if TYPE_CHECKING:
    from fedveil.data.encoding import TableEncoder
    from fedveil.data.federated import Dataset, Federated
    from fedveil.data.partition import Partitioner
    from fedveil.data.table import StatisticsNoise

    Granted = Callable[[int, str], StatisticsNoise | None]


def load_for(settings: Settings, run: Path | None = None) -> Federated:
    """The data of a training, with statistics of a table as its budget allows.

    A run that is resumed has its statistics in its encoder.json: they are not drawn again.
    """
    from fedveil.runs.saved import SavedRun

    encoder = None if run is None else SavedRun(run).encoder
    if encoder is not None and encoder.statistics is None:
        encoder = None  # it follows from the settings
    return load_data(settings.data, statistics_of(settings), encoder)


def statistics_of(settings: Settings) -> Granted | None:
    """The allowance of a table's statistics: as requested, or a share of the run's ε.

    None where there is no ε to share, or where the server that would compute them is the adversary.
    """
    from fedveil.accounting.accountant import sensible_delta
    from fedveil.aggregates.allowance import Allowance
    from fedveil.data.table import alone, keyed
    from fedveil.training.settings import resolve_recipe

    seed, noise, epsilon = settings.data.seed, settings.noise, settings.epsilon
    if settings.stats_epsilon is not None:
        _refuse_no_table(settings)
        return alone(settings.stats_epsilon, settings.delta, seed, noise)
    recipe = resolve_recipe(settings)
    if epsilon is None or settings.per_round or not recipe.private or recipe.view != "models":
        return None

    def granted(clients: int, subject: str) -> StatisticsNoise:
        delta = sensible_delta(clients) if settings.delta is None else settings.delta
        return keyed(Allowance.share(epsilon, delta), seed, noise, subject)

    return granted


def _refuse_no_table(settings: Settings) -> None:
    """Refuse an ε of statistics that nobody would compute."""
    data = settings.data
    if settings.stats_epsilon and (data.path is None or data.image or not is_table(data.path)):
        raise UserError(
            "stats_epsilon is the budget of a table's statistics, but "
            f"{data.path or data.dataset or DATASET} is not a table. Remove stats_epsilon."
        )


def load_data(
    settings: DataSettings,
    statistics: Granted | None = None,
    encoder: TableEncoder | None = None,
    own: bool = False,
) -> Federated:
    """The data set split over clients, or by example if the data do not identify clients.

    A client's `own` table may hold that client only, and none of its rows are held out.
    """
    from fedveil.data.saved import is_saved

    _refuse_foreign(settings)
    if settings.path is None and settings.dataset == SYNTHETIC:
        return _synthetic(settings)
    if settings.path is None and settings.dataset in PROBLEMS:
        return _problem(settings)
    if settings.path is not None and settings.dataset is None and is_saved(settings.path):
        return _opened(settings, settings.path)
    dataset = _load(settings, statistics, encoder, own)
    if settings.held_out is not None:
        dataset = dataset.held_out(settings.held_out, settings.seed)
    if settings.path is not None and settings.simulate_clients is None:
        if dataset.keys is None:
            _refuse_unasked(settings)
            return dataset.by_example()
        if settings.client is None and settings.partition not in (None, "key"):
            _refuse_unasked(settings)
    return dataset.split(_partitioner(settings, dataset), settings.seed)


def _load(
    settings: DataSettings, statistics: Granted | None, encoder: TableEncoder | None, own: bool
) -> Dataset:
    from fedveil.data import catalog

    if settings.path is None:
        _refuse_columns(settings, settings.dataset or DATASET)
        return catalog.load(settings.dataset or DATASET)
    if settings.dataset is not None:
        raise UserError(
            f"Both the dataset '{settings.dataset}' and the path {settings.path} are given. Give "
            "one of them."
        )
    named = settings.classes if isinstance(settings.classes, tuple) else None
    if not is_table(settings.path):
        _refuse_columns(settings, settings.path)
        return catalog.load_path(settings.path, settings.size, settings.color, named, settings.seed)
    require_file(settings.path)
    columns = {
        "--client (the column that identifies the client)": settings.client,
        "--label (the column to predict)": settings.label,
    }
    if missing := [flag for flag, column in columns.items() if column is None]:
        raise UserError(f"For the table {settings.path}, also give {' and '.join(missing)}.")
    if settings.image is not None:
        from fedveil.data.sources.image_tables import load_image_table

        return load_image_table(
            settings.path, settings.image, str(settings.client), str(settings.label), settings.size,
            settings.color is not False, named, settings.seed, own,
        )  # fmt: skip
    return _table(settings, settings.path, named, statistics, encoder, own)


def _table(
    settings: DataSettings,
    path: Path,
    classes: tuple[str, ...] | None,
    statistics: Granted | None,
    encoder: TableEncoder | None,
    own: bool,
) -> Dataset:
    from fedveil.data.encoding import BUCKETS
    from fedveil.data.table import TableOptions, read_table

    options = TableOptions(
        client=str(settings.client),
        label=str(settings.label),
        seed=settings.seed,
        ranges=settings.ranges,
        categories=settings.categories,
        dates=settings.dates,
        classes=classes,
        standardize=settings.standardize,
        target=settings.target or "class",
        buckets=BUCKETS if settings.buckets is None else settings.buckets,
        columns=settings.columns,
        drop=settings.drop,
        holdout=settings.holdout or "clients",
    )
    return read_table(path, options, statistics, settings.test, encoder, own).dataset


def check_columns(settings: DataSettings) -> None:
    """Load a table, and refuse names that are none of its columns. Its label need not be named."""
    from fedveil.data.encoding import check_column
    from fedveil.data.frames import named_frame

    if settings.path is None or not is_table(settings.path):
        return
    if settings.client is None:
        raise UserError(
            f"The client column of {settings.path} is not named. Give --client, the column that "
            "identifies the client."
        )
    _, frame = named_frame(settings.path)
    for what in ("client", "label", "image"):
        if (name := getattr(settings, what)) is not None:
            check_column(frame, name, f"{what} column")
    for name in (*settings.columns, *settings.drop):
        check_column(frame, name, "column")
    for name in {**settings.ranges, **settings.categories, **settings.dates}:
        check_column(frame, name, "column")


def _synthetic(settings: DataSettings) -> Federated:
    from fedveil.data.synthetic import synthetic

    _refuse_columns(settings, SYNTHETIC)
    _refuse_dealing(SYNTHETIC, partition=settings.partition)
    names = ("examples", "features", "classes", "alpha", "seed")
    given = {name: getattr(settings, name) for name in names} | {"clients": _number(settings)}
    return synthetic(**{name: value for name, value in given.items() if value is not None})


def _problem(settings: DataSettings) -> Federated:
    """A quadratic of the papers, whose optimum and start are known."""
    from fedveil.data import problems

    _refuse_columns(settings, settings.dataset)
    _refuse_dealing(
        f"'{settings.dataset}'", partition=settings.partition, held_out=settings.held_out
    )
    if settings.dataset == "zhang2022-table4":
        return problems.zhang2022_table4().data
    if settings.dataset == "zhang2022-claim21":
        return problems.zhang2022_claim21(c=1.0, k=5.0).data
    clients = _number(settings) or 100
    return problems.das2022_quadratics(settings.seed, settings.start or "far", clients).data


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
    """Refuse to split data again that are already split over clients."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise UserError(f"{source} is already split over clients. Remove {' and '.join(given)}.")


def _refuse_unasked(settings: DataSettings) -> None:
    """Refuse to simulate clients on a user's own data, unless the user asks for it."""
    if settings.clients is not None or settings.partition is not None:
        raise UserError(
            f"{settings.path} would be split over simulated clients, and a guarantee for them "
            "protects no real person. To simulate clients, pass --simulate-clients N instead of "
            "--clients. To protect examples, remove partition and clients and use an example-level "
            "algorithm such as dp_sgd."
        )


def _refuse_foreign(settings: DataSettings) -> None:
    """Refuse settings that do not apply to these data."""
    synthetic = settings.path is None and settings.dataset == SYNTHETIC
    if settings.features is not None and not synthetic:
        raise UserError(f"features applies to the data set '{SYNTHETIC}' only. Remove it.")
    if isinstance(settings.classes, int) != synthetic and settings.classes is not None:
        raise UserError(
            f"classes has the wrong form. For the data set '{SYNTHETIC}', give a number. For a "
            "--path of your own, give a list of names, such as classes=no,yes."
        )
    if settings.classes is not None and settings.path is None and not synthetic:
        raise UserError(f"'{settings.dataset or DATASET}' has its own classes. Remove classes.")
    table = settings.path is not None and is_table(settings.path)
    names = "ranges", "categories", "dates", "columns", "drop", "holdout", "test", "buckets"
    for name in (*names, "standardize", "target", "image"):
        if getattr(settings, name) and not table:
            raise UserError(f"{name} applies to a table ({', '.join(TABLES)}) only. Remove it.")
        if getattr(settings, name) and settings.image is not None and name != "image":
            raise UserError(f"{name} does not apply to a table of images. Remove it.")
    if (settings.size is not None or settings.color is not None) and (
        settings.path is None or (table and settings.image is None)
    ):
        raise UserError("size and color apply to a --path of images only. Remove them.")
    if settings.start is not None and settings.dataset != "das2022-quadratics":
        raise UserError("start applies to the data set 'das2022-quadratics' only. Remove it.")
    if settings.clients is not None and settings.simulate_clients is not None:
        raise UserError("Both clients and simulate_clients are given. Give one of them.")


def _number(settings: DataSettings) -> int | None:
    """The number of simulated clients."""
    return settings.clients if settings.simulate_clients is None else settings.simulate_clients


def _refuse_columns(settings: DataSettings, source: object) -> None:
    if settings.client is not None or settings.label is not None:
        raise UserError(
            f"{source} is not a table, so it has no client or label column. Remove --client and "
            f"--label, or give the --path of a table ({', '.join(TABLES)})."
        )


def _partitioner(settings: DataSettings, dataset: Dataset) -> Partitioner:
    from fedveil.data.partition import (
        ByKey,
        Dirichlet,
        Iid,
        MajorityClasses,
        Overlapping,
        Shards,
    )

    keyed, number = dataset.keys is not None, _number(settings)
    if keyed and number is not None and settings.partition is None:
        raise UserError(
            f"'{dataset.name}' identifies the client of each example. Remove clients, or name a "
            "partition to split the examples over other clients."
        )
    name = settings.partition or ("key" if keyed else "iid")
    if settings.client is not None and name != "key":
        raise UserError(
            f"Rows of {settings.path} belong to the clients in column '{settings.client}', but "
            f"partition '{name}' would separate the rows of a client. The guarantee would then not "
            "cover all rows of a client. Remove partition."
        )
    clients = 100 if number is None else number
    examples = 500 if settings.examples is None else settings.examples
    if name == "key" and dataset.keys is None:
        raise UserError(
            f"'{dataset.name}' does not identify the client of each example. Use partition 'iid', "
            "'shards', 'majority', 'overlapping' or 'dirichlet' with a number of clients."
        )
    makers: dict[str, Callable[[], Partitioner]] = {
        "key": ByKey,
        "iid": lambda: Iid(clients),
        "shards": lambda: Shards(clients, settings.per_client),
        "majority": lambda: MajorityClasses(clients, examples),
        "overlapping": lambda: Overlapping(clients, examples),
        "dirichlet": lambda: Dirichlet(clients, settings.alpha),
    }
    if name not in makers:
        raise unknown("partition", name, makers)
    return makers[name]()
