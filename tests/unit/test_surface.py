"""No code from data, files for their owner alone, and dependencies that are what they were."""

from __future__ import annotations

import ast
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedveil import algorithms
from fedveil.data.federated import Examples, Federated
from fedveil.data.save import save_federated
from fedveil.runs.directory import RunDirectory
from fedveil.training.start import train
from scripts import advisories, hashes

ROOT = Path(__file__).parents[2]
FORBIDDEN_MODULES = {
    "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "yaml",
    "subprocess", "pty", "commands", "ctypes", "code", "codeop",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "torch.load", "torch.save",
    "torch.jit.load", "yaml.load", "pandas.read_pickle", "np.fromfile",
}  # fmt: skip
WORKERS = {
    "fedveil/comparing/pool.py",  # starts fedveil itself, by a fixed list of words
    "fedveil/federation/flower/processes.py",  # starts Flower on loopback, by fixed lists of words
}
NAMES_OF_CODE = {
    "fedveil/__init__.py",  # its own modules
    "fedveil/testing/__init__.py",  # its own modules
    "fedveil/privacy/__init__.py",  # its own command, for `fv.privacy(…)`
    "fedveil/serialization/imports.py",  # package.module:name of a model, an algorithm or a part
    "fedveil/models/references.py",  # what the code of a user's model imports when it is called
    "fedveil/commands/audit.py",  # the adapter that `fedveil conform` is given, also as a file
}
IMPORTERS = ("import_module", "spec_from_file_location", "exec_module")


def findings(source: str) -> Iterator[str]:
    """What in a file could run code from data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in FORBIDDEN_MODULES:
                yield node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & FORBIDDEN_ATTRIBUTES
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in FORBIDDEN_ATTRIBUTES:
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            yield from _calls(node)


def _calls(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    if name in FORBIDDEN_CALLS:
        yield name
    if name.rpartition(".")[2] in IMPORTERS:
        yield "import_module"
    for keyword in call.keywords:
        risky = keyword.arg == "shell" or keyword.arg == "allow_pickle"
        if risky and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
            yield f"{keyword.arg}={ast.unparse(keyword.value)}"


FILES = sorted((ROOT / "fedveil").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_no_code_comes_from_data(file: Path) -> None:
    found = set(findings(file.read_text(encoding="utf-8")))
    if file.relative_to(ROOT).as_posix() in WORKERS:
        found -= {"subprocess"}
    if file.relative_to(ROOT).as_posix() in NAMES_OF_CODE:
        assert "import_module" in found  # or it need not be in the list
        found -= {"import_module"}
    assert found == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("from torch import load", "torch.load"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("import os\nos.system('x')", "os.system"),
        ("run('x', shell=True)", "shell=True"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("import yaml\nyaml.load('x')", "yaml"),
        ("import importlib\nimportlib.import_module('x')", "import_module"),
        ("spec.loader.exec_module(module)", "import_module"),
    ],
)
def test_the_search_finds(source: str, name: str) -> None:
    assert name in set(findings(source))


def test_the_search_lets_harmless_code_pass() -> None:
    harmless = "model.eval()\nnp.load('x', allow_pickle=False)\nre.compile('x')"
    assert set(findings(harmless)) == set()


def borrowed(source: str) -> Iterator[str]:
    """The private names of other modules of the package that a file uses."""
    tree = ast.parse(source)
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedveil"):
            yield from (a.name for a in node.names if private(a.name))
            modules |= {a.asname or a.name for a in node.names if a.name.islower()}
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not is_read(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            owner = ast.unparse(node.value)
            if owner in modules - assigned:
                yield f"{owner}.{node.attr}"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_read(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.relative_to(ROOT).as_posix())
def test_a_module_uses_no_private_name_of_another(file: Path) -> None:
    assert sorted(borrowed(file.read_text(encoding="utf-8"))) == []


def test_borrowed_names_are_found() -> None:
    assert list(borrowed("from fedveil.commands.plan import _drawn")) == ["_drawn"]
    used = "from fedveil.commands import compare as command\ncommand._jobs(3)"
    assert list(borrowed(used)) == ["command._jobs"]


@pytest.fixture
def open_umask() -> Iterator[None]:
    """As careless as a system can be."""
    before = os.umask(0)
    yield
    os.umask(before)


def people() -> Federated:
    inputs, labels = torch.ones(8, 2), torch.arange(8) % 2
    return Federated("people", inputs, labels, torch.arange(0, 9, 2), Examples(inputs, labels), 2)


def closed(path: Path) -> bool:
    """Whether nobody but the owner can look at or into it."""
    return stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


@pytest.mark.usefixtures("open_umask")
def test_runs_ledgers_and_saved_data_are_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "books" / "ledger.sqlite"
    monkeypatch.setenv("FEDVEIL_LEDGER", str(place))
    recipe = algorithms.dp_fedavg(rate=0.5, noise_multiplier=1.0)
    train(recipe, people(), "softmax", rounds=2, delta=1e-3, save=tmp_path / "run")
    save_federated(people(), tmp_path / "data")
    for directory in (tmp_path / "run", tmp_path / "data", place.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory
    files = list(place.parent.iterdir())
    assert place in files
    for file in files:
        assert closed(file), file


@pytest.mark.usefixtures("open_umask")
def test_every_way_to_make_a_run_s_directory_closes_it(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for run in (
        RunDirectory.create(tmp_path / "there"),
        RunDirectory.create(tmp_path / "deep" / "er"),
        RunDirectory.fresh(tmp_path, "label"),
    ):
        assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_a_secret_run_writes_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedveil.random.streams import SecretKey

    made: list[SecretKey] = []
    begin = SecretKey.__init__

    def noted(self: SecretKey) -> None:
        begin(self)
        made.append(self)

    monkeypatch.setattr(SecretKey, "__init__", noted)
    monkeypatch.setenv("FEDVEIL_LEDGER", str(tmp_path / "books" / "ledger.sqlite"))
    recipe = algorithms.dp_fedavg(rate=0.5, noise_multiplier=1.0)
    train(recipe, people(), "softmax", rounds=1, delta=1e-3, save=tmp_path / "run", noise="secure")
    assert made
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for key in made:
            assert key._secret not in content
            assert key._secret.hex().encode() not in content


def test_every_pin_with_hashes_is_the_pin_without() -> None:
    pins = advisories.read_pins((ROOT / "constraints.txt").read_text())
    plain = {_plain(name): version for name, version in pins.items()}
    hashed = hashes.read_pins((ROOT / "constraints-hashed.txt").read_text())
    assert len(hashed) > 50
    for pin, known in hashed.items():
        name, _, version = pin.partition("==")
        assert known, pin
        assert plain.get(_plain(name), version) == version


def test_what_the_project_needs_has_hashes() -> None:
    hashed = hashes.read_pins((ROOT / "constraints-hashed.txt").read_text())
    names = {_plain(pin.partition("==")[0]) for pin in hashed}
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^    "([\w-]+)[><=]', text, re.MULTILINE)
    assert {"torch", "numpy", "pydantic", "pytest"} <= {_plain(name) for name in needed} <= names


def test_no_place_is_named_where_files_come_from() -> None:
    for name in ("constraints.txt", "constraints-hashed.txt", "scripts/setup", "scripts/hashes.py"):
        assert "://" not in (ROOT / name).read_text()


def test_hashes_come_back_as_they_were() -> None:
    pins = {"a==1": {"0" * 64, "f" * 64}, "B==2.0": {"1" * 64}}
    assert hashes.read_pins(hashes.written(pins)) == pins


def test_pins_and_hashes_from_a_report(tmp_path: Path) -> None:
    wheel = tmp_path / "torch 2.whl"
    wheel.write_bytes(b"wheel")
    known = {"archive_info": {"hashes": {"sha256": "a" * 64}}, "url": "x"}
    local = {"archive_info": {}, "url": wheel.as_uri()}
    editable = {"dir_info": {}, "url": "x"}
    entries = [
        {"metadata": {"name": "numpy", "version": "2.0"}, "download_info": known},
        {"metadata": {"name": "torch", "version": "2.13.0+cpu"}, "download_info": local},
        {"metadata": {"name": "fedveil", "version": "1"}, "download_info": editable},
    ]
    found = hashes.pins_of(entries)
    assert found.keys() == {"numpy==2.0", "torch==2.13.0"}
    assert found["numpy==2.0"] == {"a" * 64}
    assert all(len(value) == 64 for value in found["torch==2.13.0"])


def test_a_wrong_hash_is_refused(tmp_path: Path) -> None:
    """pip itself, on a package made here; nothing is fetched or installed."""
    wheel = tmp_path / "files" / "nothing_at_all-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    _write_wheel(wheel)
    right = hashes._sha256({"archive_info": {}, "url": wheel.as_uri()})
    for value, works in ((right, True), ("0" * 64, False)):
        (tmp_path / "pins.txt").write_text(hashes.written({"nothing-at-all==1.0": {value}}))
        command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--no-index"]
        command += ["--find-links", str(wheel.parent), "--require-hashes", "--no-deps"]
        command += ["--disable-pip-version-check", "-r", str(tmp_path / "pins.txt")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) == works, done.stderr
        assert works or "DO NOT MATCH THE HASHES" in done.stderr


def _write_wheel(path: Path) -> None:
    import zipfile

    about = "nothing_at_all-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: nothing-at-all\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\nRoot-Is-Purelib: true\n"
        )
        archive.writestr(f"{about}/RECORD", "")


def test_no_pin_is_known_to_be_vulnerable() -> None:
    pins = advisories.read_pins((ROOT / "constraints.txt").read_text())
    assert advisories.found(pins, advisories.kept()) == []


def test_the_kept_list_is_about_packages_that_are_pinned_and_finds_old_versions() -> None:
    pins = advisories.read_pins((ROOT / "constraints.txt").read_text())
    plain = {_plain(name) for name in pins}
    kept = list(advisories.kept())
    assert len(kept) >= 20
    assert {_plain(a.package) for a in kept} <= plain
    old = {"torch": "2.5.1", "Pillow": "11.2.1", "jinja2": "3.1.5", "numpy": "2.4.6"}
    lines = advisories.found(old, iter(kept))
    assert [line.partition("==")[0] for line in lines] == ["Pillow", "jinja2", "torch"]


def test_advisories_of_the_osv_format_are_read(tmp_path: Path) -> None:
    package = {"ecosystem": "PyPI", "name": "Jinja2"}
    events = [{"introduced": "3"}, {"fixed": "3.1.7"}, {"introduced": "9"}]
    ranged = {"package": package, "ranges": [{"type": "ECOSYSTEM", "events": events}]}
    listed = {"package": package, "versions": ["2.0", "2.1"]}
    (tmp_path / "a.json").write_text(json.dumps({"id": "X-1", "affected": [ranged]}))
    (tmp_path / "b.json").write_text(json.dumps({"id": "X-2", "affected": [listed]}))
    gone = {"id": "X-3", "affected": [listed], "withdrawn": "2020"}
    (tmp_path / "c.json").write_text(json.dumps(gone))

    def ids(version: str) -> list[str]:
        every = (
            a
            for f in sorted(tmp_path.glob("*.json"))
            for a in advisories.from_osv(json.loads(f.read_text()))
        )
        return re.findall(r"X-\d", " ".join(advisories.found({"jinja2": version}, every)))

    assert ids("3.1.6") == ["X-1"]
    assert ids("3.1.7") == []
    assert ids("9.5") == ["X-1"]
    assert ids("2.1") == ["X-2"]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_slow_tests_are_named_as_they_are_called() -> None:
    """`make quick` leaves out what is listed, so a name that changed would be run again."""
    for line in (ROOT / "tests" / "slow.txt").read_text().split():
        file, _, name = line.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), line
