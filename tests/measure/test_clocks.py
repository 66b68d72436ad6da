"""What is said of several hosts' clocks, in words and in the trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from labkit.measure.clocks import clock_sentences, clocks_of, uncertainty_ms
from labkit.measure.explain import explain
from labkit.measure.trace import chrome_trace
from tests.measure.test_chrome_trace import ROWS, step
from tests.measure.test_explain import made_run
from tests.measure.trace_form import validate


def clock(host: str, ranks: list[int], uncertainty_ns: int | None) -> dict[str, Any]:
    return {"host": host, "ranks": ranks, "offset_ns": -3_600 * 10**9, "uncertainty_ns": uncertainty_ns,
            "best_round_trip_ns": 180_000, "num_round_trips": 42}  # fmt: skip


FAR, FARTHER = clock("far", [1], 90_000), clock("farther", [2, 3], 300_000)


def test_between_two_hosts_both_are_unsure() -> None:
    assert uncertainty_ms([]) == 0.0 and uncertainty_ms([FAR]) == pytest.approx(0.09)
    assert uncertainty_ms([FAR, FARTHER, FAR]) == pytest.approx(0.39), "the two that know least"
    assert uncertainty_ms([FAR, clock("mute", [4], None)]) is None and uncertainty_ms(None) is None


def test_sentences() -> None:
    assert clock_sentences(None) == [] and clocks_of({"environment": None}) is None
    assert clock_sentences([]) == ["One clock: all ranks' instants were read on one host."]
    first, second = clock_sentences([FAR, FARTHER])
    assert "far (ranks 1): -3600000.000 ms was added, ± 0.090 ms (42 round trips, the quickest 0.180 ms)." in first
    assert second.endswith("shorter than 0.390 ms means nothing.")
    assert "no round trip" in clock_sentences([clock("mute", [4], None)])[0]


def test_an_explanation_tells_of_clocks() -> None:
    """The words are made of what it holds, so it is given them."""
    found = explain(made_run())
    assert found.clocks is None and "lock" not in repr(found)
    one, two = (dataclasses.replace(found, clocks=clocks) for clocks in ([], [FAR]))
    assert "One clock" in repr(one) and "One clock" in one._repr_html_()
    assert "± 0.090 ms" in repr(two) and two.to_dict()["clocks"] == [FAR]


def test_a_trace_tells_of_clocks_beside_the_ranks_that_they_are_of() -> None:
    trace = chrome_trace([step()], ROWS, clocks=[FAR])
    named = [event["args"]["name"] for event in validate(trace) if event["name"] == "thread_name"]
    assert named == ["rank 0", "rank 1 (far, ± 90 µs)"]
    assert trace["otherData"]["clocks"] == [FAR] and "± 0.090 ms" in trace["otherData"]["clock"]
    assert "One clock" in chrome_trace([step()], ROWS, clocks=[])["otherData"]["clock"]
