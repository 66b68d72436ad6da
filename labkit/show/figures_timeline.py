"""A few steps as the ranks lived them: one track a rank, its collectives where they were, each as wait and transfer.

Drawn from the very events that `run.save(path, "trace")` writes for Perfetto, so that the picture and the file agree:
what lies between two collectives is compute, and a wait ends for all ranks of a group when the last one enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.measure.breakdown import phase_of
from labkit.measure.records import StepRecord
from labkit.measure.trace import RANKS, chrome_trace
from labkit.show import figures_panels as panels
from labkit.show.figures_pipeline import stretch_of
from labkit.show.figures_style import HEIGHT, Series, compose, plotly, series_of

if TYPE_CHECKING:
    from labkit.lab.run import Run

Runs = dict[str, "Run"] | Sequence["Run"]
KINDS = ("compute", "wait", "transfer")
_ROW_PX, _PANEL_PX, _QUIET = 34, 56, ("samples",)
_NOTE = "White: the rank had no step. The same instants as run.save(path, 'trace') writes, for Perfetto to zoom into."


def trace_events(run: Run, num_steps: int, phase: str = "") -> list[dict[str, Any]]:
    """Slices {kind, rank, start_ms, ms, told} from the start of a step in the middle of the run to the end of the last
    of the `num_steps` from it on, of all ranks.

    phase: of that step, where the run has any. ValueError for a run without steps.
    """
    start, end = _stretch(run.step_records, num_steps, phase)
    shown = [step for step in run.step_records if min(step.rank_start_ns) < end and max(step.rank_end_ns) > start]
    rows, keys = run.collectives, {(step.epoch, step.step_id) for step in shown}
    if len(rows):
        rows = rows[[key in keys for key in zip(rows["epoch"], rows["step_id"], strict=True)]]
    trace = chrome_trace(shown, rows)
    offset_us = (trace["otherData"]["origin_ns"] - start) / 1e3
    found: list[dict[str, Any]] = []
    calls: dict[int, str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or event["pid"] != RANKS:
            continue
        if event["cat"].startswith("collective"):
            calls[event["tid"]] = event["name"]
            continue
        begin = max(0.0, event["ts"] + offset_us)
        length = min((end - start) / 1e3, event["ts"] + offset_us + event["dur"]) - begin
        if length > 0:
            kind = "compute" if event["cat"].startswith("step") else event["name"]
            told = f"{event['name']} step" if kind == "compute" else f"{calls.get(event['tid'], '')}: {kind}"
            found.append(
                {"kind": kind, "rank": event["tid"], "start_ms": begin / 1e3, "ms": length / 1e3, "told": told}
            )
    return found


def _stretch(steps: Sequence[StepRecord], num_steps: int, phase: str) -> tuple[int, int]:
    """Replicas step beside each other: counted are those of one, which has a step of that phase."""
    mine = [step for step in steps if not phase or phase_of(step) == phase] or list(steps)
    replica = mine[len(mine) // 2].replica if mine else 0
    return stretch_of([step for step in steps if step.replica == replica], num_steps, phase)


def timeline_figure(runs: Runs, title: str = "What the ranks did", *, num_steps: int = 2, phase: str = "decode") -> Any:
    """A panel a run, a track a rank, all on one scale."""
    plotly()
    from plotly.subplots import make_subplots

    series = series_of(runs)
    found = [trace_events(each.runs[0], num_steps, phase) for each in series]
    names = [each.bar_label.replace("<br>", ", ") for each in series]
    figure = make_subplots(
        rows=len(names), cols=1, subplot_titles=names, shared_xaxes=True, vertical_spacing=0.24 / len(names)
    )
    for row, events in enumerate(found, 1):
        _add_tracks(figure, events, row)
    figure.update_xaxes(range=[0, max(event["start_ms"] + event["ms"] for events in found for event in events)])
    figure.update_xaxes(title_text="ms, from the start of the first step shown", row=len(series), col=1)
    figure.update_layout(barmode="overlay", bargap=0.25)
    num_tracks = sum(len({event["rank"] for event in events}) for events in found)
    height = HEIGHT // 2 + _PANEL_PX * len(series) + _ROW_PX * num_tracks
    return compose(figure, title, series, height=height, notes=[_NOTE, *_untold(series)], quiet=_QUIET)


def _untold(series: Sequence[Series]) -> list[str]:
    bare = [each.label for each in series if not len(each.runs[0].collectives)]
    return [f"No rows of collectives were kept of {', '.join(bare)}: its steps are shown whole."] if bare else []


def _add_tracks(figure: Any, events: Sequence[dict[str, Any]], row: int) -> None:
    """Compute is the whole step; wait and transfer are laid over it."""
    tracks = [f"rank {rank}" for rank in sorted({event["rank"] for event in events}, reverse=True)]
    for kind in KINDS:
        mine = [event for event in events if event["kind"] == kind]
        figure.add_trace(
            plotly().Bar(
                y=[f"rank {event['rank']}" for event in mine],
                base=[event["start_ms"] for event in mine],
                x=[event["ms"] for event in mine],
                name=kind,
                legendgroup=kind,
                showlegend=row == 1,
                orientation="h",
                marker={**panels.pattern(*panels.SHARE_LOOKS[kind]), "line": {"width": 0}},
                hovertext=[f"{event['told']}, {1000 * event['ms']:.0f} µs" for event in mine],
                hoverinfo="text",
            ),
            row=row,
            col=1,
        )
    figure.update_yaxes(categoryorder="array", categoryarray=tracks, row=row, col=1)
