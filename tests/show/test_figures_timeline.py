"""The picture of a few steps: what it shows are the exported trace's own instants, and nothing outside its stretch."""

from __future__ import annotations

import pandas as pd
import pytest
from recorded_runs import MS, make_run

from labkit.lab.run import Run
from labkit.show.figures_timeline import timeline_figure, trace_events
from labkit.teach.views import last_table
from tests.measure.test_chrome_trace import ROWS, step


def run_of(rows: pd.DataFrame = ROWS, num_steps: int = 3) -> Run:
    """Steps of 10 ms one after another; the collectives are the middle one's."""
    run = make_run("tp2")
    run.step_records = [step(10 * i, 10 * i + 10, step_id=i) for i in range(num_steps)]
    moved = rows.assign(step_id=1, enter_ns=rows["enter_ns"] + 10 * MS, exit_ns=rows["exit_ns"] + 10 * MS)
    run.__dict__["collectives"] = moved
    return run


def test_slices_are_the_recorded_instants_from_the_stretch_on():
    events = trace_events(run_of(), num_steps=1, phase="decode")
    by_rank = {rank: [(e["kind"], e["start_ms"], e["ms"]) for e in events if e["rank"] == rank] for rank in (0, 1)}
    assert by_rank[0] == [("compute", 0.0, 10.0), ("wait", 1.0, 2.0), ("transfer", 3.0, 0.5), ("transfer", 6.0, 0.5)]
    assert by_rank[1] == [("compute", 0.0, 10.0), ("transfer", 3.0, 0.5), ("wait", 5.0, 1.0), ("transfer", 6.0, 0.5)]
    ends = {e["start_ms"] + e["ms"] for e in events if e["kind"] == "wait"}
    assert ends == {3.0, 6.0}, "a wait ends when the last rank has entered"


def test_replicas_beside_each_other_are_all_shown_and_cut_at_the_stretch():
    run = run_of(ROWS.iloc[:0])
    other = step(14, 26, ranks=1, step_id=9)
    other.replica, other.ranks = 1, [2]
    run.step_records.append(other)
    events = trace_events(run, num_steps=1)
    assert [(e["rank"], e["start_ms"], e["ms"]) for e in events] == [(0, 0.0, 10.0), (1, 0.0, 10.0), (2, 4.0, 6.0)]


def test_the_figure_has_a_track_a_rank_and_says_where_rows_are_missing():
    bare = run_of(ROWS.iloc[:0])
    figure = timeline_figure({"TP2": run_of(), "bare": bare}, num_steps=1)
    assert {y for trace in figure.data for y in trace.y} == {"rank 0", "rank 1"}
    assert figure.layout.xaxis.range == (0, 10.0)
    notes = " ".join(annotation.text for annotation in figure.layout.annotations).replace("<br>", " ")
    assert "No rows of collectives were kept of bare" in notes
    with pytest.raises(ValueError, match="no recorded steps"):
        trace_events(make_without_steps(), 1)


def make_without_steps() -> Run:
    run = make_run("tp2")
    run.step_records = []
    return run


def test_the_table_names_who_was_last():
    rows = pd.concat([ROWS.assign(seq=ROWS["seq"] + 2 * i) for i in range(30)])
    late = rows[rows["seq"] % 2 == 0]  # rank 1 comes late to these alone
    run = make_run("tp2")
    run.__dict__["collectives"] = late
    table = last_table({"TP2": run, "none": run_of(ROWS.iloc[:0])})
    assert table.rows == [["TP2", "TP", "1", "100% of 30", "50%", "2,000 µs"]]
    assert "Rank 1 is last to 100%" in table.remarks[0]
    assert "nothing of them crosses" in last_table({"TP2": run}, "prefill").remarks[0]
