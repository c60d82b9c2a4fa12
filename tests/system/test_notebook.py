"""The notebook in examples/ runs from its first cell to its last, without Jupyter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
CELLS = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_was_executed() -> None:
    ran = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in ran] == list(range(1, len(ran) + 1))
    problems = [o for cell in ran for o in cell["outputs"] if o["output_type"] == "error"]
    assert problems == []


def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "visits.csv", tmp_path)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for cell in CELLS[:-1]:  # the last one starts processes, which tests/system/comparing covers
        exec(cell.replace("rounds=40", "rounds=4"), space)
    assert space["result"].guarantee.epsilon <= 8
    assert (tmp_path / "runs/visits/report.html").is_file()
    assert set(space["run"].predict(space["new"])) <= {"no", "yes"}
    assert "fv.compare(" in CELLS[-1]
