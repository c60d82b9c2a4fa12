"""A table of images: paths or bytes in one column, with the client and the label of each.

A label file beside folders of users is such a table: its rows name a file, a client and a label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedveil.data import rows
from fedveil.data.cells import numbered
from fedveil.data.encoding import check_column
from fedveil.data.federated import Dataset, Examples
from fedveil.data.frames import named_frame
from fedveil.data.origin import Origin
from fedveil.data.sketch import sketched
from fedveil.data.sources.images import MAX_FILE, MAX_TOTAL, SIZE, decoded
from fedveil.data.sources.pixels import to_inputs
from fedveil.errors import UserError

HELD_OUT = 0.2  # of the clients


def load_image_table(
    path: Path,
    image: str,
    client: str,
    label: str,
    size: tuple[int, int] | None = None,
    color: bool = True,
    classes: tuple[str, ...] | None = None,
    seed: int = 0,
    own: bool = False,
) -> Dataset:
    """Images of the table's rows as float32 [n, c, h, w], decoded once; keys = client column.

    `image` is a column of bytes, or of paths below the table's folder. Without `classes`, they are
    read from the data, which no ε covers. A table of a client's `own` may hold that client only,
    and none of its rows are held out.
    """
    title, frame = named_frame(path)
    check_column(frame, image, "image column")
    words, kept, notes = rows.complete(frame, client, label, title)
    names = rows.declared_classes(classes) if classes else None
    exclusions = () if names else (f"the classes of '{label}'",)
    names = names or rows.found_classes(words.filter(kept), label)
    places = numbered(words[label], names)
    kept, more = rows.of_classes(places, kept, names, label)
    keys = np.array(words[client].filter(kept).to_list(), dtype=str)
    if not own:
        rows.check_clients(keys, client)
    digests = rows.row_digests(frame.drop(image))[kept]
    testing = torch.from_numpy(
        rows.held_out(digests, keys, 0 if own else HELD_OUT, seed, "clients")
    )
    height, width = size or SIZE
    channels = 3 if color else 1
    if len(keys) * height * width * channels > MAX_TOTAL:
        raise UserError(f"The images of '{path}' do not fit in memory. Give a smaller size.")
    pixels = np.empty((len(keys), height, width, channels), np.uint8)
    for place, cell in enumerate(frame[image].filter(kept)):
        name, content = _content(path.parent, cell, place)
        pixels[place] = decoded(name, content, (height, width), color).reshape(pixels.shape[1:])
    inputs = to_inputs(pixels.transpose(0, 3, 1, 2))
    labels = torch.tensor([p for p, there in zip(places, kept, strict=True) if there])
    train = Examples(inputs[~testing], labels[~testing])
    test = Examples(inputs[testing], labels[testing], owners=keys[testing.numpy()])
    return Dataset(
        Path(title).stem, train, test, len(names), class_names=names,
        keys=keys[~testing.numpy()], notes=(*notes, *more),
        origin=Origin(exclusions=exclusions), sketch=sketched(digests),
    )  # fmt: skip


def _content(folder: Path, cell: Any, place: int) -> tuple[str, bytes]:
    """The bytes of an image; a path must lead to a file below the folder."""
    if isinstance(cell, dict):  # as Hugging Face writes images
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, bytes):
        return f"row {place + 1}", cell
    if not isinstance(cell, str) or not cell.strip():
        raise UserError(f"Row {place + 1} has no image. Fill it in, or remove the row.")
    file = (folder / cell.strip()).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise UserError(f"The image '{cell}' is outside the folder of its table. Move it there.")
    if not file.is_file() or file.stat().st_size > MAX_FILE:
        raise UserError(f"There is no image '{cell}' in '{folder}', or it is too large.")
    return cell, file.read_bytes()
