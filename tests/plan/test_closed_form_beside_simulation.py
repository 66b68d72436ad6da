"""The closed form that a slider asks beside the engine's own scheduler on a virtual clock, over layouts and loads.

Both know the same cost of a step, so what is compared is how requests get in each other's way: within TPOT and TTFT
below of the mean, and of TTFT's p95, far from the load at which the queue grows without end.
"""

from __future__ import annotations

import numpy as np
import pytest

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.candidates import evaluate
from labkit.plan.case import Case
from labkit.plan.demand import read_demand
from labkit.plan.experiment import num_requests, served
from labkit.plan.hardware import load_hardware
from labkit.plan.objective import PlanObjective
from labkit.plan.predict import predict_closed, predict_open
from labkit.plan.sim.asked import Asked
from labkit.plan.simulate import SimRequest
from labkit.plan.verification import simulated, steady_percentiles, verified
from labkit.plan.work import EngineSettings

TPOT, TTFT, TTFT_P95 = 0.10, 0.25, 0.40
VARY = 0.2
"""Lengths are spread so much around their mean, evenly."""
SETTINGS = EngineSettings()
CLOSED = [
    ("tp4", 1000, 1000, 64), ("tp4", 2000, 200, 16), ("tp8", 8000, 500, 16), ("dp2xtp4", 2000, 200, 32),
    ("pp2xtp2", 1000, 1000, 64), ("pp2xtp2", 2000, 200, 16), ("pp2xtp4", 8000, 500, 16), ("tp2xpp4", 2000, 200, 16),
    ("tp2xpp4", 8000, 500, 16), ("pp4", 2000, 200, 64),
]  # fmt: skip
OPEN = [
    ("tp4", 2000, 200, 1.0), ("tp8", 8000, 500, 1.0), ("dp2xtp4", 1000, 1000, 2.0), ("pp2xtp4", 2000, 200, 1.0),
    ("tp2xpp4", 2000, 200, 1.0), ("pp4", 2000, 200, 0.5),
]  # fmt: skip


def figures(layout: str, prompt: int, output: int, *, rate: float = 0.0, concurrency: int = 0):
    """(closed form, simulated) as {ttft_ms, tpot_ms: {mean, p95 …}}."""
    spec, hardware, grid = load_spec("llama-3.1-70b"), load_hardware("8xh100"), Layout.parse(layout)
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    if rate:
        told = predict_open(grid, spec, hardware, SETTINGS, rate=rate, **lengths)
    else:
        told = predict_closed(grid, spec, hardware, SETTINGS, concurrency=concurrency, **lengths)
    rng, number = np.random.default_rng(1), num_requests(grid, concurrency)
    arrivals = np.cumsum(rng.exponential(1 / rate, number)) if rate else np.zeros(number)
    share = 1 + VARY * rng.uniform(-1, 1, (number, 2))
    requests = [SimRequest(float(at), round(prompt * a), round(output * b))
                for at, (a, b) in zip(arrivals, share, strict=True)]  # fmt: skip
    result = served(requests, grid, spec, hardware, SETTINGS, concurrency=concurrency)
    return told, result.percentiles(result.steady())


def beside(told, seen) -> None:
    assert told.tpot_ms["mean"] == pytest.approx(seen["tpot_ms"]["mean"], rel=TPOT)
    assert told.ttft_ms["mean"] == pytest.approx(seen["ttft_ms"]["mean"], rel=TTFT)
    assert told.ttft_ms["p95"] == pytest.approx(seen["ttft_ms"]["p95"], rel=TTFT_P95)


@pytest.mark.parametrize(("layout", "prompt", "output", "concurrency"), CLOSED)
def test_a_closed_loop(layout: str, prompt: int, output: int, concurrency: int) -> None:
    beside(*figures(layout, prompt, output, concurrency=concurrency))


@pytest.mark.parametrize(("layout", "prompt", "output", "rate"), OPEN)
def test_prompts_that_come_at_random(layout: str, prompt: int, output: int, rate: float) -> None:
    beside(*figures(layout, prompt, output, rate=rate))


def test_a_prompt_among_decodes_costs_a_pipeline_more_than_one_stage_s_time() -> None:
    """What it adds to an answer is near the whole round, not one interval of it."""
    spec, hardware = load_spec("llama-3.1-70b"), load_hardware("8xh100")
    alone, mixed = (
        predict_closed(Layout.parse("pp4"), spec, hardware, SETTINGS, prompt_tokens=tokens, output_tokens=200,
                       concurrency=16).tpot_ms["mean"] for tokens in (1, 2000)
    )  # fmt: skip
    one = predict_closed(Layout.parse("pp4"), spec, hardware, SETTINGS, prompt_tokens=2000, output_tokens=2,
                         concurrency=1)  # fmt: skip
    through_ms = one.ttft_ms["mean"] - alone / 8  # a prompt alone through all stages, with the front end
    assert mixed - alone > 0.5 * 15 * (through_ms - alone) / 200


CASE = Case(load_spec("llama-3.1-70b"), load_hardware("8xh100"), read_demand("1000/200", concurrency=32),
            PlanObjective(ttft_ms=2000, tpot_ms=60))  # fmt: skip


@pytest.mark.parametrize("layout", ["tp4", "dp2xtp4", "pp2xtp2"])
def test_a_plan_s_look_and_labkit_simulate_are_one_experiment(layout: str) -> None:
    candidate = evaluate(CASE, Layout.parse(layout))
    seen = simulated(CASE, candidate)
    asked, summary = Asked("llama-3.1-70b", "8xh100", layout, "1000/200", concurrency=32).run()
    np.testing.assert_array_equal(seen.first_s, asked.first_s)
    np.testing.assert_array_equal(seen.finished_s, asked.finished_s)
    told = verified(CASE, candidate).verified
    assert told is not None
    for metric in ("ttft_ms", "tpot_ms"):
        for name, value in steady_percentiles(seen)[metric].items():
            assert value == summary[metric][name] == told[metric][name]
    assert summary["counted"] == len(seen.done) - 2 * 32


@pytest.mark.parametrize("layout", ["tp4", "pp2xtp2"])
def test_equal_lengths_are_predicted_as_they_are_simulated(layout: str) -> None:
    """A loop as it goes on: its clients do not end together for ever because they began together."""
    candidate = evaluate(CASE, Layout.parse(layout))
    assert candidate.prediction is not None
    seen = steady_percentiles(simulated(CASE, candidate))
    assert candidate.prediction.tpot_ms["mean"] == pytest.approx(seen["tpot_ms"]["mean"], rel=TPOT)
    assert candidate.prediction.ttft_ms["mean"] == pytest.approx(seen["ttft_ms"]["mean"], rel=TTFT)
