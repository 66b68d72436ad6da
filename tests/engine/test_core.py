"""The engine over ranks that compute with integers: every answer is known beforehand, exactly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest
from arithmetic_ranks import VOCAB, ArithmeticPool, answer_to

from labkit.engine.bringup import SwitchRefused
from labkit.engine.core import Engine, EngineDown, EngineSettings, RequestStream
from labkit.engine.request import FinishReason, Request, RequestRefused, SamplingParams
from labkit.layout import Layout, LayoutError
from labkit.model.spec import load_spec

SPEC = load_spec("lab-5m")
SMALL = EngineSettings(block_size=4, max_num_batched_tokens=32, max_num_seqs=8)


class House:
    """An engine on two integer ranks, and everything that it has told."""

    def __init__(self, num_ranks: int = 2, step_timeout_s: float = 60.0, **pool) -> None:
        self.events: list[dict] = []
        self.pool = ArithmeticPool(num_ranks, **pool)
        self.engine = Engine(
            self.pool, "lab-5m", SPEC, self.events.append, step_timeout_s=step_timeout_s, check=True
        )
        self.pool.on_message, self.pool.on_failure = self.engine.on_message, self.engine.on_failure

    def ask(self, name: str, prompt: Sequence[int] | int = 10, max_tokens: int = 6, **params) -> RequestStream:
        tokens = tuple(range(3, 3 + prompt)) if isinstance(prompt, int) else tuple(prompt)
        settings = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)
        return self.engine.submit(Request(name, tokens, settings, time.monotonic_ns(), run_id="run"))

    def told(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]

    async def settled(self, num_requests: int) -> list[dict]:
        """The `request` events, once so many have been told."""
        async with asyncio.timeout(5):
            while len(self.told("request")) < num_requests:
                await asyncio.sleep(0.001)
        return self.told("request")


async def read(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


def expected(stream: RequestStream) -> list[int]:
    return answer_to(stream.request.prompt, stream.request.params.max_tokens)


def in_house(scenario: Callable[[House], Awaitable[None]], settings: EngineSettings = SMALL, **pool) -> House:
    """Run the scenario against a started engine; nothing may be left of its requests."""

    async def run() -> House:
        house = House(**pool)
        await house.engine.start(settings)
        await scenario(house)
        await house.engine.stop()
        assert house.engine.state()["requests_in_flight"] == 0
        return house

    return asyncio.run(asyncio.wait_for(run(), 30))


def layout(text: str, **settings) -> EngineSettings:
    return EngineSettings(**{**SMALL.__dict__, "layout": Layout.parse(text), **settings})


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


# ---- switching


def test_requests_in_flight_at_a_switch_are_computed_again_and_marked() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", [i + 2] * 9, max_tokens=40) for i in range(5)]
        heads = [(await anext(stream)).token_ids for stream in streams]
        report = await house.engine.switch(layout("dp2", block_size=8))
        assert report.layout == Layout(dp=2)
        assert set(report.parts) == {"drain", "load", "groups", "warm"}
        assert (report.parts["load"], report.parts["groups"], report.parts["warm"]) == (0.01, 0.02, 0.03)
        late = house.ask("late")
        for head, stream in zip(heads, streams, strict=True):
            assert head + await read(stream) == expected(stream)
        assert await read(late) == expected(late)
        told = {event["request_id"]: event for event in await house.settled(6)}
        assert [told[f"r{i}"]["requeued"] for i in range(5)] == [True] * 5
        assert not told["late"]["requeued"]
        assert told["late"]["layout"] == "dp2"

    house = in_house(scenario)
    assert [event["layout"] for event in house.told("switch")] == ["tp1", "dp2"]
    assert {(configure.layout, configure.epoch) for configure in house.pool.configures} == {
        ("tp1", 1),
        ("dp2", 2),
    }


def test_idle_ranks_are_configured_too() -> None:
    async def scenario(house: House) -> None:
        await house.engine.switch(layout("tp1"))
        assert [configure.layout for configure in house.pool.configures] == ["tp2"] * 4 + ["tp1"] * 4

    in_house(scenario, layout("tp2"), num_ranks=4)


def test_a_request_that_comes_during_a_switch_waits_for_it() -> None:
    async def scenario(house: House) -> None:
        switch = asyncio.create_task(house.engine.switch(layout("tp2")))
        while house.engine.state()["state"] != "switching":
            await asyncio.sleep(0)
        waits, leaves = house.ask("waits"), house.ask("leaves")
        house.engine.cancel("leaves")
        await switch
        assert await read(waits) == expected(waits)
        assert await read(leaves) == []
        assert leaves.request.finish_reason is FinishReason.ABORT
        assert {event["request_id"]: event["requeued"] for event in await house.settled(2)}["waits"]

    in_house(scenario)


def test_a_replica_has_the_blocks_of_its_smallest_rank() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: [40, 30, 70, 60][rank]
        await house.engine.switch(layout("dp2xtp2"))
        assert [replica["kv_total_blocks"] for replica in house.engine.state()["replicas"]] == [30, 60]

    in_house(scenario, num_ranks=4)


def test_an_illegal_layout_is_refused_before_anything_is_touched() -> None:
    async def scenario(house: House) -> None:
        for slug in ("tp3", "dp4", "pp3"):
            with pytest.raises(LayoutError):
                await house.engine.switch(layout(slug))
        assert len(house.pool.configures) == 2
        assert house.engine.state()["state"] == "ready"

    in_house(scenario)


def test_a_layout_that_does_not_fit_is_refused_and_the_former_stands_again() -> None:
    async def scenario(house: House) -> None:
        house.pool.num_blocks = lambda configure, rank: -1 if configure.layout == "tp1" else 64
        stream = house.ask("a", max_tokens=30)
        head = (await anext(stream)).token_ids
        with pytest.raises(SwitchRefused, match=r"rank 0 is too small for tp1.*Layouts that fit: TP2\b"):
            await house.engine.switch(layout("tp1", memory_per_rank=13 * 2**20))
        state = house.engine.state()
        assert (state["state"], state["layout"]) == ("ready", "tp2")
        assert head + await read(stream) == expected(stream)

    in_house(scenario, layout("tp2"))


def test_a_request_too_large_for_the_new_layout_is_told_so() -> None:
    async def scenario(house: House) -> None:
        stream, small = house.ask("large", 100, max_tokens=100), house.ask("small", max_tokens=9)
        await anext(stream)
        house.pool.num_blocks = lambda configure, rank: 20
        await house.engine.switch(layout("dp2"))
        with pytest.raises(EngineDown, match="After the switch to dp2: The request needs 50 KV blocks"):
            await read(stream)
        assert await read(small) == expected(small)
        assert {event["finish_reason"] for event in await house.settled(2)} == {"error", "length"}

    in_house(scenario)


def test_two_switches_at_once_follow_each_other() -> None:
    async def scenario(house: House) -> None:
        reports = await asyncio.gather(house.engine.switch(layout("tp2")), house.engine.switch(layout("dp2")))
        assert [report.layout.slug for report in reports] == ["tp2", "dp2"]
        assert house.engine.state()["layout"] == "dp2"

    in_house(scenario)


def test_a_switch_goes_on_when_the_one_who_asked_goes_away() -> None:
    async def scenario(house: House) -> None:
        switch = asyncio.create_task(house.engine.switch(layout("tp2")))
        await asyncio.sleep(0)
        switch.cancel()
        await asyncio.sleep(0.05)
        assert (house.engine.state()["state"], house.engine.state()["layout"]) == ("ready", "tp2")

    in_house(scenario)


# ---- a rank ends


def test_a_dead_rank_ends_every_stream_with_its_name_and_the_engine_comes_back() -> None:
    async def scenario(house: House) -> None:
        streams = [house.ask(f"r{i}", max_tokens=200) for i in range(3)]
        await anext(streams[0])
        house.pool.die(1)
        for stream in streams:
            with pytest.raises(EngineDown, match="Rank 1 raised ValueError: no"):
                await read(stream)
        with pytest.raises(EngineDown, match="Rank 1 raised ValueError: no"):
            house.ask("now")
        failed = house.told("state")[-1]
        assert (failed["state"], failed["failure"]["rank"]) == ("failed", 1)
        await until_ready(house)
        assert house.engine.state()["failure"] is None
        again = house.ask("again")
        assert await read(again) == expected(again)
        told = await house.settled(4)
        assert [event["finish_reason"] for event in told] == ["error"] * 3 + ["length"]
        assert "Rank 1 raised" in told[0]["error"]

    house = in_house(scenario, layout("tp2"))
    states = [event["state"] for event in house.told("state")]
    assert states == ["starting", "starting", "ready", "failed", "restarting", "ready", "stopped"]
    assert house.told("failure")[0] | {"event": ""} == {
        "event": "",
        "rank": 1,
        "kind": "raised",
        "error": "Rank 1 raised ValueError: no.",
        "traceback": "Traceback …",
    }


@pytest.mark.parametrize(("slug", "said"), [("tp1", "Rank 0 has"), ("tp2", "Ranks 0, 1 have")])
def test_ranks_that_answer_no_step_are_named_after_the_bound_and_the_engine_comes_back(
    slug: str, said: str
) -> None:
    async def scenario(house: House) -> None:
        first = house.ask("first", max_tokens=3)
        assert await read(first) == expected(first)
        house.pool.silent = set(house.engine.settings.layout.replica_ranks(0))
        stream, began = house.ask("lost", max_tokens=3), time.monotonic()
        with pytest.raises(EngineDown, match=f"{said} not answered a step within 0.2 s"):
            await read(stream)
        assert 0.2 <= time.monotonic() - began < 2.0
        assert house.told("failure")[0]["kind"] == "hung"
        await until_ready(house)
        again = house.ask("again")
        assert await read(again) == expected(again)

    in_house(scenario, layout(slug), step_timeout_s=0.2)


def test_one_silent_replica_is_noticed_while_the_other_answers() -> None:
    async def scenario(house: House) -> None:
        house.pool.silent = {1}
        streams = [house.ask(f"r{i}", max_tokens=200) for i in range(2)]
        with pytest.raises(EngineDown, match="Rank 1 has not answered a step within 0.1 s"):
            await asyncio.gather(*map(read, streams))

    in_house(scenario, layout("dp2"), step_timeout_s=0.1, step_s=0.01)


def test_steps_that_come_back_in_time_are_left_alone_however_long_the_answer() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("long", max_tokens=40)
        assert await read(stream) == expected(stream)
        assert not house.told("failure")
        await asyncio.sleep(0.2)  # nothing is on its way: nobody is late
        assert not house.told("failure")

    in_house(scenario, step_timeout_s=0.08, step_s=0.01)


def test_a_rank_that_answers_no_switch_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.engine.bringup.SWITCH_TIMEOUT_S", 0.1)

    async def scenario(house: House) -> None:
        house.pool.silent = {1}
        with pytest.raises(EngineDown, match="Rank 1 has not answered a switch of layout within 0.1 s"):
            await house.engine.switch(layout("tp2"))
        await until_ready(house)
        assert house.engine.state()["layout"] == "tp1"

    in_house(scenario)


async def until_ready(house: House) -> None:
    async with asyncio.timeout(5):
        while house.engine.state()["state"] != "ready":
            await asyncio.sleep(0.001)


def test_a_rank_that_dies_during_a_switch_ends_the_switch_and_the_former_layout_returns() -> None:
    async def scenario(house: House) -> None:
        stream = house.ask("a", max_tokens=200)
        await anext(stream)
        switch = asyncio.create_task(house.engine.switch(layout("dp2")))
        await asyncio.sleep(0.005)
        house.pool.die(0)
        with pytest.raises(EngineDown, match="Rank 0 raised"):
            await switch
        with pytest.raises(EngineDown):
            await read(stream)
        await until_ready(house)
        assert house.engine.state()["layout"] == "tp2"

    in_house(scenario, layout("tp2"), step_s=0.05)


def test_a_pool_that_keeps_breaking_is_given_up_with_the_reason() -> None:
    async def scenario(house: House) -> None:
        async def no_restart() -> None:
            house.engine.on_pool_state("restarting")
            assert "Rank 1 raised" in house.engine.state()["message"]
            house.pool.restarts_left = 0
            raise RuntimeError("the ranks broke 3 times")

        house.pool.restart = no_restart
        house.pool.die(1)
        await asyncio.sleep(0.01)
        state = house.engine.state()
        assert state["state"] == "stopped"
        assert "Rank 1 raised ValueError: no. the ranks broke 3 times" in state["message"]
        with pytest.raises(EngineDown, match="broke 3 times"):
            house.ask("a")

    in_house(scenario)


def test_a_first_layout_that_does_not_fit_leaves_an_engine_that_can_be_given_another() -> None:
    async def run() -> None:
        house = House()
        house.pool.num_blocks = lambda configure, rank: -1 if configure.layout == "tp1" else 64
        with pytest.raises(SwitchRefused, match="rank 0 is too small"):
            await house.engine.start(layout("tp1"))
        assert house.engine.state()["state"] == "failed"
        with pytest.raises(EngineDown, match="too small"):
            house.ask("a")
        await house.engine.switch(layout("tp2"))
        stream = house.ask("b")
        assert await read(stream) == expected(stream)
        await house.engine.stop()

    asyncio.run(run())


# ---- what is told


def test_a_request_s_time_on_the_server_is_accounted_for_whole() -> None:
    async def scenario(house: House) -> None:
        await asyncio.gather(read(house.ask("long", 80, max_tokens=5)), read(house.ask("short", max_tokens=1)))
        for event in await house.settled(2):
            until_first = sum(event[f"{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
            assert until_first == event["first_end_ns"] - event["received_ns"]
            after = sum(event[f"decode_{part}_ns"] for part in ("queue", "compute", "wait", "transfer"))
            assert after == event["last_end_ns"] - event["first_end_ns"]
            assert event["received_ns"] < event["first_start_ns"] < event["first_end_ns"] <= event["finished_ns"]
        long = next(event for event in house.told("request") if event["request_id"] == "long")
        assert long["compute_ns"] == 3 * 1000  # three chunks of a µs each
        assert (long["prompt_tokens"], long["output_tokens"], long["run_id"]) == (80, 5, "run")

    in_house(scenario, layout("tp2"), step_s=0.002)


def test_steps_are_told_by_the_tenth_of_a_second_with_all_their_ranks() -> None:
    async def scenario(house: House) -> None:
        await read(house.ask("a", 20, max_tokens=4))
        await asyncio.sleep(0.15)
        (event,) = house.told("steps")
        steps = event["steps"]
        assert event["crossings"] == [], "these ranks hand nothing over"
        assert [step.prefill_tokens for step in steps] == [20, 0, 0, 0]
        assert [step.context_tokens for step in steps] == [0, 20, 21, 22]
        assert all(step.ranks == [0, 1] and step.compute_ns == [1000, 1000] for step in steps)
        assert all(step.start_ns < step.end_ns and step.run_id == "run" for step in steps)

    in_house(scenario, layout("tp2"))


def test_queues_are_told_while_there_is_work_and_not_when_idle() -> None:
    async def scenario(house: House) -> None:
        await asyncio.sleep(0.15)
        assert house.told("engine") == []
        stream = house.ask("a", max_tokens=30)
        await read(stream)
        await asyncio.sleep(0.3)
        num_beats = len(house.told("engine"))
        assert house.told("engine")[0]["replicas"][0]["running"] == 1
        assert house.told("engine")[-1]["replicas"][0]["running"] == 0
        await asyncio.sleep(0.3)
        assert len(house.told("engine")) == num_beats

    in_house(scenario, step_s=0.01)


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
