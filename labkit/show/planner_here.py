"""What a small run on this machine is expected to show, where `labkit calibrate` has measured its steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.plan.calibration import load_calibration
from labkit.plan.shared_cores import simulate_measured
from labkit.plan.sim.request import SimRequest
from labkit.plan.work import EngineSettings

NUM_REQUESTS = 400
"""Twenty beyond the p95."""
KV_BLOCKS = 4096
"""More than the labs' workloads hold at their own rates, so that nobody waits for room."""


@dataclass(frozen=True)
class Expected:
    figures: dict[str, float]
    """Milliseconds: ttft_p50, ttft_p95, tpot_p50, tpot_p95."""
    band: float
    """Mean absolute relative error of the steps that the calibration was fitted on."""


def expect(model: str, layout: str, workload: str, rate: float) -> Expected | None:
    """None where this machine is not calibrated for the model and the layout."""
    try:
        cost = load_calibration(model).cost(layout)
    except ValueError:
        return None
    schedule = make_schedule(load_workload(workload), rate=rate, num_requests=NUM_REQUESTS)
    asked = [SimRequest(one.at_s, len(one.prompt_ids), one.max_tokens) for one in schedule.requests]
    found = simulate_measured(asked, Layout.parse(layout), cost, KV_BLOCKS, EngineSettings(policy="labkit"))
    several = np.array([one.output_tokens > 1 for one in asked])
    figures = {
        f"{metric}_{name}": 1e3 * float(np.percentile(values, q))
        for metric, values in (("ttft", found.ttft_s), ("tpot", found.tpot_s[several]))
        for name, q in (("p50", 50), ("p95", 95))
    }
    return Expected(figures, cost.error)
