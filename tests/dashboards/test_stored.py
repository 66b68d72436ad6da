"""Stored runs on the page: found, pinned, and held against the current figures; what nobody recorded is not made up."""

from __future__ import annotations

from typing import Any

import pytest
import stage
import synthetic
from playwright.sync_api import Page

from labkit.show.frame_run import Percentiles

pytestmark = pytest.mark.browser


@pytest.fixture
def page(visit: Any) -> Page:
    opened = visit(800).page
    stage.open_stage(opened)
    opened.locator("[data-language=en]").click()
    stage.show(opened, synthetic.message(synthetic.frame(), 1))
    return opened


def sent(page: Page, kind: str) -> list[dict[str, Any]]:
    return page.evaluate("kind => window.sent.filter((m) => m.type === kind)", kind)


def test_a_run_is_searched_for_and_pinned(page: Page) -> None:
    page.get_by_text("Stored runs: pin one").click()
    page.wait_for_function("window.sent.some((m) => m.type === 'look_up')")
    rows = page.locator(".lk-stored tbody tr")
    assert rows.count() == 4 and "not recorded" in rows.nth(3).inner_text()
    page.get_by_label("Search: layout").fill("vllm DP2")
    assert rows.count() == 1 and "1 of 4 runs" in page.locator(".lk-stored").inner_text()
    rows.get_by_role("button").click()
    assert sent(page, "pin") == [{"type": "pin", "run_id": "run-1"}]


def test_what_the_engine_did_not_record_is_said_and_conditions_that_differ_are_named(page: Page) -> None:
    made = synthetic.frame()
    made.beside = synthetic.beside()
    stage.show(page, synthetic.message(made, 2))
    assert "DP2×TP2 on vLLM, stored 2026-01-02" in page.locator('[data-panel="ttft"] .lk-legend').inner_text()
    for panel in ("waterfall", "memory", "why"):
        legend = page.locator(f'[data-panel="{panel}"] .lk-legend').inner_text()
        assert "DP2×TP2 on vLLM: not recorded by vLLM" in legend, panel
    assert page.locator('[data-panel="throughput"] svg').text_content().count("◇") == 4
    below = page.locator('[data-panel="beside"] .lk-below').inner_text()
    assert "Not the layout alone differs: engine, load, machine." in below
    assert "Not recorded by vLLM, so not compared: workload." in below
    verdicts = page.locator('[data-panel="beside"] svg').text_content()
    assert "cannot tell" in verdicts and "higher" in verdicts and "too few" in verdicts
    page.get_by_role("button", name="Unpin DP2×TP2 on vLLM").click()
    assert sent(page, "unpin") == [{"type": "unpin"}]


def test_a_low_load_pinned_stays_below_the_high_one(page: Page) -> None:
    page.get_by_role("button", name="Pin this layout").click()
    assert sent(page, "pin") == [{"type": "pin"}]
    high = synthetic.frame()
    high.why = synthetic.why(4.0)
    stage.show(page, synthetic.message(high, 2))
    figures = page.locator('[data-panel="why"] svg').text_content()
    assert "443 ms" in figures and "◇ 111 ms" in figures
    assert page.locator('[data-panel="why"] .lk-ghost-part').count() > 8
    reasons = page.locator('[data-panel="why"] .lk-reason')
    assert reasons.count() == 4 and "queue-bound" in reasons.first.inner_text()
    assert "the ranks are idle 12%" in reasons.first.inner_text(), "a verdict without its figures"


def test_with_a_load_and_no_request_yet_the_page_says_that_it_waits(page: Page) -> None:
    made = synthetic.frame(n=0)
    made.run.ttft_ms = made.run.tpot_ms = Percentiles()
    made.run.ttft_parts_ms, made.why, made.steady, made.crossings = {}, None, None, []
    stage.show(page, synthetic.message(made, 2))
    text = page.locator(".lk").inner_text()
    assert "The load is running: the parts appear with its first finished request." in text
    assert "load running, waiting for its first finished request" in text and "Start a load" not in text
