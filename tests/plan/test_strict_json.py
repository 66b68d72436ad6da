"""What the planner's commands print as JSON is read by a reader that takes no Infinity and no NaN."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.plan.strict_json import finite, json_line


def strict(line: str):
    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(line, parse_constant=refuse)


def printed(*words: str):
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.strip().splitlines()
    return strict(line)


def test_what_is_no_number_is_null_wherever_it_stands():
    given = {"a": [1.0, math.inf, (math.nan, {"b": -math.inf})], "c": "inf", "d": 3}
    assert finite(given) == {"a": [1.0, None, [None, {"b": None}]], "c": "inf", "d": 3}
    assert strict(json_line(given)) == finite(given)


def test_a_plan_whose_queue_grows_without_end_has_nulls():
    found = printed("plan", "--model", "llama-3.1-8b", "--gpus", "2xrtx4090", "--workload", "4000/1000", "--rate",
                    "500", "--ttft-p95-ms", "500", "--no-verify", "--json")  # fmt: skip
    assert found["chosen"] is None
    slow = next(one for one in found["layouts"] if one["fault"] == "overload")
    assert slow["predictions"]["ttft_ms"]["p95"] is None and slow["predictions"]["queue_ms"] is None


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--rate", "1000")])
def test_a_simulation_is_strict(load):
    found = printed("simulate", "--model", "llama-3.1-8b", "--gpus", "1xrtx4090", "--layout", "tp1", "--workload",
                    "100/1", "--num-requests", "20", *load, "--json")  # fmt: skip
    assert found["completed"] == 20


def test_predicted_rows_and_a_replay_are_strict(tmp_path):
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    rows.write_text(
        "model_path,system,backend,backend_version,precision,isl,osl,concurrency,tp_size,pp_size,attention_dp_size,"
        "moe_tp_size,moe_ep_size\nllama-3.1-8b,h100_sxm,vllm,,bf16,1024,1024,4,1,1,1,1,1\n"
    )
    assert printed("predict", str(rows), "--out", str(out), "--json")["refused"] == 0
    requests, meta = tmp_path / "r.jsonl", tmp_path / "m.json"
    row = {"input_toks": 100, "output_toks": 1, "arrival_time": 0.0, "queued_ts": 1.0, "first_token_ts": 1.1,
           "last_token_ts": 1.1}  # fmt: skip
    requests.write_text("".join(json.dumps(row | {"arrival_time": float(at)}) + "\n" for at in range(3)))
    meta.write_text(json.dumps({"model": "llama-3.1-8b", "hardware": {"device_name": "NVIDIA H100"}}))
    assert printed("replay", str(requests), str(meta), "--json")["requests"] == 3
