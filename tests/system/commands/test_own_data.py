"""A user's own data: whose an example is, what is said of simulated clients, and new accounts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedveil.data.catalog import CATALOG
from fedveil.data.federated import Federated
from fedveil.data.save import save_clients, save_federated
from fedveil.data.saved import open_federated
from fedveil.data.sketch import overlap, sketched
from fedveil.errors import UserError
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.resembling import resembling
from fedveil.privacy.calibrate import Budget
from fedveil.training.settings import DataSettings
from fedveil.training.sources import load_data
from tests.conftest import Outcome, Run
from tests.unit.data.test_saved import as_format_1

Refused = Callable[..., str]
SGD = ("--algorithm", "dp_sgd", "--rounds", 2, "--noise-multiplier", 2, "--set", "rate=0.5")
FEDAVG = ("--algorithm", "dp_fedavg", "--rounds", 2, "--noise-multiplier", 9)
IMAGES = "--path", "byuser", "--data", "size=[4,4]", "--model", "softmax"


@pytest.fixture
def byuser(tmp_path: Path) -> Path:
    """Folders of users' images, as they would be taken for classes."""
    rng = np.random.default_rng(0)
    for user in ("ann", "bob", "eve"):
        folder = tmp_path / "byuser" / user
        folder.mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "byuser"


def well(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome
    return outcome.out


# Clients that nobody named


@pytest.mark.usefixtures("byuser")
def test_clients_of_a_user_s_own_data_are_not_made_up_unasked(refused: Refused) -> None:
    said = refused("train", *IMAGES, *FEDAVG, "--epsilon", 3, "--set", "rate=0.5")
    assert "does not say which client owns which example" in said
    assert "dp_sgd" in said
    assert "--simulate-clients N" in said
    for flags in (("--clients", 5), ("--partition", "iid"), ("--data", "partition=shards")):
        said = refused("train", *IMAGES, *SGD, *flags)
        assert (
            "split over simulated clients, and a guarantee for them protects no real person" in said
        )
        assert "--simulate-clients N" in said
    assert "simulate-clients" in refused("bench", *IMAGES, *FEDAVG[:2])
    assert "simulate-clients" in refused("plan", *IMAGES[:4], *FEDAVG)


@pytest.mark.usefixtures("byuser")
def test_single_images_are_protected_by_example(run: Run, tmp_path: Path) -> None:
    well(run("train", *IMAGES, *SGD, "--data", "classes=ann,bob,eve", "--out", "a"))
    first = (tmp_path / "a" / "privacy.txt").read_text().splitlines()[0]
    assert first.startswith("Privacy     This training is (")
    assert "per example" in first
    well(run("train", *IMAGES, *SGD, "--out", "b"))
    first = (tmp_path / "b" / "privacy.txt").read_text().splitlines()[0]
    assert "Apart from the classes (the names of the image folders), read from private" in first
    well(run("plan", *IMAGES[:4], *SGD))


@pytest.mark.usefixtures("byuser")
def test_made_up_clients_are_said_to_protect_nobody(run: Run, tmp_path: Path) -> None:
    simulated = ("--simulate-clients", 12, "--set", "rate=0.5")
    well(run("train", *IMAGES, *FEDAVG, *simulated, "--out", "a"))
    first = (tmp_path / "a" / "privacy.txt").read_text().splitlines()[0]
    assert first.startswith("Privacy     Simulation: clients are simulated, so no real person")
    origin = json.loads((tmp_path / "a" / "summary.json").read_bytes())["privacy"]["origin"]
    assert origin["simulated"]
    again = well(run("train", "a/recipe.toml", "--out", "b"))
    assert "Simulation: clients are simulated" in again
    well(run("bench", *IMAGES, *FEDAVG[:2], *simulated[:2], "--rounds", 1))
    well(run("plan", *IMAGES[:4], *FEDAVG, *simulated))


@pytest.mark.usefixtures("byuser")
def test_settings_make_up_clients_only_where_none_are_known(table: Path, byuser: Path) -> None:
    simulated = load_data(DataSettings(path=byuser, simulate_clients=7))
    assert (simulated.clients, simulated.unit) == (7, "client")
    assert simulated.origin.simulated
    plain = load_data(DataSettings(path=byuser))
    assert (plain.clients, plain.unit) == (len(plain.labels), "example")
    assert not plain.origin.simulated
    named = load_data(DataSettings(dataset="digits", clients=9))
    assert (named.clients, named.origin.simulated) == (9, True)
    assert load_data(DataSettings(dataset="digits", simulate_clients=9)).clients == 9
    with pytest.raises(UserError, match="identifies the client of each example"):
        load_data(DataSettings(path=table, client="who", label="y", simulate_clients=5))
    with pytest.raises(UserError, match="Give one of them"):
        load_data(DataSettings(dataset="digits", clients=5, simulate_clients=5))


def test_a_text_s_roles_are_not_dealt_out_unasked(tmp_path: Path) -> None:
    roles = "\n\n".join(f"{who}:\n" + f"{who} is here. " * 60 for who in "ABC")
    (tmp_path / "roles.txt").write_text(roles, encoding="utf-8")
    own = DataSettings(path=tmp_path / "roles.txt")
    assert load_data(own).clients == 3
    assert not load_data(own).origin.simulated
    with pytest.raises(
        UserError,
        match="split over simulated clients, and a guarantee for them protects no real person",
    ):
        load_data(own.model_copy(update={"partition": "iid"}))
    dealt = load_data(own.model_copy(update={"partition": "iid", "simulate_clients": 4}))
    assert dealt.origin.simulated


def test_idx_files_of_one_s_own_are_by_example(tmp_path: Path) -> None:
    for name in CATALOG["mnist"].layouts[0]:
        kind = (b"\0\0\x08\x03", (3, 2, 2)) if "images" in name else (b"\0\0\x08\x01", (3,))
        sizes = b"".join(size.to_bytes(4, "big") for size in kind[1])
        (tmp_path / name).write_bytes(kind[0] + sizes + bytes(int(np.prod(kind[1]))))
    data = load_data(DataSettings(path=tmp_path))
    assert (data.unit, data.clients) == ("example", 3)
    assert load_data(DataSettings(path=tmp_path, simulate_clients=2)).origin.simulated


WRONG = {
    "features": ({"dataset": "digits", "features": 3}, "features applies to"),
    "a number of classes": ({"dataset": "digits", "classes": 3}, "classes has the wrong form"),
    "classes of digits": ({"dataset": "digits", "classes": ("a", "b")}, "has its own classes"),
    "names for synthetic": (
        {"dataset": "synthetic", "classes": ("a", "b")},
        "classes has the wrong form",
    ),
    "ranges": ({"dataset": "digits", "ranges": {"x": (0, 1)}}, "ranges applies to a table"),
    "standardize": ({"dataset": "digits", "standardize": True}, "standardize applies to a table"),
    "size": ({"dataset": "digits", "size": (3, 3)}, "of images only"),
    "color": ({"dataset": "digits", "color": False}, "of images only"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_the_data_do_not_have_are_refused(case: str) -> None:
    given, says = WRONG[case]
    with pytest.raises(UserError, match=says):
        load_data(DataSettings.model_validate(given))


def test_classes_and_categories_are_written_in_many_ways() -> None:
    for given in ("0,1", [0, 1], ["0", "1"], (0, "1")):
        assert DataSettings.model_validate({"classes": given}).classes == ("0", "1")
    assert DataSettings.model_validate({"classes": [True, False]}).classes == ("true", "false")
    assert DataSettings.model_validate({"classes": 7}).classes == 7
    found = DataSettings.model_validate({"categories": {"x": [1, "b"]}})
    assert found.categories == {"x": ("1", "b")}


# What a saved copy says


def test_a_saved_table_is_not_selected_on_either(
    refused: Refused, table: Path, tmp_path: Path
) -> None:
    """Its test rows are the clients' own, in whatever form they lie there."""
    noise = ("--noise-multiplier", 9.0, "--set", "steps=1", "--set", "rate=0.5", "--rounds", 2)
    two = ("--algorithms", "dp_fedavg,dp_norm_fedavg", "--select-privately", *noise)
    data = load_data(DataSettings(path=table, client="who", label="y", holdout="rows"))
    save_federated(data, tmp_path / "saved")
    save_clients(tmp_path / "anew", map(data.client, range(8)), data.test, "anew", 2)
    save_federated(data, tmp_path / "old")
    as_format_1(tmp_path / "old")
    for place in ("saved", "anew", "old"):
        said = refused("compare", *two, "--path", place, "--out", f"c-{place}")
        assert "may belong to its clients" in said
    opened = open_federated(tmp_path / "saved")
    assert opened.origin.exclusions == ("the classes of 'y'",)
    assert opened.class_names == ("no", "yes")


def test_a_saved_simulation_stays_one(byuser: Path, tmp_path: Path) -> None:
    data = load_data(DataSettings(path=byuser, simulate_clients=5))
    save_federated(data, tmp_path / "saved")
    assert load_data(DataSettings(path=tmp_path / "saved")).origin == data.origin
    assert data.origin.simulated
    with pytest.raises(UserError, match="Remove simulate_clients"):
        load_data(DataSettings(path=tmp_path / "saved", simulate_clients=5))


# New accounts


TABLE = ("--client", "who", "--label", "y", "--data", "classes=no,yes")
RATE = ("--set", "rate=0.5")


@pytest.fixture
def granted(run: Run, table: Path) -> Path:
    """A table whose budget is spent."""
    rows = table.read_text().splitlines()
    extra = [f"q{i % 40},{i / 7:.3f},{i % 11},{('no', 'yes')[i % 2]}" for i in range(300)]
    table.write_text("\n".join([*rows, *extra]) + "\n")
    well(run("train", "--path", table, *TABLE, *FEDAVG, *RATE, "--out", "a"))
    well(run("budget", "set", "a", "--epsilon", 0.9, "--delta", 1e-5))
    return table


def swapped(table: Path) -> tuple[object, ...]:
    rows = [line.split(",") for line in table.read_text().splitlines()]
    other = table.with_name("swapped.csv")
    other.write_text("".join(f"{w},{z},{x},{y}\n" for w, x, z, y in rows))
    return ("--path", other)


def doubled(table: Path) -> tuple[object, ...]:
    other = table.with_name("doubled.csv")
    lines = table.read_text().splitlines(keepends=True)
    other.write_text("".join([*lines, lines[1]]))
    return ("--path", other)


def renamed(table: Path) -> tuple[object, ...]:
    other = table.with_name("renamed.csv")
    other.write_text(table.read_text().replace("who,x,[bold],y", "who,a,b,y"))
    return ("--path", other, "--data", "ranges={a=[-3,3]}")


EVASIONS: dict[str, Callable[[Path], tuple[object, ...]]] = {
    "another seed": lambda table: ("--path", table, "--data", "seed=1"),
    "other ranges": lambda table: ("--path", table, "--data", "ranges={x=[-3,3]}"),
    "swapped columns": swapped,
    "one row twice": doubled,
    "other names and ranges": renamed,
    "standardized": lambda table: ("--path", table, "--data", "standardize=true"),
}


@pytest.mark.parametrize("case", EVASIONS)
def test_another_form_of_the_data_is_charged_to_the_budget_or_refused(
    run: Run, granted: Path, case: str
) -> None:
    """None of them is a new account in which nothing is spent, whatever account the user names."""
    changed = (*EVASIONS[case](granted), *TABLE, *FEDAVG, *RATE)
    outcome = run("train", *changed, "--seed", 1, "--out", "b")
    if case in ("one row twice", "standardized"):
        assert outcome.code == 2
        same = "A budget is set for these examples", "about clients of 'people'", "without noise"
        assert any(said in outcome.err for said in same)
    else:
        assert "\nAccount " not in well(outcome)
        assert "It counts against the budget ε = 0.9" in outcome.out
    if case == "one row twice":
        return  # the same training examples are refused under any name
    outcome = run("train", *changed, "--account", "others", "--out", "c")
    assert outcome.code == 2
    assert "a second account others on purpose, set its budget first" in outcome.err


@pytest.mark.usefixtures("workers_here")
def test_a_comparison_says_it_too(run: Run, granted: Path) -> None:
    two = ("--algorithms", "dp_fedavg,dp_norm_fedavg", *FEDAVG[2:4], *RATE, "--seeds", 1)
    two = (*two, "--epsilon", 9, "--jobs", 1, "--account", "others")
    outcome = run("compare", *two, *swapped(granted), *TABLE, "--out", "c")
    assert outcome.code == 2
    assert "about clients of 'people'" in outcome.err
    assert not Path("c").exists()


def test_unlike_data_and_data_with_their_own_budget_are_not_spoken_of(
    run: Run, granted: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.csv"
    lines = [f"r{i % 9},{i * i},{i},{('no', 'yes')[i % 2]}" for i in range(90)]
    other.write_text("\n".join(["who,x,[bold],y", *lines]) + "\n")
    out = well(run("train", "--path", other, *TABLE, *FEDAVG, *RATE, "--out", "b"))
    assert not [line for line in out.splitlines() if line.startswith("Account ")]
    well(run("budget", "set", "a", "--epsilon", 99, "--delta", 1e-5))
    out = well(run("train", "a/recipe.toml", "--out", "c"))
    assert not [line for line in out.splitlines() if line.startswith("Account ")]


def test_a_budget_of_an_earlier_version_is_known_by_its_name(
    blobs: Federated, ledger: Path
) -> None:
    assert resembling(blobs) == ""
    books = open_ledger(ledger)
    account = Account("0" * 64, "client")
    books.grant(account, "models", Budget(2.0, 1e-5), "blobs", "1" * 64)
    books.close()
    assert "the name is the same. There, ε = 0" in resembling(blobs)
    books = open_ledger(ledger)
    assert Ledger(ledger).granted[account]["models"].sketch == ()
    books.grant(account, "models", None, "blobs", "1" * 64)
    books.close()
    assert resembling(blobs) == ""


def test_a_sketch_estimates_how_many_rows_are_shared() -> None:
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 3000, dtype=np.uint64)
    whole = sketched(hashes)
    assert overlap(whole, sketched(np.concatenate([hashes, hashes[:9]]))) == 1
    assert overlap(whole, sketched(hashes[:2900])) == pytest.approx(0.97, abs=0.07)
    assert overlap(whole, sketched(hashes[:1500])) == pytest.approx(0.5, abs=0.2)
    assert overlap(whole, sketched(rng.integers(0, 2**64, 3000, dtype=np.uint64))) == 0
    assert overlap(whole, ()) == 0
