"""Export the model of a run as TorchScript or ONNX, with a check that its outputs agree."""

from __future__ import annotations

import importlib.util
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedveil.errors import UserError
from fedveil.runs.directory import saving
from fedveil.runs.opened import Interface, OpenedRun

CLOSE = 1e-4  # relative to the largest output: float32 in another order of operations
ROWS = (1, 5)  # batches that outputs are compared on
LENGTH = 16  # tokens of an example, for a model of sequences
ONNX = ("onnx", "onnxscript", "onnxruntime")
Outputs = Callable[[Tensor], Tensor]


def export(run: OpenedRun, out: Path, kind: str) -> float:
    """Write the model; returns the largest difference of outputs on random inputs.

    The inputs of the model are encoded rows (encoder.json), and its outputs are logits or numbers.
    A file whose outputs differ is not written.
    """
    if out.exists():
        raise UserError(f"{out} exists. Choose another file.")
    model = run.model.eval()
    example = inputs_for(run.interface, ROWS[1], seed=0)
    written, outputs = (_onnx if kind == "onnx" else _torchscript)(model, example)
    found = max(_difference(model, outputs, run.interface, rows) for rows in ROWS)
    with saving(out, f"--{kind}"):
        partial = out.with_name(f".{out.name}.partial")
        try:
            partial.write_bytes(written)
            partial.replace(out)
        finally:
            partial.unlink(missing_ok=True)
    return found


def inputs_for(interface: Interface, rows: int, seed: int) -> Tensor:
    """Random inputs of the shape that a model takes."""
    rng = torch.Generator().manual_seed(seed)
    if interface.tokens:
        length = tuple(size or LENGTH for size in interface.inputs)
        return torch.randint(max(1, interface.classes), (rows, *length), generator=rng)
    return torch.randn(rows, *interface.inputs, generator=rng)


def _difference(model: nn.Module, outputs: Outputs, interface: Interface, rows: int) -> float:
    inputs = inputs_for(interface, rows, seed=rows)
    with torch.no_grad():
        wanted = model(inputs)
    found = outputs(inputs)
    gap = float((found - wanted).abs().max())
    if found.shape != wanted.shape or not gap <= CLOSE * max(1.0, float(wanted.abs().max())):
        raise UserError(
            f"The exported model differs from the trained one by {gap:.3g} on a batch of {rows}. "
            "Its forward pass may depend on the values of its inputs. Nothing was written."
        )
    return gap


def _torchscript(model: nn.Module, example: Tensor) -> tuple[bytes, Outputs]:
    sink = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and still what servers load
        try:
            traced = torch.jit.trace(model, (example,), check_trace=False)  # type: ignore[no-untyped-call]
        except Exception as problem:  # a user's module may raise anything
            raise _not_exported("TorchScript", problem) from problem
        torch.jit.save(traced, sink)

    def outputs(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            answer: Tensor = traced(inputs)
        return answer

    return sink.getvalue(), outputs


def _onnx(model: nn.Module, example: Tensor) -> tuple[bytes, Outputs]:
    refuse_absent_onnx()
    import onnxruntime

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it names packages that are absent
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model, (example,), input_names=["inputs"], output_names=["outputs"],
                dynamic_shapes=({0: torch.export.Dim("rows")},), dynamo=True, verbose=False,
            )  # fmt: skip
            assert program is not None
            written = program.model_proto.SerializeToString()
        except Exception as problem:  # the exporter raises many kinds
            raise _not_exported("ONNX", problem) from problem
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])

    def outputs(inputs: Tensor) -> Tensor:
        (answer,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
        return torch.from_numpy(np.asarray(answer))

    return written, outputs


def refuse_absent_onnx() -> None:
    """Refuse if a package that ONNX needs is not installed."""
    absent = [name for name in ONNX if importlib.util.find_spec(name) is None]
    if absent:
        raise UserError(
            f"ONNX needs the package {absent[0]}, which is not installed. Install it with "
            '`pip install "fedveil[onnx]"`, or export --torchscript.'
        )


def _not_exported(kind: str, problem: Exception) -> UserError:
    why = str(problem).strip().partition("\n")[0][:200]
    return UserError(
        f"The model cannot be exported to {kind} ({type(problem).__name__}: {why}). Use the other "
        "format, or fedveil predict."
    )
