"""The page Fabric's kernel side: wishes, what travels apart from the frames, and a minute of telemetry in bins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from labkit.measure.records import TelemetryRecord
from labkit.show.fabric_frame import FabricFrame
from labkit.show.fabric_page import FabricPage
from labkit.show.fabric_source import FabricSource
from labkit.show.telemetry_meter import NUM_BINS, TelemetryMeter


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.table: dict[str, Any] = {}
        self.refuse = ""

    def frame(self) -> FabricFrame:
        return FabricFrame()

    def measured(self) -> dict[str, Any]:
        return self.table

    def __getattr__(self, name: str) -> Any:
        def call() -> None:
            self.calls.append(name)
            if self.refuse and name != "close":
                raise RuntimeError(self.refuse)

        return call


@pytest.fixture
def page() -> Iterator[FabricPage]:
    made = FabricPage(Recorder())
    yield made
    made.close()


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_measure_and_stop_reach_the_source_and_a_refusal_the_visitor(page: FabricPage) -> None:
    source = page._source
    page._receive(page, {"type": "measure"}, [])
    wait_until(lambda: source.calls == ["measure"])
    source.refuse = "Ada holds the ranks."
    page._receive(page, {"type": "stop"}, [])
    wait_until(lambda: page._make_frame()["notice"] == "Ada holds the ranks.")
    assert source.calls == ["measure", "stop"]
    page._receive(page, {"type": "start"}, [])
    assert "does not understand" in page._make_frame()["notice"]


def test_what_was_measured_travels_when_it_changes(page: FabricPage) -> None:
    sent: list[Any] = []
    page.observe(lambda change: sent.append(change["new"]), "measured")
    page._make_frame()
    page._source.table = {"measured": {"pairs": [1]}}
    for _ in range(3):
        assert "pairs" not in str(page._make_frame())
    assert sent == [{"measured": {"pairs": [1]}}]


def test_without_a_server_the_frame_says_so_and_a_wish_is_refused() -> None:
    source = FabricSource("http://127.0.0.1:1", "none")
    source.open()
    wait_until(lambda: source.frame().link == "absent")
    with pytest.raises(RuntimeError, match="no lab server to measure"):
        source.measure()
    source.close()
    assert source.frame().lab is None and source.measured() == {}


def sample(t_s: float, index: int, **values: float) -> TelemetryRecord:
    return TelemetryRecord(round(t_s * 1e9), "psutil", "rank", index, values)


def test_a_minute_is_binned_by_age_and_gaps_stay_gaps() -> None:
    meter = TelemetryMeter()
    meter.add("psutil", [sample(100.0, 0, cpu_cores=0.5), sample(100.2, 0, cpu_cores=0.7)])
    meter.add("psutil", [sample(110.0, 0, cpu_cores=1.0), sample(110.0, 1, memory_used_bytes=5.0)])
    first, second = meter.snapshot().devices
    assert first.now == {"cpu_cores": 1.0} and second.series.keys() == {"memory_used_bytes"}
    line = first.series["cpu_cores"]
    assert len(line) == NUM_BINS and line[-1] == 1.0 and line.count(None) == NUM_BINS - 3
    assert [value for value in line[-11:-8] if value is not None] == pytest.approx([0.5, 0.7])


def test_a_device_that_has_gone_silent_is_not_shown_and_old_samples_are_let_go() -> None:
    meter = TelemetryMeter()
    meter.add("psutil", [sample(0.0, 0, cpu_cores=0.5), sample(0.0, 1, cpu_cores=0.5)])
    meter.add("psutil", [sample(70.0, 1, cpu_cores=0.6)])
    (only,) = meter.snapshot().devices
    assert only.index == 1 and [value for value in only.series["cpu_cores"] if value is not None] == [0.6]
    assert len(meter._samples["rank", 1]) == 1


def test_the_picture_is_anew_once_a_second() -> None:
    meter = TelemetryMeter()
    meter.add("psutil", [sample(10.0, 0, cpu_cores=0.5)])
    first = meter.snapshot()
    meter.add("psutil", [sample(10.4, 0, cpu_cores=0.9)])
    assert meter.snapshot() is first
    meter.add("psutil", [sample(11.0, 0, cpu_cores=0.9)])
    assert meter.snapshot().devices[0].now == {"cpu_cores": 0.9}
