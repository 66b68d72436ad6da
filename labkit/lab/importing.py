"""A result file of another load client as a stored run: same definitions, same tables, same page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.lab.plan import RunPlan, new_run_id, utc_now
from labkit.lab.run import Run, open_store
from labkit.lab.summary import Setting, build_summary
from labkit.layout import Layout, LayoutError
from labkit.measure.imported import Imported, read_results
from labkit.measure.metrics import Window

_DEGREES = {"tp": "tp", "pp": "pp", "dp": "dp", "ep": "ep", "pcp_size": "pcp", "dcp_size": "dcp"}
_TOOLS = {"vllm": "vllm bench serve", "aiperf": "aiperf"}


def import_results(path: str | Path, layout: str = "") -> Run:
    """Store the requests of `vllm bench serve --save-detailed` or of aiperf's profile_export.jsonl as a run.

    layout: how the server was split, where the file does not say so in InferenceX's words (tp, pp, …: vLLM's
    --metadata). Raises FileNotFoundError, or ValueError with a sentence.
    """
    path = Path(path).expanduser()
    found = read_results(path)
    known = Layout.parse(layout).slug if layout else found.layout or _layout_of(found)
    run_id = new_run_id(f"imported-{found.client}")
    plan = RunPlan(workload="chat", rate=found.rate if not found.concurrency else None, warmup_s=0.0)
    where = Setting(
        model=found.model,
        layout=known,
        engine={"name": str(found.facts.get("backend") or "unknown"), "version": "", "imported": _origin(found, path)},
    )
    summary = build_summary(plan, where, found.records, (), None, run_id=run_id)
    summary |= {"workload": path.name, "concurrency": found.concurrency, "burstiness": found.facts.get("burstiness")}
    summary["quality"] = [_where_from(found, path), *_still_true(found, summary["quality"])]
    _store(run_id, found, summary)
    return Run(run_id, summary, found.records, [], "finished", "recorded")


def _layout_of(found: Imported) -> str | None:
    if str(found.facts.get("dp_attention", "")).lower() in ("true", "1"):
        return None  # attention-DP lies inside their tp, and how much of it is not told
    degrees = {axis: int(found.facts[name]) for name, axis in _DEGREES.items() if _is_degree(found.facts.get(name))}
    try:
        return Layout(**degrees).slug if degrees else None  # type: ignore[arg-type]
    except LayoutError:
        return None


def _is_degree(value: Any) -> bool:
    return str(value).isdigit() and int(value) > 0


def _origin(found: Imported, path: Path) -> dict[str, Any]:
    return {"tool": _TOOLS[found.client], "file": path.name, "facts": found.facts}


def _where_from(found: Imported, path: Path) -> dict[str, str]:
    sentence = f"Measured by {_TOOLS[found.client]} and read from {path.name}; its TTFT counts from the send."
    return {"code": "imported", "severity": "info", "sentence": sentence}


def _still_true(found: Imported, quality: list[dict[str, str]]) -> list[dict[str, str]]:
    """Without what the file cannot tell: how late the client was, what it offered, what was cached."""
    unknown = {"client-lag", "schedule", "warm-cache"}
    return [verdict for verdict in quality if verdict["code"] not in unknown]


def _store(run_id: str, found: Imported, summary: dict[str, Any]) -> None:
    window = Window.of(found.records)
    with open_store() as store:
        store.start_run(
            run_id,
            started_at=found.started_at or utc_now(),
            layout=summary["layout"],
            model=found.model,
            workload=summary["workload"],
            rate=found.rate,
        )
        store.add_requests(run_id, found.records)
        store.finish_run(
            run_id,
            "finished",
            finished_at=utc_now(),
            num_ranks=summary["num_ranks"],
            window_start_ns=window.start_ns,
            window_end_ns=window.end_ns,
            summary=summary,
            quality=summary["quality"],
        )
