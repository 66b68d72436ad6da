"""Still figures of a pipeline: what each stage did in a stretch of time, and what it did over a whole run.

Both are drawn from what was recorded. A stage's bar of one step begins with its bubble, if it had to wait for the stage
before, and goes on with its work; white is time without a step at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.layout import Layout
from labkit.measure.breakdown import phase_of
from labkit.measure.clocks import clocks_of, uncertainty_ms
from labkit.measure.records import StepRecord
from labkit.show import figures_panels as panels
from labkit.show.figures_style import HEIGHT, Series, compose, plotly, series_of

if TYPE_CHECKING:
    from labkit.lab.run import Run

Runs = dict[str, "Run"] | Sequence["Run"]
BUBBLE = "bubble: waits for the stage before"
BAR_LOOKS = {
    "prefill": ("#D55E00", ""),
    "decode": ("#0072B2", "/"),
    "mixed": ("#009E73", "x"),
    BUBBLE: ("#c9cdd3", "."),
}
PART_LOOKS = {
    **{name: panels.SHARE_LOOKS[name] for name in ("compute", "wait", "transfer")},
    BUBBLE: BAR_LOOKS[BUBBLE],
    "no step": ("#eef0f2", ""),
}
NO_PIPELINE = "has one stage, and a pipeline has two or more: run a layout such as pp2"
_ROW_PX, _PANEL_PX, _QUIET = 34, 56, ("samples",)


class Bar(NamedTuple):
    """What one rank did from `start_ns` on, cut to the window that is shown."""

    stage: int
    rank: int
    kind: str
    """A phase, or BUBBLE."""
    start_ns: int
    end_ns: int
    step: StepRecord


def bars_of(steps: Sequence[StepRecord], start_ns: int, end_ns: int) -> list[Bar]:
    """Every rank's bubbles and work between two instants, from the records of the steps."""
    found = (bar for step in steps for bar in _bars(step))
    cut = (bar._replace(start_ns=max(bar.start_ns, start_ns), end_ns=min(bar.end_ns, end_ns)) for bar in found)
    return [bar for bar in cut if bar.end_ns > bar.start_ns]


def _bars(step: StepRecord) -> Iterator[Bar]:
    """A receive is a stage's first call, so its wait is the first thing in the step."""
    layout = Layout.parse(step.layout)
    for at, rank in enumerate(step.ranks):
        idle = step.idle_ns[at] if step.idle_ns else 0
        begin, end, stage = step.rank_start_ns[at], step.rank_end_ns[at], layout.coords(at).pp
        yield Bar(stage, rank, BUBBLE, begin, begin + idle, step)
        yield Bar(stage, rank, phase_of(step), begin + idle, end, step)


def stretch_of(steps: Sequence[StepRecord], num_steps: int, phase: str = "") -> tuple[int, int]:
    """From the start of a step in the middle of the run to the end of the last of the `num_steps` from it on.

    phase: that step is of this phase (of any, where the run had none of it). ValueError without steps.
    """
    ordered = sorted(steps, key=lambda step: step.start_ns)
    if not ordered:
        raise ValueError("The run has no recorded steps: a foreign server tells none, and record=False keeps none.")
    places = [at for at, step in enumerate(ordered) if not phase or phase_of(step) == phase] or range(len(ordered))
    first = max(0, min(places[len(places) // 2], len(ordered) - num_steps))
    shown = ordered[first : first + num_steps]
    return min(min(step.rank_start_ns) for step in shown), max(max(step.rank_end_ns) for step in shown)


def stage_gantt(runs: Runs, title: str = "What each stage did", *, num_steps: int = 8, phase: str = "") -> Any:
    """A panel a run, a row a rank, all on one scale: `num_steps` steps from the middle of the run (see `stretch_of`).

    Raises ValueError for a layout without a pipeline.
    """
    series = series_of(runs)
    for each in series:
        _require_stages(each)
    stretches = [stretch_of(each.runs[0].step_records, num_steps, phase) for each in series]
    span_ns = max(end - start for start, end in stretches)
    figure = _stack([each.bar_label.replace("<br>", ", ") for each in series])
    shown: set[str] = set()
    for row, (each, (start, _)) in enumerate(zip(series, stretches, strict=True), 1):
        _add_panel(figure, bars_of(each.runs[0].step_records, start, start + span_ns), start, row, shown)
    figure.update_xaxes(range=[0, span_ns / 1e6])
    figure.update_xaxes(title_text="ms, from the start of the first step shown", row=len(series), col=1)
    num_rows = sum(Layout.parse(each.summary["layout"]).world_size for each in series)
    note = "White: the rank had no step. Work is compute with the calls in it; point at a bar for its parts."
    height = HEIGHT // 2 + _PANEL_PX * len(series) + _ROW_PX * num_rows
    figure.update_layout(barmode="overlay", bargap=0.25)
    return compose(figure, title, series, height=height, notes=[note, *_clock_notes(series)], quiet=_QUIET)


def _clock_notes(series: Sequence[Series]) -> list[str]:
    """Rows of ranks on several hosts are placed by clocks that agree only so far."""
    worst = max((uncertainty_ms(clocks_of(each.summary)) or 0.0 for each in series), default=0.0)
    return [f"Ranks stand on several hosts, whose clocks agree to ± {worst:.3f} ms."] if worst else []


def _require_stages(series: Series) -> None:
    if not series.summary.get("pipeline"):
        raise ValueError(f"{series.label} {NO_PIPELINE}.")


def _stack(titles: Sequence[str]) -> Any:
    plotly()
    from plotly.subplots import make_subplots

    return make_subplots(
        rows=len(titles), cols=1, subplot_titles=titles, shared_xaxes=True, vertical_spacing=0.24 / len(titles)
    )


def _add_panel(figure: Any, bars: Sequence[Bar], start_ns: int, row: int, shown: set[str]) -> None:
    """One trace a kind; a kind is named in the legend once for all panels."""
    for kind, look in BAR_LOOKS.items():
        mine = [bar for bar in bars if bar.kind == kind]
        if not mine:
            continue
        figure.add_trace(
            plotly().Bar(
                y=[f"stage {bar.stage}, rank {bar.rank}" for bar in mine],
                base=[(bar.start_ns - start_ns) / 1e6 for bar in mine],
                x=[(bar.end_ns - bar.start_ns) / 1e6 for bar in mine],
                name=kind,
                legendgroup=kind,
                showlegend=kind not in shown,
                orientation="h",
                marker=panels.pattern(*look),
                hovertext=[_told(bar) for bar in mine],
                hoverinfo="text",
            ),
            row=row,
            col=1,
        )
        shown.add(kind)
    rows = sorted({(bar.stage, bar.rank) for bar in bars}, reverse=True)
    order = [f"stage {stage}, rank {rank}" for stage, rank in rows]
    figure.update_yaxes(categoryorder="array", categoryarray=order, row=row, col=1)


def _told(bar: Bar) -> str:
    step, at = bar.step, bar.step.ranks.index(bar.rank)
    parts = (("compute", step.compute_ns), ("wait", step.wait_ns), ("transfer", step.transfer_ns))
    times = ", ".join(f"{name} {values[at] / 1e6:.2f}" for name, values in parts)
    carried = f"{step.prefill_tokens} prompt tokens, {step.num_decode_seqs} decodes"
    return f"step {step.step_id}: {carried}<br>{bar.kind}: {(bar.end_ns - bar.start_ns) / 1e6:.2f} ms<br>{times} ms"


def stage_shares(stage: dict[str, Any]) -> dict[str, float]:
    """A stage of `run.summary["pipeline"]` as shares of the run that add up to one, named as in PART_LOOKS."""
    busy = {name: stage[name] for name in ("compute", "wait", "transfer")}
    bubble = min(stage["bubble"], stage["idle"])
    return {**busy, BUBBLE: bubble, "no step": max(0.0, stage["idle"] - bubble)}


def bubble_figure(runs: Runs, title: str = "Where a stage's time goes") -> Any:
    """For each run and stage: shares of the measured time, work below, bubbles and time without a step above."""
    series = series_of(runs)
    for each in series:
        _require_stages(each)
    columns = [(each, stage) for each in series for stage in each.summary["pipeline"]["stages"]]
    labels = [[each.bar_label for each, _ in columns], [f"stage {stage['stage']}" for _, stage in columns]]
    figure = plotly().Figure()
    for part, look in PART_LOOKS.items():
        values = [100 * stage_shares(stage)[part] for _, stage in columns]
        figure.add_trace(
            plotly().Bar(
                x=labels,
                y=values,
                name=part,
                marker=panels.pattern(*look),
                hovertemplate=f"{part} %{{y:.1f}} %<extra>%{{x}}</extra>",
            )
        )
    figure.update_yaxes(title_text="share of the run, %", range=[0, 100])
    figure.update_xaxes(tickangle=0, tickfont_size=11)
    figure.update_layout(barmode="stack")
    return compose(figure, title, series, height=HEIGHT + 40, quiet=_QUIET)
