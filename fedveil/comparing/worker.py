"""A process that plays runs, one after another, on one core: told by lines, telling by lines.

The parent writes a task as a line of JSON; the answer is a line for every evaluated round and one
at the end. A run is played by the ordinary training code, into an ordinary run's directory.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.errors import UserError

if TYPE_CHECKING:
    from fedveil.data.federated import Federated
    from fedveil.training import Record, Training

Tell = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Play what standard input says until it ends; Ctrl-C ends after the round that is played."""
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a module prints is no answer

    def tell(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        for line in sys.stdin:
            if not played(json.loads(line), tell):
                return
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def played(task: Mapping[str, Any], tell: Tell) -> bool:
    """Play one run to its end, or until it is stopped; whether to go on with another one."""
    from fedveil import training as work
    from fedveil.runs.directory import RunDirectory

    path = Path(task["path"])
    ledger = None if task["ledger"] is None else Path(task["ledger"])
    try:
        training = _begun(task["settings"], path, ledger)
        work.finish(training, RunDirectory.open(path), functools.partial(_tell_round, tell))
    except UserError as problem:
        tell({"problem": str(problem)})
        return True
    tell({"ended": training.finished})
    return training.finished


def _begun(plain: Mapping[str, Any], path: Path, ledger: Path | None) -> Training:
    """A new run, or one that goes on from its checkpoint."""
    from fedveil.resuming import restore
    from fedveil.runs.directory import RunDirectory
    from fedveil.settings import Settings, prepare, read_run, resolved

    if (path / "recipe.toml").is_file():
        settings = read_run(path / "recipe.toml")
        prepared = prepare(settings, _data(settings.data.model_dump_json()), ledger=ledger)
        return restore(prepared, RunDirectory.open(path), ledger)
    settings = Settings.model_validate(plain)
    training = prepare(settings, _data(settings.data.model_dump_json()), ledger=ledger)
    training.enrol(ledger, saved=True)
    RunDirectory.create(path).save_settings(resolved(settings, training))
    return training


@functools.lru_cache(maxsize=1)
def _data(settings: str) -> Federated:
    """Read once, for all runs of this process."""
    from fedveil.settings import DataSettings, load_data

    return load_data(DataSettings.model_validate_json(settings))


def _tell_round(tell: Tell, training: Training, record: Record) -> None:
    from fedveil.progress import quality, spending

    said = {}
    if record.loss is not None:
        said = {"said": f"{quality(record)}  {spending(training, record)}"}
    tell({"round": record.round, "rounds": training.rounds, **said})


if __name__ == "__main__":
    main()
