"""Predictions of rows: what comes back for good rows and bad ones, and what a prediction must rise with."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.plan.engine_cost import fitted_table
from labkit.plan.hardware import load_hardware
from labkit.plan.measured_rows import read_row
from labkit.plan.predict import predict_closed, predict_open
from labkit.plan.predict_rows import ADDED
from labkit.plan.work import EngineSettings

DATA = Path(os.environ.get("LABKIT_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROW = {
    "model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm", "backend": "vllm", "backend_version": "",
    "precision": "fp8", "isl": "1024", "osl": "1024", "concurrency": "16", "tp_size": "4.0", "pp_size": "1.0",
    "attention_dp_size": "", "moe_tp_size": "4.0", "moe_ep_size": "1.0", "note": "kept",
}  # fmt: skip


def run(tmp_path: Path, rows: list[dict[str, str]]):
    source, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    with source.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    done = CliRunner().invoke(app, ["predict", str(source), "--out", str(out), "--json"])
    return done, list(csv.DictReader(out.open())) if out.exists() else []


def test_good_rows_get_figures_and_bad_ones_a_sentence(tmp_path: Path) -> None:
    given = [
        ROW, {**ROW, "model_path": "acme/unknown-9b"}, {**ROW, "system": "h300_sxm"}, {**ROW, "tp_size": "3"},
        {**ROW, "tp_size": "1"}, {**ROW, "isl": "many"},
    ]  # fmt: skip
    done, rows = run(tmp_path, given)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["refused"] == 5
    assert [row["note"] for row in rows] == ["kept"] * 6 and set(ADDED) <= set(rows[0])
    good, *bad = rows
    assert float(good["ttft_ms"]) > 0 and float(good["tpot_ms"]) > 0 and good["kv_full"] == "false"
    assert 0 < float(good["band_tpot"]) < 1 and 0 < float(good["band_ttft"]) < 2 and good["source"]
    words = ("unknown-9b", "h300", "tp 3", "", "isl")
    for row, word in zip(bad, words, strict=True):
        assert word in row["refused"] and row["refused"].endswith(".") and not row["tpot_ms"]


def test_a_missing_column_is_one_sentence(tmp_path: Path) -> None:
    done, rows = run(tmp_path, [{name: value for name, value in ROW.items() if name != "osl"}])
    assert done.exit_code == 2 and not rows
    assert "osl" in done.output and "Traceback" not in done.output
    done = CliRunner().invoke(app, ["predict", str(tmp_path / "no.csv"), "--out", str(tmp_path / "o.csv")])
    assert done.exit_code == 2


def test_rows_are_read_as_their_benchmark_ran() -> None:
    row = read_row({**ROW, "silicon_data_source": "source_file=2026-04-06.csv"})
    assert (row.prompt, row.inferencex, str(row.layout)) == (pytest.approx(921.6), True, "TP4")
    assert row.spec.quantization is not None and row.spec.quantization.bits == 8
    assert read_row(ROW).prompt == 1024
    expert = {**ROW, "model_path": "Qwen/Qwen3-235B-A22B-FP8", "moe_tp_size": "1", "moe_ep_size": "4"}
    assert read_row(expert).layout.ep == 4
    with pytest.raises(ValueError, match="contradict"):
        read_row({**expert, "moe_ep_size": "8"})
    with pytest.raises(ValueError, match="16 GPUs"):
        read_row({**ROW, "tp_size": "16"})


def closed(concurrency: float, layout: str = "tp4", prompt: int = 1024, **options):
    return predict_closed(
        Layout.parse(layout), load_spec("llama-3.1-70b"), load_hardware("8xh100"), EngineSettings(),
        prompt_tokens=prompt, output_tokens=512, concurrency=concurrency, **options,
    )  # fmt: skip


def test_predictions_rise_with_load_and_fall_with_ranks() -> None:
    few, many = closed(4), closed(32)
    assert few.tpot_ms["mean"] < many.tpot_ms["mean"] and few.ttft_ms["mean"] < many.ttft_ms["mean"]
    assert few.tokens_per_s < many.tokens_per_s
    assert closed(4, "tp8").tpot_ms["mean"] < few.tpot_ms["mean"]
    assert closed(4, prompt=8192).ttft_ms["mean"] > 3 * few.ttft_ms["mean"]
    for each in (few, many):
        assert each.ttft_ms["p50"] <= each.ttft_ms["p95"] <= each.ttft_ms["p99"]
        assert each.tpot_ms["p50"] <= each.tpot_ms["p95"] <= each.tpot_ms["p99"]
    assert few.requests_per_s * 512 == pytest.approx(few.tokens_per_s)


def test_a_full_cache_queues_with_flat_tpot() -> None:
    before, after = closed(16, prompt=8192), closed(200, prompt=8192)
    assert not before.kv_full and after.kv_full
    assert after.ttft_ms["mean"] > 5 * before.ttft_ms["mean"]
    assert after.queue_ms > 0.5 * after.ttft_ms["mean"]


def test_a_rate_is_served_or_said_to_be_too_high() -> None:
    def at(rate: float):
        return predict_open(
            Layout.parse("tp4"), load_spec("llama-3.1-70b"), load_hardware("8xh100"), EngineSettings(),
            prompt_tokens=1024, output_tokens=256, rate=rate,
        )  # fmt: skip

    slow, fast, too_much = at(0.5), at(3.0), at(1000.0)
    assert slow.concurrency < fast.concurrency and slow.tpot_ms["mean"] < fast.tpot_ms["mean"]
    assert slow.requests_per_s == pytest.approx(0.5)
    assert too_much.kv_full and too_much.queue_ms == float("inf") and too_much.requests_per_s < 1000


def test_bands_are_wider_for_what_was_never_measured() -> None:
    table = fitted_table()["bands"]
    assert closed(4).band_tpot == pytest.approx(table["vllm dense"]["tpot"])
    other = predict_closed(
        Layout.parse("tp4"), load_spec("llama-3.1-70b"), load_hardware("8xb200"), EngineSettings(),
        prompt_tokens=1024, output_tokens=512, concurrency=4,
    )  # fmt: skip
    assert other.band_tpot == pytest.approx(1.5 * table["vllm dense"]["tpot"])


@pytest.mark.skipif(not (DATA / "measured").is_dir(), reason="the measured rows do not lie in ../shared/data/measured")
def test_a_model_left_out_is_predicted_better_than_by_the_peer() -> None:
    import numpy as np

    from labkit.plan.fit_report import relative
    from labkit.plan.fit_serving import Fitter
    from labkit.plan.row_rules import RULES, load_rows

    samples, dropped = load_rows(DATA / "measured" / "serving_hopper.csv")
    assert set(dropped) == set(RULES) and len(samples) > 400
    fitter = Fitter(samples)
    seen = np.array([float(s.row.model != "llama-3.1-70b") for s in samples])
    loop = fitter.predict(fitter.constants(fitter.fit(seen)))
    out = seen == 0
    for found, what, most in ((loop.tpot_s, "tpot_s", 0.12), (loop.ttft_s, "ttft_s", 0.15)):
        assert np.abs(relative(found, [getattr(s, what) for s in samples]))[out].mean() < most


@pytest.mark.skipif(not (DATA / "measured").is_dir(), reason="the measured rows do not lie in ../shared/data/measured")
def test_kv_fills_where_it_was_seen_to_fill() -> None:
    with (DATA / "measured" / "serving_hopper.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model_path"].endswith("Llama-3.1-70B")]
    hopper = [row for row in rows if row["system"] == "h100_sxm" and row["tp_size"] == "2.0"]
    from labkit.plan.predict_rows import answer

    for row in hopper:
        assert (answer(row)["kv_full"] == "true") == (float(row["silicon_ttft_ms"]) > 5000), row
