"""Plays as plain text: every speaking role is a client, every window of characters an example."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import torch

from fedveil.data.federated import Dataset, Examples
from fedveil.errors import UserError

VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
OTHER = len(VOCABULARY)  # id of every character outside the fixed, public vocabulary
CLASSES = len(VOCABULARY) + 1
HELD_OUT = 0.1  # fraction of windows
_SPEAKER = re.compile(r"([^\W\d_][^:\n]{0,59}):")


def load_shakespeare(path: Path, length: int = 80, minimum: int = 2, seed: int = 0) -> Dataset:
    """Windows of `length` characters per role; labels are the inputs shifted by one, [n, length].

    Each window is held out for testing with probability 0.1, by a hash of the seed, its role and
    its own characters, so that no window decides the use of another. Roles with fewer than
    `minimum` windows are dropped.
    """
    if length < 1:
        raise UserError(f"length is {length}. Give at least one character per window.")
    windows = {role: _windows(text, length) for role, text in roles(_text(path)).items()}
    kept = {role: w for role, w in sorted(windows.items()) if len(w) >= max(1, minimum)}
    if not kept:
        raise UserError(
            f"'{path}' has no role with {minimum} windows of {length} characters. Start each "
            "speech with a line 'SPEAKER:' and end it with an empty line."
        )
    testing = {role: _testing(role, w, seed) for role, w in kept.items()}
    if all(held.all() for held in testing.values()):
        raise UserError(f"'{path}' has no window left to train on. Give a longer text.")
    train = [w[~testing[role]] for role, w in kept.items()]
    test = [w[testing[role]] for role, w in kept.items()]
    names = np.array(list(kept))
    held = _examples(test)
    return Dataset(
        "shakespeare",
        _examples(train),
        Examples(held.inputs, held.labels, owners=np.repeat(names, [len(w) for w in test])),
        CLASSES,
        class_names=(*VOCABULARY, "other"),
        keys=np.repeat(names, [len(w) for w in train]),
        notes=_dropped(len(windows) - len(kept), minimum, length),
    )


def roles(text: str) -> dict[str, str]:
    r"""All text of each role, its speeches joined by newlines; roles are identified by name only.

    >>> roles("ROMEO:\nAy me!\n\nJULIET:\nO Romeo\n\nROMEO:\nShall I?")
    {'ROMEO': 'Ay me!\nShall I?', 'JULIET': 'O Romeo'}
    """
    said: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n")):
        head, _, speech = block.strip().partition("\n")
        if speech and (speaker := _SPEAKER.fullmatch(head.strip())):
            said.setdefault(speaker[1], []).append(speech)
    return {role: "\n".join(speeches) for role, speeches in said.items()}


def encode(text: str) -> np.ndarray:
    """Character ids, int64 [len(text)].

    >>> encode("\\n a€").tolist() == [0, 1, 66, OTHER]
    True
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    table = np.full(128, OTHER, dtype=np.int64)
    table[[ord(c) for c in VOCABULARY]] = np.arange(OTHER)
    return np.where(codes < 128, table[np.minimum(codes, 127)], OTHER)


def _windows(text: str, length: int) -> np.ndarray:
    """[n, length + 1]: consecutive windows that overlap by one character."""
    ids = encode(text)
    count = max(0, (len(ids) - 1) // length)
    starts = length * np.arange(count)
    return np.asarray(ids[starts[:, None] + np.arange(length + 1)])


def _testing(role: str, windows: np.ndarray, seed: int) -> np.ndarray:
    """Which of a role's windows are held out: each decided on its own, wherever it occurs."""
    salt = hashlib.blake2b(f"fedveil/held out/{seed}/{role}".encode(), digest_size=16).digest()
    drawn = b"".join(
        hashlib.blake2b(window.tobytes(), key=salt, digest_size=8).digest()
        for window in windows.astype("<i8")
    )
    return np.frombuffer(drawn, dtype="<u8") < np.uint64(HELD_OUT * 2**64)


def _examples(windows: list[np.ndarray]) -> Examples:
    joined = torch.from_numpy(np.concatenate(windows))
    return Examples(joined[:, :-1].contiguous(), joined[:, 1:].contiguous())


def _dropped(count: int, minimum: int, length: int) -> tuple[str, ...]:
    if not count:
        return ()
    return (f"Left out {count} roles with fewer than {minimum} windows of {length} characters.",)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not a readable UTF-8 text file ({error}).") from None
