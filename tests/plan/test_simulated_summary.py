"""A simulated run is diagnosed by the same door as a measured one."""

from __future__ import annotations

import numpy as np

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.cost import step_cost
from labkit.plan.diagnose import diagnose
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.simulate import SimRequest, simulate
from labkit.plan.simulated_summary import simulated_summary
from labkit.plan.work import EngineSettings

ONE, WISH = Layout(), PlanObjective(ttft_ms=500, tpot_ms=200)


def told(rate: float, kv_blocks: int, prompt: int = 512, **settings):
    chosen = EngineSettings(**settings)
    cost = step_cost(ONE, load_spec("llama-3.1-8b"), load_hardware("1xh100"), chosen)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / rate, 400))
    result = simulate([SimRequest(float(at), prompt, 128) for at in arrivals], ONE, cost, kv_blocks, chosen)
    return diagnose(simulated_summary(result, ONE, chosen), WISH)


def test_a_simulated_run_says_what_its_queue_waits_for():
    assert told(5.0, 20_000).resource == "none"
    kv = told(20.0, 200)
    assert (kv.metric, kv.resource, kv.load, kv.source) == ("ttft", "KV memory", "high", "simulated")
    seats = told(20.0, 20_000, max_num_seqs=2)
    assert (seats.metric, seats.resource) == ("ttft", "queue")
    assert seats.finding("KV memory").state == "enough"


def test_a_prompt_that_is_slow_by_itself_is_not_called_a_queue():
    found = told(0.01, 20_000, prompt=60_000)
    assert (found.metric, found.resource, found.load) == ("ttft", "compute", "low")
