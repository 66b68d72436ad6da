"""A layout in an engine's flags, by hand-written examples, and what an engine does not have."""

from __future__ import annotations

import pytest

from labkit.layout import LayoutError, read_layout
from labkit.plan.deploy import deploy_flags

VLLM = {
    "tp1": "--tensor-parallel-size 1",
    "tp2": "--tensor-parallel-size 2",
    "pp2": "--tensor-parallel-size 1 --pipeline-parallel-size 2",
    "dp2xpp2xtp4": "--tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 2",
    "tp4xdcp2": "--tensor-parallel-size 4 --decode-context-parallel-size 2",
    "tp2xep2": "--tensor-parallel-size 2 --enable-expert-parallel",
    "dp2xtp2xep4": "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel",
    "pcp2": "--tensor-parallel-size 1 --prefill-context-parallel-size 2",
    "pcp2xtp2xdcp2": "--tensor-parallel-size 2 --prefill-context-parallel-size 2 --decode-context-parallel-size 2",
}
SGLANG = {
    "tp2": "--tp-size 2",
    "pp2xtp2": "--tp-size 2 --pp-size 2",
    "dp2xtp2": "--tp-size 2 --dp-size 2",
    "tp4xdcp2": "--tp-size 4 --dcp-size 2",
    "tp2xep2": "--tp-size 2 --ep-size 2",
    "dp2xtp2xep4": "--tp-size 4 --attn-dp-size 2 --ep-size 4",
    "pcp2xtp2": "--tp-size 4 --attn-cp-size 2 --enable-prefill-cp --cp-strategy zigzag",
}


@pytest.mark.parametrize(
    ("engine", "layout", "flags"),
    [("vllm", *pair) for pair in VLLM.items()] + [("sglang", *pair) for pair in SGLANG.items()],
)
def test_a_layout_is_these_flags(engine: str, layout: str, flags: str):
    assert " ".join(deploy_flags(engine, read_layout(layout)).flags) == flags


def test_an_uneven_split_of_layers_is_a_variable_of_the_engine():
    layout = read_layout("pp2+split=4-6")
    assert deploy_flags("vllm", layout).environment == {"VLLM_PP_LAYER_PARTITION": "4,6"}
    assert deploy_flags("sglang", layout).environment == {"SGLANG_PP_LAYER_PARTITION": "4,6"}


@pytest.mark.parametrize(
    ("engine", "layout", "sentence"),
    [
        ("vllm", "pcp2+ring", "leave out +ring"),
        ("sglang", "pcp2+ring", "leave out +ring"),
        ("vllm", "prefill:tp2,decode:tp1", "one server, so give one layout"),
        ("vllm", "dp2xtp2xep2", "ep can be 1 or 4, and DP2×TP2×EP2 has ep 2"),
        ("vllm", "tp2+sp", "leave out +sp"),
        ("sglang", "tp2+sp", "leave out +sp"),
        ("sglang", "pcp2xtp2xdcp2", "choose pcp or dcp"),
    ],
)
def test_what_an_engine_lacks_is_a_sentence(engine: str, layout: str, sentence: str):
    with pytest.raises(LayoutError) as refusal:
        deploy_flags(engine, read_layout(layout))
    assert sentence in str(refusal.value) and str(refusal.value).endswith(".")


def test_an_unknown_engine_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="'tgi' is no engine that labkit can start; choose one of vllm, sglang"):
        deploy_flags("tgi", read_layout("tp1"))


def test_where_an_engine_splits_otherwise_it_is_noted():
    replicas = deploy_flags("vllm", read_layout("dp2"))
    assert "step together" in replicas.mixture_notes[0] and replicas.notes == ()
    assert deploy_flags("vllm", read_layout("tp2")).mixture_notes == ()
    assert "inside --tp-size (here 2 x 2)" in deploy_flags("sglang", read_layout("pcp2xtp2")).notes[0]
