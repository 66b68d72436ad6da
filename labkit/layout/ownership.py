"""What a rank owns: query heads, KV heads, layers, experts, vocabulary rows, columns and positions.

Every answer is a range of global indices, computed from the rank's place in the grid and nothing else, so any
two ranks can work out each other's share. Where there are more tp ranks than KV heads, neighbours hold copies
of one.
"""

from __future__ import annotations

from labkit.layout.grammar import LayoutError
from labkit.layout.grid import Layout
from labkit.model.shapes import ModelSpec


def part_of(total: int, num_parts: int, index: int) -> range:
    """Part `index` of `total` items in contiguous parts that differ by at most one; the first parts are the
    larger.
    """
    base, extra = divmod(total, num_parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))


def _whole_part(total: int, layout: Layout, rank: int, what: str) -> range:
    if total % layout.tp:
        raise LayoutError(f"{total} {what} ÷ tp {layout.tp} is not whole; ask check_layout before slicing.")
    return part_of(total, layout.tp, layout.coords(rank).tp)


def query_heads(layout: Layout, spec: ModelSpec, rank: int) -> range:
    return _whole_part(spec.num_heads, layout, rank, "query heads")


def kv_replicas(layout: Layout, spec: ModelSpec) -> int:
    """How many ranks of a tp group hold a copy of the same KV head: tp ÷ kv_heads, or 1."""
    return max(1, layout.tp // spec.num_cached_heads)


def kv_heads(layout: Layout, spec: ModelSpec, rank: int) -> range:
    """The cached KV heads of a rank: its share, or one head that it shares with its neighbours in tp."""
    at, total = layout.coords(rank).tp, spec.num_cached_heads
    if layout.tp <= total:
        return _whole_part(total, layout, rank, "KV heads")
    if layout.tp % total:
        raise LayoutError(f"tp {layout.tp} ÷ {total} KV heads is not whole; ask check_layout before slicing.")
    head = at // kv_replicas(layout, spec)
    return range(head, head + 1)


def stage_layers(layout: Layout, spec: ModelSpec, stage: int) -> range:
    """The layers of a pipeline stage: as `split` says, else even, the first ones taking what is left over."""
    if layout.split is None:
        return part_of(spec.num_layers, layout.pp, stage)
    start = sum(layout.split[:stage])
    return range(start, start + layout.split[stage])


def layers(layout: Layout, spec: ModelSpec, rank: int) -> range:
    return stage_layers(layout, spec, layout.coords(rank).pp)


def is_first_stage(layout: Layout, rank: int) -> bool:
    return layout.coords(rank).pp == 0


def is_last_stage(layout: Layout, rank: int) -> bool:
    return layout.coords(rank).pp == layout.pp - 1


def experts(layout: Layout, spec: ModelSpec, rank: int) -> range:
    """The routed experts of a rank, uneven where they must be; with ep 1 a cut of every one. Dense models:
    none.
    """
    if spec.moe is None:
        return range(0)
    return part_of(spec.moe.num_experts, layout.ep, layout.index_in("ep", rank))


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """The vocabulary rounded up to a multiple of tp; rows from vocab_size on are padding, never sampled."""
    return -(-spec.vocab_size // tp) * tp


def vocab_rows(layout: Layout, spec: ModelSpec, rank: int) -> range:
    """The rank's rows of the padded vocabulary; those at or beyond `spec.vocab_size` are padding."""
    return part_of(padded_vocab(spec, layout.tp), layout.tp, layout.coords(rank).tp)


def intermediate_columns(layout: Layout, spec: ModelSpec, rank: int) -> range:
    """The rank's columns of the (dense) MLP's intermediate."""
    return _whole_part(spec.intermediate_size, layout, rank, "intermediate columns")


def positions(layout: Layout, rank: int, num_tokens: int, block_size: int) -> tuple[range, ...]:
    """The positions below `num_tokens` whose KV a rank stores, as ranges of at most a block.

    Blocks go round the dcp group: position p lies on member (p ÷ block_size) mod dcp. It depends on the
    position only, so a growing sequence never moves what is stored.
    """
    at = layout.index_in("dcp", rank)
    starts = range(at * block_size, num_tokens, layout.dcp * block_size)
    return tuple(range(start, min(start + block_size, num_tokens)) for start in starts)


def stored_block(layout: Layout, block_size: int) -> int:
    """Positions of one block that one rank stores: a block is shared out over its dcp group.

    A block keeps its `block_size` tokens, and dcp times as many fit; so a prefix is found again as finely as
    without dcp, and whoever counts tokens by blocks goes on counting. (Blocks of dcp · block_size tokens
    would hold as much, and lose the end of every prefix.) Where dcp does not divide it, it is rounded up.
    """
    return -(-block_size // layout.dcp)


def block_tokens(layout: Layout, block_size: int) -> int:
    """Positions of one block over all ranks that share it: `block_size`, rounded up to a multiple of dcp."""
    return stored_block(layout, block_size) * layout.dcp


def zigzag(num_tokens: int, num_ranks: int, index: int) -> tuple[range, range]:
    """(early, late): the queries of `num_tokens` that rank `index` of `num_ranks` computes; both may be empty.

    Later queries see more keys, so who takes the i-th part from the front takes the i-th from the back too.
    Ranks differ by one query at most, and the last query is always rank 0's, which samples.
    """
    sizes = [len(part_of(num_tokens, num_ranks, i)) for i in range(num_ranks)]
    begin = sum(size // 2 for size in sizes[:index])
    end = num_tokens - sum(size - size // 2 for size in sizes[:index])
    size = sizes[index]
    return range(begin, begin + size // 2), range(end - (size - size // 2), end)


def query_positions(layout: Layout, rank: int, num_tokens: int) -> tuple[range, ...]:
    """The positions of a prefill whose queries a rank computes: with pcp, an early part and a late one."""
    if layout.pcp == 1:
        return (range(num_tokens),)
    return tuple(part for part in zigzag(num_tokens, layout.pcp, layout.coords(rank).pcp) if part)


def query_loads(layout: Layout, context: int, num_tokens: int) -> tuple[int, ...]:
    """Keys seen by all the queries of each pcp rank, of `num_tokens` after `context`: the work of attention.

    The query at offset p sees context + p + 1 keys. Balance is the mean of these over the largest.
    """
    shares = (zigzag(num_tokens, layout.pcp, index) for index in range(layout.pcp))
    return tuple(
        sum(len(part) * (2 * context + part.start + part.stop + 1) // 2 for part in share) for share in shares
    )
