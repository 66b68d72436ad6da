"""A stored run in the words of others: parquet, CSV, a trace for Perfetto, and the flat JSON that vLLM's `bench serve
--save-result` writes.

The flat object has vLLM's names, its units (summaries in ms, lists in seconds) and its definitions, so that
its own tools read it: durations reach to the end of the drain, and TTFT is counted from the send. Our
figures, from the scheduled arrival and over the window, stand beside it under `labkit`. How the model was split is
said in the axis names that InferenceX uses, where vLLM's `--metadata tp=2` puts them: beside the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from labkit.layout import AnyLayout, Layout, pools_of, read_layout
from labkit.measure.clocks import clocks_of
from labkit.measure.kernels import read_trace
from labkit.measure.metrics import Window, counted, itl_ms, num_tokens, tpot_ms
from labkit.measure.profile_trace import merge
from labkit.measure.records import RequestRecord
from labkit.measure.store import Store
from labkit.measure.trace import chrome_trace

FORMATS = ("vllm", "trace", "parquet", "csv")


def export_run(store: Store, run_id: str, kind: str, target: Path) -> list[Path]:
    """Write a run; returns the files made. vllm and trace: one .json file; parquet and csv: a folder, one file a table.

    Raises KeyError when there is no such run and ValueError for an unknown kind, each with a sentence.
    """
    if kind not in FORMATS:
        raise ValueError(f"{kind!r} is no export format; choose one of {', '.join(FORMATS)}.")
    run = store.run(run_id)
    if kind in ("vllm", "trace"):
        target = target / f"{run_id}{'.trace' if kind == 'trace' else ''}.json" if target.is_dir() else target
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(_one_file(store, run, kind)))
        return [target]
    return _export_tables(store, run, kind, target)


def _one_file(store: Store, run: Mapping[str, Any], kind: str) -> dict[str, Any]:
    run_id = run["run_id"]
    if kind == "vllm" and "profiled" in (run.get("summary") or {}):
        raise ValueError(
            f"The run {run_id} was profiled, and its latencies are the profiler's too: they are no result to pass on. "
            f"Export its trace, or run it without a profiler."
        )
    if kind == "vllm":
        return to_vllm_json(run, store.request_records(run_id))
    return whole_trace(store, run_id)


def whole_trace(store: Store, run_id: str) -> dict[str, Any]:
    """A run as Chrome trace events, with the profiler's where some of its steps were profiled, on one clock."""
    clocks = clocks_of(store.run(run_id).get("summary") or {})
    steps, rows = store.step_records(run_id), store.collectives(run_id)
    ours = chrome_trace(steps, rows, store.request_records(run_id), run_id, clocks)
    profiles = store.profiles(run_id)
    return merge(ours, {rank: read_trace(path) for rank, path in profiles.items()}) if profiles else ours


def _export_tables(store: Store, run: Mapping[str, Any], kind: str, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    readers: dict[str, Callable[[str], Any]] = {
        "requests": store.requests,
        "steps": store.steps,
        "memory": store.memory,
        "collectives": store.collectives,
    }
    made = [folder / "run.json"]
    made[0].write_text(json.dumps(run, indent=1))
    for name, read in readers.items():
        path = folder / f"{name}.{kind}"
        frame = read(run["run_id"])
        if kind == "csv":
            frame.to_csv(path, index=False)
        else:
            frame.map(_none_if_empty).to_parquet(path, index=False)
        made.append(path)
    return made


def _none_if_empty(value: Any) -> Any:
    """Parquet has no struct without fields."""
    return None if isinstance(value, dict) and not value else value


def to_vllm_json(run: Mapping[str, Any], records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The flat object of a run (its row in the store) and its requests.

    Warm-up and requeued ones are left out.
    """
    window = Window(run.get("window_start_ns") or 0, run.get("window_end_ns") or 0)
    rows = counted(records, window if window.end_ns else Window.of(records))
    done = [row for row in rows if row.status == "completed"]
    return {
        **_header(run, rows),
        **(axis_names(read_layout(run["layout"])) if run.get("layout") else {}),
        **_totals(run, rows, done),
        **_lists(rows),
        **_peaks(done),
        **_summaries(done),
        "labkit": {
            "run_id": run.get("run_id"),
            "layout": run.get("layout"),
            "environment": run.get("environment"),
            "settings": run.get("settings"),
            "summary": run.get("summary"),
            "quality": run.get("quality"),
        },
    }


def axis_names(layout: AnyLayout) -> dict[str, Any]:
    """InferenceX's words. There, attention-DP lies inside tp: our dp times tp exports as its tp.

    Of pools with roles each has its own, `prefill_tp` and so on; the plain names are those of the first pool.
    """
    pools = pools_of(layout)
    names = _axis_names(pools[0].layout)
    if len(pools) == 1:
        return names
    by_role = {f"{pool.role}_{name}": value for pool in pools for name, value in _axis_names(pool.layout).items()}
    sizes = {f"num_{pool.role}_gpu": pool.layout.world_size for pool in pools}
    return names | by_role | sizes | {"disagg": "prefill" in [pool.role for pool in pools]}


def _axis_names(layout: Layout) -> dict[str, Any]:
    attention_dp = layout.dp > 1 and layout.ep > layout.tp * layout.pcp
    return {
        "tp": layout.dp * layout.tp if attention_dp else layout.tp,
        "pp": layout.pp,
        "pcp_size": layout.pcp,
        "dcp_size": layout.dcp,
        "ep": layout.ep,
        "dp": 1 if attention_dp else layout.dp,
        "dp_attention": attention_dp,
        "disagg": False,
        "num_prefill_gpu": layout.world_size,
        "num_decode_gpu": layout.world_size,
    }


def _header(run: Mapping[str, Any], rows: Sequence[RequestRecord]) -> dict[str, Any]:
    summary = run.get("summary") or {}
    return {
        "date": (run.get("started_at") or "").replace("-", "").replace(":", "").replace("T", "-")[:15],
        "endpoint_type": "openai",
        "backend": "openai",
        "label": run.get("layout"),
        "model_id": run.get("model"),
        "tokenizer_id": run.get("model"),
        "num_prompts": len(rows),
        "request_rate": run.get("rate") or "inf",
        "burstiness": summary.get("burstiness", 1.0),
        "max_concurrency": summary.get("concurrency") or None,
    }


def _totals(
    run: Mapping[str, Any], rows: Sequence[RequestRecord], done: Sequence[RequestRecord]
) -> dict[str, Any]:
    ends = [max(row.last_ns, row.end_ns) for row in done]
    starts = [row.sent_ns for row in rows if row.sent_ns]
    seconds = (max(ends) - min(starts)) / 1e9 if ends and starts else 0.0
    inputs, outputs = sum(row.prompt_tokens for row in done), sum(map(num_tokens, done))
    goodput = (run.get("summary") or {}).get("goodput") or {}

    def per_s(count: float) -> float:
        return count / seconds if seconds else 0.0

    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(rows) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": per_s(len(done)),
        "request_goodput": per_s(goodput["good"]) if "good" in goodput else None,
        "output_throughput": per_s(outputs),
        "total_token_throughput": per_s(inputs + outputs),
    }


def _lists(rows: Sequence[RequestRecord]) -> dict[str, Any]:
    """Per request, in the order of the schedule; a failed one has zeros, an empty `itls` and its error."""
    first_ns = min((row.sent_ns for row in rows if row.sent_ns), default=0)
    return {
        "input_lens": [row.prompt_tokens or row.asked_prompt_tokens for row in rows],
        "output_lens": [num_tokens(row) for row in rows],
        "ttfts": [_sent_ttft_s(row) for row in rows],
        "itls": [[gap / 1e3 for gap in itl_ms(row)] for row in rows],
        "latencies": [_latency_s(row) for row in rows],
        "start_times": [(row.sent_ns - first_ns) / 1e9 if row.sent_ns else 0.0 for row in rows],
        "queue_times": [max(0, row.sent_ns - row.scheduled_ns) / 1e9 if row.sent_ns else 0.0 for row in rows],
        "generated_texts": ["" for _ in rows],
        "errors": ["" if row.status == "completed" else row.error or row.status for row in rows],
    }


def _sent_ttft_s(row: RequestRecord) -> float:
    return (row.first_ns - row.sent_ns) / 1e9 if row.first_ns else 0.0


def _latency_s(row: RequestRecord) -> float:
    return (row.last_ns - row.sent_ns) / 1e9 if row.last_ns else 0.0


def _peaks(done: Sequence[RequestRecord]) -> dict[str, Any]:
    """Over whole seconds from the first send: most tokens that arrived, most requests that were open."""
    if not done:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0, "rtfx": 0.0}
    first = min(row.sent_ns for row in done)
    size = (max(row.last_ns for row in done) - first) // 1_000_000_000 + 1
    tokens, requests = np.zeros(size), np.zeros(size, np.int64)
    for row in done:
        np.add.at(tokens, (np.array(row.chunk_ns, np.int64) - first) // 1_000_000_000, row.chunk_tokens)
        opened, closed = ((at - first) // 1_000_000_000 for at in (row.sent_ns, row.last_ns))
        requests[opened : closed + 1] += 1
    return {
        "max_output_tokens_per_s": float(tokens.max()),
        "max_concurrent_requests": int(requests.max()),
        "rtfx": 0.0,
    }


def _summaries(done: Sequence[RequestRecord]) -> dict[str, float]:
    """mean, median, std and p99 of ttft, tpot, itl and e2el in ms; 0 of nothing, as there."""
    figures: dict[str, list[float]] = {
        "ttft": [_sent_ttft_s(row) * 1e3 for row in done if row.first_ns],
        "tpot": [value for row in done if (value := tpot_ms(row)) is not None],
        "itl": [gap for row in done for gap in itl_ms(row)],
        "e2el": [_latency_s(row) * 1e3 for row in done if row.last_ns],
    }
    result: dict[str, float] = {}
    for name, values in figures.items():
        samples = np.array(values or [0.0])
        result |= {
            f"mean_{name}_ms": float(samples.mean()),
            f"median_{name}_ms": float(np.median(samples)),
            f"std_{name}_ms": float(samples.std()),
            f"p99_{name}_ms": float(np.percentile(samples, 99)),
        }
    return result
