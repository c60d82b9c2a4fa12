"""One unit's data change no other unit's: not its inputs, label, part, nor the model's shape.

An encoder that was fitted on all rows let one patient's age of 10⁶ move the sum before noise by 86
times its sensitivity. Here one patient writes what they like into a table, and another one is not
there at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedveil import algorithms
from fedveil.data.federated import Dataset, Federated
from fedveil.data.partition import ByKey
from fedveil.data.sources.shakespeare import load_shakespeare
from fedveil.data.table import load_table
from fedveil.engines.dense import DenseEngine
from fedveil.engines.task import Task
from fedveil.models import build
from fedveil.recipe import Recipe
from fedveil.testing.replay import play

COLUMNS = ("patient", "age", "bmi", "city", "seen", "died")
DECLARED: dict[str, Any] = {"classes": ("no", "yes")}
Row = tuple[str, ...]


def rows(patients: int = 24, each: int = 6) -> list[Row]:
    """Patients 10 … with a few visits each."""
    rng = np.random.default_rng(5)
    made = []
    for index in range(patients * each):
        age, bmi = 20 + 60 * rng.random(), 27 + 4 * rng.normal()
        city, day = rng.choice(["Bern", "Rome", "Oslo"]), f"2024-01-{1 + index % 28:02}"
        died = "yes" if age + 2 * bmi + 10 * rng.normal() > 105 else "no"
        made.append((f"{10 + index % patients}", f"{age:.0f}", f"{bmi:.1f}", city, day, died))
    return made


def load(folder: Path, table: list[Row], name: str = "t.csv", **given: Any) -> Dataset:
    path = folder / name
    frame = pl.DataFrame(table, schema=dict.fromkeys(COLUMNS, pl.String), orient="row")
    if path.suffix == ".parquet":
        numbers = pl.col("age", "bmi").cast(pl.Float64, strict=False)
        frame.with_columns(numbers).write_parquet(path)
    else:
        frame.write_csv(path)
    return load_table(path, "patient", "died", **{"holdout": "rows", **given})


def typed(column: pl.Series) -> pl.Series:
    """As pandas types a column: one cell that is missing makes 34 a 34.0, a word makes it text."""
    words = column.replace(["", "NaN"], [None, None])
    for kind in (pl.Int64, pl.Float64):
        numbers = words.cast(kind, strict=False)
        if numbers.null_count() == words.null_count():
            gaps = kind == pl.Int64 and words.null_count() > 0
            return numbers.cast(pl.Float64) if gaps else numbers
    dates = words.str.to_datetime("%Y-%m-%d", strict=False)
    return words if dates.null_count() > words.null_count() else dates


def load_typed(folder: Path, table: list[Row], last: str, **given: Any) -> Dataset:
    """From a Parquet file whose schema all cells decide; one column has a word in its last row."""
    name = f"{len(last)}.parquet"
    frame = pl.DataFrame(table, schema=dict.fromkeys(COLUMNS, pl.String), orient="row")
    nothing = pl.Series("nothing", [""] * (frame.height - 1) + [last])
    frame = frame.with_columns(nothing)
    frame.select(typed(column) for column in frame.get_columns()).write_parquet(folder / name)
    return load_table(folder / name, "patient", "died", **{"holdout": "rows", **given})


def parts(dataset: Dataset, apart: set[str]) -> dict[str, list[Any]]:
    """What each patient trains on, but for some; and the test rows that are there for all."""
    assert dataset.keys is not None
    found: dict[str, list[Any]] = {}
    examples = zip(dataset.train.inputs, dataset.train.labels, strict=True)
    for key, (x, y) in zip(dataset.keys.tolist(), examples, strict=True):
        if key not in apart:
            found.setdefault(key, []).append((x.tolist(), y.tolist()))
    return found


ATTACKS: dict[str, list[Row]] = {
    "an age of 10^6": [("10", "1000000", "27", "Bern", "2024-01-01", "yes")],
    "a number without end": [("10", "1e400", "-inf", "Bern", "2024-01-01", "yes")],
    "a category of one's own": [("10", "50", "27", "Atlantis", "2024-01-01", "no")],
    "a very long category": [("10", "50", "27", "x" * 100_000, "2024-01-01", "no")],
    "text among numbers": [("10", "abc", "none of it", "Bern", "2024-01-01", "no")],
    "a number among text": [("10", "50", "27", "7", "2024-01-01", "no")],
    "nothing at all": [("10", "", "NaN", "", "", "no")],
    "a date that is none": [("10", "50", "27", "Bern", "yesterday", "no")],
    "a class of one's own": [("10", "50", "27", "Bern", "2024-01-01", "maybe")],
    "a fraction as class": [("10", "50", "27", "Bern", "2024-01-01", "0.5")],
    "a name among numbers": [("Zoë", "50", "27", "Bern", "2024-01-01", "no")],
    "a fraction as name": [("10.5", "50", "27", "Bern", "2024-01-01", "no")],
    "a very long name": [("n" * 5000, "50", "27", "Bern", "2024-01-01", "no")],
    "many rows": [("10", "99", f"{i}", f"c{i}", "2024-01-01", "yes") for i in range(300)],
    "the row of another": [rows()[1]],
    "nobody": [],
}
OTHERS = {"10", "10.5", "Zoë", "n" * 5000}
ENCODED: dict[str, Any] = {"categories": {"city": ("Bern", "Rome")}, "ranges": {"bmi": (10, 60)}}
PUBLIC: list[dict[str, Any]] = [  # how a row is encoded and where it goes are two matters
    DECLARED,
    {**DECLARED, **ENCODED, "holdout": "clients", "test_fraction": 0.1},
]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Dataset]:
    """What becomes of the table that nobody attacks, read once for all attacks."""
    folder = tmp_path_factory.mktemp("honest")

    @functools.cache
    def known(suffix: str, public: int) -> Dataset:
        return load(folder, rows(), f"a.{suffix}", **PUBLIC[public])

    return known


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_what_one_patient_writes_changes_nobody_else(
    tmp_path: Path, attack: str, suffix: str, honest: Callable[[str, int], Dataset]
) -> None:
    """Ten is the first patient in order of names and of rows, so all others come behind."""
    table = [row for row in rows() if row[0] != "10"]
    apart = OTHERS if attack != "the row of another" else OTHERS | {rows()[1][0]}
    for number, public in enumerate(PUBLIC):
        one = honest(suffix, number)
        other = load(tmp_path, ATTACKS[attack] + table, f"b.{suffix}", **public)
        kept = parts(one, apart)
        assert kept == parts(other, apart)
        assert len(kept) > 15
        assert one.train.inputs.shape[1] == other.train.inputs.shape[1]
        assert (one.classes, one.class_names) == (other.classes, other.class_names)
        assert one.origin.exclusions == other.origin.exclusions == ()


GAPS: dict[str, list[Row]] = {
    "a gap among whole numbers": [("10", "", "27", "Bern", "2024-01-01", "no")],
    "a row without a name": [("", "50", "27", "Bern", "2024-01-01", "no")],
    "a row without a class": [("10", "50", "27", "Bern", "2024-01-01", "")],
    "a time of day": [("10", "50", "27", "Bern", "2024-01-01 12:30", "no")],
}


OF_CLASSES = [  # the only attacks that a column of other classes can make different
    "a class of one's own", "a fraction as class", "a row without a class",
    "a gap among whole numbers", "nobody",
]  # fmt: skip


@pytest.mark.parametrize(
    ("attack", "numbers"),
    [
        *((attack, False) for attack in (*ATTACKS, *GAPS)),
        *((attack, True) for attack in OF_CLASSES),
    ],
)
def test_a_schema_that_one_row_decides_changes_nobody_else(
    tmp_path: Path, attack: str, numbers: bool
) -> None:
    """A cell of one patient's changes the type of everybody's column, and nothing else."""
    answers = {"no": "0", "yes": "1"} if numbers else {}
    honest, hostile = (
        [(*row[:-1], answers.get(row[-1], row[-1])) for row in table]
        for table in (rows(), {**ATTACKS, **GAPS}[attack])
    )
    rest = [row for row in honest if row[0] != "10"]
    apart = OTHERS if attack != "the row of another" else OTHERS | {rows()[1][0]}
    classes = ("false", "true") if numbers else ("no", "yes")
    for public in ({}, {"categories": {"age": tuple(f"{n}.0" for n in range(20, 80))}}):
        one = load_typed(tmp_path, honest, "", classes=classes, **public)
        two = load_typed(
            tmp_path, rest + hostile, "x" * len(hostile[:1]), classes=classes, **public
        )
        assert one.train.inputs.shape[1] == two.train.inputs.shape[1]
        assert parts(one, apart) == parts(two, apart)
        assert len(parts(one, apart)) > 20
        assert one.origin.exclusions == two.origin.exclusions == ()


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    cells=st.lists(st.text(st.characters(exclude_categories=("Cs",))), min_size=6, max_size=6),
    place=st.integers(0, 143),
)
def test_whatever_one_row_holds_all_other_rows_stay(
    tmp_path_factory: pytest.TempPathFactory,
    honest: Callable[[str, int], Dataset],
    cells: list[str],
    place: int,
) -> None:
    """For single rows as units, too: also the other rows of the same patient stay as they are."""
    kept = rows()
    changed = [*kept[:place], tuple(cells), *kept[place + 1 :]]

    def trained(data: Dataset) -> list[tuple[str, list[float], int]]:
        assert data.keys is not None
        inputs, labels = data.train.inputs[:].tolist(), data.train.labels[:].tolist()
        return sorted(zip(data.keys.tolist(), inputs, labels, strict=True))

    other = load(tmp_path_factory.mktemp("t"), changed, **DECLARED)
    before, after = trained(honest("csv", 0)), trained(other)
    assert len([row for row in before if row not in after]) <= 1
    assert len([row for row in after if row not in before]) <= 1
    assert len(before) - 1 <= len(after) <= len(before) + 1


RECIPE = algorithms.dp_norm_fedavg(rate=1.0, steps=3, learning_rate=1.0, noise_multiplier=1.0)
EXAMPLES = algorithms.dp_sgd(clip=0.2, rate=1.0, noise_multiplier=1.0)


def total(data: Federated, recipe: Recipe) -> torch.Tensor:
    """The sum before noise, from a model that is not all zeros."""
    data = data.by_example() if recipe.unit == "example" else data
    task = Task(build("softmax", data, torch.Generator().manual_seed(0)), data.loss)
    start = [task.flatten()] * data.clients
    everyone = np.arange(data.clients)
    return play(recipe, start, data=data, engine=DenseEngine(task, 64), members=everyone).total


HONEST: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}


def moved(folder: Path, attack: str, recipe: Recipe, **given: Any) -> float:
    """How far one patient, or one row, moves the sum, in parts of the sensitivity."""
    table, given = rows(patients=60, each=3), {"test_fraction": 0.0, **given}
    first = [row for row in table if row[0] == "10"]
    rest = [row for row in table if row[0] != "10"]
    if recipe.unit == "example":
        first, rest = first[:1], first[1:] + rest

    def sum_of(there: list[Row]) -> torch.Tensor:
        return total(load(folder, there + rest, **given).split(ByKey()), recipe)

    known = recipe.unit, repr(given)
    if known not in HONEST:  # the same for all attacks
        HONEST[known] = sum_of(first), sum_of([])
    sums = [HONEST[known][0], sum_of(ATTACKS[attack][:1]), HONEST[known][1]]
    if len({len(s) for s in sums}) > 1:
        return float("inf")  # even the model is another one
    replaced, removed = (sums[0] - sums[1]).norm(), (sums[0] - sums[2]).norm()
    bound = recipe.message(len(sums[0]))
    one, two = (bound.sensitivity(a).l2 for a in ("add-remove", "replace-one"))
    return max(float(removed) / one, float(replaced) / two)


SINGLE = [name for name, written in ATTACKS.items() if len(written) == 1]


@pytest.mark.parametrize("recipe", [RECIPE, EXAMPLES], ids=lambda recipe: recipe.unit)
@pytest.mark.parametrize("attack", SINGLE)
def test_one_unit_moves_the_sum_by_no_more_than_the_sensitivity(
    tmp_path: Path, attack: str, recipe: Recipe
) -> None:
    assert moved(tmp_path, attack, recipe, **DECLARED) <= 1 + 1e-4


@pytest.mark.parametrize("attack", ["an age of 10^6", "a category of one's own"])
def test_a_fitted_encoder_lets_one_patient_move_everybody_and_says_so(
    tmp_path: Path, attack: str
) -> None:
    fitted = {**DECLARED, "standardize": True}
    assert moved(tmp_path, attack, RECIPE, **fitted) > 10
    exclusions = load(tmp_path, rows(), **fitted).origin.exclusions
    assert exclusions == (
        "the column types",
        "the means and deviations of age and bmi",
        "the categories of city",
        "the first and last dates of seen",
    )


def test_classes_that_are_not_declared_are_an_exclusion(tmp_path: Path) -> None:
    data = load(tmp_path, rows()).split(ByKey())
    assert data.origin.exclusions == ("the classes of 'died'",)
    assert data.by_example().origin.exclusions == ("the classes of 'died'",)


def test_one_role_changes_no_other_role(tmp_path: Path) -> None:
    """The characters of a text are a public alphabet, and its roles stand for themselves."""
    speeches = [f"{who}:\n" + f"{who} says {n} things. " * 30 for n, who in enumerate("ABCD")]
    strange = "Z:\n" + "Ωμέγα ☃ " * 80
    (tmp_path / "a.txt").write_text("\n\n".join(speeches), encoding="utf-8")
    (tmp_path / "b.txt").write_text("\n\n".join([strange, *speeches]), encoding="utf-8")
    one, two = (load_shakespeare(tmp_path / name) for name in ("a.txt", "b.txt"))
    assert parts(one, set()) == parts(two, {"Z"})
    assert one.class_names == two.class_names
    assert one.origin.exclusions == two.origin.exclusions == ()
