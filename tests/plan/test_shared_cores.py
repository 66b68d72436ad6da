"""Replicas and stages on shared cores: how much company there was, and that costs and company agree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from labkit.layout import Layout
from labkit.plan.fitted_cost import ClientCost, FittedCost, stage_cost
from labkit.plan.shared_cores import company_of, simulate_measured
from labkit.plan.sim.request import SimRequest
from labkit.plan.simulate import simulate
from labkit.plan.work import EngineSettings

SETTINGS = EngineSettings(policy="labkit", max_num_batched_tokens=512, max_num_seqs=64)
STAGE = stage_cost({"step": 10e-3}, {"step": 5e-3})
DP2, PP2 = FittedCost("dp2", (STAGE,)), FittedCost("pp2", (STAGE, STAGE))
TOGETHER = [SimRequest(0.0, 64, 50), SimRequest(0.0, 64, 50)]
APART = [SimRequest(0.0, 64, 50), SimRequest(5.0, 64, 50)]


@pytest.mark.parametrize(("cost", "layout"), [(DP2, Layout(dp=2)), (PP2, Layout(pp=2))])
def test_company_is_whole_for_two_at_once_and_none_for_one_after_the_other(cost: FittedCost, layout: Layout):
    for requests, share in ((TOGETHER, 1.0), (APART, 0.0)):
        found = simulate_measured(requests, layout, cost, 1000, SETTINGS)
        assert found.company == pytest.approx(share, abs=0.05)
        assert found.company == pytest.approx(company_of(found.result, layout), abs=0.02)


def test_replicas_beside_each_other_are_slower_by_what_company_costs():
    together, apart = (simulate_measured(each, Layout(dp=2), DP2, 1000, SETTINGS) for each in (TOGETHER, APART))
    assert apart.tpot_s == pytest.approx([10e-3] * 2) and together.tpot_s == pytest.approx([15e-3] * 2, rel=0.01)


def test_without_company_it_is_the_simulation_and_the_clients_share_is_added():
    client = ClientCost(1e-3, 1e-5, 2e-3, 5e-4)
    cost = dataclasses.replace(FittedCost("tp1", (stage_cost({"step": 10e-3, "rows_1_4": 1e-3}),)), client=client)
    requests = [SimRequest(0.1 * at, 100, 20) for at in range(9)]
    found = simulate_measured(requests, Layout(), cost, 1000, SETTINGS)
    plain = simulate(requests, Layout(), cost, 1000, SETTINGS)
    assert found.company == 0
    assert found.ttft_s == pytest.approx(plain.ttft_s + 1e-3 + 100e-5 + 2e-3)
    assert found.tpot_s == pytest.approx(plain.tpot_s - 1.5e-3 / 19)
    assert np.isnan(simulate_measured([SimRequest(0, 9, 1)], Layout(), cost, 99, SETTINGS).tpot_s).all()
