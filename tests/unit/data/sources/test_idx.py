from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedveil.data.sources.idx import read_idx
from fedveil.errors import UserError
from tests.unit.data.sources.idxbytes import CODES, idx_bytes

ARRAYS = hnp.arrays(
    st.sampled_from(sorted(CODES)).map(np.dtype),
    hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5),
)
GOOD = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))


@given(array=ARRAYS, zipped=st.booleans())
def test_what_was_written_is_read(array: np.ndarray, zipped: bool) -> None:
    content = idx_bytes(array)
    read = read_idx(gzip.compress(content, mtime=0) if zipped else content)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


@given(cut=st.integers(0, len(GOOD) - 1), zipped=st.booleans())
def test_every_truncation_is_refused(cut: int, zipped: bool) -> None:
    content = gzip.compress(GOOD[:cut], mtime=0) if zipped else GOOD[:cut]
    with pytest.raises(UserError):
        read_idx(content)


@given(content=st.binary(max_size=60))
def test_arbitrary_bytes_give_an_array_or_a_user_error(content: bytes) -> None:
    try:
        read = read_idx(content)
    except UserError:
        return
    assert 1 <= read.ndim <= 8
    assert read.nbytes < len(content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not an IDX file"),
        (b"\x01\0\x08\x01" + GOOD[4:], "is not an IDX file"),
        (b"\0\0\x0a\x02" + GOOD[4:], "is not an IDX file"),
        (b"\0\0\x08\x00", "is not an IDX file"),
        (b"\0\0\x08\x09" + bytes(36), "is not an IDX file"),
        (GOOD[:9], "ends inside its header"),
        (GOOD[:-1], "declares 6 bytes but has only 5"),
        (GOOD + b"x", "declares 6 bytes but has more"),
        (b"\0\0\x0e\x02" + b"\xff" * 8, "more than any known"),
        (gzip.compress(GOOD, mtime=0)[:-9], "Cannot read"),
        (b"\x1f\x8b" + bytes(20), "Cannot read"),
    ],
)
def test_broken_files_get_a_sentence(content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_idx(content)


def test_a_zero_does_not_hide_sizes_that_no_array_can_have() -> None:
    """Found by fuzzing."""
    header = b"\0\0\x0d\x03" + (2**31).to_bytes(4, "big") * 2 + bytes(4)
    with pytest.raises(UserError, match="more than any known"):
        read_idx(header)


def test_a_lying_header_allocates_nothing() -> None:
    lie = b"\0\0\x08\x01" + (2**31 - 1).to_bytes(4, "big") + b"few bytes"
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(UserError, match="has only 9"):
        read_idx(lie)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 2**23


def test_a_path_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "some-idx"
    path.write_bytes(GOOD)
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(UserError, match="missing-idx"):
        read_idx(tmp_path / "missing-idx")
