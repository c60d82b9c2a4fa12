"""Every item file is complete: it resolves to recipes, and its claims and scales are in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedveil.errors import UserError
from fedveil.reproducing.item import Item, item_named, items, merged, papers_folder, read_item
from fedveil.reproducing.measures import MEASURES
from fedveil.training.settings import resolve_recipe

PAPERS = Path(__file__).parents[3] / "papers"
ITEMS = list(items(PAPERS))


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.name)
def test_every_arm_resolves_to_a_recipe_at_every_scale(item: Item) -> None:
    assert item.measure in MEASURES
    assert item.claims
    for scale in item.scales.values():
        arms = item.arms_at(scale)
        assert arms
        assert scale.changes.endswith(".")
        assert scale.power is None or scale.power.arm in {arm.name for arm in arms}
        for arm in arms:
            points = item.points(arm, scale)
            assert points
            for settings in (points[0], points[-1]):
                assert resolve_recipe(settings).name == settings.algorithm
    assert {"full", "ci", "small"} & item.scales.keys()


def test_all_papers_have_items_and_a_reason_where_one_is_not_run() -> None:
    assert {item.name.partition("/")[0] for item in ITEMS} == {
        "das2021", "das2022", "dp-lsgd", "shulgin2025", "zhang2022",
    }  # fmt: skip
    for item in ITEMS:
        assert item.not_run or {"ci", "small"} & item.scales.keys()


def test_a_grid_of_a_scale_replaces_that_of_the_arms() -> None:
    item = item_named(PAPERS, "das2022/table1a")
    clip = next(arm for arm in item.arms if arm.name == "clip-5")
    assert len(item.points(clip, item.scale("full"))) == 6 * 7
    small = [settings.parameters for settings in item.points(clip, item.scale("small"))]
    assert [(p["clip"], p["learning_rate"]) for p in small] == [
        (c, eta) for c in (62.5, 31.25, 15.625) for eta in (0.016, 0.032, 0.064)
    ]  # fmt: skip
    assert all(p["steps"] == 20 and "scale" not in p for p in small)


def test_an_end_of_a_grid_counts_unless_the_full_grid_ends_there_too() -> None:
    item = item_named(PAPERS, "das2022/table1a")
    clip, small = next(arm for arm in item.arms if arm.name == "clip-5"), item.scale("small")
    ends = [item.at_ends(clip, small, settings) for settings in item.points(clip, small)]
    assert ends[:3] == [("clip", "learning_rate"), ("clip",), ("clip",)]  # C = 62.5
    assert ends[6:] == [("learning_rate",), (), ()]  # C = 15.625, the smallest that the paper has


def test_an_end_of_a_range_of_ours_always_counts() -> None:
    item = item_named(PAPERS, "dp-lsgd/table1-fmnist")
    arm, small = next(a for a in item.arms if a.name == "sgd-tuned"), item.scale("small")
    ends = [item.at_ends(arm, small, settings) for settings in item.points(arm, small)]
    assert ends[0] == ends[-1] == ("clip", "learning_rate")
    assert ends[4] == ()  # the second of four values of c, the second of three of η


def test_a_linked_parameter_is_computed() -> None:
    item = item_named(PAPERS, "dp-lsgd/figure2")
    arm = next(arm for arm in item.arms if arm.name == "K-20-eta-0.02")
    (settings,) = item.points(arm, item.scale("full"))
    assert settings.parameters["clip"] == 10.0


def test_later_settings_win_within_tables() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"d": 4}) == {
        "a": {"b": 1, "c": 3},
        "d": 4,
    }


def test_a_bad_item_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    file = tmp_path / "mine" / "table.toml"
    file.write_text("title = 1")
    with pytest.raises(UserError, match=r"table.toml is not an item"):
        read_item(file)
    with pytest.raises(UserError, match="no item 'das2022/nothing'"):
        item_named(PAPERS, "das2022/nothing")
    with pytest.raises(UserError, match="No items were found"):
        papers_folder(tmp_path / "empty")
    with pytest.raises(UserError, match="no scale of zhang2022/table4 'huge'"):
        item_named(PAPERS, "zhang2022/table4").scale("huge")
