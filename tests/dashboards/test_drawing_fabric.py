"""What the page Fabric looks like whatever it is given: eight GPUs, two nodes, nothing measured yet."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import stage
import synthetic_fabric
from axe import audit
from test_drawing import COLLISIONS, LANGUAGES, OVERFLOWS, OVERLAPS_WITH_MARKS

from labkit.show.frame import to_message

pytestmark = pytest.mark.browser
CASES = synthetic_fabric.cases()


def prepare(page: Any, name: str, theme: str = "light", language: str = "en") -> None:
    made, measured = CASES[name]
    stage.open_fabric(page, theme, measured)
    page.locator(f"[data-language={language}]").click()
    stage.show(page, {"type": "frame", "seq": 1, "data": to_message(made)})


@pytest.mark.parametrize("width", stage.WIDTHS)
def test_nothing_overflows_or_collides(visit: Any, width: int) -> None:
    visitor = visit(width)
    for name in CASES:
        prepare(visitor.page, name)
        for language in LANGUAGES:
            visitor.page.locator(f"[data-language={language}]").click()
            found = [visitor.page.evaluate(check) for check in (OVERFLOWS, COLLISIONS, OVERLAPS_WITH_MARKS)]
            assert list(itertools.chain(*found)) == [], (name, language)
    assert visitor.errors == []


@pytest.mark.parametrize(("theme", "width"), [pytest.param("light", 1440, marks=pytest.mark.slow), ("dark", 390)])
def test_axe_finds_nothing(visit: Any, theme: str, width: int) -> None:
    page = visit(width).page
    for name, language in (("eight GPUs", "en"), ("measuring", "zh"), ("nothing measured", "en")):
        prepare(page, name, theme, language)
        page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        page.wait_for_timeout(200)  # colours have settled
        assert audit(page) == [], (name, language)


def test_the_tables_say_what_the_pictures_show(visit: Any) -> None:
    page = visit().page
    prepare(page, "four ranks")
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    names = ("pairs", "curves", "topology", "laststeps")
    tables = {name: page.locator(f'[data-panel="{name}"] table') for name in names}
    tables["pairs"].locator("tbody tr").first.wait_for()
    first = tables["pairs"].locator("tbody tr").first.locator("th, td").all_inner_texts()
    assert first[0] == "0 – 1" and first[1] == "14.1 GB/s" and first[5] == "shared memory"
    assert tables["curves"].locator("tbody tr").count() > 8
    assert "PP {0, 2} shm" in tables["topology"].inner_text()
    assert "52 / 56" in tables["laststeps"].inner_text()


def test_a_straggler_has_a_name_and_a_held_back_gpu_a_reason(visit: Any) -> None:
    page = visit().page
    prepare(page, "eight GPUs")
    assert page.locator('[data-panel="laststeps"] text.lk-warn').all_text_contents() == ["▲ last in 52 of 56"]
    assert "GPU 3: power cap, hot (software)" in (page.locator('[data-panel="telemetry"] svg').text_content() or "")
    assert "rows may be shifted" in page.locator('[data-panel="laststeps"] .lk-legend').inner_text()


def test_the_operation_that_costs_most_is_chosen_until_the_visitor_chooses(visit: Any) -> None:
    page = visit().page
    prepare(page, "two nodes")
    chosen = page.locator('[data-panel="curves"] input:checked')
    assert chosen.get_attribute("value") == "sendrecv", "stages over the slow link cost most"
    page.locator('[data-panel="curves"] input[value="all_reduce"]').check(force=True)
    drawn = "document.querySelector('[data-panel=curves] .lk-stage svg').textContent.includes('× all-reduce of')"
    page.wait_for_function(drawn)
    made, _ = CASES["two nodes"]
    stage.show(page, {"type": "frame", "seq": 2, "data": to_message(made)})
    assert chosen.get_attribute("value") == "all_reduce"


def test_measure_and_stop_are_what_is_sent(visit: Any) -> None:
    page = visit().page
    prepare(page, "nothing measured")
    page.get_by_role("button", name="Measure").click()
    page.wait_for_function("window.sent.some((m) => m.type === 'measure')")
    prepare(page, "measuring")
    assert "7 of 16" in page.locator(".lk-progress").inner_text()
    page.get_by_role("button", name="Stop measuring").click()
    page.wait_for_function("window.sent.some((m) => m.type === 'stop')")
