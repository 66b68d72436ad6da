"""Figures of stages: bars are the recorded instants, rows the ranks, and shares add up to the run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from recorded_runs import MS, make_run

from labkit.lab.run import Run
from labkit.layout import Layout
from labkit.measure.metrics import Window
from labkit.measure.records import StepRecord
from labkit.measure.stages import stage_figures
from labkit.measure.store import Store
from labkit.show.figures_pipeline import (
    BUBBLE,
    PART_LOOKS,
    bars_of,
    bubble_figure,
    stage_gantt,
    stage_shares,
    stretch_of,
)


def _step(layout: str, number: int, start_ms: int, prefill: int = 0, first_rank: int = 0) -> StepRecord:
    """Stage 0 works for 10 ms; stage 1 comes 1 ms after it, waits until those are over, then works for 12."""
    stages = [Layout.parse(layout).coords(at).pp for at in range(Layout.parse(layout).ranks_per_replica)]
    n = len(stages)
    return StepRecord(
        run_id="r", epoch=1, step_id=number, replica=0, layout=layout, start_ns=start_ms * MS,
        end_ns=(start_ms + 22) * MS, num_prefill_seqs=int(prefill > 0), num_decode_seqs=int(not prefill),
        prefill_tokens=prefill, context_tokens=64, ranks=[first_rank + at for at in range(n)],
        rank_start_ns=[(start_ms + stage) * MS for stage in stages],
        rank_end_ns=[(start_ms + (22 if stage else 10)) * MS for stage in stages],
        compute_ns=[(11 if stage else 10) * MS for stage in stages], wait_ns=[0] * n,
        transfer_ns=[MS if stage else 0 for stage in stages], collective_bytes=2048, num_collectives=1,
        idle_ns=[9 * MS if stage else 0 for stage in stages],
    )  # fmt: skip


def pipeline_run(layout: str = "pp2", num_steps: int = 4) -> Run:
    run = make_run(layout)
    run.step_records = [_step(layout, i, 22 * i, prefill=64 * (i == 0)) for i in range(num_steps)]
    window = Window(0, 22 * num_steps * MS)
    run.summary["pipeline"] = stage_figures(run.step_records, window, Layout.parse(layout))
    return run


def test_a_bar_is_what_the_record_says_and_a_bubble_comes_first():
    bars = bars_of([_step("pp2", 7, 100)], 0, 1000 * MS)
    assert [(bar.stage, bar.rank, bar.kind, bar.start_ns // MS, bar.end_ns // MS) for bar in bars] == [
        (0, 0, "decode", 100, 110),
        (1, 1, BUBBLE, 101, 110),
        (1, 1, "decode", 110, 122),
    ]


def test_bars_are_cut_to_the_window_and_those_outside_are_gone():
    bars = bars_of([_step("pp2", 0, 0), _step("pp2", 1, 100)], 5 * MS, 105 * MS)
    assert [(bar.kind, bar.start_ns // MS, bar.end_ns // MS) for bar in bars] == [
        ("decode", 5, 10), (BUBBLE, 5, 10), ("decode", 10, 22), ("decode", 100, 105), (BUBBLE, 101, 105),
    ]  # fmt: skip


def test_a_stage_follows_from_a_ranks_place_in_its_replica():
    """Also where the replica's ranks are not the first ones."""
    bars = bars_of([_step("pp2xtp2", 0, 0, first_rank=4)], 0, 50 * MS)
    assert {(bar.stage, bar.rank) for bar in bars} == {(0, 4), (0, 5), (1, 6), (1, 7)}


def test_the_stretch_lies_in_the_middle_and_keeps_to_the_phase():
    steps = [_step("pp2", i, 22 * i, prefill=64 * (i == 0)) for i in range(9)]
    assert stretch_of(steps, 2) == (88 * MS, 132 * MS)
    assert stretch_of(steps, 2, "prefill") == (0, 44 * MS)
    assert stretch_of(steps, 2, "mixed") == stretch_of(steps, 2), "there is none: any will do"
    assert stretch_of(steps[::-1], 100) == (0, 198 * MS)
    with pytest.raises(ValueError, match="no recorded steps"):
        stretch_of([], 2)


def _rows(figure: Any, axis: str) -> set[str]:
    return {label for trace in figure.data if trace.yaxis == axis for label in trace.y}


def test_a_gantt_has_a_panel_a_run_and_a_row_a_rank_on_one_scale():
    figure = stage_gantt({"one": pipeline_run(), "many": pipeline_run("pp2xtp2", 12)}, num_steps=2)
    assert _rows(figure, "y") == {"stage 0, rank 0", "stage 1, rank 1"}
    assert _rows(figure, "y2") == {f"stage {rank // 2}, rank {rank}" for rank in range(4)}
    assert figure.layout.xaxis.range == figure.layout.xaxis2.range == (0, 44)
    work = next(trace for trace in figure.data if trace.name == "decode")
    assert (work.base[0], work.x[0]) == (0, 10) and "step 2: 0 prompt tokens, 1 decodes" in work.hovertext[0]
    named = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(named) == sorted(set(named)), "each kind once in the legend"
    assert "measured here (solid)" in figure.layout.title.subtitle.text


def test_a_stored_run_gives_the_same_bars_and_says_that_it_was_recorded(tmp_path: Any):
    run = pipeline_run()
    with Store(tmp_path / "store.sqlite") as store:
        store.start_run("r", layout="pp2")
        store.add_steps(run.step_records)
        store.finish_run("r", "finished", summary=run.summary)
        loaded = Run.load("r", store)
    before, after = stage_gantt({"x": run}), stage_gantt({"x": loaded})
    assert [(t.name, t.base, t.x) for t in before.data] == [(t.name, t.base, t.x) for t in after.data]
    assert "recorded" in after.layout.annotations[0].text and "recorded (dashed)" in after.layout.title.subtitle.text


def test_shares_of_a_stage_are_the_summarys_and_add_up_to_the_run():
    run = pipeline_run()
    figure = bubble_figure({"now": run, "then": dataclasses.replace(run, provenance="recorded")})
    assert [trace.name for trace in figure.data] == list(PART_LOOKS)
    assert [sum(trace.y[at] for trace in figure.data) for at in range(4)] == pytest.approx([100] * 4)
    shares = {trace.name: trace.y[1] for trace in figure.data}
    assert shares[BUBBLE] == pytest.approx(100 * 9 / 22) and shares["compute"] == pytest.approx(50)
    assert shares["no step"] == pytest.approx(100 / 22), "1 of 22 ms, before it came"
    assert set(figure.data[0].x[0]) == {"now", "then<br>recorded"}


def test_bubbles_are_never_more_than_the_idle_time():
    """A bubble that began before the window counts whole, and idle ends at the window."""
    stage = {"compute": 0.5, "wait": 0.0, "transfer": 0.1, "idle": 0.4, "bubble": 0.45}
    assert sum(stage_shares(stage).values()) == pytest.approx(1)


@pytest.mark.parametrize("figure", [stage_gantt, bubble_figure])
def test_a_layout_without_stages_is_refused_with_the_reason(figure: Any):
    with pytest.raises(ValueError, match="TP2 has one stage, and a pipeline has two or more"):
        figure([make_run("tp2")])


@pytest.mark.parametrize("figure", [stage_gantt, bubble_figure])
def test_nothing_is_told_by_colour_alone(figure: Any):
    shapes = [(t.marker.pattern.shape, t.name) for t in figure({"x": pipeline_run()}).data]
    assert len([name for shape, name in shapes if not shape]) <= 2
    assert len({shape for shape, _ in shapes if shape}) == len([shape for shape, _ in shapes if shape])


def test_a_gantt_over_several_hosts_says_how_far_their_clocks_agree():
    run = pipeline_run()
    assert "clocks agree" not in _notes(stage_gantt([run]))
    run.summary["environment"]["clocks"] = [{"host": "far", "ranks": [1], "uncertainty_ns": 40_000}]
    assert "clocks agree to ± 0.040 ms" in _notes(stage_gantt([run]))


def _notes(figure) -> str:
    return " ".join(note.text for note in figure.layout.annotations)
