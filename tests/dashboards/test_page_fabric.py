"""The page Fabric as it is: a real lab server whose ranks are measured by a button, kept, and drawn in a browser."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from axe import audit
from lab_server import LabServer
from playwright.sync_api import Page
from voila_server import VoilaServer

pytestmark = [pytest.mark.browser, pytest.mark.engine]
MEASURED_MS = 90_000


@pytest.fixture
def page(voila: VoilaServer, lab: LabServer, visit: Any) -> Any:
    if not lab.is_running:
        lab.start()
    visitor = visit()
    made = visitor.page
    made.visitor = visitor
    open_page(made, voila)
    yield made
    made.close(run_before_unload=True)


def open_page(page: Page, voila: VoilaServer) -> None:
    page.goto(voila.page("fabric.ipynb"), wait_until="commit")
    page.wait_for_selector('.lk-state[data-state="ready"]', timeout=60_000)


class Asking:
    """Two that ask for one answer after another, so that a request always runs."""

    def __init__(self, lab: LabServer) -> None:
        self._lab, self._over = lab, threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            self._lab.post("/v1/completions", prompt="hold on", max_tokens=200, ignore_eos=True)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


def panel(page: Page, name: str) -> str:
    return page.locator(f'[data-panel="{name}"]').inner_text()


def test_measure_is_a_button_and_the_figures_stay(page: Page, voila: VoilaServer, lab: LabServer) -> None:
    for name in ("topology", "curves", "pairs"):
        assert "Not measured yet; press Measure." in panel(page, name)
    measure = page.get_by_role("button", name="Measure")

    asking = Asking(lab)
    page.wait_for_selector('[data-panel="laststeps"] .lk-share-compute', state="attached", timeout=20_000)
    measure.click()
    banner = page.wait_for_selector('[data-banner="notice"]', timeout=10_000)
    assert re.search(r"\d requests? runs?, which a measurement would disturb", banner.inner_text())
    asking.end()
    assert "rank 0" in panel(page, "laststeps")

    measure.click()
    page.wait_for_function("document.querySelector('.lk').dataset.measured !== ''", timeout=MEASURED_MS)
    page.wait_for_selector('.lk-badge[data-provenance="measured"]')
    assert "every result verified" in page.locator(".lk-measure-remarks").inner_text()
    assert re.search(r"[\d.]+ [GM]B/s · [\d.]+ [µm]s", page.locator('[data-panel="topology"] svg').text_content() or "")
    cells = page.locator('[data-panel="pairs"] svg title').all_text_contents()
    assert len(cells) == 2 and all("shared memory" in cell for cell in cells), "one pair: bandwidth and latency"
    assert page.locator('[data-panel="curves"] .lk-curve.lk-fit').count() == 2, "over shared memory and over gloo"
    assert page.locator('[data-panel="telemetry"] .lk-line').count() > 3 and "psutil" in panel(page, "telemetry")

    first = page.locator('[data-panel="curves"] input:checked')
    named = first.get_attribute("value")
    first.focus()
    page.keyboard.press("ArrowRight")
    chosen = page.locator('[data-panel="curves"] input:checked')
    assert chosen.get_attribute("value") != named and chosen.evaluate("e => e === document.activeElement")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.wait_for_timeout(300)
    assert audit(page) == []
    assert page.visitor.errors == [] and page.visitor.strangers == []

    open_page(page, voila)
    page.wait_for_function("document.querySelector('.lk').dataset.measured !== ''", timeout=10_000)
    assert page.locator('[data-panel="pairs"] svg title').count() == 2, "kept for the next visitor"
