"""`make federation` prints commands that do what it does."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from fedveil.federation.agreement import Agreement
from scripts import federation
from tests.conftest import Run


def test_the_printed_commands_make_the_federation(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fixture `run` changes to an empty directory."""
    federation.PLACE.mkdir(parents=True)
    agreement = federation.agreed(federation.clients())
    typed = [line.removeprefix("$ ") for line in capsys.readouterr().out.splitlines()]
    named = [shlex.split(line, comments=True)[1:3] for line in typed if line.startswith("fedveil")]
    assert named == [
        ["client", "init"], ["federate", "new"], ["federate", "enrol"], ["client", "check"],
        ["client", "accept"],
    ]  # fmt: skip
    shutil.rmtree(federation.WARD)
    new = next(line for line in typed if line.startswith("fedveil federate new"))
    assert run(*shlex.split(new)[1:]).code == 0
    again = Agreement.read(federation.WARD)
    assert (again.recipe, again.delta) == (agreement.recipe, federation.DELTA)
    assert (
        federation.WARD / "server.toml"
    ).read_text() == '[test]\ndataset = "digits"\nclients = 1\n'
