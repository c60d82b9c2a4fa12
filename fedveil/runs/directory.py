"""A run's directory: recipe.toml, metrics.parquet, model.safetensors, summary.json, checkpoint.

Every file is written beside its place and moved there when complete, so a full disk or a stop
leaves the older file as it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.loop import State

CHECKPOINT = "checkpoint.safetensors"


class RunDirectory:
    """Where one run is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new directory at the path; one that is in use is left alone."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(
                f"{path} already holds something; choose another --out, or go on with "
                f"`fedveil train --resume {path}`."
            )
        with saving(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of an earlier run."""
        if not (path / "recipe.toml").is_file():
            raise UserError(f"{path} is not a run: it has no recipe.toml; name a run's directory.")
        return cls(path)

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """recipe.toml: everything needed to run it again."""
        import tomli_w

        self._write("recipe.toml", lambda path: path.write_text(tomli_w.dumps(settings)))

    def save_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        """metrics.parquet: a row for each round."""
        import polars

        frame = polars.DataFrame(list(records), infer_schema_length=None)
        self._write("metrics.parquet", frame.write_parquet)

    def load_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.parquet; none when there is no such file yet."""
        import polars

        path = self.path / "metrics.parquet"
        return polars.read_parquet(path).to_dicts() if path.is_file() else []

    def save_model(self, parameters: Mapping[str, Tensor]) -> None:
        """model.safetensors: named parameters, as the module's state_dict has them."""
        from safetensors.torch import save_file

        tensors = {name: leaf.contiguous().clone() for name, leaf in parameters.items()}
        self._write("model.safetensors", lambda path: save_file(tensors, path))

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json: the result and its guarantee."""
        text = json.dumps(summary, indent=2, ensure_ascii=False) + "\n"
        self._write("summary.json", lambda path: path.write_text(text))

    def save_checkpoint(self, state: State) -> None:
        """checkpoint.safetensors, after the client memory it refers to."""
        from safetensors.torch import save_file

        if state.memory is not None:
            with saving(self.path):
                state.memory.save(self._memory(state.round))
        tensors = {name: leaf.contiguous().clone() for name, leaf in _tensors(state).items()}
        round = {"round": str(state.round)}
        self._write(CHECKPOINT, lambda path: save_file(tensors, path, metadata=round))
        for old in self.path.glob("memory-*.npy"):
            if old != self._memory(state.round):
                old.unlink()

    def load_checkpoint(self, state: State) -> State:
        """The saved state, in the shape of a run's first one."""
        from safetensors import safe_open

        path = self.path / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{self.path} has no {CHECKPOINT}, so it cannot go on; train anew.")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            round = int(file.metadata()["round"])
        _check_shapes(path, _tensors(state), tensors)
        if state.memory is not None:
            state.memory.restore(self._memory(round))
        return State(
            round=round,
            x=tensors["x"],
            server=_under(tensors, "server."),
            output=_under(tensors, "output."),
            direction=tensors.get("direction"),
            memory=state.memory,
        )

    def _memory(self, round: int) -> Path:
        return self.path / f"memory-{round}.npy"

    def _write(self, name: str, write: Callable[[Path], Any]) -> None:
        partial = self.path / f".{name}.partial"
        with saving(self.path):
            try:
                write(partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(self.path / name)
            finally:
                partial.unlink(missing_ok=True)


def fresh_name(base: Path, label: str) -> Path:
    """A path under base that is not taken: label-1, label-2, …"""
    number = 1
    while (base / f"{label}-{number}").exists():
        number += 1
    return base / f"{label}-{number}"


class saving:  # noqa: N801 - reads as a verb: with saving(path)
    """Turn a failed write into a sentence: what could not be saved, why, and what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        if isinstance(problem, OSError) or type(problem).__name__ == "SafetensorError":
            why = getattr(problem, "strerror", None) or str(problem)
            raise UserError(
                f"Could not save to {self.path}: {why}; what was saved before is still there. "
                "Free some space or choose another --out."
            ) from problem


def _tensors(state: State) -> dict[str, Tensor]:
    named = {"x": state.x}
    named |= {f"server.{name}": leaf for name, leaf in state.server.items()}
    named |= {f"output.{name}": leaf for name, leaf in state.output.items()}
    return named | ({"direction": state.direction} if state.direction is not None else {})


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): leaf for k, leaf in tensors.items() if k.startswith(prefix)}


def _check_shapes(path: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name, leaf in wanted.items():
        shape = found[name].shape if name in found else None
        if shape != leaf.shape or not bool(torch.isfinite(found[name].double()).all()):
            raise UserError(
                f"{path} does not fit this run: '{name}' is {shape}, not {tuple(leaf.shape)} "
                "finite numbers; resume with the recipe and the model it was saved from."
            )
