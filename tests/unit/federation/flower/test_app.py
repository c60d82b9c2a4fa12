"""The app that Flower ships: it carries bytes, tells nothing, and imports nothing of ours."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from fedveil.errors import UserError
from fedveil.federation.flower import serving
from fedveil.federation.flower.app import client_app
from fedveil.federation.flower.app.envelope import opened, sealed
from fedveil.federation.flower.app.frames import FrameError
from fedveil.federation.flower.serving import StoppedEarlyError, read_nodes, run
from fedveil.federation.flower.writing import FILES, PACKAGE, write_app
from tests.unit.federation.flower.fakes import FakeGrid, pem_key


def carried(content: RecordDict, node_config: dict[str, Any]) -> Message:
    message = Message(content, 7, "query", ttl=60.0)
    context = Context(1, 7, node_config, RecordDict(), {}, series_id=1)
    return client_app.app(message, context)


def answering(monkeypatch: pytest.MonkeyPatch, call: Callable[..., bytes]) -> None:
    monkeypatch.setattr(client_app, "call", call)


def test_the_client_app_returns_the_agents_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bytes, float]] = []

    def call(path: str, request: bytes, seconds: float) -> bytes:
        asked.append((path, request, seconds))
        return b"reply"

    answering(monkeypatch, call)
    reply = carried(sealed(b"request"), {"agent-socket": "/run/agent.sock"})
    assert opened(reply.content) == b"reply"
    assert asked[0][:2] == ("/run/agent.sock", b"request")
    assert 50 < asked[0][2] <= 60  # until the message expires


@pytest.mark.parametrize(
    ("problem", "word"),
    [(FrameError("late"), "late"), (RuntimeError("a secret of the node"), "failed")],
)
def test_a_failure_leaves_the_node_as_one_fixed_word(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, word: str
) -> None:
    def call(*_: object) -> bytes:
        raise problem

    answering(monkeypatch, call)
    assert carried(sealed(b""), {"agent-socket": "/x"}).error.reason == word


def test_a_node_without_an_agent_and_a_message_of_another_form_are_fixed_words() -> None:
    assert carried(sealed(b""), {}).error.reason == "unreachable"
    assert carried(sealed(b""), {"agent-socket": "/nowhere.sock"}).error.reason == "unreachable"
    assert carried(RecordDict(), {"agent-socket": "/x"}).error.reason == "malformed"


def test_what_is_shipped_imports_the_standard_library_and_flower_only(tmp_path: Path) -> None:
    write_app(tmp_path, "echo")
    for name in FILES:
        if name == "server_app.py":  # runs at the server, which has fedveil
            continue
        tree = ast.parse((tmp_path / PACKAGE / name).read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            for module in names:
                top = module.partition(".")[0]
                assert top == "flwr" or top in sys.stdlib_module_names


def test_the_shipped_client_app_loads_without_fedveil_and_torch(tmp_path: Path) -> None:
    write_app(tmp_path, "echo")
    check = (
        f"import sys, {PACKAGE}.client_app as shipped; from flwr.clientapp import ClientApp; "
        "assert isinstance(shipped.app, ClientApp); "
        "assert not {'torch', 'fedveil', 'scipy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flower_accepts_the_app_and_ships_its_package_only(tmp_path: Path) -> None:
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    write_app(tmp_path, "echo")
    for private in ("roster.toml", "federation.toml", "runs/a/recipe.toml", "keys.py", "notes.md"):
        (tmp_path / private).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / private).write_text("")
    _, warnings = load_and_validate(tmp_path / "pyproject.toml")
    assert warnings == []
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path))) as fab:
        shipped = {name for name in fab.namelist() if not name.startswith(".info")}
    assert shipped == {"pyproject.toml", *(f"{PACKAGE}/{name}" for name in FILES)}


def test_the_run_configuration_names_the_directory_and_nothing_secret(tmp_path: Path) -> None:
    write_app(tmp_path, "echo")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert config == {"directory": str(tmp_path), "serve": serving.DEFAULT}


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 33, "föderation"])
def test_a_name_that_flower_refuses_is_refused_first(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="not a name for a Flower app"):
        write_app(tmp_path, name)


def roster(directory: Path, text: str) -> Path:
    path = directory / "roster.toml"
    path.write_text(text)
    return path


def test_the_server_gets_its_directory_and_the_nodes_of_the_roster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = pem_key().decode()
    roster(tmp_path, f"[[client]]\nnode = '''{key}'''\n")
    served: list[object] = []

    def serve(directory: Path, transport: object) -> int:
        served.extend([directory, transport])
        return 0

    monkeypatch.setattr(serving, "imported", lambda *_: serve)
    run(FakeGrid([]), {"directory": str(tmp_path)})  # type: ignore[arg-type]
    assert served[0] == tmp_path
    assert isinstance(served[1], serving.GridTransport)


def test_a_run_that_stopped_early_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roster(tmp_path, "")
    monkeypatch.setattr(serving, "imported", lambda *_: lambda *_: 3)
    with pytest.raises(StoppedEarlyError, match="status 3"):
        run(FakeGrid([]), {"directory": str(tmp_path)})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[[client]]\n", "client = 3\n", "not toml"])
def test_a_roster_without_node_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="Cannot read the node keys"):
        read_nodes(roster(tmp_path, text))


def test_the_server_app_runs_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.federation.flower.app import server_app

    seen: list[object] = []
    monkeypatch.setattr(serving, "run", lambda grid, config: seen.extend([grid, config]))
    grid, context = SimpleNamespace(), SimpleNamespace(run_config={"directory": "/x"})
    server_app.app(grid, context)  # type: ignore[arg-type]
    assert seen == [grid, {"directory": "/x"}]
