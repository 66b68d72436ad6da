"""Predictions beside measured servings on H100 and H200, the model always left out; writes docs/predictions.md.

    python benchmarks/predict_hopper.py [../shared/data]

What a table says is computed here from ../shared/data/measured/serving_hopper.csv, nothing is typed. Prints the same.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.layout import Layout
from labkit.model.spec import load_spec
from labkit.paths import repo_dir
from labkit.plan.chips import chip_of
from labkit.plan.fit_report import kind_of, relative
from labkit.plan.fit_serving import Fitter, Sample
from labkit.plan.hardware import load_hardware
from labkit.plan.measured_rows import Row, RowError, read_row, with_precision
from labkit.plan.memory import memory_plan
from labkit.plan.predict import predict_closed
from labkit.plan.predict_rows import predict_row
from labkit.plan.row_rules import RULES, first_full, load_rows, mostly_waits, roofline_tpot, series_key, series_of
from labkit.plan.work import EngineSettings

PEER = {"tpot": 0.32, "ttft": 0.51}
"""Another planner on the same file, as issue 5 states it."""
AIM = {"tpot": 0.10, "ttft": 0.20}


def table(head: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


class Errors:
    """Signed relative errors of all rows."""

    def __init__(self, samples: list[Sample], ttft: Any, tpot: Any) -> None:
        self.samples = samples
        self.ttft, self.tpot = relative(ttft, (s.ttft_s for s in samples)), relative(tpot, (s.tpot_s for s in samples))
        self.counts = np.array([s.ttft_counts for s in samples])

    def line(self, mine: Any) -> list[str]:
        """Rows, TPOT error and bias, rows and error and bias of TTFT."""
        counted = mine & self.counts
        tpot, ttft = self.tpot[mine], self.ttft[counted]
        first = [str(int(mine.sum())), f"{np.abs(tpot).mean():.1%}", f"{tpot.mean():+.1%}"]
        none = ["0", "–", "–"]
        return first + ([str(len(ttft)), f"{np.abs(ttft).mean():.1%}", f"{ttft.mean():+.1%}"] if len(ttft) else none)

    def by(self, name: Callable[[Sample], str]) -> list[list[str]]:
        names = np.array([name(sample) for sample in self.samples])
        return [[each, *self.line(names == each)] for each in sorted(set(names))]


HEAD = ["", "rows", "TPOT error", "TPOT bias", "rows (TTFT)", "TTFT error", "TTFT bias"]


def overall(errors: Errors, fitted: Errors) -> str:
    everything = np.ones(len(errors.samples), bool)
    unruled = f"{np.abs(errors.ttft).mean():.1%}"
    middle = [f"{np.median(np.abs(errors.tpot)):.1%}", f"{np.median(np.abs(errors.ttft[errors.counts])):.1%}"]
    of, mine = errors.line(everything), fitted.line(everything)
    rows = [
        ["mean absolute, the model left out", of[1], of[4]], ["median, the model left out", *middle],
        ["mean absolute with the TTFT that a rule drops", of[1], unruled],
        ["mean absolute of the fit itself (all rows seen)", mine[1], mine[4]],
        ["aim", f"{AIM['tpot']:.0%}", f"{AIM['ttft']:.0%}"],
        ["another planner", f"{PEER['tpot']:.0%}", f"{PEER['ttft']:.0%}"],
    ]  # fmt: skip
    return table(["", "TPOT", "TTFT"], rows)


KV_HEAD = [
    "model", "GPU", "engine", "layout", "tokens", "steps", "jump", "concurrency ×", "TPOT ×", "TTFT, s",
    "answer tokens/s", "running", "share of the pool", "KV full, predicted", "same",
]  # fmt: skip
HALF_OF_THE_POOL = 0.5
ABOUT_AS_MANY, OTHER_POOLS = 1.2, 2
"""Ratios of the largest to the smallest in a set: of what runs, and of the shares of the pools."""


def kv_steps(samples: list[Sample]) -> str:
    """Every series that the rule "KV full" cuts, and those where the planner says that KV fills."""
    rows, needed = [], []
    for series in series_of(samples):
        steps = [f"{s.row.concurrency:.0f}" for s in series]
        measured = min(first_full(series), _first([mostly_waits(sample) for sample in series]))
        predicted = _first([predict_row(sample.row).kv_full for sample in series])
        if min(measured, predicted) == len(series):
            continue
        row, at = series[0].row, min(measured, predicted)
        needed.append(pool_share(series[at].row))
        rows.append([
            row.model, row.hardware.device.name, f"{row.engine} {row.version}".strip(), str(row.layout),
            f"{row.prompt:.0f} + {row.output:.0f}", "→".join(steps), steps[measured] if measured < len(series) else "–",
            *_growth(series, at), f"{series[at].ttft_s:.2f}", f"{tokens_per_s(series[at]):,.0f}",
            f"{running(series[at]):.0f}", _share_text(series[at].row),
            steps[predicted] if predicted < len(series) else "–", "yes" if measured == predicted else "no",
        ])  # fmt: skip
    same = [row[-1] == "yes" for row in rows]
    could = [right for right, share in zip(same, needed, strict=True) if share > HALF_OF_THE_POOL]
    return (
        f"{sum(same)} of all {len(rows)} series, {sum(could)} of the {len(could)} whose requests would take more than "
        f"half of the pool.\n\n{table(KV_HEAD, rows)}"
    )


def same_number_runs(samples: list[Sample]) -> str:
    """Sets (model, GPU, engine, version) of several layouts whose rows all wait for more than half of a request's life
    and in all of which about as many run at a time, though their pools differ."""
    sets: dict[tuple[object, ...], list[Sample]] = {}
    for sample in filter(mostly_waits, samples):
        sets.setdefault(series_key(sample.row)[:4], []).append(sample)
    told = []
    for (model, gpu, engine, version), found in sets.items():
        counts, pools = [running(each) for each in found], [pool_share(each.row) for each in found]
        if max(counts) > ABOUT_AS_MANY * min(counts) or max(pools) < OTHER_POOLS * min(pools):
            continue
        told.append(
            f"Of {model} on {gpu} under {engine} {version}, {min(counts):.0f} to {max(counts):.0f} of "
            f"{found[0].row.concurrency:.0f} requests run at a time in all {len(found)} settings, though the share of "
            f"the pool that they would need differs by {max(pools) / min(pools):.0f} times: a limit of the server on "
            "running requests, no pool's."
        )
    return " ".join(told)


def tokens_per_s(sample: Sample) -> float:
    """Of all answers together, by what a request of the closed loop takes."""
    life_s = sample.ttft_s + (sample.row.output - 1) * sample.tpot_s
    return sample.row.concurrency * sample.row.output / life_s


def running(sample: Sample) -> float:
    """Requests past their first token on average, by Little's law: the closed loop's, less those that wait for it."""
    decoding_s = (sample.row.output - 1) * sample.tpot_s
    return sample.row.concurrency * decoding_s / (sample.ttft_s + decoding_s)


def pool_share(row: Row) -> float:
    """Of the KV pool that the planner counts: what the row's requests take when all are at their full length."""
    device = row.hardware.device
    plan = memory_plan(row.layout, row.spec, device.memory_bytes, row.settings, chip=chip_of(device.name))
    return row.concurrency / plan.most_requests(math.ceil(row.prompt + row.output))


def _share_text(row: Row) -> str:
    """The share, and in brackets what it is where layers with a sliding window keep every token too."""
    told = f"{pool_share(row):.0%}"
    if row.spec.sliding_window:
        told += f" ({pool_share(replace(row, spec=replace(row.spec, sliding_window=None))):.0%})"
    return told


def _first(found: list[bool]) -> int:
    """Index of the first True; the length where there is none."""
    return found.index(True) if any(found) else len(found)


def _growth(series: list[Sample], at: int) -> tuple[str, str]:
    """By how much concurrency and TPOT grow in the step that ends there."""
    if not at:
        return "–", "–"
    before, here = series[at - 1], series[at]
    return f"{here.row.concurrency / before.row.concurrency:.1f}", f"{here.tpot_s / before.tpot_s:.2f}"


def _all_rows(file: Path) -> list[Sample]:
    """Every readable row, once a setting."""
    import csv

    found: dict[object, Sample] = {}
    with file.open(newline="", encoding="utf-8") as lines:
        for given in csv.DictReader(lines):
            try:
                row = read_row(given)
            except RowError:
                continue
            key = (row.model, row.hardware.device.name, row.engine, row.version, row.precision, row.layout, row.prompt,
                   row.output, row.concurrency)  # fmt: skip
            ttft, tpot = float(given["silicon_ttft_ms"]) / 1e3, float(given["silicon_tpot_ms"]) / 1e3
            found.setdefault(key, Sample(row, ttft, tpot))
    return list(found.values())


GPUS = {
    "H200": "h200", "H100-SXM-80G": "h100", "A100-SXM-80G": "a100", "A100-PCIe-80G": "a100-pcie", "L40S": "l40s",
}  # fmt: skip
PUBLISHED = {"Llama-3.1-70B": "llama-3.1-70b", "Llama-3.1-8B": "llama-3.1-8b", "Mixtral-8x7B": "mixtral-8x7b"}


def offline(file: Path) -> str:
    """TensorRT-LLM's published throughput with all requests there from the start, on GPUs that no fitted row has too:
    the best of the closed loops of 32 to 1024 requests."""
    import csv

    rows = []
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            known = row["model"] in PUBLISHED and row["gpu"] in GPUS and row["layout"][2:].isdigit()
            if not known or row["unit"] != "tok/s total" or "offline" not in row["concurrency_or_rate"]:
                continue
            precision = "fp8" if row["precision"] == "FP8" else ""
            spec = with_precision(load_spec(PUBLISHED[row["model"]]), precision)
            kv = precision or "auto"
            settings = EngineSettings(max_num_seqs=2048, kv_cache_dtype=kv, gpu_memory_utilization=0.95)
            best = max(
                predict_closed(
                    Layout.parse(row["layout"].lower()), spec, load_hardware(f"8x{GPUS[row['gpu']]}"), settings,
                    prompt_tokens=float(row["isl"]), output_tokens=float(row["osl"]), concurrency=requests,
                    engine="trtllm",
                ).tokens_per_s
                for requests in (32, 64, 128, 256, 512, 1024)
            )  # fmt: skip
            measured = float(row["value"])
            names = [row["model"], row["gpu"], row["layout"], row["precision"], f"{row['isl']} + {row['osl']}"]
            rows.append([*names, f"{measured:,.0f}", f"{best:,.0f}", f"{best / measured - 1:+.0%}"])
    return table(["model", "GPU", "layout", "weights", "tokens", "published tok/s", "predicted", "error"], rows)


def document(file: Path) -> str:
    samples, dropped = load_rows(file)
    every_row = _all_rows(file)
    fitter = Fitter(samples)
    errors = Errors(samples, *fitter.left_out())
    loop = fitter.predict(fitter.constants(fitter.fit(np.ones(len(samples)))))
    fitted = Errors(samples, loop.ttft_s, loop.tpot_s)
    bound = np.median([s.tpot_s / roofline_tpot(s) for s in samples])
    parts = [
        "# What the planner predicts, and by how much it errs",
        "<!-- written by benchmarks/predict_hopper.py; run it again rather than edit this -->",
        f"Measured: TTFT and TPOT of vLLM, SGLang and TensorRT-LLM on H100 and H200 (`{file.name}`, {len(samples)} "
        "rows compared). Each model is predicted by a fit that has seen no row of it, in no factor. Errors are "
        "relative to "
        "what was measured; a positive bias predicts too slow. The spreads of the fit's priors were chosen with these "
        "errors in view.",
        "## All rows", overall(errors, fitted),
        f"The datasheet's roofline alone is too fast by {bound - 1:.0%} in TPOT (median).",
        "## By model", table(HEAD, errors.by(lambda s: s.row.model)),
        "## By GPU", table(HEAD, errors.by(lambda s: s.row.hardware.device.name)),
        "## By engine", table(HEAD, errors.by(lambda s: s.row.engine)),
        "## By kind of model, GPU and engine",
        table(HEAD, errors.by(lambda s: f"{kind_of(s.row)}, {s.row.hardware.device.name}, {s.row.engine}")),
        "## By model, GPU, engine and version",
        table(HEAD, errors.by(
            lambda s: f"{s.row.model}, {s.row.hardware.device.name}, {s.row.engine} {s.row.version or '(not said)'}"
        )),
        "## Rows that are not compared",
        table(["rule", "what it drops", "rows"], [[name, said, dropped[name]] for name, said in RULES.items()]),
        "## Where KV fills",
        "Series that the rule above calls full (TTFT over three times the step before while TPOT is flat, or over "
        "half of the request's life), or in which the planner says that KV is full, with what concurrency and TPOT "
        "grow by in that step, and the share of the predicted pool that the requests would take with all of their "
        "tokens (in brackets: where layers with a window keep every token, as TensorRT-LLM does unless "
        "`max_attention_window` is set). A jump of requests that need a small share is another queue than KV's: those "
        "of llama-3.1-8b come with thousands of answer tokens a second, where a front end that writes no faster is "
        "likelier. The planner names the step of " + kv_steps(every_row),
        "Not explained: gpt-oss-120b on one H200 under TensorRT-LLM, whose requests find room by this count even with "
        "every answer reserved in full, as TensorRT-LLM does and the prediction takes it, and every layer's tokens "
        "kept. " + same_number_runs(every_row),
        "## Published throughput, no row of it fitted",
        "TensorRT-LLM 0.14, all requests there from the start (`published.csv`). How large a share of the memory it "
        "was given is not said: 0.95 here. Where weights nearly fill a GPU, that decides. Mixtral's few wide experts "
        "run better than the many narrow ones of the rows that the fit has seen.",
        offline(file.with_name("published.csv")),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def main(data: str = "") -> None:
    default = os.environ.get("LABKIT_SHARED_DATA", repo_dir().parent / "shared" / "data")
    file = Path(data or default) / "measured" / "serving_hopper.csv"
    if not file.is_file():
        print(f"{file} is not there: nothing to compare with.")
        return
    text = document(file)
    (repo_dir() / "docs" / "predictions.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
