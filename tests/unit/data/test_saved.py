"""Data in files: the same as in memory, and refused when they are not what was written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil import algorithms
from fedveil.data import save as saving
from fedveil.data.describe import describe
from fedveil.data.federated import Examples, Federated
from fedveil.data.origin import SIMULATED, UNKNOWN, UNSAID, Origin
from fedveil.data.save import save_clients, save_federated
from fedveil.data.saved import ABOUT, HEADER, is_saved, open_federated, seal, verify_federated
from fedveil.data.synthetic import synthetic
from fedveil.errors import UserError
from fedveil.recipe import Recipe
from fedveil.training.prepare import prepare
from fedveil.training.start import train


@pytest.fixture
def place(blobs: Federated, tmp_path: Path) -> Path:
    """The blobs, saved."""
    save_federated(blobs, tmp_path / "blobs")
    return tmp_path / "blobs"


def assert_equal(opened: Federated, data: Federated) -> None:
    ours, theirs = (
        (d.inputs[:], d.labels[:], d.offsets, d.test.inputs[:], d.test.labels[:])
        for d in (opened, data)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert opened.fingerprint() == data.fingerprint()
    for name in (*ABOUT, "origin"):
        assert getattr(opened, name) == getattr(data, name)


# The same as in memory


def test_saved_data_are_the_data(blobs: Federated, place: Path) -> None:
    opened = open_federated(place)
    assert_equal(opened, blobs)
    verify_federated(place)
    assert is_saved(place)
    assert not is_saved(place.parent)


@pytest.mark.parametrize(
    "change",
    [
        {"notes": ("one", "zwei"), "encoder": '{"columns": []}'},
        {"test": Examples(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))},
        {"loss": "half_squared", "labels": torch.linspace(0, 1, 66), "classes": 1},
        {
            "tested_on_clients": True,
            "class_names": ("a", "b", "c"),
            "origin": Origin(True, ("the classes of 'y'", "the means of x")),
            "sketch": ("00ff", "0100"),
        },
    ],
    ids=["notes and encoder", "no test examples", "numbers as targets", "guards"],
)
def test_whatever_they_hold(blobs: Federated, tmp_path: Path, change: dict[str, object]) -> None:
    data = replace(blobs, **change)
    save_federated(data, tmp_path / "a")
    verify_federated(tmp_path / "a")
    assert_equal(open_federated(tmp_path / "a"), data)


def test_sequences_and_examples_as_units(tmp_path: Path) -> None:
    tokens = torch.arange(24).reshape(6, 4) % 5
    test = Examples(tokens[:1], tokens[:1])
    data = Federated("text", tokens, tokens, torch.tensor([0, 2, 6]), test, 5).by_example()
    save_federated(data, tmp_path / "a")
    assert_equal(open_federated(tmp_path / "a"), data)


def test_any_index_gives_what_a_tensor_would(blobs: Federated, place: Path) -> None:
    column, tensor = open_federated(place).inputs, blobs.inputs[:]
    for index in (0, -1, slice(3, 9), torch.tensor(4), torch.tensor([[0, 65], [7, 7]])):
        assert torch.equal(column[index], tensor[index])
    with pytest.raises(IndexError):
        column[66]
    assert torch.equal(open_federated(place).client(3).inputs[:], blobs.client(3).inputs[:])


@pytest.mark.parametrize("index", [0, slice(None), torch.tensor(0), torch.tensor([0])], ids=str)
def test_what_was_asked_for_can_be_changed_without_harm(
    blobs: Federated, place: Path, index: int | slice | torch.Tensor
) -> None:
    opened = open_federated(place)
    opened.inputs[index].zero_()
    assert torch.equal(opened.inputs[:], blobs.inputs[:])
    verify_federated(place)


def test_nothing_is_read_before_it_is_asked_for(place: Path) -> None:
    opened = open_federated(place)
    assert not isinstance(opened.inputs, torch.Tensor)
    assert not isinstance(opened.test.inputs, torch.Tensor)


def test_a_run_on_saved_data_is_the_run_on_the_data(
    blobs: Federated, place: Path, private_recipe: Recipe
) -> None:
    runs = [
        train(private_recipe, data, "mlp-4", rounds=3, epsilon=5.0)
        for data in (blobs, open_federated(place))
    ]
    ours, theirs = (list(run.model.parameters()) for run in runs)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
    assert runs[0].loss == runs[1].loss


def test_they_are_described_and_split_by_example(blobs: Federated, place: Path) -> None:
    assert describe(open_federated(place)) == describe(blobs)
    assert open_federated(place).by_example().fingerprint() == blobs.by_example().fingerprint()


def as_format_1(place: Path) -> None:
    """The header as earlier versions wrote it."""
    plain = json.loads((place / HEADER).read_text())
    for name in ("sha256", "class_names", "tested_on_clients", "origin", "sketch"):
        del plain[name]
    plain["format"] = "fedveil data 1"
    plain["sha256"] = seal(plain)
    (place / HEADER).write_text(json.dumps(plain))


def test_data_of_earlier_versions_are_opened_with_the_safe_answers(place: Path) -> None:
    """They do not say whether test examples are the clients' own, or what was fitted."""
    as_format_1(place)
    opened = open_federated(place)
    assert opened.tested_on_clients
    assert opened.origin == UNKNOWN
    assert opened.class_names == ()
    verify_federated(place)


@pytest.mark.parametrize("lost", ["origin", "tested_on_clients"])
def test_a_header_that_lost_a_guard_is_no_old_header(place: Path, lost: str) -> None:
    plain = json.loads((place / HEADER).read_text())
    del plain["sha256"], plain[lost]
    (place / HEADER).write_text(json.dumps(plain | {"sha256": seal(plain)}))
    if lost == "origin":
        with pytest.raises(UserError, match="has changed since it was saved"):
            open_federated(place)
    else:
        assert open_federated(place).tested_on_clients


# Written piece by piece


def test_pieces_of_any_size_make_the_same_files(
    blobs: Federated, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "CHUNK", 60)  # of 5 numbers an example
    taken: list[int] = []
    add = saving._Sink.add

    def watched(sink: saving._Sink, entries: torch.Tensor) -> None:
        taken.append(entries.numel())
        add(sink, entries)

    monkeypatch.setattr(saving._Sink, "add", watched)
    save_federated(blobs, place.parent / "again")
    assert len(taken) > 10
    assert max(taken) <= 60
    for file in place.iterdir():
        assert (place.parent / "again" / file.name).read_bytes() == file.read_bytes()


def test_clients_are_written_as_they_come(blobs: Federated, place: Path) -> None:
    grown: list[int] = []

    def clients() -> Iterator[Examples]:
        for client in range(blobs.clients):
            (unfinished,) = place.parent.glob(".*/inputs.npy")
            grown.append(unfinished.stat().st_size)
            yield blobs.client(client)

    save_clients(
        place.parent / "again",
        clients(),
        blobs.test,
        "blobs",
        3,
        tested_on_clients=False,
        origin=blobs.origin,
    )
    assert_equal(open_federated(place.parent / "again"), blobs)
    assert grown == sorted(grown)


@pytest.mark.parametrize("origin", [SIMULATED, Origin(exclusions=("the means of age",))])
def test_clients_whose_origin_is_not_said_get_no_clean_one(
    blobs: Federated, tmp_path: Path, origin: Origin
) -> None:
    """A fitted table, or a split, that went through `save_clients` has no unqualified statement."""
    data = replace(blobs, origin=origin)
    clients = [data.client(client) for client in range(data.clients)]
    save_clients(tmp_path / "unsaid", clients, data.test, "a", 3)
    save_clients(tmp_path / "said", clients, data.test, "a", 3, origin=data.origin)
    assert open_federated(tmp_path / "said").origin == origin
    unsaid = open_federated(tmp_path / "unsaid")
    assert unsaid.origin == UNSAID
    recipe = algorithms.dp_fedavg(steps=1, noise_multiplier=1.0)
    first = prepare(recipe, unsaid, rounds=1).statement().main.sentence()
    assert first.startswith(
        "Apart from any encoder, classes or split into clients from before the data"
    )


def test_a_population_on_demand_is_saved_whole(tmp_path: Path) -> None:
    data = synthetic(clients=30, examples=4, features=6)
    save_federated(data, tmp_path / "a")
    opened = open_federated(tmp_path / "a")
    assert torch.equal(opened.inputs[:], data.inputs[:])
    assert torch.equal(opened.test.labels[:], data.test.labels[:])


def test_numpy_can_read_the_files(blobs: Federated, place: Path) -> None:
    assert np.array_equal(np.load(place / "inputs.npy"), blobs.inputs[:].numpy())
    assert np.array_equal(np.load(place / "offsets.npy"), blobs.offsets.numpy())


def nothing_left(tmp_path: Path) -> bool:
    return not list(tmp_path.iterdir())


def test_a_failure_on_the_way_leaves_nothing(blobs: Federated, tmp_path: Path) -> None:
    def clients() -> Iterator[Examples]:
        yield blobs.client(0)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        save_clients(tmp_path / "a", clients(), blobs.test, "blobs", 3)
    assert nothing_left(tmp_path)


UNSOUND: dict[str, tuple[list[Examples], str]] = {
    "nobody": ([], "no clients"),
    "a class too many": (
        [Examples(torch.zeros(2, 1), torch.tensor([0, 3]))],
        "labels from 0 to 3, but 3 classes",
    ),
    "an empty client": (
        [Examples(torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64)) for n in (2, 0, 1)],
        "Client 1 of 'own' has no examples",
    ),
    "another shape": (
        [Examples(torch.zeros(1, n), torch.zeros(1, dtype=torch.int64)) for n in (2, 3)],
        r"shape \(3,\) follow inputs of type float32 and shape \(2,\)",
    ),
    "another kind": (
        [Examples(torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64))],
        "inputs of type float64 cannot be saved. Convert them to float32 or int64",
    ),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_data_are_refused_and_leave_nothing(case: str, tmp_path: Path) -> None:
    clients, why = UNSOUND[case]
    test = Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(UserError, match=why):
        save_clients(tmp_path / "a", clients, test, "own", 3)
    assert nothing_left(tmp_path)


def test_a_place_that_is_taken_is_left_alone(blobs: Federated, place: Path) -> None:
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    with pytest.raises(UserError, match="already exists"):
        save_federated(blobs, place)
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before


def test_a_place_that_cannot_be_written_to_is_one_sentence(
    blobs: Federated, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Could not save data to .*: Not a directory\.$"):
        save_federated(blobs, tmp_path / "file" / "a")


# Refused when opened


def edited(**change: object) -> Callable[[Path], None]:
    """The header changed by hand."""

    def edit(place: Path) -> None:
        plain = json.loads((place / HEADER).read_text())
        (place / HEADER).write_text(json.dumps(plain | change))

    return edit


def replaced(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def harm(place: Path) -> None:
        (place / name).write_bytes(change((place / name).read_bytes()))

    return harm


def stored_as(name: str, change: Callable[[np.ndarray], object]) -> Callable[[Path], None]:
    """Another array in a file's place."""

    def harm(place: Path) -> None:
        array = np.load(place / name)
        with (place / name).open("wb") as sink:
            np.save(sink, change(array), allow_pickle=True)

    return harm


def zipped(place: Path) -> None:
    with (place / "inputs.npy").open("wb") as sink:
        np.savez(sink, np.zeros((66, 5), dtype=np.float32))


def flipped(data: bytes) -> bytes:
    """One bit of the last byte but 16."""
    return data[:-17] + bytes([data[-17] ^ 1]) + data[-16:]


HARMED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "no header": (HEADER, lambda place: (place / HEADER).unlink()),
    "an empty header": (HEADER, replaced(HEADER, lambda data: b"")),
    "a header cut short": (HEADER, replaced(HEADER, lambda data: data[:-9])),
    "a header of something else": (HEADER, replaced(HEADER, lambda data: b"[1, 2]")),
    "a header in no text": (HEADER, replaced(HEADER, lambda data: b"\xff\x00" * 50)),
    "a deep header": (HEADER, replaced(HEADER, lambda data: b"[" * 100_000)),
    "a header of another format": (HEADER, edited(format="fedveil data 3")),
    "more classes in the header": (HEADER, edited(classes=5)),
    "another field in the header": (HEADER, edited(colour="red")),
    "inputs missing": ("inputs.npy", lambda place: (place / "inputs.npy").unlink()),
    "inputs cut short": ("inputs.npy", replaced("inputs.npy", lambda data: data[:-4])),
    "inputs with more behind": ("inputs.npy", replaced("inputs.npy", lambda data: data + b"\0")),
    "inputs of nothing": ("inputs.npy", replaced("inputs.npy", lambda data: b"")),
    "inputs of noise": ("inputs.npy", replaced("inputs.npy", lambda data: b"\x93NOISE" * 99)),
    "inputs of another kind": ("inputs.npy", stored_as("inputs.npy", lambda a: a.view(np.int32))),
    "inputs of another shape": ("inputs.npy", stored_as("inputs.npy", lambda a: a[:, :4])),
    "inputs in another order": ("inputs.npy", stored_as("inputs.npy", np.asfortranarray)),
    "inputs in other bytes": ("inputs.npy", stored_as("inputs.npy", lambda a: a.astype(">f4"))),
    "inputs with code in them": ("inputs.npy", stored_as("inputs.npy", lambda a: a.astype(object))),
    "inputs in an archive": ("inputs.npy", zipped),
    "labels cut short": ("labels.npy", replaced("labels.npy", lambda data: data[:-8])),
    "test labels missing": ("test_labels.npy", lambda place: (place / "test_labels.npy").unlink()),
    "offsets altered": ("offsets.npy", replaced("offsets.npy", flipped)),
}


@pytest.mark.parametrize("case", HARMED)
def test_a_harmed_directory_is_one_sentence_that_names_the_file(case: str, place: Path) -> None:
    name, harm = HARMED[case]
    harm(place)
    with pytest.raises(UserError) as refusal:
        open_federated(place)
    sentence = str(refusal.value)
    assert name in sentence
    assert sentence.lower().endswith("save the data again.")
    assert "\n" not in sentence


@pytest.mark.parametrize("name", ["inputs", "labels", "test_inputs", "test_labels"])
def test_altered_bytes_are_found_when_all_is_read(name: str, place: Path) -> None:
    """Opening does not read them, as the module says; a bit of any column is found by verifying."""
    replaced(f"{name}.npy", flipped)(place)
    open_federated(place)
    with pytest.raises(
        UserError, match=rf"{name}\.npy has changed since it was saved: its content"
    ):
        verify_federated(place)


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    with pytest.raises(UserError, match=f"has no {HEADER}"):
        open_federated(tmp_path)


def test_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"has no {HEADER}"):
        verify_federated(os.path.join(tmp_path, "nowhere"))


# Several inputs


def padded(count: int, named: bool, high: int = 9) -> Examples:
    rng = np.random.default_rng(count)
    parts = {
        "ids": torch.from_numpy(rng.integers(0, high + 1, (count, 5))),
        "mask": torch.from_numpy(rng.integers(0, 2, (count, 5)).astype(bool)),
        "extra": torch.from_numpy(rng.normal(size=(count, 3)).astype(np.float16)),
        "scale": torch.from_numpy(rng.normal(size=count)),
    }
    labels = torch.from_numpy(rng.integers(0, 3, count))
    return Examples.of(parts if named else tuple(parts.values()), labels)


def several(named: bool) -> Federated:
    train, test = padded(12, named), padded(4, named)
    offsets = torch.tensor([0, 2, 7, 12])
    return Federated(
        "padded", train.inputs, train.labels, offsets, test, 3, layout=train.layout
    )  # fmt: skip


@pytest.mark.parametrize("named", [True, False])
def test_several_inputs_are_saved_and_opened(named: bool, tmp_path: Path) -> None:
    data = several(named)
    save_federated(data, tmp_path / "saved")
    opened = open_federated(tmp_path / "saved")
    verify_federated(tmp_path / "saved")
    assert_equal(opened, data)
    assert opened.layout == opened.test.layout == data.layout
    highs = [[each.high for each in one.layout.fields] for one in (opened, data)]
    assert highs[0] == highs[1]
    found, wanted = (one.layout.unpack(one.inputs[:]) for one in (opened, data))
    if named:
        assert list(found) == list(wanted)
        found, wanted = found.values(), wanted.values()
    for mine, other in zip(found, wanted, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def test_clients_with_several_inputs_are_saved_one_at_a_time(tmp_path: Path) -> None:
    """Integers that synthetic examples may have are those of the largest client."""
    clients = [padded(2, True, high=4), padded(5, True, high=30)]
    save_clients(tmp_path / "saved", clients, padded(1, True), "padded", 3)
    opened = open_federated(tmp_path / "saved")
    assert torch.equal(opened.client(1).inputs[:], clients[1].inputs[:])
    assert opened.layout.fields[0].high == max(one.layout.fields[0].high for one in clients)


def test_clients_with_other_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Some examples have the inputs"):
        save_clients(tmp_path / "a", [padded(2, False)], padded(2, True), "padded", 3)
    plain = Examples(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))
    with pytest.raises(UserError, match="several inputs, and others have one tensor"):
        save_clients(tmp_path / "b", [plain], padded(2, True), "padded", 3)
    bytes_alone = Examples(torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    with pytest.raises(UserError, match="type uint8 cannot be saved"):
        save_clients(tmp_path / "c", [bytes_alone], bytes_alone, "bytes", 3)


def test_the_fingerprint_depends_on_which_input_the_bytes_are() -> None:
    """Otherwise two runs that read them differently would draw the same noise."""
    data = several(named=True)
    first, *others = data.layout.fields
    renamed = replace(data.layout, fields=(replace(first, name="tokens"), *others))
    other = replace(data, layout=renamed, test=replace(data.test, layout=renamed))
    assert other.fingerprint() != data.fingerprint()
    assert other.contents() == data.contents()


def test_a_layout_that_does_not_fit_the_saved_inputs_is_refused(tmp_path: Path) -> None:
    save_federated(several(named=True), tmp_path / "saved")
    file = tmp_path / "saved" / HEADER
    plain = json.loads(file.read_text())
    plain.pop("sha256")
    for fields in (plain["fields"][1:], None):
        changed = {**plain, "fields": fields}
        file.write_text(json.dumps({**changed, "sha256": seal(changed)}))
        with pytest.raises(UserError, match="has changed since it was saved"):
            open_federated(tmp_path / "saved")
