"""What the scheduler does with KV blocks: prefixes taken over, preemption, and who is let in."""

from __future__ import annotations

import pytest
from bench import Bench, assert_answered, numbers

from labkit.engine.admission import ExpectedLength
from labkit.engine.request import Phase

# ---- prefix cache


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 12])
def test_a_prompt_found_whole_in_the_cache_still_computes_its_last_token(length: int) -> None:
    bench = Bench(block_size=4)
    prompt = numbers("p", length)
    bench.add("first", prompt)
    bench.run()
    again = bench.add("again", prompt)
    plan = bench.step()
    assert plan is not None and plan.sampled == [again]
    assert again.num_cached == (length - 1) // 4 * 4
    assert plan.chunks == [length - again.num_cached]
    bench.run()
    assert_answered(again)


def test_a_shared_prefix_survives_the_one_who_made_it() -> None:
    bench = Bench(num_blocks=12, block_size=4)
    prefix = numbers("shared", 16)
    maker = bench.add("maker", [*prefix, 1], max_tokens=2)
    bench.step()
    user = bench.add("user", [*prefix, 2], max_tokens=12)
    bench.step()
    assert user.num_cached == 16
    assert_answered(maker)
    other = bench.add("other", 16, max_tokens=3)  # wants blocks while the prefix is in use
    bench.run()
    assert_answered(user, other)


def test_the_cache_knows_answers_as_well_as_prompts() -> None:
    bench = Bench(block_size=4)
    first = bench.add("first", 8, max_tokens=9)
    bench.run()
    follow_up = bench.add("next", [*first.prompt, *first.output, 5], max_tokens=3)
    bench.run()
    assert follow_up.num_cached == 16
    assert_answered(follow_up)


def test_without_the_prefix_cache_nothing_is_reused() -> None:
    bench = Bench(prefix_cache=False)
    prompt = numbers("p", 12)
    requests = [bench.add("a", prompt), bench.add("b", prompt)]
    bench.run()
    assert [request.num_cached for request in requests] == [0, 0]
    assert_answered(*requests)


# ---- memory runs out


def test_the_latest_arrival_gives_way_and_comes_back_with_its_answer_whole() -> None:
    bench = Bench(num_blocks=9, block_size=4, admission="vllm")
    early, late = bench.add("early", 12, max_tokens=20), bench.add("late", 12, max_tokens=16)
    bench.run()
    assert early.num_preemptions == 0
    assert late.num_preemptions > 0
    assert_answered(early, late)


def test_a_preempted_request_is_in_prefill_when_it_returns_with_a_prefix_hit() -> None:
    bench = Bench(num_blocks=9, block_size=4, admission="vllm")
    bench.add("early", 12, max_tokens=20)
    late = bench.add("late", 12, max_tokens=16)
    while not late.num_preemptions:
        bench.step()
    assert late.phase is Phase.WAITING and len(late.output) > 1 and late.num_computed == 0
    bench.scheduler.abort("early")
    plan = bench.step()
    assert plan is not None and plan.prefills == [late] and plan.decodes == []
    assert late.num_cached > 0
    assert plan.ends == [late.num_computed]
    bench.run()
    assert_answered(late)


def test_a_preempted_request_that_returns_in_several_chunks_decodes_only_after_the_last() -> None:
    bench = Bench(9, 4, prefix_cache=False, admission="vllm", max_num_batched_tokens=8)
    bench.add("early", 12, max_tokens=20)
    late = bench.add("late", 12, max_tokens=16)
    while not late.num_preemptions:
        bench.step()
    bench.scheduler.abort("early")
    before, plans = len(late.output), []
    while len(late.output) == before:
        plans.append(bench.step())
        assert late.phase is (Phase.DECODE if len(late.output) > before else Phase.PREFILL)
    assert all(plan is not None and late not in plan.decodes for plan in plans) and len(plans) > 1
    bench.run()
    assert_answered(late)


def test_a_preempted_request_returns_before_those_who_came_after_it() -> None:
    bench = Bench(num_blocks=9, block_size=4, admission="vllm", max_num_seqs=2)
    early, late = bench.add("early", 12, max_tokens=20), bench.add("late", 12, max_tokens=16)
    bench.step()
    after = bench.add("after", 4, max_tokens=2)
    while not late.num_preemptions:
        bench.step()
    assert list(bench.scheduler.waiting) == [late, after]
    bench.run()
    assert_answered(early, late, after)


def test_who_gave_up_blocks_does_not_take_them_back_in_the_same_step() -> None:
    bench = Bench(9, 4, prefix_cache=False, admission="vllm", max_num_batched_tokens=8)
    early, late = bench.add("early", 12, max_tokens=20), bench.add("late", 12, max_tokens=16)
    while not late.num_preemptions:
        plan = bench.step()
    assert plan is not None and plan.requests == [early]
    bench.run()
    assert_answered(early, late)


def test_a_found_prefix_that_nobody_holds_takes_room_when_it_is_held() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    prefix = numbers("prefix", 16)
    bench.add("maker", [*prefix, 1], max_tokens=1)
    bench.run()
    holder = bench.add("holder", 8, max_tokens=5)  # 3 of 8 blocks; 4 of the other 5 are the prefix
    bench.step()
    waits = bench.add("waits", [*prefix, 2, 3, 4], max_tokens=6)  # the prefix and 2 more
    bench.step()
    assert waits.phase is Phase.WAITING
    bench.run()
    assert waits.num_cached == 16
    assert_answered(holder, waits)


def test_reservation_avoids_the_preemptions_that_its_absence_causes() -> None:
    num_preemptions = {}
    for admission in ("labkit", "vllm"):
        bench = Bench(num_blocks=20, block_size=4, admission=admission)
        requests = [bench.add(f"r{i}", 8, max_tokens=24) for i in range(8)]
        bench.run()
        assert_answered(*requests)
        num_preemptions[admission] = bench.scheduler.num_preemptions
    assert num_preemptions["labkit"] == 0
    assert num_preemptions["vllm"] > 0


def test_admission_reserves_the_expected_length_and_no_more() -> None:
    bench = Bench(num_blocks=16, block_size=4)
    for i in range(10):
        bench.add(f"warm{i}", 4, max_tokens=5)
        bench.run()
    requests = [bench.add(f"r{i}", 4, max_tokens=40) for i in range(4)]
    bench.step()
    # 4 + 5 - 1 = 8 tokens are expected of each: all four are let in, though 43 tokens each could be needed.
    assert bench.scheduler.num_running == 4
    assert [request.expected_tokens for request in requests] == [8] * 4
    bench.run()
    assert_answered(*requests)


def test_an_answer_that_outlives_its_expectation_is_expected_to_last_another_block() -> None:
    bench = Bench(num_blocks=64, block_size=4)
    for i in range(10):
        bench.add(f"warm{i}", 4, max_tokens=1)
        bench.run()
    request = bench.add("long", 4, max_tokens=12)
    seen = []
    while bench.step() is not None:
        seen.append((request.num_computed, request.expected_tokens))
    assert seen[0] == (4, 4)
    assert [expected for _, expected in seen[1:-1]] == [8] * 4 + [12] * 4 + [15] * 2
    assert_answered(request)


def test_only_answers_that_finished_are_expected_of_others() -> None:
    bench = Bench()
    for i in range(12):
        bench.add(f"gone{i}", 4, max_tokens=50)
        bench.step()
        bench.scheduler.abort(f"gone{i}")
    assert bench.scheduler.ledger.expected_length.of(50) == 50


def test_the_expected_length_is_the_p90_of_the_last_256() -> None:
    expected = ExpectedLength()
    for length in range(1, 10):
        expected.observe(length)
    assert expected.of(1000) == 1000  # nine answers are too few
    expected.observe(10)
    assert expected.of(1000) == 9
    assert expected.of(4) == 4
    for _ in range(256):
        expected.observe(100)
    assert expected.of(1000) == 100


def test_a_waiting_request_is_let_in_once_blocks_are_back() -> None:
    bench = Bench(num_blocks=8, block_size=4)
    first, second = bench.add("a", 16, max_tokens=8), bench.add("b", 16, max_tokens=8)
    bench.step()
    assert second.phase is Phase.WAITING
    bench.run()
    assert_answered(first, second)
    assert bench.scheduler.num_preemptions == 0
