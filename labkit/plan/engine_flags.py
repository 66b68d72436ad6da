"""A layout in the words of production engines: the flags with which vLLM, SGLang or TensorRT-LLM splits a model so.

Each engine has a table from our axes to its flags. Where an engine splits otherwise than we do, it is said in a note
(what it does instead), and where it has nothing of the kind, the layout is refused with a sentence. The words are those
of vLLM 0.32 (its parser is asked in a test), of SGLang 0.5.23's server arguments (read in its wheel) and of
TensorRT-LLM 1.2's trtllm-serve (read in its repository); the last two have not been run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.layout import AnyLayout, Deployment, Layout, LayoutError
from labkit.said import say

ENGINES = ("vllm", "sglang")
"""That labkit starts by itself."""
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
VERSIONS = {"vllm": "0.32", "sglang": "0.5.23", "trtllm": "1.2"}
"""That the words are of."""


@dataclass(frozen=True)
class DeployFlags:
    """What a server of `engine` is given for a layout, beside its model and its port."""

    engine: str
    layout: Layout
    flags: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Where that engine's splitting differs from ours, a sentence each."""
    mixture_notes: tuple[str, ...] = ()
    """The same, of models with experts only."""
    options: dict[str, Any] = field(default_factory=dict)
    """What the engine takes from a file of options only (TensorRT-LLM's YAML)."""
    num_servers: int = 1
    """Alike, each with these flags, where the engine has no replicas behind one port."""


def deploy_flags(engine: str, layout: AnyLayout) -> DeployFlags:
    """The flags of a layout. Raises ValueError for an unknown engine, LayoutError (one too) for what it cannot do."""
    if engine not in ENGINES:
        raise ValueError(f"{engine!r} is no engine that labkit can start; choose one of {', '.join(ENGINES)}.")
    if isinstance(layout, Deployment):
        raise LayoutError(
            f"{layout} is pools with roles, which are several {ENGINE_NAMES[engine]} servers and a router between "
            "them; labkit starts one server, so give one layout."
        )
    return flags_of(engine, layout)


def flags_of(engine: str, layout: Layout) -> DeployFlags:
    """The same of every engine that there are commands for. Raises as `deploy_flags`."""
    if engine not in _TABLES:
        raise ValueError(f"There are no commands for {engine!r}; choose one of {', '.join(_TABLES)}.")
    name = ENGINE_NAMES[engine]
    if layout.ring:
        raise LayoutError(say("{engine} has no ring of KV over prefill-context ranks (it gathers): leave out +ring.",
                              engine=name))  # fmt: skip
    return _TABLES[engine](layout)


# ---- vLLM


def _vllm(layout: Layout) -> DeployFlags:
    _check_vllm(layout)
    degrees = {
        "--tensor-parallel-size": layout.tp,
        "--pipeline-parallel-size": layout.pp,
        "--data-parallel-size": layout.dp,
        "--prefill-context-parallel-size": layout.pcp,
        "--decode-context-parallel-size": layout.dcp,
    }
    flags = _degrees(degrees, always="--tensor-parallel-size")
    if layout.ep > 1:
        flags.append("--enable-expert-parallel")
    environment = {"VLLM_PP_LAYER_PARTITION": _split(layout)} if layout.split else {}
    return DeployFlags("vllm", layout, tuple(flags), environment, mixture_notes=_vllm_notes(layout))


def _check_vllm(layout: Layout) -> None:
    inside = layout.tp * layout.pcp
    if layout.sp:
        raise LayoutError(say("vLLM has no flag for sequence-parallel norms: leave out +sp."))
    if layout.dp > 1 and layout.ep > 1 and not layout.attention_dp:
        raise LayoutError(say(
            "vLLM shares experts out over all its ranks of a stage, replicas included: with dp {dp}, ep can be 1 or "
            "{most}, and {layout} has ep {ep}.", dp=layout.dp, most=layout.dp * inside, layout=layout, ep=layout.ep,
        ))  # fmt: skip


def _vllm_notes(layout: Layout) -> tuple[str, ...]:
    if layout.dp == 1 or layout.ep > 1:
        return ()
    return (
        say("vLLM cuts experts over tp and dp together, so that its replicas step together; ours hold all experts "
            "each."),
    )  # fmt: skip


# ---- SGLang


def _sglang(layout: Layout) -> DeployFlags:
    _check_sglang(layout)
    attention_dp = layout.attention_dp
    degrees = {
        "--tp-size": layout.tp * layout.pcp * (layout.dp if attention_dp else 1),
        "--pp-size": layout.pp,
        "--dp-size": 1 if attention_dp else layout.dp,
        "--attn-dp-size": layout.dp if attention_dp else 1,
        "--ep-size": layout.ep,
        "--attn-cp-size": layout.pcp,
        "--dcp-size": layout.dcp,
    }
    flags = _degrees(degrees, always="--tp-size")
    if layout.pcp > 1:
        flags += ["--enable-prefill-cp", "--cp-strategy", "zigzag"]
    environment = {"SGLANG_PP_LAYER_PARTITION": _split(layout)} if layout.split else {}
    return DeployFlags("sglang", layout, tuple(flags), environment, _sglang_notes(layout))


def _check_sglang(layout: Layout) -> None:
    if layout.sp:
        raise LayoutError(say("SGLang has no flag for sequence-parallel norms: leave out +sp."))
    if layout.pcp > 1 and layout.dcp > 1:
        raise LayoutError(say(
            "SGLang shares KV out over tensor-parallel ranks only, and {layout} also over pcp: choose pcp or dcp.",
            layout=layout,
        ))  # fmt: skip


def _sglang_notes(layout: Layout) -> tuple[str, ...]:
    notes = []
    if layout.pcp > 1:
        notes.append(say(
            "SGLang counts its prefill-context ranks inside --tp-size (here {tp} x {pcp}) and cuts MLPs over all of "
            "them; ours are cut over tp.", tp=layout.tp, pcp=layout.pcp,
        ))  # fmt: skip
    if layout.attention_dp:
        notes.append(say("Before 0.5.23 SGLang wrote --attn-dp-size N as --dp-size N --enable-dp-attention."))
    return tuple(notes)


# ---- TensorRT-LLM


def _trtllm(layout: Layout) -> DeployFlags:
    _check_trtllm(layout)
    attention_dp = layout.attention_dp
    degrees = {
        "--tp_size": layout.tp * (layout.dp if attention_dp else 1),
        "--pp_size": layout.pp,
        "--ep_size": layout.ep,
    }
    options: dict[str, Any] = {"enable_attention_dp": True} if attention_dp else {}
    if layout.split:
        options["pp_partition"] = list(layout.split)
    flags = tuple(_degrees(degrees, always="--tp_size"))
    replicas = 1 if attention_dp else layout.dp
    return DeployFlags("trtllm", layout, flags, notes=_trtllm_notes(replicas), options=options, num_servers=replicas)


def _check_trtllm(layout: Layout) -> None:
    if layout.sp:
        raise LayoutError(say("TensorRT-LLM has no option for sequence-parallel norms: leave out +sp."))
    if layout.pcp > 1:
        raise LayoutError(say(
            "TensorRT-LLM's --cp_size is star or Helix attention, none of which shares a prompt out as pcp does: "
            "choose a layout without pcp."
        ))  # fmt: skip
    if layout.dcp > 1:
        raise LayoutError(say(
            "TensorRT-LLM shares out the KV of decodes in Helix only, for latent attention on generation servers: "
            "choose a layout without dcp."
        ))  # fmt: skip
    if layout.attention_dp and layout.tp > 1:
        raise LayoutError(say(
            "TensorRT-LLM's attention data parallelism keeps whole attention on each GPU, and {layout} cuts it over "
            "tp {tp}: the nearest that it has is {nearest}.", layout=layout, tp=layout.tp,
            nearest=f"dp{layout.dp * layout.tp}xep{layout.ep}",
        ))  # fmt: skip


def _trtllm_notes(replicas: int) -> tuple[str, ...]:
    if replicas == 1:
        return ()
    return (
        say("trtllm-serve has no replicas behind one port: these are {n} servers, and a balancer of yours goes before "
            "their ports.", n=replicas),
    )  # fmt: skip


# ---- all


def _degrees(degrees: dict[str, int], always: str) -> list[str]:
    """Flags of the degrees above 1; the tensor-parallel size is always said."""
    return [word for flag, n in degrees.items() if n > 1 or flag == always for word in (flag, str(n))]


def _split(layout: Layout) -> str:
    return ",".join(map(str, layout.split or ()))


_TABLES: dict[str, Callable[[Layout], DeployFlags]] = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}
