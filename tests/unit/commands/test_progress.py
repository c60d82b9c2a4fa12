from __future__ import annotations

import io
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import fedveil as fv
from fedveil import cli
from fedveil.commands import progress
from fedveil.commands.progress import (
    LiveLine,
    PlainLines,
    entry,
    quality,
    show_summary,
    spending,
    watcher,
)
from fedveil.data.federated import Examples, Federated
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.run import Training
from fedveil.training.start import train

RECORD = Record(3, 10, 0, 1.0, 0.5, 0.1, 0.2, 0.01, loss=0.5, accuracy=0.25, epsilon_planned=1.234)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Open = Callable[[], Terminal]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Call it in the test itself, for pytest has its own standard output between fixtures."""
    for name in ("NO_COLOR", "CI", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")

    def call() -> Terminal:
        made = Terminal()
        monkeypatch.setattr(sys, "stdout", made)
        return made

    return call


@pytest.fixture
def training(blobs: Federated, plain_recipe: Recipe) -> Training:
    return prepare(plain_recipe, blobs, rounds=5)


def test_a_terminal_gets_a_live_line(terminal: Open) -> None:
    terminal()
    assert isinstance(watcher(), LiveLine)


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("CI", "true"), ("TERM", "dumb")])
def test_some_terminals_want_plain_lines(
    terminal: Open, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    screen = terminal()
    monkeypatch.setenv(name, value)
    assert isinstance(watcher(), PlainLines)
    entry("Label", "text")
    assert screen.getvalue() == "Label    text\n"


def test_an_empty_no_color_does_not_count(terminal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal()
    monkeypatch.setenv("NO_COLOR", "")
    assert isinstance(watcher(), LiveLine)


def test_what_is_not_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(watcher(), PlainLines)


def test_plain_lines_come_with_evaluations_only(
    training: Training, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainLines() as watch:
        watch(training, replace(RECORD, round=1, loss=None, accuracy=None, epsilon_planned=None))
        assert capsys.readouterr().out == ""
        watch(training, replace(RECORD, round=5))
    assert capsys.readouterr().out == "round 5/5  accuracy 25.0%  planned ε = 1.24  0:00 left\n"


def test_a_live_line_says_the_same(training: Training, terminal: Open) -> None:
    screen = terminal()
    with LiveLine() as watch:
        watch(training, replace(RECORD, round=4))
        watch(training, replace(RECORD, round=5, loss=None))
    assert "round   5/5" in screen.getvalue()
    assert "accuracy 25.0% planned ε = 1.24" in screen.getvalue()


def test_quality_is_accuracy_where_there_are_classes() -> None:
    assert quality(RECORD) == "accuracy 25.0%"
    assert quality(replace(RECORD, accuracy=math.nan)) == "loss 0.5"
    assert quality(replace(RECORD, loss=None, accuracy=None)) == ""


def test_spending_is_of_all_planned_rounds() -> None:
    assert spending(RECORD) == "planned ε = 1.24"
    assert spending(replace(RECORD, epsilon_planned=9.91e-6)) == "planned ε = 9.91e-6"
    assert spending(replace(RECORD, epsilon_planned=None)) == "not private"
    assert spending(replace(RECORD, epsilon_planned=math.inf)) == "no guarantee"


def test_long_text_stands_below_itself_on_a_terminal(terminal: Open) -> None:
    screen = terminal()
    entry("Label", "word " * 20)
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("\x1b[1mLabel    \x1b[0mword word")
    assert lines[1].startswith("         word")


def test_a_long_path_is_not_broken(terminal: Open) -> None:
    screen = terminal()
    entry("Saved", "a/" * 100)
    assert "a/" * 100 in screen.getvalue()


def test_long_text_is_one_line_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    entry("Label", "word " * 100)
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[/x]", "[link=y]", ":smile:", "\\[x]"])
def test_text_is_shown_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry("", text)
    assert capsys.readouterr().out == f"{'':9}{text}\n"


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    entry("", "a\x1b[2Jb\nc\rd\x07")
    assert capsys.readouterr().out == f"{'':9}a [2Jb c d \n"


def test_the_summary_says_what_was_rejected_and_where_it_stopped(
    blobs: Federated, plain_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(plain_recipe, blobs, rounds=2)
    broken = replace(result.records[0], rejected=7)
    show_summary(replace(result, records=(broken,)), ["do this", "or that"])
    out = capsys.readouterr().out
    assert "Stopped      after 1 of 2 rounds.\n" in out
    assert "Rejected     7 updates" in out
    assert "Next         do this\n             or that\n" in out
    assert "Saved" not in out
    assert "simulation" not in out


def test_the_summary_of_numbers_has_no_accuracy(
    blobs: Federated, plain_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(plain_recipe, blobs, rounds=1)
    show_summary(replace(result, accuracy=math.nan, loss=1.5, evaluate=None), [])
    assert "Result       test loss 1.5\n" in capsys.readouterr().out


def test_a_result_without_test_examples_says_that_nothing_was_evaluated(
    blobs: Federated, plain_recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Examples(blobs.test.inputs[:0], blobs.test.labels[:0])
    result = train(plain_recipe, replace(blobs, test=none), rounds=1)
    show_summary(result, [])
    said = "no test examples, so nothing was evaluated"
    assert f"Result       {said}\n" in capsys.readouterr().out
    assert said in repr(result)
    assert said in result._repr_html_()
    assert "nan" not in repr(result)


def test_waiting_shows_on_a_terminal_only(terminal: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal()
    with progress.waiting("Loading"):
        pass
    assert "Loading" in screen.getvalue()
    elsewhere = io.StringIO()
    monkeypatch.setattr(sys, "stdout", elsewhere)
    with progress.waiting("Loading"):
        pass
    assert elsewhere.getvalue() == ""


@pytest.mark.parametrize("variable", ["NO_COLOR", "CI"])
def test_a_terminal_without_colour_parts_lines_between_words_too(
    terminal: Open, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    screen = terminal()
    monkeypatch.setenv(variable, "1")
    entry("", "seventeen letters " * 10, width=0)
    lines = screen.getvalue().splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert all(set(line.split()) <= {"seventeen", "letters"} for line in lines)


def test_an_error_parts_between_words_on_a_terminal_and_is_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch, terminal: Open
) -> None:
    terminal()
    screen, pipe = Terminal(), io.StringIO()
    for sink in (screen, pipe):
        monkeypatch.setattr(sys, "stderr", sink)
        monkeypatch.setattr(sys, "argv", ["fedveil", "train", "--algorithm", "nothing"])
        with pytest.raises(SystemExit):
            cli.main()
    assert pipe.getvalue().count("\n") == 1
    lines = screen.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 60 for line in lines)
    assert " ".join(lines) == pipe.getvalue().rstrip()


def test_python_shows_progress_on_a_terminal_and_in_jupyter_unless_quiet(
    blobs: Federated, plain_recipe: Recipe, terminal: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = terminal()
    fv.train(plain_recipe, blobs, rounds=2)
    assert "round   2/2" in out.getvalue()
    out = terminal()
    fv.train(plain_recipe, blobs, rounds=2, quiet=True)
    assert out.getvalue() == ""
    notebook = io.StringIO()
    monkeypatch.setattr(sys, "stdout", notebook)
    fv.train(plain_recipe, blobs, rounds=2)
    assert notebook.getvalue() == ""  # neither a terminal nor Jupyter
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    fv.train(plain_recipe, blobs, rounds=2)
    assert "round 2/2" in notebook.getvalue()


def test_a_spinner_shows_what_is_logged(terminal: Open) -> None:
    terminal()
    with progress.getting_ready():
        logging.getLogger("fedveil").info("timing engines [a] for at most 0.5 s")
        time.sleep(0.2)
    assert "Timing engines [a] for at most 0.5 s" in sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert logging.getLogger("fedveil").handlers == []


def test_warnings_are_logged_where_progress_is_not_shown(
    blobs: Federated, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = fv.algorithms.dp_fedavg(rate=0.5, steps=1, noise_multiplier=1.0)
    fv.train(recipe, blobs, rounds=1, epsilon=50.0, delta=0.4)
    assert "delta is 0.4, at least 1/" in caplog.text
    assert "Both epsilon and the amount of noise are given" in caplog.text
    caplog.clear()
    fv.train(recipe, blobs, rounds=1, epsilon=50.0, delta=0.4, quiet=True)
    assert caplog.text == ""
