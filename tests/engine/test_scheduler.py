"""The scheduler over a rank that computes with integers: each request gets its own answer, always."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from arithmetic_ranks import answer_to
from bench import Bench, assert_answered, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine import messages
from labkit.engine.request import FinishReason, Phase, RequestRefused
from labkit.engine.scheduler import SchedulerConfig

# ---- the life of a request


def test_a_batch_of_ragged_requests_gets_each_its_own_answer() -> None:
    bench = Bench()
    requests = [bench.add(f"r{i}", 1 + 7 * i, max_tokens=1 + i) for i in range(6)]
    bench.run()
    assert_answered(*requests)


def test_an_answer_ends_at_its_stop_token_and_keeps_it() -> None:
    prompt = numbers("s", 9)
    answer = answer_to(prompt, 20)
    bench = Bench(eos_ids=frozenset({answer[5]}))
    by_eos = bench.add("eos", prompt, 20)
    by_id = bench.add("id", prompt, 20, stop_token_ids=(answer[2],))
    through = bench.add("through", prompt, 20, ignore_eos=True)
    bench.run()
    assert (by_eos.output, by_eos.finish_reason) == (answer[:6], FinishReason.STOP)
    assert (by_id.output, by_id.finish_reason) == (answer[:3], FinishReason.STOP)
    assert (through.output, through.finish_reason) == (answer, FinishReason.LENGTH)


def test_a_chunk_that_does_not_end_the_prompt_gives_no_token() -> None:
    bench = Bench(max_num_batched_tokens=8)
    request = bench.add("long", 20, max_tokens=2)
    for _ in range(2):
        plan = bench.step()
        assert plan is not None and plan.sampled == [] and request.output == []
        assert request.phase is Phase.PREFILL
    plan = bench.step()
    assert plan is not None and plan.sampled == [request] and len(request.output) == 1
    bench.run()
    assert_answered(request)


def test_a_decode_never_waits_while_new_prompts_stream_in() -> None:
    bench = Bench(max_num_batched_tokens=16, num_blocks=400)
    decoding = bench.add("d", 5, max_tokens=30)
    bench.step()
    for i in range(29):
        bench.add(f"new{i}", 100, max_tokens=1)
        plan = bench.step()
        assert plan is not None and decoding in plan.sampled
        assert plan.prefill_tokens + plan.num_decode_seqs <= 16
        assert plan.prefill_tokens > 0
    assert decoding.finish_reason is FinishReason.LENGTH
    bench.run()
    assert_answered(decoding)


def test_steps_keep_to_the_budget_and_to_the_number_of_sequences() -> None:
    bench = Bench(max_num_batched_tokens=10, max_num_seqs=3, num_blocks=200)
    requests = [bench.add(f"r{i}", 13, max_tokens=5) for i in range(9)]
    while (plan := bench.step()) is not None:
        assert sum(plan.query_lens) <= 10
        assert len(plan.requests) <= 3
        assert len(set(plan.requests)) == len(plan.requests)
    assert_answered(*requests)


def test_several_requests_share_a_step_in_order_of_arrival() -> None:
    bench = Bench(max_num_batched_tokens=12)
    first, second = bench.add("a", 8), bench.add("b", 8)
    plan = bench.step()
    assert plan is not None
    assert (plan.prefills, plan.chunks) == ([first, second], [8, 4])


# ---- refused


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sentence"),
    [
        ([], 4, "prompt has 0 tokens"),
        ([1, 2], 0, "max_tokens is 0"),
        ([1, 2], -3, "max_tokens is -3"),
        ([1] * 60, 1, "60 tokens and the model's context is 60.*at most 59"),
        ([1] * 50, 11, r"50 \+ 11 \(max_tokens\) = 61 tokens.*context is 60. Lower max_tokens to at most 10"),
    ],
)
def test_what_can_never_be_answered_is_refused_with_a_sentence(prompt, max_tokens: int, sentence: str) -> None:
    bench = Bench(max_context=60)
    with pytest.raises(RequestRefused, match=sentence):
        bench.add("bad", prompt, max_tokens)
    assert bench.step() is None


def test_a_request_larger_than_the_pool_is_refused_with_the_arithmetic() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    with pytest.raises(RequestRefused) as refusal:
        bench.add("big", 20, max_tokens=14)
    assert "needs 9 KV blocks of 4 tokens (20 prompt + 14 max_tokens - 1)" in str(refusal.value)
    assert "the replica has 8. Lower max_tokens to 13" in str(refusal.value)
    fits = bench.add("fits", 20, max_tokens=13)
    bench.run()
    assert_answered(fits)


def test_a_prompt_larger_than_the_pool_is_told_how_short_it_must_be() -> None:
    with pytest.raises(RequestRefused, match="Shorten the prompt to 32 tokens"):
        Bench(num_blocks=8, block_size=4).add("big", 40, max_tokens=1)


def test_an_id_in_use_is_refused() -> None:
    bench = Bench()
    bench.add("a", 3)
    with pytest.raises(ValueError, match="a is here already"):
        bench.add("a", 3)


def test_settings_that_cannot_hold_a_step_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 must be at least max_num_seqs 8"):
        SchedulerConfig(max_context=10, max_num_batched_tokens=4, max_num_seqs=8)
    with pytest.raises(ValueError, match="'nobody' is unknown: choose one of labkit, vllm"):
        SchedulerConfig(max_context=10, admission="nobody")


# ---- leaving early


def test_an_aborted_request_keeps_its_blocks_until_its_step_returns() -> None:
    bench = Bench()
    request = bench.add("a", 10, max_tokens=9)
    sent = bench.send()
    assert sent is not None
    bench.scheduler.abort("a")
    held = bench.pool.num_blocks - bench.pool.num_free
    assert held == 3 and request.phase is not Phase.FINISHED
    bench.scheduler.check_integrity()
    assert bench.scheduler.schedule() is None
    bench.scheduler.complete(*sent)
    bench.scheduler.check_integrity()
    assert bench.pool.num_free == bench.pool.num_blocks
    assert (request.output, request.finish_reason) == ([], FinishReason.ABORT)


def test_aborting_one_who_waits_or_is_unknown_or_gone_is_harmless() -> None:
    bench = Bench(max_num_seqs=1)
    stays, waits = bench.add("stays", 5), bench.add("waits", 5)
    bench.step()
    assert bench.scheduler.abort("waits") is waits
    assert bench.scheduler.abort("waits") is None
    assert bench.scheduler.abort("nobody") is None
    bench.run()
    assert_answered(stays)


def test_a_stop_string_counts_as_a_finished_answer() -> None:
    bench = Bench()
    for i in range(10):
        request = bench.add(f"s{i}", 4, max_tokens=100)
        for _ in range(3):
            bench.step()
        bench.scheduler.abort(request.id, FinishReason.STOP)
    assert bench.scheduler.ledger.expected_length.of(100) == 3


def test_everybody_taken_out_is_computed_again_elsewhere() -> None:
    bench, elsewhere = Bench(), Bench(num_blocks=40, block_size=8)
    requests = [bench.add(f"r{i}", 11, max_tokens=12) for i in range(10)]
    for _ in range(5):
        bench.step()
    moved = bench.scheduler.drain()
    bench.scheduler.check_integrity()
    assert moved == requests
    assert bench.pool.num_free == bench.pool.num_blocks
    for request in moved:
        elsewhere.scheduler.add(request)
    elsewhere.run()
    assert_answered(*requests)


# ---- several steps on their way


def test_with_two_steps_in_flight_a_sequence_decodes_in_one_of_them() -> None:
    bench = Bench(max_in_flight=2, num_blocks=100)
    requests = [bench.add(f"r{i}", 6, max_tokens=10) for i in range(4)]
    flights = []
    while bench.scheduler.requests:
        while (sent := bench.send()) is not None:
            flights.append(sent)
        assert 1 <= len(flights) <= 2
        decodes = [request for plan, _ in flights for request in plan.decodes]
        assert len(decodes) == len(set(decodes))
        bench.scheduler.complete(*flights.pop(0))
        bench.scheduler.check_integrity()
    assert_answered(*requests)


def test_with_two_steps_in_flight_chunks_of_one_prompt_follow_each_other() -> None:
    bench = Bench(max_in_flight=2, max_num_batched_tokens=8)
    request = bench.add("long", 20, max_tokens=3)
    first, second = bench.send(), bench.send()
    assert first is not None and second is not None
    assert (first[0].ends, second[0].ends) == ([8], [16])
    assert request.in_flight == 2
    bench.scheduler.complete(*first)
    bench.scheduler.complete(*second)
    bench.run()
    assert_answered(request)


# ---- what a router sees


def test_load_is_the_tokens_still_to_compute() -> None:
    bench = Bench(max_num_batched_tokens=16, prefix_cache=False)
    bench.add("a", 20, max_tokens=5)
    assert bench.scheduler.load_tokens == 24
    bench.step()
    assert bench.scheduler.load_tokens == 8
    bench.step()
    assert bench.scheduler.load_tokens == 4
    bench.run()


def test_a_view_counts_promised_blocks_as_taken_and_what_is_cached() -> None:
    bench = Bench(num_blocks=16, block_size=4)
    prompt = numbers("a", 10)
    bench.add("a", prompt, max_tokens=23)
    bench.step()
    view = bench.scheduler.view(tuple(prompt))
    assert view.free_tokens == (16 - 8) * 4
    assert view.cached_tokens == 8


# ---- everything at once


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    admission=st.sampled_from(["labkit", "vllm"]),
    max_in_flight=st.integers(1, 3),
    budget=st.sampled_from([8, 16, 40]),
    prefix_cache=st.booleans(),
)
def test_whatever_is_asked_and_aborted_every_answer_is_its_own(
    seed: int, admission: str, max_in_flight: int, budget: int, prefix_cache: bool
) -> None:
    draw = random.Random(seed)
    bench = Bench(
        num_blocks=14,
        block_size=4,
        prefix_cache=prefix_cache,
        admission=admission,
        max_in_flight=max_in_flight,
        max_num_batched_tokens=budget,
    )
    prefixes = [numbers(f"prefix{i}", 4 * i) for i in range(4)]
    requests, flights = [], []
    while len(requests) < 25 or bench.scheduler.requests:
        if len(requests) < 25 and draw.random() < 0.4:
            prompt = draw.choice(prefixes) + numbers(f"{seed}-{len(requests)}", draw.randrange(1, 12))
            requests.append(bench.add(f"r{len(requests)}", prompt, draw.randrange(1, 25)))
        if requests and draw.random() < 0.05:
            bench.scheduler.abort(draw.choice(requests).id)
        if (sent := bench.send()) is not None:
            flights.append(sent)
        if flights and (sent is None or draw.random() < 0.5):
            bench.scheduler.complete(*flights.pop(0))
            bench.scheduler.check_integrity()
    assert bench.pool.num_free == bench.pool.num_blocks
    assert_answered(*[request for request in requests if request.finish_reason is not FinishReason.ABORT])


# ---- the message


def test_a_message_carries_the_step_whole() -> None:
    bench = Bench(block_size=4)
    first = bench.add("a", [5, 6, 7, 8, 9], max_tokens=9, temperature=0.5, top_p=0.9, top_k=3, seed=4, logprobs=2)
    bench.step()
    second = bench.add("b", [1, 2, 3], max_tokens=9, temperature=0.0)
    plan = bench.scheduler.schedule()
    assert plan is not None
    step = messages.decode_engine_message(messages.encode(plan.to_message(3, 17)))
    assert isinstance(step, messages.Step)
    assert (step.epoch, step.step_id, step.num_prefill_seqs) == (3, 17, 1)
    assert list(array("i", step.token_ids)) == [1, 2, 3, first.output[-1]]
    assert list(array("i", step.query_lens)) == [3, 1]
    assert list(array("i", step.context_lens)) == [0, 5]
    assert list(array("i", step.block_tables)) == [*second.blocks, *first.blocks]
    greedy, sampled = step.sample
    assert (greedy.index, greedy.temperature, greedy.position, greedy.logprobs) == (0, 0.0, 0, -1)
    assert (sampled.index, sampled.temperature, sampled.position, sampled.logprobs) == (1, 0.5, 1, 2)
    assert (sampled.top_p, sampled.top_k) == (0.9, 3)


def test_a_step_of_eight_costs_under_a_hundred_microseconds() -> None:
    bench = Bench(num_blocks=2000, block_size=16, max_num_batched_tokens=512, max_context=4096)
    for i in range(8):
        bench.add(f"r{i}", 160, max_tokens=400)
    scheduler, costs_us = bench.scheduler, []
    for step_id in range(300):
        began = time.perf_counter_ns()
        plan = scheduler.schedule()
        assert plan is not None
        messages.encode(plan.to_message(0, step_id))
        scheduler.complete(plan, [1] * len(plan.sampled))
        costs_us.append((time.perf_counter_ns() - began) / 1000)
    assert sorted(costs_us)[len(costs_us) // 2] < 100
