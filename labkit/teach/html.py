"""Small tables for notebooks, and the same as text for a shell."""

from __future__ import annotations

import html
from collections.abc import Sequence

_CELL = "padding:4px 12px 4px 0;text-align:left;vertical-align:top"


class Table:
    """A title, columns, rows of text, and remarks below. Shown by its own repr, in HTML or plain."""

    def __init__(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remarks: Sequence[str] = ()
    ) -> None:
        self.title, self.columns, self.rows = title, list(columns), [list(map(str, row)) for row in rows]
        self.remarks = list(remarks)

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(name)}</th>' for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f'<td style="{_CELL}">{html.escape(cell)}</td>' for cell in row) + "</tr>"
            for row in self.rows
        )
        below = "".join(f"<p>{html.escape(remark)}</p>" for remark in self.remarks)
        header = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        caption = f"<p><b>{html.escape(self.title)}</b></p>"
        return f"{caption}<table>{header}<tbody>{body}</tbody></table>{below}"

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows] if any(self.columns) else self.rows
        widths = [max(len(row[i]) for row in lines) for i in range(len(self.columns))]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]
        return "\n".join([self.title, *text, *self.remarks])


def box(text: str, mark: str) -> str:
    """One paragraph that stands out, in HTML."""
    style = "border-left:4px solid #D55E00;padding:6px 12px;margin:6px 0"
    return f'<div style="{style}"><b>{html.escape(mark)}</b> {html.escape(text)}</div>'
