"""What careless hands type and what their files hold: exit code 2, one sentence that names it, nothing on stdout."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.plan.measured_rows import COLUMNS

PLAN = ["plan", "--model", "llama-3.1-8b", "--gpus", "2xh100", "--workload", "100/100", "--rate", "1",
        "--ttft-p95-ms", "500", "--no-verify"]  # fmt: skip
SIMULATE = ["simulate", "--model", "llama-3.1-8b", "--gpus", "2xh100", "--layout", "tp2"]
LOADED = [*SIMULATE, "--workload", "100/10", "--num-requests", "20"]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
ROW = "2023-11-16 18:15:46.6805900,374,44"
REQUEST = {"input_toks": 100, "output_toks": 1, "arrival_time": 0.0, "queued_ts": 0.0, "first_token_ts": 0.5,
           "last_token_ts": 0.5}  # fmt: skip
META = {"model": "llama-3.1-8b", "hardware": {"device_name": "NVIDIA H100"}, "kv_cache": {"num_gpu_blocks": 900}}


def ran(*words: str | Path):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words: str | Path) -> str:
    """The sentence on stderr."""
    done = ran(*words)
    assert done.exit_code == 2, (done.exit_code, done.output, done.exception)
    assert done.stdout == "" and len(done.stderr.strip().splitlines()) == 1
    return done.stderr


def told(*words: str | Path) -> dict:
    done = ran(*words, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    (line,) = done.stdout.splitlines()
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*PLAN, "--length-scale", "0"], "the length scale must be above 0"),
        ([*PLAN, "--length-scale", "inf"], "the length scale must be above 0"),
        ([*PLAN[:5], "--workload", "chat", "--length-scale", "inf", "--ttft-p95-ms", "9"], "the length scale must be"),
        ([*PLAN, "--price", "inf"], "--price is inf"),
        ([*PLAN, "--layout", "prefill:tp2,prefill:tp1"], "prefill"),
        ([*PLAN[:5], "--workload", "1/2/3", *PLAN[7:]], "tokens in and tokens out, such as 8192/1024"),
        ([*PLAN[:5], "--workload", "200000/9", *PLAN[7:]], "200,009 tokens, and llama-3.1-8b takes 131,072"),
        ([*PLAN[:3], "--gpus", "0xh100", *PLAN[5:]], "at least 1 of each"),
        ([*LOADED, "--rate", "inf"], "--rate is inf"),
        ([*LOADED, "--concurrency", "-1"], "--concurrency is -1"),
        ([*LOADED, "--concurrency", "4", "--rate", "3"], "not both"),
        ([*LOADED, "--seconds", "-5", "--rate", "1"], "--seconds is -5"),
        ([*LOADED, "--seconds", "5"], "needs --rate"),
        ([*LOADED, "--time-scale", "3"], "speed of a trace"),
        ([*LOADED[:-1], "0"], "--num-requests is 0"),
        ([*LOADED, "--seed", "-1"], "--seed is -1"),
        ([*LOADED, "--block-size", "0"], "block_size is 0"),
        ([*LOADED, "--max-model-len", "0"], "max_model_len is 0"),
        ([*LOADED, "--kv-blocks", "-1"], "--kv-blocks is -1"),
        ([*LOADED, "--kv-blocks", "1"], "None of the 20 requests can be served"),
        ([*LOADED, "--ttft-p95-ms", "0"], "it must be a positive number"),
        ([*LOADED[:6], "prefill:tp2,decode:tp1", *LOADED[7:]], "needs 3 GPUs, and 2xh100 has 2"),
        ([*SIMULATE, "--workload", "1/2/3"], "tokens in and tokens out, such as 8192/1024"),
    ],
)
def test_a_bad_option_gets_a_sentence(words: list[str], sentence: str):
    assert sentence in refused(*words)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("odd.csv", f"{AZURE}\n{ROW}\n2023-11-16 18:15:48.0,lots,3\n", "odd.csv, line 3: TIMESTAMP '2023-11-16"),
        ("short.csv", f"{AZURE}\n{ROW}\n2023-11-16 18:15:48.0\n", "line 3"),
        ("when.csv", f"{AZURE}\nyesterday,3,3\n", "TIMESTAMP 'yesterday'"),
        ("nan.csv", "Timestamp,Request tokens,Response tokens\n1,9,9\nnan,9,9\n", "Timestamp 'nan'"),
        ("cut.jsonl", '{"timestamp": 0, "input_le', "cut.jsonl, line 1 is not a Mooncake row"),
        ("bytes.csv", b"\x8c\x00\xff", "no UTF-8 text"),
    ],
)
def test_a_broken_trace_names_its_line(tmp_path: Path, name: str, text: str | bytes, sentence: str):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert sentence in refused(*SIMULATE, "--trace", path)
    assert sentence in refused(*PLAN[:5], "--workload", path, "--ttft-p95-ms", "500")


def test_files_that_excel_wrote_are_read(tmp_path: Path):
    trace, rows, out = tmp_path / "t.csv", tmp_path / "rows.csv", tmp_path / "out.csv"
    trace.write_bytes(b"\xef\xbb\xbf" + f"{AZURE}\r\n{ROW}\r\n".encode())
    assert told(*SIMULATE, "--trace", trace)["completed"] == 1
    values = ("meta/Llama-3.1-8B", "h100_sxm", "vllm", "0.9", "bf16", "1000", "100", "4", "1", "1", "1", "1", "1")
    rows.write_bytes(b"\xef\xbb\xbf" + f"{','.join(COLUMNS)}\r\n{','.join(values)}\r\ngibberish\r\n".encode())
    assert told("predict", rows, "--out", out) == {"rows": 2, "refused": 1, "out": str(out)}
    good, bad = csv.DictReader(out.open())
    assert float(good["ttft_ms"]) > 0 and good["refused"] == ""
    assert bad["ttft_ms"] == "" and bad["refused"]


def test_rows_that_cannot_be_predicted_get_a_sentence(tmp_path: Path):
    path, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    assert "There is no CSV of rows" in refused("predict", path, "--out", out)
    path.write_text(",".join(COLUMNS) + "\n")
    assert "nothing to predict" in refused("predict", path, "--out", out)
    path.write_text(",".join(COLUMNS) + "\n" + ",".join("1" * len(COLUMNS)) + "\n")
    assert "cannot be written" in refused("predict", path, "--out", tmp_path)
    assert "cannot be written" in refused("predict", path, "--out", tmp_path / "nowhere" / "out.csv")


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ("", "is not valid JSON"),
        ("[]", "names no model"),
        ("{}", "names no model"),
        (json.dumps({**META, "engine_kwargs": []}), "engine_kwargs is []"),
        (json.dumps({**META, "engine_kwargs": {"tensor_parallel_size": "two"}}), "tensor_parallel_size is 'two'"),
    ],
)
def test_a_meta_file_that_is_none_gets_a_sentence(tmp_path: Path, meta: str, sentence: str):
    requests, path = tmp_path / "r.jsonl", tmp_path / "meta.json"
    requests.write_text(json.dumps(REQUEST) + "\n")
    path.write_text(meta)
    assert sentence in refused("replay", requests, path)


def test_answers_of_one_token_have_no_tpot_to_compare(tmp_path: Path):
    requests, meta = tmp_path / "r.jsonl", tmp_path / "meta.json"
    requests.write_text(json.dumps(REQUEST) + "\n")
    meta.write_text(json.dumps(META))
    done = ran("replay", requests, meta)
    assert done.exit_code == 0 and "–" in done.stdout
    requests.write_text(json.dumps({**REQUEST, "output_toks": 0}) + "\n")
    assert "line 1: 100 tokens in and 0 out" in refused("replay", requests, meta)


def test_a_config_under_another_name_is_a_model(tmp_path: Path):
    from labkit.model.spec import model_dir

    path = tmp_path / "mine.json"
    path.write_text((model_dir("llama-3.1-8b") / "config.json").read_text())
    assert told("plan", "--model", path, *PLAN[3:])["chosen"]["layout"] == "tp1"
    path.write_text("{broken")
    assert "is not valid JSON" in refused("plan", "--model", path, *PLAN[3:])


def test_a_device_without_bandwidth_is_refused(tmp_path: Path):
    from labkit.plan.hardware import hardware_dir

    path, good = tmp_path / "own.toml", (hardware_dir() / "h100.toml").read_text()
    path.write_text(good.replace("value = 3.35e12", "value = 0"))
    assert "give a number above 0" in refused(*PLAN[:3], "--gpus", f"2x{path}", *PLAN[5:])
    path.write_text(good.replace("value = 84_929_347_584", 'value = "80 GB"'))
    assert "give a number above 0" in refused(*PLAN[:3], "--gpus", f"2x{path}", *PLAN[5:])


def test_two_numbers_are_scaled_as_workloads_are():
    found = told(*PLAN, "--length-scale", "10")
    assert (found["workload"]["prompt_tokens"], found["workload"]["output_tokens"]) == (1000, 1000)


def test_requests_that_were_cut_to_the_context_are_told():
    assert told(*SIMULATE, "--workload", "1000/10", "--num-requests", "20", "--max-model-len", "512")["shortened"] == 20
    assert told(*LOADED)["shortened"] == 0


def test_the_commands_count_the_same_memory():
    """On a GPU that is no Hopper: its own chip stands behind every count."""
    words = ["--model", "llama-3.1-8b", "--gpus", "1xrtx4090", "--workload", "500/100", "--rate", "1"]
    planned = told("plan", *words, "--tpot-p95-ms", "500", "--no-verify")["layouts"][0]
    simulated = told("simulate", *words, "--layout", "tp1", "--num-requests", "20")
    assert planned["layout"] == "tp1" and planned["kv_tokens"] == 16 * simulated["kv_blocks"]
