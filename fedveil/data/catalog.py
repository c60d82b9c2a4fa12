"""Data sets by name: where fedveil looks for them and where it downloads them from.

Importing this module is cheap: torch and the parsers load with the first data set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.data.download import RemoteFile, data_directory, fetch
from fedveil.errors import UserError, unknown
from fedveil.serialization.arguments import for_python

if TYPE_CHECKING:
    from fedveil.data.federated import Dataset


@dataclass(frozen=True)
class CatalogEntry:
    """One data set: description, citation, the files it consists of, and how to read them."""

    name: str
    title: str
    summary: str
    citation: str
    read: Callable[[Path], Dataset]
    layouts: tuple[tuple[str, ...], ...] = ()  # any one of these sets of file names is enough
    files: tuple[RemoteFile, ...] = ()
    system: tuple[Path, ...] = ()  # folders where an operating system's package installs it
    package: str = ""  # that package's name
    folder: str = ""  # subfolder of the data directory [default: `name`]
    bundled: bool = False  # ships with a library and needs no file

    def home(self) -> Path:
        """Folder of this data set in the data directory (`FEDVEIL_DATA`, or ~/.cache/fedveil)."""
        return data_directory() / (self.folder or self.name)

    def places(self, directory: Path | None = None) -> tuple[Path, ...]:
        """Folders to search, in this order."""
        given = (directory, directory / (self.folder or self.name)) if directory else ()
        return (*given, *self.system, self.home())

    def found(self, directory: Path | None = None) -> Path | None:
        """The first folder that contains one of the layouts, or None."""
        return next((place for place in self.places(directory) if self._is_in(place)), None)

    def here(self, directory: Path | None = None) -> bool:
        """Whether the data set loads without a download."""
        return self.bundled or self.found(directory) is not None

    def _is_in(self, place: Path) -> bool:
        return any(all(_present(place, name) for name in layout) for layout in self.layouts)


@for_python
def load(name: str, directory: str | Path | None = None, download: bool = True) -> Dataset:
    """Load the data set `name` from `directory`, the system, the data directory or its public URL.

    If a data set is not available, the error says which files to put where. With
    `download=False`, nothing is downloaded.

    >>> load("digits")
    <Dataset digits: 1437 training and 360 test examples, 10 classes>
    """
    if name not in CATALOG:
        raise unknown("data set", name, CATALOG, "`fedveil datasets` lists all.")
    entry, directory = CATALOG[name], None if directory is None else Path(directory)
    if entry.bundled:
        return entry.read(Path())
    place = entry.found(directory)
    return entry.read(_obtain(entry, directory, download) if place is None else place)


@for_python
def load_path(
    path: Path | str,
    size: Sequence[int] | None = None,
    color: bool | None = None,
    classes: Sequence[Any] | None = None,
    seed: int = 0,
) -> Dataset:
    """Load a file or folder that is not a table.

    Args:
        path: Images in `<class>/<image>` or `<user>/<class>/<image>` or a zip of them, IDX files, a
            play, LEAF's JSON, or the HDF5 files of TensorFlow Federated.
        size: Height and width that every image is resized to. [default: 32 × 32]
        color: False for grayscale images. [default: color]
        classes: Public names of the class folders. [default: read from the folders]
        seed: Seed of the hold-out.

    >>> load_path("photos", size=(32, 32), classes=["cat", "dog"])  # doctest: +SKIP
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"No such file or folder: '{path}'.")
    idx = path.is_dir() and CATALOG["mnist"].found(path) == path
    if path.is_dir() and not idx and _is_leaf(path):
        from fedveil.data.sources.benchmarks import load_leaf

        return load_leaf(path)
    if (path.is_dir() and not idx) or path.suffix.lower() == ".zip":
        from fedveil.data.cells import spelled
        from fedveil.data.sources.images import load_images

        named = None if classes is None else spelled(classes)
        return load_images(path, _size(size), color is not False, named, seed)
    if any(setting is not None for setting in (size, color, classes)):
        raise UserError(
            f"'{path}' already defines its classes and sizes. Remove size, color and classes."
        )
    if idx:
        return _read_mnist(path)
    if path.suffix.lower() in (".json", ".h5", ".hdf5"):
        from fedveil.data.sources.benchmarks import load_hdf5, load_leaf

        return load_leaf(path) if path.suffix.lower() == ".json" else load_hdf5(path)
    if path.suffix.lower() == ".txt":
        from fedveil.data.sources.shakespeare import load_shakespeare

        return load_shakespeare(path, minimum=1, seed=seed)
    raise UserError(
        f"'{path}' is neither an image folder, a .zip of one, a .txt play, LEAF's JSON nor TFF's "
        "HDF5. For a CSV or "
        "Parquet table, also give its client and label columns."
    )


def _size(given: Sequence[int] | None) -> tuple[int, int] | None:
    """Height and width of every image."""
    if given is None:
        return None
    if len(given) != 2:
        raise UserError(f"size is {list(given)}. Give height and width, such as (32, 32).")
    return given[0], given[1]


def _is_leaf(path: Path) -> bool:
    """Whether a folder has LEAF's layout: JSON files in train/, or directly."""
    return any(path.glob("train/*.json")) or any(path.glob("*.json"))


def _obtain(entry: CatalogEntry, directory: Path | None, download: bool) -> Path:
    """Download all files of an entry; an error says which files to put where."""
    target = directory or entry.home()
    if not download or not entry.files:
        why = "downloading is off" if entry.files else "it cannot be downloaded"
        raise _unavailable(entry, target, f", and {why}")
    try:
        for file in entry.files:
            if not _present(target, file.name):
                fetch(file, target)
    except UserError as error:
        raise _unavailable(entry, target, f": {str(error).rstrip('.')}") from None
    return target


def _unavailable(entry: CatalogEntry, target: Path, why: str) -> UserError:
    """The error for a data set that is neither here nor downloadable, with what to do."""
    install = f"Install Debian's package {entry.package}, or put" if entry.package else "Put"
    files = " or ".join(" + ".join(names) for names in entry.layouts)
    return UserError(
        f"{entry.title} was not found{why}. {install} {files} in '{target}'. FEDVEIL_DATA sets "
        "another data directory. The data set 'digits' needs no files."
    )


def _present(place: Path, name: str) -> bool:
    """Whether a folder contains a file; IDX files may be gzipped or use MNIST's other spelling."""
    idx = (f"{name}.gz", name.replace("-idx", ".idx")) if name.endswith("-ubyte") else ()
    return any((place / spelling).exists() for spelling in (name, *idx))


def _read_fashion(place: Path) -> Dataset:
    from fedveil.data.sources.mnist import FASHION, load_mnist

    return load_mnist(place, "fashion-mnist", FASHION)


def _read_mnist(place: Path) -> Dataset:
    from fedveil.data.sources.mnist import load_mnist

    return load_mnist(place)


def _emnist_reader(part: str) -> Callable[[Path], Dataset]:
    def read(place: Path) -> Dataset:
        from fedveil.data.sources.mnist import load_emnist

        archive = place / "gzip.zip"
        return load_emnist(archive if archive.is_file() else place, part)

    return read


def _cifar_reader(classes: int) -> Callable[[Path], Dataset]:
    def read(place: Path) -> Dataset:
        from fedveil.data.sources.cifar import load_cifar
        from fedveil.data.sources.images import load_images

        known = (layout[0] for layout in _cifar_layouts(classes))
        path = next(place / name for name in known if (place / name).exists())
        return load_images(path) if path.suffix == ".zip" else load_cifar(path, classes)

    return read


def _cifar_layouts(classes: int) -> tuple[tuple[str, ...], ...]:
    folders = {10: ("cifar-10-batches-py", "cifar-10-batches-bin")}.get(
        classes, (f"cifar-{classes}-python", f"cifar-{classes}-binary")
    )
    archives = (f"cifar-{classes}-python.tar.gz", f"cifar-{classes}-binary.tar.gz")
    return tuple((name,) for name in (*archives, *folders, f"cifar{classes}.zip"))


def _read_svhn(place: Path) -> Dataset:
    from fedveil.data.sources.svhn import load_svhn

    return load_svhn(place)


def _read_shakespeare(place: Path) -> Dataset:
    from fedveil.data.sources.shakespeare import load_shakespeare

    named = place / "shakespeare.txt"
    return load_shakespeare(named if named.exists() else place / "input.txt")


def _read_leaf_shakespeare(place: Path) -> Dataset:
    from fedveil.data.sources.benchmarks import load_leaf

    return replace(load_leaf(place), name="leaf-shakespeare")


def _read_digits(place: Path) -> Dataset:
    from fedveil.data.sources.digits import load_digits

    return load_digits()


def _read_synthetic(place: Path) -> Dataset:
    from fedveil.data.synthetic import load_synthetic

    return load_synthetic()


def _read_problem(place: Path) -> Dataset:
    raise UserError("A problem has its own clients. Train it with --dataset, or see data.problems.")


def _quadratic(name: str, summary: str, citation: str) -> CatalogEntry:
    return CatalogEntry(name, name, summary, citation, _read_problem, bundled=True)


_IDX = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_IDX_NAMES = tuple(f"{name}-ubyte" for name in _IDX)


def _idx_files(base: str, *content_sha256: str) -> tuple[RemoteFile, ...]:
    pairs = zip(_IDX_NAMES, content_sha256, strict=True)
    return tuple(RemoteFile(f"{base}/{name}.gz", digest, gzipped=True) for name, digest in pairs)


def _emnist(part: str, summary: str) -> CatalogEntry:
    halves = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    return CatalogEntry(
        name=f"emnist-{part}",
        title=f"EMNIST {part}",
        summary=summary,
        citation="Cohen et al. 2017, EMNIST: an extension of MNIST to handwritten letters",
        read=_emnist_reader(part),
        layouts=(("gzip.zip",), tuple(f"emnist-{part}-{half}-ubyte" for half in halves)),
        files=(
            RemoteFile(
                "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
            ),
        ),
        folder="emnist",
    )


def _cifar(classes: int, sha256: str) -> CatalogEntry:
    return CatalogEntry(
        name=f"cifar{classes}",
        title=f"CIFAR-{classes}",
        summary=f"60,000 color photos, 32×32, {classes} classes",
        citation="Krizhevsky 2009, Learning multiple layers of features from tiny images",
        read=_cifar_reader(classes),
        layouts=_cifar_layouts(classes),
        files=(
            RemoteFile(f"https://www.cs.toronto.edu/~kriz/cifar-{classes}-python.tar.gz", sha256),
        ),
    )


_ENTRIES = (
    CatalogEntry(
        name="fashion-mnist",
        title="Fashion-MNIST",
        summary="70,000 grayscale images of clothing, 28×28, 10 classes",
        citation="Xiao et al. 2017, Fashion-MNIST: a novel image dataset",
        read=_read_fashion,
        layouts=(_IDX_NAMES,),
        files=_idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        system=(Path("/usr/share/datasets/fashion-mnist"),),
        package="dataset-fashion-mnist",
    ),
    CatalogEntry(
        name="mnist",
        title="MNIST",
        summary="70,000 handwritten digits, 28×28, 10 classes",
        citation="LeCun et al. 1998, Gradient-based learning applied to document recognition",
        read=_read_mnist,
        layouts=(_IDX_NAMES,),
        files=_idx_files(
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    _emnist("digits", "280,000 handwritten digits, 28×28, 10 classes"),
    _emnist("letters", "145,600 handwritten letters, 28×28, 26 classes"),
    _emnist("balanced", "131,600 handwritten characters, 28×28, 47 classes"),
    _emnist("byclass", "814,255 handwritten characters, 28×28, 62 classes"),
    _cifar(10, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"),
    _cifar(100, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"),
    CatalogEntry(
        name="svhn",
        title="SVHN",
        summary="99,289 cropped house numbers, 32×32, 10 classes",
        citation="Netzer et al. 2011, Reading digits in natural images",
        read=_read_svhn,
        layouts=(("train_32x32.mat", "test_32x32.mat"),),
        files=(
            RemoteFile(
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
            ),
            RemoteFile(
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
            ),
        ),
    ),
    CatalogEntry(
        name="shakespeare",
        title="Shakespeare",
        summary="Shakespeare's plays by speaking role, next-character prediction",
        citation="McMahan et al. 2017, Communication-efficient learning; the text is Karpathy's",
        read=_read_shakespeare,
        layouts=(("shakespeare.txt",), ("input.txt",)),
        files=(
            RemoteFile(
                "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                "tinyshakespeare/input.txt",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            ),
        ),
    ),
    CatalogEntry(
        name="leaf-shakespeare",
        title="LEAF's Shakespeare",
        summary="Shakespeare's plays by role and play, every window of 80 characters; made by"
        " LEAF's preprocess.sh",
        citation="Caldas et al. 2018, LEAF: a benchmark for federated settings",
        read=_read_leaf_shakespeare,
        layouts=(("train", "test"),),
    ),
    CatalogEntry(
        name="digits",
        title="Digits",
        summary="1,797 handwritten digits, 8×8, 10 classes (included in scikit-learn)",
        citation="Alpaydin and Kaynak 1998, Optical recognition of handwritten digits (UCI)",
        read=_read_digits,
        bundled=True,
    ),
    CatalogEntry(
        name="synthetic",
        title="Synthetic",
        summary="generated on demand for any number of clients; set clients, examples, features,"
        " classes, alpha",
        citation="Labels drawn as in Blackwell and MacQueen 1973, Ferguson distributions via Pólya "
        "urn schemes",
        read=_read_synthetic,
        bundled=True,
    ),
    _quadratic(
        "das2022-quadratics",
        "random quadratics in 200 dimensions with a known optimum; set start, clients, seed",
        "Das et al. 2022, §5.3",
    ),
    _quadratic(
        "zhang2022-table4",
        "three quadratics in one dimension, whose optimum is 0",
        "Zhang et al. 2022, Table 4",
    ),
    _quadratic(
        "zhang2022-claim21",
        "three quadratics in one dimension, with the optimum beyond the models' clipping threshold",
        "Zhang et al. 2022, Claim 2.1",
    ),
)
CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in _ENTRIES}
