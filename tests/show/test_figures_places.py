"""Names beside marks that crowd each other."""

from __future__ import annotations

import itertools

from labkit.show import figures_places as fp


def boxes(points: list[tuple[float, float]], names: list[str]) -> list[fp.Box]:
    sides = fp.places(points, names)
    at = [(x * fp.PLOT_WIDTH, (1 - y) * fp.PLOT_HEIGHT) for x, y in points]
    return [fp._box(side, x, y, fp.CHARACTER * len(name)) for side, (x, y), name in zip(sides, at, names, strict=True)]


def overlaps(found: list[fp.Box]) -> float:
    return sum(fp._overlap(a, b) for a, b in itertools.combinations(found, 2))


def test_names_of_marks_that_nearly_coincide_do_not_meet():
    points, names = [(0.5, 0.5), (0.505, 0.5), (0.5, 0.51)], ["TP", "PCP", "DCP"]
    default = [fp._box("middle right", x * fp.PLOT_WIDTH, (1 - y) * fp.PLOT_HEIGHT, 20) for x, y in points]
    assert overlaps(default) > 0, "the case is none"
    assert overlaps(boxes(points, names)) == 0


def test_a_lone_mark_has_its_name_on_the_right_and_one_at_the_edge_on_the_left():
    assert fp.places([(0.5, 0.5)], ["TP"]) == ["middle right"]
    assert fp.places([(0.999, 0.5)], ["TP2×EP2"]) == ["middle left"]
    assert fp.places([(0.5, 0.5)], ["TP"], [1]) == ["middle left"]


def test_a_name_keeps_clear_of_what_stands_already():
    assert fp.places([(0.5, 0.5)], ["TP"], fixed=[(0.55, 0.5, "middle center", "10 kB per token")]) != ["middle right"]
