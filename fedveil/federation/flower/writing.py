"""writing: the Flower app of a federation, ready for `flwr run`."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

import tomli_w

from fedveil.errors import UserError
from fedveil.federation.flower.serving import DEFAULT, DIRECTORY, SERVE

PACKAGE = "fedveil_app"
FILES = ("__init__.py", "client_app.py", "server_app.py", "envelope.py", "frames.py")
SOURCE = Path(__file__).parent / "app"
LONGEST_NAME = 32  # characters, of Flower's names


def write_app(
    directory: Path, name: str, *, publisher: str = "fedveil", serve: str = DEFAULT
) -> None:
    """Write pyproject.toml and the app's package into `directory`.

    Only these files are submitted to the SuperLink and shipped to nodes (`fab-include`). Agreement,
    roster and run directory stay where they are: the ServerApp reads them from `directory`.
    """
    if not name.replace("-", "").isalnum() or not name.isascii() or len(name) > LONGEST_NAME:
        raise UserError(
            f"'{name[:80]}' is not a name for a Flower app. Use at most {LONGEST_NAME} letters, "
            "digits and hyphens."
        )
    package = directory / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        shutil.copyfile(SOURCE / file, package / file)
    project = _project(directory.resolve(), name, publisher, serve)
    (directory / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


def _project(directory: Path, name: str, publisher: str, serve: str) -> dict[str, object]:
    app = {
        "publisher": publisher,
        "fab-include": [f"{PACKAGE}/*.py"],
        "components": {
            "serverapp": f"{PACKAGE}.server_app:app",
            "clientapp": f"{PACKAGE}.client_app:app",
        },
        "config": {DIRECTORY: str(directory), SERVE: serve},
    }
    return {
        "project": {
            "name": name,
            "version": metadata.version("fedveil"),
            "description": "A fedveil federation. The ClientApp only carries bytes to an agent.",
            "license": {"text": "Apache-2.0"},
            "dependencies": ["flwr>=1.41,<1.42"],
        },
        "tool": {"flwr": {"app": app}},
    }
