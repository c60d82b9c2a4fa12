"""A table whose ranges, categories and classes are learned with noise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from fedveil import algorithms
from fedveil.aggregates.desk import GRID, Contributions, Desk
from fedveil.data.encoding import CategoryColumn, DateColumn, PublicColumn, TableEncoder
from fedveil.data.federated import Dataset
from fedveil.data.partition import ByKey, Iid
from fedveil.data.table import StatisticsNoise, TableOptions, load_table, read_table
from fedveil.errors import UserError
from fedveil.training.prepare import prepare
from tests.unit.data.test_apart import ATTACKS, load, rows


def visits(clients: int = 600, each: int = 5) -> pl.DataFrame:
    rng, count = np.random.default_rng(2), clients * each
    who = np.repeat(np.arange(clients), each)
    return pl.DataFrame(
        {
            "who": [f"w{i}" for i in who],
            "age": rng.integers(20, 80, clients)[who],
            "sodium": rng.normal(140, 4, count).round(1),
            "ward": rng.choice(["A", "B", "C"], count),
            "visit": [f"{i:06x}-{rng.integers(9)}x" for i in range(count)],
            "record_id": range(count),
            "on": [f"20{10 + i % 12}-0{1 + i % 9}-15" for i in range(count)],
            "ill": rng.choice(["no", "yes"], count, p=[0.7, 0.3]),
        }
    )


def learned(frame: Any, **given: Any) -> Dataset:
    return load_table(frame, "who", "ill", stats_epsilon=2.0, **given)


@pytest.fixture(scope="module")
def usual() -> Dataset:
    """What is learned of these visits, for all tests that only read it."""
    return learned(visits())


def test_columns_are_what_they_seem_to_be(usual: Dataset) -> None:
    data = usual
    assert data.encoder is not None
    encoder = TableEncoder.from_json(data.encoder)
    age, sodium, ward, on = encoder.columns
    assert isinstance(age, PublicColumn)
    assert 0 < age.knots[0] < 30
    assert 70 < age.knots[-1] < 130
    assert isinstance(sodium, PublicColumn)
    assert 120 < sodium.knots[0] < 139 < 141 < sodium.knots[-1] < 165
    assert isinstance(ward, CategoryColumn)
    assert ward.values == ("A", "B", "C")
    assert isinstance(on, DateColumn)
    assert data.class_names == encoder.class_names == ("no", "yes")
    notes = " ".join(data.notes)
    assert "Left out record_id: the name is that of an identifier" in notes
    assert "Left out visit: text of which no value is shared by enough clients" in notes


def test_what_is_learned_is_covered_and_said(usual: Dataset) -> None:
    data = usual
    assert data.origin.exclusions == ()
    assert data.origin.statistics is not None
    assert data.origin.released[0] == "the classes of 'ill'"
    split = data.split(ByKey())
    recipe = algorithms.dp_fedavg(clip=1.0, rate=0.1)
    training = prepare(recipe, split, "softmax", 5, epsilon=4.0)
    assert training.recipe.statistics == data.origin.statistics
    made = training.statement()
    assert 3.8 < made.main.epsilon <= 4.0
    assert "The classes of 'ill', and the types, ranges and categories of age" in made.text()
    assert not made.towards("messages").private
    plain = load_table(visits(), "who", "ill").split(ByKey())
    without = prepare(recipe, plain, "softmax", 5, epsilon=4.0)
    ours, theirs = (t.recipe.noise.noise_multiplier for t in (training, without))
    assert theirs is not None
    assert ours is not None
    assert ours > theirs  # statistics are paid for


def test_statistics_that_use_up_epsilon_are_refused(usual: Dataset) -> None:
    data = usual.split(ByKey())
    with pytest.raises(UserError, match="The statistics of the data alone spend"):
        prepare(algorithms.dp_fedavg(clip=1.0, rate=0.1), data, rounds=5, epsilon=1.5)


def test_the_same_request_is_the_same_release_and_another_one_is_not(usual: Dataset) -> None:
    frame, first = visits(), usual
    again = learned(frame.sample(fraction=1, shuffle=True, seed=1))
    assert first.encoder == again.encoder
    assert first.source == again.source
    assert first.encoder != learned(frame, seed=1).encoder
    assert learned(frame, noise="secure").encoder != learned(frame, noise="secure").encoder


def subject(frame: Any, **given: Any) -> str:
    """What the noise of a table's statistics is keyed by."""
    seen = []

    def granted(_: int, subject: str) -> StatisticsNoise | None:
        seen.append(subject)
        return None

    read_table(frame, TableOptions(**{"client": "who", "label": "ill", **given}), granted)
    return seen[0]


def test_only_one_request_has_the_same_noise() -> None:
    frame = visits(60)
    gap = pl.when(pl.int_range(pl.len()) > 0).then(pl.col("ill")).alias("ill")
    swapped = frame.rename({"age": "sodium", "sodium": "age"})
    tables = [
        frame,
        frame.with_columns(gap),
        swapped,
        swapped.select(frame.columns),
        frame.select(reversed(frame.columns)),
        frame.with_columns(who=pl.col("who").replace({"w7": "007", "w8": "7"})),
        frame.with_columns(who=pl.col("who").replace({"w7": "7", "w8": "7"})),
    ]
    given: list[dict[str, Any]] = [
        {"label": "ward"}, {"client": "visit"}, {"columns": ("age", "ward")},
        {"columns": ("ward", "age")}, {"drop": ("ward",)}, {"classes": ("no", "yes")},
        {"ranges": {"age": (0, 100)}}, {"categories": {"ward": ("A",)}},
        {"dates": {"on": ("2010-01-01", "2022-01-01")}}, {"holdout": "rows"},
        {"test_fraction": 0.0}, {"seed": 1}, {"buckets": 8}, {"label": "age", "target": "number"},
    ]  # fmt: skip
    found = [*map(subject, tables), *(subject(frame, **each) for each in given)]
    assert len(set(found)) == len(found)
    shuffled = frame.sample(fraction=1, shuffle=True, seed=1)
    assert subject(shuffled) == subject(frame.cast(pl.String)) == found[0]


def test_a_missing_label_changes_all_noise() -> None:
    """If the noise were the same, equal encoders would show what a client without a label has."""
    table = visits().with_columns(
        second=pl.when(pl.col("who") != "w0").then(pl.col("ill")),
        sodium=pl.when(pl.col("who") != "w0").then(pl.col("sodium")),
    )
    given: dict[str, Any] = {
        "columns": ["sodium"], "classes": ["no", "yes"], "test_fraction": 0, "stats_epsilon": 0.5,
    }  # fmt: skip
    one, other = (load_table(table, "who", label, **given) for label in ("ill", "second"))
    knots = [TableEncoder.from_json(data.encoder or "").columns for data in (one, other)]
    assert knots[0] != knots[1]


def test_a_second_draw_is_a_second_release_even_if_it_is_equal() -> None:
    given: dict[str, Any] = {"columns": ["ward"], "classes": ["no", "yes"], "test_fraction": 0}
    drawn = [learned(visits(), **given, seed=seed) for seed in (0, 1, 1)]
    drawn.append(learned(visits(), **given, noise="secure"))
    runs = []
    for data in drawn:
        assert torch.equal(data.train.inputs[:], drawn[0].train.inputs[:])
        recipe = algorithms.dp_fedavg(clip=1.0, rate=0.1, noise_multiplier=1.0)
        runs.append(prepare(recipe, data.split(ByKey()), "softmax", 5).spec.identity)
    assert runs[1] == runs[2]
    assert len(set(runs)) == 3


def test_the_name_of_the_noise_is_public() -> None:
    names = []
    for table in (visits(600), visits(600).with_columns(age=pl.col("age") + 1)):
        names.append(TableEncoder.from_json(learned(table).encoder or "").noise)
    assert names[0] == names[1] != ""


def test_one_label_does_not_decide_what_others_are_called() -> None:
    ill = [i % 2 == 0 for i in range(500)]
    for labels in (ill, [*ill[:-1], 2], [int(value) for value in ill[:-1]] + [2]):
        table = {"who": [f"w{i}" for i in range(500)], "age": [30] * 500, "ill": labels}
        assert learned(table).class_names == ("0", "1")


def test_declared_columns_cost_nothing() -> None:
    frame = visits().select("who", "age", "ill")
    data = learned(frame, ranges={"age": (0, 100)}, classes=["no", "yes"])
    assert data.origin.statistics is None
    assert data.origin.released == ()


def test_too_few_clients_show_no_classes() -> None:
    for table in (visits(20), visits(100).with_columns(ill=pl.lit("syphilis"))):
        with pytest.raises(UserError, match="Declare the classes if they are public") as refused:
            learned(table)
        assert "syphilis" not in str(refused.value)  # nothing is charged yet


def test_made_up_clients_are_not_covered() -> None:
    origin = learned(visits()).split(Iid(10)).origin
    assert origin.statistics is None
    assert "the classes of 'ill'" in origin.exclusions


def test_an_example_pays_for_a_replaced_client() -> None:
    data = learned(visits()).split(ByKey())
    known, single = data.origin.statistics, data.by_example().origin.statistics
    assert known is not None
    assert single is not None
    assert single.ratio == pytest.approx(known.ratio / 2**0.5)


def test_views_that_do_not_trust_the_server_have_no_statistics(usual: Dataset) -> None:
    data = usual.split(ByKey())
    with pytest.raises(UserError, match="computed by a trusted server"):
        prepare(algorithms.dp_norm_fedavg_secagg(clients=50), data, rounds=2, epsilon=4)


def test_an_encoder_keeps_its_statistics(tmp_path: Path, usual: Dataset) -> None:
    data = usual
    assert data.encoder is not None
    (tmp_path / "encoder.json").write_text(data.encoder, encoding="utf-8")
    encoder = TableEncoder.from_json(tmp_path / "encoder.json")
    assert encoder.statistics == data.origin.statistics
    assert torch.equal(encoder.encode(visits().head(3)), encoder.encode(visits().head(3)))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_patient_moves_one_contribution(
    tmp_path: Path, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every release sees the same contributions of all others, whatever the patient writes."""
    seen: list[Counter[tuple[int, ...]]] = []
    answers: dict[int, np.ndarray] = {}

    def sums(self: Desk, given: Contributions, cells: int, precision: float) -> np.ndarray:
        self.precision += precision
        steps = given.whole()
        each = {unit: tuple(sorted(steps[given.unit == unit].tolist())) for unit in given.unit}
        seen.append(Counter(each.values()))
        found = np.zeros(cells, dtype=np.int64)
        np.add.at(found, given.cell, 1000 * steps)
        known = answers.setdefault(len(seen), found)  # the answers to both tables are the same
        return known if len(known) == cells else np.full(cells, GRID * 10**6)

    monkeypatch.setattr(Desk, "sums", sums)
    rest = [row for row in rows() if row[0] != "10"]
    runs = []
    for table in (rows(), ATTACKS[attack] + rest):
        seen.clear()
        load(tmp_path, table, stats_epsilon=1.0, seed=4)
        runs.append([*seen])
    assert len(runs[0]) == len(runs[1]) == 9  # the classes, and two releases of four columns
    for honest, other in zip(*runs, strict=True):
        assert sum((honest - other).values()) <= 1
        assert sum((other - honest).values()) <= 1
        assert all(sum(s * s for s in steps) <= GRID**2 for steps in other)
