"""A layout's written form: what is printed reads back as itself, and what cannot be read is refused with a
sentence.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.layout import Layout, LayoutError


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any well-formed layout, with reuse axes and options where they may stand."""
    dp, pp, pcp, tp = (draw(st.integers(1, 12)) for _ in range(4))
    divisors = [d for d in range(1, tp + 1) if tp % d == 0]
    return Layout(
        dp=dp,
        pp=pp,
        pcp=pcp,
        tp=tp,
        dcp=draw(st.sampled_from(divisors if pcp == 1 else [1, pcp, tp * pcp])),
        ep=draw(st.sampled_from([1, tp * pcp, dp * tp * pcp])),
        sp=tp > 1 and draw(st.booleans()),
        ring=pcp > 1 and draw(st.booleans()),
        split=draw(st.none() | st.tuples(*[st.integers(1, 99)] * pp)) if pp > 1 else None,
    )


@given(layouts())
def test_a_printed_layout_reads_back_as_itself(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(layout.slug) == layout
    assert Layout.parse(layout.slug.upper()) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


@given(layouts(), layouts())
def test_layouts_are_equal_exactly_when_their_slugs_are(one: Layout, other: Layout) -> None:
    assert (one == other) == (one.slug == other.slug)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_with_a_sentence(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError as error:
        assert str(error).endswith((".", "?"))
    else:
        assert Layout.parse(layout.slug) == layout


@given(st.text(alphabet="dpctesxring+=-×:0123456789 ", max_size=24))
def test_text_made_of_the_grammars_letters_is_read_or_refused(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except LayoutError:
        return
    assert layout.world_size >= 1
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "name", "slug"),
    [
        ("tp1", "TP1", "tp1"),
        ("dp1xtp1", "TP1", "tp1"),
        ("DP2×TP2", "DP2×TP2", "dp2xtp2"),
        ("tp2xdp2", "DP2×TP2", "dp2xtp2"),
        (" tp2+SP ", "TP2+sp", "tp2+sp"),
        ("pcp2+ring", "PCP2+ring", "pcp2+ring"),
        ("pp2+split=4-6", "PP2+split=4-6", "pp2+split=4-6"),
        ("dp2xtp2xep4", "DP2×TP2×EP4", "dp2xtp2xep4"),
        ("pp2xtp2+split=1-2+sp", "PP2×TP2+sp+split=1-2", "pp2xtp2+sp+split=1-2"),
    ],
)
def test_written_forms(text: str, name: str, slug: str) -> None:
    layout = Layout.parse(text)
    assert (str(layout), layout.slug) == (name, slug)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no layout"),
        ("tp", "not an axis with its degree"),
        ("tp0", "tp is 0"),
        ("tp2xtp2", "gives tp twice"),
        ("tpp2", "Did you mean"),
        ("tq2", "'tq' in 'tq2' is no axis; the axes are dp, pp, pcp, tp, dcp, ep"),
        ("tp2+ps", "the options are +sp, +ring and +split=4-6"),
        ("tp2+sp=1", "takes no value"),
        ("tp2+sp+sp", "gives sp twice"),
        ("pp2+split", "lists the layers of each stage"),
        ("pp2+split=4", "names 1 stages and pp is 2"),
        ("pp2+split=0-4", "at least 1 layer"),
        ("tp2+split=4", "pp is 1"),
        ("tp1+sp", "tp is 1"),
        ("tp2+ring", "pcp is 1"),
        ("tp-2", "not an axis with its degree"),
        ("tp2.5", "not an axis with its degree"),
        ("tp" + "9" * 5000, "at most 65536"),
        ("tp4xdcp3", "may be 1, 2, 4"),
        ("pcp2xtp4xdcp4", "may be 1, 2, 8"),
        ("dp2xtp2xep3", "may be 1, 2, 4"),
    ],
)
def test_what_cannot_be_read_says_what_is_allowed(text: str, says: str) -> None:
    with pytest.raises(LayoutError, match=".*") as caught:
        Layout.parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("degree", [0, -1, 1.0, "2", True, None])
def test_a_degree_that_is_no_count_is_refused(degree: object) -> None:
    with pytest.raises(ValueError, match="whole number from 1"):
        Layout(tp=degree)  # type: ignore[arg-type]


def test_a_layout_is_a_value() -> None:
    layout = Layout(pp=2, split=[1, 2])  # type: ignore[arg-type]
    assert layout.split == (1, 2)
    assert {layout: 1}[Layout(pp=2, split=(1, 2))] == 1
    with pytest.raises(AttributeError):
        layout.tp = 2  # type: ignore[misc]
