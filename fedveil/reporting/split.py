"""Charts of clients' examples: how many each has, and of which classes. Private data."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedveil.data.columns import readable
from fedveil.data.federated import Federated
from fedveil.errors import UserError
from fedveil.reporting.chart import (
    Chart,
    ChartTable,
    Curve,
    few_digits,
    lines,
    numbers,
    share,
    shortened,
    text,
)
from fedveil.training.evaluation import evenly

MOST_CLIENTS = 60  # columns of the heat map


def charts_of(data: Federated) -> list[Chart]:
    """The charts of a split: sizes, and classes if examples have one each."""
    if not readable(data.inputs):
        raise UserError(f"The examples of '{data.name}' are with its clients. Plot them there.")
    sizes, classes = _sizes(data), _classes(data)
    return [chart for chart in (sizes, classes) if chart is not None]


def _sizes(data: Federated) -> Chart | None:
    """The number of examples of each client, largest first."""
    ordered = np.sort(data.sizes.numpy())[::-1].astype(float)
    places = np.arange(1, len(ordered) + 1)
    curve = Curve(data.name, places, ordered, ordered, ordered)
    caption = (
        f"Clients by their number of examples: minimum {few_digits(ordered[-1])}, median "
        f"{few_digits(float(np.median(ordered)))}, maximum {few_digits(ordered[0])}."
    )
    return lines(
        [curve], f"{data.unit}s, largest first", "examples", "Examples per client", caption
    )


def _classes(data: Federated) -> Chart | None:
    """The share of each class among a client's examples; clients of one class are together."""
    labels = data.labels
    if len(labels.shape) != 1 or labels.dtype.is_floating_point or data.classes < 2:
        return None
    counts = _counted(data)
    of_client = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    order = np.lexsort((-of_client.max(1), of_client.argmax(1)))
    shown = of_client[order[evenly(len(order), MOST_CLIENTS)]]
    names = list(data.class_names) or [str(i) for i in range(data.classes)]
    largest = of_client.max(1)
    caption = (
        "Columns are clients, rows are classes. The colour is the share of a client's examples. "
        f"The most frequent class of a client has {share(float(largest.mean()))} of its examples "
        f"on average, and {share(float(counts.sum(0).max() / counts.sum()))} of all examples "
        "belong to one class."
    )
    trace = {
        "type": "heatmap", "z": [numbers(row) for row in shown.T], "zmin": 0, "zmax": 1,
        "x": [str(i) for i in range(1, len(shown) + 1)], "y": list(map(text, shortened(names))),
        "colorscale": "@scale", "xgap": 1, "ygap": 1, "colorbar": {"tickformat": ".0%"},
        "hovertemplate": "%{y}: %{z:.1%}<extra></extra>",
    }  # fmt: skip
    return _heat(trace, caption, len(shown), counts, names)


def _heat(
    trace: dict[str, Any], caption: str, shown: int, counts: np.ndarray, names: list[str]
) -> Chart:
    some = "" if shown == len(counts) else f" ({shown} of {len(counts):,})"
    rows = [
        [name, f"{int(column.sum()):,}", f"{int((column > 0).sum()):,}"]
        for name, column in zip(names, counts.T, strict=True)
    ]
    return Chart(
        title="Classes of clients",
        caption=caption,
        traces=[trace],
        layout={
            "xaxis": {"title": f"clients by their most frequent class{some}", "type": "category",
                      "showticklabels": False, "showgrid": False},
            "yaxis": {"title": "class", "type": "category", "showgrid": False},
        },
        alt=f"Heat map of clients and classes. {caption}",
        table=ChartTable(["class", "examples", "clients"], rows),
        height=420,
    )  # fmt: skip


def _counted(data: Federated) -> np.ndarray:
    """Examples of each client and class, for evenly chosen clients if there are very many.

    Labels below 0 are left out, as in the loss.
    """
    chosen = evenly(data.clients, 100 * MOST_CLIENTS)
    ends = data.offsets.numpy()
    own = (np.asarray(data.labels[int(ends[i]) : int(ends[i + 1])]) for i in chosen)
    return np.stack([np.bincount(each[each >= 0], minlength=data.classes) for each in own])
