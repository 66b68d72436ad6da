"""A cost made of measured steps: its parts add up, it is affine in context, and company costs what was fitted."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.plan.fitted_cost import PARTS, ClientCost, FittedCost, features, stage_cost
from labkit.plan.work import StepCost, StepWork

ALONE = {"step": 8e-3, "rows_1_4": 1e-3, "rows_64_256": 5e-4, "rows_256_up": 4e-4, "prompt_pairs": 1e-8,
         "decode_context": 1e-6, "decodes": 1e-4, "logits": 2e-5}  # fmt: skip
COMPANY = {"step": 2e-3, "rows_64_256": 1e-4}
COST = FittedCost("tp2", (stage_cost(ALONE, COMPANY),), collective=(1e-3, 1e-5))
PROMPT = StepWork(prefill_tokens=300, prefill_seqs=1, prefill_pairs=45150, prefill_window_pairs=45150, logits=1)
MIXED = dataclasses.replace(PROMPT, decodes=4, decode_context=700, decode_window_context=700, logits=5)


def decodes(num: int, context: int) -> StepWork:
    return StepWork(decodes=num, decode_context=context, decode_window_context=context, logits=num)


def test_rows_are_shared_out_between_their_prices_and_none_is_lost():
    for rows in (1, 3, 4, 17, 64, 200, 256, 511):
        amounts = dict(zip(PARTS, features(StepWork(prefill_tokens=rows)), strict=True))
        assert sum(amount for name, amount in amounts.items() if name.startswith("rows_")) == rows - 1


def test_seconds_are_the_sum_of_prices():
    assert COST.seconds(decodes(1, 100)) == pytest.approx(8e-3 + 100e-6 + 1e-4 + 2e-5)
    assert COST.seconds(PROMPT) == pytest.approx(8e-3 + 3e-3 + 192 * 5e-4 + 44 * 4e-4 + 45150e-8 + 2e-5)


@pytest.mark.parametrize("work", [decodes(1, 50), decodes(16, 4000), PROMPT, MIXED])
def test_parts_add_up_to_the_whole(work: StepWork):
    parts = COST.parts(work)
    assert sum(parts.values()) == pytest.approx(COST.seconds(work)) and min(parts.values()) >= 0
    assert parts["tp"] == pytest.approx(min(1e-3, 1) + min(1e-5 * (work.prefill_tokens + work.decodes), 1), rel=0.5)


def test_a_run_of_decodes_is_its_first_and_last_step_halved_times_their_number():
    steps = [COST.seconds(decodes(4, 400 + 4 * at)) for at in range(50)]
    assert sum(steps) == pytest.approx((steps[0] + steps[-1]) / 2 * 50)


def test_company_adds_its_share_and_no_more():
    alone, half, full = (COST.with_company(share).seconds(PROMPT) for share in (0.0, 0.5, 1.0))
    assert alone == COST.seconds(PROMPT) and half - alone == pytest.approx((full - alone) / 2)
    assert full - alone == pytest.approx(2e-3 + 192e-4) and COST.has_company
    assert not COST.with_company(0.5).has_company
    with pytest.raises(ValueError, match="between 0 and 1"):
        COST.with_company(1.5)


def test_a_pipeline_takes_the_sum_of_its_stages_and_follows_at_the_slowest():
    cost = FittedCost("pp2", (stage_cost({"step": 3e-3}), stage_cost({"step": 5e-3})), hops_s=4e-4, turnaround_s=1e-4)
    work = decodes(1, 9)
    assert cost.seconds(work) == pytest.approx(8.4e-3) and cost.interval(work) == pytest.approx(5.1e-3)
    assert sum(cost.parts(work).values()) == pytest.approx(8.4e-3)
    assert COST.interval(MIXED) == COST.seconds(MIXED)


def test_it_is_a_step_cost_and_an_unknown_part_is_named():
    cost: StepCost = COST
    assert cost.handoff_seconds(100) == 0.0
    with pytest.raises(ValueError, match="'rows' is no part"):
        stage_cost({"rows": 1.0})


def test_the_client_sees_the_way_there_and_back():
    client = ClientCost(1e-3, 1e-6, 2e-3, 5e-4)
    assert client.ttft_s(0.1, 1000) == pytest.approx(0.104)
    assert client.tpot_s(0.01, 16) == pytest.approx(0.01 - 1.5e-3 / 15)
    assert client.tpot_s(0.01, 1) == 0.01
