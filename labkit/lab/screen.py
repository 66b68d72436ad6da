"""What a shell shows of a run: a table that moves while it lasts, a summary when it is over, verdicts last.

Percentiles with too few samples beyond them are greyed, and n stands beside every one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from labkit.lab.compare import Comparison
from labkit.measure.statistics import PERCENTILES

_MARKS = {"ok": "green", "info": "blue", "warn": "yellow", "bad": "red"}
_SIGNS = {"ok": "✓", "info": "i", "warn": "!", "bad": "✕"}
_LADDERS = (
    ("ttft_ms", "TTFT, ms"),
    ("tpot_ms", "TPOT, ms"),
    ("itl_ms", "ITL, ms"),
    ("e2el_ms", "latency, ms"),
)


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def ladders(figures: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("", *(f"p{q}" for q in PERCENTILES), "mean", "n"):
        table.add_column(head, justify="left" if not head else "right")
    for key, title in _LADDERS:
        if key in figures:
            table.add_row(title, *_cells(figures[key]))
    return table


def _cells(ladder: dict[str, Any]) -> list[Text]:
    names = [f"p{q}" for q in PERCENTILES]
    cells = [Text(number(ladder[name]), style="dim" if name in ladder["few"] else "") for name in names]
    return [*cells, Text(number(ladder["mean"])), Text(str(ladder["n"]))]


def live(update: dict[str, Any]) -> Group:
    """The picture of one update of `Lab.run`."""
    return Group(_where(update), ladders(update["figures"]), rates(update["figures"]))


def _where(update: dict[str, Any]) -> Text:
    if update["phase"] == "queued":
        eta = f", in about {update['eta_s']:.0f} s" if update.get("eta_s") else ""
        return Text(f"waiting in line, place {update.get('position', '?')}{eta}. {update.get('message', '')}")
    counts = f"{update.get('sent', 0)} sent, {update.get('in_flight', 0)} in flight"
    broken = sum(update.get(name, 0) for name in ("failed", "refused"))
    return Text(
        f"{update['phase']}  {update['elapsed_s']:.0f} of {update['expected_s']:.0f} s  {counts}"
        + (f", {broken} failed" if broken else "")
    )


def rates(figures: dict[str, Any]) -> Text:
    throughput, goodput = figures["throughput"], figures["goodput"]
    text = (
        f"{number(throughput['requests_per_s'], 2)} requests/s   "
        f"{number(throughput['input_tokens_per_s'], 0)} tokens/s in   "
        f"{number(throughput['output_tokens_per_s'], 0)} tokens/s out   "
        f"goodput {number(goodput['requests_per_s'], 2)}/s"
    )
    if goodput["attainment"] is not None:
        low, high = goodput["attainment_interval"]
        text += f"   attained {goodput['attainment']:.0%} ({low:.0%}–{high:.0%})"
    return Text(text)


def summary(figures: dict[str, Any]) -> Group:
    """A run's summary, as one reads it."""
    parts: list[Text | Table] = [_title(figures), ladders(figures), rates(figures)]
    if figures["ttft_parts"]["n"]:
        parts.append(_line("TTFT", figures["ttft_parts_ms"], "ms"))
    if (figures.get("tpot_parts") or {}).get("n"):
        parts.append(_line("TPOT", figures["tpot_parts_ms"], "ms"))
    if (figures.get("steady") or {}).get("steady"):
        parts.append(Text(figures["steady"]["sentence"]))
    share = figures["step_share"]
    if share["compute"] is not None:
        shares = {name: share[name] * 100 for name in ("compute", "wait", "transfer", "idle")}
        parts.append(_line("ranks", shares, "%"))
    if figures.get("engine") and figures["engine"].get("metrics"):
        parts.append(engine_metrics(figures["engine"]))
    return Group(*parts, *verdicts(figures["quality"]))


def engine_metrics(engine: dict[str, Any]) -> Text:
    """What an engine said of itself beside the run."""
    metrics = engine["metrics"]
    if not metrics["num_samples"]:
        return Text(f"{engine['name']} told nothing of itself: its /metrics did not answer")
    names = (("waiting", 1, ""), ("running", 1, ""), ("kv_use", 100, " %"))
    gauges = [
        f"{name.replace('_', ' ')} {number(gauge['mean'] * scale)} (at most {number(gauge['max'] * scale)}){unit}"
        for name, scale, unit in names
        if (gauge := metrics[name])
    ]
    return Text(f"{engine['name']} says:  {'  '.join(gauges)}  preemptions {number(metrics['preemptions'], 0)}")


def _title(figures: dict[str, Any]) -> Text:
    requests = figures["requests"]
    engine = figures.get("engine")
    where = f"{engine['name']} {engine['version']}  " if engine else ""
    where += figures["layout"] or "foreign server"
    names = ("failed", "refused", "cancelled", "unsent")
    broken = ", ".join(f"{requests[name]} {name}" for name in names if requests[name])
    counts = f"{requests['completed']} of {requests['scheduled']} requests completed"
    return Text(f"{where}  {figures['model']}  {counts}{', ' + broken if broken else ''}", style="bold")


def _line(title: str, parts: dict[str, float | None], unit: str) -> Text:
    shown = "  ".join(f"{name.replace('_', ' ')} {number(value)}" for name, value in parts.items())
    return Text(f"{title} by part, {unit}:  {shown}")


def verdicts(quality: Sequence[dict[str, str]]) -> list[Text]:
    return [
        Text(f"{_SIGNS[verdict['severity']]} {verdict['sentence']}", style=_MARKS[verdict["severity"]])
        for verdict in quality
    ]


def comparison(found: Comparison) -> Group:
    """Layouts side by side, then each difference with its interval."""
    data = found.table()
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for layout in data.columns:
        table.add_column(str(layout), justify="right")
    for name, row in data.iterrows():
        digits = 0 if name in ("ranks", "n") else 2 if "share" in str(name) or name == "attainment" else 1
        known = (None if value is None or math.isnan(value) else float(value) for value in row)  # pandas makes None nan
        table.add_row(str(name), *(number(value, digits) for value in known))
    return Group(table, *(_difference(entry) for entry in found.differences))


def _difference(entry: dict[str, Any]) -> Text:
    figure = f"{entry['figure'].removesuffix('_ms')} p{entry['percentile']}"
    what = f"{entry['layout']} against {entry['against']}: {figure}"
    if entry["difference_ms"] is None:
        return Text(f"{what}: too few pairs to tell ({entry['n']})", style="dim")
    low, high = entry["interval_ms"]
    text = f"{what} {entry['difference_ms']:+.1f} ms ({low:+.1f} to {high:+.1f})"
    unsure = entry["verdict"] == "cannot tell"
    return Text(text + (": cannot tell" if unsure else ""), style="dim" if unsure else "")
