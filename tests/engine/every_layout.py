"""The kinds of model, and the layouts to try for each: all up to four ranks with their options, and at eight every pair
of axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from tiny_models import make_checkpoint, tiny_spec

from labkit.layout import AXES, Layout, is_legal, legal_layouts
from labkit.model.spec import ModelSpec

NUM_LAYERS = 4
KINDS = {
    "dense": ("llama-untied-biases", {"num_key_value_heads": 2}),
    "tied": ("qwen2-qkv-bias", {"num_key_value_heads": 1}),
    "experts": ("mixtral", {"num_key_value_heads": 2}),
    "shared-experts": ("qwen2-moe-shared", {"num_key_value_heads": 1, "num_experts": 9}),
}
"""Few KV heads, so that tp has copies of them to share out (dcp); nine experts divide by no number of ranks but 3."""
SPECS = {kind: tiny_spec(family, num_hidden_layers=NUM_LAYERS, **changes) for kind, (family, changes) in KINDS.items()}


def make_kinds(folder: Path) -> dict[str, Path]:
    """A checkpoint of each kind."""
    return {
        kind: make_checkpoint(folder / kind, family, num_hidden_layers=NUM_LAYERS, **changes)
        for kind, (family, changes) in KINDS.items()
    }


def named(value: object) -> str:
    """In the name of a test."""
    return value.slug if isinstance(value, Layout) else str(value)


def with_options(layout: Layout, num_layers: int) -> Iterator[Layout]:
    """The layout, and it with each option that it has room for and the engine runs."""
    yield layout
    if layout.pcp > 1:
        yield replace(layout, ring=True)
    if layout.tp > 1:
        yield replace(layout, sp=True)
    if 1 < layout.pp < num_layers:
        yield replace(layout, split=(num_layers - layout.pp + 1, *[1] * (layout.pp - 1)))


def up_to_four(spec: ModelSpec) -> list[Layout]:
    return [found for layout in legal_layouts(spec, 4, engine=True) for found in with_options(layout, spec.num_layers)]


def used_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if getattr(layout, axis) > 1)


def pairs_at_eight(spec: ModelSpec) -> dict[tuple[str, str], Layout]:
    """Pair of axes → the layout of eight ranks that uses it beside the fewest others, its degrees as even as can be."""
    eight = legal_layouts(spec, 8, exact=True, engine=True)
    found = {}
    for pair in combinations(AXES, 2):
        using = [layout for layout in eight if set(pair) <= set(used_axes(layout))]
        if using:
            found[pair] = min(using, key=lambda layout: (len(used_axes(layout)), _unevenness(layout)))
    return found


def _unevenness(layout: Layout) -> int:
    return max(layout.dp, layout.pp, layout.pcp, layout.tp)


def at_eight(spec: ModelSpec) -> list[Layout]:
    """One for each pair of axes, and the rings of those that share a prompt's positions out."""
    chosen = list(dict.fromkeys(pairs_at_eight(spec).values()))
    rings = [replace(layout, ring=True) for layout in chosen if layout.pcp > 1]
    assert all(is_legal(layout, spec, 8, engine=True) for layout in rings)
    return chosen + rings
