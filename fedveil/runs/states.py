"""The state of the loop in a checkpoint: named tensors and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from fedveil.errors import UserError
from fedveil.loop import State

OLD_NAMES = {  # in checkpoints of version 0.1
    "direction": "memory.direction",
    "threshold": "bound.threshold",
    "taken": "cohort.taken",
}


def tensors_of(state: State) -> dict[str, Tensor]:
    """The tensors of a state, without the clients' memory, which has its own file."""
    named = {"x": state.x}
    for slot, kept in state.parts.items():
        named |= {f"{slot}.{name}": leaf for name, leaf in kept.items()}
    return named if state.moved is None else {**named, "moved": state.moved}


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """A digest of all tensors, sorted by name."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """A digest of all bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def state_of(first: State, round: int, tensors: Mapping[str, Tensor]) -> State:
    """The state that the named tensors describe, with the parts of `first`."""
    parts = {slot: _under(tensors, f"{slot}.") for slot in first.parts}
    return State(round, tensors["x"], parts, first.memory, tensors.get("moved"))


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): leaf for k, leaf in tensors.items() if k.startswith(prefix)}


def refuse_unfit(path: Path, wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse tensors of another model or recipe, and a model that is not finite.

    A part may keep any number in its state, such as an infinite minimum before the first round.
    """
    for name, leaf in wanted.items():
        if name not in found or found[name].shape != leaf.shape:
            shape = f"the shape {tuple(found[name].shape)}" if name in found else "no tensor"
            raise UserError(
                f"{path} does not fit this run: '{name}' has {shape}, but must have "
                f"{tuple(leaf.shape)}. Resume with the recipe and the model it was saved from."
            )
    if not bool(found["x"].isfinite().all()):
        raise UserError(
            f"{path} has a model that is not finite, because training diverged or the file was "
            "changed. Restore it from a backup, or start a new run with lower learning rates."
        )
