"""What a chooser needs to grey a choice with its reason: every legal layout, and for each change of one axis that
does not lead to one, why not.

The table is complete for single changes: from any legal layout, a step along one axis leads to a legal layout, to a
refused one with its sentence, or to more ranks than there are (which needs no sentence of its own, and is left out).
Options change nothing about which degrees fit each other, so a refusal stands under the layout without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from labkit.layout.choices import legal_layouts, simplicity
from labkit.layout.grammar import AXES, OPTIONS, LayoutError, format_fields
from labkit.layout.grid import GRID_AXES, Layout
from labkit.layout.legality import is_legal, reasons_against
from labkit.model.shapes import ModelSpec

CARRIED_BY = {"sp": "tp", "ring": "pcp"}
"""Which axis an option refines: without that axis there is nothing to refine."""
_EVERY_DEGREE_UP_TO = 4


def choice_table(spec: ModelSpec, num_ranks: int, *, engine: bool = True) -> dict[str, Any]:
    """JSON-ready: `axes` [{axis, degrees, options}] that this model and number of ranks can use at all; `absent`
    [{axis, reason}] for the others; `legal` slugs, simplest first; `refused` {slug: index in `reasons`}; `presets`.
    """
    plain = legal_layouts(spec, num_ranks, engine=engine)
    legal = [*plain, *_refined(plain, spec, num_ranks, engine)]
    used = [axis for axis in AXES if any(getattr(layout, axis) > 1 for layout in plain)]
    degrees = {axis: _degrees(axis, plain, num_ranks) for axis in used}
    reasons: dict[str, int] = {}
    refused = {
        slug: reasons.setdefault(reason, len(reasons))
        for slug, reason in _refused(plain, degrees, spec, num_ranks, engine)
    }
    return {
        "num_ranks": num_ranks,
        "axes": [{"axis": axis, "degrees": degrees[axis], "options": _options(axis, legal)} for axis in used],
        "absent": [
            {"axis": axis, "reason": _why_absent(axis, spec, num_ranks, engine)} for axis in AXES if axis not in used
        ],
        "legal": [layout.slug for layout in legal],
        "refused": refused,
        "reasons": list(reasons),
        "presets": [layout.slug for layout in _presets(plain, used)],
    }


def _refined(plain: list[Layout], spec: ModelSpec, num_ranks: int, engine: bool) -> Iterator[Layout]:
    """The legal layouts with one option each; split is set by numbers, not by a toggle."""
    for option, axis in CARRIED_BY.items():
        for layout in plain:
            if getattr(layout, axis) > 1:
                refined: Layout = replace(layout, **{option: True})  # type: ignore[arg-type]
                if is_legal(refined, spec, num_ranks, engine=engine):
                    yield refined


def _options(axis: str, legal: Iterable[Layout]) -> list[str]:
    mine = [option for option, carrier in CARRIED_BY.items() if carrier == axis]
    return [option for option in mine if any(getattr(layout, option) for layout in legal)]


def _degrees(axis: str, plain: Iterable[Layout], num_ranks: int) -> list[int]:
    """What is always offered. Of the axes that reuse ranks the powers of two: the others come and go with the grid."""
    found = {getattr(layout, axis) for layout in plain}
    if axis not in GRID_AXES:
        return sorted(d for d in found if _is_power_of_two(d))
    tried = {d for d in range(1, num_ranks + 1) if d <= _EVERY_DEGREE_UP_TO or _is_power_of_two(d)}
    return sorted(found | tried)


def _is_power_of_two(degree: int) -> bool:
    return degree & (degree - 1) == 0


def _refused(
    plain: list[Layout], degrees: dict[str, list[int]], spec: ModelSpec, num_ranks: int, engine: bool
) -> Iterator[tuple[str, str]]:
    """Every single change that ends beside the legal layouts, once, with its sentence."""
    known = {layout.slug for layout in plain}
    for layout in plain:
        fields = {name: getattr(layout, name) for name in (*AXES, *OPTIONS)}
        for axis, offered in degrees.items():
            for degree in offered:
                changed = {**fields, axis: degree}
                slug = format_fields(SimpleNamespace(**changed), pretty=False)
                if slug in known or _num_ranks(changed) > num_ranks:
                    continue
                known.add(slug)
                yield slug, _why(changed, spec, num_ranks, engine)


def _num_ranks(fields: dict[str, Any]) -> int:
    product = 1
    for axis in GRID_AXES:
        product *= fields[axis]
    return product


def _why(fields: dict[str, Any], spec: ModelSpec, num_ranks: int, engine: bool) -> str:
    try:
        layout = Layout(**fields)
    except LayoutError as error:
        return str(error)
    return " ".join(reasons_against(layout, spec, num_ranks, engine=engine))


def _why_absent(axis: str, spec: ModelSpec, num_ranks: int, engine: bool) -> str:
    """Of the smallest layouts that use the axis, the reason of one that the number of ranks does not forbid."""
    tries = [{axis: 2}] if axis in GRID_AXES else [{"tp": 2, axis: 2}, {"pcp": 2, axis: 2}, {"dp": 2, axis: 2}]
    plain = {**dict.fromkeys(AXES, 1), **dict.fromkeys(OPTIONS, False), "split": None}
    return next(filter(None, (_why({**plain, **fields}, spec, num_ranks, engine) for fields in tries)), "")


def _presets(plain: list[Layout], used: list[str]) -> list[Layout]:
    """One rank, then each axis alone: by two, where one starts to look, and as far as it goes. Fewest ranks first."""
    if not plain:
        return []
    found = {plain[0]: None}
    found.update(dict.fromkeys(_alone_by_two(axis, plain) for axis in used))
    found.update(dict.fromkeys(_alone(axis, plain) for axis in used))
    return sorted(found, key=lambda layout: layout.world_size)


def _alone_by_two(axis: str, plain: list[Layout]) -> Layout:
    """dcp and ep in the simplest layout that has them; where 2 is no degree of the axis, its smallest."""
    own = [layout for layout in plain if getattr(layout, axis) > 1]
    return min(own, key=lambda it: (_foreign(it, axis), getattr(it, axis), it.world_size, simplicity(it)))


def _alone(axis: str, plain: list[Layout]) -> Layout:
    own = [layout for layout in plain if getattr(layout, axis) > 1]
    return min(own, key=lambda layout: (_foreign(layout, axis), -layout.world_size, simplicity(layout)))


def _foreign(layout: Layout, axis: str) -> int:
    """How many other axes it uses."""
    return sum(getattr(layout, other) > 1 for other in AXES if other != axis)
