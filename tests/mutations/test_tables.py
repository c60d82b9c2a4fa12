"""Mistakes that let one unit's data reach another's, or a guard get lost, each made on purpose."""

from __future__ import annotations

import inspect
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil import algorithms
from fedveil.data import cells, declared, encoding, federated, frames, save, saved, table
from fedveil.data import rows as table_rows
from fedveil.data.federated import Dataset, Examples, Federated
from fedveil.data.origin import UNKNOWN, Origin
from fedveil.data.partition import Iid
from fedveil.data.sources import images, shakespeare
from fedveil.errors import UserError
from fedveil.ledger import entering, resembling
from fedveil.ledger.ledger import Account, open_ledger
from fedveil.privacy.calibrate import Budget
from fedveil.training import prepare as training
from fedveil.training import sources
from fedveil.training.settings import DataSettings
from tests.mutations.making import Mutation, in_folder, line, named, require_caught, returning
from tests.unit.data import test_apart, test_cells
from tests.unit.data.test_apart import ATTACKS, DECLARED, OTHERS, load, parts, rows
from tests.unit.data.test_saved import as_format_1
from tests.unit.ledger import test_accounts
from tests.unit.training import test_statistics


def check_apart(attack: str, **given: Any) -> None:
    """What the first patient writes changes nobody else."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rest = [row for row in rows() if row[0] != "10"]
        honest = load(folder, rows(), "a.csv", **DECLARED, **given)
        other = load(folder, ATTACKS[attack] + rest, "b.csv", **DECLARED, **given)
        assert parts(honest, OTHERS) == parts(other, OTHERS)
        assert honest.classes == other.classes
        assert honest.train.inputs.shape[1] == other.train.inputs.shape[1]


def check_schema(attack: str, numbers: bool = False) -> None:
    """What the first patient writes changes the types of columns, and nobody else."""
    with tempfile.TemporaryDirectory() as name:
        test = test_apart.test_a_schema_that_one_row_decides_changes_nobody_else
        test(Path(name), attack, numbers)


def check_exclusions(**given: Any) -> None:
    """What was read from the data is named."""
    with tempfile.TemporaryDirectory() as name:
        found = load(Path(name), rows(), **given).origin.exclusions
    assert ("the classes of 'died'" in found) == ("classes" not in given)
    assert ("the means and deviations of age and bmi" in found) == ("standardize" in given)


def small(**given: Any) -> Federated:
    """Two clients of two examples."""
    inputs, labels = torch.eye(4), torch.tensor([0, 1, 0, 1])
    test = Examples(inputs, labels)
    return Federated("small", inputs, labels, torch.tensor([0, 2, 4]), test, 2, **given)


def check_saved() -> None:
    """A copy has the guards of what was copied."""
    data = small(tested_on_clients=True, origin=Origin(True, ("the classes",)))
    with tempfile.TemporaryDirectory() as name:
        save.save_federated(data, Path(name) / "a")
        opened = saved.open_federated(Path(name) / "a")
    assert opened.tested_on_clients
    assert opened.origin == data.origin


def check_old() -> None:
    """A copy of an earlier version has the safe answers."""
    with tempfile.TemporaryDirectory() as name:
        save.save_federated(small(), Path(name) / "a")
        as_format_1(Path(name) / "a")
        opened = saved.open_federated(Path(name) / "a")
    assert opened.tested_on_clients
    assert opened.origin == UNKNOWN


def pictures(folder: Path, count: int = 60) -> Path:
    for number in range(count):
        file = folder / "ab"[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 3), number).save(file)
    return folder


def check_images() -> None:
    """One image less, and one of another kind, change no other image."""
    with tempfile.TemporaryDirectory() as name:
        folder = pictures(Path(name) / "p")
        before = images.load_images(folder, (3, 3))
        (folder / "a" / "0.png").unlink()
        after = images.load_images(folder, (3, 3))
        Image.new("RGB", (9, 9)).save(folder / "a" / "x.png")
        more = images.load_images(folder, (3, 3))
    shades = [
        {round(255 * value) for value in data.train.inputs[:, 0, 0, 0].tolist()} - {0}
        for data in (before, after, more)
    ]
    assert shades[0] == shades[1] == shades[2]
    assert before.train.inputs.shape[1:] == more.train.inputs.shape[1:]
    assert before.origin.exclusions


def check_unasked() -> None:
    """No clients are made up for a user's own images, and single images are no clients."""
    with tempfile.TemporaryDirectory() as name:
        data = sources.load_data(DataSettings(path=pictures(Path(name) / "p", 150)))
    assert data.unit == "example"
    said = ""
    try:
        training._check_arguments(
            algorithms.dp_fedavg(noise_multiplier=1.0), data, 1, None, None, "seeded"
        )
    except UserError as refusal:
        said = str(refusal)
    assert "--simulate-clients" in said


def check_names() -> None:
    """How one client is called does not change how others are called."""
    found = []
    for more in ([], [("Zoë", *ATTACKS["an age of 10^6"][0][1:])]):
        with tempfile.TemporaryDirectory() as name:
            named_ = [(f"0{row[0]}", *row[1:]) for row in rows()]
            data = load(Path(name), named_ + more, test_fraction=0, **DECLARED)
        assert data.keys is not None
        found.append({*data.keys.tolist()} - {"Zoë"})
    assert found[0] == found[1]


def check_split() -> None:
    """Clients that were made up are said to be."""
    part = Examples(torch.eye(4), torch.tensor([0, 1, 0, 1]))
    assert Dataset("small", part, part, 2).split(Iid(2)).origin.simulated


def check_roles() -> None:
    """A window more at the end of a role changes no other window's part."""
    with tempfile.TemporaryDirectory() as name:
        found = []
        for windows in (10, 11):
            words = "".join(f"{i:04}" for i in range(5 * windows)) + "."
            (Path(name) / "t.txt").write_text(f"A:\n{words}", encoding="utf-8")
            data = shakespeare.load_shakespeare(Path(name) / "t.txt", length=20)
            found.append({tuple(row) for row in data.test.inputs[:].tolist()})
    assert found[0]
    assert found[0] <= found[1]


def check_first_window() -> None:
    """A window less at the beginning of a role changes no other window's part."""
    words = "".join(f"{i:04}" for i in range(200)) + "."
    with tempfile.TemporaryDirectory() as name:
        found = []
        for text in (words, words[20:]):
            (Path(name) / "t.txt").write_text(f"A:\n{text}", encoding="utf-8")
            data = shakespeare.load_shakespeare(Path(name) / "t.txt", length=20)
            found.append({tuple(row) for row in data.train.inputs[:].tolist()})
    assert len(found[0] ^ found[1]) <= 1


SAID = tuple(
    Origin() if isinstance(value, Origin) else value
    for value in inspect.unwrap(save.save_clients).__defaults__ or ()
)


def check_unsaid() -> None:
    """Who does not say where clients come from gets no unqualified statement."""
    with tempfile.TemporaryDirectory() as name:
        save.save_clients(Path(name) / "a", [small().client(0)], small().test, "a", 2)
        assert saved.open_federated(Path(name) / "a").origin.exclusions


def check_resemblance() -> None:
    """Data that share their name or their examples with data that have a budget are told."""
    data = small()
    for name, sketch in (("small", ()), ("other", data.resemblance())):
        with tempfile.TemporaryDirectory() as folder:
            books = open_ledger(Path(folder) / "l.sqlite")
            account, budget = Account("0" * 64, "client"), Budget(1.0, 1e-5)
            books.grant(account, "models", budget, name, "1" * 64, sketch)
            books.close()
            told = resembling.resembling(data, None, Path(folder) / "l.sqlite")
        assert "without a budget" in told


MUTATIONS = [
    Mutation(
        "a saved copy is about nobody",
        line(
            entering,
            "_shared",
            ("    rows = max(", "    if known:\n        return 0.0\n    rows = max("),
        ),
        "a copy is about the same people",
        in_folder(test_accounts.test_a_saved_copy_is_about_the_same_people),
    ),
    Mutation(
        "a table is known by its examples alone",
        line(federated.Federated, "contents", ("{self.rows} ", "")),
        "a budget in another unit is found",
        in_folder(test_statistics.test_a_budget_of_another_unit_refuses_statistics, None),
    ),
    Mutation(
        "types of Python cells decided by all of them",
        line(
            frames,
            "_column",
            ("return written(name, cells)", "return pl.Series(name, cells, strict=False)"),
        ),
        "one cell changes no other",
        lambda: test_cells.test_one_cell_changes_no_other("days", "Python"),
    ),
    Mutation(
        "fields that only other rows have",
        line(cells, "written", ("_written(c)", "str(c)")),
        "a struct has one form",
        lambda: test_cells.test_a_cell_has_one_form_whatever_its_column_s_type(
            "{a: 1, b: x}", [[{"a": 1.0, "b": "x", "c": None}]]
        ),
    ),
    Mutation(
        "numbers in parts of the largest one",
        line(
            encoding.PublicColumn,
            "_place",
            ("rows, numbers,", "rows, numbers / np.abs(numbers).max(),"),
        ),
        "an age of 10^6 changes nobody",
        lambda: check_apart("an age of 10^6"),
    ),
    Mutation(
        "types decided by all cells",
        line(
            table,
            "read_table",
            (
                "title, frame = named_frame(source)",
                "title, frame = named_frame(source)\n    frame = with_types(frame)",
            ),
        ),
        "one name changes no other",
        check_names,
    ),
    Mutation(
        "rows are held out as their columns' types write them",
        line(table_rows, "row_digests", ("cells_of(column)", "column.cast(pl.String)")),
        "a gap among whole numbers changes nobody",
        lambda: check_schema("a gap among whole numbers"),
    ),
    Mutation(
        "columns of dates are left out",
        line(
            declared.Declared,
            "inputs",
            ("if n not in", "if not frame[n].dtype.is_temporal() and n not in"),
        ),
        "a date that is none changes nobody",
        lambda: check_schema("a date that is none"),
    ),
    Mutation(
        "numbers and dates are hashed as their columns' types write them",
        line(
            encoding.PublicColumn,
            "encode",
            ("cells = cells_of(column)", "cells = words_of(column)"),
        ),
        "a date that is none changes nobody",
        lambda: check_schema("a date that is none"),
    ),
    Mutation(
        "categories are found only as they are written",
        line(encoding, "numbered", ("exact.get(word, alike.get(cell))", "exact.get(word)")),
        "a gap among whole numbers changes nobody",
        lambda: check_schema("a gap among whole numbers", numbers=True),
    ),
    Mutation(
        "clients are called as their column's type writes them",
        line(table_rows, "complete", ("names_of(frame[client])", "frame[client].cast(pl.String)")),
        "a row without a name changes nobody",
        lambda: check_schema("a row without a name"),
    ),
    Mutation(
        "buckets by the words that occur",
        line(
            encoding.PublicColumn,
            "_where",
            ("bucket_of(word, self.buckets)", "len(known) % self.buckets"),
            ("words.unique()", "words.unique(maintain_order=True)"),
        ),
        "a category of one's own changes nobody",
        lambda: check_apart("a category of one's own"),
    ),
    Mutation(
        "one draw holds out rows of all",
        line(
            table_rows,
            "held_out",
            (
                "drawn = np.array([_uniform(text, salt) for text in texts])",
                "drawn = np.random.default_rng(seed).random(len(rows)) * 2.0**64",
            ),
        ),
        "nobody's absence changes others",
        lambda: check_apart("nobody"),
    ),
    Mutation(
        "classes from the data in spite of a declaration",
        line(
            table,
            "_encoder",
            ("if known is None else known", "if True else known"),
        ),
        "a class of one's own changes nobody",
        lambda: check_apart("a class of one's own"),
    ),
    Mutation(
        "names of clients as numbers",
        line(
            table_rows,
            "complete",
            (
                "names_of(frame[client])",
                "names_of(frame[client].cast(pl.Int64) if frame[client]"
                ".cast(pl.Int64, strict=False).null_count() == 0 else frame[client])",
            ),
        ),
        "one name changes no other",
        check_names,
    ),
    Mutation(
        "classes read in silence",
        line(
            table,
            "_encoder",
            ("[] if declared else [f\"the classes of '{options.label}'\"]", "[]"),
        ),
        "exclusions name the classes",
        check_exclusions,
    ),
    Mutation(
        "means read in silence",
        line(
            table,
            "_encoder",
            ("exclusions += taken(encoder, declarations)", "pass"),
        ),
        "exclusions name means",
        lambda: check_exclusions(classes=("no", "yes"), standardize=True),
    ),
    Mutation(
        "a saved copy forgets who tests",
        line(
            save,
            "save_federated",
            ("for name in ABOUT}", "for name in ABOUT} | {'tested_on_clients': False}"),
        ),
        "a copy has the guards",
        check_saved,
    ),
    Mutation(
        "a saved copy forgets its origin",
        line(save, "save_federated", ("asdict(data.origin)", "asdict(Origin())")),
        "a copy has the guards",
        check_saved,
    ),
    Mutation(
        "an old copy is taken for a clean one",
        line(
            saved,
            "open_federated",
            (
                "Origin.from_plain(None if header.origin is None",
                "Origin() if True else (None if True",
            ),
        ),
        "an old copy has the safe answers",
        check_old,
    ),
    Mutation(
        "images are held out together",
        line(images, "_testing", ('f"held out {o}"', 'f"held out {o} of {len(entries)}"')),
        "one image less changes no other",
        check_images,
    ),
    Mutation(
        "folders' names read in silence",
        line(
            images,
            "load_images",
            ('() if classes else ("the classes (the names of the image folders)",)', "()"),
        ),
        "exclusions name the folders",
        check_images,
    ),
    Mutation(
        "clients are made up unasked",
        line(
            sources,
            "load_data",
            (
                "return dataset.by_example()",
                "return dataset.split(_partitioner(settings, dataset), settings.seed)",
            ),
        ),
        "a client recipe on one's own images is refused",
        check_unasked,
    ),
    Mutation(
        "single examples pass for clients",
        line(training, "_check_arguments", ("data.refuse_by_example(recipe.name)", "pass")),
        "a client recipe on one's own images is refused",
        check_unasked,
    ),
    Mutation(
        "made-up clients pass for real ones",
        line(federated.Dataset, "split", ("self.origin.split(assignment.repeats)", "self.origin")),
        "a split says that it simulates",
        check_split,
    ),
    Mutation(
        "the last tenth of a role is for testing",
        line(
            shakespeare,
            "load_shakespeare",
            ("_testing(role, w, seed)", "np.arange(len(w)) >= len(w) - len(w) // 10"),
        ),
        "a window more changes no other",
        check_roles,
    ),
    Mutation(
        "every tenth window is for testing",
        line(
            shakespeare,
            "load_shakespeare",
            ("_testing(role, w, seed)", "np.arange(len(w)) % 10 == 9"),
        ),
        "a window less changes no other",
        check_first_window,
    ),
    Mutation(
        "clients that come one by one are taken for real ones",
        returning(inspect.unwrap(save.save_clients), "__defaults__", SAID),
        "nothing said is not a clean origin",
        check_unsaid,
    ),
    Mutation(
        "a new account in silence",
        line(resembling, "_nearest", ("shared < ALIKE and granted.data != data.name", "True")),
        "resemblance is told",
        check_resemblance,
    ),
    Mutation(
        "a new account is known by its name alone",
        line(resembling, "_nearest", ("shared < ALIKE and granted", "granted")),
        "resemblance is told",
        check_resemblance,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=named)
def test_a_mistake_is_caught(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    require_caught(mutation, monkeypatch)


def test_the_guards_have_something_to_lose() -> None:
    """The patient of the attacks trains, so that there is somebody whose data could spread."""
    with tempfile.TemporaryDirectory() as name:
        data = load(Path(name), rows(), **DECLARED)
    assert data.keys is not None
    assert np.isin("10", data.keys)
