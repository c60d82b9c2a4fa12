"""Runs that end at a bad moment, and what is left of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil import algorithms
from fedveil.accounting import accountant as accounting
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.ledger.anchor import Anchor
from fedveil.ledger.chain import Chain
from fedveil.ledger.charging import digest
from fedveil.ledger.ledger import Account, Ledger, open_ledger
from fedveil.ledger.session import BudgetError, Session
from fedveil.ledger.verify import verify
from fedveil.privacy.calibrate import Budget
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory
from fedveil.runs.saved import SavedRun
from fedveil.training import run as work
from fedveil.training.prepare import prepare
from fedveil.training.run import Training
from fedveil.training.start import finish, resume, train
from scripts.kill_test import STEPS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1)
CAPPED = algorithms.dp_fedavg(noise_multiplier=3.0, rate=0.5, steps=1, cap=3)
DELTA = 1e-5


class Crash(BaseException):
    """Like a kill: nothing below handles it."""


def crashed(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int) -> None:
    """Let a method end the process, as it were, the so-manieth time it is called."""
    left, real = [times], getattr(owner, name)

    def wrapped(*given: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise Crash
        return real(*given, **named)

    monkeypatch.setattr(owner, name, wrapped)


def begun(recipe: Recipe, data: Federated, path: Path, **options: Any) -> None:
    with pytest.raises(Crash):
        train(recipe, data, rounds=8, save=path, checkpoint_every=3, **options)


def resumed(recipe: Recipe, data: Federated, path: Path, **options: Any) -> Training:
    return resume(prepare(recipe, data, rounds=8, **options), path)


def files(path: Path) -> dict[str, bytes]:
    """What must be the same to the byte; not times, nor positions in the ledger."""
    names = ("model.safetensors", "checkpoint.safetensors", "privacy.txt", "recipe.toml")
    memory = [file.name for file in path.glob("memory-*")]
    return {name: (path / name).read_bytes() for name in (*names, *memory)}


# Kill −9


def test_killed_runs_lose_nothing_and_spend_nothing_unseen(tmp_path: Path) -> None:
    """Real kills at every named step. At random moments: --kills 200.

    A mistake that matters at one step is noticed; 24 kills are the fewest that reach all of them.
    """
    command = [sys.executable, "-m", "scripts.kill_test", "--kills", "24", "--quiet"]
    memory = {"TMPDIR": str(tmp_path)}  # where no disk is waited for
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | memory, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    figures = json.loads(done.stdout)
    assert figures["kills_in_all"] >= 24
    assert set(figures["kills"]) == set(STEPS)
    for name in ("lost_rounds", "uncharged_releases", "noise_used_twice", "different_models"):
        assert figures[name] == 0
    assert figures["problems"] == []


@pytest.mark.parametrize("every", [1, 2, 5, 100])
def test_a_run_goes_on_from_its_last_checkpoint_to_the_same_bytes(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    train(CAPPED, blobs, rounds=8, checkpoint_every=every, save=tmp_path / "whole")
    crashed(monkeypatch, Session, "commit", 7)
    with pytest.raises(Crash):
        train(CAPPED, blobs, rounds=8, seed=0, checkpoint_every=every, save=tmp_path / "a")
    monkeypatch.undo()
    training = resume(prepare(CAPPED, blobs, rounds=8), tmp_path / "a")
    assert training.state.round == 6 // every * every
    finish(training)
    assert files(tmp_path / "a") == files(tmp_path / "whole")


def test_a_run_that_never_came_to_a_checkpoint_begins_again(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed(monkeypatch, RunDirectory, "save_checkpoint", 1)
    begun(RECIPE, blobs, tmp_path / "a")
    monkeypatch.undo()
    training = resumed(RECIPE, blobs, tmp_path / "a")
    assert training.state.round == 0
    assert len(finish(training).records) == 8


def test_what_a_kill_left_half_written_is_cleared_away(blobs: Federated, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".recipe.toml.partial").write_bytes(b"half")
    train(RECIPE, blobs, rounds=8, save=tmp_path / "a")
    assert not list((tmp_path / "a").glob("*partial"))


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_checkpoints_every_zero_rounds_are_refused(blobs: Federated, every: Any) -> None:
    with pytest.raises(UserError, match=f"checkpoint_every is {every}"):
        train(RECIPE, blobs, rounds=1, checkpoint_every=every)


# What a crash costs


@pytest.fixture
def books(ledger: Path) -> Callable[[], Ledger]:
    return lambda: Ledger(ledger)


def spent(recipe: Recipe, data: Federated, rounds: int) -> float:
    return accounting.epsilon(recipe.spent(18, data.clients, rounds), DELTA)


def test_a_seeded_run_is_charged_once_however_often_it_crashed(
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    books: Callable[[], Ledger],
) -> None:
    crashed(monkeypatch, Session, "commit", 6)
    begun(RECIPE, blobs, tmp_path / "a", delta=DELTA)
    monkeypatch.undo()
    account = Account(blobs.fingerprint(), "client")
    assert books().spent(account, "models", DELTA) == spent(RECIPE, blobs, 6)
    training = resumed(RECIPE, blobs, tmp_path / "a", delta=DELTA)
    assert (training.state.round, training.charge().drawn) == (3, 6)
    result = finish(training)
    assert result.guarantee.rounds == 8
    assert books().spent(account, "models", DELTA) == result.guarantee.epsilon
    assert verify(books()).problems == []


@pytest.mark.parametrize("recipe", [RECIPE, CAPPED], ids=["plain", "capped"])
def test_a_secret_run_is_charged_for_rounds_that_were_drawn_anew(
    recipe: Recipe,
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    books: Callable[[], Ledger],
) -> None:
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", delta=DELTA, noise="secure")
    monkeypatch.undo()
    training = resumed(recipe, blobs, tmp_path / "a", delta=DELTA, noise="secure")
    assert training.session is not None
    assert (training.state.round, training.session.redrawn) == (3, 3)
    result = finish(training)
    assert (len(result.records), result.guarantee.rounds) == (8, 11)
    loose = replace(training.recipe, cohort=replace(training.recipe.cohort, cap=None))
    if recipe is CAPPED:
        loose = replace(training.recipe, cohort=replace(training.recipe.cohort, cap=6))
    assert result.guarantee.epsilon == spent(loose, blobs, 11)
    account = Account(blobs.fingerprint(), "client")
    assert books().spent(account, "models", DELTA) >= result.guarantee.epsilon
    assert verify(books()).problems == []


def test_the_digest_of_a_release_holds_all_that_is_released(blobs: Federated) -> None:
    """The same stream twice must give the same model and the same threshold."""
    state = prepare(algorithms.dp_fedavg_adaptive(noise_multiplier=3.0), blobs, engine="loop").state
    threshold = state.parts["bound"]["threshold"] * (1 + 2.0**-50)
    bound = {**state.parts["bound"], "threshold": threshold}
    others = [
        replace(state, x=state.x + 2.0**-20),
        replace(state, parts={**state.parts, "bound": bound}),
    ]
    assert len({digest(one) for one in (state, *others)}) == 3
    assert digest(replace(state)) == digest(state)


def test_the_privacy_command_counts_rounds_drawn_anew(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--dataset", "digits", "--clients", 20, "--rounds", 8, "--noise", "secure")
    noisy = ("--algorithm", "dp_fedavg", "--noise-multiplier", 3.0, "--set", "rate=0.5")
    crashed(monkeypatch, Session, "commit", 6)
    with pytest.raises(Crash):
        run("train", *flags, *noisy, "--set", "cap=3", "--checkpoint-every", 3, "--out", "a")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert run("train", "--resume", "a").code == 0
    said = json.loads((tmp_path / "a" / "summary.json").read_bytes())["privacy"]
    assert said["rounds"] == 11
    asked = json.loads(run("privacy", "a", "--json").out)
    assert asked["views"] == said["views"]


def test_a_secret_run_keeps_its_own_budget_after_a_crash(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, steps=1)
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a", epsilon=4.0, delta=DELTA, noise="secure")
    monkeypatch.undo()
    options = {"epsilon": 4.0, "delta": DELTA, "noise": "secure"}
    training = resumed(recipe, blobs, tmp_path / "a", **options)
    with pytest.raises(BudgetError, match="with 3 rounds lost in a crash and drawn again") as end:
        finish(training)
    assert len(end.value.result.records) == 5
    assert 3.9 < end.value.result.guarantee.epsilon <= 4.0
    assert training.charge().drawn == 8


def test_a_secret_run_without_its_ledger_json_is_not_resumed(
    blobs: Federated, tmp_path: Path
) -> None:
    train(RECIPE, blobs, rounds=8, noise="secure", save=tmp_path / "a")
    (tmp_path / "a" / "ledger.json").unlink()
    with pytest.raises(UserError, match=r"ledger\.json is missing"):
        resumed(RECIPE, blobs, tmp_path / "a", noise="secure")


# Ledgers that do not fit


def test_a_run_notices_that_its_ledger_was_rolled_back(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Database and head together, as from a backup of the whole directory."""
    train(RECIPE, blobs, rounds=8, save=tmp_path / "first")
    shutil.copytree(ledger.parent, tmp_path / "backup")
    crashed(monkeypatch, Session, "commit", 6)
    begun(RECIPE, blobs, tmp_path / "a", seed=1)
    monkeypatch.undo()
    shutil.rmtree(ledger.parent)
    shutil.copytree(tmp_path / "backup", ledger.parent)
    with pytest.raises(
        UserError, match=r"an old copy has replaced the ledger\. Restore the newest"
    ):
        resumed(RECIPE, blobs, tmp_path / "a", seed=1)


def test_a_run_is_not_resumed_with_another_ledger(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(RECIPE, blobs, rounds=8, save=tmp_path / "a")
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"does not exist\. Restore the ledger"):
        resumed(RECIPE, blobs, tmp_path / "a")
    open_ledger(tmp_path / "other").close()
    with pytest.raises(UserError, match=r"is another one\. Name the right one"):
        resumed(RECIPE, blobs, tmp_path / "a")
    monkeypatch.delenv("FEDVEIL_LEDGER")
    assert resumed(RECIPE, blobs, tmp_path / "a").finished  # it knows where its ledger was


def test_on_a_budget_a_state_that_is_not_the_released_one_does_not_go_on(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, books = Account(blobs.fingerprint(), "client"), open_ledger(ledger)
    books.grant(account, "models", Budget(50.0, DELTA), "blobs", blobs.contents())
    crashed(monkeypatch, Session, "commit", 6)
    begun(RECIPE, blobs, tmp_path / "a")
    monkeypatch.undo()
    directory = RunDirectory.open(tmp_path / "a")
    fresh = prepare(RECIPE, blobs, rounds=8)
    state = SavedRun(directory.path).state(fresh.state, fresh.spec.identity)
    directory.save_checkpoint(replace(state, x=state.x + 1), fresh.spec.identity)
    with pytest.raises(UserError, match="Round 3 of dp_fedavg was released before with other"):
        resumed(RECIPE, blobs, tmp_path / "a")


def test_a_round_played_again_with_other_arithmetic_is_not_published_on_a_budget(
    blobs: Federated, ledger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, books = Account(blobs.fingerprint(), "client"), open_ledger(ledger)
    books.grant(account, "models", Budget(50.0, DELTA), "blobs", blobs.contents())
    crashed(monkeypatch, Session, "commit", 6)
    begun(RECIPE, blobs, tmp_path / "a")
    monkeypatch.undo()
    real = work.run_round

    def other(recipe: Recipe, state: Any, *rest: Any) -> Any:
        after, info = real(recipe, state, *rest)
        return replace(after, x=after.x * (1 + 1e-7)), info

    monkeypatch.setattr(work, "run_round", other)
    training = resumed(RECIPE, blobs, tmp_path / "a")
    with pytest.raises(UserError, match="Round 4 of dp_fedavg was released before with other"):
        training.step()
    assert training.state.round == 3


# Directories


def test_a_run_s_directory_is_its_owner_s_alone(blobs: Federated, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    for place in ("new", "there"):
        train(RECIPE, blobs, rounds=1, save=tmp_path / place)
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o700
    fresh = RunDirectory.fresh(tmp_path / "runs", "x")
    assert fresh.path.stat().st_mode & 0o777 == 0o700


def test_two_processes_do_not_work_on_one_run(blobs: Federated, tmp_path: Path) -> None:
    train(RECIPE, blobs, rounds=8, save=tmp_path / "a")
    one = RunDirectory.open(tmp_path / "a")
    one.claim()
    with pytest.raises(UserError, match="is in use by another process"):
        resumed(RECIPE, blobs, tmp_path / "a")
    one.release()
    assert resumed(RECIPE, blobs, tmp_path / "a").finished


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "memory-2.npy"])
def test_a_checkpoint_with_a_changed_bit_is_refused(
    blobs: Federated, private_recipe: Recipe, tmp_path: Path, name: str
) -> None:
    """Its length and its header are as they were."""
    recipe = private_recipe.with_noise(9.0, 18, 12, 1.0, DELTA)
    train(recipe, blobs, rounds=2, save=tmp_path / "a")
    path = tmp_path / "a" / name
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="was changed or damaged"):
        resume(prepare(recipe, blobs, rounds=2), tmp_path / "a")


FILES = ("checkpoint.safetensors", "memory-3.npy", "metrics.parquet", "ledger.json")


@pytest.mark.parametrize("name", FILES)
def test_a_run_with_a_file_cut_short_is_refused(
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    books: Callable[[], Ledger],
) -> None:
    """At each length; and the ledger charges nothing twice and forgets nothing."""
    recipe = algorithms.fed_alpha_normec(0.5, 0.5, 0.1).with_noise(9.0, 18, 12, 1.0, DELTA)
    crashed(monkeypatch, Session, "commit", 6)
    begun(recipe, blobs, tmp_path / "a")
    monkeypatch.undo()
    account = Account(blobs.fingerprint(), "client")
    before = books().spent(account, "models", DELTA)
    size = (tmp_path / "a" / name).stat().st_size
    refusals = 0
    for length in (0, 1, 7, 8, 9, size // 4, size // 2, size - 9, size - 8, size - 2, size - 1):
        shutil.copytree(tmp_path / "a", tmp_path / str(length))
        os.truncate(tmp_path / str(length) / name, length)
        try:
            resumed(recipe, blobs, tmp_path / str(length))
        except UserError:
            refusals += 1
        assert books().spent(account, "models", DELTA) == before
    assert refusals >= 10  # a missing last newline is no loss
    assert resumed(recipe, blobs, tmp_path / "a").state.round == 3


def test_a_run_whose_settings_are_cut_short_goes_on_as_it_was_or_not_at_all(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Path
) -> None:
    flags = ("--dataset", "digits", "--clients", 20, "--rounds", 8, "--checkpoint-every", 3)
    noisy = ("--algorithm", "dp_fedavg", "--noise-multiplier", 3.0, "--set", "rate=0.5")
    noisy = (*noisy, "--engine", "dense")  # which engine is quickest is not tried again each time
    assert run("train", *flags, *noisy, "--out", "whole", "--ledger", "other").code == 0
    crashed(monkeypatch, Session, "commit", 6)
    with pytest.raises(Crash):
        run("train", *flags, *noisy, "--out", "a")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    settings = (tmp_path / "a" / "recipe.toml").read_text()
    lines = [len("".join(settings.splitlines(True)[:k])) for k in range(settings.count("\n"))]
    codes = []
    for length in (1, *lines[::12], *(line - 2 for line in lines[1::12]), len(settings) - 1):
        shutil.copytree(tmp_path / "a", tmp_path / f"a{length}")
        (tmp_path / f"a{length}" / "recipe.toml").write_text(settings[:length])
        codes.append(run("train", "--resume", f"a{length}").code)
    assert set(codes) == {0, 2}
    kept = files(tmp_path / f"a{len(settings) - 1}")
    assert kept["model.safetensors"] == files(tmp_path / "whole")["model.safetensors"]
    (stream,) = Ledger(ledger).streams.values()
    assert len(stream.rounds) == 8


@pytest.mark.parametrize("harm", [b"", b"{", b"[]", b'{"ledger": "a"}', b'{"position": "x"}'])
def test_a_broken_ledger_json_is_one_sentence(
    blobs: Federated, tmp_path: Path, harm: bytes
) -> None:
    train(RECIPE, blobs, rounds=8, save=tmp_path / "a")
    (tmp_path / "a" / "ledger.json").write_bytes(harm)
    with pytest.raises(UserError, match=r"ledger\.json is damaged"):
        resumed(RECIPE, blobs, tmp_path / "a")


# Disks


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["ledger", "head", "run"])
def test_a_full_disk_ends_a_run_that_can_go_on_later(
    where: str,
    blobs: Federated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    books: Callable[[], Ledger],
) -> None:
    train(RECIPE, blobs, rounds=8, checkpoint_every=3, save=tmp_path / "whole", seed=0)
    owner, name = {"ledger": (Chain, "add"), "head": (Anchor, "write"), "run": (Path, "replace")}[
        where
    ]
    left, real = [12], getattr(owner, name)

    def until_full(*given: Any) -> Any:
        left[0] -= 1
        return full() if left[0] < 0 else real(*given)

    monkeypatch.setattr(owner, name, until_full)
    with pytest.raises(UserError, match="No space left on device"):
        train(RECIPE, blobs, rounds=8, checkpoint_every=3, save=tmp_path / "a", seed=1)
    monkeypatch.undo()
    played = books().spent(Account(blobs.fingerprint(), "client"), "models", DELTA)
    training = resumed(RECIPE, blobs, tmp_path / "a", seed=1)
    finish(training)
    after = books().spent(Account(blobs.fingerprint(), "client"), "models", DELTA)
    assert 0 < played <= after < float("inf")
    assert verify(books()).problems == []
    train(RECIPE, blobs, rounds=8, checkpoint_every=3, save=tmp_path / "again", seed=1)
    assert files(tmp_path / "a") == files(tmp_path / "again")


def test_time_that_jumps_changes_neither_model_nor_epsilon(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which engine `auto` takes is a matter of time, so one is named."""
    import time

    train(RECIPE, blobs, rounds=8, engine="dense", save=tmp_path / "a")
    jumps = iter(range(10**9, 0, -(10**5)))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(jumps)))
    monkeypatch.setattr("fedveil.ledger.session.now", lambda: f"{next(jumps)} after Christ")
    train(RECIPE, blobs, rounds=8, engine="dense", save=tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_recorded_run_publishes_nothing_before_it_is_reserved(
    blobs: Federated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """reserve → draw → publish → commit, for each round in turn."""
    seen: list[str] = []

    def noted(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def wrapped(*given: Any) -> Any:
            seen.append(word)
            return real(*given)

        monkeypatch.setattr(owner, name, wrapped)

    noted(Session, "reserve", "reserve")
    noted(work, "run_round", "draw")
    noted(Training, "_record", "publish")
    noted(Session, "commit", "commit")
    train(RECIPE, blobs, rounds=2, save=tmp_path / "a", watch=lambda *_: seen.append("watch"))
    assert seen == ["reserve", "draw", "publish", "commit", "watch"] * 2
    assert torch.isfinite(prepare(RECIPE, blobs, rounds=1).state.x).all()
