"""What a comparison says: what to do next, and what its numbers are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.commands.comparison_table import _marks, _unequal
from fedveil.comparing.outcome import MemberResult
from fedveil.comparing.pool import Pool
from tests.conftest import Run
from tests.system.comparing.conftest import TWO
from tests.system.comparing.test_command import result, well

Refused = Callable[..., str]


def stop(pool: Pool, tasks: object) -> None:
    """As if Ctrl-C had come at once."""
    pool.stopped = True


def test_a_comparison_without_a_result_is_gone_on_with_and_not_reported(
    run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Pool, "run", stop)
    stopped = run("compare", *TWO, "--seeds", 2, "--out", "c")
    assert stopped.code == 130
    assert "fedveil compare --resume c" in stopped.out
    assert "fedveil report" not in stopped.out
    said = "No run of c has ended yet. Resume it with `fedveil compare --resume c`."
    assert refused("report", "c") == said
    assert refused("compare", "c") == said
    (tmp_path / "c" / "comparison.json").unlink()
    assert refused("report", "c") == said


def test_a_member_without_a_finished_run_is_left_out_of_the_report(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "run", stop)
    run("compare", *TWO, "--seeds", 1, "--out", "c")
    flags = ("--algorithm", "dp_fedavg", *TWO[2:])
    well(run("train", *flags, "--out", "c/dp_fedavg-s0"))
    assert "fedveil report c" in run("compare", "--resume", "c").out
    assert "report.html" in well(run("report", "c"))


@pytest.mark.parametrize(
    ("algorithm", "axis", "name"),
    [
        ("dp_fedavg", "K=1,2", "steps"),
        ("dp_fedavg", "eta=0.1,1", "learning_rate"),
        ("dp_norm_fedavg", "clip=1,2", "scale"),
        ("dp_norm_fedavg", "C=1,2", "scale"),
        ("dp_fedavg", "C=1,2", "clip"),
        ("dp_fedavg", "q=0.1,0.2", "rate"),
    ],
)
def test_a_papers_letter_is_told_its_name(
    refused: Refused, algorithm: str, axis: str, name: str
) -> None:
    said = refused("compare", "--algorithms", algorithm, "--grid", axis, "--dataset", "digits")
    assert f"Its name is '{name}': --grid {name}=…" in said


@pytest.mark.usefixtures("workers_here")
def test_a_baseline_is_marked_and_neither_ranked_nor_tested(run: Run, tmp_path: Path) -> None:
    asked = ("--dataset", "digits", "--clients", 20, "--epsilon", 8, "--rounds", 2, "--seeds", 2)
    names = ("--algorithms", "fedavg,dp_fedavg,dp_norm_fedavg", "--jobs", 1)
    done = run("compare", *names, *asked, "--out", tmp_path / "c")
    assert done.code == 0, done.err
    assert "not private" in done.out
    assert "fedavg: not private, so neither ranked nor tested." in done.out
    said = json.loads((tmp_path / "c" / "comparison.json").read_text())
    fedavg, *private = said["members"]
    assert (fedavg["private"], fedavg["best"], fedavg["p"]) == (False, False, None)
    assert sum(member["best"] for member in private) == 1
    assert said["budget"][0] == 8
    refused = run("compare", *names, *asked, "--select-privately", "--out", tmp_path / "d")
    assert "fedavg cannot be selected privately" in refused.err


def standing(algorithm: str, adjacency: str, unit: str = "client") -> MemberResult:
    found = MemberResult(algorithm, algorithm, {}, ("a", "b"), (0, 1), (0.5, 0.6), (1.0, 1.0))
    return replace(found, epsilon=8.0, adjacency=adjacency, unit=unit, significant=False)


def test_an_epsilon_of_other_neighbours_or_units_is_told() -> None:
    one, other = standing("dp_fedavg", "add-remove"), standing("fed_alpha_normec", "zero-out")
    assert list(_unequal([one, one])) == []
    (said,) = _unequal([one, other])
    assert "add/remove for dp_fedavg; zero-out for fed_alpha_normec" in said
    (said,) = _unequal([standing("dp_sgd", "add-remove", "example")])
    assert said.startswith("ε protects one example")


def test_two_seeds_are_told_to_be_few() -> None:
    tested = standing("dp_fedavg", "add-remove")
    assert "with at least 3 seeds each" in _marks([replace(tested, significant=None)])
    assert "at least 3 seeds" not in _marks([tested])


def test_a_standing_knows_its_neighbours(compared: tuple[Path, str, Path]) -> None:
    members = result(compared[0])["members"]
    assert {m["label"]: (m["adjacency"], m["unit"]) for m in members} == {
        "dp_fedavg": ("add-remove", "client"),
        "dp_norm_fedavg": ("add-remove", "client"),
    }


def test_a_budget_for_another_split_is_told_once_and_can_be_ended(
    run: Run, refused: Refused, tmp_path: Path
) -> None:
    flags = ("--algorithm", "dp_fedavg", *TWO[2:])
    well(run("train", *flags, "--out", "first"))
    well(run("budget", "set", "first", "--epsilon", 5, "--view", "sum"))
    other = [25 if flag == 20 else flag for flag in TWO]
    said = refused("compare", *other, "--seeds", 2, "--out", "c")
    assert not (tmp_path / "c").exists()
    assert said.startswith("A budget is set for these examples ('digits'), but for another")
    command = said.rpartition("`fedveil ")[2].removesuffix("`.").split()
    assert command[-1] == "--lift"
    assert "Removed the budget" in well(run(*command))
    well(run("train", *other[2:], "--algorithm", "dp_fedavg", "--out", "second"))
    assert "matches 0 budgets" in refused(*command)
