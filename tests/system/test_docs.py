"""What the documents say is what the code does."""

from __future__ import annotations

import doctest
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedveil as fv
from fedveil.algorithms import ALGORITHMS
from fedveil.algorithms.citations import PAPERS, as_markdown, described, found
from tests.conftest import Run
from tests.system.forked import start

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def commands() -> list[str]:
    lines = "".join(blocks(README, "console")).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def test_the_readme_s_python_example_runs() -> None:
    (example,) = blocks(README, "python")
    test = doctest.DocTestParser().get_doctest(example, {}, "README", "README.md", 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test)
    assert runner.summarize(verbose=False) == doctest.TestResults(failed=0, attempted=7)
    lines = [line for line in example.splitlines() if line.startswith(">>>")]
    assert len(lines) < 10


def shown(command: str) -> list[str]:
    """The lines that the README shows of what a command says."""
    for block in blocks(README, "console"):
        after = block.partition(f"$ {command}\n")[2]
        if after:
            lines = itertools.takewhile(lambda line: not line.startswith("$"), after.splitlines())
            return [line for line in lines if line != "…"]
    return []


@pytest.mark.usefixtures("workers_here")
def test_the_readme_s_commands_run(run: Run, tmp_path: Path) -> None:
    """One after another in one directory, as somebody types them who reads from top to bottom."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    typed = [command for command in commands() if command.startswith("fedveil ")]
    assert len(typed) >= 15
    for command in typed:
        done = run(*shlex.split(command)[1:])
        assert done.code == 0, (command, done.err)
        assert done.out
        assert not set(shown(command)) - set(done.out.splitlines()), done.out


def test_the_readme_s_make_targets_exist_and_ci_calls_its_test_command() -> None:
    targets = [c.split()[1] for c in commands() if c.startswith("make")]
    assert targets == ["demo", "test", "federation"]
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}: setup" in makefile for target in targets)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    shown = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "fedveil train examples/fashion-mnist.toml" in shown.stdout


def test_the_readme_names_every_algorithm_with_its_source() -> None:
    for name in ALGORITHMS:
        assert f"| `{name}` |" in README


def test_every_algorithm_cites_paper_and_place() -> None:
    for method in ALGORITHMS.values():
        text = described(method)
        assert text.rule
        assert re.search(r"(et al\. \d{4}|DP-LSGD)", text.citation), text.name


def test_papers_md_is_current() -> None:
    works = found(ROOT / "fedveil")
    assert set(PAPERS) <= set(works)
    current = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    assert current == as_markdown(works), "run `make docs`"


def test_links_in_the_documents_lead_somewhere() -> None:
    for file in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
            if target.startswith("https://"):
                continue
            assert (file.parent / target).exists(), f"{file.name} links to {target}"


def test_tests_named_in_the_documents_exist() -> None:
    for file in (ROOT / "docs").glob("*.md"):
        for name in re.findall(r"`(tests/[\w/.]+)", file.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{file.name} names {name}"


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def soft(tmp_path: Path) -> Path:
    """A directory with CONTRIBUTING's soft.py."""
    (tmp_path / "soft.py").write_text(blocks(CONTRIBUTING, "python")[0])
    return tmp_path


def test_the_worked_example_of_contributing_is_true(
    soft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(soft))
    monkeypatch.syspath_prepend(str(ROOT))
    example, check = blocks(CONTRIBUTING, "python")
    body = [line for line in example.splitlines() if line and "import" not in line]
    assert len(body) <= 15
    try:
        exec(compile(check, "CONTRIBUTING.md", "exec"), {})
        recipe = sys.modules["soft"].dp_soft_fedavg(clip=1.0, rate=0.5, steps=2)
    finally:
        sys.modules.pop("soft", None)
    data = fv.load("digits").split(fv.Iid(50))
    result = fv.train(recipe, data, rounds=2, epsilon=4.0)
    assert 3.9 < result.guarantee.epsilon <= 4.0


def test_the_commands_of_contributing_run_and_an_own_run_goes_on(
    soft: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each finds soft.py anew; the comparison's worker and the resumed run are other processes."""
    monkeypatch.setattr("fedveil.commands.compare.workers", lambda _: 1)  # so there is one worker
    lines = "".join(blocks(CONTRIBUTING, "console")).splitlines()
    typed = [line.removeprefix("$ fedveil ") for line in lines if line.startswith("$ fedveil")]
    words = {command.split()[0] for command in typed}
    assert words == {"algorithms", "train", "diagnose", "privacy", "report", "compare"}
    said = []
    for command in typed:
        done = run(*shlex.split(command))
        assert done.code == 0, (command, done.err)
        said.append(done.out)
        sys.modules.pop("soft", None)
    assert "soft_C(u_i)" in said[0]
    assert "soft_dp_soft_fedavg" in said[-1]
    assert 'kind = "soft:SoftClip"' in (soft / "runs/soft/recipe.toml").read_text()
    model = (soft / "runs/soft/model.safetensors").read_bytes()
    shutil.copytree(soft / "runs/soft", soft / "runs/more")
    for name in ("checkpoint.safetensors", "metrics.parquet", "clients.parquet", "ledger.json"):
        (soft / "runs/more" / name).unlink(missing_ok=True)
    assert "round 5/5" in fedveil(soft, "train --resume runs/more")
    assert (soft / "runs/more/model.safetensors").read_bytes() == model


def fedveil(directory: Path, command: str) -> str:
    """What a command prints, in a directory and a process of its own."""
    program = ("-m", "fedveil", *shlex.split(command))
    done = start(program, directory, {**os.environ, "PYTHONPATH": str(ROOT)}, "fedveil")
    try:
        assert done.wait(300) == 0, (command, done.err.read_text())
    finally:
        done.kill()
    return done.out.read_text()


def test_the_example_of_using_a_model_runs(run: Run, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    (settings,), (command,) = blocks(text, "toml"), blocks(text, "console")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "visits.toml").write_text(settings)
    assert run(*shlex.split(command)[2:]).code == 0
    rows = (ROOT / "examples" / "visits.csv").read_text().splitlines()[:20]
    only = [",".join(row.split(",")[1:6]) for row in rows]  # without the client and the label
    (tmp_path / "new.csv").write_text("\n".join(only))
    example, by_hand = blocks(text, "python")
    test = doctest.DocTestParser().get_doctest(example, {}, "using", "using.md", 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test)
    assert runner.summarize(verbose=False) == doctest.TestResults(failed=0, attempted=8)
    model = fv.open_run("runs/visits").model
    names = {"model": model, "safetensors": __import__("safetensors.torch")}
    exec(by_hand.replace("runs/a", "runs/visits"), names)


def test_files_in_notation_exist_as_fields() -> None:
    text = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")
    for part, field in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        assert field in getattr(fv.parts, part).__dataclass_fields__, f"{part}.{field}"


def test_the_package_runs_as_a_module() -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "fedveil", "--help"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "train" in done.stdout
