"""fedveil report: what the page says, what it leaves out, what it refuses, and what it escapes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from base64 import b64encode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest

from fedveil import algorithms
from fedveil.reporting import curves, grids, people
from fedveil.reporting.chart import Curve, extremes
from fedveil.reporting.load import load_story
from fedveil.reporting.page import page
from tests.conftest import Run
from tests.unit.reporting.made import a_recipe, save, write_comparison, write_run

HOSTILE = "</script><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\"'"
Refused = Callable[..., str]


class Structure(HTMLParser):
    """Tags, ids, references and texts of scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def ids(self) -> list[str]:
        return [str(found["id"]) for _, found in self.tags if "id" in found]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "single")


@pytest.fixture(scope="module")
def text(single: Path) -> str:
    return page(load_story([single]))


def test_a_run_is_told_in_all_its_sections(text: str) -> None:
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == [
        "result", "scores", "learning", "privacy", "sent", "noise", "angles", "bound", "served",
        "confusion", "recipe", "again",
    ]  # fmt: skip
    for told in (
        "83.",
        "messages: against anyone who sees every message",
        "dp-accounting",
        "5f5f",
        "recipe.toml",
    ):
        assert told in text


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    text = page(load_story([write_run(tmp_path / "run", diagnostics=False)]))
    sections = re.findall(r'<section id="(\w+)"', text)
    assert sections == [
        "result",
        "learning",
        "privacy",
        "sent",
        "noise",
        "bound",
        "recipe",
        "again",
    ]


def test_a_run_without_privacy_says_so_and_has_no_curve_of_epsilon(tmp_path: Path) -> None:
    recipe = algorithms.fedavg()
    story = load_story([write_run(tmp_path / "run", recipe, epsilon=None)])
    text = page(story)
    assert "No privacy guarantee" in text
    assert curves.spending(story) == []
    assert curves.signal(story) == []


def test_the_page_is_whole_and_sane_for_a_reader_without_eyes(text: str) -> None:
    structure = Structure(text)
    ids = structure.ids()
    assert len(ids) == len(set(ids))
    assert {"header", "nav", "main", "footer", "h1"} <= {tag for tag, _ in structure.tags}
    for tag, found in structure.tags:
        if found.get("class") == "chart":
            assert len(str(found["aria-label"])) > 40
        for name in ("href", "aria-labelledby", "for"):
            if tag != "link" and name in found:
                assert str(found[name]).removeprefix("#") in ids
        assert "src" not in found
    charts = sum(found.get("class") == "chart" for _, found in structure.tags)
    assert charts > 10
    assert sum(tag == "figcaption" for tag, _ in structure.tags) == charts
    headings = [int(tag[1]) for tag, _ in structure.tags if re.fullmatch("h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in itertools.pairwise(headings))


def test_only_the_two_scripts_of_the_page_may_run(text: str) -> None:
    allowed = re.findall(r"'sha256-([^']+)'", text[:2000])
    data, *scripts = Structure(text).scripts
    json.loads(data)
    assert allowed == [b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert "'unsafe-inline'" not in text[: text.index("style-src")]


def test_text_from_users_files_is_escaped(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", classes=[HOSTILE, "b"], data={"dataset": HOSTILE}, model=HOSTILE
    )
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"data": HOSTILE, "algorithm": HOSTILE, "engine": HOSTILE}
    summary["privacy"]["statement"][HOSTILE] = HOSTILE
    save(run / "summary.json", summary)
    write_comparison(tmp_path / "many", [(HOSTILE, a_recipe(), {HOSTILE: HOSTILE})], seeds=1)
    for place in (run, tmp_path / "many"):
        structure = Structure(page(load_story([place])))
        assert len(structure.scripts) == 3
        assert not [tag for tag, found in structure.tags if tag == "img" or "onerror" in found]
    charts = json.loads(Structure(page(load_story([run]))).scripts[0])
    assert "<" not in json.dumps(charts).replace("<extra></extra>", "").replace("<br>", "")


def test_a_comparison_ranks_its_members_and_shows_their_spread(tmp_path: Path) -> None:
    members = [("slow", a_recipe(), {}), ("fast", a_recipe("dp_norm_fedavg"), {})]
    story = load_story([write_comparison(tmp_path / "c", members, rounds=30)])
    text = page(story)
    assert "Best of 2: slow." in text
    assert "3 seeds" in text
    [accuracy, _] = curves.learning(story)
    assert [t["name"] for t in accuracy.traces if "name" in t] == ["slow", "fast"]
    band = accuracy.traces[0]
    line = accuracy.traces[1]
    half = len(line["y"])
    high, low = band["y"][:half], band["y"][half:][::-1]
    assert all(a >= m >= b for a, m, b in zip(high, line["y"], low, strict=True))
    assert any(a > b for a, b in zip(high, low, strict=True))


def _spent(run: Path, epsilon: float, **more: Any) -> None:
    """As if a run had cost so much: drawn anew after a crash, or selected."""
    summary = json.loads((run / "summary.json").read_bytes())
    summary["privacy"]["views"]["models"]["epsilon"] = epsilon
    save(run / "summary.json", {**summary, **more})


def test_the_guarantee_of_several_seeds_is_that_of_the_costliest(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"a{seed}", seed=seed) for seed in range(3)]
    _spent(runs[1], 7.25)
    text = page(load_story(runs))
    assert "ε = 7.25" in text
    assert "All 3 private runs together cost more" in text
    assert "together cost more" not in page(load_story(runs[:1]))


def test_a_selected_run_does_not_keep_the_budget_of_one_run(
    refused: Refused, tmp_path: Path
) -> None:
    kept, one = "the budget applies to this view", write_run(tmp_path / "one")
    assert kept in page(load_story([one]))
    other = write_run(tmp_path / "other", seed=1)
    _spent(other, 9.5, selection={"law": "poisson"})
    text = page(load_story([other]))
    assert kept not in text
    assert "The dotted line is the budget" not in text
    assert "their budgets differ" in refused("report", one, other)


def test_runs_that_differ_in_their_seed_only_are_one_member(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", parameters={"clip": 1.0}, seed=seed)
    write_run(tmp_path / "b", parameters={"clip": 2.0})
    story = load_story([*(tmp_path / f"a{seed}" for seed in range(3)), tmp_path / "b"])
    assert [(m.label, len(m.runs)) for m in story.members] == [
        ("clip 1.0", 3), ("clip 2.0", 1),
    ]  # fmt: skip
    assert story.varied == ["clip"]


@pytest.mark.parametrize(
    ("names", "title", "citation"),
    [
        (("steps", "learning_rate"), "B/c over K and η", "DP-LSGD"),
        (("beta", "learning_rate"), "Accuracy over β and γ", "Shulgin et al. 2025, Fig. 4"),
    ],
)
def test_a_grid_becomes_the_papers_heat_map(
    tmp_path: Path, names: tuple[str, str], title: str, citation: str
) -> None:
    first, second = names
    members = [(f"{a} {b}", a_recipe(), {first: a, second: b}) for a in (1, 5) for b in (0.01, 0.1)]
    story = load_story([write_comparison(tmp_path / "c", members, seeds=1, rounds=10)])
    chart = grids.heat_maps(story)[0]
    assert (chart.title, citation in chart.caption) == (title, True)
    [trace] = chart.traces
    assert (trace["x"], trace["y"]) == (["1", "5"], ["0.01", "0.1"])
    accuracy = grids.heat_maps(story)[-1].traces[0]["z"]
    means = [m.results("accuracy")[0] for m in story.members]
    assert np.allclose(np.array(accuracy).T.ravel(), means, atol=1e-4)


def test_b_over_c_is_the_mean_moment_over_the_bound(tmp_path: Path) -> None:
    story = load_story([write_run(tmp_path / "run", a_recipe(clip=4.0))])
    found = grids._b_over_c(story.members[0])
    wanted = polars.read_parquet(tmp_path / "run" / "metrics.parquet")["second_moment"].mean() / 4
    assert found == pytest.approx(wanted)


def test_a_plane_shows_the_path(tmp_path: Path) -> None:
    story = load_story([write_run(tmp_path / "run", plane=True, rounds=60)])
    [chart] = grids.paths(story)
    raw, smooth, _ = chart.traces
    jumps = [np.abs(np.diff(trace["x"])).mean() for trace in (raw, smooth)]
    assert jumps[1] < jumps[0] / 2
    assert "3 rounds" in chart.caption


def test_frames_of_the_slider_keep_the_extreme_clients(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rounds=100, cohort=500)
    [chart] = people.angles(load_story([run]))
    frames = chart.frames["members"][0]["rounds"]
    assert len(frames) == people.MOST_FRAMES
    assert frames[-1]["round"] == 100
    frame = polars.read_parquet(run / "clients.parquet").filter(polars.col("round") == 100)
    assert max(frames[-1]["norm"]) == pytest.approx(frame["norm"].max(), rel=1e-4)
    assert min(frames[-1]["norm"]) == pytest.approx(frame["norm"].min(), rel=1e-4)
    assert len(frames[-1]["norm"]) <= people.MOST_DOTS < frames[-1]["of"]
    assert "at most 200 of 500 clients" in chart.caption
    assert "40 of 99 rounds" in chart.caption


def test_thinning_keeps_every_extreme_and_the_caption_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=5000)
    values[1234], values[4321] = 50, -50
    x = np.arange(5000.0)
    thin = Curve("a", x, values, values, values).thinned()
    assert len(thin.x) <= 402
    assert {1234.0, 4321.0, 0.0, 4999.0} <= set(thin.x)
    kept = extremes([values], 100)
    assert len(kept) <= 100
    story = load_story([write_run(tmp_path / "run", rounds=1000, cohort=2)])
    [chart] = curves.signal(story)
    assert re.search(r"Shows \d+ of 1000 points", chart.caption)


def test_who_is_served_badly_is_the_worst_tenth() -> None:
    accuracy = np.array([0.1, 0.3, *[0.9] * 18])
    assert people.worst(accuracy) == pytest.approx(0.2)


def test_the_command_writes_for_its_owner_and_replaces_only_reports(
    run: Run, refused: Refused, single: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    assert run("report", single, "--out", out).code == 0
    assert out.stat().st_mode & 0o777 == 0o600
    assert run("report", single, "--out", out).code == 0
    other = tmp_path / "letter.html"
    other.write_text("<p>Dear all", encoding="utf-8")
    assert "not a fedveil report" in refused("report", single, "--out", other)
    assert other.read_text() == "<p>Dear all"
    assert "is a directory" in refused("report", single, "--out", tmp_path)
    assert "Could not save" in refused("report", single, "--out", tmp_path / "no" / "page.html")


def test_a_single_run_gets_its_report_beside_it(run: Run, tmp_path: Path) -> None:
    place = write_run(tmp_path / "run")
    assert run("report", place).code == 0
    assert (place / "report.html").is_file()


def _broken(tmp_path: Path, name: str) -> Path:
    path = write_run(tmp_path / "run")
    spoil: dict[str, Callable[[], Any]] = {
        "nothing": lambda: path.rename(tmp_path / "gone"),
        "no recipe": lambda: (path / "recipe.toml").unlink(),
        "half a recipe": lambda: (path / "recipe.toml").write_text("rounds = [", encoding="utf-8"),
        "no summary": lambda: (path / "summary.json").unlink(),
        "half a summary": lambda: (path / "summary.json").write_text('{"rounds": 3'),
        "no privacy": lambda: save(path / "summary.json", {"rounds": 3}),
        "no metrics": lambda: (path / "metrics.parquet").unlink(),
        "half the metrics": lambda: (path / "metrics.parquet").write_bytes(b"PAR1 half"),
        "half the clients": lambda: (path / "clients.parquet").write_bytes(b"PAR1 half"),
        "half an evaluation": lambda: save(path / "evaluation.json", {"classes": ["a"]}),
        "newer": lambda: (path / "recipe.toml").write_text('fedveil = "9.1.0"\n'),
        "no rounds": lambda: _no_rounds(path),
        "half a comparison": lambda: (path / "comparison.toml").write_text(""),
        "spoilt comparison": lambda: (path / "comparison.json").write_text('{"members": []}'),
    }
    spoil[name]()
    return path


def _no_rounds(path: Path) -> None:
    summary = json.loads((path / "summary.json").read_text())
    save(path / "summary.json", summary | {"rounds": 0})


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("nothing", "run does not exist. Name the directory of a run"),
        ("no recipe", "is not a run, because it has no recipe.toml"),
        ("half a recipe", "recipe.toml is damaged"),
        ("no summary", "the run has not ended"),
        ("half a summary", "summary.json is damaged"),
        ("no privacy", "summary.json is damaged"),
        ("no metrics", "has no metrics.parquet"),
        ("half the metrics", "metrics.parquet is damaged"),
        ("half the clients", "clients.parquet is damaged"),
        ("half an evaluation", "evaluation.json is damaged"),
        ("newer", "was written by fedveil 9.1.0, which is newer than the installed"),
        ("no rounds", "has completed no rounds, so there is nothing to report"),
        ("half a comparison", "has ended yet. Resume it with `fedveil compare --resume"),
        ("spoilt comparison", "it names no runs"),
    ],
)
def test_what_cannot_be_told_is_refused(
    refused: Refused, tmp_path: Path, what: str, sentence: str
) -> None:
    assert sentence in refused("report", _broken(tmp_path, what))
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epsilon": 3.0}, "their budgets differ: (5, 1e-5) in view models, and (3, 1e-5)"),
        (
            {"population": 200},
            "300 clients (fingerprint 5f5f5f5f5f5f…), and fashion-mnist with 200",
        ),
    ],
)
def test_runs_of_other_data_or_budgets_are_not_compared(
    refused: Refused, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", **changes)
    assert sentence in refused("report", one, other)


def test_a_run_without_privacy_may_stand_beside_private_ones(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", quality=0.5)
    other = write_run(tmp_path / "other", algorithms.fedavg(), epsilon=None)
    text = page(load_story([one, other]))
    assert "Best of 2: dp_fedavg" in text
