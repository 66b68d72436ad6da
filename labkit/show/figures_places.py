"""Where a mark's name goes when marks are near each other: the first side of it that is still free.

plotly neither measures text nor moves it, so widths are estimated, for a figure as wide as a narrow notebook shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

SIDES = ("middle right", "middle left", "top center", "bottom center", "top right", "bottom right", "top left",
         "bottom left")  # fmt: skip
PLOT_WIDTH, PLOT_HEIGHT = 600.0, 310.0
CHARACTER, LINE, MARK = 7.4, 16.0, 13.0
Box = tuple[float, float, float, float]
"""left, top, right, bottom, in pixels."""


def places(
    points: Sequence[tuple[float, float]],
    names: Sequence[str],
    first: Sequence[int] | None = None,
    fixed: Sequence[tuple[float, float, str, str]] = (),
) -> list[str]:
    """plotly's `textposition` of each name; points: shares of the plot's width and height, from its lower left corner.

    first: index in SIDES of the side that is tried first for each.
    fixed: (x, y, side, text) of what stands already.
    Where nothing is free, the side with least overlap is taken.
    """
    centres = [(x * PLOT_WIDTH, (1 - y) * PLOT_HEIGHT) for x, y in points]
    taken: list[Box] = [(x - MARK / 2, y - MARK / 2, x + MARK / 2, y + MARK / 2) for x, y in centres]
    standing = [_box(side, x * PLOT_WIDTH, (1 - y) * PLOT_HEIGHT, CHARACTER * len(text)) for x, y, side, text in fixed]
    found = []
    for index, ((x, y), name) in enumerate(zip(centres, names, strict=True)):
        start = first[index] if first else 0
        order = [SIDES[start], *(side for side in SIDES if side != SIDES[start])]
        boxes = {side: _box(side, x, y, CHARACTER * len(name)) for side in order}
        others = [box for at, box in enumerate(taken) if at != index] + standing
        best = min(order, key=lambda side: sum(_overlap(boxes[side], box) for box in others) + _outside(boxes[side]))
        taken.append(boxes[best])
        found.append(best)
    return found


def _box(side: str, x: float, y: float, width: float) -> Box:
    up, across = side.split()
    gap = MARK / 2 + 2
    top = {"middle": y - LINE / 2, "top": y - gap - LINE, "bottom": y + gap}[up]
    left = {"right": x + (gap if up == "middle" else 0), "left": x - width - (gap if up == "middle" else 0),
            "center": x - width / 2}[across]  # fmt: skip
    return left, top, left + width, top + LINE


def _overlap(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0


def _outside(box: Box) -> float:
    """Pixels beyond the frame, weighed like an overlap of a line's height."""
    left, top, right, bottom = box
    return LINE * (max(0.0, -left) + max(0.0, right - PLOT_WIDTH) + max(0.0, -top) + max(0.0, bottom - PLOT_HEIGHT))
