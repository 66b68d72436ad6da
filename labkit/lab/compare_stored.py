"""Stored runs of one load side by side, whichever engine answered: ours, vLLM, SGLang, or the same one twice.

Arrivals and lengths are fixed by workload, seed, rate and number, so request i of one run asked for the same work as
request i of the other, and a difference is taken within pairs, as between layouts. Runs of different loads are refused:
their difference would be the load's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.lab.compare import Comparison
from labkit.lab.run import Run
from labkit.measure.metrics import Objective

_LOAD = ("workload", "seed", "rate", "concurrency", "warmup_s", "length_scale")


def compare_stored(runs: Sequence[Run]) -> Comparison:
    """The first is what the others are held against. Raises ValueError with a sentence."""
    if len({run.run_id for run in runs}) < 2:
        raise ValueError(f"A comparison needs two or more different runs; got {', '.join(run.run_id for run in runs)}.")
    for run in runs:
        _check_alike(run, runs[0])
    names = [_name(run) for run in runs]
    unique = [name if names.count(name) == 1 else f"{name} {run.run_id}" for name, run in zip(names, runs, strict=True)]
    objective = Objective(**runs[0].summary["goodput"]["objective"])
    return Comparison({name: [run] for name, run in zip(unique, runs, strict=True)}, objective)


def _check_alike(run: Run, first: Run) -> None:
    if run.status != "finished":
        raise ValueError(f"The run {run.run_id} is {run.status}: compare runs that finished.")
    if (run.summary.get("engine") or {}).get("imported"):
        raise ValueError(
            f"The run {run.run_id} was read from another client's file, which tells no schedule to pair requests by."
        )
    mine, others = _load_of(run), _load_of(first)
    different = [f"{name} {mine[name]} and {others[name]}" for name in mine if mine[name] != others[name]]
    if different:
        raise ValueError(
            f"The runs {run.run_id} and {first.run_id} had different loads ({', '.join(different)}): give both the "
            f"same, and the difference is the engines'."
        )


def _load_of(run: Run) -> dict[str, Any]:
    requests = run.summary["requests"]
    return {
        **{name: run.summary.get(name) for name in _LOAD},
        "number of requests": requests["scheduled"] + requests["warmup"],
    }


def _name(run: Run) -> str:
    """tp2, vllm tp2."""
    engine = (run.summary.get("engine") or {}).get("name")
    return " ".join(filter(None, [engine, run.summary.get("layout") or "server"]))
