"""An explanation as a shell and as a notebook show it: waterfalls as bars, verdicts, and what grew."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from labkit.measure.binding import Waterfall
from labkit.measure.clocks import clock_sentences

if TYPE_CHECKING:
    from labkit.measure.explain import Explanation

Ends = dict[str, float]
WIDTH = 40
"""Characters of a waterfall."""
_SHOWN = 0.005
_CELL = "padding:1px 10px 1px 0;text-align:left;vertical-align:middle;white-space:nowrap"


def as_text(found: Explanation) -> str:
    lines = [found.label, found.steady["sentence"]]
    for fall in found.waterfalls:
        lines += ["", _title(fall), *(_bar(fall, *row) for row in _rows(fall))]
    lines += ["", *map(str, found.verdicts), *_kinds(found), *_roofs(found), *clock_sentences(found.clocks)]
    if found.other:
        lines += ["", "Against it:", "", as_text(found.other), "", "What grew:", *_grown(found)]
    return "\n".join(lines)


def _title(fall: Waterfall) -> str:
    few = ", too few for this percentile" if fall.few else ""
    return f"{fall.title}: {fall.total_ms:.1f} ms (n = {fall.n}{few})"


def _rows(fall: Waterfall) -> list[tuple[str, float, float]]:
    """(part, its ms, ms before it), without what is too little to be seen."""
    rows, before = [], 0.0
    for name, value in fall.parts.items():
        if abs(value) >= _SHOWN * fall.total_ms:
            rows.append((name.replace("_", " "), value, before))
        before += value
    return rows


def _bar(fall: Waterfall, name: str, value: float, before: float) -> str:
    left, right = sorted((before, before + value))
    start = round(max(0.0, left) / fall.total_ms * WIDTH)
    length = max(1, round(min(right, fall.total_ms) / fall.total_ms * WIDTH) - start)
    return f"  {name:<16}{value:>9.2f} ms {value / fall.total_ms:>5.0%}  {' ' * start}{'█' * length}"


def _kinds(found: Explanation) -> list[str]:
    if not found.step_kinds:
        return ["Steps: the server told nothing of them."]
    told = [
        f"Steps of {name}: {kind['num_steps']:.0f}, {kind['of_step_time']:.0%} of step time; compute "
        f"{kind['compute']:.0%}, wait {kind['wait']:.0%}, transfer {kind['transfer']:.0%}."
        for name, kind in found.step_kinds.items()
    ]
    if found.steps_unaccounted is not None:
        told.append(f"Of the ranks' time in steps, {found.steps_unaccounted:.1%} is in none of their parts.")
    return told


def _roofs(found: Explanation) -> list[str]:
    if not found.roofs:
        return []
    read, products = found.roofs["read_gb_s"], found.roofs["gflop_s"]
    how = "as measured with all cores; lower while others use them"
    return [f"Roofs: memory {read:.1f} GB/s, products {products:.0f} GFLOP/s ({how})."]


def _grown(found: Explanation) -> list[str]:
    return [growth.sentence for growth in found.growth] or ["Too few requests with known parts to say."]


def as_html(found: Explanation, ends: Ends | None = None) -> str:
    """ends: of each waterfall, the ms at which its bars end; by default two explanations beside each other share them,
    so that a low load's bars are as short as they are.
    """
    ends = ends or _ends(found)
    parts = [f"<p><b>{html.escape(found.label)}</b><br>{html.escape(found.steady['sentence'])}</p>"]
    parts.append(_side_by_side([_html_waterfall(fall, ends[fall.title]) for fall in found.waterfalls]))
    told = [*_kinds(found), *_roofs(found), *clock_sentences(found.clocks)]
    parts.append(_list([*map(str, found.verdicts), *told]))
    if not found.other:
        return "".join(parts)
    both = _side_by_side(["".join(parts), as_html(found.other, ends)], "1 1 420px")
    return f"{both}<p><b>What grew, from the first to the second</b></p>{_list(_grown(found))}"


def _ends(found: Explanation) -> Ends:
    ends: Ends = {}
    for fall in [*found.waterfalls, *(found.other.waterfalls if found.other else [])]:
        ends[fall.title] = max(ends.get(fall.title, 0.0), fall.total_ms)
    return ends


def _side_by_side(parts: list[str], width: str = "0 1 auto") -> str:
    """As many beside each other as there is room for."""
    inside = "".join(f'<div style="flex:{width};min-width:0">{part}</div>' for part in parts)
    return f'<div style="display:flex;flex-wrap:wrap;gap:4px 32px">{inside}</div>'


def _list(sentences: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _html_waterfall(fall: Waterfall, end_ms: float) -> str:
    rows = "".join(_html_row(fall, end_ms, *row) for row in _rows(fall))
    faded = ";opacity:.6" if fall.few else ""
    return f'<table style="border-collapse:collapse{faded}"><caption style="text-align:left"><b>' \
           f"{html.escape(_title(fall))}</b></caption><tbody>{rows}</tbody></table>"  # fmt: skip


def _html_row(fall: Waterfall, end_ms: float, name: str, value: float, before: float) -> str:
    left, right = sorted((before, before + value))
    start, end = (min(100.0, max(0.0, edge / end_ms * 100)) for edge in (left, right))
    place = f"margin-left:{start:.1f}%;width:{max(end - start, 0.5):.1f}%"
    bar = f'<div style="{place};height:12px;background:#0072B2"></div>'
    return (
        f'<tr><th scope="row" style="{_CELL};font-weight:normal">{html.escape(name)}</th>'
        f'<td style="{_CELL};text-align:right">{value:.2f} ms</td>'
        f'<td style="{_CELL};text-align:right">{value / fall.total_ms:.0%}</td>'
        f'<td style="{_CELL};width:200px">{bar}</td></tr>'
    )
