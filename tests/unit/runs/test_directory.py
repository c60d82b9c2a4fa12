from __future__ import annotations

import dataclasses
import json
import os
import shutil
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.loop import State
from fedveil.parts.memory import ClientMemory
from fedveil.recipe import Recipe
from fedveil.runs.directory import RunDirectory, refuse_taken
from fedveil.runs.saved import CHECKPOINT, SavedRun
from fedveil.runs.states import OLD_NAMES, digest_of, tensors_of
from fedveil.training.settings import DataSettings, Settings, from_settings
from fedveil.training.start import finish, start, train

FULL = Path("/dev/full")


def state(round: int = 4, memory: ClientMemory | None = None) -> State:
    return State(
        round=round,
        x=torch.arange(3.0) + round,
        parts={
            "server": {"momentum": torch.ones(3)},
            "output": {"model": torch.zeros(3), "chosen": torch.tensor(2)},
            "memory": {"direction": torch.full((3,), 0.5)},
            "bound": {"threshold": torch.tensor([0.25 + round]).double()},
            "cohort": {"taken": torch.tensor([2, 0, round])},
        },
        memory=memory,
        moved=torch.full((3,), -1.5),
    )


def assert_equal(left: State, right: State) -> None:
    """In every field but the memory, which is compared where it is kept."""
    for field in dataclasses.fields(State):
        mine, other = getattr(left, field.name), getattr(right, field.name)
        if field.name == "memory":
            continue
        assert mine is not None, f"{field.name} is empty: nothing was compared"
        pairs, others = (
            {(slot, name): leaf for slot, kept in one.items() for name, leaf in kept.items()}
            if isinstance(one, dict)
            else {"": one}
            for one in (mine, other)
        )
        assert pairs.keys() == others.keys()
        for name, leaf in pairs.items():
            torch.testing.assert_close(leaf, others[name], rtol=0, atol=0)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def test_a_checkpoint_comes_back(directory: RunDirectory) -> None:
    directory.save_checkpoint(state())
    assert_equal(SavedRun(directory.path).state(state(0)), state())


def test_a_checkpoint_of_version_0_1_comes_back(directory: RunDirectory) -> None:
    """It named what is now kept by part otherwise, and digested those names."""
    older = {new: old for old, new in OLD_NAMES.items()}
    tensors = {older.get(name, name): leaf for name, leaf in tensors_of(state()).items()}
    assert {"direction", "threshold", "taken", "server.momentum"} <= tensors.keys()
    facts = {"round": 4, "identity": "", "digest": digest_of(tensors)}
    save_file(tensors, directory.path / CHECKPOINT, {"facts": json.dumps(facts)})
    assert_equal(SavedRun(directory.path).state(state(0)), state())


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_client_memory_comes_back(directory: RunDirectory, share: float) -> None:
    """From RAM and from a memory-mapped file, which a share of 0 forces."""
    memory, fresh = ClientMemory(4, 3, share), ClientMemory(4, 3, share)
    memory[np.array([1, 3])] = torch.arange(6.0).reshape(2, 3)
    assert memory.mapped == (share == 0.0)
    directory.save_checkpoint(state(7, memory))
    restored = SavedRun(directory.path).state(state(0, fresh)).memory
    assert restored is fresh
    assert torch.equal(restored[np.arange(4)], memory[np.arange(4)])
    assert restored[np.array([3])].tolist() == [[3.0, 4.0, 5.0]]


def test_only_the_newest_memory_is_kept(directory: RunDirectory) -> None:
    for round in (2, 5):
        directory.save_checkpoint(state(round, ClientMemory(4, 3)))
    names = {file.name for file in directory.path.iterdir()}
    assert names == {"checkpoint.safetensors", "memory-5.npy"}


def test_a_memory_mapped_run_equals_one_in_ram(
    blobs: Federated, private_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = private_recipe.with_noise(1.0, 18, 12, 1.0, 1e-5)
    in_ram = train(recipe, blobs, rounds=4, save=tmp_path / "a")
    made: list[ClientMemory] = []

    def mapped(clients: int, dim: int) -> ClientMemory:
        made.append(ClientMemory(clients, dim, ram_share=1e-12))
        return made[-1]

    monkeypatch.setattr("fedveil.loop.ClientMemory", mapped)
    in_file = train(recipe, blobs, rounds=4, save=tmp_path / "b")
    assert made[0].mapped
    for name in ("model.safetensors", "checkpoint.safetensors", "memory-4.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert in_ram.loss == in_file.loss


# Broken files


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def scramble(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 100)


BROKEN: dict[str, tuple[str, Callable[[Path], None]]] = {
    "a checkpoint cut short": ("checkpoint.safetensors", cut),
    "a checkpoint of noise": ("checkpoint.safetensors", scramble),
    "an empty checkpoint": ("checkpoint.safetensors", lambda path: path.write_bytes(b"") and None),
    "no checkpoint": ("checkpoint.safetensors", Path.unlink),
    "memory cut short": ("memory-2.npy", cut),
    "memory of noise": ("memory-2.npy", scramble),
    "no memory": ("memory-2.npy", Path.unlink),
    "metrics cut short": ("metrics.parquet", cut),
    "no metrics": ("metrics.parquet", Path.unlink),
    "metrics of other columns": (
        "metrics.parquet",
        lambda path: pl.DataFrame({"round": [1, 2], "luck": [0, 0]}).write_parquet(path),
    ),
    "metrics that miss a round": (
        "metrics.parquet",
        lambda path: pl.read_parquet(path).head(1).write_parquet(path),
    ),
    "a recipe cut short": ("recipe.toml", cut),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds with a memory, which nobody changes."""
    path = tmp_path_factory.mktemp("whole") / "a"
    settings = Settings(
        algorithm="fed_alpha_normec",
        parameters={"noise_multiplier": 1.0},
        rounds=2,
        data=DataSettings(dataset="digits", clients=5),
    )
    finish(start(from_settings(settings), path))
    return path


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_sentence_that_names_it(
    name: str, refused: Callable[..., str], whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path / "a")
    file, harm = BROKEN[name]
    harm(tmp_path / "a" / file)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert file in refused("train", "--resume", "a")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before


def test_a_checkpoint_of_another_model_is_refused(directory: RunDirectory) -> None:
    directory.save_checkpoint(state())
    other = state()
    other.x = torch.zeros(5)
    with pytest.raises(UserError, match="does not fit this run: 'x'"):
        SavedRun(directory.path).state(other)


def test_a_checkpoint_that_is_not_finite_is_refused(directory: RunDirectory) -> None:
    broken = state()
    broken.x[1] = torch.nan
    directory.save_checkpoint(broken)
    with pytest.raises(UserError, match="finite"):
        SavedRun(directory.path).state(state())


def test_a_state_of_another_shape_or_name_is_refused(directory: RunDirectory) -> None:
    directory.save_checkpoint(state())
    other = state()
    other.parts = {**other.parts, "server": {"m": torch.zeros(2)}}
    with pytest.raises(UserError, match=r"'server.m' has no tensor, but must have \(2,\)"):
        SavedRun(directory.path).state(other)
    other.x = torch.zeros(5)
    with pytest.raises(UserError, match=r"'x' has the shape \(3,\), but must have \(5,\)\. Resume"):
        SavedRun(directory.path).state(other)


def test_a_part_s_state_need_not_be_finite(directory: RunDirectory) -> None:
    saved = state()
    saved.parts = {**saved.parts, "server": {"least": torch.tensor(torch.inf)}}
    directory.save_checkpoint(saved)
    assert SavedRun(directory.path).state(saved).parts["server"]["least"] == torch.inf


def test_a_memory_of_other_clients_is_refused(directory: RunDirectory) -> None:
    directory.save_checkpoint(state(4, ClientMemory(4, 3)))
    with pytest.raises(UserError, match="shape"):
        SavedRun(directory.path).state(state(0, ClientMemory(5, 3)))


# Disks


SAVES: dict[str, Callable[[RunDirectory], None]] = {
    "recipe.toml": lambda run: run.save_settings({"seed": 1}),
    "metrics.parquet": lambda run: run.save_metrics([{"round": 1}]),
    "model.safetensors": lambda run: run.save_model({"w": torch.ones(2)}),
    "summary.json": lambda run: run.save_summary({"loss": 1.0}),
    "checkpoint.safetensors": lambda run: run.save_checkpoint(state()),
    "memory-4.npy": lambda run: run.save_checkpoint(state(4, ClientMemory(4, 3))),
}


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
@pytest.mark.parametrize("name", SAVES)
def test_a_full_disk_leaves_the_older_file(directory: RunDirectory, name: str) -> None:
    SAVES[name](directory)
    before = (directory.path / name).read_bytes()
    (directory.path / f".{name}.partial").symlink_to(FULL)
    with pytest.raises(UserError, match=r"No space left on device\. Files saved earlier are"):
        SAVES[name](directory)
    assert (directory.path / name).read_bytes() == before
    assert not list(directory.path.glob("*partial*"))


@pytest.mark.parametrize("name", SAVES)
def test_all_files_can_be_read_by_the_same_people(directory: RunDirectory, name: str) -> None:
    SAVES[name](directory)
    (directory.path / "other").touch()
    modes = [os.stat(directory.path / file).st_mode for file in (name, "other")]
    assert modes[0] == modes[1]


def test_files_are_utf8_whatever_the_locale(directory: RunDirectory) -> None:
    directory.save_settings({"model": "ε"})
    directory.save_summary({"sentence": "δ"})
    settings = (directory.path / "recipe.toml").read_bytes()
    assert tomllib.loads(settings.decode("utf-8")) == {"model": "ε"}
    assert json.loads((directory.path / "summary.json").read_bytes()) == {"sentence": "δ"}


def test_a_run_without_rounds_has_metrics_without_rows(directory: RunDirectory) -> None:
    assert SavedRun(directory.path).rows == []
    directory.save_metrics([])
    assert SavedRun(directory.path).rows == []


# Places


def test_an_empty_directory_is_free_and_one_in_use_is_not(tmp_path: Path) -> None:
    refuse_taken(tmp_path)
    RunDirectory.create(tmp_path).save_settings({})
    with pytest.raises(UserError, match="is not empty"):
        RunDirectory.create(tmp_path)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="Could not save"):
        RunDirectory.create(tmp_path / "link")


def test_a_name_cannot_lead_elsewhere(tmp_path: Path) -> None:
    made = RunDirectory.fresh(tmp_path / "runs", "../../a b/[x]")
    assert made.path.parent == tmp_path / "runs"
    assert made.path.name == "-a-b-x--1"


def test_runs_that_start_at_once_do_not_share_a_directory(tmp_path: Path) -> None:
    made: list[Path] = []
    start = threading.Barrier(8)

    def make() -> None:
        start.wait()
        made.append(RunDirectory.fresh(tmp_path / "runs", "x").path)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {path.name for path in made} == {f"x-{number}" for number in range(1, 9)}


def test_where_runs_is_a_file_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="Could not save"):
        RunDirectory.fresh(tmp_path / "runs", "x")
