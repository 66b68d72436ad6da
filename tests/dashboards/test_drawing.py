"""What the page looks like whatever it is given: nothing overflows, collides or is told by colour alone.

The frames are made up (synthetic.py), because the cases that break a drawing have to be chosen.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import stage
import synthetic
from axe import audit

from labkit.show.frame import Failure, LayoutsFrame
from labkit.show.frame_run import Steady

pytestmark = pytest.mark.browser

LANGUAGES = ("en", "zh")

COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll(".lk-panel svg")) {
    const texts = [...svg.querySelectorAll("text")].map((e) => [e.textContent, e.getBoundingClientRect()]);
    texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 1 && down > 3) found.push(`${svg.closest("[data-panel]").dataset.panel}: "${a}" and "${b}"`);
    }));
  }
  return found;
}"""

OVERLAPS_WITH_MARKS = """() => {
  const found = [];
  const marks = ".lk-bar, .lk-diamond-mark, .lk-total, [class*=lk-part-], [class*=lk-share-], [class*=lk-mem-], "
    + ".lk-expert, .lk-gantt, svg [class*=lk-axis-], .lk-running, .lk-waiting, .lk-objective";
  for (const svg of document.querySelectorAll(".lk-panel svg")) {
    const texts = [...svg.querySelectorAll("text")];
    for (const mark of svg.querySelectorAll(marks)) {
      if (mark.closest("text") || mark.tagName === "text") continue;
      const q = mark.getBoundingClientRect();
      for (const text of texts) {
        const p = text.getBoundingClientRect();
        const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        const panel = svg.closest("[data-panel]").dataset.panel;
        if (across > 1 && down > 4) found.push(`${panel}: "${text.textContent}" on ${mark.getAttribute("class")}`);
      }
    }
  }
  return found;
}"""

OVERFLOWS = """() => {
  const found = [];
  const wide = document.documentElement.scrollWidth - innerWidth;
  if (wide > 0) found.push(`the page is ${wide} px too wide`);
  for (const svg of document.querySelectorAll(".lk-panel svg")) {
    const box = svg.getBoundingClientRect();
    for (const text of svg.querySelectorAll("text")) {
      const p = text.getBoundingClientRect();
      if (p.left < box.left - 2 || p.right > box.right + 2 || p.bottom > box.bottom + 3 || p.top < box.top - 3)
        found.push(`${svg.closest("[data-panel]").dataset.panel}: "${text.textContent}" leaves its chart`);
    }
  }
  const boxes = ".lk button, .lk-segments, .lk-segment, .lk-axis-name, .lk select, .lk-badge, .lk-banner, .lk h2, "
    + ".lk-remark, .lk legend";
  for (const element of document.querySelectorAll(boxes)) {
    const p = element.getBoundingClientRect();
    const name = element.textContent.slice(0, 40);
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth > 0) found.push(`"${name}" is cut`);
    if (p.right > innerWidth + 1) found.push(`"${name}" sticks out`);
  }
  return found;
}"""


def frames() -> dict[str, LayoutsFrame]:
    """Frames that could break a drawing."""
    tiny = synthetic.frame(n=3, p50=0.4)
    huge = synthetic.frame(dp=2, tp=2, n=5000, p50=48_000.0, num_cores=2)
    crowded = synthetic.frame(dp=2, tp=4, n=240)
    crowded.run.ttft_ms = synthetic.percentiles(199.0, 0.004, 240)  # everything lies on the objective
    failed = synthetic.frame()
    failed.lab.state, failed.lab.restarts_left = "restarting", 2
    failed.lab.failure = Failure(1, "killed by signal 9 (SIGKILL)", "killed", "Traceback (most recent call last):\n  …")
    stages = synthetic.frame(dp=2, tp=2)
    stages.lab.layout, stages.gantt = "dp2xpp4", synthetic.gantt(4, 2, 15)
    stages.crossings = synthetic.crossings_that_crowd()
    many = synthetic.frame()
    many.experts, many.beside = synthetic.experts(128, 4), synthetic.beside()
    many.steady = Steady(False, None, "queue", "Never steady: the queue grows by 1.2 requests/s.")
    return {
        "every axis": synthetic.every_axis(), "stages": stages, "many experts, a stored run": many,
        "usual": synthetic.frame(), "tiny": tiny, "huge": huge, "crowded": crowded, "failed": failed,
        "no server": LayoutsFrame(link="absent"), "ranks starting": LayoutsFrame(link="connected"),
    }  # fmt: skip


def prepare(page: Any, theme: str, language: str, made: LayoutsFrame, pinned: bool = True) -> None:
    stage.open_stage(page, theme)
    page.locator(f"[data-language={language}]").click()
    if pinned:
        stage.show(page, synthetic.message(synthetic.frame(tp=1, n=1200, p50=161.0), 1))
        page.locator(".lk-buttons button").nth(2).click()
    stage.show(page, synthetic.message(made, 2))


@pytest.mark.parametrize("width", stage.WIDTHS)
def test_nothing_overflows_or_collides(visit: Any, width: int) -> None:
    visitor = visit(width)
    page = visitor.page
    prepare(page, "light", "en", synthetic.frame())
    for seq, (name, made) in enumerate(frames().items(), 3):
        stage.show(page, synthetic.message(made, seq))
        stage.show(page, synthetic.message(made, seq + 100))  # what crosses counts from a layout's second frame on
        for language in LANGUAGES:  # a theme moves nothing
            page.locator(f"[data-language={language}]").click()
            found = [page.evaluate(check) for check in (OVERFLOWS, COLLISIONS, OVERLAPS_WITH_MARKS)]
            assert list(itertools.chain(*found)) == [], (name, language)
    assert visitor.errors == []


@pytest.mark.parametrize(("theme", "width"), [("light", 1440), pytest.param("dark", 390, marks=pytest.mark.slow)])
def test_axe_finds_nothing(visit: Any, theme: str, width: int) -> None:
    page = visit(width).page
    for language, name in (("en", "many experts, a stored run"), ("zh", "failed"), ("en", "no server")):
        prepare(page, theme, language, frames()[name], pinned=False)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        page.wait_for_timeout(200)  # colours have settled
        assert audit(page) == [], (language, name)


def test_a_table_says_what_the_chart_shows(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", synthetic.frame())
    panel = page.locator('[data-panel="ttft"]')
    panel.get_by_text("Show as table").click()
    panel.locator("tbody tr").first.wait_for()  # drawn with the next frame
    rows = [row.all_inner_texts() for row in (r.locator("th, td") for r in panel.locator("tbody tr").all())]
    assert rows[0] == ["p50", "118 ms", "✓", "161 ms"]
    assert rows[3][:3] == ["p99", "272 ms", "✕"]
    assert rows[-1] == ["n", "240", "", "1200"]


def test_few_samples_are_pale_and_say_how_many_are_needed(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", synthetic.frame(n=240), pinned=False)
    bars = page.locator('[data-panel="ttft"] .lk-bar')
    pale = [("lk-few" in (bars.nth(i).get_attribute("class") or "")) for i in range(4)]
    assert pale == [False, False, False, True]
    assert "n = 1000" in page.locator('[data-panel="ttft"] svg title').first.text_content()


def test_the_objective_moves_by_keyboard_and_by_hand(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", synthetic.frame(), pinned=False)
    handle = page.get_by_label("Objective for TTFT in milliseconds")
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("window.sent.some((m) => m.type === 'objective' && m.ttft_ms === 197)")
    assert page.locator('[data-panel="ttft"] .lk-objective-text').text_content() == "objective 197 ms"
    box = page.locator('[data-panel="ttft"] .lk-stage > svg').bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 60, steps=4)
    page.mouse.up()
    page.wait_for_function("window.sent.filter((m) => m.type === 'objective').at(-1).ttft_ms < 120")


def test_a_failed_rank_is_named_and_its_recovery_told(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", frames()["failed"], pinned=False)
    banner = page.locator('[data-banner="rank"]')
    assert "Rank 1 has failed" in banner.inner_text() and "SIGKILL" in banner.inner_text()
    assert "2 restarts left" in banner.inner_text()
    assert page.get_by_role("alert").count() == 1
    stage.show(page, synthetic.message(synthetic.frame(), 3))
    assert "Recovered from the failure of rank 1" in page.locator('[data-banner="recovered"]').inner_text()


def test_a_silent_kernel_shows_and_is_asked_again(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", synthetic.frame(), pinned=False)
    page.wait_for_selector('[data-banner="stale"]', timeout=8000)
    page.wait_for_function("window.sent.filter((m) => m.type === 'hello').length >= 2")
    stage.show(page, synthetic.message(synthetic.frame(), 3))
    page.wait_for_selector('[data-banner="stale"]', state="detached", timeout=3000)


def test_pausing_freezes_the_figures_but_not_the_acknowledgements(visit: Any) -> None:
    page = visit().page
    prepare(page, "light", "en", synthetic.frame(n=240), pinned=False)
    page.get_by_role("button", name="Pause figures").click()
    stage.show(page, synthetic.message(synthetic.frame(n=999), 3))
    note = page.locator('[data-panel="ttft"] .lk-note')
    assert note.inner_text() == "n = 240"
    page.get_by_role("button", name="Resume figures").click()
    page.wait_for_function("document.querySelector('[data-panel=ttft] .lk-note').textContent === 'n = 999'")


def test_motion_is_asked_for_and_print_hides_the_buttons(visit: Any) -> None:
    page = visit(reduced_motion="reduce").page
    prepare(page, "light", "en", frames()["failed"], pinned=False)
    assert page.evaluate("getComputedStyle(document.querySelector('.lk-state'), '::before').animationName") == "none"
    page.emulate_media(media="print")
    assert not page.locator(".lk-buttons").is_visible()
    assert page.locator('[data-panel="ttft"]').is_visible()
