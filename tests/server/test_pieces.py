"""Small parts by themselves: stop strings, sizes, the event queue, the settings of a switch."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from labkit.server.events import EventHub, Subscriber
from labkit.server.sizes import parse_bytes
from labkit.server.stops import StopFinder


def cut(text: str, stops: list[str]) -> str:
    """What must be shown: the text before the earliest stop."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def test_stops_are_found_wherever_the_pieces_break() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        text = "".join(draw.choices("ab", k=draw.randint(0, 14)))
        stops = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        finder, shown, rest = StopFinder(stops), "", text
        while rest and finder.found is None:
            size = draw.randint(1, 3)
            shown += finder.push(rest[:size])
            rest = rest[size:]
            assert not any(stop in shown for stop in stops)
        if finder.found is None:
            shown += finder.flush()
            assert shown == text
        else:
            assert finder.found in stops and shown == cut(text[: len(text) - len(rest)], stops)


def test_ordinary_text_is_not_held_back() -> None:
    finder = StopFinder(["###"])
    assert finder.push("hello") == "hello" and finder.push(" #") == " " and finder.push("1") == "#1"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("256MiB", 256 << 20), ("1.5GB", 1_500_000_000), (" 2 gib ", 2 << 30), ("1KB", 1000)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1", "1,5GB", "1e3"])
def test_what_is_no_size_says_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="256MiB"):
        parse_bytes(text)


# ---- events


def drained(subscriber: Subscriber) -> list[dict[str, object]]:
    lines = asyncio.run(subscriber.lines(0.01))
    return [json.loads(line) for line in lines.splitlines() if line]


def test_a_slow_watcher_loses_the_oldest_of_the_frequent_kinds_and_is_told() -> None:
    subscriber = Subscriber(capacity=4)
    hub = EventHub()
    hub.subscribe(subscriber)
    hub.publish({"event": "state", "n": 0})
    for n in range(1, 8):
        hub.publish({"event": "engine", "n": n})
    dropped, *rest = drained(subscriber)
    assert dropped == {"event": "dropped", "engine": 4}
    assert [event["n"] for event in rest] == [0, 5, 6, 7]


def test_when_nothing_else_is_left_the_oldest_goes() -> None:
    subscriber = Subscriber(capacity=2)
    for n in range(3):
        subscriber.put("state", b'{"n":%d}\n' % n)
    dropped, first, second = drained(subscriber)
    assert dropped["state"] == 1 and (first["n"], second["n"]) == (1, 2)


def test_silence_is_an_empty_line_and_wakes_at_once_on_an_event() -> None:
    async def play() -> tuple[bytes, bytes]:
        subscriber = Subscriber()
        quiet = await subscriber.lines(0.01)
        asyncio.get_running_loop().call_later(0.01, subscriber.put, "state", b"x\n")
        return quiet, await subscriber.lines(5)

    assert asyncio.run(play()) == (b"\n", b"x\n")


def test_an_event_that_nobody_wants_is_not_encoded() -> None:
    hub = EventHub()
    hub.subscribe(Subscriber(["request"]))
    hub.publish({"event": "engine", "what": object()})  # would not encode
    with pytest.raises(TypeError):
        hub.publish({"event": "request", "run_id": "", "what": object()})
