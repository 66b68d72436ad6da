"""The cost of a step: rooflines by hand, and what must be larger than what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.layout import Layout, LayoutError
from labkit.model.spec import load_spec
from labkit.plan.closed_loop import closed_loop, decode_work, prefill_work
from labkit.plan.cost import RooflineCost, largest_graph, step_cost
from labkit.plan.engine_cost import graph_padding
from labkit.plan.hardware import load_hardware
from labkit.plan.work import EngineSettings, StepWork

SETTINGS = EngineSettings()


def cost(layout: str, model: str = "llama-3.1-70b", gpus: str = "8xh100", **options) -> RooflineCost:
    found = step_cost(Layout.parse(layout), load_spec(model), load_hardware(gpus), SETTINGS, **options)
    assert isinstance(found, RooflineCost)
    return found


def decode(num_seqs: int, context: int) -> StepWork:
    return decode_work(num_seqs, context, 1e9)


def prefill(num_tokens: int) -> StepWork:
    return prefill_work(num_tokens, 1, 1, 1e9, 0, 0)


def test_decode_reads_the_weights_once_by_hand() -> None:
    one = cost("tp1", "llama-3.1-8b")
    spec, constants = load_spec("llama-3.1-8b"), one.constants
    layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4096
    memory = 2 * layers / (3.35e12 * constants.weight_efficiency)
    compute = 2 * (layers - 32 * 2 * 4096 - 4096) / (989.4e12 * constants.matrix_efficiency)
    expected = (memory**constants.corner + compute**constants.corner) ** (1 / constants.corner)
    parts = one.parts(decode(1, 1000))
    assert parts["matrices"] == pytest.approx(expected, rel=1e-6)
    kv = 1000 * spec.kv_bytes_per_token(2) / (3.35e12 * constants.kv_efficiency)
    assert parts["kv"] == pytest.approx(kv, rel=1e-6)


def test_prefill_attention_by_hand() -> None:
    one = cost("tp2")
    pairs = 4096 * 4097 / 2
    operations = pairs * 80 * 2 * 32 * (128 + 128)  # layers · multiply-add · heads of the rank · (keys + values)
    expected = operations / (989.4e12 * one.constants.attention_efficiency)
    assert one.parts(prefill(4096))["attention"] == pytest.approx(expected, rel=1e-6)


def test_parts_add_up_and_a_pipeline_is_its_stages() -> None:
    for layout in ("tp1", "tp8", "pp2xtp4", "pcp2xtp4", "tp8+sp", "dp2xtp4"):
        found, work = cost(layout), prefill_work(2048, 1, 1, 1e9, 16, 1000)
        assert sum(found.parts(work).values()) == pytest.approx(found.seconds(work))
    staged = cost("pp2xtp4")
    assert staged.interval(prefill(4096)) < 0.6 * staged.seconds(prefill(4096))
    assert cost("tp8").interval(prefill(64)) == cost("tp8").seconds(prefill(64))


@pytest.mark.parametrize("model", ["llama-3.1-70b", "qwen3-235b-a22b", "deepseek-v3"])
def test_more_work_takes_longer(model: str) -> None:
    found = cost("tp8", model)
    for small, large in [
        (decode(1, 1000), decode(64, 1000)), (decode(16, 1000), decode(16, 30_000)), (prefill(512), prefill(4096)),
    ]:  # fmt: skip
        assert found.seconds(small) < found.seconds(large)
    with_decodes = prefill_work(1024, 1, 1, 1e9, 32, 1000)
    assert found.seconds(with_decodes) > max(found.seconds(prefill(1024)), found.seconds(decode(32, 1000)))


def test_decode_is_affine_in_the_context() -> None:
    found = cost("tp8", "deepseek-v3")
    near, middle, far = (found.seconds(decode(16, context)) for context in (1000, 2000, 3000))
    assert middle == pytest.approx((near + far) / 2)


def test_layouts_against_each_other() -> None:
    long, short = prefill(32_768), decode(8, 1000)
    assert cost("tp8").seconds(long) < cost("tp4").seconds(long) < cost("tp2").seconds(long)
    assert cost("tp8").seconds(short) < cost("tp2").seconds(short)
    assert cost("pcp2xtp4").seconds(long) < cost("tp4").seconds(long)
    nvlink, pcie = (cost("tp4", gpus=f"4xh100{end}").parts(long)["tp"] for end in ("", "-pcie"))
    assert pcie > 5 * nvlink
    assert cost("tp8", "deepseek-v3").seconds(decode(1, 1000)) < cost("tp8", "deepseek-v3").seconds(decode(64, 1000))
    even, skewed = (cost("tp8xep8", "deepseek-v3", skew=skew) for skew in (1.0, 2.0))
    assert skewed.parts(decode(64, 1000))["experts"] == pytest.approx(2 * even.parts(decode(64, 1000))["experts"])


def test_dcp_reads_a_share_of_the_context_and_merges() -> None:
    plain, shared = cost("tp8", "deepseek-v3"), cost("tp8xdcp8", "deepseek-v3")
    assert shared.parts(decode(64, 50_000))["kv"] == pytest.approx(plain.parts(decode(64, 50_000))["kv"] / 8, rel=0.01)
    assert "dcp" in shared.parts(decode(64, 1000)) and "dcp" not in shared.parts(prefill(1000))


def test_handoff_moves_what_a_token_leaves() -> None:
    found, link = cost("tp4"), load_hardware("8xh100").fast
    assert link is not None
    each = load_spec("llama-3.1-70b").kv_bytes_per_token(2) / 4
    expected = link.message_latency_s.value + 1000 * each / link.message_bandwidth.value
    assert found.handoff_seconds(1000) == pytest.approx(expected)


def test_refusals_are_sentences() -> None:
    with pytest.raises(LayoutError):
        cost("tp3")
    with pytest.raises(ValueError, match="needs 8 GPUs"):
        cost("tp8", gpus="4xh100")
    with pytest.raises(ValueError, match="no engine"):
        cost("tp4", engine="llama.cpp")
    with pytest.raises(ValueError, match="skew"):
        cost("tp4", skew=0.5)
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        step_cost(
            Layout.parse("tp4"), load_spec("llama-3.1-70b"), load_hardware("8xh100"),
            replace(SETTINGS, kv_cache_dtype="int3"),
        )  # fmt: skip


def test_a_closed_loop_of_one_is_prefill_and_decodes() -> None:
    def seconds(work: StepWork) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens

    loop = closed_loop(
        seconds, prompt=1000.0, output=101.0, requests=1.0, budget=8192, window=1e9, request_s=0.0, queue_share=0.5
    )
    assert loop.tpot_s == pytest.approx(0.01)
    assert loop.ttft_s == pytest.approx(0.11 + 0.005)  # the chunk, and half of a step under way
    many = closed_loop(
        seconds, prompt=1000.0, output=101.0, requests=8.0, budget=8192, window=1e9, request_s=0.0, queue_share=0.5
    )
    life = many.ttft_s + 100 * many.tpot_s
    assert many.tpot_s == pytest.approx(0.01 + 7 * 0.1 * (1 - many.ttft_s / life) / 100, rel=0.02)
    assert many.ttft_s > loop.ttft_s


@pytest.mark.parametrize(
    ("model", "layout"), [("llama-3.1-70b", "tp8"), ("deepseek-v3", "dp2xtp4xep8"), ("gpt-oss-120b", "pp2xtp2")]
)
def test_the_quick_form_is_the_readable_one(model: str, layout: str) -> None:
    found = cost(layout, model, gpus="8xh200")
    mixed = prefill_work(2048, 1, 2, 128, 16, 1000)
    uneven = replace(mixed, shared_rows=400.0)
    for work in (decode(1, 10), decode(48, 3000), prefill(300), prefill(700), mixed, uneven, StepWork()):
        assert found.seconds(work) == pytest.approx(sum(found.parts(work).values()), rel=1e-9)


def test_under_attention_dp_engines_gather_every_token_once() -> None:
    spec, gpus = load_spec("qwen3-30b-a3b"), "2xrtxpro6000"
    found = cost("dp2xep2", "qwen3-30b-a3b", gpus)
    (ep,) = found.shapes[0].axes
    link, row = load_hardware(gpus).inside, spec.hidden_size * 2
    there_and_back = (row + 8 * spec.moe.top_k) + row  # one other rank: a token out, and its sums in
    assert ep.prefill_token_s == pytest.approx(spec.num_layers * there_and_back / link.bandwidth.value, rel=1e-6)
    assert ep.decode_token_s == ep.prefill_token_s and ep.gathered_from == 1
    (exchange,) = cost("dp2xep2", "qwen3-30b-a3b", gpus, engine="labkit").shapes[0].axes
    assert exchange.prefill_token_s > 3.5 * ep.prefill_token_s and not exchange.gathered_from  # top-8, half stays


def test_experts_compute_for_the_mean_replica() -> None:
    found = cost("dp2xep2", "qwen3-30b-a3b", "2xrtxpro6000")
    alike = prefill(2000)
    alone = found.parts(replace(alike, shared_rows=1000.0))
    full = found.parts(alike)
    assert alone["experts"] == pytest.approx(found.parts(prefill(1000))["experts"])
    assert alone["ep"] == pytest.approx(full["ep"])  # the other receives all of it
    assert alone["matrices"] == full["matrices"] and alone["attention"] == full["attention"]
    assert found.parts(replace(alike, shared_rows=2000.0)) == full
    wide = cost("dp8xep8", "qwen3-30b-a3b")
    latency = wide.shapes[0].axes[0].both_latency_s
    few, many = (wide.parts(replace(alike, shared_rows=mean))["ep"] - latency for mean in (250.0, 2000.0))
    assert few == pytest.approx(many / 7)  # one busy replica of eight sends its own, where else seven would come


def test_graphs_cover_twice_the_sequences_up_to_a_limit() -> None:
    assert largest_graph("vllm", replace(SETTINGS, max_num_seqs=128)) == 256
    assert largest_graph("vllm", replace(SETTINGS, max_num_seqs=1024)) == 512
    assert largest_graph("vllm", replace(SETTINGS, cuda_graphs=False)) == largest_graph("trtllm", SETTINGS) == 0
    few, many = (
        step_cost(
            Layout.parse("tp1"), load_spec("llama-3.1-8b"), load_hardware("1xh100"), replace(SETTINGS, max_num_seqs=num)
        ).seconds(prefill(300))
        for num in (128, 256)
    )
    assert few > many  # launched from the host, or replayed


def test_a_gpu_that_holds_its_clock_multiplies_faster_than_its_datasheet_says() -> None:
    assert load_hardware("1xh100").device.sustained == load_hardware("1xh200").device.sustained == 1.0
    geforce = load_hardware("1xrtx4090").device
    assert geforce.sustained == pytest.approx(178.8 / 165.2 / (821.2 / 989.4))
    shape = cost("tp1", "llama-3.1-8b", "1xrtx4090").shapes[0]
    assert shape.dense_rate == shape.attention_rate == pytest.approx(165.2e12 * geforce.sustained)
    assert load_hardware("1xl40s").device.sustained < 1


def test_a_graph_computes_the_rows_of_its_captured_size() -> None:
    rows = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 8: 8, 9: 16, 247: 248, 249: 256, 256: 256, 257: 272, 512: 512}
    assert {each: each + graph_padding(each, 512) for each in rows} == rows
    assert graph_padding(0, 512) == graph_padding(513, 512) == graph_padding(5, 0) == 0
    found = cost("tp2", "qwen3-30b-a3b")
    at_65, at_72 = (found.parts(decode(num, 1000)) for num in (65, 72))
    assert {part for part in at_65 if at_65[part] == at_72[part]} >= {"experts", "matrices", "elementwise"}
    assert at_72["tp"] - at_65["tp"] < 1e-5  # logits, of real ones only
    assert at_65["overhead"] < at_72["overhead"] and at_65["kv"] < at_72["kv"]  # what is done for real ones only
    eager = cost("tp2", "qwen3-30b-a3b", graph_tokens=0)
    assert eager.parts(decode(65, 1000))["experts"] < at_65["experts"]


def test_graphs_pad_all_replicas_to_the_largest_or_none() -> None:
    found = cost("dp2xep2", "qwen3-30b-a3b")
    assert found.shared_rows([65, 20]) == 72
    assert found.shared_rows([600, 20]) == 310  # no graph is that large: nobody is padded
    alone, padded = (found.parts(replace(decode(65, 1000), shared_rows=rows)) for rows in (42.5, 72.0))
    alike = found.parts(decode(65, 1000))
    assert padded["ep"] == pytest.approx(alike["ep"]) and padded["experts"] == pytest.approx(alike["experts"])
    assert alone["ep"] < alike["ep"] and alone["experts"] < alike["experts"]
