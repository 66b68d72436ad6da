"""The model's own messages on measured lines: bytes and counts by hand, times from the line of the right group."""

from __future__ import annotations

import pytest

from labkit.layout import Layout
from labkit.layout.fabrics import group_fabrics
from labkit.measure.step_messages import layout_messages
from labkit.model.spec import load_spec

SPEC = load_spec("lab-5m")


def line(op: str, fabric: str, ranks: int, alpha_us: float, gb_per_s: float) -> dict[str, object]:
    return {"op": op, "in_place": op == "all_reduce", "fabric": fabric, "group_ranks": list(range(ranks)),
            "axis": "tp", "alpha_us": alpha_us, "gb_per_s": gb_per_s}  # fmt: skip


def messages(slug: str, nodes: list[int], fits: list[dict[str, object]]) -> dict[tuple[str, str, str], dict]:
    layout = Layout.parse(slug)
    groups = [vars(group) for group in group_fabrics(layout, "shm", nodes)]
    found = layout_messages(layout, SPEC, 4, fits, groups)
    return {(each["phase"], each["axis"], each["op"]): each for each in found}


def test_decode_s_sums_stand_on_the_line_of_their_group() -> None:
    found = messages("tp2", [], [line("all_reduce", "shm", 2, 5.0, 10.0), line("all_reduce", "gloo", 2, 300.0, 1.0)])
    decode = found["decode", "tp", "all_reduce"]
    assert decode["bytes"] == SPEC.hidden_size * 4 and decode["count"] == 2 * SPEC.num_layers + 1
    assert decode["time_us"] == pytest.approx(5 + decode["bytes"] / 1e4)
    assert decode["step_us"] == pytest.approx(decode["count"] * decode["time_us"]) and decode["fabric"] == "shm"
    assert found["decode-8", "tp", "all_reduce"]["bytes"] == 8 * decode["bytes"]
    assert found["prefill", "tp", "all_reduce"]["bytes"] == 512 * decode["bytes"]
    assert found["decode", "tp", "gather"]["time_us"] is None, "no line, no time"


def test_stages_on_two_nodes_send_over_the_slow_link_and_tp_stays_on_its_own() -> None:
    fits = [line("sendrecv", "gloo", 2, 50.0, 0.025), line("all_reduce", "shm", 2, 5.0, 10.0)]
    found = messages("pp2xtp2", [0, 0, 1, 1], fits)
    sent = found["decode", "pp", "sendrecv"]
    assert (sent["fabric"], sent["count"], sent["bytes"]) == ("gloo", 1, SPEC.hidden_size * 4)
    assert sent["time_us"] == pytest.approx(50 + sent["bytes"] / 25)
    assert found["decode", "tp", "all_reduce"]["fabric"] == "shm"


def test_an_unsplit_layout_sends_nothing() -> None:
    assert messages("tp1", [], []) == {} and messages("dp2", [], []) == {}
