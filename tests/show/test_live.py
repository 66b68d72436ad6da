"""What a visitor sends: checked, carried out in order, and of what supersedes itself only the newest."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from labkit.show.frame import LayoutsFrame, Objective, to_message
from labkit.show.live import LayoutsPage, Wanted
from labkit.show.page import Wishes

WISH = {"layout": "tp2", "workload": "chat", "rate": 4, "router": "least-work", "admission": "labkit"}


class Recorder:
    """A source that remembers what it was told; `refuse` makes it raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.refuse = ""
        self.table: dict[str, Any] = {}
        self.list: list[dict[str, Any]] = []

    def _note(self, name: str, what: Any = None) -> None:
        self.calls.append((name, what))
        if self.refuse:
            raise RuntimeError(self.refuse)

    def open(self) -> None:
        self._note("open")

    def frame(self) -> LayoutsFrame:
        return LayoutsFrame()

    def choices(self) -> dict[str, Any]:
        return self.table

    def stored(self) -> list[dict[str, Any]]:
        return self.list

    def look_up(self) -> None:
        self._note("look up")
        self.list = [{"run_id": "one"}]

    def pin(self, run_id: str) -> None:
        self._note("pin", run_id)

    def pin_current(self) -> None:
        self._note("pin", "current")

    def unpin(self) -> None:
        self._note("unpin")

    def start(self, wanted: Wanted) -> None:
        self._note("start", wanted.layout)

    def change(self, wanted: Wanted) -> None:
        self._note("change", wanted.rate)

    def set_objective(self, objective: Objective) -> None:
        self._note("objective", objective.ttft_ms)

    def stop(self) -> None:
        self._note("stop")

    def close(self) -> None:
        self.calls.append(("close", None))

    def wait_for(self, *calls: tuple[str, Any]) -> None:
        deadline = time.monotonic() + 5
        while not set(calls) <= set(self.calls):
            assert time.monotonic() < deadline, self.calls
            time.sleep(0.005)


@pytest.fixture
def page() -> Any:
    made = LayoutsPage(Recorder())
    yield made
    made.close()


def tell(page: LayoutsPage, **content: Any) -> None:
    page._receive(page, content, [])


def test_wishes_reach_the_source_in_order(page: LayoutsPage) -> None:
    source = page._source
    tell(page, type="start", **WISH)
    source.wait_for(("start", "tp2"))
    tell(page, type="objective", ttft_ms=250, tpot_ms=10)
    source.wait_for(("objective", 250))
    tell(page, type="stop")
    source.wait_for(("stop", None))
    assert [name for name, _ in source.calls] == ["start", "objective", "stop"]


def test_a_refusal_is_told_and_the_next_wish_clears_it(page: LayoutsPage) -> None:
    page._source.refuse = "Bob holds the ranks."
    tell(page, type="start", **WISH)
    page._source.wait_for(("start", "tp2"))
    deadline = time.monotonic() + 5
    while not page._make_frame()["notice"] and time.monotonic() < deadline:
        time.sleep(0.005)
    assert page._make_frame()["notice"] == "Bob holds the ranks."
    page._source.refuse = ""
    tell(page, type="stop")
    page._source.wait_for(("stop", None))
    assert page._make_frame()["notice"] == ""


@pytest.mark.parametrize(
    "content",
    [
        {"type": "fly"},
        {"type": "start", "layout": "tp2"},
        {"type": "ack", "seq": "one"},
        {"type": "change", **WISH, "rate": "x"},
    ],
)
def test_nonsense_is_answered_with_a_sentence(page: LayoutsPage, content: dict[str, Any]) -> None:
    tell(page, **content)
    assert "does not understand" in page._make_frame()["notice"]
    assert page._source.calls == []


def test_of_wishes_that_wait_only_the_newest_is_carried_out() -> None:
    begun, gate, done = threading.Event(), threading.Event(), []

    def carry_out(message: Any) -> None:
        begun.set()
        gate.wait(5)
        done.append(message)

    wishes = Wishes(carry_out, done.append)
    wishes.add(1)
    assert begun.wait(5)
    for value in ("a", 2, 3, "b"):
        wishes.add(value)
    gate.set()
    deadline = time.monotonic() + 5
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    wishes.close()
    assert done == [1, "b", 3]


def test_the_choices_travel_once_and_again_only_when_they_change(page: LayoutsPage) -> None:
    sent = []
    page.observe(lambda change: sent.append(change["new"]), "choices")
    page._make_frame()
    page._source.table = {"legal": ["tp1", "tp2"]}
    for _ in range(3):
        assert "legal" not in str(page._make_frame())
    assert sent == [{"legal": ["tp1", "tp2"]}]
    page._source.table = {"legal": ["tp1"]}
    page._make_frame()
    assert sent[1:] == [{"legal": ["tp1"]}]


def test_stored_runs_are_listed_when_asked_for_and_pinned_by_name(page: LayoutsPage) -> None:
    page._make_frame()
    assert page.stored == []
    tell(page, type="look_up")
    page._source.wait_for(("look up", None))
    page._make_frame()
    assert page.stored == [{"run_id": "one"}]
    for content, call in (
        ({"type": "pin", "run_id": "one"}, ("pin", "one")),
        ({"type": "pin"}, ("pin", "current")),
        ({"type": "unpin"}, ("unpin", None)),
    ):
        tell(page, **content)
        page._source.wait_for(call)


def test_a_frame_is_short_and_json() -> None:
    import msgspec

    made = to_message(LayoutsFrame(objective=Objective(123.456789, 12.0)))
    assert made["objective"]["ttft_ms"] == 123.5
    assert msgspec.json.decode(msgspec.json.encode(made)) == made


@pytest.mark.parametrize("modules", ["live, labkit.show.lab_source", "fabric_page, labkit.show.fabric_source"])
def test_a_page_imports_nothing_heavy(modules: str) -> None:
    """Each visitor's kernel pays for every import."""
    code = (
        f"import sys, labkit.show.{modules}\n"
        "heavy = {'torch', 'plotly', 'pandas', 'pyarrow', 'transformers', 'rfc3987_syntax'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
