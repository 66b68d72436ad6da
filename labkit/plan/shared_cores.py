"""Simulate a machine whose steps were measured, where replicas or stages share cores and so slow each other.

A step's cost in company depends on how much company there is, and that on what steps cost: the simulation is repeated
with the share of the time in which others were at work, until the two agree. What the client sees beside the steps was
measured as well, and is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.layout import Layout
from labkit.plan.fitted_cost import FittedCost
from labkit.plan.sim.request import SimRequest
from labkit.plan.sim.result import SimResult
from labkit.plan.simulate import Options, simulate
from labkit.plan.work import EngineSettings

_ROUNDS, _CLOSE = 8, 0.01


@dataclass(frozen=True)
class Predicted:
    """What the client sees, float [requests], in the order in which they were given."""

    result: SimResult
    company: float
    """The share of the other replicas and stages that were at work beside one that was, on average."""
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    """NaN for answers of one token."""


def simulate_measured(
    requests: Sequence[SimRequest], layout: Layout, cost: FittedCost, kv_blocks: int, settings: EngineSettings,
    *, concurrency: int = 0, options: Options | None = None,
) -> Predicted:  # fmt: skip
    """As `simulate`, with a cost out of a calibration."""
    company = 0.5 if cost.has_company else 0.0
    for _ in range(_ROUNDS):
        result = simulate(
            requests, layout, cost.with_company(company), kv_blocks, settings, concurrency=concurrency, options=options
        )
        found = company_of(result, layout) if cost.has_company else 0.0
        if abs(found - company) < _CLOSE:
            break
        company = found
    return Predicted(result, company, *_seen_by_client(result, cost))


def company_of(result: SimResult, layout: Layout) -> float:
    """0 to 1: of the other places (stages of replicas) the share at work, over the time of each that is.

    A replica has as many stages at work as it has requests, at most all of them.
    """
    places = layout.dp * layout.pp
    done = result.done
    if places == 1 or not done.any():
        return 0.0
    times = np.concatenate([result.arrival_s[done], result.finished_s[done]])
    changes = np.repeat([1, -1], int(done.sum()))
    replicas = np.tile(result.replica[done], 2)
    order = np.argsort(times, kind="stable")
    running = np.zeros((len(order), layout.dp))
    running[np.arange(len(order)), replicas[order]] = changes[order]
    at_work = np.minimum(running.cumsum(axis=0), layout.pp).sum(axis=1)[:-1]
    weight = at_work * np.diff(times[order])
    if not weight.sum() > 0:
        return 0.0
    return float(np.clip((weight * (at_work - 1)).sum() / weight.sum() / (places - 1), 0.0, 1.0))


def _seen_by_client(result: SimResult, cost: FittedCost) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    client = cost.client
    there = client.request_s + client.prompt_token_s * result.prompt_tokens
    steps = np.where(result.output_tokens > 1, result.output_tokens - 1, np.nan)
    later = (client.next_token_s - client.first_token_s) / steps
    return result.ttft_s + there + client.first_token_s, result.tpot_s + later
