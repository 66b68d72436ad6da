"""The page Planner as it is: Voila, a kernel, the real planner, a browser that moves sliders, and real ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe import audit
from lab_server import LabServer
from playwright.sync_api import Page
from voila_server import VoilaServer

pytestmark = [pytest.mark.browser, pytest.mark.engine]


@pytest.fixture(scope="module")
def page(voila: VoilaServer, lasting_visit: Any) -> Any:
    """One kernel for both tests: what the first leaves set, the second sets itself."""
    visitor = lasting_visit()
    made = visitor.page
    made.visitor = visitor
    made.goto(voila.page("planner.ipynb"), wait_until="commit")
    made.wait_for_selector(".lk[data-card]:not([data-card=''])", timeout=60_000)
    yield made
    made.close(run_before_unload=True)


def text(page: Page, panel: str) -> str:
    return page.locator(f'[data-panel="{panel}"]').inner_text()


def planned(page: Page) -> None:
    """All layouts were looked at, for what stands there now."""
    page.wait_for_function("() => { const d = document.querySelector('.lk'); return d.dataset.plan !== '' "
                           "&& !d.classList.contains('lk-plan-old') && !d.classList.contains('lk-card-old'); }",
                           timeout=60_000)  # fmt: skip


def test_a_visitor_goes_from_a_model_to_a_command(page: Page) -> None:
    page.get_by_label("Model", exact=True).select_option("llama-3.1-8b")
    page.get_by_label("GPUs, all nodes").select_option("2")
    planned(page)
    assert "✓ does it" in text(page, "answer") and re.search(r"TTFT p95\n[\d.]+ ms ± \d+ %", text(page, "answer"))
    tiles = [tile.bounding_box() for tile in page.locator(".lk-tile").all()]
    assert len(tiles) == 4 and len({tile["y"] for tile in tiles if tile}) == 1, "they stand side by side"
    assert page.locator('[data-panel="walk"] li').count() > 5 and page.locator('[data-panel="checks"] li').count() > 3
    assert page.locator('[data-panel="front"] .lk-dot').count() > 1
    assert "vllm serve llama-3.1-8b" in text(page, "deploy")

    page.get_by_label("Model", exact=True).select_option("llama-3.1-70b")
    page.get_by_label("GPUs, all nodes").select_option("4")
    planned(page)
    page.locator('[data-panel="answer"]', has_text="the smallest that does what is asked").wait_for(timeout=10_000)
    assert "TP4" in text(page, "answer"), "at once there was the answer of before, which does not hold it"
    page.get_by_label("Model", exact=True).select_option("llama-3.1-8b")
    page.get_by_label("GPUs, all nodes").select_option("2")
    planned(page)

    before = text(page, "percentiles"), page.locator('[data-panel="percentiles"] svg').text_content()
    page.locator("input[data-input=rate]").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    planned(page)
    assert page.locator('[data-panel="percentiles"] svg').text_content() != before[1], "figures do not move"

    row = page.locator('[data-panel="layouts_table"] tbody tr').nth(1)
    other = row.get_attribute("data-layout")
    row.get_by_role("button").click()
    page.wait_for_selector(f'[data-panel="layouts_table"] tr.lk-row-selected[data-layout="{other}"]')
    page.get_by_role("button", name="Back to the answer").click()
    planned(page)

    page.get_by_text("Paste a config.json").click()
    page.get_by_label("A Hugging Face config.json").fill('{"model_type": "llama"')
    page.get_by_label("A Hugging Face config.json").press("Tab")
    banner = page.wait_for_selector('[data-banner="notice"]', timeout=10_000)
    assert "no JSON" in banner.inner_text() and "✓ does it" in text(page, "answer"), "what was there is lost"
    assert page.get_by_label("A Hugging Face config.json").input_value() == '{"model_type": "llama"'
    page.get_by_role("button", name="Use the model above").click()
    planned(page)
    page.locator('[data-banner="notice"]').wait_for(state="detached", timeout=10_000)
    assert audit(page) == [] and page.visitor.errors == [] and page.visitor.strangers == []


def test_the_layout_runs_small_on_this_machine(page: Page, lab: LabServer) -> None:
    if not lab.is_running:
        lab.start()
    page.get_by_label("Model", exact=True).select_option("llama-3.1-8b")
    page.get_by_label("GPUs, all nodes").select_option("2")
    planned(page)
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    button = page.locator('[data-panel="trial"] button')
    assert "Run it here: TP1" in button.inner_text()
    button.click()
    page.wait_for_selector('[data-panel="trial"] .lk-measured', timeout=60_000)
    assert "lab-5m on TP1, chat" in text(page, "trial") and "labkit calibrate" in text(page, "trial")
    page.get_by_role("button", name="Stop").click()
    page.locator(".lk-holder", has_text="Nobody holds the ranks").wait_for(timeout=20_000)
    assert page.locator('[data-panel="trial"] .lk-measured').count() > 0, "figures stay when the run is over"
