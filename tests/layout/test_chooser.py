"""The chooser's table against the arithmetic that it was made from: complete, and right about every refusal."""

from __future__ import annotations

import json

import pytest

from labkit.layout import AXES, Layout, LayoutError, check_layout, choice_table, legal_layouts
from labkit.layout.grammar import format_fields
from labkit.model.spec import load_spec

CASES = [("lab-5m", 2), ("lab-5m", 4), ("lab-moe-8x", 4), ("lab-30m", 8)]


class _Fields:
    sp, ring, split = False, False, None

    def __init__(self, **degrees: int) -> None:
        self.__dict__.update(degrees)


def _degrees(layout: Layout) -> dict[str, int]:
    return {axis: getattr(layout, axis) for axis in AXES}


@pytest.mark.parametrize(("model", "num_ranks"), CASES)
def test_every_single_change_leads_somewhere_or_is_refused_with_its_reason(model: str, num_ranks: int) -> None:
    spec = load_spec(model)
    table = choice_table(spec, num_ranks)
    legal = [Layout.parse(slug) for slug in table["legal"]]
    plain = legal_layouts(spec, num_ranks, engine=True)
    assert [layout for layout in legal if not (layout.ring or layout.sp)] == plain
    num_refused = 0
    for layout in plain:
        for row in table["axes"]:
            for degree in row["degrees"]:
                fields = {**_degrees(layout), row["axis"]: degree}
                slug = format_fields(_Fields(**fields), pretty=False)
                world = fields["dp"] * fields["pp"] * fields["pcp"] * fields["tp"]
                if slug in table["refused"]:
                    num_refused += 1
                    assert len(table["reasons"][table["refused"][slug]]) > 20
                else:
                    assert slug in table["legal"] or world > num_ranks, slug
    assert num_refused or num_ranks == 2


@pytest.mark.parametrize(("model", "num_ranks"), CASES)
def test_what_is_refused_is_refused_by_the_check_in_the_same_words(model: str, num_ranks: int) -> None:
    spec = load_spec(model)
    table = choice_table(spec, num_ranks)
    for slug, index in table["refused"].items():
        reason = table["reasons"][index]
        try:
            layout = Layout.parse(slug)
        except LayoutError as error:
            assert str(error) == reason
            continue
        assert " ".join(check_layout(layout, spec, num_ranks, engine=True).reasons) == reason


def test_an_axis_that_cannot_be_used_says_why_and_has_no_row() -> None:
    table = choice_table(load_spec("lab-5m"), 4)
    assert [row["axis"] for row in table["axes"]] == ["dp", "pp", "pcp", "tp", "dcp"]
    (absent,) = table["absent"]
    assert absent["axis"] == "ep" and "lab-5m has none" in absent["reason"]
    alone = choice_table(load_spec("lab-5m"), 1)
    assert alone["axes"] == [] and alone["legal"] == ["tp1"] and len(alone["absent"]) == 6


def test_presets_are_each_axis_alone_by_two_and_as_far_as_it_goes() -> None:
    table = choice_table(load_spec("lab-moe-8x"), 4)
    by_two = ["dp2", "pp2", "pcp2", "tp2", "pcp2xdcp2", "tp2xep2"]
    assert table["presets"] == ["tp1", *by_two, "dp4", "pp4", "pcp4", "tp4", "pcp4xdcp4", "tp4xep4"]
    assert set(table["presets"]) <= set(table["legal"])
    assert choice_table(load_spec("lab-moe-8x"), 2)["presets"] == ["tp1", *by_two]


def test_an_option_is_a_toggle_of_the_axis_that_carries_it() -> None:
    table = choice_table(load_spec("lab-5m"), 2)
    assert {row["axis"]: row["options"] for row in table["axes"] if row["options"]} == {"pcp": ["ring"], "tp": ["sp"]}
    assert {"pcp2+ring", "tp2+sp"} <= set(table["legal"]) and "tp2+ring" not in table["legal"]


def test_the_table_is_small_enough_for_a_page() -> None:
    assert len(json.dumps(choice_table(load_spec("lab-moe-8x"), 4))) < 16_000
