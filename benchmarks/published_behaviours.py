"""Behaviours that engines' own pages publish, beside what the planner says of them: sign, and rough size.

`python benchmarks/published_behaviours.py [published.csv]` prints a table and one JSON line. Looked at are ratios (what
twice the GPUs bring, what the next concurrency costs), because a published figure has an engine version, a client and a
load behind it that its page does not tell in full. The data lie beside the project (LABKIT_SHARED_DATA, or
../shared/data); nothing is fitted here.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from labkit.layout import Layout, imbalance, place_experts, plain_placement
from labkit.model.spec import load_spec
from labkit.plan.cost import step_cost
from labkit.plan.hardware import load_hardware
from labkit.plan.memory import memory_plan
from labkit.plan.predict import Prediction, predict_closed
from labkit.plan.work import EngineSettings, StepWork

DATA = Path(os.environ.get("LABKIT_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
PUBLISHED = DATA / "measured" / "published.csv"
OFFLINE = 4096
"""Requests in flight where all are sent at once: more than any of these layouts holds."""
SETTINGS = EngineSettings(max_num_seqs=2048, max_num_batched_tokens=8192)
"""TensorRT-LLM's builds of those pages: sequences up to 2,048, tokens of a step up to 8,192."""
ROUGH = 2.0
"""A ratio is of the right size when it is within this factor of the published one."""
FLAT = 1.15
"""What counts as no change of a TPOT."""
FALLS = 0.67
"""And as no gain from twice the GPUs: each does a third less, or worse."""


@dataclass(frozen=True)
class Behaviour:
    """One ratio. `right`: sign (by the rule) and size."""

    name: str
    published: float
    predicted: float
    rule: str
    right: bool
    figures: str
    """What the ratio is of."""


@lru_cache(maxsize=2)
def read_rows(path: Path) -> tuple[dict[str, str], ...]:
    with path.open(newline="") as lines:
        return tuple(csv.DictReader(lines))


def published(path: Path, metric: str, **like: str) -> float:
    """The one row with that metric whose columns begin so. KeyError when there is none, or several."""
    found = [
        float(row["value"]) for row in read_rows(path)
        if row["metric"] == metric and all(row[name].startswith(text) for name, text in like.items())
    ]  # fmt: skip
    if len(set(found)) != 1:
        raise KeyError(f"{path} has {len(found)} rows of {metric} with {like}.")
    return found[0]


# ---- what the planner says


def closed(model: str, gpus: str, layout: str, isl: int, osl: int, concurrency: int, engine: str) -> Prediction:
    return predict_closed(
        Layout.parse(layout), load_spec(model), load_hardware(gpus), SETTINGS, prompt_tokens=isl, output_tokens=osl,
        concurrency=concurrency, engine=engine,
    )  # fmt: skip


def offline(model: str, gpus: str, layout: str, isl: int = 1000, osl: int = 1000) -> float:
    """Output tokens a second when all requests are there at once."""
    return closed(model, gpus, layout, isl, osl, OFFLINE, "trtllm").tokens_per_s


# ---- the behaviours


def behaviours(path: Path = PUBLISHED) -> list[Behaviour]:
    makers: tuple[Callable[[Path], Iterator[Behaviour]], ...] = (
        kv_starvation, no_gain_without_nvlink, gain_from_stages, queue_cliff, dcp_capacity, expert_imbalance
    )  # fmt: skip
    return [found for make in makers for found in make(path)]


def _ratio(
    name: str, before: tuple[float, float], after: tuple[float, float], unit: str, sign: Callable[[float], bool], rule: str
) -> Behaviour:  # fmt: skip
    """(published, predicted) before and after."""
    theirs, ours = after[0] / before[0], after[1] / before[1]
    right = sign(ours) and theirs / ROUGH <= ours <= theirs * ROUGH
    figures = f"published {before[0]:,.0f} → {after[0]:,.0f}, predicted {before[1]:,.0f} → {after[1]:,.0f} {unit}"
    return Behaviour(name, theirs, ours, f"{rule}, within {ROUGH:g}×", right, figures)


def _tokens(path: Path, model: str, gpu: str, layout: str, precision: str, isl: str = "1000") -> float:
    return published(path, "output_throughput", model=model, gpu=gpu, layout=layout, precision=precision, isl=isl,
                     osl="1000", concurrency_or_rate="infinite", engine="TensorRT-LLM", unit="tok/s total")  # fmt: skip


def kv_starvation(path: Path) -> Iterator[Behaviour]:
    """Weights leave no KV on one GPU: twice the GPUs are worth ten."""
    model, name = "llama-3.1-70b-fp8", "Llama-3.1-70B"
    for gpu, ours, sign, rule in (
        ("H100", "h100", lambda gain: gain > 4, "far more than twice"),
        ("H200", "h200", lambda gain: 1.4 < gain < 3, "about twice"),
    ):
        one, two = (
            (_tokens(path, name, gpu, f"TP{tp}", "FP8"), offline(model, f"{tp}x{ours}", f"tp{tp}")) for tp in (1, 2)
        )
        yield _ratio(f"TP1 → TP2, 70B FP8 on {gpu}", one, two, "tokens/s", sign, rule)


def no_gain_without_nvlink(path: Path) -> Iterator[Behaviour]:
    four, eight = (
        (_tokens(path, "Llama-3.1-70B", "A100-PCIe", f"TP{tp}", "FP16"),
         offline("llama-3.1-70b", f"{tp}xa100-pcie", f"tp{tp}")) for tp in (4, 8)
    )  # fmt: skip
    yield _ratio("TP4 → TP8, 70B on A100 over PCIe", four, eight, "tokens/s", lambda gain: gain / 2 < FALLS,
                 "a GPU does a third less, or worse")  # fmt: skip
    switch = (_tokens(path, "Llama-3.1-70B", "A100-SXM", "TP8", "FP16"), offline("llama-3.1-70b", "8xa100", "tp8"))
    yield _ratio("TP8, 70B on A100: PCIe → NVSwitch", eight, switch, "tokens/s", lambda gain: gain > 1.5, "more")


def gain_from_stages(path: Path) -> Iterator[Behaviour]:
    """Pipeline stages over PCIe, where tensor parallelism gains little."""
    model, gpu = "llama-3.1-70b-fp4", "RTX PRO 6000"
    rows = [
        (_tokens(path, "Llama-3.3-70B", gpu, f"TP1 PP{pp}", "FP4"), offline(model, f"{pp}xrtxpro6000", f"pp{pp}"))
        for pp in (1, 2, 4)
    ]
    for at, name in ((1, "PP1 → PP2"), (2, "PP2 → PP4")):
        yield _ratio(f"{name}, 70B FP4 on RTX PRO 6000", rows[at - 1], rows[at], "tokens/s", lambda gain: gain > 1.3,
                     "a gain")  # fmt: skip
    stages, cut = rows[2][1], offline(model, "4xrtxpro6000", "tp4")
    yield Behaviour("PP4 beside TP4 there (no published figure of TP4)", float("nan"), stages / cut, "PP4 does more",
                    stages > cut, f"predicted {cut:,.0f} → {stages:,.0f} tokens/s")  # fmt: skip


def queue_cliff(path: Path) -> Iterator[Behaviour]:
    """Once KV is full TPOT stays and TTFT grows without bound."""
    for concurrency, more in (("50", "100"), ("100", "250")):
        both = []
        for number in (concurrency, more):
            theirs = published(path, "ITL_mean", model="Llama-3.3-70B", engine="NIM", osl="500",
                               concurrency_or_rate=f"concurrency {number}")  # fmt: skip
            ours = closed("llama-3.1-70b-fp8", "2xh100", "tp2", 5000, 500, int(number), "trtllm").tpot_ms["mean"]
            both.append((theirs, ours))
        flat = more == "250"
        yield _ratio(f"TPOT at {concurrency} → {more} in flight, 70B FP8 TP2 on H100", *both, "ms",
                     (lambda gain: 1 / FLAT < gain < FLAT) if flat else (lambda gain: gain > 1),
                     "flat" if flat else "more")  # fmt: skip
    rows = []
    for number in (32, 128):
        theirs = published(path, "TTFT", model="Llama-3.1-70B", gpu="H200", layout="TP1", isl="8192",
                           concurrency_or_rate=f"concurrency {number}")  # fmt: skip
        rows.append((theirs, closed("llama-3.1-70b-fp8", "1xh200", "tp1", 8192, 1024, number, "trtllm").ttft_ms["mean"]))
    yield _ratio("TTFT at 32 → 128 in flight, 70B FP8 TP1 on H200", *rows, "ms", lambda gain: gain > 10, "a cliff")


def dcp_capacity(path: Path) -> Iterator[Behaviour]:
    """512 agents of 67,000 tokens at 82 % of KV: only without a copy of the latent on every rank."""
    row = next(row for row in read_rows(path) if "DCP" in row["layout"] and row["model"].startswith("Kimi-K2.6"))
    assert "512" in row["concurrency_or_rate"] and "82%" in row["concurrency_or_rate"]
    held = 512 * 67_000 / 0.82
    spec, gpu = load_spec("kimi-k2.6-nvfp4"), load_hardware("8xb200")
    settings = replace(SETTINGS, kv_cache_dtype="fp8")
    tokens = {
        name: memory_plan(Layout.parse(name), spec, gpu.device.memory_bytes, settings).kv_tokens
        for name in ("tp8", "tp8xdcp8")
    }
    gain = tokens["tp8xdcp8"] / max(1, tokens["tp8"])
    yield Behaviour("KV tokens, Kimi-K2.6 FP4 on 8 B200: TP8 → TP8×DCP8", float("nan"), gain, "several times",
                    gain > 3, f"predicted {tokens['tp8']:,} → {tokens['tp8xdcp8']:,} tokens")  # fmt: skip
    ours = float(tokens["tp8xdcp8"])
    fits = held / ROUGH <= ours <= held * ROUGH and tokens["tp8"] < held * 0.82
    yield Behaviour("… and what 512 such requests at 82 % of KV need", held, ours, f"only DCP holds them, within {ROUGH:g}×",
                    fits, f"published {held:,.0f}, predicted {ours:,.0f} tokens; TP8 alone {tokens['tp8']:,}")  # fmt: skip


EXPERT_SKEW = 1.0
"""Standard deviation of the logarithm of an expert's popularity: assumed, the page tells none. The busiest of 256 is
then asked fifteen times as often as the median one, as routers of that size are seen to do."""


def expert_imbalance(path: Path) -> Iterator[Behaviour]:
    """72 GPUs share out DeepSeek-V3's experts: with 32 copies and a placement by load a decode step is far shorter."""
    theirs = published(path, "speedup", layout="EP72 decode: EPLB on vs off")
    load = np.random.default_rng(0).lognormal(0.0, EXPERT_SKEW, 256)
    plain = imbalance(plain_placement(256, 72), load)
    balanced = imbalance(place_experts(load, 72, 32), load)
    spec, hardware, layout = load_spec("deepseek-v3"), load_hardware("72xh100", nodes=9), Layout.parse("dp72xep72")
    work = StepWork(decodes=256, decode_context=256 * 2000, decode_window_context=256 * 2000, logits=256)
    seconds = [step_cost(layout, spec, hardware, SETTINGS, "sglang", skew).seconds(work) for skew in (plain, balanced)]
    ours = seconds[0] / seconds[1]
    yield Behaviour(
        "EPLB on, DeepSeek-V3 decode on 72 H100", theirs, ours, f"faster, within {ROUGH:g}×",
        ours > 1.1 and theirs / ROUGH <= ours <= theirs * ROUGH,
        f"busiest rank {plain:.2f} → {balanced:.2f} of the mean (popularity assumed), step {1e3 * seconds[0]:.1f} → "
        f"{1e3 * seconds[1]:.1f} ms",
    )  # fmt: skip


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PUBLISHED
    if not path.is_file():
        raise SystemExit(f"There is no {path}: set LABKIT_SHARED_DATA to the folder that holds measured/published.csv.")
    found = behaviours(path)
    for one in found:
        theirs = "" if one.published != one.published else f"{one.published:12,.2f}"
        print(f"{'right' if one.right else 'WRONG'}  {one.name:62} {theirs:>12} {one.predicted:14,.2f}  {one.rule}")
        print(f"       {one.figures}")
    rows = [asdict(one) | {"published": None if one.published != one.published else one.published} for one in found]
    print(json.dumps({"right": sum(one.right for one in found), "of": len(found), "rows": rows}))


if __name__ == "__main__":
    main()
