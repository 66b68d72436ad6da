"""A real engine's run, simulated: the same requests at the same instants, with what the engine was set to.

Rows have lengths and instants (`arrival_time` on the wall, the rest on the engine's own clock), as vLLM's request
records do; TTFT there is first token − queued, where queued is when the engine's loop took the request up. Steps cost
what the planner says for that GPU and model; nothing here is fitted to the run. Async scheduling, where the run's
settings say so, plans a step while the one before it runs.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from labkit.layout import Layout
from labkit.model.shapes import ModelSpec
from labkit.paths import read_text
from labkit.plan.hardware import load_hardware
from labkit.plan.sim.result import SimResult, ladder_ms
from labkit.plan.simulate import Options, SimRequest, simulate
from labkit.plan.work import EngineSettings, StepCost

GPUS = {
    "RTX 4090": "rtx4090", "RTX PRO 6000": "rtxpro6000", "H100": "h100", "H200": "h200", "A100": "a100",
    "B200": "b200", "L40S": "l40s", "MI300X": "mi300x",
}  # fmt: skip
"""Part of the name that a driver gives → our file."""
MOST = 1 << 31


class RequestRow(msgspec.Struct):
    """One request of a recorded run; seconds."""

    input_toks: int
    output_toks: int
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float
    scheduled_ts: float = float("nan")


@dataclass(frozen=True)
class Setup:
    """What served the run, read from its meta file."""

    model: str
    layout: Layout
    settings: EngineSettings
    gpus: str
    kv_blocks: int
    """As the run logged them; 0: it did not, and the planner counts."""
    ahead: bool
    version: str
    """Of the engine; empty where the run does not say."""


def read_rows(path: str | Path) -> list[RequestRow]:
    """Raises ValueError with the line that is not understood."""
    decoder = msgspec.json.Decoder(RequestRow)
    rows = []
    for number, line in enumerate(read_text(path, "file of recorded requests").split("\n"), 1):
        if line.strip():
            try:
                row = decoder.decode(line)
            except msgspec.MsgspecError as error:
                needs = ", ".join(RequestRow.__struct_fields__)
                raise ValueError(f"{path}, line {number}: {error}. A row needs {needs}.") from error
            if min(row.input_toks, row.output_toks) < 1 or max(row.input_toks, row.output_toks) > MOST:
                given = f"{row.input_toks} tokens in and {row.output_toks} out"
                raise ValueError(f"{path}, line {number}: {given}: 1 to {MOST:,}; take out what was not answered.")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no requests.")
    return rows


def read_setup(meta: dict[str, Any], file_name: str = "", gpus: str = "", policy: str = "vllm") -> Setup:
    """The engine of a meta file: its kwargs, and what it resolved them to where that is told. `gpus`: on what, such as
    2xh100, where the file does not tell or others are to be tried."""
    if not isinstance(meta, dict) or not meta.get("model"):
        raise ValueError("The meta file names no model: it needs `model`, `engine_kwargs`, `kv_cache` and `hardware`.")
    for name in ("engine_kwargs", "resolved_config", "kv_cache", "hardware"):
        if not isinstance(meta.get(name, {}), dict):
            raise ValueError(f"The meta file's {name} is {meta[name]!r}: it must be a table of names and values.")
    kwargs = meta.get("engine_kwargs", {})
    resolved = meta.get("resolved_config", {})
    scheduler, cache = resolved.get("scheduler_config"), meta.get("kv_cache", {})
    scheduler = scheduler if isinstance(scheduler, dict) else {}
    dp, pp, tp = (_count(kwargs, f"{axis}_parallel_size", 1) for axis in ("data", "pipeline", "tensor"))
    ep = dp * tp if kwargs.get("enable_expert_parallel") else 1
    settings = EngineSettings(
        policy=policy,
        max_num_batched_tokens=_count(kwargs, "max_num_batched_tokens", 8192),
        max_num_seqs=_count(kwargs, "max_num_seqs", 256),
        block_size=_count(cache, "block_size", 16),
        gpu_memory_utilization=_share(cache, "gpu_memory_utilization", 0.9),
        max_model_len=_count(kwargs, "max_model_len", 0) or None,
        kv_cache_dtype=str(kwargs.get("kv_cache_dtype") or "auto"),
        enable_prefix_caching=bool(cache.get("enable_prefix_caching", True)),
        cuda_graphs=not kwargs.get("enforce_eager"),
    )
    layout = Layout(dp=dp, pp=pp, tp=tp, ep=ep)
    device = str(meta.get("hardware", {}).get("device_name", ""))
    return Setup(
        model=str(meta["model"]),
        layout=layout,
        settings=settings,
        gpus=gpus or f"{layout.world_size}x{_gpu_of(device, file_name)}",
        kv_blocks=_count(cache, "num_gpu_blocks", 0),
        ahead=bool(scheduler.get("async_scheduling", _is_async(str(meta.get("vllm_version", ""))))),
        version=str(meta.get("vllm_version", "")),
    )


def _read_meta(path: str | Path) -> Any:
    try:
        return json.loads(read_text(path, "meta file"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from None


def _count(kwargs: dict[str, Any], name: str, usual: int) -> int:
    value = kwargs.get(name) or usual
    if isinstance(value, bool) or not isinstance(value, int) or not (1 <= value <= MOST or value == usual):
        raise ValueError(f"The meta file's {name} is {value!r}: it must be a whole number from 1 to {MOST:,}.")
    return value


def _share(kwargs: dict[str, Any], name: str, usual: float) -> float:
    value = kwargs.get(name) or usual
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"The meta file's {name} is {value!r}: it must be a number above 0 and at most 1.")
    return float(value)


def _is_async(version: str) -> bool:
    """vLLM plans ahead by default from 0.14 on."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= (0, 14)


def _gpu_of(device: str, file_name: str) -> str:
    for words in (device, file_name):
        flat = re.sub(r"[\s_-]", "", words).upper()
        for name, ours in GPUS.items():
            if name.replace(" ", "").upper() in flat:
                return ours
    raise ValueError(
        f"The meta file names no GPU that is known ({device or 'none'}): say which with --gpus, such as --gpus 2xh100."
    )


def requests_of(rows: list[RequestRow]) -> list[SimRequest]:
    """In the order of their arrival; time 0 is the first one's."""
    rows = sorted(rows, key=lambda row: row.arrival_time)
    first = rows[0].arrival_time
    return [SimRequest(row.arrival_time - first, row.input_toks, row.output_toks) for row in rows]


def measured(rows: list[RequestRow]) -> dict[str, dict[str, float]]:
    """{ttft_ms, tpot_ms, e2e_ms} of the run itself."""
    table = np.array([[r.queued_ts, r.first_token_ts, r.last_token_ts, r.output_toks] for r in rows])
    queued, first, last, tokens = table.T
    steps = np.where(tokens > 1, tokens - 1, np.nan)
    times = {"ttft_ms": first - queued, "tpot_ms": (last - first) / steps, "e2e_ms": last - queued}
    return {name: ladder_ms(values) for name, values in times.items()}


def predicted(result: SimResult) -> dict[str, dict[str, float]]:
    """The same figures of the simulated run, from the instant at which the engine's loop took each request up."""
    times = {
        "ttft_ms": result.first_s - result.seen_s,
        "tpot_ms": result.tpot_s,
        "e2e_ms": result.finished_s - result.seen_s,
    }
    return {name: ladder_ms(values) for name, values in times.items()}


def replay(rows: list[RequestRow], setup: Setup, cost: StepCost, kv_blocks: int) -> SimResult:
    """kv_blocks: of a replica, as vLLM counts them: one of them stays empty."""
    options = Options(routing="least-requests", ahead=setup.ahead)
    return simulate(requests_of(rows), setup.layout, cost, kv_blocks - 1, setup.settings, options=options)


def planned_blocks(setup: Setup, spec: ModelSpec) -> int:
    """The run's own count where it was logged, the planner's otherwise."""
    from labkit.plan.memory import memory_on

    if setup.kv_blocks:
        return setup.kv_blocks
    plan = memory_on(setup.layout, spec, load_hardware(setup.gpus), setup.settings)
    if not plan.fits:
        raise ValueError(plan.reason)
    return plan.kv_blocks


def replay_files(requests: str | Path, meta: str | Path, gpus: str = "", engine: str = "vllm") -> dict[str, Any]:
    """{predicted, real, error (relative, signed), source, …} of one recorded run."""
    from labkit.model.spec import load_spec
    from labkit.plan.cost import step_cost

    rows = read_rows(requests)
    setup = read_setup(_read_meta(meta), Path(meta).name, gpus)
    spec = load_spec(model_name(setup.model))
    hardware = load_hardware(setup.gpus)
    cost = step_cost(setup.layout, spec, hardware, setup.settings, engine, version=setup.version)
    blocks = planned_blocks(setup, spec)
    result = replay(rows, setup, cost, blocks)
    real, guess = measured(rows), predicted(result)
    return {
        "predicted": guess,
        "real": real,
        "error": {
            name: {key: guess[name][key] / value - 1 for key, value in figures.items() if value}
            for name, figures in real.items()
        },
        "source": "predicted",
        "model": setup.model,
        "gpus": setup.gpus,
        "layout": setup.layout.slug,
        "policy": setup.settings.policy,
        "async_scheduling": setup.ahead,
        "kv_blocks": blocks,
        "kv_blocks_from": "the run" if setup.kv_blocks else "the planner",
        "requests": len(rows),
        "preemptions": result.num_preemptions,
        "queue_peak": int(result.waiting.peak),
        "kv_peak": result.kv_peak,
    }


def model_name(hub_name: str) -> str:
    """`meta-llama/Llama-3.1-8B` → `llama-3.1-8b`, where such a model is shipped; a path stays a path."""
    from labkit.model.spec import list_models

    short = hub_name.rsplit("/", 1)[-1].lower()
    shipped = list_models()
    if short in shipped:
        return short
    return next((name for name in shipped if short.startswith(name)), hub_name)
