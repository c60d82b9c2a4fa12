"""A client's own memory v_i (error compensation), which advances only when its message counted.

A message may be lost on its way. So a client keeps v_i as it was, and beside it what v_i becomes if
the last message was counted. The next invitation names the last round in which the client's message
was counted, and settles which of the two holds. A server that lies about it changes what the client
computes, but not the bound on its message, which holds for every v_i.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedveil.errors import UserError
from fedveil.federation.agreement import Agreement


@dataclass(frozen=True, eq=False)
class _Pending:
    opening: str
    round: int
    after: Tensor


class OwnMemory:
    """v_i on disk, with one undecided step."""

    def __init__(self, file: Path, agreement: Agreement) -> None:
        self._file, self._agreement = file, agreement.hash
        self._kept = agreement.recipe.memory.kept
        self._v = torch.zeros(agreement.recipe.memory.width(agreement.dim) if self._kept else 0)
        self._pending: _Pending | None = None
        if self._kept and file.exists():
            self._load()

    def settled(self, opening: str, counted: int) -> Tensor | None:
        """v_i for the next message, given the last round that the server counted."""
        if not self._kept:
            return None
        pending = self._pending
        if pending is not None and (pending.opening, pending.round) == (opening, counted):
            self._v = pending.after
        self._pending = None
        return self._v.clone()

    def await_count(self, opening: str, round: int, after: Tensor | None) -> None:
        """Keep what v_i becomes if this round's message is counted, before the message leaves."""
        if after is None:
            return
        self._pending = _Pending(opening, round, after)
        self._save()

    def _save(self) -> None:
        from safetensors.torch import save

        pending = self._pending
        assert pending is not None
        facts = {"agreement": self._agreement, "opening": pending.opening}
        told = {"fedveil": json.dumps({**facts, "round": pending.round})}
        beside = self._file.with_suffix(".new")
        owner_only = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(owner_only, "wb") as sink:
            sink.write(save({"v": self._v, "after": pending.after}, told))
            sink.flush()
            os.fsync(sink.fileno())
        beside.replace(self._file)

    def _load(self) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._file, "pt") as opened:
                facts = json.loads(opened.metadata()["fedveil"])
                v, after = opened.get_tensor("v"), opened.get_tensor("after")
            mine = facts["agreement"] == self._agreement
            pending = _Pending(facts["opening"], facts["round"], after)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as problem:
            raise UserError(
                f"{self._file} is damaged ({problem}). Delete it: the memory then starts at zero."
            ) from problem
        if mine and v.shape == after.shape == self._v.shape:
            self._v, self._pending = v, pending
