"""Where TTFT and TPOT went, by runs made by hand: each kind of verdict from records whose cause was put in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from labkit.measure.achieved import achieved
from labkit.measure.binding import band_mean
from labkit.measure.breakdown import TPOT_PARTS, step_share, summarize_tpot, tpot_parts_ms
from labkit.measure.explain import explain
from labkit.measure.lateness import who_is_late
from labkit.measure.metrics import Window, tpot_ms
from labkit.model.spec import load_spec
from tests.measure.make import MS, request, server_times, step

TTFT = {"network": 2.0, "queue": 5.0, "compute": 80.0, "wait": 5.0, "transfer": 5.0, "delivery": 3.0}
NO_ROWS = pd.DataFrame(columns=["phase"])


@dataclass
class MadeRun:
    records: list
    step_records: list = field(default_factory=list)
    collectives: Any = field(default_factory=lambda: NO_ROWS)
    layout: str = "tp2"

    @property
    def window(self) -> Window:
        return Window.of(self.records)

    @property
    def summary(self) -> dict[str, Any]:
        where = {"backend": "cpu", "dtype": "float32", "num_cores": 2, "num_ranks": 2, "threads_per_rank": 1}
        return {
            "layout": self.layout, "model": "lab-5m", "workload": "chat", "rate": 10.0, "environment": where,
            "step_share": step_share(self.step_records, self.window), "handoff": None,
        }  # fmt: skip


def _request(index: int, ttft: dict[str, float], decode: dict[str, float], **fields: Any):
    """Ten tokens; the parts of TPOT are those of `decode`, ms a token."""
    at, first = index * 100.0, index * 100.0 + sum(ttft.values())
    gap = sum(decode.values())
    record = request(at, tuple(first + k * gap for k in range(10)), index=index)
    told = {f"decode_{name}_ns": round(value * 9 * MS) for name, value in decode.items()}
    record.server = server_times(record, ttft, **told | fields)
    record.server.last_end_ns = record.last_ns - round(ttft["delivery"] * MS)
    return record


def made_run(
    n: int = 40, ttft: dict[str, float] = TTFT, decode: dict[str, float] | None = None, **fields: Any
) -> MadeRun:
    decode = decode or {"queue": 1.0, "compute": 8.0, "wait": 0.5, "transfer": 0.5}
    steps = [step(i * 100, i * 100 + 10, [8.0, 8.0], [1.0, 1.0], [1.0, 1.0], step_id=i) for i in range(n)]
    prompt = ([30.0, 30.0], [5.0, 5.0], [5.0, 5.0])
    steps += [step(i * 100 + 20, i * 100 + 60, *prompt, prefill=1, decode=0) for i in range(n)]
    return MadeRun([_request(i, ttft, decode) for i in range(n)], steps, **fields)


def _kinds(run: MadeRun, **more: Any) -> dict[tuple[str, int], str]:
    return {(v.figure, v.q): v.kind for v in explain(run, **more).verdicts}


ROOFS = SimpleNamespace(read_gb_s=10.0, gflop_s=100.0)


# ---- the parts


def test_parts_of_tpot_are_a_token_s_share_and_add_up_to_it():
    record = _request(0, TTFT, {"queue": 1.0, "compute": 8.0, "wait": 0.5, "transfer": 0.25})
    parts = dict(zip(TPOT_PARTS, tpot_parts_ms(record), strict=True))
    assert parts == pytest.approx(
        {"queue": 1, "compute": 8, "wait": 0.5, "transfer": 0.25, "handoff": 0, "delivery": 0, "unaccounted": 0}
    )
    record.server.decode_compute_ns -= 18 * MS
    assert tpot_parts_ms(record)[-1] == pytest.approx(2.0)
    assert summarize_tpot([record])["tpot_parts"]["unaccounted_share"] == pytest.approx(2 / 9.75)


def test_a_handoff_is_tpot_s_only_where_the_first_token_did_not_wait_for_it():
    moved = {"handoff_ns": 18 * MS, "handoff_queue_ns": 9 * MS}
    decode = {"queue": 1.0, "compute": 8.0, "wait": 0.5, "transfer": 0.5}
    record = _request(0, TTFT, decode, **moved)
    parts = dict(zip(TPOT_PARTS, tpot_parts_ms(record), strict=True))
    assert parts["handoff"] == pytest.approx(2.0) and parts["queue"] == pytest.approx(2.0)
    record = _request(0, TTFT, decode, **moved)
    record.server.released_ns = record.server.first_end_ns
    parts = dict(zip(TPOT_PARTS, tpot_parts_ms(record), strict=True))
    assert parts["handoff"] == 0 and parts["queue"] == pytest.approx(1.0)
    assert sum(parts.values()) == pytest.approx(tpot_ms(record))


def test_one_token_or_another_clock_has_no_parts_of_tpot():
    one = request(0, (100,), index=0)
    one.server = server_times(one, TTFT)
    late = _request(0, TTFT, {"compute": 8.0})
    late.server.last_end_ns = late.last_ns + 1
    assert tpot_parts_ms(one) is None and tpot_parts_ms(late) is None and tpot_parts_ms(request(0, (1, 2))) is None


def test_a_waterfall_is_of_the_requests_around_the_percentile_and_no_others():
    rows = np.column_stack([np.arange(101.0), np.zeros(101)])
    assert band_mean(rows, 50).tolist() == [50, 0] and band_mean(rows, 95).tolist() == [95, 0]
    rows[48:53] += [-7, 7]  # the five of 101 that are around the median, of the same sums
    assert band_mean(rows, 50).tolist() == [43, 7] and band_mean(rows, 95).tolist() == [95, 0]
    assert band_mean(np.array([[3.0, 4.0]]), 95).tolist() == [3, 4]


# ---- verdicts


@pytest.mark.parametrize(
    ("part", "kind"),
    [("queue", "queue-bound"), ("wait", "waiting"), ("transfer", "transfer-bound"), ("network", "outside")],
)
def test_the_part_that_was_put_in_is_named(part: str, kind: str):
    run = made_run(ttft={**TTFT, "compute": 20.0, part: 100.0})
    found = next(v for v in explain(run).verdicts if (v.figure, v.q) == ("TTFT", 50))
    assert found.kind == kind and found.evidence["shares"] and f"{part} " in found.sentence


def test_compute_is_told_apart_by_the_roofs_and_only_by_them():
    run = made_run()
    assert _kinds(run)["TPOT", 50] == "computing"
    at = achieved([s for s in run.step_records if s.num_decode_seqs], run.summary)
    slow_memory = SimpleNamespace(read_gb_s=at.gb_s / 0.8, gflop_s=1e6)
    slow_products = SimpleNamespace(read_gb_s=1e6, gflop_s=at.gflop_s / 0.8)
    assert _kinds(run, roofs=slow_memory)["TPOT", 50] == "bandwidth-bound"
    assert _kinds(run, roofs=slow_products)["TPOT", 50] == "compute-bound"
    assert _kinds(run, roofs=SimpleNamespace(read_gb_s=1e6, gflop_s=1e6))["TPOT", 50] == "overhead-bound"
    assert "products 100 GFLOP/s (as measured" in repr(explain(run, roofs=ROOFS))


def test_bytes_of_a_decode_step_are_weights_and_context():
    """lab-5m is tied: its embedding is read as the head, so a step reads all weights and 100 tokens of KV."""
    spec = load_spec("lab-5m")
    alone = step(0, 10, [8.0], [0.0], [0.0])
    alone.layout = "tp1"
    found = achieved([alone], {"layout": "tp1", "model": "lab-5m", "environment": {"dtype": "float32"}})
    read = 4 * spec.num_parameters + 100 * spec.kv_bytes_per_token(4)
    assert found.read_mib == pytest.approx(read / 2**20)
    assert found.gb_s == pytest.approx(read / 8e6)
    flops = sum(spec.flops(1, 100).values())
    assert found.gflop_s == pytest.approx(flops / 8e6, rel=0.02)


def test_flops_of_a_prefill_step_are_those_of_the_prompt():
    whole = step(0, 10, [8.0], [0.0], [0.0], prefill=1, decode=0)
    whole.context_tokens = 0
    found = achieved([whole], {"layout": "tp1", "model": "lab-5m", "environment": {"dtype": "float32"}})
    assert found.gflop_s == pytest.approx(sum(load_spec("lab-5m").flops(16).values()) / 8e6, rel=0.02)


def test_an_unknown_model_or_no_step_has_nothing_to_count():
    where = {"layout": "tp1", "model": "somebody-s", "environment": {}}
    assert achieved([step(0, 10, [8.0], [0.0], [0.0])], where) is None
    assert achieved([], where | {"model": "lab-5m"}) is None


def test_what_cannot_be_told_is_not_told():
    few = {(v.figure, v.q): v for v in explain(made_run(12)).verdicts}
    assert few["TTFT", 50].kind == "cannot tell" and "Too few requests (12)" in few["TTFT", 50].sentence
    assert _kinds(made_run(40))["TTFT", 95] == "cannot tell" and _kinds(made_run(200))["TTFT", 95] != "cannot tell"
    foreign = MadeRun([request(i * 100, (i * 100 + 50, i * 100 + 60), index=i) for i in range(40)], layout="")
    assert set(_kinds(foreign).values()) == {"cannot tell"} and "told nothing" in repr(explain(foreign))
    untold = made_run()
    for record in untold.records:
        record.server.compute_ns -= 30 * MS
    assert "in none of its parts" in explain(untold).verdicts[0].sentence
    even = dict.fromkeys(("network", "queue", "compute", "wait", "transfer"), 20.0) | {"delivery": 1.0}
    assert _kinds(made_run(ttft=even))["TTFT", 50] == "mixed"


# ---- waiting


def _calls(late: list[int], size: int = 2, lag_ms: float = 5.0, num_layers: int = 4) -> pd.DataFrame:
    """One all-reduce each, layer after layer; rank late[i] comes so much after the others."""
    rows = [
        {"epoch": 1, "group_id": 1, "seq": seq, "op": "all_reduce", "axis": "tp", "phase": "decode", "rank": rank,
         "layer": seq % num_layers, "enter_ns": seq * 100 * MS + (round(lag_ms * MS) if rank == last else rank)}
        for seq, last in enumerate(late)
        for rank in range(size)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_straggler_is_named_and_ranks_that_take_turns_are_not():
    by_rank = [{"rank": 0, "wait": 0.3}, {"rank": 1, "wait": 0.01}]
    sentence, figures = who_is_late(_calls([1] * 40), ("decode",), by_rank)
    assert figures["straggler"] == 1 and figures["behind_us"] == pytest.approx(5000)
    assert "Rank 1 is last to 100% of the tp collectives, by 5000 µs" in sentence and "rank 0 30%" in sentence
    sentence, figures = who_is_late(_calls([0, 1] * 20), ("decode",), by_rank)
    assert figures["straggler"] is None and "No rank in particular" in sentence
    assert who_is_late(_calls([1] * 3), ("decode",), by_rank)[1]["straggler"] is None, "three are chance"
    assert who_is_late(_calls([1] * 40), ("prefill",), by_rank)[1]["straggler"] is None


def test_who_is_late_in_one_layer_is_named_with_the_layer_though_last_to_few_calls():
    """Rank 1 is 5 ms late to layer 2; elsewhere whoever is last comes a few microseconds after the other."""
    even = _calls([0, 1] * 80, lag_ms=0.01)
    late = _calls([1] * 160)
    rows = pd.concat([even[even["layer"] != 2], late[late["layer"] == 2]])
    sentence, figures = who_is_late(rows, ("decode",), [{"rank": 0, "wait": 0.3}, {"rank": 1, "wait": 0.0}])
    assert (figures["straggler"], figures["layer"]) == (1, 2) and figures["behind_us"] == pytest.approx(5000)
    assert "Rank 1 is last to 100% of the tp collectives of layer 2, by 5000 µs" in sentence
    by_turns = _calls([seq // 4 % 2 for seq in range(160)])
    turns = pd.concat([even[even["layer"] != 2], by_turns[by_turns["layer"] == 2]])
    assert who_is_late(turns, ("decode",), [])[1]["straggler"] is None, "now one is late to layer 2, now the other"
    once = even.copy()
    once.loc[(once["seq"] == 10) & (once["rank"] == 1), "enter_ns"] += 500 * MS
    assert who_is_late(once, ("decode",), [])[1]["straggler"] is None, "one stall is no straggler"


def test_a_verdict_of_waiting_says_for_whom():
    decode = {"queue": 1.0, "compute": 3.0, "wait": 8.0, "transfer": 0.5}
    run = made_run(decode=decode, collectives=_calls([1] * 40))
    found = next(v for v in explain(run).verdicts if (v.figure, v.q) == ("TPOT", 50))
    assert found.kind == "waiting" and found.evidence["straggler"] == 1 and "Rank 1 is last" in found.sentence


# ---- two runs


def test_what_grew_is_named_with_an_interval_and_noise_is_not():
    low, high = made_run(), made_run(ttft={**TTFT, "queue": 105.0})
    growth = {(g.figure, g.q): g for g in explain(low, high).growth}
    assert growth["TTFT", 50].total[0] == pytest.approx(100)
    assert "TTFT p50 +100.0 ms" in growth["TTFT", 50].sentence and "queue +100.0 (100%)" in growth["TTFT", 50].sentence
    assert "cannot tell it from none" in growth["TPOT", 50].sentence
    assert "too few requests for p95" in growth["TTFT", 95].sentence


def test_an_explanation_shows_itself_as_text_html_and_json():
    found = explain(made_run(), made_run(ttft={**TTFT, "queue": 105.0}))
    text, page = repr(found), found._repr_html_()
    assert "tp2, lab-5m, chat at 10 requests/s" in text and "What grew:" in text
    assert "Of the ranks' time in steps, " in text and found.steps_unaccounted is not None
    assert "prefill compute" in text and "80.00 ms" in text and "Steady from 0.0 s to 3.9 s." in text
    assert page.count("<table") == page.count("</table>") == 8 and "prefill compute" in page
    lengths = [float(width) for width in re.findall(r"width:([\d.]+)%", page)]
    assert lengths.count(40.0) == 4, "80 of 100 ms, and of 200: both loads' TTFT stands on one scale of 200 ms"
    told = json.loads(json.dumps(found.to_dict()))
    assert {v["percentile"] for v in told["verdicts"]} == {50, 95} and told["other"]["waterfalls"]
