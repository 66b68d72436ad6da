"""What is refused, and that the sentence says the arithmetic, what is allowed instead, and names legal
neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from cut_models import DENSE, LATENT, MIXTRAL, MOE, SPECS

from labkit.layout import (
    Layout,
    LayoutError,
    candidate_layouts,
    check_layout,
    dcp_allowed,
    dcp_degrees,
    is_legal,
    legal_layouts,
    refused_layouts,
    require_legal,
    tp_degrees,
)
from labkit.model.spec import Quantization, RopeScaling, list_models, load_spec

WIDE = replace(
    DENSE,
    name="wide",
    num_heads=52,
    num_kv_heads=52,
    head_dim=128,
    hidden_size=6656,
    intermediate_size=17_940,
)


@pytest.mark.parametrize(
    ("tp", "arithmetic"), [(3, "52 query heads ÷ tp 3 = 17.33…"), (8, "52 query heads ÷ tp 8 = 6.5;")]
)
def test_52_heads_on_3_or_8_ranks_is_refused_with_the_division_and_the_degrees_that_work(
    tp: int, arithmetic: str
) -> None:
    says = str(check_layout(Layout(tp=tp), WIDE))
    assert arithmetic in says
    assert "tp may be 1, 2, 4, 13, 26, 52; or split layers instead (pp)" in says


def test_the_degrees_listed_are_the_ones_that_are_legal() -> None:
    for spec in (WIDE, *SPECS.values(), *map(load_spec, list_models())):
        listed = tp_degrees(spec)
        legal = [tp for tp in range(1, spec.num_heads + 1) if is_legal(Layout(tp=tp), spec)]
        assert list(listed) == legal and 1 in listed


def test_four_kv_heads_allow_eight_ranks_with_whole_copies_only() -> None:
    assert check_layout(Layout(tp=8), DENSE)
    spec = replace(DENSE, num_heads=12, num_kv_heads=4)
    assert "tp 6 ÷ 4 KV heads = 1.5 copies of each" in str(check_layout(Layout(tp=6), spec))


@pytest.mark.parametrize(("tp", "says"), [(3, "47 intermediate columns ÷ tp 3 = 15.67…"), (1, "")])
def test_an_intermediate_that_does_not_divide_is_refused(tp: int, says: str) -> None:
    spec = replace(DENSE, num_heads=3, num_kv_heads=3, intermediate_size=47)
    answer = check_layout(Layout(tp=tp), spec)
    assert answer.ok == (not says) and says in str(answer)


def test_a_vocabulary_that_does_not_divide_is_padded_not_refused() -> None:
    assert DENSE.vocab_size == 151
    assert check_layout(Layout(tp=2), DENSE) and check_layout(Layout(tp=4), DENSE)


def test_fewer_vocabulary_rows_than_ranks_is_refused() -> None:
    assert "7 vocabulary rows are fewer than tp 8" in str(
        check_layout(Layout(tp=8), replace(DENSE, vocab_size=7))
    )


# ---- quantisation groups


def test_an_int4_group_must_stay_whole_behind_the_sum() -> None:
    """48 columns in groups of 16: tp 2 would leave 24 = one and a half groups on a rank."""
    spec = replace(DENSE, head_dim=16, quantization=Quantization("gptq", 4, (1, 16)))
    assert "mlp.down_proj would keep 24 input features a rank at tp 2, ÷ gptq group 16 = 1.5:" in str(
        check_layout(Layout(tp=2), spec)
    )
    assert "a quantisation group would be cut" in str(check_layout(Layout(tp=2), spec))
    assert check_layout(Layout(tp=1), spec)
    assert check_layout(Layout(pp=2), spec), "layers keep their groups"
    assert check_layout(Layout(tp=2), replace(spec, intermediate_size=64))


def test_an_fp8_block_must_stay_whole_on_both_sides() -> None:
    spec = replace(DENSE, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=1024)
    block = replace(spec, quantization=Quantization("fp8", 8, (128, 128), 4))
    assert [tp for tp in (1, 2, 4, 8) if check_layout(Layout(tp=tp), block)] == [1, 2, 4]
    assert "would keep 64 output features" in str(check_layout(Layout(tp=8), block))
    per_tensor = replace(spec, quantization=Quantization("fp8", 8, (0, 0), 4))
    assert check_layout(Layout(tp=8), per_tensor)


def test_experts_kept_whole_by_ep_are_not_cut_by_tp() -> None:
    spec = replace(MIXTRAL, head_dim=16, quantization=Quantization("awq", 4, (1, 16)))
    assert "experts.0.w2" in str(check_layout(Layout(tp=2), spec))
    assert check_layout(Layout(tp=2, ep=2), spec)


def test_deepseek_v3_in_fp8_blocks_runs_on_its_published_degrees() -> None:
    spec = load_spec("deepseek-v3")
    assert check_layout(Layout(tp=8), spec) and check_layout(Layout(tp=16), spec)
    assert "÷ fp8 group 128 = 4.5:" in str(check_layout(Layout(tp=32), spec))
    assert check_layout(Layout(dp=32, ep=32), spec)


# ---- positions


def test_tp4_pcp2_dcp2_with_8_kv_heads_is_legal() -> None:
    """Two validators disagreed about this one elsewhere; here one function decides."""
    spec = replace(DENSE, num_heads=16, num_kv_heads=8)
    layout = Layout(tp=4, pcp=2, dcp=2)
    assert check_layout(layout, spec)
    assert layout in legal_layouts(spec, 8, exact=True)
    assert dcp_degrees(tp=4, pcp=2, num_kv_heads=8) == (1, 2)
    assert dcp_degrees(tp=4, pcp=2, num_kv_heads=1) == (1, 2, 8)


def test_gqa_without_copies_has_nothing_for_dcp_to_share_out() -> None:
    says = str(check_layout(Layout(tp=4, dcp=2), DENSE))
    assert "no replicated KV to share out" in says and "max(1, 4 ÷ 4) = 1" in says and "dcp may be 1." in says


@pytest.mark.parametrize(
    ("tp", "pcp", "kv_heads", "allowed"),
    [
        (8, 1, 4, {1, 2}),
        (8, 1, 2, {1, 2, 4}),
        (8, 1, 8, {1}),
        (12, 1, 2, {1, 2, 3, 6}),
        (8, 1, 1, {1, 2, 4, 8}),
        (4, 2, 8, {1, 2}),
        (4, 2, 2, {1, 2}),
        (4, 2, 1, {1, 2, 8}),
        (1, 4, 8, {1, 4}),
        (2, 4, 1, {1, 4, 8}),
    ],
)
def test_dcp_shares_out_copies_of_kv_and_nothing_else(
    tp: int, pcp: int, kv_heads: int, allowed: set[int]
) -> None:
    assert {d for d in range(1, 40) if dcp_allowed(d, tp=tp, pcp=pcp, num_kv_heads=kv_heads)} == allowed
    assert set(dcp_degrees(tp=tp, pcp=pcp, num_kv_heads=kv_heads)) == allowed


def test_the_ranks_that_share_positions_hold_the_same_kv_heads() -> None:
    """What legality promises, checked against ownership for every legal layout."""
    from labkit.layout import kv_heads

    for spec in SPECS.values():
        for layout in legal_layouts(spec, 16):
            for group in layout.groups("dcp"):
                assert len({kv_heads(layout, spec, rank) for rank in group}) == 1, layout


def test_latent_attention_counts_as_one_kv_head() -> None:
    assert check_layout(Layout(tp=8, dcp=8), LATENT)


# ---- experts, layers, ranks


def test_experts_cannot_be_shared_out_where_there_are_none() -> None:
    assert "dense has none; leave ep out" in str(check_layout(Layout(tp=2, ep=2), DENSE))


def test_uneven_experts_are_legal_and_more_ranks_than_experts_are_not() -> None:
    assert check_layout(Layout(dp=4, ep=4), MOE), "6 experts on 4 ranks: 2, 2, 1, 1"
    assert "6 experts ÷ ep 8 leaves ranks without any" in str(check_layout(Layout(dp=8, ep=8), MOE))


def test_stages_cannot_outnumber_layers_and_a_split_must_add_up() -> None:
    assert "3 layers cannot fill 4 stages; pp may be 1 to 3" in str(check_layout(Layout(pp=4), DENSE))
    assert "split 2 + 2 = 4 layers, and dense has 3" in str(check_layout(Layout(pp=2, split=(2, 2)), DENSE))
    assert check_layout(Layout(pp=2, split=(1, 2)), DENSE)


def test_more_ranks_than_there_are_is_refused_with_the_product() -> None:
    assert "It needs dp 2 × tp 2 = 4 ranks, and 2 are there." in str(
        check_layout(Layout(dp=2, tp=2), DENSE, 2)
    )
    assert "It needs 2 ranks, and 1 is there." in str(check_layout(Layout(tp=2), DENSE, 1))


# ---- this engine


def test_the_engine_refuses_what_it_does_not_run_yet_apart_from_the_model() -> None:
    packed = replace(DENSE, quantization=Quantization("awq", 4, (1, 1)))
    layout = Layout(pp=2, tp=2, sp=True)
    assert check_layout(layout, packed) and check_layout(layout, DENSE, engine=True)
    answer = check_layout(layout, packed, engine=True)
    assert not answer and not answer.model_reasons and "needs unquantised weights" in answer.engine_reasons[0]
    both = check_layout(Layout(pp=2, tp=3, sp=True), packed, engine=True)
    assert (
        both.model_reasons
        and both.engine_reasons
        and both.reasons == both.model_reasons + both.engine_reasons
    )


def test_the_engine_refuses_models_it_cannot_run() -> None:
    cases = {
        "deepseek_v3": SPECS["latent"],
        "unquantised": replace(DENSE, quantization=Quantization("fp8", 8, (0, 0))),
        "yarn": replace(DENSE, rope=replace(DENSE.rope, scaling=RopeScaling("yarn", 4.0))),
    }
    for word, spec in cases.items():
        assert check_layout(Layout(), spec)
        assert word in str(check_layout(Layout(), spec, engine=True))
    assert check_layout(Layout(dp=2, tp=2), load_spec("llama-3.1-8b"), engine=True)


# ---- the answer


def test_a_refusal_names_neighbours_that_are_legal_and_fit() -> None:
    for spec in SPECS.values():
        for layout in candidate_layouts(8):
            answer = check_layout(layout, spec, 6)
            assert bool(answer) == is_legal(layout, spec, 6)
            if answer:
                assert answer.reasons == () and answer.neighbours == ()
                continue
            assert answer.neighbours and len(answer.neighbours) <= 4
            assert all(is_legal(near, spec, 6) for near in answer.neighbours)
            assert all(reason.endswith(".") and reason[0].isalnum() for reason in answer.reasons)


def test_the_nearest_neighbours_come_first() -> None:
    assert check_layout(Layout(dp=2, tp=2, ep=2), DENSE).neighbours[0] == Layout(dp=2, tp=2)
    assert check_layout(Layout(tp=3), DENSE).neighbours[0] in (Layout(tp=2), Layout(tp=4))
    assert check_layout(Layout(dp=2, tp=3), DENSE, 4, engine=True).neighbours[0] == Layout(dp=2, tp=2)


def test_legal_and_refused_are_all_there_is() -> None:
    for spec in (DENSE, MOE, LATENT):
        legal = legal_layouts(spec, 8)
        refused = [layout for layout, _ in refused_layouts(spec, 8)]
        assert set(legal) | set(refused) == set(candidate_layouts(8))
        assert not set(legal) & set(refused)
        assert legal[0] == Layout()
        assert [w.world_size for w in legal] == sorted(w.world_size for w in legal)


def test_what_a_two_rank_lab_offers() -> None:
    spec = load_spec("lab-30m")

    def of_three_axes(layouts: Iterable[Layout]) -> list[str]:
        return [str(layout) for layout in layouts if layout.pcp == layout.dcp == layout.ep == 1]

    assert of_three_axes(legal_layouts(spec, 2, engine=True)) == ["TP1", "TP2", "DP2", "PP2"]
    fours = ["TP4", "DP4", "PP4", "DP2×TP2", "PP2×TP2", "DP2×PP2"]
    assert of_three_axes(legal_layouts(spec, 4, exact=True, engine=True)) == fours
    greyed = dict(refused_layouts(spec, 2, up_to=4, engine=True))
    assert set(of_three_axes(greyed)) == {"TP3", "DP3", "PP3", *fours}
    assert "8 query heads ÷ tp 3 = 2.67…" in greyed[Layout(tp=3)]
    assert greyed[Layout(dp=2, tp=2)].startswith("DP2×TP2 is not allowed: It needs dp 2 × tp 2 = 4 ranks")


def test_require_legal_raises_the_sentence() -> None:
    require_legal(Layout(tp=2), DENSE, 2)
    with pytest.raises(LayoutError, match="TP3 is not allowed: 8 query heads ÷ tp 3"):
        require_legal(Layout(tp=3), DENSE)


def test_the_real_shapes_allow_the_degrees_they_are_served_with() -> None:
    for name, tp in {
        "llama-3.1-70b": 8,
        "qwen2.5-72b": 8,
        "qwen3-32b": 8,
        "mixtral-8x7b": 8,
        "qwen2.5-7b": 4,
    }.items():
        assert check_layout(Layout(tp=tp), load_spec(name)), name
    assert "14 query heads ÷ tp 4 = 3.5;" in str(check_layout(Layout(tp=4), load_spec("qwen2.5-0.5b")))
