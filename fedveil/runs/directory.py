"""RunDirectory: the only writer of a run's directory.

Every file is written to a temporary file that replaces it when complete, so that a full disk or a
killed process leaves the previous file intact.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.errors import UserError
from fedveil.loop import State
from fedveil.runs.saved import (
    CHECKPOINT,
    ENCODER,
    ENGINE,
    EVALUATION,
    MEMORY,
    METRICS,
    MODEL,
    RECIPE,
    STATEMENT,
    SUMMARY,
    TRACE,
    SavedRun,
    memory_name,
)
from fedveil.runs.states import digest_of, file_digest, tensors_of

MODE = 0o700  # the directory has private data: norms, client memory, who took part


class RunDirectory:
    """The directory of one run, for writing."""

    def __init__(self, path: Path) -> None:
        self._claim: int | None = None
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Create the directory. One that is in use is refused."""
        refuse_taken(path)
        with saving(path):
            path.mkdir(parents=True, exist_ok=True)
            path.chmod(MODE)
        return cls(path)

    @classmethod
    def fresh(cls, base: Path, label: str) -> RunDirectory:
        """Create a directory under base: the first of label-1, label-2, … that does not exist."""
        name = re.sub(r"[^\w-]+", "-", label)  # the name of a recipe can be any text
        with saving(base):
            for number in itertools.count(1):
                path = base / f"{name}-{number}"
                if _made(path):
                    break
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Open the directory of an existing run."""
        return cls(SavedRun.open(path).path)

    def claim(self) -> None:
        """Lock the directory for this process, until `release` or the end of the process."""
        if self._claim is not None:
            return
        with saving(self.path):
            self._claim = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            self.release()
            raise UserError(
                f"{self.path} is in use by another process. Wait until it ends, or end it."
            ) from problem
        except OSError:  # the file system cannot lock directories
            return
        with saving(self.path):
            for left in self.path.glob(".*.partial"):  # left by a killed process
                left.unlink()

    def release(self) -> None:
        """Release the lock."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def __del__(self) -> None:
        self.release()

    def save_trace(self, trace: Mapping[str, Any]) -> None:
        """ledger.json: the ledger that records this run, and the run's position in it."""
        self._save(TRACE, (json.dumps(trace, indent=2) + "\n").encode())

    def save_engine(self, name: str, reason: str) -> None:
        """engine.json: the engine of the run. It was chosen by data sizes, so it is private."""
        text = json.dumps({"engine": name, "reason": reason}, indent=2) + "\n"
        self._save(ENGINE, text.encode())

    def save_settings(self, settings: Mapping[str, Any]) -> None:
        """recipe.toml: everything needed to train the run again."""
        import tomli_w

        self._save(RECIPE, tomli_w.dumps(settings).encode())

    def save_metrics(self, records: Sequence[Mapping[str, Any]]) -> None:
        """metrics.parquet: one row per round."""
        import polars

        sink = io.BytesIO()
        polars.DataFrame(list(records), infer_schema_length=None).write_parquet(sink)
        self._save(METRICS, sink.getvalue())

    def save_model(self, parameters: Mapping[str, Tensor], facts: str | None = None) -> None:
        """model.safetensors: the module's state_dict, and the model's interface as `facts`."""
        self._save_tensors(MODEL, parameters, None if facts is None else {"facts": facts})

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json: the result and its guarantee."""
        text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        self._save(SUMMARY, text.encode())

    def save_statement(self, text: str) -> None:
        """privacy.txt: the privacy statement."""
        self._save(STATEMENT, text.encode())

    def save_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """evaluation.json: the confusion matrix and accuracy per client, which are private data."""
        text = json.dumps(evaluation, ensure_ascii=False, allow_nan=False) + "\n"
        self._save(EVALUATION, text.encode())

    def forget_results(self) -> None:
        """Remove the results of an earlier stop."""
        with saving(self.path):
            for name in (SUMMARY, STATEMENT, MODEL, EVALUATION):
                (self.path / name).unlink(missing_ok=True)

    def save_encoder(self, encoder: str) -> None:
        """encoder.json: how to turn rows of a table into inputs of the model."""
        self._save(ENCODER, encoder.encode())

    def save_checkpoint(self, state: State, identity: str = "") -> None:
        """Write the client memory, then checkpoint.safetensors, which refers to it."""
        memory = self.path / memory_name(state.round)
        digest = digest_of(tensors_of(state))
        if state.memory is not None:
            self.write(memory.name, state.memory.save)
            digest += file_digest(memory)
        # One entry: safetensors writes several in any order, but equal runs must have equal bytes.
        facts = json.dumps({"round": state.round, "identity": identity, "digest": digest})
        self._save_tensors(CHECKPOINT, tensors_of(state), {"facts": facts})
        for old in self.path.glob(MEMORY):
            if old != memory:
                old.unlink()

    def _save_tensors(
        self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
    ) -> None:
        from safetensors.torch import save

        own = {key: leaf.contiguous().clone() for key, leaf in tensors.items()}
        self._save(name, save(own, metadata))

    def _save(self, name: str, data: bytes) -> None:
        self.write(name, lambda path: path.write_bytes(data))

    def write(self, name: str, write: Callable[[Path], Any]) -> None:
        """Write a file by a function of its path, and replace the previous one when complete."""
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
    """Refuse a path where saving a run would touch existing files; else return it."""
    with saving(path):
        taken = path.exists() and (not path.is_dir() or any(map(_kept, path.iterdir())))
    if taken:
        if not path.is_dir():
            raise UserError(f"{path} is a file, not a directory. Choose another --out.")
        raise UserError(
            f"{path} is not empty. Choose another --out, or resume the run with `fedveil train "
            f"--resume {path}`."
        )
    return path


@contextmanager
def saving(path: Path, flag: str = "--out") -> Iterator[None]:
    """Turn a failed write into an error that says what failed, why, and what to do.

    `flag` is the one that named the path.
    """
    try:
        yield
    except OSError as problem:
        raise UserError(
            f"Could not save to {path}: {problem.strerror or problem}. Files saved earlier are "
            f"intact. {_remedy(path, problem, flag)}"
        ) from problem


def _remedy(path: Path, problem: OSError, flag: str) -> str:
    """What helps: space, permission, or another path."""
    if isinstance(problem, FileNotFoundError) and not path.parent.exists():
        return f"Create the directory {path.parent}, or choose another {flag}."
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"Free some space, or choose another {flag}."
    if problem.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"You may not write there: choose another {flag}, or change its permissions."
    if problem.errno in (errno.ENOTDIR, errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR):
        return f"A directory cannot be there: choose another {flag}."
    return f"Check the disk, or choose another {flag}."


def _made(path: Path) -> bool:
    """Whether this call created the directory. Runs that start together never share one."""
    try:
        path.mkdir(mode=MODE, parents=True)
    except FileExistsError:
        return False
    return True


def _kept(file: Path) -> bool:
    """Whether a file is complete, and not the partial file of a killed process."""
    return not (file.name.startswith(".") and file.name.endswith(".partial"))


def _sync(directory: Path) -> None:
    """Flush a directory to disk, so that a renamed file survives a power failure."""
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
