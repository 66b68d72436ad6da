"""How a model is laid out over ranks: plain arithmetic, no torch, no devices.

`Layout.parse("dp2xtp2")` is a value; `check_layout` says whether a model allows it and why not;
`weight_slices` and its neighbours say what each rank owns; `step_card` answers the five questions for a step
in bytes and counts.
"""

from labkit.layout.balance import Balance, ModelProfile, PartCost, balance_stages
from labkit.layout.card import AxisCard, Improvement, PartShare, step_card
from labkit.layout.choices import candidate_layouts, deployment_choices, legal_layouts, neighbours, refused_layouts
from labkit.layout.chooser import choice_table
from labkit.layout.deployment import (
    ROLES,
    AnyLayout,
    Deployment,
    Pool,
    check_deployment,
    pools_of,
    read_layout,
    require_deployable,
)
from labkit.layout.grammar import AXES, OPTIONS, LayoutError
from labkit.layout.grid import GROUP_AXES, Coords, Layout, dcp_allowed, dcp_degrees, ep_degrees
from labkit.layout.holdings import Holding, holdings
from labkit.layout.legality import (
    ENGINE_AXES,
    ENGINE_FAMILIES,
    SUPPORTED_AXES,
    Legality,
    check_layout,
    is_legal,
    require_legal,
    tp_degrees,
)
from labkit.layout.ownership import (
    block_tokens,
    experts,
    intermediate_columns,
    is_first_stage,
    is_last_stage,
    kv_heads,
    kv_replicas,
    layers,
    padded_vocab,
    part_of,
    positions,
    query_heads,
    query_loads,
    query_positions,
    stage_layers,
    stored_block,
    vocab_rows,
    zigzag,
)
from labkit.layout.placement import (
    LayerPlacements,
    Placement,
    check_placement,
    imbalance,
    place_experts,
    plain_placement,
    rank_loads,
)
from labkit.layout.reshard import Share, Slots, handoff_bytes, passing, reshard
from labkit.layout.slices import WeightSlice, kv_bytes_per_token, rank_memory, weight_slices
from labkit.layout.traffic import Crossing, StepShape
from labkit.layout.work import StepWork, step_work

__all__ = [
    "AXES",
    "ENGINE_AXES",
    "ENGINE_FAMILIES",
    "GROUP_AXES",
    "OPTIONS",
    "ROLES",
    "SUPPORTED_AXES",
    "AnyLayout",
    "AxisCard",
    "Balance",
    "Coords",
    "Crossing",
    "Deployment",
    "Holding",
    "Improvement",
    "LayerPlacements",
    "Layout",
    "LayoutError",
    "Legality",
    "ModelProfile",
    "PartCost",
    "PartShare",
    "Placement",
    "Pool",
    "Share",
    "Slots",
    "StepShape",
    "StepWork",
    "WeightSlice",
    "block_tokens",
    "balance_stages",
    "candidate_layouts",
    "choice_table",
    "check_deployment",
    "check_layout",
    "check_placement",
    "dcp_allowed",
    "dcp_degrees",
    "deployment_choices",
    "ep_degrees",
    "experts",
    "handoff_bytes",
    "holdings",
    "imbalance",
    "intermediate_columns",
    "is_first_stage",
    "is_last_stage",
    "is_legal",
    "kv_bytes_per_token",
    "kv_heads",
    "kv_replicas",
    "layers",
    "legal_layouts",
    "neighbours",
    "padded_vocab",
    "part_of",
    "passing",
    "place_experts",
    "plain_placement",
    "pools_of",
    "positions",
    "query_heads",
    "query_loads",
    "query_positions",
    "rank_loads",
    "rank_memory",
    "read_layout",
    "refused_layouts",
    "require_deployable",
    "require_legal",
    "reshard",
    "stage_layers",
    "step_card",
    "step_work",
    "stored_block",
    "tp_degrees",
    "vocab_rows",
    "weight_slices",
    "zigzag",
]
