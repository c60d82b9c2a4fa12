from __future__ import annotations

import errno
import inspect
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedveil import algorithms, cli
from fedveil.algorithms import ALGORITHMS
from fedveil.algorithms.citations import described
from fedveil.data.catalog import CATALOG
from fedveil.data.encoding import TableEncoder
from fedveil.data.frames import read_frame
from fedveil.models.linear import SoftmaxRegression
from fedveil.serialization.codec import to_plain
from fedveil.training.records import Record
from fedveil.training.run import Training
from tests.conftest import Outcome, Run
from tests.system.forked import start

Refused = Callable[..., str]

DIGITS = ("--dataset", "digits", "--clients", 20)
PLAIN = ("--algorithm", "fedavg", "--set", "steps=2", *DIGITS)
NORMEC = ("--algorithm", "fed_alpha_normec", "--noise-multiplier", 1.0, *DIGITS)
SILENT = ("--algorithm", "fed_alpha_normec", "--set", "private=false", *DIGITS)
FILES = {
    "recipe.toml",
    "metrics.parquet",
    "clients.parquet",
    "engine.json",
    "evaluation.json",
    "model.safetensors",
    "summary.json",
    "privacy.txt",
    "checkpoint.safetensors",
}
ESCAPE = "\x1b"
BUDGET = ("show", "set", "history", "verify")


def trained(outcome: Outcome) -> Outcome:
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    return outcome


def model(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


# What a command says


def test_no_command_shows_the_help(run: Run) -> None:
    outcome = run()
    assert outcome.code == 2
    assert "datasets" in outcome.err


def test_a_command_is_told_on_a_line(run: Run) -> None:
    for group in ((), ("budget",)):
        listed = run(*group, "--help").out.partition("Commands:\n")[2]
        assert all(line.endswith(".") and "..." not in line for line in listed.splitlines()), listed


@pytest.mark.parametrize(
    "command",
    [*(command.__name__ for command in cli.COMMANDS), *(f"budget {name}" for name in BUDGET)],
)
def test_every_flag_and_argument_is_explained(command: str, run: Run) -> None:
    told = run(*command.split(), "--help").out
    assert "\\" not in told
    flags = re.findall(r"^  (\S.*)((?:\n   .*)*)", told.partition("Options:")[2], re.M)
    arguments = re.findall(
        r"^  (\S.*)((?:\n   .*)*)", _between(told, "Arguments:", "Options:"), re.M
    )
    assert flags
    for first, more in flags + arguments:
        assert re.search(r"\S  +\w|^ +\w", f"{first}{more}", re.M), first


def _between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


def test_every_data_set_is_listed(run: Run) -> None:
    out = trained(run("datasets")).out
    for name, entry in CATALOG.items():
        assert re.search(rf"^{re.escape(name)} +(not )?installed +", out, re.MULTILINE)
        assert entry.citation in out
    assert re.search(r"^digits +installed", out, re.MULTILINE)


def test_every_algorithm_is_listed_with_its_rule_and_citation(run: Run) -> None:
    out = trained(run("algorithms")).out
    for name, method in ALGORITHMS.items():
        text = described(method)
        assert re.search(rf"^{name} +{re.escape(text.citation)}$", out, re.MULTILINE)
        assert f"    {text.rule}\n" in out
    assert len(out.splitlines()) < 3 * len(ALGORITHMS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_shows_every_parameter_on_its_line(run: Run, name: str) -> None:
    out = trained(run("algorithms", name)).out
    text = described(ALGORITHMS[name])
    assert re.search(r"(et al\. \d{4}( \(\w+\))?|DP-LSGD), (Alg|§|Remark)", out)
    assert len(text.parameters) == len(text.names)
    shown = [
        line
        for p, meaning in text.parameters.items()
        for line in (f"    {p}", f"{' ' * 8}{meaning}")
    ]
    assert out.splitlines()[-len(shown) :] == shown


def test_a_parameter_is_shown_as_python_has_it(run: Run) -> None:
    out = run("algorithms", "dp_norm_fedavg_binomial").out
    assert "    clients: int\n" in out
    assert "    trials: int | None = None\n" in out
    assert "    levels: int = 64\n" in out


# A run and its directory


def test_a_run_is_seven_files_and_a_checkpoint(run: Run, tmp_path: Path) -> None:
    out = trained(run("train", *NORMEC, "--rounds", 3, "--out", "a")).out
    a = tmp_path / "a"
    assert {file.name for file in a.iterdir()} == FILES | {"memory-3.npy", "ledger.json"}
    assert pl.read_parquet(a / "metrics.parquet")["round"].to_list() == [1, 2, 3]
    module = SoftmaxRegression(64, 10)
    module.load_state_dict(load_file(a / "model.safetensors"))
    assert module(torch.ones(2, 1, 8, 8)).shape == (2, 10)
    summary = json.loads((a / "summary.json").read_text(encoding="utf-8"))
    assert summary["rounds"] == summary["rounds_planned"] == 3
    assert summary["privacy"]["views"]["models"]["sentence"] in out
    assert summary["bytes_sent"] > 0
    page = (a / "privacy.txt").read_text(encoding="utf-8")
    assert all(text in out for text in summary["privacy"]["statement"].values())
    assert all(text in page for text in summary["privacy"]["statement"].values())
    assert f"test accuracy {summary['accuracy']:.1%} (" in out


def test_training_again_from_the_resolved_recipe_gives_the_same_bytes(
    run: Run, tmp_path: Path
) -> None:
    flags = ("--model", "mlp-8", "--rounds", 3, "--epsilon", 4, "--delta", 1e-4, "--seed", 5)
    trained(run("train", "--algorithm", "fed_alpha_normec", *DIGITS, *flags, "--out", "a"))
    trained(run("train", "a/recipe.toml", "--out", "b"))
    assert model(tmp_path / "a") == model(tmp_path / "b")
    a, b = (tomllib.loads((tmp_path / name / "recipe.toml").read_text("utf-8")) for name in "ab")
    assert a == b
    trained(run("train", "a/recipe.toml", "--seed", 6, "--out", "c"))
    assert model(tmp_path / "a") != model(tmp_path / "c")


def test_a_table_is_trained_on(run: Run, table: Path) -> None:
    flags = ("--path", table, "--client", "who", "--label", "y", "--algorithm", "fedavg")
    flags += ("--holdout", "rows")
    out = trained(run("train", *flags, "--rounds", 2, "--out", "a")).out
    assert "fedavg on people: 8 clients" in out
    assert "Privacy      No privacy guarantee: updates are not clipped." in out


def test_flags_win_over_the_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        'algorithm = "fedavg"\nrounds = 4\nseed = 3\n[parameters]\nsteps = 2\nbatch = 7\n'
        '[data]\ndataset = "digits"\nclients = 30\n',
        encoding="utf-8",
    )
    flags = ("--rounds", 2, "--set", "steps=1", "--clients", 20, "--out", "a")
    trained(run("train", "a.toml", *flags))
    ran = tomllib.loads((tmp_path / "a" / "recipe.toml").read_text(encoding="utf-8"))
    assert (ran["rounds"], ran["seed"]) == (2, 3)
    assert ran["parameters"] == {"steps": 1, "batch": 7}
    assert (ran["data"]["dataset"], ran["data"]["clients"]) == ("digits", 20)
    assert (ran["recipe"]["local"]["steps"], ran["recipe"]["local"]["batch"]) == (1, 7)


def test_without_out_runs_are_numbered(run: Run, tmp_path: Path) -> None:
    for _ in range(2):
        trained(run("train", *PLAIN, "--rounds", 1))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"fedavg-1", "fedavg-2"}


def test_one_client_can_train(run: Run) -> None:
    flags = ("--dataset", "digits", "--clients", 1, "--algorithm", "fedavg", "--rounds", 1)
    assert "1 clients" in trained(run("train", *flags, "--out", "a")).out


def test_advice_is_a_command_that_works(run: Run) -> None:
    out = trained(run("train", *PLAIN, "--rounds", 1, "--out", "a b [bold] c")).out
    assert "Saved        a b [bold] c (checkpoint.safetensors" in out
    command = re.search(r"fedveil (train 'a b \[bold\] c/recipe.toml' --seed 1)", out)
    assert command
    trained(run("train", "a b [bold] c/recipe.toml", "--seed", 1, "--out", "d"))


def test_brackets_in_data_are_shown_as_they_are(run: Run, table: Path) -> None:
    flags = ("--path", table, "--client", "who", "--label", "y", "--algorithm", "fedavg")
    out = trained(run("train", *flags, "--rounds", 1, "--out", "a")).out
    assert "Encoded in fixed public bins: x and [bold]." in out


# Going on


def test_going_on_with_a_finished_run_changes_nothing(run: Run, tmp_path: Path) -> None:
    trained(run("train", *NORMEC, "--rounds", 2, "--out", "a"))
    before = contents(tmp_path / "a")
    trained(run("train", "--resume", "a"))
    assert contents(tmp_path / "a") == before


SLOWLY = """
import time
from fedveil import cli
from fedveil.training import run as training

step = training.Training.step
training.Training.step = lambda self: (time.sleep(0.1), step(self))[1]
cli.main()
"""


@pytest.mark.system
def test_an_interrupted_run_goes_on_to_the_same_bytes(run: Run, tmp_path: Path) -> None:
    """Ctrl-C ends with 130, as a shell has it, after a summary and with all files saved."""
    flags = (*SILENT, "--set", "rate=0.5", "--rounds", 60)
    program = ("-c", SLOWLY, "train", *flags, "--out", "a")
    child = start(program, tmp_path, os.environ, "interrupted")
    try:
        next(line for line in child.lines(60) if line.startswith("round"))
        child.signal(signal.SIGINT)
        assert child.wait(60) == 130
    finally:
        child.kill()
    rest, errors = child.out.read_text(), child.err.read_text()
    assert errors == "Stopping after this round. Press Ctrl-C again to stop now.\n"
    assert re.search(r"Stopped .*after \d+ of 60 rounds", rest)
    assert "fedveil train --resume a" in rest
    a = tmp_path / "a"
    done = json.loads((a / "summary.json").read_text(encoding="utf-8"))["rounds"]
    assert 0 < done < 60
    assert {file.name for file in a.iterdir()} == FILES | {f"memory-{done}.npy"}
    assert len(pl.read_parquet(a / "metrics.parquet")) == done
    trained(run("train", "--resume", "a"))
    trained(run("train", *flags, "--out", "b"))
    assert_same_run(a, tmp_path / "b", done)


def assert_same_run(resumed: Path, whole: Path, interrupted: int) -> None:
    """The same model and rows; only the round that was the last for a while has more in it."""
    assert model(resumed) == model(whole)
    rows = [pl.read_parquet(path / "metrics.parquet").drop("seconds") for path in (resumed, whole)]
    others = pl.col("round") != interrupted
    assert rows[0].filter(others).equals(rows[1].filter(others))
    assert rows[0]["norm"].equals(rows[1]["norm"])


GOING_ON = {
    "server momentum, batches": ("dp_fedavg", "server_momentum=0.5", "batch=8", "rate=0.5"),
    "memory of all": ("fed_alpha_normec", "rate=0.5", "update=everyone"),
    "rounding": ("dp_norm_fedavg_binomial", "clients=5", "trials=40"),
    "incremental gradients": ("fed_alpha_normec", "local=ig"),
    "adaptive clip, capped": ("dp_fedavg_adaptive", "start=0.01", "rate=0.5", "cap=2"),
    "discrete noise": ("dp_norm_fedavg_secagg", "clients=5", "sigma=20.0", "support=90"),
}


@pytest.mark.parametrize("name", GOING_ON)
def test_every_state_goes_on_where_it_stopped(
    name: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in round 3 of 5, as a signal to this process."""
    algorithm, *parameters = GOING_ON[name]
    if "noise_multiplier" in inspect.signature(ALGORITHMS[algorithm]).parameters:
        parameters.append("noise_multiplier=1.0")
    sets = [word for parameter in parameters for word in ("--set", parameter)]
    flags = ("train", "--algorithm", algorithm, *sets, *DIGITS, "--rounds", 5, "--engine", "dense")
    step = Training.step

    def interrupted(training: Training) -> Record:
        if training.state.round == 2:
            signal.raise_signal(signal.SIGINT)
        return step(training)

    monkeypatch.setattr(Training, "step", interrupted)
    assert run(*flags, "--out", "a").code == 130
    monkeypatch.setattr(Training, "step", step)
    trained(run("train", "--resume", "a"))
    trained(run(*flags, "--out", "b"))
    assert_same_run(tmp_path / "a", tmp_path / "b", 3)


def test_ctrl_c_while_getting_ready_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedveil.training.sources.load_data", interrupted)
    outcome = run("train", *PLAIN, "--out", "a")
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_killed_at_once_goes_on_from_its_last_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = Training.step

    def until_round_four(training: Training) -> Record:
        if training.state.round == 4:
            raise KeyboardInterrupt  # a second Ctrl-C
        return step(training)

    monkeypatch.setattr(Training, "step", until_round_four)
    assert run("train", *NORMEC, "--rounds", 6, "--out", "a").code == 130
    monkeypatch.setattr(Training, "step", step)
    trained(run("train", "--resume", "a"))
    trained(run("train", *NORMEC, "--rounds", 6, "--out", "b"))
    assert model(tmp_path / "a") == model(tmp_path / "b")


# Terminals and what is not one


def on_terminal(
    tmp_path: Path, *arguments: object, columns: int = 80, **environment: str
) -> tuple[int, str]:
    """Exit code and everything written, for a command whose output is a pseudo-terminal."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    hidden = {"NO_COLOR", "CI", "COLUMNS", "FORCE_COLOR"}
    plain = {k: v for k, v in os.environ.items() if k not in hidden}
    child = subprocess.Popen(
        [sys.executable, "-c", "from fedveil.cli import main; main()", *map(str, arguments)],
        cwd=tmp_path,
        env={**plain, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", **environment},
        stdout=theirs,
        stderr=theirs,
        stdin=theirs,
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return child.wait(timeout=60), seen.decode()


def without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


@pytest.mark.system
def test_a_terminal_gets_one_live_line(tmp_path: Path) -> None:
    code, seen = on_terminal(tmp_path, "train", *NORMEC, "--rounds", 3, "--out", "a", columns=60)
    assert code == 0
    assert ESCAPE in seen
    text = without_escapes(seen)
    assert re.search(r"round +3/3 ━+ accuracy [\d.]+% planned ε = \d+\.\d+ ", text)
    assert all(len(line) <= 60 for line in text[text.index("Result") :].splitlines())
    assert "\n         " in text[text.index("Privacy") :]


@pytest.mark.system
@pytest.mark.parametrize("variable", ["NO_COLOR", "CI", "TERM"])
def test_no_color_and_ci_get_plain_lines_even_on_a_terminal(variable: str, tmp_path: Path) -> None:
    code, seen = on_terminal(tmp_path, "datasets", **{variable: "dumb"})
    assert code == 0
    assert ESCAPE not in seen
    assert "digits" in seen


@pytest.mark.system
def test_a_terminal_gets_bold_names(tmp_path: Path) -> None:
    assert f"{ESCAPE}[1mdigits" in on_terminal(tmp_path, "datasets")[1]


def test_a_file_gets_plain_lines_even_when_colour_is_forced(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = trained(run("train", *PLAIN, "--rounds", 10, "--out", "a")).out
    assert ESCAPE not in out
    rounds = [line for line in out.splitlines() if line.startswith("round ")]
    assert len(rounds) == 10
    for number, line in enumerate(rounds, 1):
        assert re.fullmatch(
            rf"round {number:2}/10  accuracy [\d.]+%  not private  0:0\d left", line
        )


def test_an_ascii_terminal_does_not_end_a_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sink = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(sink, encoding="ascii"))
    assert run("train", *NORMEC, "--rounds", 1, "--out", "ä").code == 0
    sys.stdout.flush()
    assert b"round 1/1" in sink.getvalue()


def typed(command: str) -> str:
    return f"import sys; sys.argv[1:] = ['{command}']\nfrom fedveil.cli import main"


HEAVY = {"torch", "polars", "dp_accounting", "sklearn", "scipy", "PIL"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import fedveil", HEAVY | {"numpy"}),
        (typed("--help"), HEAVY | {"numpy"}),
        (typed("datasets"), HEAVY),
    ],
    ids=["import", "--help", "datasets"],
)
def test_starting_is_light(code: str, heavy: set[str]) -> None:
    ending = "\ntry:\n    main()\nexcept (NameError, SystemExit):\n    pass\n"
    check = f"import sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + ending + check], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# Bad input: one sentence, exit code 2, nothing lost

BAD = {
    "an unknown algorithm": (("--algorithm", "fedavgg"), "Did you mean 'fedavg'"),
    "an unknown parameter": (("--algorithm", "fedavg", "--set", "stepz=1"), "'stepz'"),
    "a parameter without a value": (("--set", "clip"), "name=value"),
    "a word for a number": (("--set", "learning_rate=fast"), "it must be a number"),
    "a word for a count": (("--set", "steps=many"), "it must be a whole number"),
    "a fraction for a count": (("--set", "steps=2.5"), "it must be a whole number"),
    "a word for a part": (("--algorithm", "dp_fedavg", "--set", "report=x"), "Difference"),
    "a part of the wrong kind": (
        ("--set", 'learning_rate={kind="Clip",norm=1.0}'),
        "a part of kind Constant, Decay, Piecewise, Steps",
    ),
    "a missing parameter": (
        ("--algorithm", "dp_norm_fedavg_qtdl"),
        "needs clients. Pass it with --set clients=",
    ),
    "an unknown data set": (("--dataset", "digit"), "'digit'"),
    "an unknown model": (("--model", "sofmax"), "Did you mean 'softmax'"),
    "an unknown partition": (("--partition", "random"), "There is no partition 'random'"),
    "no keys to split by": (
        ("--dataset", "digits", "--partition", "key"),
        "does not identify the client",
    ),
    "an unknown engine": (
        ("--algorithm", "fedavg", "--engine", "turbo"),
        "There is no engine 'turbo'",
    ),
    "a column without a table": (("--client", "who"), "is not a table"),
    "no clients": (("--clients", 0), "clients"),
    "more clients than examples": (("--clients", 10**6), "1437"),
    "zero rounds": (("--rounds", 0), "rounds is 0"),
    "negative rounds": (("--rounds", -3), "rounds is -3"),
    "a negative clip": (("--algorithm", "dp_fedavg", "--set", "clip=-1"), "clip is -1"),
    "a clip that is NaN": (("--algorithm", "dp_fedavg", "--set", "clip=nan"), "clip is nan"),
    "epsilon NaN": (("--epsilon", "nan"), "epsilon is nan"),
    "epsilon infinite": (("--epsilon", "inf"), "epsilon is inf"),
    "epsilon zero": (("--epsilon", 0), "epsilon is 0"),
    "epsilon negative": (("--epsilon", -1), "epsilon is -1"),
    "delta zero": (("--epsilon", 1, "--delta", 0), "delta is 0"),
    "delta one": (("--epsilon", 1, "--delta", 1), "delta is 1"),
    "delta NaN": (("--epsilon", 1, "--delta", "nan"), "delta is nan"),
    "delta negative": (("--epsilon", 1, "--delta", -0.1), "delta is -0.1"),
    "epsilon without noise": (("--algorithm", "fedavg", "--epsilon", 1), "adds no noise"),
    "neither epsilon nor noise": (
        ("--algorithm", "dp_fedavg"),
        "dp_fedavg has no privacy budget. Pass --epsilon, or the",
    ),
    "too little noise for epsilon": (
        ("--noise-multiplier", 0.3, "--set", "rate=1.0", "--epsilon", 0.1),
        "more than the budget of 0.1",
    ),
    "a negative noise multiplier": (("--noise-multiplier", -1), "multiplier is -1"),
    "a cohort larger than the population": (
        ("--algorithm", "fedavg", "--set", "clients=500"),
        "500",
    ),
    "a missing settings file": (("nowhere.toml",), "Could not read nowhere.toml"),
    "a directory for settings": ((".",), "Pass a TOML file"),
    "a missing table": (("--path", "no.csv", "--client", "a", "--label", "b"), "no.csv"),
    "a missing folder": (("--path", "pictures"), "pictures"),
    "a run that is none": (("--resume", "."), "it has no recipe.toml"),
    "going on with other settings": (("--resume", ".", "--rounds", 3), "no other settings"),
    "brackets in a name": (("--algorithm", "[bold]x[/bold]"), "'[bold]x[/bold]'"),
    "a line break in a name": (("--algorithm", "a\nb\x1b[31m"), "'a b [31m'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str, refused: Refused, tmp_path: Path) -> None:
    flags, words = BAD[name]
    here = () if {"--dataset", "--path", "--resume"} & set(flags) else DIGITS[:2]
    if "--clients" not in flags and here:
        here = DIGITS
    assert words in refused("train", *flags, *here)
    assert list(tmp_path.iterdir()) == []


def test_the_algorithm_asked_about_must_exist(refused: Refused) -> None:
    assert "Did you mean 'dp_sgd'" in refused("algorithms", "dp_sdg")


def test_a_wrong_type_is_a_usage_error(run: Run) -> None:
    outcome = run("train", "--rounds", "many")
    assert outcome.code == 2
    assert "'many' is not a valid int" in outcome.err


TABLES = {
    "a wrong client column": (None, ("--client", "whom", "--label", "y"), "Did you mean 'who'"),
    "a wrong label column": (None, ("--client", "who", "--label", "z"), "label column 'z'"),
    "no columns named": (None, (), "also give --client"),
    "an empty file": ("", ("--client", "who", "--label", "y"), "people.csv"),
    "only a header": ("who,x,y\n", ("--client", "who", "--label", "y"), "no rows"),
    "one client": ("who,x,y\na,1,0\na,2,1\n", ("--client", "who", "--label", "y"), "two clients"),
    "a path and a name": (None, ("--dataset", "digits"), "Give one"),
    "bytes that are no text": ("\0\1\2", ("--client", "who", "--label", "y"), "people.csv"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_bad_table_is_one_sentence(name: str, refused: Refused, table: Path) -> None:
    text, flags, words = TABLES[name]
    if text is not None:
        table.write_text(text, encoding="utf-8")
    assert words in refused("train", "--path", table, *flags, "--algorithm", "fedavg")


def test_an_unreadable_image_is_one_sentence(refused: Refused, tmp_path: Path) -> None:
    from PIL import Image

    for kind in ("cat", "dog"):
        (tmp_path / "pets" / kind).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), number).save(tmp_path / "pets" / kind / f"{number}.png")
    (tmp_path / "pets" / "cat" / "broken.png").write_bytes(b"not a picture")
    flags = ("--path", "pets", "--clients", 2, "--algorithm", "fedavg")
    assert "broken.png" in refused("train", *flags, "--rounds", 1, "--out", "a")
    assert not (tmp_path / "a").exists()


OWN_MODELS = {
    "Normed": ("nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))", "BatchNorm1d"),
    "Random": (
        "nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.RReLU(), nn.Dropout())",
        "random",
    ),
    "Misfit": ("nn.Linear(3, 10)", "does not fit 'digits'"),
    "FewClasses": ("nn.Sequential(nn.Flatten(), nn.Linear(64, 2))", "does not fit 'digits'"),
    "Empty": ("nn.Flatten()", "no parameters"),
}


@pytest.mark.parametrize("name", OWN_MODELS)
def test_a_model_that_cannot_be_trained_is_one_sentence(
    name: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, words = OWN_MODELS[name]
    code = f"from torch import nn\n\ndef {name}():\n    return {body}\n"
    (tmp_path / f"own_{name.lower()}.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert words in refused("train", *PLAIN, "--model", f"own_{name.lower()}:{name}", "--out", "a")
    assert not (tmp_path / "a").exists()


def test_a_model_of_ones_own_is_trained(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "nn.Sequential(nn.Flatten(), nn.Linear(64, classes))"
    code = f"from torch import nn\n\ndef Net(classes):\n    return {body}\n"
    (tmp_path / "own_net.py").write_text(code, encoding="utf-8")
    trained(run("train", *PLAIN, "--model", "own_net:Net", "--rounds", 2, "--out", "a"))
    assert set(load_file(tmp_path / "a" / "model.safetensors")) == {"1.weight", "1.bias"}


# Places that cannot be written to


def test_a_directory_in_use_is_left_alone(run: Run, refused: Refused, tmp_path: Path) -> None:
    trained(run("train", *PLAIN, "--rounds", 1, "--out", "a"))
    before = contents(tmp_path / "a")
    assert "fedveil train --resume a" in refused("train", *PLAIN, "--rounds", 2, "--out", "a")
    assert contents(tmp_path / "a") == before


def test_a_directory_in_use_is_refused_before_any_work(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").touch()
    monkeypatch.delattr("fedveil.training.sources.load_data")
    assert "is not empty" in refused("train", *PLAIN, "--out", "a")


@pytest.mark.parametrize("out", ["file", "file/below", "x" * 300, "/proc/fedveil"])
def test_a_place_that_cannot_be_written_is_one_sentence(
    out: str, refused: Refused, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("precious", encoding="utf-8")
    assert refused("train", *PLAIN, "--rounds", 1, "--out", out)
    assert contents(tmp_path) == {"file": b"precious"}


@pytest.mark.parametrize("full", ["metrics", "model", "summary", "checkpoint", "memory", "recipe"])
def test_a_full_disk_is_one_sentence_and_older_files_stay(
    full: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name.strip(".").startswith(full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    outcome = run("train", *NORMEC, "--rounds", 2, "--out", "a")
    assert outcome.code == 2
    assert outcome.err.startswith("fedveil: Could not save to a: No space left on device. ")
    assert outcome.err.count("\n") == 1
    assert not [file for file in contents(tmp_path / "a") if "partial" in file or full in file]


# A stranger's first hour


def test_a_recipe_without_data_is_not_trained_on_other_data(run: Run, refused: Refused) -> None:
    recipe = to_plain(algorithms.fedavg())
    Path("own.toml").write_text(tomli_w.dumps({"recipe": recipe}))
    assert "Name them with --dataset or --path" in refused("train", "own.toml")
    trained(run("train", "own.toml", "--dataset", "digits", "--clients", 9, "--rounds", 1))


def test_a_table_s_run_keeps_what_is_needed_to_use_its_model(run: Run, table: Path) -> None:
    flags = ("--path", table, "--client", "who", "--label", "y", "--algorithm", "fedavg")
    trained(run("train", *flags, "--rounds", 1, "--out", "a"))
    encoder = TableEncoder.from_json(Path("a/encoder.json").read_text())
    weight = load_file("a/model.safetensors")["linear.weight"]
    assert encoder.encode(read_frame(table)).shape[1] == weight.shape[1]


def test_clients_that_add_noise_have_a_guarantee_for_their_messages(run: Run) -> None:
    flags = ("--dataset", "digits", "--clients", 50, "--rounds", 1, "--noise-multiplier", 20)
    noisy = ("--algorithm", "dp_fedavg", "--set", "clients=10", "--set", "noise_at=client")
    out = trained(run("train", *flags, *noisy, "--out", "a")).out
    assert "against anyone who sees every message and its sender" in out
    summary = json.loads(Path("a/summary.json").read_text())
    views = summary["privacy"]["views"]
    assert views["messages"]["epsilon"] > views["sum"]["epsilon"] > views["models"]["epsilon"]
    assert summary["data"] == "digits"


def test_the_version(run: Run) -> None:
    assert run("--version").out.startswith("fedveil 0.")


# How quick it is


def test_bench_times_every_engine_and_says_which_one_auto_takes(run: Run) -> None:
    out = trained(run("bench", *DIGITS, "--rounds", 1)).out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for engine in ("factored", "dense", "loop"):
        assert "s per round, in groups of up to" in lines[engine]
    assert lines["auto"].split()[2].rstrip(":") in ("factored", "dense", "loop")
    assert (
        "a client's step took" in lines["auto"] or "the only engine that supports" in lines["auto"]
    )


def test_bench_refuses_to_time_nothing(refused: Refused) -> None:
    assert "at least 1" in refused("bench", *DIGITS, "--rounds", 0)


def test_the_engine_and_why_it_was_taken_are_in_the_record(run: Run) -> None:
    trained(run("train", *PLAIN, "--rounds", 1, "--out", "a"))
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["engine"] in ("factored", "dense", "loop")
    assert summary["engine_reason"] == "rounds are too short for the engine to matter"
    trained(run("train", *PLAIN, "--engine", "loop", "--rounds", 1, "--out", "b"))
    assert json.loads(Path("b/summary.json").read_text())["engine_reason"] == "requested"
