"""The whole chain from a kernel to a real browser through Voila, with the project's own settings and template.

The frames are made up; what is tested is the chain: offline, quick, steady, patient, and gone when nobody watches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe import audit
from playwright.sync_api import Error, Page
from voila_server import VoilaServer, write_notebook

pytestmark = pytest.mark.browser

SILENT_S = 3
CULL_S = 8
"""Longer than a busy machine takes from a kernel's first rest to the browser's connection."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VoilaServer]:
    folder = tmp_path_factory.mktemp("voila")
    lines = ("from synthetic_source import page", "page()")
    started = VoilaServer(
        write_notebook(folder / "page.ipynb", *lines), folder / "voila.log",
        LABKIT_TEST_SILENT_S=str(SILENT_S), LABKIT_CULL_AFTER_S=str(CULL_S), LABKIT_CULL_EVERY_S="1",
        LABKIT_MAX_VISITORS="2",
    )  # fmt: skip
    yield started
    started.stop()


@pytest.fixture
def visitor(server: VoilaServer, visit: Any) -> Iterator[Any]:
    """Somebody on the page, with its first frame drawn; leaves politely."""
    server.wait_for_kernels(0, 15)
    made = visit()
    begin = time.monotonic()
    open_page(made.page, server)
    made.first_frame_s = time.monotonic() - begin
    yield made
    leave(made.page)


def leave(page: Page) -> None:
    """Politely, as a browser does; it may have gone already."""
    with contextlib.suppress(Error):
        page.close(run_before_unload=True)


def open_page(page: Page, server: VoilaServer, query: str = "") -> None:
    page.goto(server.url + query, wait_until="commit")
    page.wait_for_selector(".lk[data-seq]", timeout=60_000)


def seq(page: Page) -> int:
    return int(page.get_attribute(".lk", "data-seq") or 0)


def test_offline_quick_steady_patient_and_gone_with_the_page(
    visitor: Any, server: VoilaServer, record_property: Any
) -> None:
    page = visitor.page
    assert visitor.strangers == [] and visitor.errors == []
    record_property("first_frame_s", round(visitor.first_frame_s, 2))
    assert visitor.first_frame_s < 20, "first frame"
    rss_mb = server.kernels()[0].memory_info().rss / 1e6
    record_property("kernel_rss_mb", round(rss_mb))
    assert rss_mb <= 80

    page.get_by_role("button", name="Start").click()
    page.wait_for_function("document.querySelector('.lk').dataset.n > 0")
    before = seq(page)
    time.sleep(3)
    drawn = seq(page) - before
    record_property("frames_per_s", drawn / 3)
    assert 8 <= drawn <= 26, "8 a second, fewer on a busy machine"

    page.evaluate("() => { const end = performance.now() + 3000; while (performance.now() < end); }")  # a frozen tab
    frozen = seq(page)
    time.sleep(0.5)
    assert seq(page) - frozen <= 6, "frames had piled up behind the frozen tab"

    leave(page)
    record_property("kernel_gone_s", round(server.wait_for_kernels(0, 10), 2))


def test_a_whole_visit_by_keyboard(visitor: Any) -> None:
    page = visitor.page
    tp1 = page.get_by_role("radiogroup", name="tensor").get_by_role("radio", name="1")
    tp1.focus()
    page.keyboard.press("Tab")
    reached = []
    for _ in range(20):
        reached.append(page.evaluate("document.activeElement.textContent"))
        if reached[-1] == "Start":
            break
        page.keyboard.press("Tab")
    assert reached[-1] == "Start", reached
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('.lk').dataset.n > 25")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    page.wait_for_selector(".lk-diamond-mark")
    tp1.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.lk').dataset.layout === 'tp2'")
    assert "TP1, pinned" in page.locator('[data-panel="ttft"] .lk-legend').inner_text()
    page.locator("[data-language=zh]").focus()
    page.keyboard.press("Enter")
    assert page.locator("h1").inner_text() == "并行布局"
    assert page.get_attribute(".lk", "lang") == "zh-CN"


def test_dark_by_query_and_language_by_query(server: VoilaServer, visit: Any) -> None:
    server.wait_for_kernels(0, 15)
    page = visit(390, 844).page
    open_page(page, server, "?theme=dark&lang=zh")
    assert page.locator("h1").inner_text() == "并行布局"
    ground = page.evaluate("getComputedStyle(document.querySelector('.lk')).backgroundColor")
    assert ground == "rgb(17, 17, 17)"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert audit(page) == []
    leave(page)


def test_a_hidden_tab_is_kept_alive_at_one_frame_a_second(visitor: Any) -> None:
    page = visitor.page
    page.get_by_role("button", name="Start").click()
    page.wait_for_function("document.querySelector('.lk').dataset.n > 0")
    page.evaluate("Object.defineProperty(document, 'visibilityState', {get: () => 'hidden', configurable: true})")
    time.sleep(1.2)
    before = seq(page)
    time.sleep(SILENT_S + 1.5)
    assert 2 <= seq(page) - before <= SILENT_S + 4
    page.evaluate("delete document.visibilityState; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_function(f"+document.querySelector('.lk').dataset.seq > {seq(page)} + 6")
    assert page.get_attribute(".lk", "data-role") == "running", "the load ended while the tab was in the background"


@pytest.mark.slow
def test_a_crashed_browser_leaves_nothing(visitor: Any, server: VoilaServer, record_property: Any) -> None:
    """No farewell: the page's kernel falls silent by itself and is then culled."""
    page = visitor.page
    page.get_by_role("button", name="Start").click()
    page.wait_for_function("document.querySelector('.lk').dataset.n > 0")
    page.close(run_before_unload=False)
    record_property("kernel_culled_s", round(server.wait_for_kernels(0, SILENT_S + CULL_S + 20), 1))


def test_a_dead_kernel_shows(visitor: Any, server: VoilaServer) -> None:
    server.kernels()[0].kill()
    banner = visitor.page.wait_for_selector('[data-banner="stale"]', timeout=12_000)
    assert "Reload the page" in banner.inner_text()


def served_within(server: VoilaServer, seconds: float) -> bool:
    """A kernel's process ends a moment before the server strikes it off its list."""
    give_up = time.monotonic() + seconds
    while server.get()[0] != 200:
        if time.monotonic() > give_up:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.slow
def test_beyond_the_cap_there_is_a_friendly_page_in_both_languages(server: VoilaServer, visit: Any) -> None:
    server.wait_for_kernels(0, 30)
    pages = [visit(800, 600).page for _ in range(2)]
    for page in pages:
        open_page(page, server)
    status, text = server.get()
    assert status == 503
    assert "The lab is full" in text and "实验室现在已满" in text
    assert "cdn" not in text and "Traceback" not in text
    assert len(server.kernels()) == 2, "a refused visitor cost a kernel"
    late = visit(800, 600)
    late.page.goto(server.url)
    assert late.page.locator("h1").first.inner_text() == "The lab is full just now"
    assert late.strangers == []
    for page in pages:
        leave(page)
    server.wait_for_kernels(0, 15)
    assert served_within(server, 10.0), "the places of those who left were not given back"


def test_strangers_without_the_token_see_nothing(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "page.ipynb", "from synthetic_source import page", "page()")
    server = VoilaServer(notebook, tmp_path / "voila.log", LABKIT_VOILA_TOKEN="a-secret")
    try:
        status, text = server.get()
        assert "labkit.show" not in text and "a-secret" not in text
        assert status in (200, 403) and "token" in text.lower(), "not the login page"
        assert server.kernels() == [], "a stranger cost a kernel"
        assert "loading" in server.get("?token=a-secret")[1]
    finally:
        server.stop()
