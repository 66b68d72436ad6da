"""For every legal layout of up to 16 ranks: the slices of each tensor recombine into it, and count as they
should.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cut_models import DENSE, MOE, SPECS

from labkit.layout import (
    Layout,
    WeightSlice,
    experts,
    kv_bytes_per_token,
    kv_heads,
    layers,
    legal_layouts,
    query_heads,
    rank_memory,
    vocab_rows,
    weight_slices,
)
from labkit.layout.ownership import padded_vocab
from labkit.model.spec import ModelSpec, Quantization
from labkit.model.tensors import all_tensors

Array = np.ndarray


def checkpoint(spec: ModelSpec) -> dict[str, Array]:
    """Every tensor filled with numbers that occur once, so that no wrong slice passes for the right one."""
    tensors, first = {}, 1
    for tensor in all_tensors(spec):
        tensors[tensor.name] = np.arange(first, first + tensor.num_elements).reshape(tensor.shape)
        first += tensor.num_elements
    return tensors


def cut(whole: Array, piece: WeightSlice) -> Array:
    """What a rank loads: the slice, with rows of zeros where the layout pads."""
    assert whole.shape == piece.shape
    if piece.dim is None:
        return whole
    part = np.take(whole, np.arange(piece.start, piece.stop), axis=piece.dim)
    short = (piece.pad_to or 0) - part.shape[piece.dim]
    if short > 0:
        part = np.concatenate([part, np.zeros((short, *part.shape[1:]), part.dtype)])
    assert part.shape == piece.local_shape
    return part


def stage_pieces(layout: Layout, spec: ModelSpec, stage: int, dp: int = 0) -> list[dict[str, WeightSlice]]:
    ranks = (r for r in range(layout.world_size) if layout.coords(r)[:2] == (dp, stage))
    return [weight_slices(layout, spec, rank) for rank in ranks]


def some_layouts(spec: ModelSpec) -> list[Layout]:
    """All legal layouts of up to 16 ranks; dcp moves no weight and dp copies them, so each is kept once."""
    found = legal_layouts(spec, 16)
    kept = [layout for layout in found if layout.dcp == 1 and (layout.dp == 1 or layout.attention_dp)]
    assert len(kept) > 10
    return kept


@pytest.mark.parametrize("name", SPECS)
def test_the_slices_of_every_tensor_recombine_into_it(name: str) -> None:
    spec = SPECS[name]
    whole = checkpoint(spec)
    for layout in some_layouts(spec):
        seen = {key: np.zeros(tensor.shape, dtype=bool) for key, tensor in whole.items()}
        for rank in range(layout.world_size):
            for key, piece in weight_slices(layout, spec, rank).items():
                index = [slice(None)] * len(piece.shape)
                if piece.dim is not None:
                    index[piece.dim] = slice(piece.start, piece.stop)
                seen[key][tuple(index)] = True
                assert cut(whole[key], piece).size == piece.num_elements
        assert all(mask.all() for mask in seen.values()), layout


@pytest.mark.parametrize("name", SPECS)
def test_copies_counted_once_the_slices_weigh_exactly_the_model(name: str) -> None:
    spec = SPECS[name]
    head_copy = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    for layout in some_layouts(spec):
        total = 0.0
        for rank in range(layout.world_size):
            for piece in weight_slices(layout, spec, rank).values():
                alone = 1 if piece.part == "experts" and layout.ep > 1 else layout.dp
                extent = 1 if piece.dim is None else (piece.stop - piece.start) / piece.shape[piece.dim]
                total += np.prod(piece.shape) * extent / (piece.replicated_over * alone)
        assert round(total, 3) == spec.num_parameters + head_copy * (layout.pp > 1), layout


@pytest.mark.parametrize("name", SPECS)
def test_joining_shards_in_rank_order_gives_the_tensor_back(name: str) -> None:
    """Concatenation, not only coverage: the first rank of each copy, in order."""
    spec = SPECS[name]
    whole = checkpoint(spec)
    for tp in (1, 2, 4, 8):
        shards = stage_pieces(Layout(tp=tp), spec, 0)
        for key, tensor in whole.items():
            pieces = [shard[key] for shard in shards]
            parts = [cut(tensor, piece) for piece in pieces[:: pieces[0].replicated_over]]
            joined = parts[0] if pieces[0].dim is None else np.concatenate(parts, axis=pieces[0].dim)
            assert (joined[: len(tensor)] == tensor).all(), (tp, key)
            assert not joined[len(tensor) :].any()


def test_shards_of_a_cut_tensor_differ() -> None:
    """A wrong rank default gives every rank shard 0: all shapes fine, output wrong."""
    whole = checkpoint(DENSE)
    for rank in range(1, 4):
        first, other = (weight_slices(Layout(tp=4), DENSE, r) for r in (0, rank))
        for key, piece in other.items():
            same = np.array_equal(cut(whole[key], first[key]), cut(whole[key], piece))
            assert same == (piece.dim is None), key


def test_gate_and_up_are_each_cut_so_joining_them_keeps_columns_together() -> None:
    """A fused gate‖up cut as one block would give rank 0 all of gate and rank 1 all of up."""
    whole, prefix = checkpoint(DENSE), "model.layers.0.mlp"
    for rank in range(2):
        mine = weight_slices(Layout(tp=2), DENSE, rank)
        gate, up, down = (mine[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        columns = slice(rank * 24, rank * 24 + 24)
        assert (
            (gate.start, gate.stop)
            == (up.start, up.stop)
            == (down.start, down.stop)
            == (columns.start, columns.stop)
        )
        fused = np.concatenate([cut(whole[f"{prefix}.{part}_proj.weight"], gate) for part in ("gate", "up")])
        assert (fused[:24] == whole[f"{prefix}.gate_proj.weight"][columns]).all()
        assert (fused[24:] == whole[f"{prefix}.up_proj.weight"][columns]).all()


@pytest.mark.parametrize(("tp", "rank", "head"), [(8, 0, 0), (8, 1, 0), (8, 2, 1), (8, 7, 3)])
def test_with_more_ranks_than_kv_heads_neighbours_hold_copies_of_one_head(
    tp: int, rank: int, head: int
) -> None:
    layout = Layout(tp=tp)
    assert kv_heads(layout, DENSE, rank) == range(head, head + 1)
    piece = weight_slices(layout, DENSE, rank)["model.layers.0.self_attn.k_proj.weight"]
    assert (piece.start, piece.stop) == (head * DENSE.head_dim, (head + 1) * DENSE.head_dim)
    assert piece.replicated_over == 2
    # half of TP4's bytes are not saved: the head is there twice
    assert kv_bytes_per_token(layout, DENSE, rank, 4) == kv_bytes_per_token(Layout(tp=4), DENSE, 0, 4)


@pytest.mark.parametrize("name", SPECS)
def test_every_query_head_finds_its_kv_head_on_its_own_rank(name: str) -> None:
    spec = SPECS[name]
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            queries, keys = query_heads(Layout(tp=tp), spec, rank), kv_heads(Layout(tp=tp), spec, rank)
            wanted = {q * spec.num_cached_heads // spec.num_heads for q in queries}
            assert wanted <= set(keys)


def test_a_per_head_norm_is_whole_on_every_rank_whatever_the_degree() -> None:
    """8 KV heads, per-head K-norm, TP 16: cut by hidden ÷ tp it would be half a head."""
    spec = replace(SPECS["qk-norm"], num_heads=16, num_kv_heads=8)
    for rank in range(16):
        mine = weight_slices(Layout(tp=16), spec, rank)
        for name in ("q_norm", "k_norm"):
            piece = mine[f"model.layers.0.self_attn.{name}.weight"]
            assert (piece.dim, piece.local_shape, piece.replicated_over) == (None, (spec.head_dim,), 16)
        assert mine["model.layers.0.self_attn.k_proj.weight"].local_shape == (spec.head_dim, spec.hidden_size)


def test_biases_follow_columns_and_stay_whole_behind_a_sum() -> None:
    mine = weight_slices(Layout(tp=2), SPECS["all-biases"], 1)
    layer = "model.layers.1"
    assert mine[f"{layer}.self_attn.q_proj.bias"].local_shape == (24,)
    assert mine[f"{layer}.mlp.up_proj.bias"].start == 24
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # added once, after the reduction
        assert mine[f"{layer}.{name}.bias"].dim is None


@pytest.mark.parametrize(("tp", "rows"), [(2, 76), (4, 38)])
def test_a_vocabulary_of_151_is_padded_on_the_last_rank_only(tp: int, rows: int) -> None:
    assert padded_vocab(DENSE, tp) == 152
    for rank in range(tp):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            piece = weight_slices(Layout(tp=tp), DENSE, rank)[name]
            assert piece.local_shape == (rows, DENSE.hidden_size)
            assert piece.pad_to == (rows if rank == tp - 1 else None)
            assert piece.stop <= DENSE.vocab_size
        assert vocab_rows(Layout(tp=tp), DENSE, rank) == range(rank * rows, (rank + 1) * rows)


def test_a_tiny_vocabulary_may_leave_a_rank_padding_only() -> None:
    spec = replace(DENSE, vocab_size=9)
    pieces = [weight_slices(Layout(tp=8), spec, rank)["lm_head.weight"] for rank in range(8)]
    assert [p.stop - p.start for p in pieces] == [2, 2, 2, 2, 1, 0, 0, 0]
    assert {p.local_shape for p in pieces} == {(2, spec.hidden_size)}


def test_a_tied_head_gives_the_last_stage_its_own_copy_and_counts_its_bytes() -> None:
    spec, embedding = SPECS["tied"], "model.embed_tokens.weight"
    first, last = (weight_slices(Layout(pp=2), spec, rank) for rank in range(2))
    assert first[embedding].part == "embedding" and last[embedding].part == "head"
    assert "lm_head.weight" not in last
    assert rank_memory(Layout(pp=2), spec, 1, 4)["head"] == spec.vocab_size * spec.hidden_size * 4
    assert "head" not in rank_memory(Layout(), spec, 0, 4)


def test_an_untied_head_is_on_the_last_stage_alone() -> None:
    first, last = (weight_slices(Layout(pp=2), DENSE, rank) for rank in range(2))
    assert "lm_head.weight" in last and "model.norm.weight" in last
    assert "lm_head.weight" not in first and "model.embed_tokens.weight" not in last


@pytest.mark.parametrize("num_layers", range(1, 20))
def test_stages_hold_contiguous_layers_that_nobody_shares_and_nobody_misses(num_layers: int) -> None:
    spec = replace(DENSE, num_layers=num_layers)
    for pp in range(1, num_layers + 1):
        owned = [layers(Layout(pp=pp), spec, rank) for rank in range(pp)]
        assert [layer for stage in owned for layer in stage] == list(range(num_layers))
        assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_a_split_is_followed() -> None:
    spec = replace(DENSE, num_layers=10)
    layout = Layout.parse("pp3+split=2-5-3")
    assert [layers(layout, spec, rank) for rank in range(3)] == [range(0, 2), range(2, 7), range(7, 10)]


def test_each_expert_has_one_owner_also_when_the_shares_are_uneven() -> None:
    spec = replace(MOE, moe=replace(MOE.moe, num_experts=256))
    owned = [experts(Layout(dp=3, ep=3), spec, rank) for rank in range(3)]
    assert [len(o) for o in owned] == [86, 85, 85]
    assert [e for o in owned for e in o] == list(range(256))


def test_experts_are_shared_out_inside_a_replica_or_over_all_of_them() -> None:
    inside = [experts(Layout(dp=2, tp=2, ep=2), MOE, rank) for rank in range(4)]
    assert inside == [range(0, 3), range(3, 6)] * 2
    across = [experts(Layout(dp=2, tp=2, ep=4), MOE, rank) for rank in range(4)]
    assert across == [range(0, 2), range(2, 4), range(4, 5), range(5, 6)]


@pytest.mark.parametrize("name", SPECS)
def test_bytes_a_part_equal_the_sum_over_the_slices(name: str) -> None:
    """`rank_memory` counts layers by kind; the slow way over every tensor must agree."""
    spec = SPECS[name]
    for layout in some_layouts(spec):
        for rank in range(layout.world_size):
            slow: dict[str, int] = {}
            for piece in weight_slices(layout, spec, rank).values():
                slow[piece.part] = slow.get(piece.part, 0) + piece.num_elements * 2
            assert rank_memory(layout, spec, rank, 2) == slow


def test_quantised_weights_count_bits_and_scales_and_leave_the_rest_alone() -> None:
    spec = replace(DENSE, quantization=Quantization("gptq", 4, (1, 8)))
    memory, plain = (rank_memory(Layout(), s, 0, 2) for s in (spec, DENSE))
    assert memory["embedding"] == plain["embedding"] and memory["norm"] == plain["norm"]
    assert memory["mlp"] == plain["mlp"] // 4 + plain["mlp"] // 2 // 8 * 2
