from __future__ import annotations

import gzip
import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedveil.data.catalog import CATALOG, CatalogEntry, load, load_path
from fedveil.data.download import RemoteFile, fetch
from fedveil.errors import UserError
from tests.unit.data.paths import SHARED, needs_fashion, needs_plays
from tests.unit.data.sources.idxbytes import idx_bytes

IMAGES = idx_bytes(np.arange(2 * 28 * 28, dtype=np.uint64).astype(np.uint8).reshape(2, 28, 28))
LABELS = idx_bytes(np.array([3, 4], dtype=np.uint8))
NAMES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


class Handler(BaseHTTPRequestHandler):
    """Serves what is on its server's shelf; '/stall' promises bytes and sends none."""

    def do_GET(self) -> None:
        shelf: dict[str, bytes] = self.server.shelf  # type: ignore[attr-defined]
        name = self.path.lstrip("/")
        if name == "stall":
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.server.released.wait(10)  # type: ignore[attr-defined]
            return
        self.send_response(200 if name in shelf else 404)
        missing = 5 if name == "short" else 0
        self.send_header("Content-Length", str(len(shelf.get(name, b"")) + missing))
        self.end_headers()
        self.wfile.write(shelf.get(name, b""))

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


class Shop:
    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.shelf: dict[str, bytes] = server.shelf  # type: ignore[attr-defined]
        self.base = f"http://127.0.0.1:{server.server_address[1]}"

    def file(self, name: str, content: bytes, zipped: bool = False) -> RemoteFile:
        self.shelf[name] = gzip.compress(content) if zipped else content
        return RemoteFile(f"{self.base}/{name}", hashlib.sha256(content).hexdigest(), zipped)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.shelf = {}  # type: ignore[attr-defined]
    server.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield Shop(server)
    server.released.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def _own_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "home"))


def shelve_fashion(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """Fashion-MNIST with tiny files from the shop, and no system folder."""
    contents = (IMAGES, LABELS, IMAGES, LABELS)
    pairs = zip(NAMES, contents, strict=True)
    files = tuple(shop.file(f"{name}-ubyte.gz", content, True) for name, content in pairs)
    entry = replace(CATALOG["fashion-mnist"], files=files, system=())
    monkeypatch.setitem(CATALOG, "fashion-mnist", entry)
    return entry


def test_a_good_file_is_kept(shop: Shop, tmp_path: Path) -> None:
    path = fetch(shop.file("plain", b"hello"), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "plain"
    assert path.read_bytes() == b"hello"
    assert [p.name for p in path.parent.iterdir()] == ["plain"]


def test_a_gzipped_file_is_checked_by_its_content(shop: Shop, tmp_path: Path) -> None:
    file = shop.file("zipped.gz", b"hello", zipped=True)
    shop.shelf["zipped.gz"] = gzip.compress(b"hello", compresslevel=1, mtime=123)
    assert gzip.decompress(fetch(file, tmp_path).read_bytes()) == b"hello"


def test_a_wrong_hash_keeps_nothing(shop: Shop, tmp_path: Path) -> None:
    for zipped in (False, True):
        file = shop.file("file", b"hello", zipped)
        shop.shelf["file"] = gzip.compress(b"hullo") if zipped else b"hullo"
        with pytest.raises(UserError, match="does not have the published SHA-256"):
            fetch(file, tmp_path / "d")
        assert list((tmp_path / "d").iterdir()) == []


def test_what_is_not_gzip_keeps_nothing(shop: Shop, tmp_path: Path) -> None:
    file = shop.file("file", b"hello", zipped=True)
    shop.shelf["file"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match=r"did not return a gzip file\. Nothing was saved"):
        fetch(file, tmp_path)


def test_an_absent_file_is_a_sentence(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"could not be downloaded .*404"):
        fetch(RemoteFile(f"{shop.base}/absent", ""), tmp_path)


def test_a_broken_connection_is_a_sentence(shop: Shop, tmp_path: Path) -> None:
    file = shop.file("short", b"hello")
    with pytest.raises(UserError, match="could not be downloaded"):
        fetch(file, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stalling_server_is_given_up(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="timed out"):
        fetch(RemoteFile(f"{shop.base}/stall", ""), tmp_path, timeout=0.2)


def test_a_download_that_takes_too_long_is_given_up(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="took too long"):
        fetch(shop.file("slow", b"hello"), tmp_path, deadline=-1)


def test_an_endless_download_is_given_up(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.data.download.MAX_BYTES", 4)
    with pytest.raises(UserError, match="larger than any known data set"):
        fetch(shop.file("large", b"hello"), tmp_path)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://127.0.0.1:1/closed", "nonsense"])
def test_unreachable_addresses(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="could not be downloaded"):
        fetch(RemoteFile(url, ""), tmp_path)


def test_a_downloaded_set_is_loaded_and_found_again(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = shelve_fashion(shop, monkeypatch)
    assert not entry.here()
    dataset = load("fashion-mnist")
    assert dataset.name == "fashion-mnist"
    assert dataset.train.labels.tolist() == [3, 4]
    assert dataset.notes == ()
    shop.shelf.clear()
    assert entry.found() == entry.home()
    assert load("fashion-mnist").test.inputs.shape == (2, 1, 28, 28)


def test_a_given_directory_comes_first_and_receives_downloads(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = shelve_fashion(shop, monkeypatch)
    load("fashion-mnist", tmp_path / "mine")
    assert entry.found(tmp_path / "mine") == tmp_path / "mine"
    assert not entry.here()


def test_no_other_data_set_replaces_an_absent_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shelve_fashion(shop, monkeypatch)
    shop.shelf.clear()
    advice = (
        "Install Debian's package dataset-fashion-mnist, or put train-images-idx3-ubyte + "
        "train-labels-idx1-ubyte + t10k-images-idx3-ubyte + t10k-labels-idx1-ubyte in "
        f"'{tmp_path / 'home' / 'fashion-mnist'}'. FEDVEIL_DATA sets another data directory. The "
        "data set 'digits' needs no files."
    )
    with pytest.raises(UserError) as caught:
        load("fashion-mnist", download=False)
    assert str(caught.value) == f"Fashion-MNIST was not found, and downloading is off. {advice}"
    with pytest.raises(UserError, match=r"^Fashion-MNIST was not found: .*404.*\)\. Install"):
        load("fashion-mnist")


def test_tampered_files_are_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shelve_fashion(shop, monkeypatch)
    shop.shelf["train-images-idx3-ubyte.gz"] = gzip.compress(b"tampered")
    with pytest.raises(UserError, match="does not have the published SHA-256"):
        load("fashion-mnist")


def test_other_sets_say_what_to_put_where(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"downloading is off\. Put .*train_32x32.mat \+ test"):
        load("svhn", download=False)
    absent = replace(CATALOG["cifar10"], files=(RemoteFile(f"{shop.base}/absent", ""),))
    monkeypatch.setitem(CATALOG, "cifar10", absent)
    with pytest.raises(UserError, match=r"404.*Put cifar-10-python\.tar\.gz or ") as caught:
        load("cifar10")
    assert "\n" not in str(caught.value)


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match="Did you mean 'cifar10'"):
        load("cifar-10")


@pytest.mark.parametrize("entry", CATALOG.values(), ids=lambda e: e.name)
def test_every_entry_is_complete(entry: CatalogEntry) -> None:
    assert entry.summary
    assert entry.citation
    assert entry.bundled or entry.layouts
    assert entry.bundled or entry.files or entry.name == "leaf-shakespeare"
    for file in entry.files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert file.url.startswith("http")


def test_the_catalogue_is_cheap_to_import() -> None:
    code = "import sys, fedveil.data.catalog; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_digits_need_nothing() -> None:
    assert CATALOG["digits"].here()
    assert load("digits", download=False).notes == ()


@needs_fashion
def test_the_real_fashion_mnist_has_the_published_sha256() -> None:
    place = CATALOG["fashion-mnist"].found()
    assert place is not None
    for file in CATALOG["fashion-mnist"].files:
        content = gzip.decompress((place / file.name).read_bytes())
        assert hashlib.sha256(content).hexdigest() == file.sha256


@needs_plays
def test_the_real_plays_have_the_published_sha256() -> None:
    content = (SHARED / "shakespeare.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == CATALOG["shakespeare"].files[0].sha256
    assert load("shakespeare", SHARED, download=False).classes == 97


def test_load_path(tmp_path: Path) -> None:
    for name, content in zip(NAMES, (IMAGES, LABELS, IMAGES, LABELS), strict=True):
        (tmp_path / f"{name}-ubyte").write_bytes(content)
    assert load_path(tmp_path).train.labels.tolist() == [3, 4]
    (tmp_path / "play.txt").write_text("A:\n" + "word " * 60, encoding="utf-8")
    assert load_path(tmp_path / "play.txt").name == "shakespeare"
    (tmp_path / "rows.csv").write_text("a,b\n", encoding="utf-8")
    with pytest.raises(UserError, match="its client and label columns"):
        load_path(tmp_path / "rows.csv")
    with pytest.raises(UserError, match="No such file or folder"):
        load_path(tmp_path / "absent")
    (tmp_path / "bad.zip").write_bytes(b"")
    with pytest.raises(UserError, match="not a readable zip"):
        load_path(tmp_path / "bad.zip")
