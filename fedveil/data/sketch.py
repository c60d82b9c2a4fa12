"""A small sample of example hashes that identifies another version of the same data set.

The smallest SKETCH of all hashes are a uniform sample of the distinct examples, and two data sets
sample the same examples from what they share (Broder 1997, bottom-k sketches).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SKETCH = 64
ALIKE = 0.1  # overlap of two sketches; data sets without a common example have 0


def sketched(hashes: np.ndarray, size: int = SKETCH) -> tuple[str, ...]:
    """The smallest distinct hashes (uint64), as text."""
    return tuple(f"{value:016x}" for value in np.unique(hashes)[:size].tolist())


def overlap(one: Sequence[str], other: Sequence[str], size: int = SKETCH) -> float:
    """An estimate of |A ∩ B| / |A ∪ B| from the sketches of A and B.

    >>> overlap(["1", "2", "3"], ["2", "3", "4"])
    0.5
    """
    if not one or not other:
        return 0.0
    union = sorted({*one, *other})[:size]
    both = set(one) & set(other)
    return sum(value in both for value in union) / len(union)
