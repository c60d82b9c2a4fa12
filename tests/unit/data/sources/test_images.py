from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedveil.data.sources import images
from fedveil.data.sources.images import load_images
from fedveil.errors import UserError
from tests.unit.data.paths import SHARED, needs_photos


def png(value: int, size: tuple[int, int] = (6, 4), mode: str = "RGB") -> bytes:
    """A picture of one brightness, (width, height)."""
    out = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(out, "PNG")
    return out.getvalue()


def make(path: Path, files: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


SPLIT = {
    "train/cat/1.png": png(10),
    "train/dog/1.png": png(20),
    "train/dog/2.png": png(30),
    "test/cat/1.png": png(40),
    "readme.txt": b"not an image",
    "__MACOSX/train/cat/1.png": b"junk",
}


@pytest.mark.parametrize("name", ["pets", "pets.zip"])
@pytest.mark.parametrize("wrapper", ["", "some/wrapper/"])
def test_train_and_test_folders(tmp_path: Path, name: str, wrapper: str) -> None:
    files = {f"{wrapper}{file}": content for file, content in SPLIT.items() if "MAC" not in file}
    dataset = load_images(make(tmp_path / name, files), size=(4, 6))
    assert dataset.name == "pets"
    assert dataset.class_names == ("cat", "dog")
    assert dataset.train.inputs.shape == (3, 3, 4, 6)
    assert dataset.train.labels.tolist() == [0, 1, 1]
    assert dataset.test.labels.tolist() == [0]
    reds = (dataset.train.inputs[:, 0, 0, 0] * 255).round().tolist()
    assert reds == [10, 20, 30]
    assert dataset.notes == ()
    assert dataset.origin.exclusions == ("the classes (the names of the image folders)",)
    declared = load_images(tmp_path / name, size=(4, 6), classes=("dog", "cat"))
    assert declared.train.labels.tolist() == [1, 0, 0]
    assert declared.origin.exclusions == ()
    some = load_images(tmp_path / name, classes=("dog", "cow"))
    assert some.train.labels.tolist() == [0, 0]
    assert some.notes == ("Left out 2 images in other folders.",)


def test_hidden_files_are_passed_over(tmp_path: Path) -> None:
    assert len(load_images(make(tmp_path / "a.zip", SPLIT)).train) == 3


def test_a_table_that_lists_the_images_is_loaded_instead(tmp_path: Path) -> None:
    path = make(tmp_path / "flat", {f"u{i % 3}/{i}.png": png(i) for i in range(6)})
    (path / "notes.csv").write_text("by,when\nme,today\n")
    assert len(load_images(path).class_names) == 3
    rows = "".join(f"u{i % 3}/{i}.png,u{i % 3},a\n" for i in range(6))
    (path / "labels.csv").write_text(f"file,who,what\n{rows}")
    with pytest.raises(UserError, match="lists these images in its column 'file'") as refused:
        load_images(path)
    assert "labels.csv --data image=file" in str(refused.value)


def test_without_a_test_folder_about_a_tenth_is_held_out(tmp_path: Path) -> None:
    files = {f"{'ab'[i % 2]}/{i}.png": png(i % 256, mode="L") for i in range(300)}
    path = make(tmp_path / "plain", files)
    first, again, other = load_images(path), load_images(path), load_images(path, seed=1)
    assert len(first.train) + len(first.test) == 300
    assert 10 < len(first.test) < 55
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert not torch.equal(first.test.inputs, other.test.inputs)
    assert f"{len(first.test)} images, drawn independently, are held out" in first.notes[0]


@pytest.mark.parametrize("seed", range(5))
def test_one_image_less_changes_nothing_else(tmp_path: Path, seed: int) -> None:
    """One permutation of all 200 images exchanged 36 training examples when one was removed."""
    names = [f"{'ab'[i % 2]}/{i}.png" for i in range(200)]

    def training(kept: list[str], folder: str) -> dict[float, int]:
        files = {name: png(int(name[2:-4])) for name in kept}
        data = load_images(make(tmp_path / folder, files), (4, 4), classes=("a", "b"), seed=seed)
        reds = (data.train.inputs[:, 0, 0, 0] * 255).round().tolist()
        return dict(zip(reds, data.train.labels.tolist(), strict=True))

    whole = training(names, "whole")
    for gone in (0, 57, 199):
        without = training([n for n in names if n != names[gone]], f"without {gone}")
        assert {red: y for red, y in whole.items() if red != gone} == without


def test_no_image_decides_the_size_or_the_channels(tmp_path: Path) -> None:
    gray = {f"{'ab'[i % 2]}/{i}.png": png(i, mode="L") for i in range(20)}
    large = {f"a/x{i}.png": png(i, (40, 30)) for i in range(30)}
    one = load_images(make(tmp_path / "one", gray), classes=("a", "b"))
    two = load_images(make(tmp_path / "two", gray | large), classes=("a", "b"))
    assert one.train.inputs.shape[1:] == two.train.inputs.shape[1:] == (3, 32, 32)
    plain = load_images(tmp_path / "two", size=(5, 7), color=False)
    assert plain.train.inputs.shape[1:] == (1, 5, 7)
    with pytest.raises(UserError, match="size is 0×7"):
        load_images(tmp_path / "two", size=(0, 7))


def test_sizes_and_modes_are_made_one(tmp_path: Path) -> None:
    files = {"train/a/1.png": png(1), "train/b/1.png": png(99, (12, 8), "L")}
    dataset = load_images(make(tmp_path / "mixed", files | {"test/a/1.png": png(4)}), (4, 6))
    assert dataset.train.inputs.shape == (2, 3, 4, 6)
    assert torch.equal((dataset.train.inputs[1] * 255).round(), torch.full((3, 4, 6), 99.0))


@pytest.mark.parametrize("name", ["../evil/1.png", "/abs/a/1.png", "a\\..\\b/1.png", "c:/a/1.png"])
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="unsafe name"):
        load_images(make(tmp_path / "a.zip", {"a/1.png": png(1), name: png(1)}))


def test_absurd_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "a.zip", {"a/1.png": png(1), "b/1.png": bytes(5000)})
    monkeypatch.setattr(images, "MAX_FILE", 4000)
    with pytest.raises(UserError, match=r"'b/1.png' in .* declares 5000 bytes"):
        load_images(path)
    monkeypatch.setattr(images, "MAX_TOTAL", 4000)
    with pytest.raises(UserError, match="declare more than 4000 bytes"):
        load_images(path)


def test_too_many_pixels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path / "a", {"a/1.png": png(1), "b/1.png": png(2, (50, 50))})
    monkeypatch.setattr(images, "MAX_PIXELS", 2000)
    with pytest.raises(UserError, match=r"'b/1.png' \(50×50 is more than"):
        load_images(path)
    monkeypatch.setattr(images, "MAX_PIXELS", 10**6)
    monkeypatch.setattr(images, "MAX_TOTAL", 2000)
    with pytest.raises(UserError, match="do not fit in memory"):
        load_images(path)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a/1.png": png(1), "b/bad.png": b"junk"}, "Cannot read the image 'b/bad.png'"),
        ({"a/1.png": png(1), "b/bad.png": png(1)[:45]}, "Cannot read the image 'b/bad.png'"),
        ({"1.png": png(1), "a/2.png": png(1)}, "is not in a class folder"),
        ({"a/1.png": png(1), "b/c/1.png": png(1)}, "is not in a class folder"),
        ({"test/a/1.png": png(1)}, "no training images"),
        ({"readme.txt": b"hello"}, "no training images"),
    ],
)
@pytest.mark.parametrize("name", ["a", "a.zip"])
def test_broken_sets(tmp_path: Path, files: dict[str, bytes], says: str, name: str) -> None:
    with pytest.raises(UserError, match=says):
        load_images(make(tmp_path / name, files))


def test_damaged_and_missing_zips(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such folder or file"):
        load_images(tmp_path / "absent.zip")
    (tmp_path / "bad.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match="not a readable zip"):
        load_images(tmp_path / "bad.zip")
    path = make(tmp_path / "a.zip", {"a/1.png": png(1), "a/2.png": png(1)})
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"'a/1.png' in .* is damaged"):
        load_images(path)


@needs_photos
def test_the_real_photos(tmp_path: Path) -> None:
    with zipfile.ZipFile(SHARED / "cifar10.zip") as archive:
        folders: dict[str, list[str]] = {}
        for name in sorted(archive.namelist()):
            if name.endswith(".png") or name.endswith(".jpg"):
                folders.setdefault(name.rpartition("/")[0], []).append(name)
        some = {n: archive.read(n) for names in folders.values() for n in names[:20]}
    dataset = load_images(make(tmp_path / "photos.zip", some))
    assert dataset.train.inputs.shape == (200, 3, 32, 32)
    assert dataset.test.inputs.shape == (200, 3, 32, 32)
    assert dataset.class_names[:2] == ("airplane", "automobile")
    assert torch.bincount(dataset.train.labels).tolist() == [20] * 10
    assert np.isclose(float(dataset.train.inputs.mean()), 0.48, atol=0.06)


def test_every_image_is_one_block_of_memory(tmp_path: Path) -> None:
    dataset = load_images(make(tmp_path / "pets", SPLIT), size=(4, 6))
    assert dataset.train.inputs[:].is_contiguous()
    assert dataset.test.inputs[:].is_contiguous()


def test_a_large_zip_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path / "home"))
    monkeypatch.setattr(images, "WORTH_CACHING", 3)
    path = make(tmp_path / "pets.zip", SPLIT)
    first = load_images(path, size=(4, 6))
    (stored,) = (tmp_path / "home" / "decoded").iterdir()
    assert stored.stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patch:
        patch.setattr(images, "decoded", lambda *_: pytest.fail("decoded twice"))
        assert load_images(path, size=(4, 6)).train.inputs.equal(first.train.inputs)
    assert load_images(path, size=(2, 2)).train.inputs.shape == (3, 3, 2, 2)  # another size
    stored.write_bytes(stored.read_bytes()[:-1])  # a broken file is decoded again
    assert load_images(path, size=(4, 6)).train.inputs.equal(first.train.inputs)
    changed = make(tmp_path / "pets.zip", {**SPLIT, "train/cat/1.png": png(11)})
    assert not load_images(changed, size=(4, 6)).train.inputs.equal(first.train.inputs)
