"""serving: what the shipped ServerApp calls, to serve the federation in a directory."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import UserError
from fedveil.federation.flower.grid import GridTransport
from fedveil.serialization.imports import imported

if TYPE_CHECKING:
    from flwr.serverapp import Grid

ROSTER = "roster.toml"
DIRECTORY, SERVE = "directory", "serve"  # in the run's configuration
DEFAULT = "fedveil.federation.serve:serve"


class StoppedEarlyError(Exception):
    """A run that ended before its last round. Flower marks the run as failed."""


def run(grid: Grid, config: Mapping[str, object]) -> None:
    """serve(directory, transport), with the nodes of the roster. Raise unless it returns 0 or None.

    `config` is the app's run configuration. Flower stores it in plaintext, so it has no secrets.
    """
    directory = Path(str(config[DIRECTORY]))
    serve = imported(str(config.get(SERVE, DEFAULT)), "server", "function", DEFAULT)
    status = serve(directory, GridTransport(grid, read_nodes(directory / ROSTER)))
    if status:
        raise StoppedEarlyError(f"The run stopped early with status {status}. Start it again.")


def read_nodes(path: Path) -> dict[int, str]:
    """Client → node key: the field `node` of each [[client]] of a roster, in order."""
    try:
        clients = tomllib.loads(path.read_text(encoding="utf-8")).get("client", [])
        return {index: str(client["node"]) for index, client in enumerate(clients)}
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as problem:
        raise UserError(
            f"Cannot read the node keys in {path}: {problem}. Give each [[client]] a `node`."
        ) from None
