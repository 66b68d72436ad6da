"""From an explanation and a steady state to what the page draws of them (`frame_run`)."""

from __future__ import annotations

from typing import Any

from labkit.show import frame_run as r

PARTS = {"prefill_compute": "compute"}
"""Where the page's id of a part differs from the measurement's."""


def why_of(explanation: dict[str, Any] | None) -> r.Why | None:
    """From `Explanation.to_dict`."""
    if explanation is None:
        return None
    falls = [
        r.Waterfall(w["figure"].lower(), w["percentile"], _page_ids(w["parts_ms"]), w["total_ms"], w["n"], w["few"])
        for w in explanation["waterfalls"]
    ]
    told = explanation["verdicts"]
    return r.Why(falls, [r.Reason(v["figure"].lower(), v["percentile"], v["kind"], v["sentence"]) for v in told])


def _page_ids(parts: dict[str, float]) -> dict[str, float]:
    return {PARTS.get(name, name): value for name, value in parts.items()}


def steady_of(found: dict[str, Any] | None) -> r.Steady | None:
    return r.Steady(found["steady"], found.get("age_s"), found["why"], found["sentence"]) if found else None
