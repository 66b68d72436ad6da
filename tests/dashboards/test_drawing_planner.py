"""What the page Planner looks like whatever it is told: the planner's own answers, of cases that break a drawing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import stage
from axe import audit
from planned import CASES, frame, in_english, planned, trial
from test_drawing import COLLISIONS, LANGUAGES, OVERFLOWS

from labkit.show.frame import to_message

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(lasting_visit: Any) -> Any:
    """One for all tests of a wide page: each prepares it anew."""
    return lasting_visit().page


def prepare(page: Any, name: str, theme: str = "light", made: Any = None) -> None:
    stage.open_planner(page, theme, *planned(name))
    show(page, made or frame())


def show(page: Any, made: Any, seq: int = 1) -> None:
    stage.show(page, {"type": "frame", "seq": seq, "data": to_message(made)})


def text(page: Any, panel: str) -> str:
    return page.locator(f'[data-panel="{panel}"]').inner_text()


@pytest.mark.parametrize("width", stage.WIDTHS)
def test_nothing_overflows_or_collides(visit: Any, width: int) -> None:
    visitor = visit(width)
    for name in CASES:
        prepare(visitor.page, name, made=frame(trial()))
        for language in LANGUAGES:
            visitor.page.locator(f"[data-language={language}]").click()
            found = [visitor.page.evaluate(check) for check in (OVERFLOWS, COLLISIONS)]
            assert list(itertools.chain(*found)) == [], (name, language)
    assert visitor.errors == []


@pytest.mark.parametrize(
    ("theme", "width", "name", "calibrated"), [("light", 1440, "two gpus", True), ("dark", 390, "nothing does", False)]
)
def test_axe_finds_nothing(visit: Any, theme: str, width: int, name: str, calibrated: bool) -> None:
    page = visit(width).page
    prepare(page, name, theme, frame(trial(calibrated)))
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.evaluate("Promise.all(document.getAnimations().map((each) => each.finished))")  # colours have settled
    assert audit(page) == []


def test_a_prediction_has_its_error_beside_it_and_its_badge(page: Any) -> None:
    prepare(page, "two gpus")
    _, card, _ = planned("two gpus")
    band = round(card["candidate"]["predictions"]["band_ttft"] * 100)
    assert f"± {band} %" in text(page, "answer") and "predicted, with its error band" in text(page, "answer")
    assert page.locator('[data-panel="percentiles"] .lk-whisker').count() == 6
    assert page.locator(".lk-head .lk-badge").get_attribute("data-provenance") == "predicted"


def test_the_table_has_every_layout_and_why_not(page: Any) -> None:
    prepare(page, "two gpus")
    plan, _, _ = planned("two gpus")
    panel = page.locator('[data-panel="layouts_table"]')
    panel.get_by_role("radio", name="all").check(force=True)
    assert panel.locator("tbody tr").count() == len(plan["layouts"])
    refused = next(one for one in plan["layouts"] if not one["legal"])
    row = panel.locator(f'tr[data-layout="{refused["layout"]}"]')
    assert in_english(refused["reason"]) in row.inner_text() and "cannot be cut so" in row.inner_text()
    row.get_by_role("button").click()
    sent = page.evaluate("window.sent.filter((m) => m.type === 'want')")
    assert sent[-1]["layout"] == refused["layout"] or len(sent) == 1, "asked for once the answer before has come"


def test_measured_has_another_style_than_predicted(page: Any) -> None:
    prepare(page, "two gpus", made=frame(trial()))
    style = "e => [getComputedStyle(e).strokeDasharray, getComputedStyle(e).fillOpacity]"
    kinds = (".lk-predicted", ".lk-measured")
    predicted, measured = (page.locator(f'[data-panel="trial"] {kind}').first for kind in kinds)
    assert predicted.evaluate(style)[0] != "none" and measured.evaluate(style) == ["none", "1"]
    assert "TTFT p50: predicted 180 ms (144 ms to 234 ms), measured 196 ms: +9 %" in text(page, "trial")
    assert "Calibrated 2026-03-01 10:00 (UTC). Others had 0.72 of 2 cores." in text(page, "trial")
    whisker = page.locator('[data-panel="trial"] .lk-whisker').first.bounding_box()
    bar = page.locator('[data-panel="trial"] .lk-predicted').first.bounding_box()
    assert whisker and bar and whisker["width"] == pytest.approx(0.5 * bar["width"], abs=6), "from 0.8 to 1.3 of it"
    show(page, frame(trial(calibrated=False)), 2)
    assert "labkit calibrate" in text(page, "trial") and page.locator('[data-panel="trial"] .lk-predicted').count() == 0
    assert page.locator('[data-panel="trial"] rect.lk-measured').count() == 4


def test_a_layout_that_cannot_run_here_says_why(page: Any) -> None:
    prepare(page, "two gpus", made=frame(here=False))
    button = page.locator('[data-panel="trial"] button')
    assert button.is_disabled() and "labkit serve" in text(page, "trial")
    show(page, frame(), 2)
    assert page.locator('[data-panel="trial"] button').is_enabled()
    page.locator('[data-panel="trial"] button').click()
    assert page.evaluate("window.sent.at(-1).type") == "trial"


def test_commands_of_each_engine_can_be_copied(visit: Any) -> None:
    page = visit(permissions=["clipboard-read", "clipboard-write"]).page
    prepare(page, "two gpus")
    panel = page.locator('[data-panel="deploy"]')
    assert "vllm serve llama-3.1-8b" in panel.locator("pre").first.inner_text()
    panel.get_by_role("radio", name="SGLang").check(force=True)
    assert "sglang.launch_server" in panel.locator("pre").first.inner_text()


def test_where_nothing_does_it_says_so(page: Any) -> None:
    prepare(page, "nothing does")
    assert "no layout of these GPUs does all that is asked" in text(page, "answer")
    prepare(page, "does not fit")
    assert "✕ does not fit" in text(page, "answer") and "none holds the model" in text(page, "front")


def test_in_chinese_no_sentence_is_left_in_english(page: Any) -> None:
    for name in CASES:
        prepare(page, name)
        page.locator("[data-language=zh]").click()
        for panel in ("walk", "checks", "layouts_table", "answer"):
            assert re.findall(r"[a-z]{2,}(?: [a-z]{2,}){2,}", without_commands(text(page, panel))) == [], (name, panel)
        assert page.locator(".lk [lang=en]").all_inner_texts() == ["English"], "the button, in its own language"


def without_commands(shown: str) -> str:
    return re.sub(r"labkit run [ -~]*", "", shown)


def test_what_is_older_than_the_newest_move_is_pale(page: Any) -> None:
    prepare(page, "two gpus")
    assert page.locator(".lk.lk-plan-old").count() == 0
    page.locator("input[data-input=rate]").evaluate("e => { e.value = 90; e.dispatchEvent(new Event('input')); }")
    show(page, frame(), 2)
    assert page.locator(".lk.lk-card-old.lk-plan-old").count() == 1
