"""Wherever an ε is told without its statement, a mark says that it holds only with a footnote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedveil.data.origin import MARK, Origin, footnote
from tests.conftest import Outcome, Run

MADE_UP = "clients are simulated, so no real person is protected"
FITTED = "it does not cover the column types and the means and deviations of x, read from private"
DIGITS = ("--dataset", "digits", "--clients", 20)
EVERYONE = ("--epsilon", 8, "--rounds", 2, "--set", "rate=1")  # quickly accounted
Refused = Callable[..., str]


def well(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome
    return outcome.out


@pytest.fixture
def own(tmp_path: Path) -> tuple[str | Path, ...]:
    """A table of real clients, with declared classes."""
    rows = "".join(f"p{i % 12},{i % 7},{'yes' if i % 7 > 3 else 'no'}\n" for i in range(96))
    (tmp_path / "t.csv").write_text(f"who,x,y\n{rows}", encoding="utf-8")
    named = ("--path", tmp_path / "t.csv", "--client", "who", "--label", "y")
    return (*named, "--data", "classes=no,yes")


FIT = ("--data", "standardize=true")


def test_a_plan_says_what_its_epsilon_leaves_out(run: Run, own: tuple[str, ...]) -> None:
    for data, told in (((*own, *FIT), FITTED), (DIGITS, MADE_UP)):
        out = " ".join(well(run("plan", *data, *EVERYONE)).split())
        assert f"{MARK} at δ" in out
        assert f"{MARK} ε: {told}" in out
    clean = well(run("plan", *own, *EVERYONE))
    by_example = well(run("plan", *DIGITS, *EVERYONE, "--algorithm", "dp_sgd"))
    assumed = well(run("plan", "--clients", 500, *EVERYONE))
    assert all(MARK not in out and " at δ" in out for out in (clean, by_example, assumed))
    plain = json.loads(well(run("plan", *own, *FIT, *EVERYONE, "--json")))
    assert plain["origin"]["exclusions"] == ["the column types", "the means and deviations of x"]
    plain = json.loads(well(run("plan", *DIGITS, *EVERYONE, "--json")))
    assert plain["origin"] == {"simulated": True, "exclusions": []}


@pytest.mark.usefixtures("workers_here")
def test_lists_comparisons_and_reports_mark_epsilon(
    run: Run, own: tuple[str, ...], tmp_path: Path
) -> None:
    two = ("--algorithms", "dp_fedavg,dp_norm_fedavg", "--seeds", 1, "--jobs", 1, *EVERYONE)
    for name, data, told in (
        ("fitted", (*own, *FIT), FITTED),
        ("digits", DIGITS, MADE_UP),
        ("clean", own, ""),
    ):
        compared = well(run("compare", *two, *data, "--out", name))
        listed = well(run("runs", name))
        well(run("report", name, "--out", f"{name}.html"))
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        for out in (compared, listed, page):
            assert (f"{MARK} ε: {told}" in " ".join(out.split())) == bool(told)
            assert out.count(MARK) >= 3 if told else MARK not in out
        found = json.loads((tmp_path / name / "comparison.json").read_text(encoding="utf-8"))
        for plain in (*found["members"], *json.loads(well(run("runs", name, "--json")))):
            assert Origin.from_plain(plain["origin"]).mark == (MARK if told else "")
        infinite = name == "fitted"
        assert (found["together"]["epsilon"] is None) == infinite
        assert ("spent ε = ∞" in compared) == infinite  # earlier runs on the same rows are apart
        why = "because the column types and the means and deviations of x were read from these data"
        assert (why in " ".join(compared.split())) == infinite
        assert (why in page) == infinite


def test_one_footnote_for_several() -> None:
    assert footnote([Origin(), Origin()]) == ""
    both = footnote([Origin(True), Origin(exclusions=("a",)), Origin(True, ("a", "b"))])
    assert both.startswith(f"{MARK} ε: {MADE_UP}; it does not cover a and b, read from private")
    assert both.endswith("(not every part applies to every run: see each statement).")
