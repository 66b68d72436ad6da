"""Every rank of a layout by hand: weights, copies, what is beside them; and the two answers that must not be mixed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.layout import Layout, legal_layouts, rank_memory, read_layout
from labkit.model.spec import ModelSpec, Quantization, load_spec, with_precision
from labkit.plan.memory import MemoryPlan, memory_plan
from labkit.plan.work import EngineSettings

H100, H200 = 85_000_000_000, 150_000_000_000
SETTINGS = EngineSettings()


def plan(model: str | ModelSpec, layout: str, memory: int = H100, **changes: object) -> MemoryPlan:
    spec = load_spec(model) if isinstance(model, str) else model
    return memory_plan(read_layout(layout), spec, memory, replace(SETTINGS, **changes))  # type: ignore[arg-type]


# ---- weights


def test_two_ranks_share_a_dense_model_by_hand() -> None:
    ranks = plan("llama-3.1-8b", "tp2").ranks
    half_layer = 4096 * (4096 + 1024 + 1024 + 4096) // 2 + 3 * 4096 * 14336 // 2
    norms = (2 * 32 + 1) * 4096
    assert [rank.weight_bytes for rank in ranks] == [2 * (32 * half_layer + norms + 2 * 128_256 * 4096 // 2)] * 2
    assert [rank.replicated for rank in ranks] == [2 * norms] * 2


def test_copies_of_kv_heads_are_replicated() -> None:
    spec = load_spec("llama-3.1-8b")
    rank = plan(spec, "tp16").ranks[5]
    kv_copy = 2 * 32 * 2 * 4096 * 128  # each of 8 KV heads on two ranks
    assert rank.replicated == 2 * (2 * 32 + 1) * 4096 + kv_copy


def test_stages_hold_their_own_ends() -> None:
    first, last = plan("llama-3.1-8b", "pp2").ranks
    assert "head" not in first.weights and "embedding" not in last.weights
    assert first.weights["embedding"] == last.weights["head"] == 2 * 128_256 * 4096
    assert first.weight_bytes + last.weight_bytes == 16_060_522_496


def test_experts_are_shared_out_whole() -> None:
    spec = load_spec("qwen3-30b-a3b")
    one = plan(spec, "tp1").ranks[0].weights["experts"]
    for layout in ("tp4xep4", "dp4xep4", "tp4"):
        assert {rank.weights["experts"] for rank in plan(spec, layout).ranks} == {one // 4}
    assert plan(spec, "dp4xep4").ranks[0].weights["attention"] == plan(spec, "tp1").ranks[0].weights["attention"]


def test_latent_attention_keeps_its_low_ranks_everywhere() -> None:
    rank = plan("deepseek-v3", "tp8", H200).ranks[0]
    down = 61 * ((1536 + 576) * 7168 + 4 * (12 + 5) * 56)  # fp8 with a 4-byte scale for 128 × 128
    assert rank.replicated > down
    assert rank.weights["attention"] > down


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-120b", "deepseek-v3"])
def test_ranks_of_a_replica_hold_the_model_and_no_less(model: str) -> None:
    spec = load_spec(model)
    whole = sum(rank_memory(Layout(), spec, 0, spec.dtype_bytes).values())
    layouts = [layout for layout in legal_layouts(spec, 8) if layout.dp == 1]
    assert len(layouts) > 10
    for layout in layouts:
        ranks = memory_plan(layout, spec, H200, SETTINGS).ranks
        held = sum(rank.weight_bytes for rank in ranks)
        assert held >= whole * 0.999_99  # a scale a tensor is split with it
        assert held - sum(rank.replicated for rank in ranks) <= whole * 1.07


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2", "tp2xpp2", "pcp2"])
def test_parts_of_a_rank_add_up_to_the_memory(layout: str) -> None:
    for rank in plan("llama-3.1-8b", layout).ranks:
        assert rank.weight_bytes + rank.beside + rank.kv + rank.free == H100
        assert rank.free >= 0


def test_tp2_does_not_halve_everything() -> None:
    one, two = (plan("llama-3.1-8b", layout, max_num_seqs=1024).ranks[0] for layout in ("tp1", "tp2"))
    assert two.weights["attention"] * 2 == one.weights["attention"]
    assert two.weights["norm"] == one.weights["norm"]
    assert two.activations == one.activations  # logits are whole on every rank
    assert two.communicators > one.communicators == 0
    assert one.weight_bytes / two.weight_bytes < 2


def test_fewer_bits_leave_room() -> None:
    spec = load_spec("llama-3.1-70b")
    blocks = [plan(with_precision(spec, p), "tp4").kv_blocks for p in ("bf16", "fp8", "int4")]
    assert blocks[0] < blocks[1] < blocks[2]


def test_groups_of_int4_stay_whole() -> None:
    spec = replace(load_spec("llama-3.1-8b"), quantization=Quantization("int4", 4, (1, 1024)))
    assert plan(spec, "tp2").fits
    refused = plan(spec, "tp4")
    assert not refused.fits and refused.kv_blocks == 0
    assert "a quantisation group would be cut" in refused.reason and refused.reason.startswith("TP4 is not allowed")


def test_a_block_of_fp8_stays_whole() -> None:
    """vLLM refuses it as well: 192 "is not divisible by weight quantization block_n = 128"."""
    assert "÷ fp8 group 128 = 1.5" in plan("MiniMaxAI/MiniMax-M2.5", "tp8", H200).reason
    assert plan("MiniMaxAI/MiniMax-M2.5", "tp8xep8", H200).fits


# ---- KV


def test_dcp_shares_the_cache_of_copies_out() -> None:
    plain, shared = (plan("deepseek-v3", layout, H200) for layout in ("tp8", "tp8xdcp8"))
    assert shared.kv_tokens / plain.kv_tokens == pytest.approx(8, rel=0.01)
    assert shared.block_bytes * 8 == plain.block_bytes


def test_the_tightest_stage_decides() -> None:
    even = plan("llama-3.1-70b", "pp2+split=40-40", H200)
    uneven = plan("llama-3.1-70b", "pp2+split=30-50", H200)
    assert uneven.kv_blocks < even.kv_blocks
    assert uneven.ranks[0].free > uneven.ranks[1].free


def test_replicas_add_requests_not_blocks() -> None:
    one, two = plan("llama-3.1-8b", "tp1"), plan("llama-3.1-8b", "dp2")
    assert one.kv_blocks == two.kv_blocks
    assert two.most_requests(2000) == 2 * one.most_requests(2000)


def test_pools_answer_with_what_decodes() -> None:
    both = plan("llama-3.1-8b", "prefill:tp1,decode:tp2")
    alone = plan("llama-3.1-8b", "tp2")
    assert both.kv_blocks == alone.kv_blocks and both.most_requests(4000) == alone.most_requests(4000)
    assert [rank.rank for rank in both.ranks] == [0, 1, 2]


def test_tp_lifts_a_starved_cache_far_more_than_it_adds_gpus() -> None:
    """Published: Llama-3.1-70B in fp8 on one H100 makes 410 tokens/s and on two 4,116."""
    spec = with_precision(load_spec("llama-3.1-70b"), "fp8")
    small = EngineSettings(max_num_seqs=256, max_num_batched_tokens=2048)
    one, two = (memory_plan(Layout(tp=tp), spec, H100, small) for tp in (1, 2))
    assert two.kv_tokens > 10 * one.kv_tokens


# ---- the two answers


def test_what_does_not_fit_says_by_how_much() -> None:
    answer = plan("llama-3.1-70b", "tp1").verdict(1, 1000)
    assert answer.answer == "does not fit" and answer.most == 0
    assert str(answer).startswith("llama-3.1-70b does not fit TP1: weights 141.1 GB and ")
    assert "GB too little. Share it over more ranks or take fewer bits." in str(answer)


def test_what_queues_says_how_many_wait() -> None:
    held = plan("llama-3.1-8b", "tp1")
    most = held.most_requests(32_000)
    assert held.verdict(most, 32_000).answer == "fits"
    queued = held.verdict(2 * most, 32_000)
    assert (queued.answer, queued.most) == ("will queue", most)
    assert f"so of {2 * most} {most} wait" in str(queued) and "TTFT grows by about 1 of an answer's time" in str(queued)
    assert most * held.blocks_each(32_000) < held.kv_blocks <= (most + 1) * held.blocks_each(32_000)


def test_a_limit_of_the_scheduler_queues_too() -> None:
    answer = plan("llama-3.1-8b", "tp1", max_num_seqs=8).verdict(20, 1000)
    assert answer.answer == "will queue" and "raise max_num_seqs" in str(answer)


def test_one_request_that_is_too_long_does_not_fit() -> None:
    answer = plan("llama-3.1-8b", "tp1", 25_000_000_000).verdict(1, 130_000)
    assert answer.answer == "does not fit" and "shorten requests to" in str(answer)


def test_a_context_that_must_fit_is_asked_for() -> None:
    held = plan("llama-3.1-8b", "tp1", 25_000_000_000, max_model_len=131_072)
    assert not held.fits and "a request of 131,072 tokens needs 8,192" in held.reason
    assert plan("llama-3.1-8b", "tp1", 25_000_000_000).fits


# ---- the lab's own engine


def test_the_labs_engine_takes_its_budget_for_weights_and_blocks() -> None:
    spec = load_spec("lab-5m")
    weights = sum(rank_memory(Layout(), spec, 0, 4).values()) + 4 * spec.vocab_size * spec.hidden_size  # tied, twice
    block = 16 * spec.kv_bytes_per_token(4)
    held = plan(spec, "tp1", weights + 11 * block, policy="labkit", max_num_seqs=16)
    assert (held.block_bytes, held.kv_blocks) == (block, 10)  # one to spare
    roomy = plan(spec, "tp1", 10**9, policy="labkit", max_num_seqs=4)
    assert roomy.kv_blocks == 4 * 8192 // 16  # never more than full sequences need
