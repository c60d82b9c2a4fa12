"""A few hashes of a data set's examples, by which another version of it can be recognised.

The smallest SKETCH of all hashes are a uniform sample of the distinct examples, and the same
examples are sampled in both of two sets that share them (Broder 1997, bottom-k sketches).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SKETCH = 64
ALIKE = 0.1  # of two sketches: sets without a common example come to 0


def sketched(hashes: np.ndarray) -> tuple[str, ...]:
    """The smallest distinct ones of uint64 hashes, as text."""
    return tuple(f"{value:016x}" for value in np.unique(hashes)[:SKETCH].tolist())


def overlap(one: Sequence[str], other: Sequence[str]) -> float:
    """An estimate of |A ∩ B| / |A ∪ B| from the sketches of A and B.

    >>> overlap(["1", "2", "3"], ["2", "3", "4"])
    0.5
    """
    if not one or not other:
        return 0.0
    union = sorted({*one, *other})[:SKETCH]
    both = set(one) & set(other)
    return sum(value in both for value in union) / len(union)
