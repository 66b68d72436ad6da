"""One frame at a time, only while somebody watches: checked step by step on a clock that the test turns."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from labkit.show.publisher import KEEPALIVE_S, Publisher


class Turned:
    """A publisher without its thread, its messages, and the clock."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 100.0
        self.value = 0
        self.num_made = 0
        self.sent: list[dict[str, Any]] = []
        self.publisher = Publisher(self._make, self.sent.append, clock=lambda: self.now_s, **settings)
        self.publisher._ensure_thread = lambda: None  # type: ignore[method-assign]  # the test is the thread

    def _make(self) -> dict[str, Any]:
        self.num_made += 1
        return {"value": self.value}

    def step(self, after_s: float = 0.0, value: int | None = None) -> int:
        """How many messages went out in this step."""
        self.now_s += after_s
        self.value = self.value if value is None else value
        before = len(self.sent)
        self.publisher.step()
        return len(self.sent) - before


def test_hello_brings_a_whole_frame_at_once() -> None:
    turned = Turned()
    turned.publisher.hello()
    assert turned.step() == 1
    assert turned.sent[0] == {"type": "frame", "seq": 1, "data": {"value": 0}}


def test_nothing_is_made_until_the_last_frame_was_drawn() -> None:
    turned = Turned()
    turned.publisher.hello()
    turned.step()
    assert [turned.step(0.2, value) for value in (1, 2, 3)] == [0, 0, 0]
    assert turned.num_made == 1, "frames were made that nobody could draw"
    turned.publisher.acknowledge(1)
    assert turned.step(0.2, 4) == 1
    assert turned.sent[-1]["data"] == {"value": 4}, "the newest, not the oldest"


def test_at_most_so_many_a_second() -> None:
    turned = Turned(rate_hz=8)
    turned.publisher.hello()
    sent = 0
    for i in range(100):  # a browser that acknowledges at once, for one second
        sent += turned.step(0.01, i)
        turned.publisher.acknowledge(turned.publisher.num_sent)
    assert 7 <= sent <= 9


def test_an_unchanged_frame_is_only_a_heartbeat() -> None:
    turned = Turned()
    turned.publisher.hello()
    turned.step()
    turned.publisher.acknowledge(1)
    assert turned.step(0.5) == 0
    assert turned.step(KEEPALIVE_S) == 1
    assert turned.sent[-1]["data"] is None


def test_a_lost_frame_is_followed_by_a_newer_one() -> None:
    turned = Turned(resend_after_s=2.0)
    turned.publisher.hello()
    turned.step()
    assert turned.step(1.9, 1) == 0
    assert turned.step(0.2, 2) == 1
    assert turned.sent[-1]["data"] == {"value": 2}


def test_a_hidden_tab_gets_one_frame_a_second() -> None:
    turned = Turned()
    turned.publisher.hello()
    turned.step()
    turned.publisher.acknowledge(1, hidden=True)
    assert turned.step(0.5, 1) == 0
    assert turned.step(0.6, 2) == 1


def test_a_second_hello_gets_everything_again() -> None:
    turned = Turned()
    turned.publisher.hello()
    turned.step()
    turned.publisher.hello()  # the page was reloaded; it never drew frame 1
    assert turned.step() == 1
    assert turned.sent[-1]["data"] == {"value": 0}


def test_an_acknowledgement_of_the_future_counts_for_nothing() -> None:
    turned = Turned()
    turned.publisher.hello()
    turned.step()
    turned.publisher.acknowledge(10**9)
    turned.step(0.2, 1)
    assert turned.step(0.2, 2) == 0, "frame 2 was not acknowledged"


@pytest.fixture
def lively() -> Any:
    made: list[Publisher] = []

    def make(**settings: Any) -> tuple[Publisher, list[dict[str, Any]], threading.Event]:
        sent: list[dict[str, Any]] = []
        gone = threading.Event()
        publisher = Publisher(lambda: {"t": time.monotonic()}, sent.append, on_silence=gone.set, **settings)
        made.append(publisher)
        return publisher, sent, gone

    yield make
    for publisher in made:
        publisher.close()


def test_silence_before_hello_and_after_the_browser_has_gone(lively: Any) -> None:
    publisher, sent, gone = lively(silent_after_s=0.3)
    time.sleep(0.1)
    assert sent == [] and publisher._thread is None, "something ran for nobody"
    publisher.hello()
    assert gone.wait(5), "the dead-man switch did not act"
    assert not publisher.is_watched
    num_sent = len(sent)
    time.sleep(0.3)
    assert len(sent) == num_sent
    assert publisher._thread is None, "a thread is left, so the kernel would never be idle"


def test_hello_after_silence_starts_again(lively: Any) -> None:
    publisher, sent, gone = lively(silent_after_s=0.2)
    publisher.hello()
    assert gone.wait(5)
    num_sent = len(sent)
    publisher.hello()
    deadline = time.monotonic() + 5
    while len(sent) == num_sent and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(sent) > num_sent
