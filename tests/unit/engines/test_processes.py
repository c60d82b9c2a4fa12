"""One GPU for each process of torchrun, tested without one: the device, the library, the copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fedveil.engines import devices
from fedveil.engines.devices import CPU, device_of
from fedveil.engines.processes import ALONE, BACKENDS, Processes, backend_of
from fedveil.errors import UserError
from tests.unit.engines.pretend import MixedDevicesError, OnDevice, pretending

GPU = torch.device("cuda", 1)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of CUDA and of torch.distributed; both processes send the same numbers."""
    calls: list[Any] = []

    def all_reduce(numbers: Tensor, group: object = None) -> None:
        calls.append(("sum", numbers.device.type, group))
        if group is None and numbers.dtype == torch.int64 and numbers.dim() == 2:
            numbers[1] = numbers[0]  # a table, to which each process adds its row
        else:
            numbers.mul_(2)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("use", device)))
    monkeypatch.setattr(
        dist, "new_group", lambda backend, timeout: calls.append(("group", backend)) or "second"
    )
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


def first_of_two() -> Processes:
    """The first process, connected to nobody."""
    team = object.__new__(Processes)
    team.rank, team.size = 0, 2
    return team


@pytest.mark.usefixtures("with_nccl")
def test_sums_of_gpus_use_nccl_and_all_others_gloo() -> None:
    assert backend_of(GPU) == "nccl"
    assert backend_of(CPU) == backend_of(torch.device("mps")) == "gloo"


def test_a_torch_without_nccl_adds_sums_of_gpus_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_of(GPU) == "gloo"


@pytest.mark.usefixtures("with_nccl")
def test_a_process_uses_its_own_gpu_and_one_group_of_nccl(made: list[Any]) -> None:
    team = first_of_two()
    team.place(GPU)
    team.place(GPU)  # a second run in the same process
    assert [call for call in made if call[0] != "sum"] == [("use", GPU), ("group", "nccl")]
    assert (team.device, team.sums) == (GPU, "second")


def test_processes_on_the_cpu_stay_with_gloo(made: list[Any]) -> None:
    team, numbers = first_of_two(), torch.ones(3)
    team.place(CPU)
    team.add(numbers)
    assert numbers.tolist() == [2.0, 2.0, 2.0]
    assert {call for call in made if call[0] != "sum"} == set()
    assert made[-1] == ("sum", "cpu", None)
    ALONE.place(CPU)


@pytest.mark.usefixtures("with_nccl")
def test_processes_on_different_kinds_of_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group of NCCL would wait for the others for ever."""
    team = first_of_two()
    kinds = torch.tensor([[BACKENDS.index("nccl")], [BACKENDS.index("gloo")]])
    monkeypatch.setattr(team, "_table", lambda *row: kinds)
    with pytest.raises(UserError, match="Process 1 trains on the CPU, but process 0 on a GPU"):
        team.place(GPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_sums_are_added_on_the_device_and_come_back(dtype: torch.dtype, made: list[Any]) -> None:
    """Orders and checksums stay on the CPU, with gloo."""
    team, numbers = first_of_two(), torch.arange(3, dtype=dtype)
    with pretending() as device:
        team.device, team.sums = device, "second"  # type: ignore[assignment]
        team.add(numbers)
        table = team._table(5)
        with pytest.raises(MixedDevicesError):
            numbers + numbers.to(device)
    assert not isinstance(numbers, OnDevice)
    assert numbers.tolist() == [0, 2, 4]
    assert table.tolist() == [[5], [5]]
    assert made == [("sum", "pretend", "second"), ("sum", "cpu", None)]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_count", lambda: 2)
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert device_of("cuda") == device_of("auto") == GPU
    with pytest.raises(UserError, match=r"'cuda:1' is one GPU, but torchrun started 2 processes"):
        device_of("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for name in ("cuda", "auto"):
        with pytest.raises(UserError, match=r"started 4 processes .* finds 2 CUDA devices"):
            device_of(name)
    assert device_of("cpu") == CPU
    monkeypatch.setattr(devices, "_count", lambda: 0)
    assert device_of("auto") == CPU
