"""A simulation as a run's summary, with the names that a measured one has: so that one diagnosis reads both."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.layout import AnyLayout
from labkit.measure.statistics import ladder
from labkit.plan.simulate import SimResult
from labkit.plan.work import EngineSettings


def simulated_summary(
    result: SimResult, layout: AnyLayout, settings: EngineSettings, concurrency: int = 0
) -> dict[str, Any]:
    """The keys of `labkit run --json` that a diagnosis looks at; what only hardware can tell is not among them."""
    done = result.done
    ttft, tpot = 1e3 * result.ttft_s[done], 1e3 * result.tpot_s[done]
    queue, stay = 1e3 * result.queue_s[done], 1e3 * result.e2e_s[done]
    kv, waiting = result.kv_blocks.means() / max(1, result.kv_total_blocks), result.waiting.means()
    seconds = max(result.span_s, 1e-9)
    return {
        "simulated": True,
        "layout": layout.slug,
        "settings": {"max_num_seqs": settings.max_num_seqs, "max_num_batched_tokens": settings.max_num_batched_tokens},
        "concurrency": concurrency or None,
        "ttft_ms": ladder(ttft),
        "tpot_ms": ladder(tpot[~np.isnan(tpot)]),
        "e2el_ms": ladder(stay),
        "ttft_parts_ms": {"queue": _mean(queue), "prefill_compute": _mean(ttft - queue)},
        "throughput": {
            "requests_per_s": float(done.sum()) / seconds,
            "output_tokens_per_s": float(result.output_tokens[done].sum()) / seconds,
        },
        "engine": {"name": "simulated", "metrics": {
            "waiting": {"mean": _mean(waiting), "max": result.waiting.peak},
            "kv_use": {"mean": _mean(kv), "max": result.kv_peak},
            "preemptions": result.num_preemptions,
        }},
    }  # fmt: skip


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
