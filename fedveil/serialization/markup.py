"""Small HTML tables for notebooks. All text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], head: Sequence[str] = (), caption: str = "") -> str:
    """An HTML table.

    >>> table([("ε", "<8>")])
    '<table><tbody><tr><th>ε</th><td>&lt;8&gt;</td></tr></tbody></table>'
    """
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    above = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f"<table>{title}{above}<tbody>{body}</tbody></table>"


def _cells(row: Sequence[object]) -> str:
    first, *rest = (html.escape(str(cell)) for cell in row)
    return f"<th>{first}</th>" + "".join(f"<td>{cell}</td>" for cell in rest)
