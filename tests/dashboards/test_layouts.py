"""The page Layouts as it is: a real lab server and ranks, a real load, Voila, and a browser that toggles the layout."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_server import LabServer
from playwright.sync_api import Page
from playwright.sync_api import TimeoutError as NotInTime
from voila_server import VoilaServer

from labkit.lab.importing import import_results

pytestmark = [pytest.mark.browser, pytest.mark.engine]


@pytest.fixture
def page(voila: VoilaServer, visit: Any) -> Iterator[Page]:
    made = visit().page
    made.goto(voila.page("layouts.ipynb"), wait_until="commit")
    made.wait_for_selector(".lk[data-seq]", timeout=60_000)
    yield made
    made.close(run_before_unload=True)


def wait_for(page: Page, layout: str, n: int, timeout_s: float = 60) -> float:
    """Seconds until figures of at least `n` requests on `layout` are shown."""
    begin = time.monotonic()
    try:
        page.wait_for_function(
            "([l, n]) => { const d = document.querySelector('.lk').dataset; return d.layout === l && +d.n >= n; }",
            arg=[layout, n],
            timeout=timeout_s * 1000,
        )
    except NotInTime as error:
        shown = page.evaluate("JSON.stringify(document.querySelector('.lk').dataset)")
        words = [page.locator(each).all_inner_texts() for each in (".lk-chosen", ".lk-why", ".lk-banner", ".lk-holder")]
        raise AssertionError(f"no figures of {n} requests on {layout} in {timeout_s} s: {shown}, {words}") from error
    return time.monotonic() - begin


def wait_for_holder(page: Page, words: str, timeout_s: float = 15) -> None:
    page.locator(".lk-holder", has_text=words).wait_for(timeout=timeout_s * 1000)


def start(page: Page, rate: float) -> None:
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    page.get_by_label("Rate").fill(str(rate))
    page.get_by_label("Rate").press("Enter")
    page.get_by_role("button", name="Start").click()


def choose(page: Page, layout: str) -> None:
    page.locator(f'.lk-preset[data-layout="{layout}"]').click()


def ladder(page: Page, panel: str = "ttft") -> list[str]:
    values = page.locator(f'[data-panel="{panel}"] svg text.lk-value')
    return values.evaluate_all("texts => texts.map((text) => text.firstChild.textContent)")


def test_without_a_server_the_page_says_what_to_do_and_then_connects(page: Page, lab: LabServer) -> None:
    banner = page.wait_for_selector('[data-banner="absent"]', timeout=10_000)
    assert "labkit serve" in banner.inner_text()
    assert page.get_by_role("button", name="Start").is_disabled()
    lab.start()
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    assert page.locator(".lk-banner").count() == 0
    assert page.get_by_role("button", name="Start").is_enabled()
    assert "lab-5m" in page.locator(".lk-machine").inner_text()


def test_toggling_the_layout_moves_the_figures(page: Page, lab: LabServer, record_property: Any) -> None:
    assert "nothing measured yet" in page.locator(".lk-badge").inner_text()
    start(page, 4)
    wait_for(page, "tp1", 12)
    one_rank = ladder(page)
    assert all(re.fullmatch(r"[\d.]+ m?s [✓✕]", value) for value in one_rank), one_rank
    assert page.locator(".lk-badge").get_attribute("data-provenance") == "measured"
    page.get_by_role("button", name="Pin this layout").click()

    choose(page, "tp2")
    record_property("tp2_first_figure_s", round(wait_for(page, "tp2", 1), 2))
    assert int(page.get_attribute(".lk", "data-n") or 0) < 12, "figures of TP1 are counted as TP2's"
    wait_for(page, "tp2", 6)
    assert ladder(page) != one_rank
    assert "TP1, pinned" in page.locator('[data-panel="ttft"] .lk-legend').inner_text()
    assert re.search(r"TP2 ready in \d\.\d\d s; first token \d\.\d\d s", page.locator(".lk-switch-time").inner_text())
    held = page.locator('[data-panel="ownership"] svg')
    assert "1/2" in held.text_content() and "2/2" in held.text_content()

    choose(page, "dp2")
    record_property("dp2_first_figure_s", round(wait_for(page, "dp2", 1), 2))
    n = int(page.get_attribute(".lk", "data-n") or 0)
    wait_for(page, "dp2", n + 4)
    assert "replica 1" in page.locator('[data-panel="inflight"] svg').text_content()
    assert page.locator('[data-panel="ownership"] svg rect[fill^="url"]').count() >= 6, "copies are not hatched"
    assert "rank 1" in page.locator('[data-panel="memory"] svg').text_content()

    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector('.lk[data-role="watching"]')
    wait_for_holder(page, "Nobody holds the ranks")


VLLM = {
    "date": "20260131-093000", "model_id": "lab-5m", "request_rate": 4.0, "tp": 2, "input_lens": [64] * 30,
    "output_lens": [11] * 30, "start_times": [100.0 + i / 4 for i in range(30)], "errors": [""] * 30,
    "ttfts": [0.1 + i / 1000 for i in range(30)], "itls": [[0.02] * 10] * 30,
}  # fmt: skip
AIPERF = {
    "metadata": {"request_start_ns": 10**9, "benchmark_phase": "profiling"},
    "metrics": {"time_to_first_token": {"value": 40.0, "unit": "ms"},
                "output_sequence_length": {"value": 4, "unit": "tokens"},
                "request_latency": {"value": 100.0, "unit": "ms"}},
}  # fmt: skip


def test_files_of_other_clients_are_stored_and_shown_beside_the_lab(page: Page, lab: LabServer, places: Path) -> None:
    for name, content in (("theirs.json", VLLM), ("profile_export.jsonl", AIPERF)):
        (places / name).write_text(json.dumps(content) + "\n")
        import_results(places / name)
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    page.get_by_text("Stored runs: pin one").click()
    page.locator(".lk-stored tbody tr", has_text="theirs.json").get_by_role("button").click()
    page.locator('[data-panel="ttft"] .lk-legend', has_text="TP2, vLLM's bench serve, stored 2026-01-31").wait_for()
    assert "115 ms" in (page.locator('[data-panel="ttft"] svg').text_content() or ""), "p50 of 100 … 129 ms"
    assert "lab-5m" in page.locator(".lk-conditions").inner_text()
    page.locator(".lk-stored tbody tr", has_text="profile_export.jsonl").get_by_role("button").click()
    page.locator('[data-panel="ttft"] .lk-legend', has_text="aiperf, stored").wait_for()
    assert "40.0 ms" in (page.locator('[data-panel="ttft"] svg').text_content() or "")
    assert "not recorded by aiperf" in page.locator('[data-panel="waterfall"] .lk-legend').inner_text()
    page.get_by_role("button", name="Unpin aiperf").click()
    page.locator('[data-panel="beside"]').wait_for(state="hidden")


def test_stages_then_context_while_the_load_goes_on(page: Page, lab: LabServer, record_property: Any) -> None:
    """PP2 by its axis, then PCP2, which does not fit beside it and is offered instead."""
    start(page, 4)
    page.wait_for_selector('.lk[data-role="running"]', timeout=30_000)
    gantt, kv = page.locator('[data-panel="gantt"]'), page.locator('[data-panel="kv"] svg')
    choose(page, "tp1")
    wait_for(page, "tp1", 1)
    assert gantt.is_hidden() and page.locator('[data-panel="pools"]').is_hidden()
    assert re.search(r"of [\d\u202f]+ tokens · room for [\d\u202f]+", kv.text_content() or ""), kv.text_content()

    page.locator('.lk-axis[data-axis="pp"] input[value="2"]').check()
    record_property("pp2_first_figure_s", round(wait_for(page, "pp2", 1), 2))
    wait_for(page, "pp2", 4)
    assert gantt.is_visible() and "stage 1" in (gantt.locator("svg").text_content() or "")
    page.wait_for_function("document.querySelectorAll('[data-panel=gantt] .lk-share-compute').length >= 8")
    marks = page.locator('[data-panel="crossings"] .lk-stage svg [class*="lk-axis-"]')
    assert marks.count() > 0 and page.locator(".lk-axis-pp").count() > 0

    greyed = page.locator('.lk-axis[data-axis="pcp"] input[value="2"]')
    greyed.click(force=True)
    why = page.locator(".lk-why")
    assert "pp 2 × pcp 2 = 4 ranks, and 2 are there" in why.inner_text()
    why.get_by_role("button", name="PCP2", exact=True).click()
    record_property("pcp2_first_figure_s", round(wait_for(page, "pcp2", 1), 2))
    wait_for(page, "pcp2", 4)
    assert gantt.is_hidden()
    names = page.locator('[data-panel="crossings"] .lk-hollow title').all_text_contents()
    assert any(name.startswith("PP2 PP") for name in names), f"PP2's marks are not kept: {names}"
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector('.lk[data-role="watching"]')
    wait_for_holder(page, "Nobody holds the ranks")


def test_two_visitors_queue_and_see_each_other(page: Page, voila: VoilaServer, lab: LabServer, visit: Any) -> None:
    start(page, 2)
    page.wait_for_selector('.lk[data-role="running"]', timeout=30_000)
    other = visit(800).page
    other.goto(voila.page("layouts.ipynb"), wait_until="commit")
    wait_for_holder(other, "holds the ranks", 60)
    other.get_by_role("button", name="Start").click()
    wait_for_holder(other, "You are number 1 in the queue")
    wait_for_holder(page, "1 waiting")
    page.get_by_role("button", name="Stop").click()
    other.wait_for_selector('.lk[data-role="running"]', timeout=30_000)
    other.close(run_before_unload=True)
    wait_for_holder(page, "Nobody holds the ranks", 30)


def test_a_killed_rank_is_shown_and_the_page_recovers(page: Page, lab: LabServer, record_property: Any) -> None:
    start(page, 4)
    page.wait_for_function("document.querySelector('.lk').dataset.n >= 3", timeout=60_000)
    layout = page.get_attribute(".lk", "data-layout") or ""
    begin = time.monotonic()
    lab.post("/lab/fault", rank=0, kind="kill")
    banner = page.wait_for_selector('[data-banner="rank"]', timeout=15_000)
    record_property("failure_shown_s", round(time.monotonic() - begin, 1))
    assert "Rank 0 has failed" in banner.inner_text()
    page.wait_for_selector('[data-banner="recovered"]', timeout=90_000)
    record_property("recovered_s", round(time.monotonic() - begin, 1))
    n = int(page.get_attribute(".lk", "data-n") or 0)
    wait_for(page, layout, n + 4)


def test_a_server_that_goes_is_missed(page: Page, lab: LabServer) -> None:
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    lab.stop()
    banner = page.wait_for_selector('[data-banner="lost"]', timeout=30_000)
    assert "labkit serve" in banner.inner_text()
    lab.start()
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)
    assert page.locator('[data-banner="lost"]').count() == 0
