"""`fedveil reproduce`: all items at scale ci, resuming, and the page of results."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fedveil.comparing import worker
from fedveil.data.catalog import CATALOG
from fedveil.errors import UserError
from fedveil.reproducing import page, results
from fedveil.reproducing.item import Item, items
from fedveil.reproducing.runner import Reproduction
from fedveil.training.settings import read_settings, resolve_recipe
from tests.conftest import Run

PAPERS = Path(__file__).parents[3] / "papers"
CI = [item for item in items(PAPERS) if "ci" in item.scales]
EXACT = {  # what the ci scale decides, of each item
    "zhang2022/table4": ["holds"] * 4,
    "zhang2022/claim21": ["holds"] * 2,
    "das2021/bits": ["holds"] * 2,
    "das2021/delta": ["fails", "holds"],
}


@pytest.mark.parametrize("item", CI, ids=lambda item: item.name)
def test_an_item_runs_at_scale_ci_with_the_expected_verdicts(item: Item, tmp_path: Path) -> None:
    outcome = Reproduction(item, "ci", tmp_path, tmp_path / "ledger", lambda _: None).run()
    found = results.plain(outcome)
    verdicts = [claim["verdict"] for claim in found["claims"]]
    assert verdicts == EXACT.get(item.name, ["not testable at this scale"] * len(verdicts))
    assert len(found["tuning"]) == len(outcome.tuning)
    assert found["cpu_seconds"] > 0
    json.dumps(found, allow_nan=False)


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    """A folder with one item."""
    folder = tmp_path / "papers"
    (folder / "das2022").mkdir(parents=True)
    shutil.copy(PAPERS / "das2022" / "table1a.toml", folder / "das2022")
    return folder


def test_a_stopped_reproduction_keeps_what_is_finished(
    run: Run, papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("reproduce", "das2022/table1a", "--papers", papers, "--out", tmp_path / "runs")
    trained: list[str] = []
    train, limit = worker.train_task, 3

    def counted(task: dict[str, str], send: worker.Send) -> bool:
        if len(trained) == limit:
            raise KeyboardInterrupt
        trained.append(Path(task["path"]).name)
        return train(task, send)

    monkeypatch.setattr("fedveil.reproducing.runner.train_task", counted)
    stopped = run(*command)
    assert stopped.code == 130
    assert "fedveil reproduce das2022/table1a --scale ci   resume" in stopped.err
    limit = 100
    done = run(*command, "--save")
    assert done.code == 0, done.err
    assert len(trained) == len(set(trained)) == 8  # two arms: two points, then two seeds
    assert "not testable at this scale" in done.out
    (saved,) = (papers / "results").iterdir()
    plain = json.loads(saved.read_text())
    assert plain["item"] == "das2022/table1a"
    tried = {(t["arm"], t["parameters"].get("clip", t["parameters"].get("scale"))) for t in
             plain["tuning"]}  # fmt: skip
    assert tried == {("clip-5", 10), ("clip-5", 40), ("normalize-5", 10), ("normalize-5", 40)}
    listed = run("reproduce", "--list", "--papers", papers)
    assert "ci: not testable at this scale" in listed.out
    assert "4 configurations were tried" in page.as_markdown(papers)


def test_runs_of_a_changed_item_are_refused(tmp_path: Path) -> None:
    """Else, a result would mix runs of different settings, or be that of the old ones."""
    claim21 = next(item for item in CI if item.name == "zhang2022/claim21")
    short = claim21.model_copy(update={"settings": {**claim21.settings, "rounds": 2}})
    long = claim21.model_copy(update={"settings": {**claim21.settings, "rounds": 3}})
    for _ in range(2):  # unchanged, the finished runs are kept
        Reproduction(short, "ci", tmp_path, tmp_path / "ledger", lambda _: None).run()
    with pytest.raises(UserError, match=r"other settings than the item has now \(rounds\)"):
        Reproduction(long, "ci", tmp_path, tmp_path / "ledger", lambda _: None).run()


def test_an_item_without_its_data_set_is_refused(
    run: Run, papers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = replace(CATALOG["fashion-mnist"], system=(), files=())
    monkeypatch.setitem(CATALOG, "fashion-mnist", absent)
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "empty"))
    worker.load_once.cache_clear()
    file = papers / "das2022" / "table1a.toml"
    file.write_text(file.read_text().replace("clients = 3000", "clients = 60"))
    asked = ("reproduce", "das2022/table1a", "--scale", "small", "--papers", papers)
    said = run(*asked, "--out", tmp_path / "runs")
    assert said.code == 2
    assert "Fashion-MNIST was not found, and it cannot be downloaded." in said.err


def test_what_cannot_be_run_says_why(run: Run, tmp_path: Path) -> None:
    said = run("reproduce", "das2022/table1b", "--papers", PAPERS, "--out", tmp_path)
    assert said.code == 2
    assert "das2022/table1b cannot be run: the features of a ResNet-18" in said.err
    said = run("reproduce", "zhang2022/table4", "--scale", "small", "--papers", PAPERS)
    assert "it has no scale 'small'" in said.err
    assert "There is no scale 'huge'" in run("reproduce", "--scale", "huge").err


def test_an_item_that_is_not_run_can_be_planned(run: Run, tmp_path: Path) -> None:
    asked = ("reproduce", "das2022/table1b", "--scale", "full", "--settings", tmp_path)
    assert run(*asked, "--papers", PAPERS).code == 0
    file = tmp_path / "das2022" / "table1b" / "clip-5.toml"
    settings = read_settings(file, {})
    assert (settings.epsilon, settings.parameters["clip"]) == (5.0, 500)
    assert resolve_recipe(settings).name == "dp_fedavg"


def test_the_page_is_that_of_the_committed_results() -> None:
    committed = (PAPERS.parent / "docs" / "reproductions.md").read_text(encoding="utf-8")
    assert committed == page.as_markdown(PAPERS), "run `make docs`"
