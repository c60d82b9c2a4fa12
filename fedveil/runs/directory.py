"""A run's directory: recipe.toml, metrics.parquet, model.safetensors, summary.json, checkpoint.

Every file is written beside its place and moved there when complete, so a full disk or a stop
leaves the older file as it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.loop import State
from fedveil.runs.versions import refuse_newer

CHECKPOINT = "checkpoint.safetensors"
MODEL = "model.safetensors"
TRACE = "ledger.json"
ENGINE = "engine.json"
EVALUATION = "evaluation.json"
MODE = 0o700  # a run's directory holds private data: norms, client memory, who took part


class RunDirectory:
    """Where one run is kept."""

    def __init__(self, path: Path) -> None:
        self._claim: int | None = None
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A new directory at the path; one that is in use is left alone."""
        refuse_taken(path)
        with saving(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(MODE)
        return cls(path)

    @classmethod
    def fresh(cls, base: Path, label: str) -> RunDirectory:
        """A new directory under base: label-1, label-2, …, the first that nobody has taken."""
        name = re.sub(r"[^\w-]+", "-", label)  # a recipe's name is free text
        with saving(base):
            for number in itertools.count(1):
                path = base / f"{name}-{number}"
                if _made(path):
                    break
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of an earlier run."""
        if not path.exists():
            raise UserError(f"There is no directory {path}; name a run's directory.")
        if not (path / "recipe.toml").is_file():
            raise UserError(f"{path} is not a run: it has no recipe.toml; name a run's directory.")
        return cls(path)

    def claim(self) -> None:
        """Be the only process at work here, until `release` or the end of the process."""
        if self._claim is not None:
            return
        with saving(self.path):
            self._claim = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            self.release()
            raise UserError(
                f"Another process is at work on {self.path}; wait for it to end, or end it."
            ) from problem
        except OSError:  # a file system that cannot lock directories
            return
        with saving(self.path):
            for left in self.path.glob(".*.partial"):  # by a process that was killed
                left.unlink()

    def release(self) -> None:
        """Let others work here."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def __del__(self) -> None:
        self.release()

    def save_trace(self, trace: Mapping[str, Any]) -> None:
        """ledger.json: which ledger knows this run, and how far it had come."""
        self._save(TRACE, (json.dumps(trace, indent=2) + "\n").encode())

    def load_trace(self) -> dict[str, Any] | None:
        """ledger.json; None for a run that was not recorded."""
        path = self.path / TRACE
        if not path.is_file():
            return None
        with reading(path):
            trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(trace["position"], int):
                raise ValueError("its position is no number")
            return {name: trace[name] for name in ("ledger", "path", "run", "position", "hash")}

    def save_engine(self, name: str, reason: str) -> None:
        """engine.json: what computed the run. Sizes and timings decided it, so it is private."""
        text = json.dumps({"engine": name, "reason": reason}, indent=2) + "\n"
        self._save(ENGINE, text.encode())

    def load_engine(self) -> tuple[str, str] | None:
        """Engine and reason; None for a run that does not say."""
        path = self.path / ENGINE
        if not path.is_file():
            return None
        with reading(path):
            plain = json.loads(path.read_text(encoding="utf-8"))
            return str(plain["engine"]), str(plain["reason"])

    def has_checkpoint(self) -> bool:
        """Whether there is one."""
        return (self.path / CHECKPOINT).is_file()

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """recipe.toml: everything needed to run it again."""
        import tomli_w

        self._save("recipe.toml", tomli_w.dumps(settings).encode())

    def save_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        """metrics.parquet: a row for each round."""
        import polars

        sink = io.BytesIO()
        polars.DataFrame(list(records), infer_schema_length=None).write_parquet(sink)
        self._save("metrics.parquet", sink.getvalue())

    def load_metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.parquet; none when there is no such file yet."""
        import polars

        path = self.path / "metrics.parquet"
        if not path.is_file():
            return []
        with reading(path):
            return polars.read_parquet(path).to_dicts()

    def save_model(self, parameters: Mapping[str, Tensor], facts: str | None = None) -> None:
        """model.safetensors: named parameters, as the module's state_dict has them, and facts."""
        self._save_tensors(MODEL, parameters, None if facts is None else {"facts": facts})

    def load_model(self) -> tuple[dict[str, Tensor], str | None]:
        """The parameters and facts that `save_model` wrote; earlier versions wrote no facts."""
        from safetensors import safe_open

        path = self.path / MODEL
        if not path.is_file():
            raise UserError(
                f"{self.path} has no {MODEL} yet: the run has not ended; go on with it by "
                f"`fedveil train --resume {self.path}`."
            )
        with reading(path), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, (file.metadata() or {}).get("facts")

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json: the result and its guarantee."""
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._save("summary.json", text.encode())

    def save_statement(self, text: str) -> None:
        """privacy.txt: the privacy statement, as a page to read."""
        self._save("privacy.txt", text.encode())

    def save_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """evaluation.json: confusion and clients' accuracy, which are private data."""
        text = json.dumps(evaluation, ensure_ascii=False, allow_nan=False) + "\n"
        self._save(EVALUATION, text.encode())

    def load_summary(self) -> dict[str, Any]:
        """summary.json of a run that has ended."""
        path = self.path / "summary.json"
        if not path.is_file():
            raise UserError(
                f"{self.path} has no summary.json yet: the run has not ended; go on with it by "
                f"`fedveil train --resume {self.path}`."
            )
        with reading(path):
            summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            refuse_newer(path, summary.get("versions", {}).get("fedveil"))
            return summary

    def forget_results(self) -> None:
        """Remove what an earlier stop concluded."""
        with saving(self.path):
            for name in ("summary.json", "privacy.txt", MODEL, EVALUATION):
                (self.path / name).unlink(missing_ok=True)

    def rounds_played(self) -> int:
        """As the checkpoint has it; 0 without one."""
        from safetensors import safe_open

        path = self.path / CHECKPOINT
        if not path.is_file():
            return 0
        with reading(path), safe_open(path, framework="pt") as file:
            return int(json.loads((file.metadata() or {})["facts"])["round"])

    def save_encoder(self, encoder: str) -> None:
        """encoder.json: how a table's rows become the model's inputs."""
        self._save("encoder.json", encoder.encode())

    def save_checkpoint(self, state: State, identity: str = "") -> None:
        """checkpoint.safetensors, after the client memory it refers to; `identity` is the run's."""
        if state.memory is not None:
            self.write(self._memory(state.round).name, state.memory.save)
        digest = _digest(_tensors(state))
        if state.memory is not None:
            digest += _file_digest(self._memory(state.round))
        # One entry, for the library writes several in any order, and equal runs give equal bytes.
        facts = json.dumps({"round": state.round, "identity": identity, "digest": digest})
        self._save_tensors(CHECKPOINT, _tensors(state), {"facts": facts})
        for old in self.path.glob("memory-*.npy"):
            if old != self._memory(state.round):
                old.unlink()

    def load_checkpoint(self, state: State, identity: str = "") -> State:
        """The saved state, in the shape of a run's first one; another run's is refused."""
        from safetensors import safe_open

        path = self.path / CHECKPOINT
        if not path.is_file():
            raise UserError(f"{self.path} has no {CHECKPOINT}, so it cannot go on; train anew.")
        with reading(path), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = json.loads((file.metadata() or {})["facts"])
            round = int(facts["round"])
        if facts.get("identity", "") != identity:
            raise UserError(
                f"{path} was not made by this recipe, model and data: what it has spent already "
                "would be miscounted; undo the change to recipe.toml or the data, or train anew."
            )
        _check_shapes(path, _tensors(state), tensors)
        digest = _digest(tensors)
        if state.memory is not None:
            with reading(self._memory(round)):
                digest += _file_digest(self._memory(round))
        if facts.get("digest", digest) != digest:
            raise UserError(
                f"{path} or its memory-{round}.npy is not as it was written: some of it was "
                "altered or lost; restore it from a copy, or train anew."
            )
        if state.memory is not None:
            with reading(self._memory(round)):
                state.memory.restore(self._memory(round))
        return State(
            round=round,
            x=tensors["x"],
            server=_under(tensors, "server."),
            output=_under(tensors, "output."),
            direction=tensors.get("direction"),
            memory=state.memory,
            threshold=tensors.get("threshold"),
            taken=tensors.get("taken"),
            moved=tensors.get("moved"),
        )

    def _memory(self, round: int) -> Path:
        return self.path / f"memory-{round}.npy"

    def _save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        from safetensors.torch import save

        own = {key: leaf.contiguous().clone() for key, leaf in tensors.items()}
        self._save(name, save(own, metadata))

    def _save(self, name: str, data: bytes) -> None:
        self.write(name, lambda path: path.write_bytes(data))

    def write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Have a file written beside its place, and move it there when it is complete."""
        partial = self.path / f".{name}.partial"
        with saving(self.path):
            try:
                write(partial)
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
                partial.replace(self.path / name)
                _sync(self.path)
            finally:
                partial.unlink(missing_ok=True)


def refuse_taken(path: Path) -> Path:
    """The path itself; refused where a run could not be saved without touching what is there."""
    with saving(path):
        taken = path.exists() and (not path.is_dir() or any(map(_kept, path.iterdir())))
    if taken:
        raise UserError(
            f"{path} already holds something; choose another --out, or go on with "
            f"`fedveil train --resume {path}`."
        )
    return path


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turn a failed write into a sentence: what could not be saved, why, and what to do."""
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"Could not save to {path}: {problem.strerror or problem}; what was saved before is "
            "still there, so free some space or choose another --out."
        ) from problem


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn a broken file of a run into a sentence: which one, what is wrong, and what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as problem:  # each format's library has its own kinds
        why = str(problem).strip().partition("\n")[0]
        raise UserError(
            f"{path} is not what a run saved ({type(problem).__name__}: {why}); "
            "restore it from a copy, or train anew from the run's recipe.toml."
        ) from problem


def lost(file: Path) -> UserError:
    """The sentence for a file that a run must have written and that is not there."""
    return UserError(
        f"{file.parent} has no {file.name}: some of the run was not written or was lost; restore "
        "it from a copy, or train anew from its recipe.toml."
    )


def _made(path: Path) -> bool:
    """Whether this call made the directory; two runs that start at once never share one."""
    try:
        path.mkdir(mode=MODE, parents=True)
    except FileExistsError:
        return False
    return True


def _kept(file: Path) -> bool:
    """Whether a file is more than what a killed process had not finished writing."""
    return not (file.name.startswith(".") and file.name.endswith(".partial"))


def _sync(directory: Path) -> None:
    """Make a new name in a directory outlast a power cut."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _tensors(state: State) -> dict[str, Tensor]:
    named = {"x": state.x}
    named |= {f"server.{name}": leaf for name, leaf in state.server.items()}
    named |= {f"output.{name}": leaf for name, leaf in state.output.items()}
    kept = {"direction": state.direction, "threshold": state.threshold, "taken": state.taken}
    kept["moved"] = state.moved
    return named | {name: leaf for name, leaf in kept.items() if leaf is not None}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Of all numbers, in the order of their names."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


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
