"""SavedRun: the only reader of a run's directory.

Each file is read once, on first use. A file that is missing, damaged or written by a newer version
is refused with an error that names it.
"""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError
from fedveil.serialization.versions import refuse_newer

if TYPE_CHECKING:
    from polars import DataFrame
    from torch import Tensor

    from fedveil.data.encoding import TableEncoder
    from fedveil.loop import State

RECIPE = "recipe.toml"
METRICS = "metrics.parquet"
OLD_COLUMNS = {"shrunk": "clipped_fraction", "void": "aborted"}  # in metrics of version 0.1
CLIENTS = "clients.parquet"
MODEL = "model.safetensors"
SUMMARY = "summary.json"
STATEMENT = "privacy.txt"
CHECKPOINT = "checkpoint.safetensors"
TRACE = "ledger.json"
ENCODER = "encoder.json"
EVALUATION = "evaluation.json"
ENGINE = "engine.json"
MEMORY = "memory-*.npy"  # client memory, by round
FILES = (
    RECIPE, METRICS, CLIENTS, MODEL, SUMMARY, STATEMENT, CHECKPOINT, TRACE, ENCODER, EVALUATION,
    ENGINE,
)  # fmt: skip
PARQUET = b"PAR1"  # the first and last bytes of a Parquet file


class SavedRun:
    """The directory of one run, for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> SavedRun:
        """Open the run in a directory. A directory without a run is refused."""
        if not path.exists():
            raise UserError(f"There is no directory {path}. Name the directory of a run.")
        if path.is_file():
            inside = (path.parent / RECIPE).is_file()
            right = f"'{path.parent}', the directory" if inside else "the directory"
            raise UserError(f"{path} is a file. Name {right} of a run.")
        run = cls(path)
        if not run.has(RECIPE):
            raise UserError(
                f"{path} is not a run, because it has no {RECIPE}. Name the directory of a run."
            )
        return run

    def file(self, name: str) -> Path:
        """The path of a file of the run, which may not exist."""
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether a file exists."""
        return self.file(name).is_file()

    @property
    def ended(self) -> bool:
        """Whether the run has written its summary, after all of its rounds or fewer."""
        return self.has(SUMMARY)

    @cached_property
    def toml(self) -> str:
        """recipe.toml as text."""
        with reading(self.file(RECIPE)):
            return self.file(RECIPE).read_text(encoding="utf-8")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """recipe.toml as plain values."""
        with reading(self.file(RECIPE)):
            settings = tomllib.loads(self.toml)
            refuse_newer(self.file(RECIPE), settings.get("fedveil"))
            return settings

    @property
    def names_data(self) -> bool:
        """Whether the settings name the data. A run from Python may have been given them."""
        data = self.settings.get("data", {})
        return bool(data.get("dataset") or data.get("path"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json of a run that has ended."""
        self._require_ended(SUMMARY)
        with reading(self.file(SUMMARY)):
            summary: dict[str, Any] = self._json(SUMMARY)
            refuse_newer(self.file(SUMMARY), summary.get("versions", {}).get("fedveil"))
            return summary

    @cached_property
    def statement(self) -> str:
        """privacy.txt; empty if the file is missing."""
        with reading(self.file(STATEMENT)):
            return self.file(STATEMENT).read_text(encoding="utf-8") if self.has(STATEMENT) else ""

    @cached_property
    def metrics(self) -> DataFrame | None:
        """metrics.parquet, one row per round; None if there is no such file yet."""
        import polars

        if not self.has(METRICS):
            return None
        with reading(self.file(METRICS)):
            return polars.read_parquet(self.file(METRICS)).rename(OLD_COLUMNS, strict=False)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.parquet; empty if there is no such file yet."""
        return [] if self.metrics is None else self.metrics.to_dicts()

    def clients(self, rounds: int | None = None) -> DataFrame | None:
        """clients.parquet, of the first `rounds` rounds or of all; None if not recorded."""
        import polars

        if not self.has(CLIENTS):
            return None
        with reading(self.file(CLIENTS)):
            if rounds is None:
                return polars.read_parquet(self.file(CLIENTS))
            few = polars.scan_parquet(self.file(CLIENTS)).filter(polars.col("round") <= rounds)
            return few.collect()

    @cached_property
    def evaluation(self) -> dict[str, Any] | None:
        """evaluation.json; None if not recorded."""
        if not self.has(EVALUATION):
            return None
        with reading(self.file(EVALUATION)):
            found: dict[str, Any] = self._json(EVALUATION)
            return found

    @cached_property
    def encoder(self) -> TableEncoder | None:
        """encoder.json; None for a run that was not trained on a table."""
        from fedveil.data.encoding import TableEncoder

        if not self.has(ENCODER):
            return None
        with reading(self.file(ENCODER)):
            return TableEncoder.from_json(self.file(ENCODER))

    @property
    def trace(self) -> dict[str, Any] | None:
        """ledger.json: the ledger that records the run, and its position; None if not recorded."""
        if not self.has(TRACE):
            return None
        with reading(self.file(TRACE)):
            trace = self._json(TRACE)
            if not isinstance(trace["position"], int):
                raise ValueError("its position is not a number")
            return {name: trace[name] for name in ("ledger", "path", "run", "position", "hash")}

    @property
    def engine(self) -> tuple[str, str] | None:
        """The engine of the run and the reason for it; None if not recorded."""
        if not self.has(ENGINE):
            return None
        with reading(self.file(ENGINE)):
            plain = self._json(ENGINE)
            return str(plain["engine"]), str(plain["reason"])

    @property
    def rounds(self) -> int:
        """The number of rounds in the checkpoint; 0 without one."""
        from safetensors import safe_open

        if not self.has(CHECKPOINT):
            return 0
        file = self.file(CHECKPOINT)
        with reading(file), safe_open(file, framework="pt") as tensors:
            return int(json.loads((tensors.metadata() or {})["facts"])["round"])

    def state(self, first: State, identity: str = "") -> State:
        """The state in the checkpoint, with the shapes of `first`. Another run's is refused."""
        from fedveil.runs.states import (
            OLD_NAMES,
            digest_of,
            file_digest,
            refuse_unfit,
            state_of,
            tensors_of,
        )

        path = self.file(CHECKPOINT)
        if not self.has(CHECKPOINT):
            raise UserError(
                f"{self.path} has no {CHECKPOINT}, so it cannot be resumed. Start a new run."
            )
        tensors, metadata = _tensors(path)
        with reading(path):
            facts = json.loads(metadata["facts"])
            round = int(facts["round"])
        if facts.get("identity", "") != identity:
            raise UserError(
                f"{path} belongs to another recipe, model or data, to private evaluations after "
                "other rounds, or was written by another version of fedveil, so resuming would "
                "miscount the privacy already spent. Undo the change. If there was none, use the "
                f"installation that started the run (fedveil {self.settings.get('fedveil')}; two "
                "development versions may have this number), or start a new run."
            )
        digest, memory = digest_of(tensors), self.file(memory_name(round))
        tensors = {OLD_NAMES.get(name, name): leaf for name, leaf in tensors.items()}
        refuse_unfit(path, tensors_of(first), tensors)
        with reading(memory):
            digest += "" if first.memory is None else file_digest(memory)
        if facts.get("digest", digest) != digest:
            raise UserError(
                f"{path} or its {memory.name} was changed or damaged after it was written. Restore "
                "it from a backup, or start a new run."
            )
        if first.memory is not None:
            with reading(memory):
                first.memory.restore(memory)
        return state_of(first, round, tensors)

    def model(self) -> tuple[dict[str, Tensor], str | None]:
        """The parameters of the model, and its interface, which earlier versions did not write."""
        self._require_ended(MODEL)
        tensors, metadata = _tensors(self.file(MODEL))
        return tensors, metadata.get("facts")

    def refuse_damaged(self) -> None:
        """Refuse a run that ended with broken metrics or model; reads only their ends."""
        from safetensors import safe_open

        metrics, model = self.file(METRICS), self.file(MODEL)
        for file in (metrics, model):
            if not file.is_file():
                raise lost(file)
        with reading(metrics), metrics.open("rb") as bytes_:
            first = bytes_.read(len(PARQUET))
            bytes_.seek(-len(PARQUET), io.SEEK_END)
            if not first == bytes_.read() == PARQUET:
                raise ValueError("it is not a complete Parquet file")
        with reading(model), safe_open(model, framework="pt"):
            pass

    def _require_ended(self, name: str) -> None:
        if not self.has(name):
            raise UserError(
                f"{self.path} has no {name}, because the run has not ended. Resume it with "
                f"`fedveil train --resume {self.path}`."
            )

    def _json(self, name: str) -> Any:
        return json.loads(self.file(name).read_text(encoding="utf-8"))


def settings_file(target: Path) -> Path:
    """The settings file of a run's directory, or the file itself. Other directories are refused."""
    return SavedRun.open(target).file(RECIPE) if target.is_dir() else target


def memory_name(round: int) -> str:
    """The name of the file with the clients' memory after this round."""
    return MEMORY.replace("*", str(round))


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    from safetensors import safe_open

    with reading(path), safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata() or {}


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a failed read into an error that says which file, what is wrong, and what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:  # each format's library has its own kinds
        why = str(problem).strip().partition("\n")[0]
        again = "its settings" if path.name == RECIPE else f"the run's {RECIPE}"
        raise UserError(
            f"{path} is damaged ({type(problem).__name__}: {why}). Restore it from a backup, or "
            f"train again from {again}."
        ) from problem


def lost(file: Path) -> UserError:
    """The error for a missing file that the run must have written."""
    return UserError(
        f"{file.parent} has no {file.name}, so the run is incomplete. Restore the file from a "
        "backup, or train again from the run's recipe.toml."
    )
