"""The same schedule on several layouts, side by side, with an interval for every difference.

Arrivals and lengths are the same request for request, so a difference is taken within pairs: request i here
against request i there. Its interval is a bootstrap over those pairs (2,000 resamples, 2.5 % to 97.5 %);
one that holds 0 means that this comparison cannot tell. `rounds` runs every layout several times, the order
turned about each time, so that a machine that slows down does not favour whoever came first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from labkit.lab.plan import RunPlan, as_layout
from labkit.lab.run import Run, refuse_profiled
from labkit.layout import AnyLayout
from labkit.measure import metrics
from labkit.measure.metrics import Objective, goodput_of
from labkit.measure.records import RequestRecord
from labkit.measure.statistics import Summary, ladder

if TYPE_CHECKING:
    import pandas as pd

    from labkit.lab.lab import Lab
    from labkit.lab.running import OnUpdate

RESAMPLES = 2000
FIGURES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": metrics.ttft_ms,
    "tpot_ms": metrics.tpot_ms,
    "e2el_ms": metrics.e2el_ms,
}
DIFFERENCES = (("ttft_ms", 50), ("ttft_ms", 90), ("tpot_ms", 50), ("tpot_ms", 90), ("e2el_ms", 50))


@dataclass
class Comparison:
    """`runs`: by layout slug, in the order asked for, one a round.

    The first layout is what others are held against.
    """

    runs: dict[str, list[Run]]
    objective: Objective

    @property
    def summaries(self) -> dict[str, Summary]:
        """Per layout, its rounds pooled: ladders over all requests, rates over all windows."""
        return {layout: pooled(runs, self.objective) for layout, runs in self.runs.items()}

    @property
    def differences(self) -> list[Summary]:
        """[{layout, against, figure, percentile, difference_ms, interval_ms, n, verdict}] to the first
        layout.
        """
        first, *others = self.runs
        return [
            difference(self.runs[first], self.runs[other], name, q) | {"layout": other, "against": first}
            for other in others
            for name, q in DIFFERENCES
        ]

    def to_dict(self) -> dict[str, Any]:
        """What `labkit compare --json` prints."""
        return {
            "layouts": list(self.runs),
            "runs": {layout: [run.run_id for run in runs] for layout, runs in self.runs.items()},
            "summaries": self.summaries,
            "differences": self.differences,
            "quality": [
                {"layout": layout, **verdict}
                for layout, runs in self.runs.items()
                for run in runs
                for verdict in run.quality
                if verdict["severity"] != "ok"
            ],
        }

    def table(self) -> pd.DataFrame:
        """One column a layout, one row a figure."""
        import pandas as pd

        return pd.DataFrame({layout: _flat(summary) for layout, summary in self.summaries.items()})

    def plot(self) -> Any:
        """The layouts beside each other as a plotly figure."""
        import importlib

        return importlib.import_module("labkit.show.figures").comparison_figure(self)


def compare(
    lab: Lab,
    layouts: Sequence[AnyLayout | str],
    plan: RunPlan,
    rounds: int = 1,
    on_update: OnUpdate | None = None,
) -> Comparison:
    """Run every layout `rounds` times, with the seeds seed, seed + 1, … the same for all.

    A run that fails or is stopped ends the comparison, which then holds what there is.
    """
    names = check_layouts(layouts)
    if plan.profile:
        raise ValueError("A comparison is of latencies, and a profiler would be in them: leave `profile` out.")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; it must be at least 1.")
    found = Comparison({name: [] for name in names}, plan.objective)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            this = dataclasses.replace(plan, layout=as_layout(name), seed=plan.seed + turn)
            run = lab.run_plan(this, on_update)
            found.runs[name].append(run)
            if run.status != "finished":
                return found
    return found


def check_layouts(layouts: Sequence[AnyLayout | str]) -> list[str]:
    """Their slugs; ValueError unless there are two or more, all different."""
    names = [as_layout(layout).slug for layout in layouts]
    if len(names) < 2 or len(set(names)) != len(names):
        given = ", ".join(names) or "none"
        raise ValueError(f"A comparison needs two or more different layouts; got {given}.")
    return names


def _counted(run: Run) -> list[RequestRecord]:
    return metrics.counted(run.records, run.window)


def pooled(runs: Sequence[Run], objective: Objective) -> Summary:
    """One layout's rounds as if they were one run."""
    refuse_profiled(runs)
    rows = [record for run in runs for record in _counted(run)]
    done = [record for record in rows if record.status == "completed"]
    seconds = sum(run.window.seconds for run in runs)
    good = sum(metrics.is_good(record, objective) for record in rows)
    return {
        "num_ranks": runs[0].summary["num_ranks"] if runs else None,
        "requests": {"scheduled": len(rows), "completed": len(done)},
        **{
            name: ladder(
                [value for record in done if (value := of(record)) is not None], len(rows) - len(done)
            )
            for name, of in FIGURES.items()
        },
        "throughput": _mean_rates(runs),
        "goodput": goodput_of(good, len(rows), objective, seconds),
        "step_share": _mean_shares(runs),
        "memory_bytes": runs[-1].summary["memory_bytes"] if runs else [],
    }


def _mean_rates(runs: Sequence[Run]) -> Summary:
    """Over the windows, each by its length."""
    names = ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")
    seconds = sum(run.window.seconds for run in runs)
    if not seconds:
        return dict.fromkeys(names)
    return {
        name: sum((run.summary["throughput"][name] or 0) * run.window.seconds for run in runs) / seconds
        for name in names
    }


def _mean_shares(runs: Sequence[Run]) -> Summary:
    names = ("compute", "wait", "transfer", "idle")
    shares = [run.summary["step_share"] for run in runs if run.summary["step_share"]["compute"] is not None]
    return {name: sum(share[name] for share in shares) / len(shares) if shares else None for name in names}


def difference(base: Sequence[Run], other: Sequence[Run], name: str, q: float) -> Summary:
    """Percentile q of a figure, `other` minus `base`, over the requests that both completed."""
    refuse_profiled([*base, *other])
    pairs = _pairs(base, other, FIGURES[name])
    result: Summary = {"figure": name, "percentile": q, "n": len(pairs)}
    if len(pairs) < 10:
        return result | {"difference_ms": None, "interval_ms": None, "verdict": "too few"}
    found = float(np.diff(np.percentile(pairs, q, axis=0))[0])
    low, high = bootstrap_interval(pairs, q)
    verdict = "less" if high < 0 else "more" if low > 0 else "cannot tell"
    return result | {"difference_ms": found, "interval_ms": [low, high], "verdict": verdict}


def _pairs(
    base: Sequence[Run], other: Sequence[Run], of: Callable[[RequestRecord], float | None]
) -> NDArray[np.float64]:
    """Shape (pairs, 2): base and other of the same request of the same round."""
    rows = []
    for one, two in zip(base, other, strict=False):
        theirs = {record.index: record for record in _counted(two) if record.status == "completed"}
        for record in _counted(one):
            match = theirs.get(record.index)
            if record.status != "completed" or match is None:
                continue
            here, there = of(record), of(match)
            if here is not None and there is not None:
                rows.append((here, there))
    return np.array(rows, np.float64).reshape(-1, 2)


def bootstrap_interval(pairs: NDArray[np.float64], q: float, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the difference of percentiles, resampling whole pairs."""
    rng = np.random.default_rng(seed)
    resamples = max(200, min(RESAMPLES, 4_000_000 // len(pairs)))  # a bound on memory and time
    chosen = rng.integers(0, len(pairs), (resamples, len(pairs)))
    here, there = (np.percentile(pairs[:, side][chosen], q, axis=1) for side in (0, 1))
    low, high = np.percentile(there - here, [2.5, 97.5])
    return float(low), float(high)


def _flat(summary: Summary) -> dict[str, Any]:
    row: dict[str, Any] = {"ranks": summary["num_ranks"], "n": summary["requests"]["completed"]}
    for name in FIGURES:
        row |= {f"{name.removesuffix('_ms')} p{q}, ms": summary[name][f"p{q}"] for q in (50, 90, 99)}
    row |= {f"{name.removesuffix('_per_s')}/s": value for name, value in summary["throughput"].items()}
    row["goodput, requests/s"] = summary["goodput"]["requests_per_s"]
    row["attainment"] = summary["goodput"]["attainment"]
    return row | {f"{name} share": value for name, value in summary["step_share"].items()}
