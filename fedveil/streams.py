"""Randomness as an argument: independent streams keyed by (run key, round, purpose).

Two different keys give independent streams; the same key gives the same numbers on any machine.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def run_key(*facts: object) -> str:
    """The key of a run: any other seed, recipe or data give streams that share nothing.

    Two releases with the same noise would reveal their difference, so noise must not depend on the
    seed alone.

    >>> run_key(0, "dp_sgd") == run_key(0, "dp_sgd"), run_key(0, "dp_sgd") == run_key(0, "dp_lsgd")
    (True, False)
    """
    label = "\x00".join(str(fact) for fact in facts)
    return hashlib.blake2b(label.encode(), digest_size=16).hexdigest()


def stream(key: int | str, round: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose in one round; 128 bits of key, so streams do not collide.

    >>> stream(0, 3, "noise").integers(100) == stream(0, 3, "noise").integers(100)
    np.True_
    """
    label = f"fedveil/{key}/{round}/{purpose}".encode()
    digest = hashlib.blake2b(label, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def torch_generator(key: int, purpose: str) -> torch.Generator:
    """A torch generator for work done once a run, such as the first model's weights."""
    seed = int(stream(key, 0, purpose).integers(2**63))
    return torch.Generator().manual_seed(seed)
