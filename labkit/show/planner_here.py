"""What a small run on this machine is expected to show, where `labkit calibrate` has measured its steps.

Steps are known to a mean relative error e. Near what the machine can carry a little of it makes a long queue, so its
bounds are no ± e of a percentile: they are simulated, with every step faster and slower by e.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from labkit.layout import Layout
from labkit.load.schedule import make_schedule
from labkit.load.workload import load_workload
from labkit.plan.calibration import load_calibration
from labkit.plan.fitted_cost import FittedCost
from labkit.plan.shared_cores import simulate_measured
from labkit.plan.sim.request import SimRequest
from labkit.plan.work import EngineSettings

NUM_REQUESTS = 400
"""Twenty beyond the p95."""
KV_BLOCKS = 4096
"""More than the labs' workloads hold at their own rates, so that nobody waits for room."""


MOST_ERROR = 0.9
"""Steps cannot be faster by all of their time."""


@dataclass(frozen=True)
class Expected:
    figures: dict[str, tuple[float, float, float]]
    """Milliseconds of ttft_p50, ttft_p95, tpot_p50, tpot_p95: with faster steps, as measured, with slower ones."""
    calibrated_at: str
    notes: tuple[str, ...]


def expect(model: str, layout: str, workload: str, rate: float) -> Expected | None:
    """None where this machine is not calibrated for the model and the layout."""
    try:
        calibration = load_calibration(model)
        cost = calibration.cost(layout)
    except ValueError:
        return None
    schedule = make_schedule(load_workload(workload), rate=rate, num_requests=NUM_REQUESTS)
    asked = [SimRequest(one.at_s, len(one.prompt_ids), one.max_tokens) for one in schedule.requests]
    error = min(cost.error, MOST_ERROR)
    runs = [_percentiles(asked, layout, cost, slower) for slower in (1 - error, 1.0, 1 + error)]
    figures = {name: (runs[0][name], runs[1][name], runs[2][name]) for name in runs[0]}
    return Expected(figures, str(calibration.about.get("measured_at", "")), calibration.notes)


def _percentiles(asked: list[SimRequest], layout: str, cost: FittedCost, slower: float) -> dict[str, float]:
    """With every step slower by that factor: the same machine on a clock that is slow by it, asked more often by it."""
    often = [replace(one, arrival_s=one.arrival_s / slower) for one in asked]
    found = simulate_measured(often, Layout.parse(layout), cost, KV_BLOCKS, EngineSettings(policy="labkit"))
    several = np.array([one.output_tokens > 1 for one in asked])
    return {
        f"{metric}_{name}": slower * 1e3 * float(np.percentile(values, q))
        for metric, values in (("ttft", found.ttft_s), ("tpot", found.tpot_s[several]))
        for name, q in (("p50", 50), ("p95", 95))
    }
