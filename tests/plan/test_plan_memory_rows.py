"""No row of the measured serving data, which was really run, is said not to fit its GPUs."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.layout import Layout
from labkit.model.spec import load_spec, with_precision
from labkit.plan.memory import memory_plan
from labkit.plan.work import EngineSettings

SHARED = Path(os.environ.get("LABKIT_SHARED_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
ROWS = SHARED / "measured" / "serving_hopper.csv"
MEMORY = {"h100_sxm": 84_929_347_584, "h200_sxm": 150_109_880_320}
KEYS = ("model_path", "system", "precision", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")


def configurations() -> Iterator[tuple[str, str, str, tuple[int, ...], int]]:
    """(model, GPU, precision, degrees, longest request), each once."""
    longest: dict[tuple[str, ...], int] = {}
    with ROWS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in KEYS)
            tokens = int(float(row["isl"])) + int(float(row["osl"]))
            longest[key] = max(longest.get(key, 0), tokens)
    for (model, system, precision, *degrees), tokens in longest.items():
        yield model, system, precision, tuple(int(float(degree or 1)) for degree in degrees), tokens


def layout_of(model: str, degrees: tuple[int, ...]) -> Layout:
    """As it must have been run. Two spellings are read so: experts cut over more ranks than tp × dp are replicas whose
    experts are shared out; MiniMax in fp8 at tp 8 has whole experts, because vLLM refuses to cut its blocks.
    """
    tp, pp, dp, moe_tp, moe_ep = degrees
    experts = moe_tp * moe_ep
    if experts > tp * dp:
        dp = experts // tp
    whole = moe_ep > 1 or dp > degrees[2] or ("MiniMax" in model and tp == 8)
    return Layout(tp=tp, pp=pp, dp=dp, ep=tp * dp if whole and experts > 1 else 1)


def test_every_configuration_that_was_run_fits() -> None:
    if not ROWS.is_file():
        pytest.skip(f"{ROWS} is not there: set LABKIT_SHARED_DATA to the folder of measured data")
    refused = []
    found = list(configurations())
    for model, system, precision, degrees, tokens in found:
        spec, layout = with_precision(load_spec(model), precision), layout_of(model, degrees)
        held = memory_plan(layout, spec, MEMORY[system], EngineSettings())
        if held.verdict(1, tokens).answer != "fits":
            refused.append((model, system, str(layout), held.reason))
    assert not refused
    assert len(found) > 40
