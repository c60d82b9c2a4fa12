"""Rounds over processes of this machine: the same run, one voice, one writer, nobody left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from safetensors.torch import load_file

from fedveil.engines.processes import ALONE, Processes, Team
from fedveil.engines.ranks import one_voice, rank_and_size, tells
from fedveil.errors import LostError, UserError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.verify import verify
from fedveil.random.streams import SecretKey
from fedveil.runs.directory import RunDirectory
from fedveil.runs.saved import SavedRun
from fedveil.training.records import Record
from fedveil.training.run import Training
from fedveil.training.settings import from_settings, read_run
from fedveil.training.start import follow, resume
from tests.conftest import Once, Outcome, Run
from tests.system.forked import Forked, start
from tests.system.played import CASES, play, ready

Refused = Callable[..., str]
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 100  # seconds for anything here
TABLE = ("--path", "people.csv", "--client", "who", "--label", "y", "--data", "classes=no,yes")
NORMEC = (*TABLE, "--algorithm", "fed_alpha_normec", "--set", "rate=0.6")
NOISY = (*NORMEC, "--noise-multiplier", "1")
SILENT = (*NORMEC, "--set", "private=false")  # nothing to account for, so it is quick
SLOWLY = """
import os, time
from fedveil import cli, loop

play = loop.sum_of_messages
def slow(*arguments):
    time.sleep(0.05)
    return play(*arguments)
loop.sum_of_messages = slow
print("pid", os.getpid(), os.environ["RANK"], flush=True)
cli.main()
"""


def torchrun(processes: int, *program: object) -> list[object]:
    launcher = ("-m", "torch.distributed.run", "--standalone")
    return [*launcher, "--nproc-per-node", processes, *program]


def environment() -> dict[str, str]:
    hidden = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    plain = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**plain, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_together(processes: int, cwd: Path, *program: object) -> Outcome:
    child = start(torchrun(processes, *program), cwd, environment(), "torchrun")
    try:
        code = child.wait(LIMIT)
    finally:
        child.kill()
    return Outcome(code, child.out.read_text(), child.err.read_text())


def start_by_hand(processes: int, cwd: Path, *program: object) -> list[Forked]:
    """The same without torchrun: processes that find each other by their environment alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    numbers = [{"RANK": str(r), "WORLD_SIZE": str(processes)} for r in range(processes)]
    return [start(program, cwd, environment() | place | n, n["RANK"]) for n in numbers]


def run_by_hand(processes: int, cwd: Path, *program: object) -> list[Outcome]:
    """What each of them comes to."""
    children = start_by_hand(processes, cwd, *program)
    try:
        codes = [child.wait(LIMIT) for child in children]
    finally:
        end(children)
    return [
        Outcome(code, child.out.read_text(), child.err.read_text())
        for code, child in zip(codes, children, strict=True)
    ]


def end(children: list[Forked]) -> None:
    for child in children:
        child.kill()
        child.wait(LIMIT)


def ours(errors: str) -> list[str]:
    """What fedveil said, among what torchrun reports about its processes."""
    return re.findall(r"fedveil: .*?\.(?=$|[A-Z])|Stopping.*? stop now\.", errors, re.MULTILINE)


@pytest.fixture(scope="session")
def together(once: Once) -> Path:
    """All cases as played by three processes, which have nothing to say."""

    def play_all(folder: Path) -> None:
        outcomes = run_by_hand(3, folder, "-m", "tests.system.played", folder)
        assert outcomes == [Outcome(0, "", "")] * 3

    return once("played-by-three", play_all)


@cache
def alone(name: str) -> dict[str, np.ndarray]:
    return play(ready(CASES[name]))


# The same run


@pytest.mark.parametrize("name", [name for name in CASES if name != "secure"])
def test_processes_come_to_what_one_process_comes_to(name: str, together: Path) -> None:
    """The noise is far larger than the tolerance, so it is the same noise."""
    wanted = alone(name)
    with np.load(together / f"{name}.npz") as found:
        assert set(found) == set(wanted)
        for part, numbers in wanted.items():
            np.testing.assert_allclose(found[part], numbers, rtol=1e-5, atol=1e-6, err_msg=part)


def test_the_cases_have_what_they_are_there_for() -> None:
    records = {name: alone(name)["records"] for name in CASES}
    assert records["rejected"][:, 1].max() >= 2
    assert 0 < records["too few come"][:, 7].sum() < len(records["too few come"])
    assert (records["gaussian"][:, 5] > 0.01).all()
    assert alone("adaptive, capped")["taken"].max() == 2
    assert np.count_nonzero(alone("memory")["memory"].any(axis=1)) > 10


def test_processes_share_one_secret(together: Path) -> None:
    """Else they would come to different models, which `lead` refuses; and no two runs are equal."""
    with np.load(together / "secure.npz") as found:
        assert found["records"].shape == alone("secure")["records"].shape
        assert np.isfinite(found["x"]).all()
        assert not np.allclose(found["x"], alone("secure")["x"], atol=1e-3)


def test_a_shared_secret_is_the_first_one_s() -> None:
    first = SecretKey()
    heard: list[bytes] = []
    SecretKey.agreed(lambda own: heard.append(own) or own)
    again = SecretKey.agreed(lambda own: heard[0])
    assert again.subkey(0, "noise") != first.subkey(0, "noise")
    assert again.subkey(0, "noise") == SecretKey.agreed(lambda own: heard[0]).subkey(0, "noise")


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("population", [None, 50])
def test_shares_are_in_order_and_leave_nobody_out(size: int, population: int | None) -> None:
    workers = np.array([0, 3, 4, 10, 11, 12, 13, 30, 49])
    shares = []
    for rank in range(size):
        team = object.__new__(Processes)
        team.rank, team.size, team._worked = rank, size, np.zeros(0, dtype=bool)
        shares.append(workers[team.share(workers, population)])
        if population is not None:
            assert np.array_equal(np.flatnonzero(team._worked), shares[-1])
    assert np.array_equal(np.concatenate(shares), workers)
    if population is None:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_whose_torchrun_is_gone_wish_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    team = object.__new__(Processes)
    team.rank, team.size, team._parent = 0, 2, os.getppid()
    monkeypatch.setattr(team, "_table", lambda *row: torch.tensor([row, row]))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    team.lead("play", torch.ones(2))
    assert not team.wished
    team._parent = -1
    team.lead("play", torch.ones(2))
    assert team.wished


def test_who_is_lost_and_who_says_it() -> None:
    """By the connections of a first process, and by those of a second or third one."""
    told = {True: "The run received SIGTERM and ended", False: "A process no longer responds"}
    stopped = "Process {} of 3 stopped, so the run ended"
    for gone, told_to_end, wanted, teller in [
        ({1: None}, False, stopped.format(1), 0),
        ({1: "", 2: None}, True, stopped.format(2), 0),
        ({1: ""}, False, stopped.format(1), 0),
        ({1: ""}, True, told[True], 0),
        ({}, False, told[False], 0),
        ({0: None}, True, stopped.format(0), 1),
        ({0: ""}, True, told[True], 0),
    ]:
        team = object.__new__(Processes)
        team.size, team.connections = 3, SimpleNamespace(gone=lambda _, gone=gone: gone)
        found = team.lost(told_to_end)
        assert str(found).startswith(wanted), (gone, told_to_end)
        assert found.teller == teller
    team.connections.gone = lambda _: {1: "A reason.", 2: None}
    assert str(team.lost()) == "A reason."
    assert not isinstance(team.lost(), LostError)


def test_one_process_exchanges_nothing() -> None:
    numbers = torch.arange(3.0)
    ALONE.add(numbers)
    assert numbers.tolist() == [0, 1, 2]
    assert ALONE.share(np.arange(4)) == slice(0, 4)
    assert ALONE.secret(b"own") == b"own"


# One voice, one writer


@pytest.mark.usefixtures("table")
def test_one_process_speaks_and_writes(run: Run, tmp_path: Path) -> None:
    flags = ("train", *NOISY, "--rounds", "4")
    outcome = run_together(2, tmp_path, "-m", "fedveil", *flags)
    assert outcome.code == 0, outcome.err
    assert ours(outcome.err) == []
    assert re.findall(r"^round +(\d+)/4", outcome.out, re.MULTILINE) == ["1", "2", "3", "4"]
    assert outcome.out.count("\nResult ") == outcome.out.count("\nPrivacy ") == 1
    (written,) = (tmp_path / "runs").iterdir()
    assert run(*flags, "--out", "alone").code == 0
    wanted = tmp_path / "alone"
    assert {file.name for file in written.iterdir()} == {file.name for file in wanted.iterdir()}
    rows = [pl.read_parquet(path / "metrics.parquet").drop("seconds") for path in (written, wanted)]
    assert_frame_equal(*rows, rel_tol=1e-5, abs_tol=1e-6)
    assert_same_end(written, wanted)


def assert_same_end(found: Path, wanted: Path) -> None:
    models = [load_file(path / "model.safetensors") for path in (found, wanted)]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(memory(found), memory(wanted), atol=1e-5)


def memory(path: Path) -> np.ndarray:
    """By client: in the file, rows are in the order in which clients were first counted."""
    (file,) = path.glob("memory-*.npy")
    with file.open("rb") as source:
        rows, place = np.load(source), np.load(source)
    return np.where(place[:, None] < 0, 0, rows[place])


def test_bad_input_is_told_once(tmp_path: Path) -> None:
    first, second = run_by_hand(2, tmp_path, "-m", "fedveil", "train", "--dataset", "digit")
    assert first.err.startswith("fedveil: There is no data set 'digit'. Did you mean 'digits'?")
    assert (first.code, first.out, first.err.count("\n")) == (2, "", 1)
    assert (second.code, second.out, second.err) == (2, "", "")
    written = {file.name.partition("-")[0] for file in tmp_path.iterdir()}
    assert written == {"out", "errors"}  # of the processes themselves


@pytest.mark.usefixtures("table")
def test_processes_record_what_one_would(tmp_path: Path, run: Run) -> None:
    flags = (*TABLE, "--algorithm", "clipped_fedavg", "--set", "clients=5", "--set", "clip=0.05")
    flags = (*flags, "--set", "batch=2", "--set", "steps=3", "--rounds", 5, "--engine", "dense")
    assert run("train", *flags, "--out", "one").code == 0
    done = run_by_hand(2, tmp_path, "-m", "fedveil", "train", *flags, "--out", "two")
    assert [outcome.code for outcome in done] == [0, 0], done
    rows = [pl.read_parquet(tmp_path / name / "clients.parquet") for name in ("one", "two")]
    assert_frame_equal(*rows, abs_tol=1e-5)
    rows = [pl.read_parquet(tmp_path / name / "metrics.parquet") for name in ("one", "two")]
    assert_frame_equal(*(table.drop("seconds") for table in rows), abs_tol=1e-5)
    assert rows[1]["bias_own"].is_not_null().to_list()[::4] == [True, True]


# Budgets


@pytest.mark.usefixtures("table")
def test_a_budget_ends_all_processes_with_one_sentence(
    run: Run, tmp_path: Path, ledger: Path
) -> None:
    """In the middle of a run, which is saved; and at the start of the next one, which is not."""
    assert run("train", *NOISY, "--rounds", 1, "--out", "a").code == 0
    room = json.loads(run("budget", "show", "--json").out)["accounts"][0]["views"][0]["epsilon"]
    assert run("budget", "set", "a", "--epsilon", 3 * room).code == 0
    flags = ("-m", "fedveil", "train", *NOISY, "--seed", "1", "--rounds", "40")
    stopped = run_by_hand(2, tmp_path, *flags, "--out", "b")
    (sentence,) = ours("".join(outcome.err for outcome in stopped))
    assert re.match(
        r"fedveil: Round \d+ of fed_alpha_normec was not run: it would bring the spending",
        sentence,
    )
    played = rounds(tmp_path / "b")
    assert 0 < played < 40
    refused = run_by_hand(2, tmp_path, *flags, "--noise-multiplier", "2", "--out", "c")
    (sentence,) = ours("".join(outcome.err for outcome in refused))
    assert sentence.startswith("fedveil: Round 1 of fed_alpha_normec was not run: it would bring")
    assert refused[0].code == 2
    assert not (tmp_path / "c").exists()
    books = Ledger(ledger)
    assert [len(stream.rounds) for stream in books.streams.values()] == [1, played]
    assert verify(books).problems == []


@pytest.mark.usefixtures("table")
def test_a_process_that_follows_leaves_the_ledger_and_the_directory_alone(
    run: Run, tmp_path: Path, ledger: Path
) -> None:
    assert run("train", *NOISY, "--rounds", 2, "--out", "a").code == 0
    before = Ledger(ledger).head
    directory = RunDirectory.open(tmp_path / "a")
    directory.claim()  # as the first process does
    training = from_settings(read_run(tmp_path / "a" / "recipe.toml"))
    training.team = Follower()
    restored = resume(training, tmp_path / "a")
    follow(restored)
    assert (restored.state.round, restored.progress.enrolment, restored.session) == (2, None, None)
    assert Ledger(ledger).head == before
    directory.release()


class Follower(Team):
    """The second process, which is told to end at once."""

    rank, size = 1, 2


# Lost processes


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """SIGTERM as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def slow_run(processes: int, cwd: Path, *flags: object) -> Iterator[tuple[Forked, list[int]]]:
    """A run that has come to its first evaluation, and the processes that work on it, by rank."""
    program = torchrun(processes, "--no-python", sys.executable, "-uc", SLOWLY, "train", *flags)
    pids: dict[int, int] = {}
    child = start(program, cwd, environment(), "torchrun")
    try:
        for line in child.lines(LIMIT):
            if line.startswith("pid"):
                _, pid, rank = line.split()
                pids[int(rank)] = int(pid)
            if line.startswith("round"):
                break
        yield child, [pids[rank] for rank in range(processes)]
    finally:
        for pid in [child.pid, *pids.values()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether it still runs: one that has ended may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.05)


GO_ON = "Resume from its last checkpoint with `fedveil train --resume a`."


@pytest.mark.usefixtures("table")
def test_a_killed_process_ends_the_run_which_then_goes_on(run: Run, tmp_path: Path) -> None:
    """Two processes begin, one goes on, and it is what one comes to alone."""
    with slow_run(2, tmp_path, *SILENT, "--rounds", 60, "--out", "a") as (child, pids):
        os.kill(pids[1], signal.SIGKILL)
        assert child.wait(LIMIT) == 1
        wait_for(pids)
    errors = child.err.read_text()
    assert ours(errors) == [f"fedveil: Process 1 of 2 stopped, so the run ended. {GO_ON}"]
    assert not re.search(r"fedveil/\w+(/\w+)?\.py", errors)  # a traceback is torchrun's own
    assert not list(tmp_path.glob("a/.*"))
    assert not (tmp_path / "a" / "summary.json").exists()
    assert run("train", "--resume", "a").code == 0
    assert run("train", *SILENT, "--rounds", 60, "--out", "b").code == 0
    assert_same_end(tmp_path / "a", tmp_path / "b")


@pytest.mark.usefixtures("table")
def test_where_the_first_process_is_killed_the_second_says_it(tmp_path: Path) -> None:
    """Nobody but the processes themselves is there to notice."""
    flags = ("train", *SILENT, "--rounds", 400, "--out", "a")
    children = start_by_hand(3, tmp_path, "-c", SLOWLY, *flags)
    try:
        next(line for line in children[0].lines(LIMIT) if line.startswith("round"))
        children[0].kill()
        codes = [child.wait(LIMIT) for child in children]
    finally:
        end(children)
    assert codes == [-signal.SIGKILL, 1, 1]
    sentence = f"fedveil: Process 0 of 3 stopped, so the run ended. {GO_ON}\n"
    assert [child.err.read_text() for child in children] == ["", sentence, ""]


@pytest.mark.usefixtures("table")
def test_ctrl_c_ends_all_after_the_round(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a terminal sends it to torchrun. One process begins, two go on, one ends it."""
    flags = ("train", *SILENT, "--rounds", 150)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", interrupted_at(30, Training.step))
        assert run(*flags, "--out", "a").code == 130
    with slow_run(2, tmp_path, "--resume", "a") as (child, pids):
        child.signal(signal.SIGINT)
        child.wait(LIMIT)
        wait_for(pids)
    rest, errors = child.out.read_text(), child.err.read_text()
    assert ours(errors) == ["Stopping after this round. Press Ctrl-C again to stop now."]
    done = rounds(tmp_path / "a")
    assert f"after {done} of 150 rounds" in rest
    assert 31 < done == len(pl.read_parquet(tmp_path / "a" / "metrics.parquet")) < 150
    assert run("train", "--resume", "a").code == 0
    assert run(*flags, "--out", "b").code == 0
    assert_same_end(tmp_path / "a", tmp_path / "b")


def interrupted_at(round: int, step: Callable[[Training], Record]) -> Callable[[Training], Record]:
    def interrupted(training: Training) -> Record:
        if training.state.round == round:
            signal.raise_signal(signal.SIGINT)
        return step(training)

    return interrupted


def rounds(path: Path) -> int:
    return int(json.loads((path / "summary.json").read_text())["rounds"])


def test_a_checkpoint_before_the_first_round_can_be_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_metrics([])
    assert SavedRun(directory.path).rows == []


# Who speaks, and what the environment says


def test_the_second_process_speaks_where_the_first_was_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    spoken = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        problems = (UserError("x"), LostError("x"), LostError("x", teller=1))
        spoken.append([tells(problem) for problem in problems])
    assert spoken == [[True, True, False], [False, False, True], [False, False, False]]
    assert str(LostError("Gone")) == "Gone. Start it again."


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "do not match"),
        ({"WORLD_SIZE": "0"}, "do not match"),
    ],
)
def test_a_strange_environment_is_one_sentence(
    variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in refused("datasets")


def test_a_rank_without_a_world_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert rank_and_size() == (0, 1)


def test_others_are_not_heard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with one_voice():
        print("hello")
        print("hello", file=sys.stderr)
    assert capsys.readouterr() == ("", "")
