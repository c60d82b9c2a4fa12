"""The ledger of a saved run, as the run's ledger.json traces it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedveil.errors import UserError
from fedveil.ledger.chain import Chain
from fedveil.ledger.ledger import ENVIRONMENT, Ledger, ledger_path

Trace = Mapping[str, Any]  # what a run's directory stores about the ledger


def place_of(trace: Trace, given: Path | None = None) -> Path:
    """The given path, that of the environment variable, or where the run's ledger was."""
    if given is None and ENVIRONMENT not in os.environ:
        given = Path(trace["path"])
    return ledger_path(given)


def traced_path(trace: Trace, given: Path | None = None) -> Path:
    """The path of the ledger that records a run, which must exist."""
    where = place_of(trace, given)
    if not Chain.exists(where):
        raise UserError(
            f"This run is recorded in the ledger that was at {trace['path']}, but {where} does not "
            "exist. Restore the ledger, or name it with --ledger."
        )
    return where


@contextmanager
def traced(trace: Trace, given: Path | None = None) -> Iterator[Ledger]:
    """The ledger that records a run. Another one, or an older copy, is refused."""
    with contextlib.closing(Ledger(traced_path(trace, given))) as ledger:
        ledger.check_trace(trace)
        yield ledger
