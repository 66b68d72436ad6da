"""The lab's pieces that need no ranks.

Plans, joining, pooling, intervals, what is watched, what is imported.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time

import numpy as np
import pytest

import labkit
from labkit.lab.compare import Comparison, bootstrap_interval, compare, difference, pooled
from labkit.lab.joining import Joiner
from labkit.lab.plan import RunPlan, new_run_id
from labkit.lab.run import Run, open_store
from labkit.lab.running import Recording, begin, finish
from labkit.lab.summary import Setting, build_summary
from labkit.lab.watching import Watch
from labkit.load.report import LoadReport
from labkit.load.target import Target
from labkit.measure.metrics import Objective, Window
from labkit.measure.records import Environment
from labkit.measure.store import check_run_id
from labkit.server.client import ServerClient, ServerError
from tests.measure.make import MS, request, server_times, step

SCRIPTED = (
    "layout model backend num_ranks requests ttft_ms tpot_ms itl_ms e2el_ms throughput goodput ttft_parts_ms "
    "step_share memory_bytes quality"
)
ENVIRONMENT = Environment("h", "cpu", "shm", "cpu", 4, 2, 1, "float32", {}, 0, "2026-01-01T00:00:00+00:00")


# ---- plans


def test_what_is_asked_for_is_what_is_measured():
    spec = RunPlan(seconds=10, rate=4).spec(Target(url="http://127.0.0.1:1"), "r", 2048, 1024)
    assert (spec.warmup_s, spec.seconds) == (2.0, 12.0)
    assert RunPlan(seconds=1).effective_warmup_s == pytest.approx(0.2)
    assert RunPlan().measured_s == 30
    assert RunPlan(num_requests=10).measured_s is None and RunPlan(num_requests=10).effective_warmup_s == 0
    assert RunPlan(warmup_s=0, seconds=5).effective_warmup_s == 0


def test_a_plan_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="choose one"):
        RunPlan(concurrency=4, rate=2)
    with pytest.raises(ValueError, match="warm-up"):
        RunPlan(warmup_s=-1)


def test_sharing_is_read_off_the_workload():
    assert RunPlan(workload="shared-prefix").shares_prefixes
    assert not RunPlan(workload="chat").shares_prefixes
    with pytest.raises(FileNotFoundError, match="chat"):
        RunPlan(workload="nonsense")


@pytest.mark.parametrize("layout", ["tp2", "dp2xtp2+sp", "pp2+split=4-6", ""])
def test_run_ids_are_legal_and_nobody_elses(layout: str):
    ids = {new_run_id(layout) for _ in range(50)}
    assert len(ids) == 50
    for run_id in ids:
        check_run_id(run_id)


# ---- joining


def test_both_sightings_are_joined_in_either_order():
    joined: list = []
    joiner = Joiner(joined.append)
    first, second = (request(0, (50, 60), index=i, http_status=200) for i in (1, 2))
    joiner.add_times(server_times(first, {"queue": 3}))
    joiner.add_records([first, second])
    assert joined == [first] and first.server.queue_ns == 3 * MS and joiner.num_waiting == 1
    joiner.add_times(server_times(second, {}))
    assert joined == [first, second] and second.server is not None


def test_a_record_does_not_wait_for_ever_nor_for_a_server_it_never_reached():
    joined: list = []
    joiner = Joiner(joined.append, patience_s=0.05)
    joiner.add_records([request(0, (), index=1, status="failed", http_status=503)])
    assert len(joined) == 1
    joiner.add_records([request(0, (50,), index=2, http_status=200)])
    time.sleep(0.06)
    joiner.expire()
    assert [record.index for record in joined] == [1, 2] and joined[1].server is None
    joiner.add_records([request(0, (50,), index=3, http_status=200)])
    joiner.expire(everything=True)
    assert len(joined) == 3


# ---- summaries


def _recording(n: int = 40, shift_ms: float = 0.0, run_id: str = "") -> Recording:
    recording = Recording(RunPlan(seconds=4, objective=Objective(100, 20)), run_id or new_run_id("tp2"))
    rng = np.random.default_rng(7)
    for i in range(n):
        ttft = 40 + 10 * rng.random() + shift_ms
        record = request(i * 100, (i * 100 + ttft, i * 100 + ttft + 10), index=i, http_status=200)
        record.server = server_times(record, {"network": 1, "queue": 2, "compute": ttft - 4, "delivery": 1})
        record.server.run_id = recording.run_id
        recording.records.append(record)
    recording.steps = [step(i * 10, i * 10 + 9, [5, 5], [1, 1], [2, 2], step_id=i) for i in range(400)]
    recording.report = LoadReport(
        run_id="r", workload="chat", start_ns=0, window_start_ns=0, window_end_ns=3900 * MS, asked_rate=10.0
    )
    return recording


def _where() -> Setting:
    memory = [{"rank": rank, "weights": 10, "kv": 5, "other": 1, "free": 2} for rank in range(3)]
    return Setting(model="lab-5m", layout="tp2", environment=ENVIRONMENT, memory=memory)


def test_the_summary_has_the_names_that_others_script_against():
    recording = _recording()
    summary = build_summary(
        recording.plan, _where(), recording.records, recording.steps, recording.report, run_id="r"
    )
    assert (
        list(summary)[1:]
        == SCRIPTED.split()[:4] + [name for name in summary if name not in SCRIPTED.split()[:4]][1:]
    )
    assert set(SCRIPTED.split()) <= set(summary)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert {"p50", "p90", "p95", "p99", "mean", "n"} <= set(summary[name])
    assert set(summary["throughput"]) == {"requests_per_s", "input_tokens_per_s", "output_tokens_per_s"}
    assert {"compute", "wait", "transfer", "idle"} <= set(summary["step_share"])
    assert [rank["rank"] for rank in summary["memory_bytes"]] == [0, 1]  # the third holds nothing of it
    assert sum(summary["ttft_parts_ms"].values()) == pytest.approx(summary["ttft_ms"]["mean"])
    assert abs(summary["ttft_parts_ms"]["unaccounted"]) < 1e-6
    assert summary["backend"] == "cpu" and summary["num_ranks"] == 2
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_a_foreign_server_has_the_same_names_without_what_it_does_not_tell():
    recording = _recording()
    summary = build_summary(
        recording.plan, Setting(model="m"), recording.records, [], recording.report, run_id="r"
    )
    assert set(SCRIPTED.split()) <= set(summary)
    assert (
        summary["layout"] is None
        and summary["memory_bytes"] == []
        and summary["step_share"]["compute"] is None
    )


def test_a_run_is_stored_and_answers_the_same_tomorrow():
    recording = _recording()
    begin(recording, "tp2", "lab-5m", "http://127.0.0.1:1")
    run = finish(recording, _where())
    with open_store() as store:
        store.add_steps([_with_run(one, run.run_id) for one in recording.steps])
    again = Run.load(run.run_id)
    assert again.summary == run.summary and again.records == run.records and again.status == "finished"
    assert len(again.steps) == len(run.steps) == 400
    assert again.requests["ttft_ms"].mean() == pytest.approx(run.summary["ttft_ms"]["mean"])
    assert list(run.memory["weights"]) == [10, 10] and len(run.collectives) == 0
    assert again.window == Window(0, 3900 * MS)


def _with_run(one, run_id: str):
    one.run_id = run_id
    return one


def test_a_run_that_failed_or_was_stopped_keeps_what_it_measured_and_says_so():
    for fields, status, code in (
        ({"error": "The server has gone."}, "failed", "failed"),
        ({"stopped": True}, "stopped", "stopped"),
    ):
        recording = _recording()
        for name, value in fields.items():
            setattr(recording, name, value)
        begin(recording, "tp2", "lab-5m", "http://127.0.0.1:1")
        run = finish(recording, _where())
        assert run.status == status and run.summary["ttft_ms"]["n"] == 40
        assert code in {verdict["code"] for verdict in run.quality}
        assert Run.load(run.run_id).status == status


def test_events_of_a_run_are_taken_apart():
    recording = _recording(0)
    recording.steps = []
    record = request(0, (50, 60), index=1, http_status=200)
    recording.joiner.add_records([record])
    times = {
        name: getattr(server_times(record, {"queue": 9}), name)
        for name in server_times(record, {}).__struct_fields__
    }
    recording.on_event({"event": "request", **times})
    recording.on_event({"event": "steps", "steps": [_plain(step(0, 9, [5], [1], [2]))]})
    recording.on_event({"event": "failure", "rank": 1, "error": "killed", "kind": "killed"})
    assert recording.records[0].server.queue_ns == 9 * MS
    assert recording.steps[0].compute_ns == [5 * MS]
    assert recording.notices == ["Rank 1 failed during this run: killed"]


def _plain(one) -> dict:
    return {name: getattr(one, name) for name in one.__struct_fields__}


# ---- comparisons


def _run(shift_ms: float = 0.0, layout: str = "tp2", n: int = 40) -> Run:
    recording = _recording(n, shift_ms)
    where = _where()
    where.layout = layout
    summary = build_summary(
        recording.plan, where, recording.records, recording.steps, recording.report, run_id="r"
    )
    return Run("r", summary, recording.records, recording.steps)


def test_a_difference_is_taken_within_pairs():
    """The same requests, each 5 ms later: the interval is a point although TTFT varies by 10."""
    found = difference([_run()], [_run(5)], "ttft_ms", 50)
    assert found["difference_ms"] == pytest.approx(5) and found["n"] == 40
    assert found["interval_ms"] == pytest.approx([5, 5], abs=1e-4) and found["verdict"] == "more"
    assert difference([_run(5)], [_run()], "ttft_ms", 50)["verdict"] == "less"
    assert difference([_run()], [_run()], "ttft_ms", 50)["verdict"] == "cannot tell"
    assert difference([_run(n=5)], [_run(n=5)], "ttft_ms", 50)["verdict"] == "too few"


def test_the_bootstrap_interval_covers_and_repeats():
    rng = np.random.default_rng(0)
    pairs = np.stack([rng.normal(100, 20, 300), rng.normal(110, 20, 300)], axis=1)
    low, high = bootstrap_interval(pairs, 50)
    assert 5 < low < 10 < high < 16
    assert (low, high) == bootstrap_interval(pairs, 50)


def test_rounds_are_pooled():
    figures = pooled([_run(), _run(20)], Objective(ttft_ms=55))
    assert figures["requests"] == {"scheduled": 80, "completed": 80}
    assert figures["ttft_ms"]["n"] == 80
    assert figures["goodput"]["good"] == 40
    assert figures["goodput"]["requests_per_s"] == pytest.approx(40 / 7.8)


def test_a_comparison_prints_as_a_table_and_as_json():
    found = Comparison({"tp1": [_run(layout="tp1")], "tp2": [_run(5)]}, Objective(100, 20))
    table = found.table()
    assert list(table.columns) == ["tp1", "tp2"] and table.loc["n", "tp2"] == 40
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["layouts"] == ["tp1", "tp2"]
    assert {entry["layout"] for entry in data["differences"]} == {"tp2"}


def test_a_comparison_needs_two_layouts():
    for layouts in ([], ["tp1"], ["tp2", "TP2"]):
        with pytest.raises(ValueError, match="two or more different"):
            compare(None, layouts, RunPlan())  # type: ignore[arg-type]  # refused before the lab is needed


# ---- watching


def _watch() -> tuple[Watch, list]:
    seen: list = []
    watch = Watch(ServerClient("http://127.0.0.1:1"), lambda kind, event: seen.append(kind))
    return watch, seen


def test_the_newest_word_of_each_kind_is_kept():
    watch, seen = _watch()
    watch._take(
        {"event": "state", "state": "ready", "layout": "tp1", "memory": [], "holder": None, "queue": []}
    )
    watch._take({"event": "engine", "replicas": [{"waiting": 2, "running": 3}, {"waiting": 1, "running": 4}]})
    watch._take({"event": "lease", "holder": {"client": "somebody"}, "queue": []})
    watch._take({"event": "memory", "ranks": [{"rank": 0}]})
    watch._take({"event": "switch", "layout": "tp2", "name": "TP2", "ready_s": 0.2})
    picture = watch.snapshot(time.monotonic_ns())
    assert picture["queues"]["waiting"] == [3] and picture["queues"]["running"] == [7]
    assert picture["state"]["holder"] == {"client": "somebody"} and picture["state"]["memory"] == [
        {"rank": 0}
    ]
    assert picture["marks"][0]["layout"] == "tp2"
    assert seen == ["state", "engine", "lease", "memory", "switch"]


def test_a_failure_is_shown_until_the_ranks_are_back():
    watch, _ = _watch()
    watch._take({"event": "failure", "rank": 1, "kind": "killed", "error": "signal 9", "traceback": ""})
    assert watch.snapshot(0)["failure"]["rank"] == 1
    watch._take({"event": "state", "state": "restarting", "failure": None})
    assert watch.snapshot(0)["failure"]["rank"] == 1
    watch._take({"event": "state", "state": "ready", "failure": None})
    assert watch.snapshot(0)["failure"] is None


def test_watching_where_nobody_is_gets_a_sentence():
    watch, _ = _watch()
    with pytest.raises(ServerError, match="does not answer"):
        watch.open()
    assert watch.link == "absent"


# ---- imports


def test_the_package_names_its_doors_lazily():
    code = (
        "import sys, labkit; print('numpy' in sys.modules); "
        "labkit.Layout; labkit.connect; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        labkit.Nothing  # noqa: B018
    assert {"connect", "Lab", "Run", "Layout"} <= set(dir(labkit))


def test_a_page_kernel_pays_little_for_a_session():
    """The kernel's own 45 MB and this must stay under 80 MB a visitor."""
    code = (
        "import os, sys, labkit.lab.live; heavy = ('pandas', 'torch', 'aiohttp', 'pyarrow', 'plotly'); "
        "print([name for name in heavy if name in sys.modules]); import psutil; "
        "print(psutil.Process().memory_info().rss)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    heavy, rss_bytes = out.split("\n")[:2]
    assert heavy == "[]" and int(rss_bytes) < 60e6


def test_a_plan_is_a_value():
    assert RunPlan(rate=4) == RunPlan(rate=4) and dataclasses.replace(RunPlan(), seed=3).seed == 3
