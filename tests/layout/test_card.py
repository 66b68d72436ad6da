"""The five questions: figures worked out by hand for small steps, and laws that hold for any legal layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cut_models import DENSE, LATENT, MIXTRAL, MOE, SPECS

from labkit.layout import (
    AxisCard,
    Crossing,
    Layout,
    StepShape,
    holdings,
    legal_layouts,
    rank_memory,
    step_card,
    step_work,
)
from labkit.layout.card import with_and_without
from labkit.layout.work import touched_experts
from labkit.model.spec import ModelSpec, load_spec

LAB = load_spec("lab-30m")
DECODE = StepShape(decode_seqs=8, context_tokens=160)
MIXED = StepShape(prefill_tokens=128, decode_seqs=8, context_tokens=160)


def card(layout: Layout, axis: str, spec: ModelSpec = LAB, step: StepShape = DECODE) -> AxisCard:
    return {c.axis: c for c in step_card(layout, spec, step, 4)}[axis]


def ops(of: AxisCard) -> list[tuple[str, int, int]]:
    return [(op.operation, op.count, op.bytes_each) for op in of.ops]


def test_one_rank_has_no_card() -> None:
    assert step_card(Layout(), LAB, DECODE) == []


def test_tp_halves_the_large_parts_keeps_norms_and_sums_twice_a_layer() -> None:
    tp = card(Layout(tp=2), "tp")
    assert {share.part for share in tp.partitioned} == {"embedding", "attention", "mlp", "kv"}
    assert all(share.with_bytes * 2 == share.without_bytes for share in tp.partitioned)
    assert [(share.part, share.copies) for share in tp.replicated] == [("norm", 2.0)]
    hidden_states = 8 * 512 * 4
    assert ops(tp) == [
        ("all_reduce", 16, hidden_states),
        ("all_reduce", 1, hidden_states),
        ("gather", 1, 8 * 4096 * 4),
    ]
    assert {i.quantity for i in tp.improves} == {
        "rank_weight_bytes",
        "rank_kv_bytes",
        "step_read_bytes",
        "step_flops",
    }
    assert tp.costs == ()


def test_sequence_parallel_norms_split_each_sum_in_two_halves_of_the_same_traffic() -> None:
    plain, parallel = card(Layout(tp=2), "tp"), card(Layout(tp=2, sp=True), "tp")
    assert [op.operation for op in parallel.ops] == ["reduce_scatter", "all_gather", "gather"]
    assert parallel.wire_bytes == plain.wire_bytes


def test_more_ranks_than_kv_heads_leave_copies_of_the_cache() -> None:
    shares = {share.part: share for share in card(Layout(tp=8), "tp").partitioned}
    assert shares["kv"].copies == 2.0
    assert shares["mlp"].copies == 1.0
    assert 1 < shares["attention"].copies < 2, "keys and values are there twice, queries and output once"


def test_dp_copies_every_weight_and_says_nothing() -> None:
    dp = card(Layout(dp=2), "dp")
    assert dp.partitioned == () and dp.ops == ()
    assert {share.copies for share in dp.replicated} == {2.0}
    assert [(i.quantity, i.without, i.with_axis) for i in dp.improves] == [("num_replicas", 1, 2)]


def test_pp_sends_hidden_states_and_keeps_a_tied_embedding_twice() -> None:
    pp = card(Layout(pp=2), "pp", step=MIXED)
    assert ops(pp) == [("isend", 1, 136 * 512 * 4)]
    assert [(share.part, share.copies) for share in pp.replicated] == [("embedding", 2.0)]
    gained = {i.quantity for i in pp.improves}
    assert "steps_in_flight" in gained and "rank_weight_bytes" in gained
    assert "step_read_bytes" not in gained and "step_flops" not in gained, "stages run one after the other"


def test_pcp_shares_out_a_prompt_and_repeats_weights_and_cache() -> None:
    pcp = card(Layout(pcp=2), "pcp", step=StepShape(prefill_tokens=128))
    assert {share.part for share in pcp.replicated} == {"embedding", "norm", "attention", "mlp", "kv"}
    assert ops(pcp) == [("all_gather", 8, 64 * 4 * 128 * 4)]
    (flops,) = [i for i in pcp.improves if i.quantity == "step_flops"]
    assert flops.without > 1.9 * flops.with_axis
    ring = card(Layout(pcp=4, ring=True), "pcp", step=StepShape(prefill_tokens=128))
    assert ops(ring) == [("isend", 8 * 3, 32 * 4 * 128 * 4)]
    assert ops(card(Layout(pcp=2), "pcp", step=DECODE)) == []


def test_dcp_shares_out_the_copies_and_merges_them_by_maximum_and_sum() -> None:
    dcp = card(Layout(tp=8, dcp=2), "dcp")
    assert [(s.part, s.without_bytes, s.with_bytes * 2) for s in dcp.partitioned] == [
        ("kv", 5275648, 5275648)
    ]
    assert ops(dcp) == [
        ("all_gather", 8, 8 * 1 * 64 * 4),
        ("all_gather", 8, 8 * 2 * 2 * 4),
        ("reduce_scatter", 8, 8 * 2 * 64 * 4),
    ]
    across = card(Layout(pcp=2, tp=2, dcp=2), "dcp")
    assert [op.operation for op in across.ops] == ["all_gather", "all_reduce"], (
        "all have the same heads already"
    )


def test_ep_gives_each_rank_whole_experts_and_exchanges_tokens_twice_a_layer() -> None:
    spec = load_spec("lab-moe-8x")
    ep = card(Layout(dp=2, tp=2, ep=4), "ep", spec)
    assert [(share.part, share.copies) for share in ep.partitioned] == [("experts", 1.0)]
    tokens = 4  # eight, of which each of two tp ranks sends its half
    there, back = tokens * 2 * (256 + 1) * 4, tokens * 2 * 256 * 4
    assert ops(ep) == [("all_to_all", 4, there), ("all_to_all", 4, back)]
    tp = card(Layout(dp=2, tp=2, ep=4), "tp", spec)
    assert ("all_gather", 4, tokens * 256 * 4) in ops(tp), "each rank's share of tokens comes back"
    assert ("all_reduce", 4, 8 * 256 * 4) in ops(tp), "attention alone is still summed"


def test_inside_a_replica_ep_saves_no_bytes_but_keeps_experts_whole() -> None:
    spec = load_spec("lab-moe-8x")
    ep = card(Layout(tp=2, ep=2), "ep", spec)
    assert [(i.quantity, i.without, i.with_axis) for i in ep.improves] == [("expert_columns", 128, 256)]
    thin = card(Layout(tp=2), "tp", spec)
    assert [(i.quantity, i.without, i.with_axis) for i in thin.costs] == [("expert_columns", 256, 128)]


def test_attention_dp_partitions_experts_over_replicas() -> None:
    dp = card(Layout(dp=2, tp=2, ep=4), "dp", load_spec("lab-moe-8x"))
    assert [share.part for share in dp.partitioned] == ["experts"]
    assert "attention" in {share.part for share in dp.replicated}


@pytest.mark.parametrize(
    ("operation", "sent"),
    [
        ("all_reduce", 150),
        ("reduce_scatter", 75),
        ("all_to_all", 75),
        ("all_gather", 300),
        ("gather", 100),
        ("isend", 100),
    ],
)
def test_bytes_on_the_wire_follow_ring_algorithms(operation: str, sent: int) -> None:
    assert Crossing(operation, 1, 100, "").wire_bytes(4) == sent
    assert Crossing(operation, 3, 100, "").wire_bytes(4) == 3 * sent


@pytest.mark.parametrize("name", SPECS)
def test_cards_answer_for_every_legal_layout(name: str) -> None:
    spec = SPECS[name]
    for layout in legal_layouts(spec, 8):
        for answer in step_card(layout, spec, MIXED, 2):
            assert answer.degree == getattr(layout, answer.axis) > 1
            shares = answer.partitioned + answer.replicated
            assert shares or answer.axis == "dcp"
            assert all(
                0.99 <= share.copies <= answer.degree + 0.01 for share in shares if share.part != "experts"
            )
            assert all(op.count > 0 and op.bytes_each > 0 for op in answer.ops)
            assert bool(answer.ops) == (answer.axis != "dp")
            assert answer.improves, (layout, answer.axis)


@pytest.mark.parametrize("name", SPECS)
def test_each_axis_is_compared_with_a_legal_layout_without_it(name: str) -> None:
    spec = SPECS[name]
    legal = set(legal_layouts(spec, 16))
    for layout in legal_layouts(spec, 8):
        for axis in ("dp", "pp", "pcp", "tp", "dcp", "ep"):
            if getattr(layout, axis) > 1:
                kept, without = with_and_without(layout, axis)
                assert kept in legal and without in legal, (layout, axis)
                assert getattr(without, axis) == 1 and getattr(kept, axis) == getattr(layout, axis)


def test_one_rank_computes_what_the_model_counts() -> None:
    for spec in (DENSE, MOE, MIXTRAL, LATENT, LAB):
        prefill = step_work(Layout(), spec, StepShape(prefill_tokens=40), 2).step_flops
        router = spec.flops(40).get("router", 0)
        assert prefill == sum(spec.flops(40, 0).values()) - router
        decode = step_work(Layout(), spec, StepShape(decode_seqs=1, context_tokens=99), 2).step_flops
        assert decode == sum(spec.flops(1, 99).values()) - spec.flops(1, 99).get("router", 0)


def test_tp_divides_the_work_of_a_step_evenly() -> None:
    whole, half = (step_work(Layout(tp=tp), LAB, MIXED, 4) for tp in (1, 2))
    assert whole.step_flops == 2 * half.step_flops
    norms = LAB.parameters()["norm"] * 4
    assert whole.step_read_bytes - norms == 2 * (half.step_read_bytes - norms)


def test_a_decode_step_reads_the_weights_once_and_the_cache_of_each_sequence() -> None:
    work = step_work(Layout(), LAB, DECODE, 4)
    assert work.step_read_bytes == LAB.num_parameters * 4 + 8 * 160 * LAB.kv_bytes_per_token(4)
    assert work.rank_weight_bytes == LAB.num_parameters * 4
    untied = replace(LAB, tie_word_embeddings=False)
    lookup = LAB.vocab_size * LAB.hidden_size * 4
    assert step_work(Layout(), untied, DECODE, 4).step_read_bytes == work.step_read_bytes
    assert step_work(Layout(), untied, DECODE, 4).rank_weight_bytes == work.rank_weight_bytes + lookup


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0.0), (1, 2.0), (2, 3.5), (10_000, 8.0)])
def test_more_tokens_touch_more_experts(num_tokens: int, expected: float) -> None:
    assert touched_experts(8, 2, num_tokens) == pytest.approx(expected)


@pytest.mark.parametrize("field", ["prefill_tokens", "decode_seqs", "context_tokens"])
def test_a_step_of_less_than_nothing_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is -1"):
        StepShape(**{field: -1})


# ---- who holds what


def test_holdings_tell_slices_from_copies() -> None:
    layout = Layout(dp=2, tp=2)
    rows = [{h.part: h for h in holdings(layout, LAB, rank, 4, kv_bytes=100)} for rank in range(4)]
    assert [row["mlp"].index for row in rows] == [0, 1, 0, 1]
    assert {(row["mlp"].kind, row["mlp"].of, row["mlp"].copies) for row in rows} == {("partitioned", 2, 2)}
    assert {(row["norm"].kind, row["norm"].of, row["norm"].copies) for row in rows} == {("replicated", 1, 4)}
    assert [(row["kv"].index, row["kv"].of, row["kv"].copies) for row in rows] == [
        (i, 4, 1) for i in range(4)
    ]


def test_data_parallel_replicas_hold_the_same_weights() -> None:
    (first, second) = (holdings(Layout(dp=2), LAB, rank, 4) for rank in range(2))
    assert first == second
    assert {h.kind for h in first} == {"replicated"}


def test_a_single_rank_holds_everything_and_no_copies() -> None:
    assert {(h.kind, h.index, h.of, h.copies) for h in holdings(Layout(), LAB, 0, 4)} == {
        ("partitioned", 0, 1, 1)
    }


@pytest.mark.parametrize("name", SPECS)
def test_holdings_weigh_what_a_rank_holds(name: str) -> None:
    spec = SPECS[name]
    for layout in legal_layouts(spec, 4):
        for rank in range(layout.world_size):
            found = holdings(layout, spec, rank, 2)
            assert {h.part: h.bytes for h in found} == rank_memory(layout, spec, rank, 2)
            assert all(0 <= h.index < h.of and 1 <= h.copies <= layout.world_size for h in found)
