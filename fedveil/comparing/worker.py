"""A worker process that trains runs one after another on one core.

The parent writes a task as a line of JSON to standard input. The worker answers with a line per
round and one at the end. Runs use the ordinary training code and run directories.
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
    from fedveil.training.records import Record
    from fedveil.training.run import Training
    from fedveil.training.settings import Settings

Send = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Train tasks from standard input until it ends; Ctrl-C stops after the current round."""
    import torch

    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr  # modules may print

    def send(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        for line in sys.stdin:
            if not train_task(json.loads(line), send):
                return
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def train_task(task: Mapping[str, Any], send: Send) -> bool:
    """Train one run until it ends or is stopped; returns whether to continue with another."""
    from fedveil.training.start import finish

    ledger = None if task["ledger"] is None else Path(task["ledger"])
    try:
        training = _started(task["settings"], Path(task["path"]), ledger)
        finish(training, functools.partial(_send_round, send))
    except UserError as problem:
        send({"problem": str(problem)})
        return True
    send({"ended": training.finished})
    return training.finished


def _started(plain: Mapping[str, Any], path: Path, ledger: Path | None) -> Training:
    """Start a new run, or resume one from its checkpoint."""
    from fedveil.runs.saved import RECIPE, SavedRun
    from fedveil.training.settings import Settings, from_settings, read_run
    from fedveil.training.sources import load_for
    from fedveil.training.start import resume, start

    run = SavedRun(path)
    known = run.has(RECIPE)
    settings = read_run(run.file(RECIPE)) if known else Settings.model_validate(plain)
    data = load_for(settings, path) if known else load_once(deciding_data(settings))
    training = from_settings(settings, data, ledger=ledger)
    return resume(training, path) if known else start(training, path)


def deciding_data(settings: Settings) -> str:
    """The settings that decide the data, among them the ε of which statistics get a share."""
    from fedveil.training.sources import statistics_of

    if statistics_of(settings) is None:
        return settings.model_copy(update={"seed": 0}).model_dump_json(include={"data", "noise"})
    return settings.model_copy(update={"seed": 0}).model_dump_json()


@functools.lru_cache(maxsize=1)
def load_once(settings: str) -> Federated:
    """The data, loaded once for all runs of this process."""
    from fedveil.training.settings import Settings
    from fedveil.training.sources import load_for

    return load_for(Settings.model_validate_json(settings))


def _send_round(send: Send, training: Training, record: Record) -> None:
    from fedveil.training.metrics import titled
    from fedveil.training.records import quality, spending

    said = {}
    if record.loss is not None:
        spec = training.spec
        reached = quality(record, titled(spec.metrics.main.name), spec.evaluation is not None)
        said = {"said": f"{reached}  {spending(record)}"}
    send({"round": record.round, "rounds": training.rounds, **said})


if __name__ == "__main__":
    main()
