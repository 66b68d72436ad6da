"""The engine over ranks that compute with integers: what it serves, refuses and ends, exactly."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from arithmetic_ranks import VOCAB
from house import SPEC, House, expected, in_house, layout, read

from labkit.engine.core import EngineSettings
from labkit.engine.request import FinishReason, RequestRefused

# ---- serving


@pytest.mark.parametrize("slug", ["tp1", "tp2", "dp2"])
def test_every_layout_gives_the_same_answers(slug: str) -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", 3 + 5 * i, max_tokens=3 + i) for i in range(7)]
        for answer, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
            assert answer == expected(stream)

    in_house(scenario, layout(slug))


def test_a_full_cache_preempts_and_the_answers_stay_whole() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", [i + 1] * 12, max_tokens=16) for i in range(6)]
        for answer, stream in zip(await asyncio.gather(*map(read, streams)), streams, strict=True):
            assert answer == expected(stream)
        assert sum(event["num_preemptions"] for event in await house.settled(6)) > 0

    in_house(scenario, layout("tp1", admission="vllm"), num_blocks=12)


def test_the_next_plan_goes_out_before_a_token_is_handed_over() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("a", max_tokens=4)
        for count in range(1, 4):
            await anext(stream)
            assert house.pool.log.count(("step", 0)) == count + 1
        assert len((await anext(stream)).token_ids) == 1

    in_house(scenario)


def test_a_slow_reader_finds_its_tokens_together_and_none_lost() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("a", max_tokens=6, logprobs=1)
        await asyncio.sleep(0.05)
        output = await anext(stream)
        assert output.token_ids == expected(stream)
        assert output.logprobs == [(-0.5, [(token, -0.5)]) for token in output.token_ids]
        assert output.finish_reason is FinishReason.LENGTH
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    in_house(scenario)


def test_requests_spread_over_replicas_and_each_knows_why() -> None:
    async def scenario(house: House) -> None:
        await asyncio.gather(*[read(house.ask(f"r{i}")) for i in range(4)])
        told = await house.settled(4)
        assert sorted(event["replica"] for event in told) == [0, 0, 1, 1]
        assert all("least work" in event["routed_because"] for event in told)

    in_house(scenario, layout("dp2"))


def test_a_long_prompt_on_one_replica_sends_the_short_ones_to_the_other() -> None:
    async def scenario(house: House) -> None:
        long = house.ask("long", 200, max_tokens=2)
        short = [house.ask(f"short{i}", 5, max_tokens=2) for i in range(3)]
        await asyncio.gather(*map(read, [long, *short]))
        assert {stream.request.replica for stream in short} == {1 - long.request.replica}

    in_house(scenario, layout("dp2"))


def test_a_shared_prefix_draws_requests_to_where_it_is_cached() -> None:
    async def scenario(house: House) -> None:
        await read(house.ask("first", 24))
        for i in range(3):
            await read(house.ask(f"r{i}", 24))
        told = await house.settled(4)
        assert len({event["replica"] for event in told}) == 1
        assert [event["cached_tokens"] for event in told] == [0, 20, 20, 20]

    in_house(scenario, layout("dp2", router="prefix"))


# ---- refused and ended


def test_what_cannot_be_served_is_refused_with_a_sentence() -> None:
    async def scenario(house: House) -> None:
        with pytest.raises(RequestRefused, match=f"Token id {SPEC.vocab_size} does not exist"):
            house.ask("a", [1, SPEC.vocab_size])
        with pytest.raises(RequestRefused, match="Token id -1 does not exist"):
            house.ask("a", [-1, 4])
        with pytest.raises(RequestRefused, match="needs 103 KV blocks of 4 tokens .* the replica has 64"):
            house.ask("a", 10, max_tokens=400)
        house.ask("twice")
        with pytest.raises(RequestRefused, match="id 'twice' is in flight"):
            house.ask("twice")
        assert house.engine.state()["requests_in_flight"] == 1
        house.engine.cancel("twice")

    in_house(scenario)


def test_a_cancelled_request_ends_its_stream_and_frees_its_blocks() -> None:
    async def scenario(house: House) -> None:
        stream, other = house.ask("a", max_tokens=200), house.ask("b", [5] * 10)
        await anext(stream)
        house.engine.cancel("a")
        house.engine.cancel("a")
        tail = [output async for output in stream]
        assert tail[-1].finish_reason is FinishReason.ABORT
        assert await read(other) == expected(other)
        (replica,) = house.engine.state()["replicas"]
        assert (replica["running"], replica["kv_used_blocks"]) == (0, 0)
        first, _ = await house.settled(2)
        assert (first["request_id"], first["finish_reason"]) == ("a", "abort")

    in_house(scenario)


def test_the_server_may_end_an_answer_at_a_stop_string() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("a", max_tokens=200)
        await anext(stream)
        house.engine.finish("a", FinishReason.STOP)
        assert [output async for output in stream][-1].finish_reason is FinishReason.STOP
        assert (await house.settled(1))[0]["finish_reason"] == "stop"

    in_house(scenario)


# ---- what stands


def test_the_state_names_what_stands() -> None:
    async def scenario(house: House) -> None:
        state = house.engine.state()
        assert (state["layout"], state["layout_name"], state["epoch"]) == ("dp2", "DP2", 1)
        assert state["settings"]["layout"] == "dp2"
        assert state["settings"]["router"] == "least-work"
        assert [record.rank for record in state["memory"]] == [0, 1]
        assert state["memory"][0].kv == 20
        assert state["replicas"][1] == {
            "waiting": 0,
            "running": 0,
            "kv_used_blocks": 0,
            "kv_total_blocks": 64,
            "kv_block_tokens": 4,
            "ranks": [1],
            "pool": 0,
            "role": "any",
        }
        assert state["pools"] == [{"role": "any", "layout": "dp2", "layout_name": "DP2", "ranks": [0, 1]}]

    in_house(scenario, layout("dp2"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"router": "dice"}, "router is 'dice'; choose one of least-work"),
        ({"dtype": "int3"}, "dtype is 'int3'; choose one of float32"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"memory_per_rank": -1}, "memory_per_rank is -1"),
        ({"max_num_seqs": 1000}, "a step must hold one token of each sequence"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_a_sentence(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineSettings(**change)


def test_the_engine_process_has_no_torch_in_it() -> None:
    code = "import sys, labkit.engine.core, labkit.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_integer_model_speaks_words_that_the_spec_has() -> None:
    assert SPEC.vocab_size > VOCAB
