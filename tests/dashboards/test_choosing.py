"""The choice of a layout by its axes, and panels that come and go with them: the drawing alone, with a real table."""

from __future__ import annotations

from typing import Any

import pytest
import stage
import synthetic
from playwright.sync_api import Page

from labkit.layout import AXES, Layout
from labkit.show.frame import LayoutsFrame

pytestmark = pytest.mark.browser


def put(page: Page, made: LayoutsFrame, seq: int = 1) -> None:
    stage.show(page, synthetic.message(made, seq))


def watching(**shape: int) -> LayoutsFrame:
    """Somebody who has not started anything."""
    made = synthetic.frame(**shape)
    made.role, made.run, made.switch = "watching", None, None
    return made


@pytest.fixture
def page(visit: Any) -> Page:
    opened = visit().page
    stage.open_stage(opened)
    opened.locator("[data-language=en]").click()
    return opened


def degree(page: Page, axis: str, value: int) -> Any:
    return page.locator(f'.lk-axis[data-axis="{axis}"] input[value="{value}"]')


def chosen(page: Page) -> str:
    return page.locator(".lk-chosen b").inner_text()


def sent(page: Page, kind: str) -> list[dict[str, Any]]:
    return page.evaluate("kind => window.sent.filter((m) => m.type === kind)", kind)


def test_axes_compose_a_layout(page: Page) -> None:
    put(page, watching(tp=1))
    assert chosen(page) == "TP1"
    degree(page, "tp", 2).check()
    degree(page, "pp", 2).check()
    assert chosen(page) == "PP2×TP2"
    assert degree(page, "tp", 2).is_checked() and degree(page, "pp", 2).is_checked()
    degree(page, "tp", 1).check()
    degree(page, "pcp", 2).check()
    page.get_by_role("button", name="+ring").click()
    assert chosen(page) == "PP2×PCP2+ring"
    degree(page, "pcp", 1).check()
    assert chosen(page) == "PP2", "the ring goes with its axis"


def test_a_greyed_degree_says_why_and_offers_the_nearest(page: Page) -> None:
    put(page, watching(tp=1))
    degree(page, "tp", 4).check()
    greyed = degree(page, "pp", 2)
    label = greyed.locator("..")
    assert greyed.get_attribute("aria-disabled") == "true" and "lk-refused" in label.get_attribute("class")
    assert "pp 2 × tp 4 = 8 ranks, and 4 are there" in label.get_attribute("title")
    greyed.click(force=True)
    assert chosen(page) == "TP4" and not greyed.is_checked(), "a refusal changes nothing"
    why = page.locator(".lk-why")
    assert "PP2×TP4 does not fit." in why.inner_text() and "8 ranks" in why.inner_text()
    offers = why.get_by_role("button").all_inner_texts()
    assert offers[0] == "PP2×TP2", offers
    why.get_by_role("button").first.click()
    assert chosen(page) == "PP2×TP2" and why.inner_text() == ""


def test_the_models_reason_is_told_in_its_own_words(page: Page) -> None:
    put(page, watching(tp=1))
    degree(page, "tp", 3).click(force=True)
    assert "8 query heads ÷ tp 3 = 2.67…" in page.locator(".lk-why").inner_text()
    page.get_by_text("Not here: EP").click()
    assert "lab-5m has none" in page.locator(".lk-absent").inner_text()
    assert page.locator('.lk-axis[data-axis="ep"]').count() == 0


def test_every_legal_layout_is_shown_by_its_degrees(page: Page) -> None:
    """Each as the standing layout: its degrees are checked, and none of them is greyed."""
    table = synthetic.choices("lab-moe-8x", 4)
    page.evaluate("table => window.choose_from(table)", table)
    for seq, slug in enumerate(table["legal"][::7], 1):
        made, layout = watching(tp=1), Layout.parse(slug)
        made.lab.layout, made.lab.layout_name = slug, str(layout)
        put(page, made, seq)
        shown = page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('.lk-axes input:checked')]"
            ".map((e) => [e.closest('.lk-axis').dataset.axis, +e.value]))"
        )
        assert shown == {axis: getattr(layout, axis) for axis in AXES}, slug
        assert chosen(page) == str(layout)
        assert page.locator(".lk-refused input:checked").count() == 0
        pressed = page.locator('.lk-option[aria-pressed="true"]').all_inner_texts()
        assert pressed == [f"+{option}" for option in ("ring", "sp") if getattr(layout, option)]


def test_axes_can_be_set_by_keyboard(page: Page) -> None:
    put(page, watching(tp=1))
    degree(page, "tp", 1).focus()
    page.keyboard.press("ArrowRight")
    assert chosen(page) == "TP2"
    page.keyboard.press("ArrowRight")
    assert chosen(page) == "TP2" and "does not fit" in page.locator(".lk-why").inner_text()
    page.keyboard.press("ArrowRight")
    assert chosen(page) == "TP4" and page.locator(".lk-why").inner_text() == ""


def test_presets_are_single_axes_and_the_pools_that_the_server_lists(page: Page) -> None:
    made = watching(tp=1)
    made.lab.pool_choices = synthetic.every_axis().lab.pool_choices
    put(page, made)
    names = page.locator(".lk-presets button").all_inner_texts()
    pools = ["prefill:TP1, decode:TP1", "prefill:TP3, decode:TP1"]
    by_two = ["DP2", "PP2", "PCP2", "TP2", "PCP2×DCP2"]
    assert names == ["TP1", *by_two, "DP4", "PP4", "PCP4", "TP4", "PCP4×DCP4", *pools]
    assert page.locator(".lk-preset-title").all_inner_texts() == ["1 rank", "2 ranks", "4 ranks", "Pools"]
    page.get_by_role("button", name="prefill:TP1, decode:TP1").click()
    assert chosen(page) == "prefill:TP1, decode:TP1"
    assert page.locator(".lk-axes input:checked").count() == 0
    page.get_by_role("button", name="prefill:TP3").click(force=True)
    assert "8 query heads" in page.locator(".lk-why").inner_text() and chosen(page) == "prefill:TP1, decode:TP1"
    degree(page, "dp", 2).check()
    assert chosen(page) == "DP2"


def test_a_newcomer_walks_from_one_rank_to_two_and_back_by_buttons_alone(page: Page) -> None:
    put(page, watching(tp=1))
    for name in ("TP2", "DP2", "TP1"):
        page.get_by_role("button", name=name, exact=True).click()
        assert chosen(page) == name
        assert page.locator('.lk-presets [aria-pressed="true"]').all_inner_texts() == [name]


def test_more_ranks_than_cores_is_said_at_the_choice(page: Page) -> None:
    put(page, watching(tp=1))
    over = page.locator(".lk-chosen .lk-over")
    assert over.count() == 0
    degree(page, "tp", 4).check()
    assert over.inner_text() == "▲ more ranks than cores"


def test_another_server_brings_another_table(page: Page) -> None:
    put(page, watching(tp=1))
    assert page.locator(".lk-axis").count() == 5
    page.evaluate("table => window.choose_from(table)", synthetic.choices("lab-moe-8x", 2))
    page.wait_for_selector('.lk-axis[data-axis="ep"]')
    assert page.locator('.lk-axis[data-axis="tp"] input').count() == 2


def test_a_choice_counts_at_once_while_a_load_runs_and_otherwise_with_the_next_start(page: Page) -> None:
    put(page, watching(tp=1))
    degree(page, "tp", 2).check()
    page.wait_for_timeout(500)
    assert sent(page, "change") == []
    page.get_by_role("button", name="Start").click()
    assert [m["layout"] for m in sent(page, "start")] == ["tp2"]
    put(page, synthetic.frame(tp=2), 2)
    degree(page, "pp", 2).check()
    page.wait_for_function("window.sent.some((m) => m.type === 'change' && m.layout === 'pp2xtp2')")


def test_a_choice_between_start_and_the_first_frame_that_shows_it_counts(page: Page) -> None:
    put(page, watching(tp=1))
    page.get_by_role("button", name="Start").click()
    degree(page, "pp", 2).check()
    page.wait_for_function("window.sent.some((m) => m.type === 'change' && m.layout === 'pp2')")
    page.get_by_role("button", name="Start").click()  # no frame has come: it is still Start, and starts again
    assert [m["layout"] for m in sent(page, "start")] == ["tp1", "pp2"]


# ---- panels


def panels(page: Page) -> set[str]:
    return set(page.locator(".lk-panel:not([hidden])").evaluate_all("all => all.map((e) => e.dataset.panel)"))


ALWAYS = {"why", "ttft", "tpot", "waterfall", "throughput", "ownership", "memory", "shares", "inflight", "kv"}


def test_panels_come_and_go_with_the_axes(page: Page) -> None:
    put(page, synthetic.frame(tp=1))
    assert panels(page) == ALWAYS
    put(page, synthetic.frame(tp=2), 2)
    assert panels(page) == ALWAYS | {"crossings"}
    put(page, synthetic.every_axis(), 3)
    assert panels(page) == ALWAYS | {"crossings", "experts", "pools", "gantt"}
    put(page, synthetic.frame(tp=2), 4)
    assert panels(page) == ALWAYS | {"crossings"}


def test_stages_have_a_row_each_with_their_bars(page: Page) -> None:
    put(page, synthetic.every_axis())
    gantt = page.locator('[data-panel="gantt"] svg')
    assert "stage 0" in gantt.text_content() and "ranks 2–3" in gantt.text_content()
    assert gantt.locator(".lk-share-compute").count() == 48


def test_the_busiest_expert_is_marked_and_the_mean_drawn(page: Page) -> None:
    put(page, synthetic.every_axis())
    panel = page.locator('[data-panel="experts"]')
    assert panel.locator(".lk-expert").count() == 8 and panel.locator(".lk-mean").count() == 1
    assert "▼ 3\u202f420" in panel.locator("svg").text_content()
    assert "17 dropped" in panel.locator(".lk-note").inner_text()
    assert "waited 95.0 ms for the busiest" in panel.locator("svg").text_content()


def test_kv_says_how_many_more_requests_fit(page: Page) -> None:
    put(page, synthetic.every_axis())
    panel = page.locator('[data-panel="kv"]')
    line = "12\u202f345 of 45\u202f056 tokens · room for 32\u202f711 · 54 more requests of mean length"
    assert line in panel.locator("svg").text_content()
    assert "2 ranks share out the positions" in panel.locator(".lk-note").inner_text()


def test_what_crossed_under_earlier_layouts_stays_hollow(page: Page) -> None:
    marks = page.locator('[data-panel="crossings"] .lk-stage svg [class*="lk-axis-"]')
    put(page, synthetic.frame(tp=2))
    assert marks.count() == 0, "a layout counts from its second frame on"
    put(page, synthetic.frame(tp=2), 2)
    assert marks.count() == 3 and page.locator(".lk-stage svg .lk-hollow").count() == 0
    put(page, synthetic.every_axis(), 3)
    put(page, synthetic.every_axis(), 4)
    assert marks.count() == 18 and page.locator(".lk-stage svg .lk-hollow").count() == 3
    panel = page.locator('[data-panel="crossings"]')
    panel.get_by_text("Show as table").click()
    panel.locator("tbody tr").first.wait_for()
    rows = panel.locator("tbody tr").all_inner_texts()
    assert len(rows) == 18 and sum(row.startswith("TP2\t") for row in rows) == 3
    idle = synthetic.frame(tp=2)
    idle.crossings = []
    put(page, idle, 5)
    put(page, idle, 6)
    assert marks.count() == 18, "a load that has ended takes nothing away"


def test_a_handoff_has_its_row_only_between_pools(page: Page) -> None:
    put(page, synthetic.frame(tp=2))
    assert "handoff" not in page.locator('[data-panel="waterfall"] svg').text_content()
    put(page, synthetic.every_axis(), 2)
    assert "handoff" in page.locator('[data-panel="waterfall"] svg').text_content()
    pools = page.locator('[data-panel="pools"] svg').text_content()
    assert "1.24 MiB each" in pools and "4.2 ms (p95 9.9 ms)" in pools and "310 MiB/s" in pools
