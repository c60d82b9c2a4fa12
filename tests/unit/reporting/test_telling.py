"""What a page makes plain: whose line it is, what is chance, what it cost, what is missing."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

from fedveil import algorithms
from fedveil.reporting import curves, grids, people, words
from fedveil.reporting.load import load_story
from fedveil.reporting.page import page
from tests.unit.reporting.made import a_recipe, save, write_comparison, write_run

THREE = ("clip", "normalize", "plain")


def rewrite(run: Path, **columns: Any) -> None:
    """Set columns of a run's metrics."""
    file = run / "metrics.parquet"
    polars.read_parquet(file).with_columns(**columns).write_parquet(file)


def summarize(run: Path, **changes: Any) -> None:
    save(run / "summary.json", json.loads((run / "summary.json").read_text()) | changes)


def three(path: Path, seeds: int = 2) -> Path:
    recipes = (a_recipe(), a_recipe("dp_norm_fedavg"), algorithms.fedavg())
    members = [(name, recipe, {}) for name, recipe in zip(THREE, recipes, strict=True)]
    return write_comparison(path, members, seeds=seeds, rounds=30)


def titled(story: Any, title: str) -> Any:
    return next(chart for chart in curves.bounding(story) if chart.title == title)


def test_a_member_has_one_colour_and_its_name_also_where_it_is_alone(tmp_path: Path) -> None:
    place = three(tmp_path / "c")
    for run in place.glob("member-1-*"):
        rewrite(run, memory_error=polars.col("norm"))
    story = load_story([place])
    *_, line = titled(story, "Memory error").traces
    assert (line["name"], line["line"]["color"]) == ("normalize", "@c1")
    every = [t for t in curves.learning(story)[0].traces if "name" in t]
    assert [t["line"]["color"] for t in every] == ["@c0", "@c1", "@c2"]
    section = page(story).partition("Memory error</h3>")[2]
    assert '<ul class="legend"><li>' in section[:200]
    assert "normalize" in section[:400]


def test_lines_that_coincide_are_drawn_once_under_all_names(tmp_path: Path) -> None:
    [chart] = curves.spending(load_story([three(tmp_path / "c")]))
    [line] = chart.traces
    assert line["name"] == "clip and normalize"
    assert "Band" not in chart.caption


def test_what_never_changes_is_said_and_not_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rewrite(run, clipped_fraction=polars.lit(1.0))
    story = load_story([run])
    assert curves.unchanging(story) == ["Clipped fraction: 100.0% in every round."]
    assert "Clipped fraction" not in [c.title for c in curves.bounding(story)]
    assert "100.0% in every round" in page(story)


def test_a_run_of_one_round_has_no_curves_but_its_numbers(tmp_path: Path) -> None:
    story = load_story([write_run(tmp_path / "run", rounds=1)])
    assert curves.learning(story) == curves.spending(story) == curves.bounding(story) == []
    assert "Norm of updates: " in page(story)


def test_chance_and_the_cost_of_looking_at_all_are_told(tmp_path: Path) -> None:
    place = three(tmp_path / "c", seeds=3)
    told = json.loads((place / "comparison.json").read_text())
    told["members"][1] |= {"p": 0.4, "significant": False}
    told["members"][2] |= {"p": 0.001, "significant": True}
    told["together"] = {"epsilon": 25.43, "delta": 1e-5, "runs": 6, "adjacency": "zero-out"}
    save(place / "comparison.json", told)
    text = page(load_story([place]))
    assert "Best of 3: clip. Its lead over normalize may be chance." in text
    assert "may be chance (p = 0.4)" in text
    assert "worse (p = 0.001)" in text
    assert "all 6 runs cost together, ε = 25.5 at δ = 1e-5 (zero-out)" in text
    single = load_story([place, write_run(tmp_path / "other", a_recipe(clip=3.0))])
    assert single.together is None
    assert "may be chance" not in page(single)


def test_two_seeds_have_no_p_values_and_the_card_has_the_cost_of_the_choice(tmp_path: Path) -> None:
    place = three(tmp_path / "c", seeds=2)
    told = json.loads((place / "comparison.json").read_text())
    told["members"][1] |= {"p": 0.4, "significant": False}
    told["together"] = {"epsilon": 25.43, "delta": 1e-5, "runs": 6, "adjacency": "zero-out"}
    save(place / "comparison.json", told)
    text = page(load_story([place]))
    assert "p = 0.4" not in text
    card = text.partition("<dt>Cost of the choice</dt>")[2][:400]
    assert "ε = 25.5" in card
    assert "all 6 runs that the best was chosen from" in card
    assert "One run alone: ε = " in card


def test_a_legend_is_shown_once_and_only_differing_charts_have_their_own(tmp_path: Path) -> None:
    text = page(load_story([three(tmp_path / "c")]))
    assert text.count('<ul class="legend common">') == 1
    own = re.findall(r'<ul class="legend">.*?</ul>', text)
    assert all(found.count("<li>") < 3 for found in own)


def test_the_verdict_is_the_first_line_and_counts_are_in_the_confusion_matrix(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run", classes=["no", "yes"])
    found = json.loads((run / "evaluation.json").read_text())
    save(run / "evaluation.json", found | {"confusion": [[7847, 0], [153, 0]]})
    story = load_story([run])
    text = page(story)
    main = text.partition('<main id="main">')[2]
    assert main.startswith('<p class="verdict bad"')
    assert "It misses 153 of 153 examples of &#x27;yes&#x27;" in main[:400]
    assert "0.0% (0 of 153)" in text
    [chart] = people.confusion(story)
    assert chart.traces[0]["text"] == [["7,847", "0"], ["153", "0"]]


def test_the_metric_of_the_runs_ranks_the_page(tmp_path: Path) -> None:
    place = three(tmp_path / "c", seeds=3)
    for number, auc in enumerate((0.6, 0.9, 0.7)):
        for run in place.glob(f"member-{number}-*"):
            summarize(run, evaluation=evaluated_at(auc))
            rewrite(run, metric=polars.lit(auc))
    story = load_story([place])
    assert story.measure.name == "auc"
    assert [m.label for m in curves.ranked(story.members)] == ["normalize", "plain", "clip"]
    assert curves.learning(story)[0].title == "AUC"
    assert "<dt>Test AUC</dt><dd><strong>90.0%</strong>" in page(story)


def evaluated_at(auc: float) -> dict[str, Any]:
    main = {"name": "auc", "value": auc, "low": auc - 0.1, "high": auc + 0.1, "baseline": 0.5}
    facts = {"higher_is_better": True, "share": True}
    return {
        "metric": "auc", "target": "class", "examples": 100, "metrics": [{**main, **facts}],
        "classes": [],
    }  # fmt: skip


def test_flat_values_have_a_narrow_axis_and_the_first_chart_needs_no_script(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rewrite(run, accuracy=polars.lit(0.981))
    story = load_story([run])
    low, high = curves.learning(story)[0].layout["yaxis"]["range"]
    assert 0.9 < low < 0.981 < high <= 1
    text = page(story)
    assert text.count('<svg class="sketch"') == 1
    assert text.index('<svg class="sketch"') < text.index('id="chart-1"')


def test_every_seed_is_a_dot_on_one_scale(tmp_path: Path) -> None:
    text = page(load_story([three(tmp_path / "c", seeds=3)]))
    strips = re.findall(r'<svg class="strip".*?</svg>', text)
    assert [strip.count("<circle") for strip in strips] == [3, 3, 3]
    at = [float(x) for x in re.findall(r'cx="([\d.]+)"', "".join(strips))]
    assert (min(at), max(at)) == (6.0, 154.0)


def test_one_size_of_message_is_one_picture_with_both_scales(tmp_path: Path) -> None:
    place = three(tmp_path / "c")
    [chart] = curves.sending(load_story([place]))
    assert chart.layout["xaxis"]["ticktext"][1] == "200<br>6.28 MB"
    for run in place.glob("member-1-*"):
        rewrite(run, sent=polars.col("sent") // 4)
    both = curves.sending(load_story([place]))
    assert [chart.title for chart in both] == ["Accuracy by messages", "Accuracy by bytes"]


def test_the_optimum_is_found_from_the_distances_to_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plane=True)
    x, y = (polars.col(f"position_{i}") for i in (0, 1))
    rewrite(run, distance=((x - 0.5) ** 2 + (y + 2.0) ** 2).sqrt())
    story = load_story([run])
    assert grids.optimum(story.members[0].first) == pytest.approx((0.5, -2.0))
    [chart] = grids.paths(story)
    assert chart.traces[-1]["marker"]["symbol"] == "star"
    rewrite(run, distance=polars.col("norm"))
    [without] = grids.paths(load_story([run]))
    assert "Star" not in without.caption


def test_a_larger_model_is_shown_around_its_optimum(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", plane=True)
    a, b = (polars.col(f"position_{i}") for i in (0, 1))
    rewrite(run, along=a, across=b.abs(), distance=(a**2 + b**2).sqrt())
    gone = polars.lit(None, polars.Float64)
    rewrite(run, position_0=gone, position_1=gone)
    story = load_story([run])
    assert grids.optimum(story.members[0].first) == pytest.approx((0.0, 0.0), abs=1e-6)
    [chart] = grids.paths(story)
    assert "projected" in chart.caption
    assert chart.layout["xaxis"]["title"] == "along the line to the start"


@pytest.mark.parametrize(
    ("accuracy", "loss", "told"),
    [
        (float("nan"), float("nan"), "not finite"),
        (None, None, "unknown"),
        (float("nan"), 2.0, "<strong>2</strong>"),
    ],
)
def test_a_run_without_a_result_says_so(
    tmp_path: Path, accuracy: float | None, loss: float | None, told: str
) -> None:
    run = write_run(tmp_path / "run")
    summarize(run, accuracy=accuracy, loss=loss)
    assert told in words.headline(load_story([run]))


def test_a_line_that_ends_early_and_a_lost_seed_are_told(tmp_path: Path) -> None:
    place = three(tmp_path / "c", seeds=3)
    late = polars.when(polars.col("round") <= 15).then(polars.col("accuracy"))
    rewrite(place / "member-0-s1", accuracy=late.otherwise(float("nan")))
    summarize(place / "member-0-s1", accuracy=float("nan"), loss=float("nan"))
    story = load_story([place])
    [accuracy, loss] = curves.learning(story)
    assert "clip has no finite value after 15." in accuracy.caption
    assert "no finite value" not in loss.caption
    assert "1 of 3 seeds of clip have no finite result" in page(story)


def test_without_a_bound_there_is_no_word_of_one(tmp_path: Path) -> None:
    bounded = people.angles(load_story([write_run(tmp_path / "a")]))[0].caption
    free = people.angles(load_story([write_run(tmp_path / "b", algorithms.fedavg())]))[0].caption
    assert ("bound C" in bounded, "bound C" in free) == (True, False)
    assert ("noise" in bounded, "noise" in free) == (True, False)


def test_a_run_from_python_has_no_command_that_would_be_refused(tmp_path: Path) -> None:
    text = page(load_story([write_run(tmp_path / "run", data=None, algorithm=None)]))
    assert "Started from Python" in text
    assert "fedveil train" not in text


def test_labels_cannot_turn_the_page_around_or_fill_it(tmp_path: Path) -> None:
    members = [
        ("a\u202eb\n", a_recipe(), {}),
        ("x" * 300, a_recipe(), {}),
        ("x" * 301, a_recipe(), {}),
    ]
    story = load_story([write_comparison(tmp_path / "c", members, seeds=1, rounds=3)])
    labels = [member.label for member in story.members]
    assert labels[0] == "ab"
    assert len({*labels}) == 3
    assert max(map(len, labels)) < 110


def theme(name: str) -> dict[str, str]:
    css = resources.files("fedveil.reporting").joinpath("page.css").read_text(encoding="utf-8")
    start = css.index(":root {" if name == "light" else ':root[data-theme="dark"]')
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", css[start : css.index("}", start)]))


def linear(colour: str) -> np.ndarray:
    v = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_are_strong_enough_to_read(name: str) -> None:
    """WCAG 2.2: 4.5 to 1 for text, 3 to 1 for lines and the borders of controls."""
    c = theme(name)
    for ink, ground in itertools.product(
        ("text", "soft", "accent"), ("card", "page", "accent-soft")
    ):
        assert contrast(c[ink], c[ground]) >= 4.5, (ink, ground)
    assert contrast(c["text"], c["warn"]) >= 4.5
    for part, ground in itertools.product(("c0", "c1"), ("card", "accent-soft")):
        assert contrast(c[part], c[ground]) >= 4.5  # client and server in the recipe's picture
    assert min(contrast(c[f"c{i}"], c["card"]) for i in range(8)) >= 3


DEUTAN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                   [-0.011820, 0.042940, 0.968881]])  # fmt: skip
PROTAN = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]])  # fmt: skip
XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])


def lab(light: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(XYZ @ np.clip(light, 0, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("eye", [np.eye(3), DEUTAN, PROTAN], ids=["all", "deutan", "protan"])
def test_lines_are_told_apart_by_colour_blind_eyes(name: str, eye: np.ndarray) -> None:
    """Distance in CIELAB of all that can be in one chart; matrices of Machado et al. 2009."""
    seen = [lab(eye @ linear(theme(name)[f"c{i}"])) for i in range(curves.MOST_LINES)]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 11
