"""Requests that other load clients measured, as records of ours: vLLM's detailed result file, and aiperf's.

Read are `vllm bench serve --save-result --save-detailed` (one JSON object, lists in seconds, one entry a request) and
aiperf's `profile_export.jsonl` (one record a line, metrics with their units). Instants stay in the clock of the file.
Both count TTFT from the send; vLLM's tells beside it how long an open loop's request was late, and that is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.measure.records import RequestRecord

_VLLM_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_MS_OF = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "sec": 1e3, "s": 1e3}


@dataclass
class Imported:
    """What a file holds: its client, the requests, and as much as it says of model, layout and load."""

    client: str
    """vllm or aiperf."""
    records: list[RequestRecord]
    model: str = ""
    layout: str = ""
    """As our own export says it; otherwise the degrees are among the facts."""
    started_at: str = ""
    rate: float | None = None
    concurrency: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Everything else that is one value: versions, degrees of parallelism, what the user noted."""


def read_results(path: Path) -> Imported:
    """Raises FileNotFoundError, or ValueError with a sentence for a file that is neither or has no requests in it."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    text = path.read_text(encoding="utf-8")
    rows = _json_lines(path, text)
    if len(rows) == 1 and "ttfts" not in rows[0] and "metadata" not in rows[0]:
        raise ValueError(_summary_only(path, rows[0]))
    if "metadata" in rows[0] and "metrics" in rows[0]:
        return _from_aiperf(path, rows)
    if len(rows) == 1:
        return _from_vllm(path, rows[0])
    raise ValueError(f"{path} has lines that are not aiperf's records (metadata and metrics each).")


def _json_lines(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        whole = json.loads(text)
        rows = [whole]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is neither JSON nor JSON lines: {error}.") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must hold a JSON object, or one a line.")
    return rows


def _summary_only(path: Path, row: Mapping[str, Any]) -> str:
    if "median_ttft_ms" in row or "request_throughput" in row and "completed" in row:
        return f"{path} has vLLM's summary and no requests: run `vllm bench serve` with --save-result --save-detailed."
    if "request_latency" in row or "time_to_first_token" in row:
        return f"{path} is aiperf's summary: give the profile_export.jsonl that lies beside it."
    return f"{path} is neither a result of `vllm bench serve --save-detailed` nor aiperf's profile_export.jsonl."


# ---- vLLM


def _from_vllm(path: Path, row: Mapping[str, Any]) -> Imported:
    missing = [name for name in _VLLM_LISTS if not isinstance(row.get(name), list)]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: save it with --save-detailed, by vLLM 0.12 or newer.")
    lists = [row[name] for name in _VLLM_LISTS]
    if len({len(values) for values in lists}) != 1:
        sizes = ", ".join(f"{name} {len(row[name])}" for name in _VLLM_LISTS)
        raise ValueError(f"{path} has lists of different lengths ({sizes}): it is not one run's whole result.")
    concurrency = row.get("max_concurrency") or None
    late = [0.0] * len(lists[0]) if concurrency else row.get("queue_times") or [0.0] * len(lists[0])
    records = [_vllm_record(index, late[index], *values) for index, values in enumerate(zip(*lists, strict=True))]
    rate = row.get("request_rate")
    return Imported(
        "vllm",
        records,
        model=str(row.get("model_id") or ""),
        layout=str((row.get("labkit") or {}).get("layout") or ""),
        started_at=_vllm_date(str(row.get("date") or "")),
        rate=float(rate) if isinstance(rate, int | float) else None,
        concurrency=concurrency,
        facts=_plain(row),
    )


def _vllm_record(
    index: int, late_s: float, input_len: int, n: int, ttft_s: float, itl_s: Sequence[float], start_s: float, error: str
) -> RequestRecord:
    sent_ns = _ns(start_s)
    completed = not error and ttft_s > 0
    record = RequestRecord(
        request_id=f"imported-{index}",
        index=index,
        status="completed" if completed else "failed",
        scheduled_ns=sent_ns - _ns(late_s),
        sent_ns=sent_ns,
        asked_prompt_tokens=input_len,
        prompt_tokens=input_len if completed else 0,
        n=n,
        error="" if completed else error or "no token came",
    )
    if completed:
        _set_chunks(record, sent_ns + _ns(ttft_s), [_ns(gap) for gap in itl_s])
    return record


def _vllm_date(date: str) -> str:
    """20260131-093000 as ISO 8601; what is not that form stays out."""
    digits = date.replace("-", "")
    if len(digits) != 14 or not digits.isdigit():
        return ""
    return f"{digits[:4]}-{digits[4:6]}-{digits[6:8]}T{digits[8:10]}:{digits[10:12]}:{digits[12:]}"


# ---- aiperf


def _from_aiperf(path: Path, rows: Sequence[Mapping[str, Any]]) -> Imported:
    try:
        records = [_aiperf_record(index, row) for index, row in enumerate(rows)]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} has a record without {error}: it is not aiperf's profile_export.jsonl.") from None
    return Imported("aiperf", records)


def _aiperf_record(index: int, row: Mapping[str, Any]) -> RequestRecord:
    about, metrics, error = row["metadata"], row["metrics"], row.get("error") or {}
    sent_ns = int(about["request_start_ns"])
    cancelled = bool(about.get("was_cancelled"))
    ttft_ms = _ms(metrics.get("time_to_first_token"))
    completed = not error and not cancelled and ttft_ms is not None
    prompt_tokens = _count(metrics.get("input_sequence_length"))
    record = RequestRecord(
        request_id=str(about.get("x_request_id") or f"imported-{index}"),
        index=index,
        status="completed" if completed else "cancelled" if cancelled else "failed",
        scheduled_ns=sent_ns,
        sent_ns=sent_ns,
        asked_prompt_tokens=prompt_tokens,
        prompt_tokens=prompt_tokens if completed else 0,
        n=_count(metrics.get("output_sequence_length")),
        http_status=int(error.get("code") or 0),
        error="" if completed else str(error.get("message") or "no token came"),
        warmup=about.get("benchmark_phase") == "warmup",
    )
    if completed and ttft_ms is not None:
        first_ns = sent_ns + round(ttft_ms * 1e6)
        latency_ms = _ms(metrics.get("request_latency"))
        end_ns = max(first_ns, sent_ns + round(latency_ms * 1e6)) if latency_ms else first_ns
        gaps_ns = [round(gap * 1e6) for gap in _gaps_ms(metrics.get("inter_chunk_latency"))]
        _set_chunks(record, first_ns, gaps_ns or ([end_ns - first_ns] if record.n > 1 else []))
    return record


def _ms(metric: Mapping[str, Any] | None) -> float | None:
    if metric is None or metric.get("value") is None:
        return None
    return float(metric["value"]) * _MS_OF.get(str(metric.get("unit", "ms")), 1.0)


def _gaps_ms(metric: Mapping[str, Any] | None) -> list[float]:
    values = metric.get("value") if metric else None
    scale = _MS_OF.get(str(metric.get("unit", "ms")), 1.0) if metric else 1.0
    return [float(value) * scale for value in values] if isinstance(values, list) else []


def _count(metric: Mapping[str, Any] | None) -> int:
    return int(metric["value"]) if metric and metric.get("value") is not None else 0


# ---- both


def _set_chunks(record: RequestRecord, first_ns: int, gaps_ns: Sequence[int]) -> None:
    """Arrivals from the first token and the gaps. How many tokens a chunk bore is not told: shared out evenly."""
    at_ns, arrivals = first_ns, [first_ns]
    for gap in gaps_ns:
        at_ns += gap
        arrivals.append(at_ns)
    record.first_ns, record.last_ns, record.end_ns = first_ns, at_ns, at_ns
    record.n = record.n or len(arrivals)
    record.chunk_ns = arrivals
    record.chunk_tokens = _shared_out(record.n, len(arrivals))


def _shared_out(num_tokens: int, num_chunks: int) -> list[int]:
    """The first chunk bears one token, the others the rest: 9 over 5 is 1 2 2 2 2; fewer tokens than chunks: ones."""
    if num_chunks == 1:
        return [num_tokens]
    share, more = divmod(max(num_tokens - 1, 0), num_chunks - 1)
    return [1, *(share + (index < more) for index in range(num_chunks - 1))]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """What is one value; figures are made anew from the requests."""
    skip = ("mean_", "median_", "std_", "p99_", "max_output", "total_", "request_throughput", "output_throughput")
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, str | int | float) and not name.startswith(skip) and value != ""
    }
