"""Exported models compute what the trained one does, and a model that cannot is not written."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedveil import algorithms
from fedveil.errors import UserError
from fedveil.runs.export import ONNX, export
from fedveil.runs.opened import OpenedRun, open_run
from fedveil.training.start import train
from tests.unit.training.test_metrics import rare

absent = [name for name in ONNX if importlib.util.find_spec(name) is None]


class Branching(nn.Module):
    """Its forward pass depends on the number of rows, which a trace freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if len(x) > 1 else 2 * out


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenedRun:
    path = tmp_path_factory.mktemp("runs") / "a"
    train(algorithms.fedavg(), rare(), "mlp-4", rounds=1, save=path)
    return open_run(path)


def test_torchscript_is_loaded_without_fedveil(opened: OpenedRun, tmp_path: Path) -> None:
    assert export(opened, tmp_path / "m.pt", "torchscript") < 1e-5
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        loaded = torch.jit.load(str(tmp_path / "m.pt"))
    rows = torch.randn(7, 3)
    with torch.no_grad():
        torch.testing.assert_close(loaded(rows), opened.model(rows))


@pytest.mark.skipif(bool(absent), reason="an extra: fedveil[onnx]")
@pytest.mark.filterwarnings("ignore")
def test_onnx_takes_any_number_of_rows(opened: OpenedRun, tmp_path: Path) -> None:
    import onnxruntime

    assert export(opened, tmp_path / "m.onnx", "onnx") < 1e-5
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    rows = torch.randn(7, 3)
    (found,) = session.run(None, {"inputs": rows.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), opened.model(rows))


@pytest.mark.skipif(not absent, reason="onnx is installed")
def test_without_onnx_a_sentence_says_how(opened: OpenedRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'pip install "fedveil\[onnx\]"'):
        export(opened, tmp_path / "m.onnx", "onnx")


def test_a_model_whose_outputs_differ_is_not_written(opened: OpenedRun, tmp_path: Path) -> None:
    odd = OpenedRun(opened.path, Branching().eval(), opened.interface, None, (), opened.summary, "")
    with pytest.raises(UserError, match="differs from the trained one"):
        export(odd, tmp_path / "m.pt", "torchscript")
    assert not list(tmp_path.iterdir())


def test_a_file_is_not_overwritten(opened: OpenedRun, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        export(opened, tmp_path / "m.pt", "torchscript")


def test_a_file_that_cannot_be_written_names_its_own_flag(
    opened: OpenedRun, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"or choose another --torchscript\."):
        export(opened, tmp_path / "nowhere" / "m.pt", "torchscript")
