"""The last minute of telemetry, each device's measures in bins, so that a frame carries a line and not every sample."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from labkit.measure.records import TelemetryRecord
from labkit.show.fabric_frame import Device, Telemetry

SPAN_S, NUM_BINS = 60.0, 60
_KINDS = ("gpu", "rank", "host")
EVERY_S = 1.0
STALE_S = 3.0
"""A device that has not spoken for so long has gone."""


class TelemetryMeter:
    """Add events as they come. Instants are the server's; its newest sample is now.

    The picture is anew once a second: digits that changed with every sample could not be read, and need not travel.
    """

    def __init__(self) -> None:
        self._source = ""
        self._told, self._told_ns = Telemetry(), 0
        self._samples: dict[tuple[str, int], deque[TelemetryRecord]] = {}

    def add(self, source: str, samples: Sequence[TelemetryRecord]) -> None:
        self._source = source
        for sample in samples:
            kept = self._samples.setdefault((sample.kind, sample.index), deque())
            kept.append(sample)
            while kept[0].t_ns < sample.t_ns - SPAN_S * 1e9:
                kept.popleft()

    def snapshot(self) -> Telemetry:
        now_ns = max((kept[-1].t_ns for kept in self._samples.values()), default=0)
        if now_ns - self._told_ns >= EVERY_S * 1e9:
            self._told, self._told_ns = self._picture(now_ns), now_ns
        return self._told

    def _picture(self, now_ns: int) -> Telemetry:
        living = {key: kept for key, kept in self._samples.items() if kept[-1].t_ns > now_ns - STALE_S * 1e9}
        order = sorted(living, key=lambda key: (_KINDS.index(key[0]) if key[0] in _KINDS else len(_KINDS), key[1]))
        return Telemetry(self._source, SPAN_S, [_device(living[key], now_ns) for key in order])


def _device(kept: deque[TelemetryRecord], now_ns: int) -> Device:
    last = kept[-1]
    names = {name: None for sample in kept for name in sample.values}
    series = {name: _binned(kept, name, now_ns) for name in names}
    return Device(last.kind, last.index, dict(last.values), series, list(last.throttles))


def _binned(kept: deque[TelemetryRecord], name: str, now_ns: int) -> list[float | None]:
    sums, counts = [0.0] * NUM_BINS, [0] * NUM_BINS
    for sample in kept:
        value: Any = sample.values.get(name)
        age_s = (now_ns - sample.t_ns) / 1e9
        if value is not None and 0 <= age_s < SPAN_S:
            at = NUM_BINS - 1 - int(age_s / SPAN_S * NUM_BINS)
            sums[at] += value
            counts[at] += 1
    return [total / num if num else None for total, num in zip(sums, counts, strict=True)]
