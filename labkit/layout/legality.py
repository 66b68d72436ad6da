"""Whether a model, a machine and this engine allow a layout: one place decides, and says why with the
arithmetic.

`check_layout` is what everything asks: the shell, the engine, the planner and the page that greys a choice. A
refusal carries sentences and the nearest legal layouts. What the model forbids and what this version of the
engine does not run yet are kept apart, because only the first is a law of nature. Every axis and option is run, so
what is left of the second are kinds of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from labkit.layout.grammar import LayoutError
from labkit.layout.grid import GRID_AXES, Layout, dcp_allowed, dcp_degrees
from labkit.layout.slices import is_quantised
from labkit.model.shapes import ModelSpec
from labkit.model.tensors import Tensor, cut_items, expert_tensors, layer_common_tensors
from labkit.said import say, with_semicolons

ENGINE_AXES: tuple[str, ...] = ("dp", "pp", "pcp", "tp", "dcp", "ep")
"""The axes that the engine of this version runs; the arithmetic knows all of them."""
SUPPORTED_AXES = ENGINE_AXES
ENGINE_FAMILIES: tuple[str, ...] = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe")
ENGINE_ROPE_SCALINGS: tuple[str, ...] = ("llama3",)


@dataclass(frozen=True)
class Legality:
    """The answer: truthy when allowed; as text, the sentence to show."""

    layout: Layout
    model_reasons: tuple[str, ...] = ()
    """Why the model or the number of ranks forbids it."""
    engine_reasons: tuple[str, ...] = ()
    """Why this version of the engine does not run it."""
    neighbours: tuple[Layout, ...] = ()
    """The nearest layouts that are allowed, nearest first."""

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.model_reasons + self.engine_reasons

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if self.ok:
            return f"{self.layout} is allowed."
        near = f" Nearest that work: {', '.join(map(str, self.neighbours))}." if self.neighbours else ""
        return f"{self.layout} is not allowed: {' '.join(self.reasons)}{near}"


def check_layout(
    layout: Layout, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False
) -> Legality:
    """Ask whether `spec` (and, when given, `num_ranks` ranks; with `engine`, this engine) allows `layout`."""
    from labkit.layout.choices import neighbours

    model, mine = _model_reasons(layout, spec, num_ranks), tuple(_engine_reasons(spec)) if engine else ()
    if not model and not mine:
        return Legality(layout)
    return Legality(layout, model, mine, neighbours(layout, spec, num_ranks, engine=engine))


def reasons_against(
    layout: Layout, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False
) -> tuple[str, ...]:
    """The reasons alone, without looking for neighbours; () when the layout is allowed."""
    return _model_reasons(layout, spec, num_ranks) + (tuple(_engine_reasons(spec)) if engine else ())


def is_legal(layout: Layout, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False) -> bool:
    """`check_layout` without looking for neighbours: for walks over many layouts."""
    return not _model_reasons(layout, spec, num_ranks) and not (engine and any(_engine_reasons(spec)))


def require_legal(
    layout: Layout, spec: ModelSpec, num_ranks: int | None = None, *, engine: bool = False
) -> None:
    """Raise LayoutError (a ValueError) with the sentence when the layout is not allowed."""
    answer = check_layout(layout, spec, num_ranks, engine=engine)
    if not answer:
        raise LayoutError(str(answer))


# ---- the model's laws


def _model_reasons(layout: Layout, spec: ModelSpec, num_ranks: int | None) -> tuple[str, ...]:
    return (
        *_rank_reasons(layout, num_ranks),
        *_tp_reasons(layout, spec),
        *_dcp_reasons(layout, spec),
        *_ep_reasons(layout, spec),
        *_pp_reasons(layout, spec),
    )


def _rank_reasons(layout: Layout, num_ranks: int | None) -> Iterator[str]:
    if num_ranks is None or layout.world_size <= num_ranks:
        return
    factors = [f"{axis} {n}" for axis in GRID_AXES if (n := getattr(layout, axis)) > 1]
    product = f"{' × '.join(factors)} = " if len(factors) > 1 else ""
    needed = f"{product}{layout.world_size}"
    if num_ranks == 1:
        yield say("It needs {needed} ranks, and 1 is there.", needed=needed)
    else:
        yield say("It needs {needed} ranks, and {there} are there.", needed=needed, there=num_ranks)


def quotient(a: int, b: int) -> str:
    """a ÷ b as people check it: 52 ÷ 3 is 17.33…, 52 ÷ 8 is 6.5, 52 ÷ 4 is 13."""
    if a % b == 0:
        return str(a // b)
    return f"{a / b:.2f}…" if a * 100 % b else f"{a / b:.2f}".rstrip("0")


def _uneven(what: str, total: int, tp: int) -> str:
    return say("{n} {what} ÷ tp {tp} = {each}", n=total, what=what, tp=tp, each=quotient(total, tp))


def _tp_problems(spec: ModelSpec, tp: int, cut_experts: bool) -> list[str]:
    """What tensor parallelism of degree `tp` cannot cut evenly, as arithmetic."""
    problems = []
    if spec.num_heads % tp:
        problems.append(_uneven(say("query heads"), spec.num_heads, tp))
    if spec.linear_attention and spec.linear_attention.num_key_heads % tp:
        problems.append(_uneven(say("key heads of linear attention"), spec.linear_attention.num_key_heads, tp))
    problems += _kv_problems(spec, tp) + [
        _uneven(what, n, tp) for what, n in _widths(spec, cut_experts) if n % tp
    ]
    if tp > spec.vocab_size:
        problems.append(say("{n} vocabulary rows are fewer than tp {tp}", n=spec.vocab_size, tp=tp))
    return problems or _group_problems(spec, tp, cut_experts)


def _kv_problems(spec: ModelSpec, tp: int) -> list[str]:
    heads = spec.num_cached_heads
    if heads % tp == 0 or tp % heads == 0:
        return []
    if tp > heads:
        return [say("tp {tp} ÷ {n} KV heads = {each} copies of each", tp=tp, n=heads, each=quotient(tp, heads))]
    return [_uneven(say("KV heads"), heads, tp)]


def _widths(spec: ModelSpec, cut_experts: bool) -> list[tuple[str, int]]:
    """The MLP widths that tp cuts; experts only when ep is 1, else their owner keeps them whole."""
    moe = spec.moe
    widths: list[tuple[str, int]] = []
    if moe is None or moe.dense_layers:
        widths.append((say("intermediate columns"), spec.intermediate_size))
    if moe and cut_experts:
        widths.append((say("columns of an expert"), moe.intermediate_size))
    if moe and moe.shared_intermediate_size:
        widths.append((say("columns of the shared experts"), moe.shared_intermediate_size))
    return widths


def _linear_tensors(spec: ModelSpec, cut_experts: bool) -> list[Tensor]:
    """One of each quantised weight that tp cuts."""
    kinds = spec.layer_kinds(range(spec.num_layers))
    found = [tensor for kind in sorted(kinds) for tensor in layer_common_tensors(spec, *kind)]
    if any(moe_layer for moe_layer, _ in kinds) and cut_experts:
        found += expert_tensors(spec, 0)
    return [tensor for tensor in found if is_quantised(spec, tensor) and tensor.cut]


def _group_problems(spec: ModelSpec, tp: int, cut_experts: bool) -> list[str]:
    if spec.quantization is None or spec.quantization.padded or tp == 1:
        return []
    for tensor in _linear_tensors(spec, cut_experts):
        assert tensor.dim is not None
        group, items = spec.quantization.group[tensor.dim], cut_items(spec, tensor)
        here = tensor.shape[tensor.dim] // items * max(1, items // tp)
        if group and here % group:
            side = say("input") if tensor.dim else say("output")
            return [
                say("{tensor} would keep {n} {side} features a rank at tp {tp}, ÷ {method} group {group} = {each}: "
                    "a quantisation group would be cut", tensor=tensor.name.removesuffix(".weight"), n=here, side=side,
                    tp=tp, method=spec.quantization.method, group=group, each=quotient(here, group))
            ]  # fmt: skip
    return []


@lru_cache(maxsize=256)
def tp_degrees(spec: ModelSpec, cut_experts: bool = True) -> tuple[int, ...]:
    """Every tensor-parallel degree that the model allows, ascending."""
    return tuple(tp for tp in range(1, spec.num_heads + 1) if not _tp_problems(spec, tp, cut_experts))


def _tp_reasons(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    problems = _tp_problems(spec, layout.tp, layout.ep == 1)
    if problems:
        degrees = ", ".join(map(str, tp_degrees(spec, layout.ep == 1)))
        yield say("{problems}; tp may be {degrees}; or split layers instead (pp).",
                  problems=with_semicolons(problems), degrees=degrees)  # fmt: skip


def _dcp_reasons(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    tp, pcp, heads = layout.tp, layout.pcp, spec.num_cached_heads
    if dcp_allowed(layout.dcp, tp=tp, pcp=pcp, num_kv_heads=heads):
        return
    degrees = ", ".join(map(str, dcp_degrees(tp=tp, pcp=pcp, num_kv_heads=heads)))
    kind = say("latent (MLA)") if spec.mla else say("KV heads")
    across = f" × pcp {pcp} = {pcp * max(1, tp // heads)}" if pcp > 1 else ""
    copies = f"max(1, {tp} ÷ {heads}) = {max(1, tp // heads)}{across}"
    yield say(
        "dcp {dcp} shares out copies of KV, and {n} {kind} over tp {tp} leave {copies} of each; with dcp {dcp} there "
        "is no replicated KV to share out: dcp may be {degrees}.", dcp=layout.dcp, n=heads, kind=kind, tp=tp,
        copies=copies, degrees=degrees,
    )  # fmt: skip


def _ep_reasons(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    if layout.ep == 1:
        return
    if spec.moe is None:
        yield say("ep {ep} shares out experts, and {model} has none; leave ep out.", ep=layout.ep, model=spec.name)
    elif layout.ep > spec.moe.num_experts:
        yield say("{n} experts ÷ ep {ep} leaves ranks without any; ep may be at most {n}.", n=spec.moe.num_experts,
                  ep=layout.ep)  # fmt: skip


def _pp_reasons(layout: Layout, spec: ModelSpec) -> Iterator[str]:
    if layout.pp > spec.num_layers:
        yield say("{n} layers cannot fill {pp} stages; pp may be 1 to {n}.", n=spec.num_layers, pp=layout.pp)
    if layout.split and sum(layout.split) != spec.num_layers:
        total = " + ".join(map(str, layout.split))
        yield say("split {split} = {sum} layers, and {model} has {n}.", split=total, sum=sum(layout.split),
                  model=spec.name, n=spec.num_layers)  # fmt: skip


# ---- this engine's limits


def _engine_reasons(spec: ModelSpec) -> Iterator[str]:
    if spec.family not in ENGINE_FAMILIES:
        yield (
            f"The engine of this version runs {', '.join(ENGINE_FAMILIES)}; {spec.family} ({spec.name}) "
            f"can be planned, not run."
        )
    if spec.quantization:
        yield f"This engine needs unquantised weights; {spec.name} has {spec.quantization.method}."
    scaling = spec.rope.scaling
    if scaling and scaling.kind not in ENGINE_ROPE_SCALINGS:
        yield f"The engine of this version has no {scaling.kind} RoPE scaling, which {spec.name} needs."
