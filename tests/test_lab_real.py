"""The whole way with real ranks.

Connect, run, compare, a live session, the shell; sums that must hold on all of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit
from labkit.lab.compare import difference
from labkit.lab.lab import Lab, run_against
from labkit.lab.run import Run, open_store
from labkit.measure.export import export_run
from labkit.measure.metrics import Objective
from labkit.server.client import ServerError
from tests.measure.trace_form import assert_on_one_clock, validate

pytestmark = pytest.mark.engine
REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A server of this module's own, of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RUNTIME", "HOME"):
            folder = tmp_path_factory.mktemp(name.lower())
            folder.chmod(0o700)
            patch.setenv(f"LABKIT_{name}", str(folder))
        patch.delenv("LABKIT_TOKEN", raising=False)
        with labkit.connect(model="lab-5m", ranks=2, threads=1) as lab:
            lab.wait_ready()
            yield lab
            lab.client.shutdown()


@pytest.fixture(scope="module")
def runs(lab: Lab) -> dict[str, Run]:
    return {name: lab.run(name, "chat", rate=5, seconds=4, warmup_s=0.5) for name in ("tp1", "tp2", "dp2")}


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_every_request_is_accounted_for_and_completed(runs: dict[str, Run], layout: str):
    run = runs[layout]
    counts = run.summary["requests"]
    assert run.status == "finished" and run.summary["layout"] == layout
    assert counts["scheduled"] + counts["requeued"] + counts["warmup"] == len(run.records)
    assert counts["completed"] == counts["scheduled"] > 8
    assert all(record.n == record.asked_output_tokens for record in run.records)
    assert all(record.server is not None and record.server.layout == layout for record in run.records)


@pytest.mark.parametrize("layout", ["tp1", "tp2", "dp2"])
def test_the_parts_of_ttft_add_up(runs: dict[str, Run], layout: str):
    summary = runs[layout].summary
    assert summary["ttft_parts"]["n"] == summary["requests"]["completed"]
    assert summary["ttft_parts"]["unaccounted_share"] <= 0.01
    assert sum(summary["ttft_parts_ms"].values()) == pytest.approx(summary["ttft_ms"]["mean"])
    assert summary["ttft_parts_ms"]["prefill_compute"] > 0 and summary["ttft_parts_ms"]["delivery"] > 0


def test_prefill_apart_from_decode_is_measured_with_its_handoffs(lab: Lab):
    run = lab.run("prefill:tp1,decode:tp1", "chat", rate=5, seconds=4, warmup_s=0.5)
    summary, completed = run.summary, run.summary["requests"]["completed"]
    assert summary["layout"] == "prefill:tp1,decode:tp1" and completed == summary["requests"]["scheduled"] > 8
    handoff = summary["handoff"]
    assert handoff["num"] == completed and handoff["bytes"] > 0 and handoff["ms"]["n"] == completed
    assert handoff["bytes"] == sum(
        record.server.handoff_bytes for record in run.records if record.server and not record.warmup
    )
    assert summary["ttft_parts"]["unaccounted_share"] <= 0.01 and summary["ttft_parts_ms"]["handoff"] > 0
    assert [pool["role"] for pool in lab.state()["pools"]] == ["prefill", "decode"]
    assert {step.replica: step.layout for step in run.step_records} == {0: "tp1", 1: "tp1"}
    by_rank = {rank: [step for step in run.step_records if step.ranks == [rank]] for rank in (0, 1)}
    assert not any(step.num_decode_seqs for step in by_rank[0]), "the prefill pool decodes nothing"
    assert not any(step.num_prefill_seqs for step in by_rank[1]), "the decode pool prefills nothing"
    run.plot()  # pools have figures like any layout


def test_crossing_is_measured_where_there_is_some(runs: dict[str, Run]):
    alone, together, beside = (runs[name].summary["step_share"] for name in ("tp1", "tp2", "dp2"))
    assert alone["transfer"] == beside["transfer"] == 0 < together["transfer"]
    assert len(together["by_rank"]) == 2 and len(alone["by_rank"]) == 1
    for share in (alone, together, beside):
        assert sum(share[name] for name in ("compute", "wait", "transfer", "idle")) == pytest.approx(1)
        assert {"prefill", "decode"} & set(share["by_phase"])


def test_steps_and_collectives_are_in_the_store_and_agree(runs: dict[str, Run]):
    run = Run.load(runs["tp2"].run_id)
    steps, collectives = run.steps, run.collectives
    assert len(steps) == len(runs["tp2"].steps) > 20
    assert len(collectives) == 2 * steps["num_collectives"].sum()  # a row on each of two ranks
    assert collectives["wait_ns"].sum() == sum(map(sum, steps["wait_ns"]))
    assert collectives["transfer_ns"].sum() == sum(map(sum, steps["transfer_ns"]))
    assert set(collectives["op"]) >= {"all_reduce"} and set(collectives["axis"]) == {"tp"}
    decoded = sum(record.n - 1 for record in run.records)
    assert steps["num_decode_seqs"].sum() == decoded
    assert steps["prefill_tokens"].sum() == sum(r.prompt_tokens - r.cached_tokens for r in run.records)


def test_two_ranks_hold_half_of_what_is_split_each(runs: dict[str, Run]):
    one, two = runs["tp1"].summary["memory_bytes"], runs["tp2"].summary["memory_bytes"]
    assert [rank["rank"] for rank in two] == [0, 1]
    halves = [rank["weights_by_part"]["mlp"] for rank in two]
    assert halves[0] == halves[1] and sum(halves) == one[0]["weights_by_part"]["mlp"]


def test_runs_of_one_seed_ask_the_same_and_find_no_warm_cache(runs: dict[str, Run]):
    asked = [[(r.asked_prompt_tokens, r.asked_output_tokens) for r in run.records] for run in runs.values()]
    assert asked[0] == asked[1] == asked[2]
    assert sum(record.cached_tokens for run in runs.values() for record in run.records) == 0


def test_a_closed_loop_and_a_number_of_requests(lab: Lab):
    run = lab.run(None, "chat", num_requests=6, concurrency=3, length_scale=0.3)
    assert run.summary["requests"]["scheduled"] == 6 == run.summary["requests"]["completed"]
    assert run.summary["concurrency"] == 3


def test_a_comparison_is_paired(lab: Lab):
    updates: list[dict] = []
    found = lab.compare(
        ["tp1", "tp2"], "chat", rate=6, seconds=2.5, length_scale=0.4, warmup_s=0, on_update=updates.append
    )
    assert [entry["n"] for entry in found.differences if entry["figure"] == "ttft_ms"][0] >= 8
    assert list(found.table().columns) == ["tp1", "tp2"]
    assert {"running", "over"} <= {update["phase"] for update in updates}


def test_a_refused_layout_says_why(lab: Lab):
    with pytest.raises(labkit.server.client.ServerError, match="tp"):
        lab.run("tp3", rate=1, seconds=1)
    with pytest.raises(ValueError, match="axis"):
        lab.run("xp2", rate=1, seconds=1)


def test_our_server_measured_as_if_it_were_a_stranger(lab: Lab):
    run = run_against(
        lab.url, token=lab.client.token, workload="chat", rate=5, seconds=1.5, warmup_s=0, length_scale=0.3
    )
    assert run.summary["model"] == "lab-5m" and run.summary["layout"] is None
    assert run.summary["requests"]["completed"] == run.summary["requests"]["scheduled"] > 0
    assert run.summary["step_share"]["compute"] is None


def test_a_live_session_moves_and_switches(lab: Lab):
    with lab.live(objective=Objective(1000, 200)) as live:
        live.start("tp1", "chat", rate=6)
        first = _until(live, lambda seen: seen["ttft_ms"]["n"] >= 3)
        assert first["role"] == "running" and first["state"]["layout"] == "tp1"
        assert first["step_share"]["compute"] > 0 and first["ttft_parts"]["n"] > 0
        report = live.switch("tp2")
        assert live.snapshot()["ttft_ms"]["n"] == 0  # the ladders begin anew
        live.set_rate(8)
        second = _until(live, lambda seen: seen["ttft_ms"]["n"] >= 3 and seen["step_share"]["transfer"])
        assert second["state"]["layout"] == "tp2" and second["run"]["layout"] == "tp2"
        assert second["switch"]["ready_s"] == report["ready_s"] and second["switch"]["first_token_s"] > 0
        assert second["marks"][-1]["layout"] == "tp2" and sum(second["series"]["output_tokens"]) > 0
        assert second["requests"]["failed"] == 0
        json.dumps(second)
        live.stop()
        assert live.snapshot()["role"] == "watching"
    assert lab.state()["holder"] is None


def _until(live, done, timeout_s: float = 20.0) -> dict:
    give_up = time.monotonic() + timeout_s
    while not done(seen := live.snapshot()):
        assert time.monotonic() < give_up, {k: seen[k] for k in ("role", "error", "link", "requests")}
        time.sleep(0.05)
    return seen


def test_a_second_visitor_waits_in_line_and_may_give_up(lab: Lab):
    with lab.live() as first, lab.live() as second:
        first.start("tp1", "chat", rate=2)
        _until(first, lambda seen: seen["role"] == "running")
        second.start("tp2", "chat", rate=2)
        waiting = _until(second, lambda seen: seen["waiting_in_line"])
        assert waiting["waiting_in_line"]["position"] == 1 and waiting["role"] == "queued"
        with pytest.raises(labkit.server.client.ServerError):
            second.switch("dp2")
        first.stop()
        _until(second, lambda seen: seen["role"] == "running" and seen["state"]["layout"] == "tp2")


def _shell(*words: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "labkit.cli", *words]
    return subprocess.Popen(
        command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_ctrl_c, **options
    )


def _hear_ctrl_c() -> None:
    """A test run in the background ignores it, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_shell_ends_with_one_json_line(lab: Lab):
    shell = _shell("run", "--layout", "tp2", "--rate", "5", "--seconds", "1.5", "--length-scale", "0.3")
    out, err = shell.communicate(timeout=60)
    assert shell.returncode == 0, err
    *table, line = out.strip().splitlines()
    summary = json.loads(line)
    assert summary["layout"] == "tp2" and summary["num_ranks"] == 2 and "TTFT" in "\n".join(table)
    assert summary["environment"]["threads_per_rank"] == lab.state()["threads_per_rank"]


def test_another_model_than_the_server_has_is_refused_not_ignored(lab: Lab):
    environment = {**os.environ, "LABKIT_TOKEN": lab.client.token}
    shell = _shell("run", "--server", lab.url, "--model", "lab-31m", "--json", env=environment)
    out, err = shell.communicate(timeout=60)
    assert shell.returncode == 2 and not out
    assert err == f"labkit: {lab.url} serves lab-5m, and you asked for lab-31m: leave out --model, or name that one.\n"


def test_control_c_keeps_what_was_measured_and_says_so(lab: Lab):
    shell = _shell(
        "run", "--rate", "8", "--seconds", "60", "--warmup", "0", "--length-scale", "0.3", "--json"
    )
    _until_held(lab)
    time.sleep(2.5)
    os.kill(shell.pid, signal.SIGINT)
    out, err = shell.communicate(timeout=30)
    assert shell.returncode == 130 and "Stopped" in err and "Traceback" not in err
    summary = json.loads(out)
    assert summary["requests"]["completed"] > 0
    assert "stopped" in {verdict["code"] for verdict in summary["quality"]}
    assert Run.load(summary["run_id"]).status == "stopped"


def test_a_run_dies_with_its_client(lab: Lab):
    shell = _shell("run", "--rate", "4", "--seconds", "60", "--json")
    _until_held(lab)
    time.sleep(1.0)
    shell.kill()
    shell.communicate()
    give_up = time.monotonic() + 5
    while (state := lab.state())["holder"] or state["requests_in_flight"]:
        assert time.monotonic() < give_up, "the killed client's run goes on"
        time.sleep(0.05)
    with open_store() as store:
        newest = str(store.runs(1)[0]["run_id"])
    assert Run.load(newest).status == "killed"


def _until_held(lab: Lab) -> None:
    give_up = time.monotonic() + 30
    while not lab.state()["holder"]:
        assert time.monotonic() < give_up, "the shell never got the ranks"
        time.sleep(0.05)


def test_a_killed_rank_fails_its_requests_and_the_run_says_so(lab: Lab):
    """Last: the ranks are started anew."""
    killer = threading.Timer(1.5, lab.client.fault, (1, "kill"))
    killer.start()
    run = lab.run("tp2", "chat", rate=6, seconds=3, warmup_s=0)
    counts = run.summary["requests"]
    assert counts["failed"] > 0 and counts["scheduled"] == counts["completed"] + counts["failed"]
    failures = next(verdict for verdict in run.quality if verdict["code"] == "failures")
    assert "rank 1" in failures["sentence"].lower()
    lab.wait_ready()
    assert lab.run("tp2", "chat", rate=5, seconds=1, length_scale=0.3).summary["requests"]["failed"] == 0


def test_a_profile_is_a_run_of_its_own_whose_latencies_are_refused(lab: Lab, runs: dict[str, Run], tmp_path: Path):
    found = lab.profile("tp2", "chat", rate=5, seconds=20, steps=6, skip=2, ranks=(0, 1))
    assert set(found.ranks) == {0, 1} and found.run.summary["profiled"]["ranks"] == [0, 1]
    for each in found.ranks.values():
        assert each.num_steps == 6 and sum(each.parts.values()) == pytest.approx(each.span_ms)
        assert each.parts["exposed"] > 0 and each.classes["matrix product"] > 0 and each.num_collectives > 0
    assert any(verdict["code"] == "profiled" for verdict in found.run.quality)
    with pytest.raises(ValueError, match="was profiled, and its latencies"):
        difference([runs["tp2"]], [found.run], "ttft_ms", 50)
    with pytest.raises(ValueError, match="was profiled, and its latencies"):
        found.run.plot()
    events = validate(json.loads(found.save_trace(tmp_path / "trace.json").read_text()))
    assert_on_one_clock(events, (0, 1), "aten::rms_norm")
    with open_store() as store:
        (exported,) = export_run(store, found.run.run_id, "trace", tmp_path)
    assert json.loads(exported.read_text())["traceEvents"] == events, "what is exported is both, too"
    kinds = {event["cat"] for event in events if "cat" in event}
    assert kinds >= {"cpu_op", "collective,tp"} and any(kind.startswith("step,") for kind in kinds)
    with pytest.raises(ServerError, match="does not hold the ranks"):
        lab.client.profile("nobody")


def test_telemetry_lies_beside_the_run(lab: Lab, runs: dict[str, Run]):
    rows = runs["tp2"].telemetry
    assert lab.state()["telemetry"] in ("nvml", "psutil")
    assert lab.state()["telemetry"] in set(rows["source"])
    span_s = (rows["t_ns"].max() - rows["t_ns"].min()) / 1e9
    assert span_s > 2 and len(rows[rows["kind"] == "host"]) > 2 * span_s
    if lab.state()["telemetry"] == "psutil":
        assert set(rows[rows["kind"] == "rank"]["index"]) == {0, 1} and rows["cpu_cores"].max() > 0
