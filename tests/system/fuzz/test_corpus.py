"""What fuzzing has kept is read again, and near misses of whole inputs are tried anew each time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.system.fuzz import targets
from tests.system.fuzz.targets import TARGETS, survives

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = {"toml": 150, "csv": 60}  # of the slower parsers


@pytest.fixture(autouse=True, scope="module")
def own_folder() -> Iterator[None]:
    """Files of the targets, gone afterwards."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "folder", lambda: Path(place))
        targets._run.cache_clear()
        yield
    targets._run.cache_clear()


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_read_or_refused(name: str) -> None:
    kept = sorted((CORPUS / name).iterdir())
    assert len(kept) >= 5
    for file in kept:
        survives(name, file.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_some_seeds_are_read_to_the_end(name: str) -> None:
    """Were everything refused at the first byte, nothing would have been tested."""
    read = 0
    for seed in TARGETS[name].seeds():
        try:
            TARGETS[name].read(seed)
            read += 1
        except targets.UserError:
            continue
    assert read >= 2


def test_the_corpus_is_small() -> None:
    assert sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < 300_000


def changed(seed: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """The seed with pieces replaced."""
    for start, length, piece in cuts:
        place = start % (len(seed) + 1)
        seed = seed[:place] + piece + seed[place + length :]
    return seed


CUTS = st.lists(
    st.tuples(st.integers(0, 9000), st.integers(0, 12), st.binary(max_size=8)), max_size=4
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:pickletools")  # odd escapes in strings
@pytest.mark.parametrize("name", TARGETS)
def test_near_misses_are_read_or_refused(name: str) -> None:
    @settings(
        max_examples=EXAMPLES.get(name, 300),
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(TARGETS[name].seeds()), CUTS)
    def attempt(seed: bytes, cuts: list[tuple[int, int, bytes]]) -> None:
        survives(name, changed(seed, cuts))

    attempt()


@pytest.mark.parametrize("name", TARGETS)
def test_a_defect_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(content: bytes) -> None:
        raise KeyError("not a sentence")

    monkeypatch.setitem(TARGETS, name, targets.Target(broken, list))
    with pytest.raises(KeyError):
        survives(name, b"")
