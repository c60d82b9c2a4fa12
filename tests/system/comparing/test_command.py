"""`fedveil compare` as people call it; its runs are real processes on tiny data."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import algorithms
from fedveil.comparing import selecting
from fedveil.comparing.pool import Pool
from fedveil.comparing.selecting import selection_cost
from fedveil.data.federated import Federated
from fedveil.ledger.ledger import Ledger
from fedveil.privacy.selection import law_of
from fedveil.random.streams import stream
from fedveil.runs.listing import listed
from fedveil.runs.saved import SavedRun
from fedveil.training.prepare import prepare
from fedveil.training.records import Record
from fedveil.training.run import Training
from fedveil.training.settings import from_settings, read_run
from fedveil.training.sources import load_data
from tests.conftest import Outcome, Run
from tests.system.comparing.conftest import SMALL, TWO, with_package
from tests.system.forked import start

Refused = Callable[..., str]
ROOT = Path(__file__).resolve().parents[3]


def well(outcome: Outcome) -> str:
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    return outcome.out


def result(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "comparison.json").read_bytes())
    return found


def test_every_run_is_an_ordinary_one_and_equals_fedveil_train(
    compared: tuple[Path, str, Path], run: Run, tmp_path: Path
) -> None:
    directory, _, _ = compared
    names = {path.name for path in directory.iterdir() if path.is_dir()}
    assert names == {f"{a}-s{s}" for a in ("dp_fedavg", "dp_norm_fedavg") for s in (0, 1)}
    assert all(listed(directory / name).state == "finished" for name in names)
    well(run("train", "--algorithm", "dp_fedavg", *SMALL, "--seed", 1, "--out", "alone"))
    mine = (tmp_path / "alone" / "checkpoint.safetensors").read_bytes()
    assert (directory / "dp_fedavg-s1" / "checkpoint.safetensors").read_bytes() == mine


def test_members_share_split_and_first_model_and_no_noise(
    compared: tuple[Path, str, Path],
) -> None:
    directory, _, where = compared
    ledger = Ledger(where)
    bodies = [drawn.body for drawn in ledger.streams.values()]
    assert len({body["fingerprint"] for body in bodies}) == 1
    assert len({body["stream"] for body in bodies}) == 4
    ledger.close()
    runs = [read_run(path / "recipe.toml") for path in sorted(directory.glob("*-s*"))]
    data = load_data(runs[0].data)
    assert all(run.data == runs[0].data for run in runs)
    again = [from_settings(run, data) for run in runs]
    assert {training.spec.fingerprint for training in again} == {bodies[0]["fingerprint"]}
    drawn = [from_settings(run.model_copy(update={"model": "mlp-8"}), data) for run in runs]
    first = {seed: [made.state.x for made in drawn if made.spec.seed == seed] for seed in (0, 1)}
    for one, other in first.values():  # of a model that does not begin at zero
        assert torch.equal(one, other)
    assert not torch.equal(first[0][0], first[1][0])
    noise = [stream(training.key, 0, "noise").bytes(16) for training in again]
    assert len(set(noise)) == 4


def test_the_result_is_written_down_as_agreed(compared: tuple[Path, str, Path]) -> None:
    directory, _, _ = compared
    found = result(directory)
    assert (found["varied"], found["rounds"], found["view"]) == ([], 3, "models")
    assert found["budget"] is None
    assert found["selection"] is None
    first = found["members"][0]
    assert first["label"] == first["algorithm"] == "dp_fedavg"
    assert first["runs"] == ["dp_fedavg-s0", "dp_fedavg-s1"]
    known = [listed(directory / name) for name in first["runs"]]
    assert first["accuracy"] == [run.accuracy for run in known]
    assert first["loss"] == [run.loss for run in known]
    assert first["mean"] == pytest.approx(sum(first["accuracy"]) / 2)
    assert first["epsilon"] == known[0].epsilon
    assert [m["best"] for m in found["members"]].count(True) == 1
    assert {m["significant"] for m in found["members"]} <= {None, True, False}


def test_the_table_says_what_looking_costs(compared: tuple[Path, str, Path]) -> None:
    directory, said, where = compared
    together = result(directory)["together"]
    ledger = Ledger(where)
    account = ledger.accounts()[0]
    assert together["epsilon"] == pytest.approx(ledger.spent(account, "models", 1e-5))
    ledger.close()
    single = result(directory)["members"][0]["epsilon"]
    assert together["epsilon"] > 1.5 * single
    assert re.search(
        r"Total cost   all 4 runs together have spent ε = \S+ at δ = 1e-5 in view", said
    )
    assert "costs their composed ε, not that of one run" in said
    assert "a test needs two configurations with at least 3 seeds each" in said
    assert len(re.findall(r"^run \d/4  ", said, re.M)) == 4


def test_a_finished_comparison_plays_nothing_again(
    compared: tuple[Path, str, Path], run: Run, tmp_path: Path
) -> None:
    shutil.copytree(compared[0], tmp_path / "c")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "c").rglob("*.safetensors")}
    said = well(run("compare", "--resume", "c"))
    assert "run 1/" not in said
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert json.loads(well(run("compare", "c", "--json"))) == result(tmp_path / "c")


class Stop(BaseException):
    """Like a kill."""


@pytest.mark.usefixtures("workers_here")
def test_half_done_members_go_on_from_their_checkpoints(
    compared: tuple[Path, str, Path], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run is missing, one was stopped early, two are whole: the result is the same."""
    shutil.copytree(compared[0], tmp_path / "c")
    whole = result(tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "dp_fedavg-s0")
    shutil.rmtree(tmp_path / "c" / "dp_norm_fedavg-s1")
    (tmp_path / "c" / "comparison.json").unlink()
    real = Training.step

    def step(training: Training) -> Record:
        if training.state.round == 2:
            raise Stop
        return real(training)

    begun = ("train", "--algorithm", "dp_norm_fedavg", *SMALL, "--seed", 1, "--ledger", compared[2])
    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step)
        with pytest.raises(Stop):
            run(*begun, "--checkpoint-every", 1, "--out", "c/dp_norm_fedavg-s1")
    assert listed(tmp_path / "c" / "dp_norm_fedavg-s1").rounds == 2
    said = well(run("compare", "--resume", "c", "--jobs", 1, "--ledger", compared[2]))
    assert len(re.findall(r"^run \d/2  ", said, re.M)) == 2
    assert result(tmp_path / "c") == whole


def test_ctrl_c_leaves_all_resumable(tmp_path: Path, ledger: Path) -> None:
    program = (
        "-m", "fedveil", "compare", "--algorithms", "fedavg,norm_fedavg", "--dataset", "digits",
        "--clients", 20, "--set", "steps=1", "--rounds", 20_000, "--checkpoint-every", 1,
        "--seeds", 1, "--jobs", 2, "--out", "c",
    )  # fmt: skip
    process = start(program, tmp_path, with_package(ledger), "compared")
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not list((tmp_path / "c").glob("*/metrics.parquet")):
            time.sleep(0.05)
        process.signal(signal.SIGINT)
        code = process.wait(120)
    finally:
        process.kill()
    said, problem = process.out.read_text(), process.err.read_text()
    assert code == 130, said + problem
    assert "fedveil compare --resume" in said
    found = [listed(path) for path in (tmp_path / "c").glob("*-s0")]
    assert found
    assert all(run.state == "stopped" and run.rounds < 20_000 for run in found)
    assert all(m["runs"] == [] for m in result(tmp_path / "c")["members"])


# Budgets


def with_budget(run: Run, epsilon: float) -> None:
    well(run("train", "--algorithm", "dp_fedavg", *SMALL, "--seed", 90, "--out", "first"))
    well(run("budget", "set", "first", "--epsilon", epsilon))


def test_where_a_budget_has_no_room_nothing_is_played(
    run: Run, refused: Refused, tmp_path: Path, ledger: Path
) -> None:
    with_budget(run, 0.7)
    before = Ledger(ledger).head
    said = refused("compare", *TWO, "--seeds", 3, "--out", "c")
    assert re.search(r"The budget of 'digits', ε = 0.7 .* room for 2 of these 6 runs", said)
    assert not (tmp_path / "c").exists()
    assert Ledger(ledger).head == before


@pytest.mark.usefixtures("workers_here")
def test_a_comparison_is_cut_where_that_is_asked_for(
    run: Run, tmp_path: Path, ledger: Path
) -> None:
    with_budget(run, 0.7)
    outcome = run("compare", *TWO, "--seeds", 3, "--out", "c", "--cut")
    assert outcome.code == 0, outcome
    told = re.search(r"These data have a budget: (\d) runs, one at a time.", outcome.out)
    assert told
    played = [path for path in (tmp_path / "c").iterdir() if path.is_dir()]
    assert len(played) == int(told[1])
    assert all(listed(path).state == "finished" for path in played)
    assert "; with 1 earlier runs on these data, ε = " in outcome.out
    ledger_now = Ledger(ledger)
    account = ledger_now.accounts()[0]
    assert 0.6 < ledger_now.spent(account, "models", 1e-5, 0.7) <= 0.7
    ledger_now.close()


# Private selection


@pytest.mark.usefixtures("workers_here")
def test_the_best_of_a_random_number_of_runs_is_all_that_is_left(
    run: Run, refused: Refused, tmp_path: Path, ledger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a stop, and charged once."""
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "run", lambda pool, tasks: setattr(pool, "stopped", True))
        stopped = run("compare", *TWO, "--select-privately", "--expect", 3, "--out", "c")
    assert stopped.code == 130
    assert "fedveil compare --resume c   resume where it stopped" in stopped.err
    draws = json.loads((tmp_path / "c" / "out-of-sight" / "draws.json").read_bytes())
    said = well(run("compare", "--resume", "c"))
    found = result(tmp_path / "c")
    (chosen,) = found["members"]
    assert chosen["seeds"][0] in [seed for _, seed in draws["picks"]]
    assert chosen["best"]
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        "comparison.toml", "comparison.json", chosen["runs"][0],
    }  # fmt: skip
    kept = tmp_path / "c" / chosen["runs"][0]
    assert not (kept / "checkpoint.safetensors").exists()
    priced = found["selection"]
    assert priced["single"] < priced["epsilon"] < 20
    assert priced["expected"] == pytest.approx(3)
    assert "picks" not in json.dumps(found)
    assert listed(kept).epsilon == chosen["epsilon"] == priced["epsilon"]
    told = (kept / "privacy.txt").read_text()
    assert ")-differentially private per client against anyone who sees only" in told
    assert "Adjacency: add-remove." in told
    assert "Chosen by   runs are compared by a score computed" in told
    assert "Accounting  by Rényi divergences" in told
    assert "clients.parquet" not in told
    assert "  models" not in told
    rows = SavedRun.open(kept).rows
    assert {row["epsilon"] for row in rows} - {None} == {priced["epsilon"]}
    assert "selects one run privately" in refused("compare", "c")
    assert "Assumptions" in said
    assert "was selected among several runs" in refused("privacy", kept)
    ledger_now = Ledger(ledger)
    (account,) = ledger_now.accounts()
    (stream,) = ledger_now.of(account)
    assert len(stream.rounds) == len(stream.digests) == 1
    assert ledger_now.spent(account, "models", 1e-5) == pytest.approx(priced["epsilon"])
    ledger_now.close()
    assert "all intact" in well(run("budget", "verify"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")}
    assert "has already selected a run" in refused("compare", "--resume", "c")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*")} == before


def test_a_selection_on_another_split_of_data_with_a_budget_is_refused(
    run: Run, refused: Refused, tmp_path: Path
) -> None:
    with_budget(run, 9.0)
    other = (*TWO[:5], 30, *TWO[6:])
    said = refused("compare", *other, "--select-privately", "--out", "c")
    assert "A budget is set for these examples ('digits'), but for another unit or" in said
    assert not list((tmp_path / "c").glob("out-of-sight/draw-*"))


def test_runs_are_not_selected_by_the_examples_of_those_who_are_protected(
    refused: Refused, table: Path
) -> None:
    flags = ("--path", table, "--client", "who", "--label", "y", "--rounds", 2)
    noise = ("--noise-multiplier", 9.0, "--set", "steps=1", "--set", "rate=0.5")
    algorithms = ("--algorithms", "dp_fedavg,dp_norm_fedavg", "--select-privately")
    said = refused("compare", *algorithms, *flags, *noise, "--out", "c")
    assert "may belong to its clients" in said


def test_a_selection_holds_for_the_neighbours_of_all_its_members(blobs: Federated) -> None:
    """Poisson and fixed size together: a claim of either's own neighbours would be false."""
    poisson = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
    fixed = algorithms.dp_fedavg(noise_multiplier=6.0, clients=6, steps=1)
    both = [prepare(recipe, blobs, rounds=2) for recipe in (poisson, fixed)]
    law = law_of("geometric", 3.0)
    price = selection_cost(both, law)
    assert price.adjacencies == ("zero-out",)
    assert "Adjacency: zero-out." in price.sentence()
    account = both[0].spec.account
    held = selecting._facts(both[0], account, price, "selection", 2).plans["models"].adjacencies
    assert held == ("zero-out",)
    own = both[1].statement().plain()
    assert own["views"]["models"]["adjacency"] == "replace-one"
    restated = selecting._restated({"privacy": own}, price)["privacy"]["views"]
    assert restated["models"]["adjacency"] == "zero-out"
    assert "sees more than the best run" in restated["sum"]["reason"]
    assert selection_cost(both[:1], law).adjacencies == ("add-remove", "zero-out")


def test_a_selection_that_a_budget_has_no_room_for_is_not_begun(
    run: Run, refused: Refused, tmp_path: Path
) -> None:
    with_budget(run, 0.7)
    said = refused("compare", *TWO, "--select-privately", "--expect", 8, "--out", "c")
    assert "would bring the spending on 'digits'" in said
    assert not list((tmp_path / "c").glob("out-of-sight/draw-*"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--expect", 3), "--expect needs --select-privately"),
        (("--select-privately", "--expect", 0.5), "must be above 1"),
        (("--select-privately", "--law", "uniform"), "There is no distribution 'uniform'"),
        (("--select-privately", "--law", "poisson", "--eta", 1), "both choose a distribution"),
        (("--select-privately", "--view", "sum"), "Use a private algorithm in view 'models'"),
        (("--seeds", 0), "no seeds to compare over"),
        (("--seeds", "many"), "pass a number of seeds"),
        (("--jobs", 0), "at least 1"),
        (("--grid", "clipp=1,2"), "no parameter of dp_fedavg to vary named 'clipp'"),
        (("--grid", "clip"), "name=value. Write it as"),
        (("--grid", "rate=0.1,,0.2"), "a value is missing"),
        (("--grid", "rate=0.1", "--grid", "rate=0.2"), "names a parameter twice"),
        (("--resume", "nowhere"), "leave out all other settings"),
        (("--grid", "rate=0.1,0.9"), "their own noise gives ε ="),
    ],
)
def test_bad_input_is_one_sentence(
    refused: Refused, flags: tuple[object, ...], problem: str
) -> None:
    assert problem in refused("compare", *TWO, *flags)


def test_places_that_are_taken_or_no_comparison(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mine").write_text("")
    assert "is not empty" in refused("compare", *TWO, "--out", "c")
    assert "is not a comparison" in refused("compare", "--resume", "c")
    assert "Could not read missing.toml" in refused("compare", "missing.toml", *SMALL[:4])


# Existing runs


def test_runs_of_one_recipe_are_one_member(
    compared: tuple[Path, str, Path], run: Run, refused: Refused, tmp_path: Path
) -> None:
    shutil.copytree(compared[0], tmp_path / "c")
    named = ("--ledger", compared[2])
    found = json.loads(
        well(run("compare", *sorted((tmp_path / "c").glob("*-s*")), *named, "--json"))
    )
    assert [len(m["runs"]) for m in found["members"]] == [2, 2]
    together = result(tmp_path / "c")["together"]
    assert found["together"] == together  # also of runs that were not played together
    assert together["unrecorded"] == 0
    said = well(run("compare", *sorted((tmp_path / "c").glob("*-s*")), *named))
    assert "Total cost   all 4 runs together have spent ε = " in said
    (tmp_path / "c" / "dp_fedavg-s0" / "ledger.json").unlink()
    said = well(run("compare", *sorted((tmp_path / "c").glob("*-s*")), *named))
    assert "all 3 runs" in said
    assert "; 1 more runs, which no ledger here records, are not counted" in said
    known = {m["algorithm"]: m for m in result(tmp_path / "c")["members"]}
    for member in found["members"]:
        assert member["mean"] == known[member["algorithm"]]["mean"]
    one = tmp_path / "c" / "dp_fedavg-s0"
    assert "Name two or more runs" in refused("compare", one)
    (one / "summary.json").write_text("{")
    assert "is damaged" in refused("compare", tmp_path / "c" / "dp_fedavg-s1", one)
    (one / "summary.json").unlink()
    (tmp_path / "c" / "comparison.toml").unlink()
    assert "has finished 3 of 3 rounds. Resume it" in refused("compare", "c")
    (one / "recipe.toml").unlink()
    assert "Name two or more runs" in refused("compare", one)


def test_runs_on_other_data_or_at_another_budget_are_refused(
    compared: tuple[Path, str, Path], run: Run, refused: Refused
) -> None:
    other = (*SMALL[:3], 30, *SMALL[4:])
    well(run("train", "--algorithm", "dp_fedavg", *other, "--out", "b"))
    said = refused("compare", compared[0] / "dp_fedavg-s0", "b")
    assert "cannot be compared: the data is" in said
    assert "clients=20" in said
    assert "clients=30" in said
    less = ("--dataset", "digits", "--clients", 20, "--rounds", 3, "--noise-multiplier", 5.0)
    well(run("train", "--algorithm", "dp_fedavg", *less, *SMALL[8:], "--out", "n"))
    said = refused("compare", compared[0] / "dp_fedavg-s0", "n")
    assert "their own noise gives ε =" in said


def test_a_run_alone_on_two_threads_gives_the_same_bytes_as_in_a_comparison(
    compared: tuple[Path, str, Path], run: Run
) -> None:
    """Their noise is the same: a difference in the last bits would be one that no noise covers."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert run("train", "--algorithm", "dp_norm_fedavg", *SMALL, "--out", "alone").code == 0
    finally:
        torch.set_num_threads(before)
    beside = compared[0] / "dp_norm_fedavg-s0" / "model.safetensors"
    assert Path("alone/model.safetensors").read_bytes() == beside.read_bytes()
