"""What clients remember: rows of those who took part, in RAM or in a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.errors import UserError
from fedveil.parts.memory import ClientMemory


@pytest.mark.parametrize("share", [0.0, 1e-8, 1.0])
def test_it_is_an_array_of_zeros_that_is_written_to(share: float) -> None:
    """A share of 1e−8 is a few hundred bytes: the rows move from RAM to a file on the way."""
    rng = np.random.default_rng(0)
    memory, plain = ClientMemory(50, 3, share), torch.zeros(50, 3)
    for _ in range(30):
        clients = np.sort(rng.choice(50, size=4, replace=False))
        assert torch.equal(memory[clients], plain[clients])
        rows = torch.from_numpy(rng.normal(size=(4, 3)).astype(np.float32))
        memory[clients] = rows
        plain[clients] = rows
        assert torch.equal(memory[np.arange(50)], plain)
    assert memory.mapped == (share < 1.0)
    assert len(memory) == 50


def test_rows_handed_out_are_copies() -> None:
    memory = ClientMemory(3, 2)
    memory[np.array([1])] = torch.ones(1, 2)
    memory[np.array([1])].zero_()
    assert memory[np.array([1])].tolist() == [[1.0, 1.0]]


def test_a_million_clients_of_a_million_numbers_take_the_room_of_those_who_came(
    tmp_path: Path,
) -> None:
    memory = ClientMemory(10**6, 10**6)
    memory[np.array([7, 999_999])] = torch.ones(2, 10**6)
    memory.save(tmp_path / "memory.npy")
    assert (tmp_path / "memory.npy").stat().st_size < 17e6
    again = ClientMemory(10**6, 10**6)
    again.restore(tmp_path / "memory.npy")
    assert again[np.array([7, 8])].sum(dim=1).tolist() == [1e6, 0.0]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_restored_memory_goes_on(tmp_path: Path, share: float) -> None:
    memory, again = ClientMemory(9, 2, share), ClientMemory(9, 2, share)
    memory[np.array([2, 5])] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    memory.save(tmp_path / "m")
    again[np.array([0])] = torch.ones(1, 2)  # forgotten: what was saved did not have it
    again.restore(tmp_path / "m")
    for either in (memory, again):
        either[np.array([5, 8])] = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert torch.equal(again[np.arange(9)], memory[np.arange(9)])


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ClientMemory(1000, 8, ram_share=0.0)
    memory[np.arange(4)] = torch.ones(4, 8)

    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        UserError, match=r"memory of 500 clients with 8 numbers each .*No space left"
    ):
        memory[np.arange(500)] = torch.zeros(500, 8)
    assert memory[np.arange(6)].sum() == 32


def test_rows_of_nobody_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "m").open("wb") as sink:
        np.save(sink, np.zeros((2, 3), dtype=np.float32))
        np.save(sink, np.array([0, -1, -1, 0]))
    with pytest.raises(ValueError, match="does not assign its rows to clients"):
        ClientMemory(4, 3).restore(tmp_path / "m")
