"""Hostile and broken input: what is refused with a sentence, and what costs no more than it may.

The list and where each item is tested: docs/reliability.md.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil import algorithms
from fedveil.data import declared, encoding, frames
from fedveil.data.federated import Examples, Federated
from fedveil.data.sources.batches import read_batch
from fedveil.data.sources.cifar import load_cifar, read_python_batch
from fedveil.data.sources.idx import read_idx
from fedveil.data.sources.images import load_images
from fedveil.errors import UserError
from fedveil.models.catalog import build
from fedveil.parts.cohort import FixedSize, Poisson
from fedveil.privacy.calibrate import Budget
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.settings import Settings, read_settings, resolve_recipe
from tests.unit.data.test_table import read_table

ROOT = Path(__file__).parents[2]


def refused(act: Callable[[], object]) -> str:
    """The one sentence of a refusal."""
    with pytest.raises(UserError) as refusal:
        act()
    said = str(refusal.value)
    assert said.endswith(".")
    assert len(said) < 600
    return said


def peak(act: Callable[[], object]) -> int:
    """Bytes that Python and numpy held at most."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Numbers that no budget, noise or rate can be.


@pytest.mark.parametrize("epsilon", [math.nan, 0.0, -1.0, math.inf])
def test_an_epsilon_that_is_none(epsilon: float) -> None:
    assert "epsilon" in refused(lambda: Budget(epsilon, 1e-5))


@pytest.mark.parametrize("delta", [math.nan, 0.0, -1e-5, 1.0, 2.0])
def test_a_delta_that_is_none(delta: float) -> None:
    recipe = algorithms.dp_fedavg(rate=0.5, noise_multiplier=1.0)
    assert "delta" in refused(lambda: prepare(recipe, people(), "softmax", 1, delta=delta))


@pytest.mark.parametrize("sigma", [math.nan, 0.0, -1.0, math.inf])
def test_a_sigma_that_is_none(sigma: float) -> None:
    assert "multiplier" in refused(lambda: algorithms.dp_fedavg(noise_multiplier=sigma))


@pytest.mark.parametrize("rate", [math.nan, 0.0, -0.5, 1.0001, math.inf])
def test_a_rate_that_is_none(rate: float) -> None:
    assert "rate" in refused(lambda: algorithms.dp_fedavg(rate=rate))


def test_a_rate_of_one_hides_nobody() -> None:
    """q = 1 is a round of everyone: the unsampled release, and no ε below its own."""
    from fedveil.accounting.accountant import epsilon

    recipe = algorithms.dp_fedavg(rate=1.0, noise_multiplier=1.0)
    release = recipe.release(5, 100, "models")
    assert recipe.event(5, 100, "models") == release or epsilon(
        recipe.event(5, 100, "models"), 1e-5
    ) == pytest.approx(epsilon(release, 1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("epsilon = nan", "epsilon"),
        ("delta = inf", "delta"),
        ("seed = nan", "seed"),
        ("rounds = inf", "rounds"),
        ("rounds = -3", "rounds"),
        ("epsilon = 0.0", "epsilon"),
        ("epsilon = -2.0", "epsilon"),
        ("delta = 0.0", "delta"),
        ("delta = 1.0", "delta"),
    ],
)
def test_such_numbers_in_a_file_never_reach_a_round(tmp_path: Path, line: str, word: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        f'algorithm = "dp_fedavg"\nepsilon = 1.0\n{line}\n'.replace(
            "epsilon = 1.0\nepsilon", "epsilon"
        )
    )

    def start() -> None:
        read = read_settings(file, {})
        prepare(resolve_recipe(read), people(), "softmax", read.rounds, read.epsilon, read.delta)

    assert word in refused(start)


@pytest.mark.parametrize(
    ("build_recipe", "parts"),
    [
        (
            lambda: sampled(algorithms.fed_alpha_normec(noise_multiplier=1.0), FixedSize(3)),
            "FixedSize",
        ),
        (lambda: sampled(algorithms.dp_fedavg(), Poisson(0.5, honest=2)), "honest"),
    ],
)
def test_a_sampler_the_accounting_does_not_cover(
    build_recipe: Callable[[], object], parts: str
) -> None:
    assert parts in refused(build_recipe)


def sampled(recipe: Recipe, cohort: Poisson | FixedSize) -> Recipe:
    return replace(recipe, cohort=cohort)


def people() -> Federated:
    inputs, labels = torch.ones(8, 2), torch.arange(8) % 2
    return Federated("people", inputs, labels, torch.arange(0, 9, 2), Examples(inputs, labels), 2)


# Counts of examples.


@pytest.mark.parametrize(
    "offsets", [[0, 4, 2, 8], [0, -1, 8], [0, 0, 8]], ids=["negative", "below zero", "none"]
)
def test_clients_with_counts_of_examples_that_are_none(offsets: list[int]) -> None:
    inputs, labels = torch.ones(8, 2), torch.arange(8) % 2
    whole = Examples(inputs, labels)
    data = torch.tensor(offsets)
    said = refused(lambda: Federated("people", inputs, labels, data, whole, 2))
    assert "has no examples" in said


# TOML.


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b'algorithm = "' + b"a" * 10_000_000 + b'"', "larger than 1 MB"),
        (b'algorithm = "' + b"a" * 1_000_000 + b'"', "There is no algorithm"),
        (b"a" * 1_000_000 + b" = 1", "named 'aaa"),
        (b"rounds." + b"a." * 400_000 + b"a = 1", "more than 300 dots"),
        (b"rounds." + b"a." * 200 + b"a = 1", "rounds is '…'"),
        (b"[parameters]\nclip." + b"a." * 200 + b"a = 1", "clip"),
        (b"[recipe]\nlocal." + b"a." * 200 + b"a = 1", "recipe"),
        (b"a = " + b"[" * 500_000, "is not valid TOML"),
        (b"a = " + b"{b = " * 5_000, "is not valid TOML"),
        (b"rounds = " + b"9" * 5_000, "TOML"),
        (b"\xff\xfe" + "rounds = 3".encode("utf-16-le"), "is not valid TOML"),
        (b"rounds = 3\nrounds = 4", "is not valid TOML"),
        (b"rounds = 1979-05-27", "rounds"),
    ],
    ids=lambda value: value[:14].decode("latin1") if isinstance(value, bytes) else "",
)
def test_toml_that_was_not_written_for_us(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(content)
    assert word in refused(lambda: resolve_recipe(read_settings(file, {})))


# Tables.


def csv(tmp_path: Path, content: bytes | str, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


ROWS = "client,label,x\n" + "".join(f"{i % 5},{i % 2},{i}\n" for i in range(40))


def test_a_packed_table_is_not_unpacked(tmp_path: Path) -> None:
    bomb = csv(tmp_path, zlib.compress(ROWS.encode() + b"1,1,1\n" * 10**6))
    assert "decompress it first" in refused(lambda: read_table(bomb, "client", "label"))


def test_a_gzipped_table_is_unpacked_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_UNPACKED", 10**6)
    bomb = csv(tmp_path, gzip.compress(ROWS.encode() + b"1,1,1\n" * 10**7))
    says = refused(lambda: read_table(bomb, "client", "label"))
    assert "more than 1,000,000 bytes; decompress it first" in says
    assert peak(lambda: refused(lambda: read_table(bomb, "client", "label"))) < 5e6


def test_a_table_of_a_million_columns(tmp_path: Path) -> None:
    wide = csv(tmp_path, "client,label" + ",x" * 10**6 + "\n")
    assert "columns" in refused(lambda: read_table(wide, "client", "label"))


@pytest.mark.parametrize(("rows", "suffix"), [(10**5, "parquet"), (20_000, "csv")])
def test_many_categories_are_a_hundred_and_other(tmp_path: Path, rows: int, suffix: str) -> None:
    import polars as pl

    count = pl.int_range(rows, eager=True)
    words = "w" + (count // 2).cast(pl.String)  # words of one row would be identifiers
    frame = pl.DataFrame({"client": count % 7, "label": count % 2, "word": words})
    path = tmp_path / f"t.{suffix}"
    frame.write_parquet(path) if suffix == "parquet" else frame.write_csv(path)
    read = read_table(path, "client", "label", standardize=True)
    assert len(read.encoder.features) == declared.MAX_CATEGORIES + 1
    assert any("categories. The 100 most frequent" in note for note in read.dataset.notes)


def test_inputs_that_would_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "MAX_NUMBERS", 39)
    path = csv(tmp_path, ROWS)
    assert "do not fit in memory" in refused(lambda: read_table(path, "client", "label"))


def test_one_long_cell_does_not_make_all_cells_long(tmp_path: Path) -> None:
    """A fixed width for 2,000 cells of 100 kB would be 800 MB."""
    rows = "".join(f"{i % 5},{i % 2},w{i % 3}\n" for i in range(2000))
    path = csv(tmp_path, f"client,label,word\n1,1,{'x' * 100_000}\n{rows}")
    assert peak(lambda: read_table(path, "client", "label")) < 50e6
    named = csv(tmp_path, f"client,label,v\n{'x' * 100_000},1,2\n{rows}")
    read = read_table(named, "client", "label")
    assert "Left out 1 rows whose 'client' has more than 1,000 characters." in read.dataset.notes
    assert peak(lambda: read_table(named, "client", "label")) < 50e6


@pytest.mark.parametrize(
    "content",
    [
        ROWS.encode("utf-16"),
        ROWS.encode("utf-32"),
        (ROWS + "ä,1,2\n").encode("latin1"),
        ROWS.encode() + "ä,1,2\n".encode() + "ö,1,2\n".encode("latin1"),
        b"\0" * 1000,
        ROWS.encode()[:-3] + b"\0\xff\0",
    ],
    ids=["utf-16", "utf-32", "latin1", "mixed", "zeros", "binary at the end"],
)
def test_tables_in_other_or_mixed_encodings(tmp_path: Path, content: bytes) -> None:
    refused(lambda: read_table(csv(tmp_path, content), "client", "label"))


def test_utf_8_with_a_mark_is_read(tmp_path: Path) -> None:
    path = csv(tmp_path, b"\xef\xbb\xbf" + ROWS.encode())
    assert len(read_table(path, "client", "label").dataset.train) > 20


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e39", "inf", "nan", "-inf"])
@pytest.mark.parametrize("standardize", [False, True])
def test_numbers_that_float32_cannot_hold_are_missing(
    tmp_path: Path, value: str, standardize: bool
) -> None:
    path = csv(tmp_path, ROWS + f"1,1,{value}\n")
    read = read_table(path, "client", "label", standardize=standardize)
    for part in (read.dataset.train, read.dataset.test):
        assert bool(torch.isfinite(part.inputs[:]).all())


def test_tiny_deviations_are_not_divided_by(tmp_path: Path) -> None:
    rows = "".join(f"{i % 5},{i % 2},{i % 2 * 5e-324}\n" for i in range(40))
    path = csv(tmp_path, "client,label,x\n" + rows)
    read = read_table(path, "client", "label", standardize=True)
    assert bool(torch.isfinite(read.dataset.train.inputs[:]).all())


# Archives and images.


def test_an_idx_bomb_takes_what_it_claims_and_no_more() -> None:
    claims = b"\0\0\x08\x01" + struct.pack(">I", 10)
    bomb = gzip.compress(claims + bytes(50_000_000))
    assert peak(lambda: refused(lambda: read_idx(bomb))) < 5e6


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def png(width: int, height: int) -> bytes:
    sink = io.BytesIO()
    Image.new("L", (width, height)).save(sink, "PNG")
    return sink.getvalue()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"a/1.png": png(4, 4), "b/1.png": bytes(2**26 + 1)})
    assert path.stat().st_size < 100_000
    assert peak(lambda: refused(lambda: load_images(path))) < 2e6


def test_a_zip_that_lies_about_its_sizes_gives_no_more_than_it_says(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"a/1.png": png(4, 4), "b/1.png": bytes(10**7)})
    content = path.read_bytes().replace((10**7).to_bytes(4, "little"), (100).to_bytes(4, "little"))
    path.write_bytes(content)
    assert peak(lambda: refused(lambda: load_images(path))) < 2e6


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"a/1.png": png(4, 4), "b/1.png": png(20_000, 1_000)})
    assert "pixels" in refused(lambda: load_images(path))


@pytest.mark.parametrize("name", ["../../evil/1.png", "/evil/1.png", "a/../../1.png", "c:/a/1.png"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "in" / "deep"
    inside.mkdir(parents=True)
    path = zipped(inside / "a.zip", {"a/1.png": png(4, 4), name: png(4, 4)})
    assert "unsafe name" in refused(lambda: load_images(path))
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["a.zip"]


def test_a_tar_whose_member_claims_too_much_is_not_unpacked(tmp_path: Path) -> None:
    info = tarfile.TarInfo("other")
    info.size = 2**40
    path = tmp_path / "cifar.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf() + bytes(10_000_000)))
    assert "declares" in refused(lambda: load_cifar(path))


def test_a_tar_that_leads_elsewhere_writes_nothing(tmp_path: Path) -> None:
    inside = tmp_path / "deep"
    inside.mkdir()
    with tarfile.open(inside / "c.tar.gz", "w:gz") as archive:
        for kind, target in ((tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "/etc/passwd")):
            info = tarfile.TarInfo("../../data_batch_1")
            info.type, info.linkname = kind, target
            archive.addfile(info)
    assert "no CIFAR batch" in refused(lambda: load_cifar(inside / "c.tar.gz"))
    assert [f.name for f in tmp_path.rglob("*") if f.is_file()] == ["c.tar.gz"]


# CIFAR's batches.


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0ls\x85R.", "it refers to os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.", "it refers to builtins.eval"),
        (b"(i__main__\nx\n.", "it uses the instruction INST"),
        (b"\x80\x02]\x81.", "it uses the instruction NEWOBJ"),
        (b"\x80\x02Pid\n.", "it uses the instruction PERSID"),
        (b"\x80\x02}r\xff\xff\xff\x7f.", "lacks 'data'"),  # a note at place 2³¹ − 1
        (b"\x80\x02X\xff\xff\xff\x7fa.", "invalid"),
        (b"\x80\x02" + b"(" * 100_000 + b".", "holds no dictionary"),
        (b"\x80\x02" + b"]" + b"\x85" * 100_000 + b".", "holds no dictionary"),
        (b"\x80\x02]q\0(h\0e.", "holds no dictionary"),  # a list within itself
        (b"t.", "invalid"),
        (b"\x85.", "invalid"),
        (b"R.", "invalid"),
        (b"}}s.", "invalid"),
        (b".", "invalid"),
    ],
)
def test_batches_that_are_programs(content: bytes, word: str) -> None:
    with pytest.raises(UserError, match=re.escape(word)):
        read_python_batch(content)


def test_a_batch_cannot_multiply_its_own_bytes() -> None:
    """One text of 100 kB, made into bytes 2,000 times."""
    text = b"\x80\x02X" + (100_000).to_bytes(4, "little") + b"a" * 100_000 + b"q\0"
    again = b"c_codecs\nencode\nh\0X\x06\0\0\0latin1\x86R"
    bomb = text + again * 2000 + b"."
    with pytest.raises(ValueError, match="expands beyond its length"):
        read_batch(bomb)
    assert peak(lambda: refused(lambda: read_python_batch(bomb))) < 5e6


def test_labels_that_are_no_classes() -> None:
    import pickle

    pixels = np.zeros((1, 3072), np.uint8)
    for labels in ([-1], [2**31], [10**30], [1.5], ["a"], [None], [[1]]):
        content = pickle.dumps({b"data": pixels, b"labels": labels}, 2)
        refused(lambda content=content: read_python_batch(content))


# Models.


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user, in the current directory."""
    written = {
        "loud": "print('hello from your model')\nfrom torch import nn\n"
        "class Net(nn.Linear):\n    def __init__(self): super().__init__(2, 2)\n",
        "quitter": "import sys\nsys.exit(0)\n",
        "nothing": "class Net: pass\n",
    }
    for name, text in written.items():
        (tmp_path / f"fedveil_hostile_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_models")
def test_a_model_that_prints_on_import_does_not_print_into_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    build("fedveil_hostile_loud:Net", people(), torch.Generator())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "hello from your model" in shown.err


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("name", "word"), [("quitter", "SystemExit"), ("nothing", "not a torch.nn.Module")]
)
def test_a_model_that_is_none(name: str, word: str) -> None:
    said = refused(lambda: build(f"fedveil_hostile_{name}:Net", people(), torch.Generator()))
    assert word in said


# The list in the documentation.


def test_every_item_of_the_list_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) >= 40
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(), (file, test)


def test_the_default_settings_are_sound() -> None:
    assert resolve_recipe(Settings()).private
