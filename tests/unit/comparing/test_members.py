"""What is compared, and what is refused with the difference named."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedveil.comparing.members import FILE, Comparison, is_private, planned, read_comparison
from fedveil.errors import UserError
from fedveil.training.settings import Settings, resolve_recipe

FLAGS = {"epsilon": 4.0, "rounds": 3, "data": {"dataset": "digits", "clients": 20}}


def plan(
    algorithms: list[str] | None = None,
    grid: dict[str, list[Any]] | None = None,
    files: list[Path] | None = None,
    seeds: list[int] | None = None,
    **flags: Any,
) -> Comparison:
    axes = list((grid or {}).items())
    chosen = [0, 1] if seeds is None else seeds
    return planned(files or [], algorithms or [], {**FLAGS, **flags}, axes, chosen)


def settings_file(path: Path, **settings: Any) -> Path:
    path.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return path


def test_algorithms_times_grid_times_seeds() -> None:
    found = plan(["dp_fedavg", "dp_norm_fedavg"], {"rate": [0.1, 0.5], "rounds": [3, 4]})
    assert [member.label for member in found.members] == [
        f"{name}-rate={rate}-rounds={rounds}"
        for name in ("dp_fedavg", "dp_norm_fedavg")
        for rate in (0.1, 0.5)
        for rounds in (3, 4)
    ]
    assert found.varied == ("rate", "rounds")
    last = found.members[-1]
    assert last.parameters == {"rate": 0.5, "rounds": 4}
    assert last.settings.rounds == 4
    assert resolve_recipe(last.settings).cohort.rate == 0.5  # type: ignore[attr-defined]
    assert last.at(7).seed == 7
    runs = [(member.label, seed) for member, seed in found.runs()]
    assert len(runs) == len(set(runs)) == 16
    assert {seed for _, seed in runs[:8]} == {0}  # a comparison cut short has whole seeds


def test_a_grid_may_be_for_one_member_alone() -> None:
    found = plan(["dp_fedavg", "dp_norm_fedavg"], {"dp_fedavg.clip": [0.5, 1.0]})
    assert [m.label for m in found.members] == [
        "dp_fedavg-clip=0.5", "dp_fedavg-clip=1.0", "dp_norm_fedavg",
    ]  # fmt: skip


def test_a_parameter_may_be_set_for_one_algorithm_alone() -> None:
    given = {"dp_fedavg.clip": 3.0, "steps": 2}
    found = plan(["dp_fedavg", "dp_norm_fedavg"], parameters=given)
    assert [dict(m.settings.parameters) for m in found.members] == [
        {"clip": 3.0, "steps": 2}, {"steps": 2},
    ]  # fmt: skip


def test_seeds_may_be_a_grid() -> None:
    assert plan(grid={"seed": [3, 5]}).seeds == (3, 5)


def test_files_are_members_by_their_names(tmp_path: Path) -> None:
    one = settings_file(tmp_path / "gentle.toml", algorithm="dp_fedavg", parameters={"clip": 1.0})
    two = settings_file(tmp_path / "harsh.toml", algorithm="dp_fedavg", parameters={"clip": 0.1})
    found = plan(files=[one, two], grid={"steps": [1, 2]})
    assert [m.label for m in found.members] == [
        "gentle-steps=1", "gentle-steps=2", "harsh-steps=1", "harsh-steps=2",
    ]  # fmt: skip
    assert found.members[3].settings.parameters == {"clip": 0.1, "steps": 2}


def test_a_comparison_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = plan(["dp_fedavg"], {"rate": [0.1, 0.5], "model": ["softmax"]})
    (tmp_path / FILE).write_text(tomli_w.dumps(found.plain()), encoding="utf-8")
    read = read_comparison(tmp_path)
    assert read.plain() == found.plain()
    assert [m.settings for m in read.members] == [m.settings for m in found.members]


def test_a_table_is_found_from_anywhere(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(table.parent)
    data = {"path": Path(table.name), "client": "who", "label": "y"}
    found = planned([], ["dp_fedavg"], {"epsilon": 4.0, "data": data}, [], [0])
    assert found.plain()["members"][0]["settings"]["data"]["path"] == str(table)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"seeds": []}, "no seeds to compare over"),
        ({"seeds": [0, 0]}, "named twice"),
        ({"seeds": [-1]}, "Use integers from 0 on"),
        ({"grid": {"seed": [0.5]}}, "The seed 0.5 is not valid"),
        ({"grid": {"clipp": [1]}}, "no parameter of dp_fedavg to vary named 'clipp'"),
        ({"grid": {"fedavg.clip": [1]}}, "no member to vary named 'fedavg'"),
        ({"grid": {"rate": ["much"]}}, "rate is 'much'"),
        ({"grid": {"rounds": ["many"]}}, "rounds is 'many'"),
        ({"grid": {"rate": [0.1, 0.1]}}, "Two members have the name"),
        ({"grid": {"epsilon": [1.0, 2.0]}}, "the budget is ε = 1, .* ε = 2"),
        ({"grid": {"delta": [1e-5, 1e-6]}}, "the budget is .*δ = 1e-5 for one"),
        ({"grid": {"view": ["models", "sum"]}}, "the view is models for one and sum"),
        ({"algorithms": ["dp_fedavg", "dp_sgd"]}, "protected is client for one and example"),
        ({"algorithms": ["dp_fedavg", "nonsense"]}, "no algorithm 'nonsense'"),
        ({"algorithms": ["dp_sgd", "fedavg"]}, "protected is example for one and client"),
        ({"grid": {"clip": ["=2*stepz"]}}, "'stepz' is neither a number"),
        ({"grid": {"clip": ["=2+steps"]}}, "'2\\+steps' is neither a number"),
        ({"grid": {"clip": ["=clip"]}}, "'clip' is neither a number"),
        ({"grid": {"seed": list(range(20_000))}}, "20,000 runs. Compare at most"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        plan(**{"algorithms": ["dp_fedavg"], **arguments})


def test_other_data_are_refused_by_name(tmp_path: Path) -> None:
    base = {"algorithm": "dp_fedavg", "epsilon": 4.0}
    one = settings_file(tmp_path / "a.toml", data={"dataset": "digits", "clients": 20}, **base)
    two = settings_file(tmp_path / "b.toml", data={"dataset": "digits", "clients": 30}, **base)
    with pytest.raises(UserError, match=r"a and b cannot .*clients=20 for one and .*clients=30"):
        planned([one, two], [], {}, [], [0])


def test_another_split_is_refused(tmp_path: Path) -> None:
    base = {"algorithm": "dp_fedavg", "epsilon": 4.0}
    one = settings_file(tmp_path / "a.toml", data={"dataset": "digits"}, **base)
    two = settings_file(tmp_path / "b.toml", data={"dataset": "digits", "seed": 1}, **base)
    with pytest.raises(UserError, match=r"the data is dataset=digits for one and .*seed=1"):
        planned([one, two], [], {}, [], [0])


def test_directories_that_are_no_comparison(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a comparison: it has no comparison\.toml"):
        read_comparison(tmp_path)
    file = tmp_path / FILE
    plain = plan(["dp_fedavg"]).plain()
    file.write_text(tomli_w.dumps({**plain, "fedveil": "99.1"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"written by fedveil 99\.1, which is newer"):
        read_comparison(tmp_path)
    file.write_text(tomli_w.dumps(plain)[:-20], encoding="utf-8")
    with pytest.raises(UserError, match="is damaged"):
        read_comparison(tmp_path)


def test_a_settled_recipe_is_made_anew_when_it_is_varied(tmp_path: Path) -> None:
    from fedveil import algorithms
    from fedveil.serialization.codec import to_plain

    recipe = algorithms.dp_fedavg(noise_multiplier=2.0)
    text = settings_file(
        tmp_path / "recipe.toml", algorithm="dp_fedavg", recipe=to_plain(recipe), rounds=3,
        parameters={"noise_multiplier": 2.0}, data={"dataset": "digits"},
    )  # fmt: skip
    found = planned([text], [], {}, [("clip", [1.0, 2.0])], [0])
    norms = [resolve_recipe(m.settings).bound.norm for m in found.members]  # type: ignore[attr-defined]
    assert norms == [1.0, 2.0]
    assert "recipe" in tomllib.loads(text.read_text())
    assert isinstance(found.members[0].settings, Settings)


def test_a_member_without_noise_is_a_baseline_without_a_budget() -> None:
    found = plan(["fedavg", "dp_fedavg"])
    assert [is_private(member) for member in found.members] == [False, True]
    assert [member.settings.epsilon for member in found.members] == [None, 4.0]
    assert found.reference.label == "dp_fedavg"


def test_a_linked_parameter_follows_the_grid() -> None:
    flags = {"parameters": {"clip": "=25*steps*learning_rate"}}
    grid = [("steps", [1, 10]), ("learning_rate", [0.02, 0.04])]
    found = planned([], ["dp_lsgd"], {"epsilon": 4.0, **flags}, grid, [0])
    assert [m.settings.parameters["clip"] for m in found.members] == [0.5, 1.0, 5.0, 10.0]
    default = planned([], ["dp_lsgd"], {"epsilon": 4.0, **flags}, [("steps", [4])], [0])
    assert default.members[0].settings.parameters["clip"] == 2.5  # η = 0.025 by default
