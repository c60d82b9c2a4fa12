"""`fedveil export`: the model of a run as ONNX or TorchScript."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.errors import UserError


def export(
    run: Annotated[Path, typer.Argument(help="Directory of the run.")],
    onnx: Annotated[Path | None, typer.Option(help="ONNX file to write.")] = None,
    torchscript: Annotated[Path | None, typer.Option(help="TorchScript file to write.")] = None,
) -> None:
    """Export the model of a run, and check its outputs.

    Inputs are encoded rows or tensors; outputs are logits, or numbers.
    """
    from fedveil.commands.progress import entry
    from fedveil.runs.export import export as exported
    from fedveil.runs.opened import open_run

    asked = [(kind, out) for kind, out in (("onnx", onnx), ("torchscript", torchscript)) if out]
    if not asked:
        raise UserError("No format is given. Pass --onnx FILE or --torchscript FILE.")
    opened = open_run(run)
    for kind, out in asked:
        found = exported(opened, out, kind)
        shape = ", ".join(map(str, opened.interface.inputs))
        entry(
            "",
            f"{out}   inputs [rows, {shape}]; largest difference of outputs {found:.2g}",
            width=0,
        )
