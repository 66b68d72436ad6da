"""Result files of other load clients: their requests as ours, by figures done by hand, and a round trip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.lab.importing import import_results
from labkit.lab.run import Run
from labkit.measure.export import to_vllm_json
from labkit.measure.imported import read_results
from labkit.measure.metrics import itl_ms, tpot_ms, ttft_ms
from tests.measure.make import request

REAL = Path(__file__).parent / "files"
"""What `vllm bench serve` (0.32.0) wrote beside a real server on two ranks of a CPU: an open loop and a closed one."""
VLLM = {
    "date": "20260131-093000",
    "backend": "openai",
    "model_id": "some/model",
    "request_rate": 2.0,
    "max_concurrency": None,
    "tp": 2,
    "pp": "1",
    "completed": 2,
    "median_ttft_ms": 55.0,
    "input_lens": [8, 16, 4],
    "output_lens": [3, 5, 0],
    "start_times": [100.0, 100.5, 101.0],
    "queue_times": [0.0, 0.01, 0.0],
    "ttfts": [0.05, 0.06, 0.0],
    "itls": [[0.01, 0.03], [0.02, 0.02], []],
    "errors": ["", "", "Service Unavailable"],
}
AIPERF = [
    {
        "metadata": {"x_request_id": "w", "request_start_ns": 500, "benchmark_phase": "warmup", "was_cancelled": False},
        "metrics": {"time_to_first_token": {"value": 1.0, "unit": "ms"}},
        "error": None,
    },
    {
        "metadata": {"x_request_id": "a", "request_start_ns": 10**9, "benchmark_phase": "profiling"},
        "metrics": {
            "input_sequence_length": {"value": 32, "unit": "tokens"},
            "output_sequence_length": {"value": 4, "unit": "tokens"},
            "time_to_first_token": {"value": 40.0, "unit": "ms"},
            "inter_chunk_latency": {"value": [10.0, 20.0, 30.0], "unit": "ms"},
            "request_latency": {"value": 100.0, "unit": "ms"},
        },
        "error": None,
    },
    {
        "metadata": {"x_request_id": "b", "request_start_ns": 2 * 10**9, "benchmark_phase": "profiling"},
        "metrics": {
            "output_sequence_length": {"value": 11, "unit": "tokens"},
            "time_to_first_token": {"value": 0.05, "unit": "sec"},
            "request_latency": {"value": 250.0, "unit": "ms"},
        },
    },
    {
        "metadata": {"x_request_id": "c", "request_start_ns": 3 * 10**9, "was_cancelled": True},
        "metrics": {"error_isl": {"value": 32, "unit": "tokens"}},
        "error": {"code": 499, "type": "RequestCancellationError", "message": "cancelled"},
    },
]


def _file(tmp_path: Path, content: object, name: str = "result.json") -> Path:
    path = tmp_path / name
    lines = [json.dumps(row) for row in content] if isinstance(content, list) else [json.dumps(content)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_vllms_detailed_result(tmp_path: Path):
    found = read_results(_file(tmp_path, VLLM))
    one, two, three = found.records
    assert (found.client, found.model, found.rate) == ("vllm", "some/model", 2.0)
    assert found.started_at == "2026-01-31T09:30:00"
    assert ttft_ms(one) == pytest.approx(50) and tpot_ms(one) == pytest.approx(20)
    assert itl_ms(one) == pytest.approx([10, 30])
    assert ttft_ms(two) == pytest.approx(70), "10 ms late, and 60 from the send"
    assert tpot_ms(two) == pytest.approx(10) and two.chunk_tokens == [1, 2, 2]
    assert (three.status, three.error, three.first_ns) == ("failed", "Service Unavailable", 0)


def test_in_a_closed_loop_nothing_was_due_before_it_was_sent(tmp_path: Path):
    found = read_results(_file(tmp_path, VLLM | {"max_concurrency": 4, "request_rate": "inf"}))
    assert ttft_ms(found.records[1]) == pytest.approx(60)
    assert (found.rate, found.concurrency) == (None, 4)


def test_aiperfs_records(tmp_path: Path):
    warm, one, two, three = read_results(_file(tmp_path, AIPERF, "profile_export.jsonl")).records
    assert warm.warmup and not one.warmup
    assert ttft_ms(one) == pytest.approx(40) and tpot_ms(one) == pytest.approx(20)
    assert itl_ms(one) == pytest.approx([10, 20, 30]) and one.prompt_tokens == 32
    assert ttft_ms(two) == pytest.approx(50) and tpot_ms(two) == pytest.approx(20)
    assert (three.status, three.http_status, three.error) == ("cancelled", 499, "cancelled")


def test_our_own_export_comes_back_with_the_same_figures(tmp_path: Path):
    records = [
        request(i * 100.0, (i * 100.0 + 30 + i, i * 100.0 + 45, i * 100.0 + 70), index=i, late_ms=0.5) for i in range(5)
    ]
    path = _file(tmp_path, to_vllm_json({"run_id": "r", "layout": "tp2", "model": "m", "rate": 10.0}, records))
    back = read_results(path).records
    for name in (ttft_ms, tpot_ms):
        assert [name(record) for record in back] == pytest.approx([name(record) for record in records], abs=1e-3)


@pytest.mark.parametrize("load", ["open", "closed"])
def test_a_file_of_a_real_vllm_comes_to_the_percentiles_that_it_printed(load: str):
    path = REAL / f"vllm-0.32-{load}.json"
    told, run = json.loads(path.read_text()), import_results(path)
    assert (run.summary["layout"], run.summary["requests"]["completed"]) == ("tp2", told["completed"])
    late_ms = max(told["queue_times"]) * 1e3 if load == "open" else 0.0
    for name in ("ttft", "tpot", "itl", "e2el"):
        from_schedule = late_ms if name in ("ttft", "e2el") else 0.0  # theirs count from the send
        for q in ("p50", "p90", "p95", "p99", "mean"):
            wanted = told[f"{q}_{name}_ms"]
            assert wanted - 1e-3 <= run.summary[f"{name}_ms"][q] <= wanted + from_schedule + 1e-3


@pytest.mark.parametrize("load", ["open", "closed"])
def test_a_file_of_a_real_vllm_goes_out_as_it_came_in(load: str, tmp_path: Path):
    path = REAL / f"vllm-0.32-{load}.json"
    told, run = json.loads(path.read_text()), import_results(path)
    back = json.loads(run.save(tmp_path / "back.json")[0].read_text())
    figures = ("ttft", "tpot", "itl", "e2el")
    assert set(told) - set(back) == {f"p{q}_{name}_ms" for q in (50, 90, 95) for name in figures}
    for name in ("ttfts", "latencies"):
        assert back[name] == pytest.approx(told[name], abs=2e-9)
    for name in ("output_lens", "input_lens", "errors"):
        assert back[name] == told[name]
    assert [gap for gaps in back["itls"] for gap in gaps] == pytest.approx(
        [gap for gaps in told["itls"] for gap in gaps], abs=2e-9
    )
    summaries = [key for key in back if key.endswith("_ms")]
    assert len(summaries) == 16
    assert [back[key] for key in summaries] == pytest.approx([told[key] for key in summaries], abs=1e-3)
    for name in ("date", "request_rate", "max_concurrency", "burstiness", "model_id", "num_prompts", "completed"):
        assert back[name] == told[name], name
    assert (back["tp"], back["total_output_tokens"]) == (int(told["tp"]), told["total_output_tokens"])
    again = import_results(tmp_path / "back.json")
    assert again.summary["tpot_ms"]["p99"] == pytest.approx(run.summary["tpot_ms"]["p99"])
    assert again.summary["layout"] == "tp2"


@pytest.mark.parametrize("layout", ["dp2xtp2xep4", "prefill:tp1,decode:tp2"])
def test_our_own_export_comes_back_with_its_layout(layout: str, tmp_path: Path):
    written = to_vllm_json({"run_id": "r", "layout": layout, "model": "m"}, [request(0.0, (30.0, 45.0), index=0)])
    assert import_results(_file(tmp_path, written)).summary["layout"] == layout
    del written["labkit"]
    assert import_results(_file(tmp_path, written)).summary["layout"] != layout


def test_a_file_becomes_a_stored_run_that_says_where_it_is_from(tmp_path: Path):
    run = import_results(_file(tmp_path, VLLM))
    stored = Run.load(run.run_id)
    assert stored.provenance == "recorded" and stored.summary["layout"] == "tp2"
    assert stored.summary["requests"]["completed"] == 2 and stored.summary["requests"]["failed"] == 1
    assert stored.summary["tpot_ms"]["p50"] == pytest.approx(15)
    assert stored.summary["engine"]["imported"]["file"] == "result.json"
    codes = [verdict["code"] for verdict in stored.quality]
    assert codes[0] == "imported" and not {"client-lag", "schedule", "warm-cache"} & set(codes)
    assert len(stored.requests) == 3


def test_a_layout_may_be_given_where_the_file_says_none(tmp_path: Path):
    path = _file(tmp_path, AIPERF, "profile_export.jsonl")
    assert import_results(path).summary["layout"] is None
    assert import_results(path, "pp2").summary["num_ranks"] == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"median_ttft_ms": 1.0, "completed": 3}, "--save-detailed"),
        ({"request_latency": {"avg": 1.0}}, "profile_export.jsonl that lies beside it"),
        ({"a": 1}, "neither a result of"),
        ([{"a": 1}, {"b": 2}], "not aiperf's records"),
        ({**VLLM, "itls": [[]]}, "different lengths"),
        ({name: value for name, value in VLLM.items() if name != "start_times"}, "no start_times"),
        ([{"metadata": {}, "metrics": {}}], "without 'request_start_ns'"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(content: object, sentence: str, tmp_path: Path):
    with pytest.raises(ValueError, match=sentence):
        read_results(_file(tmp_path, content))


def test_no_file_and_no_json(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no file"):
        read_results(tmp_path / "nothing.json")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="neither JSON nor JSON lines"):
        read_results(tmp_path / "text")
