"""Replicas that share experts step together: rounds of one step each, empty ones among them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from arithmetic_ranks import ArithmeticPool
from house import SMALL, expected, read
from house import House as PlainHouse

from labkit.engine.core import Engine, EngineSettings, SwitchRefused
from labkit.layout import Layout
from labkit.measure.experts import DROPPED, NUM_FIELDS, ROWS, SENT_BYTES, TIME_NS, pack_rows
from labkit.measure.recorder import AXIS_CODES, OP_CODES, Ring, group_id, merge_together
from labkit.model.spec import load_spec

SPEC = load_spec("lab-moe-8x")


class House(PlainHouse):
    def __init__(self, num_ranks: int, **pool) -> None:
        self.events = []
        self.pool = ArithmeticPool(num_ranks, **pool)
        self.engine = Engine(self.pool, "lab-moe-8x", SPEC, self.events.append, check=True)
        self.pool.on_message, self.pool.on_failure = self.engine.on_message, self.engine.on_failure


def settings(slug: str, **changes) -> EngineSettings:
    return EngineSettings(**{**SMALL.__dict__, "layout": Layout.parse(slug), **changes})


def in_house(scenario, slug: str, **pool) -> House:
    async def run() -> House:
        house = House(Layout.parse(slug).world_size, **pool)
        await house.engine.start(settings(slug))
        await scenario(house)
        await house.engine.stop()
        assert house.engine.state()["requests_in_flight"] == 0
        return house

    return asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("slug", ["dp2xep2", "dp2xtp2xep4", "dp4xep4", "dp2xpp2xep2"])
def test_answers_are_right_and_every_rank_gets_every_round(slug: str) -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", 3 + 5 * i, max_tokens=3 + i) for i in range(7)]
        for answer, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
            assert answer == expected(stream)

    house = in_house(scenario, slug)
    steps = [house.pool.log.count(("step", rank)) for rank in range(Layout.parse(slug).world_size)]
    assert len(set(steps)) == 1, "a rank that misses a round leaves the others hanging"


def test_a_round_waits_for_the_one_before_on_every_replica() -> None:
    async def scenario(house: House) -> None:
        await asyncio.gather(*[read(house.ask(f"r{i}", 5, max_tokens=4 + 3 * i)) for i in range(2)])

    log = in_house(scenario, "dp2xep2").pool.log
    kinds = "".join(kind[0] for kind, _ in log)
    assert set(kinds.replace("sstt", "")) == set(), f"two plans out, two answers back, again and again: {kinds}"


def test_an_idle_replica_takes_part_with_no_tokens_and_its_steps_are_told() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("only", 10, max_tokens=5)
        assert await read(stream) == expected(stream)
        await house.engine.settle()

    house = in_house(scenario, "dp2xep2")
    steps = [step for told in house.told("steps") for step in told["steps"]]
    idle = [step for step in steps if step.prefill_tokens + step.num_decode_seqs == 0]
    assert len(idle) == len(steps) // 2 == 5
    assert {step.run_id for step in steps} == {"run"}, "an idle replica's step belongs to the run that made it"


def test_a_cancelled_request_and_a_switch_leave_no_round_behind() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("long", 10, max_tokens=200)
        await anext(stream)
        house.engine.cancel("long")
        other = house.ask("other", 9, max_tokens=40)
        await anext(other)
        await house.engine.switch(settings("tp2xep2"))
        await house.engine.switch(settings("dp2xep2"))
        rest = await read(other)
        assert rest == expected(other)[-len(rest) :]
        assert all(r["running"] == r["kv_used_blocks"] == 0 for r in house.engine.state()["replicas"])

    in_house(scenario, "dp2xep2")


def test_full_caches_preempt_in_lockstep_and_the_answers_stay_whole() -> None:
    async def scenario(house: House) -> None:
        await house.engine.switch(settings("dp2xep2", admission="vllm"))
        streams = [house.ask(f"r{i}", [i + 1] * 12, max_tokens=16) for i in range(12)]
        for answer, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
            assert answer == expected(stream)
        assert sum(event["num_preemptions"] for event in await house.settled(12)) > 0

    in_house(scenario, "dp2xep2", num_blocks=12)


# ---- placement by measured load


def load_row(layer: int, tokens: list[int]) -> list[int]:
    row = [0] * (NUM_FIELDS + len(tokens))
    row[0], row[ROWS], row[SENT_BYTES], row[DROPPED], row[TIME_NS] = layer, sum(tokens), 64, 1, 1000
    row[NUM_FIELDS:] = tokens
    return row


def test_a_measured_placement_needs_a_measurement_and_then_reaches_the_ranks() -> None:
    skewed = [50, 40, 30, 20, 1, 1, 1, 1]

    async def scenario(house: House) -> None:
        measured = settings("dp2xep2", expert_placement="measured", expert_copies=1)
        with pytest.raises(SwitchRefused, match="no token has been routed yet"):
            await house.engine.switch(measured)
        house.pool.experts = pack_rows([load_row(layer, skewed) for layer in range(4)])
        await read(house.ask("a", 5, max_tokens=3))
        await house.engine.settle()
        told = house.engine.state()["experts"]
        assert told["tokens"][0] == [6 * tokens for tokens in skewed], "three rounds on two ranks"
        await house.engine.switch(measured)
        told = house.engine.state()["experts"]
        assert max(told["imbalance"]) < 1.2 < min(told["plain_imbalance"])
        placements = house.pool.configures[-1].placements
        assert placements == told["placements"] and len(placements[0][0]) + len(placements[0][1]) == 9

    house = in_house(scenario, "dp2xep2")
    steps = [step for told in house.told("steps") for step in told["steps"]]
    assert steps[0].expert_rows == [4 * sum(skewed)] and steps[0].num_dropped == 4
    assert steps[0].expert_sent_bytes == [256] and steps[0].expert_ns == [4000]
    assert steps[0].expert_tokens == [4 * tokens for tokens in skewed]


def test_settings_for_experts_are_refused_for_a_dense_model() -> None:
    async def scenario() -> None:
        house = PlainHouse()
        await house.engine.start(SMALL)
        for changes in ({"expert_placement": "measured"}, {"expert_capacity": 1.5}):
            with pytest.raises(SwitchRefused, match="for models with experts"):
                await house.engine.switch(EngineSettings(**{**SMALL.__dict__, **changes}))
        await house.engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"expert_copies": 2}, "measured load only"), ({"expert_capacity": -1.0}, "less than 0"),
     ({"expert_placement": "best"}, "plain, measured")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes, sentence) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineSettings(**changes)


# ---- figures over replicas


def test_replicas_wait_for_each_other_in_common_exchanges() -> None:
    """Two ranks of two replicas meet twice: the second comes 100 late to the dispatch, the first 40 to the combine."""

    def piece(rank: int, enters: list[int]) -> tuple[int, int, int, bytes]:
        ring = Ring()
        for seq, (enter, leave) in enumerate(zip(enters, [310, 510], strict=True)):
            ep = AXIS_CODES["ep"]
            ring.put(group_id("ep", 0), seq, OP_CODES["all_to_all"], ep, 1, 0, 64, enter, leave)
        return rank, 0, 600, ring.drain()

    first, second = merge_together([[piece(0, [200, 440])], [piece(1, [300, 400])]], step_ids=[7, 8])
    assert (first.wait_ns, second.wait_ns) == ([100], [40])
    assert first.num_collectives == second.num_collectives == 2
    assert np.unique(first.rows["step_id"]).tolist() == [7] and second.ranks == [1]
