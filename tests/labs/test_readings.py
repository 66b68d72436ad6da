"""What lessons read off a run, on rows whose answer can be seen at a glance."""

from __future__ import annotations

import pytest

from labkit.lab.run import Run
from labkit.measure.records import RequestRecord, StepRecord
from labkit.teach import lesson00, lesson01, lesson02
from labkit.teach.machine import Roofs
from labkit.teach.reference import MIB, ReferenceCase, is_quick

MS = 1_000_000


def step(replica: int, start_ms: int, end_ms: int, prefill_tokens: int = 0) -> StepRecord:
    return StepRecord(
        run_id="r", epoch=1, step_id=start_ms, replica=replica, layout="dp2", start_ns=start_ms * MS,
        end_ns=end_ms * MS, num_prefill_seqs=int(prefill_tokens > 0), num_decode_seqs=int(not prefill_tokens),
        prefill_tokens=prefill_tokens, context_tokens=0 if prefill_tokens else 200, ranks=[replica],
        rank_start_ns=[0], rank_end_ns=[0], compute_ns=[0], wait_ns=[0], transfer_ns=[0], collective_bytes=0,
        num_collectives=0,
    )  # fmt: skip


def request(index: int, at_ms: int, first_ms: int, last_ms: int, prompt: int = 10, n: int = 5) -> RequestRecord:
    return RequestRecord(
        request_id=f"r-{index}", index=index, status="completed", scheduled_ns=at_ms * MS, sent_ns=at_ms * MS,
        first_ns=first_ms * MS, last_ns=last_ms * MS, prompt_tokens=prompt, n=n,
    )  # fmt: skip


def run(records: list[RequestRecord], steps: list[StepRecord] | None = None, **summary: object) -> Run:
    window = {"start_ns": 0, "end_ns": 10**12}
    return Run("r", {"layout": "tp1", "window": window, **summary}, records, steps or [])


def test_overlap_is_the_time_in_which_both_work():
    rows = [request(0, 0, 10, 100)]
    assert lesson01.overlap(run(rows, [step(0, 0, 40), step(1, 20, 60), step(0, 50, 100)])) == pytest.approx(0.3)
    assert lesson01.overlap(run(rows, [step(0, 0, 40), step(1, 40, 60)])) == 0
    assert lesson01.overlap(run(rows, [step(0, 0, 40)])) == 0


def test_completed_per_s_counts_until_the_last_token():
    assert lesson00.completed_per_s(run([request(0, 0, 10, 500), request(1, 100, 150, 2000)])) == pytest.approx(1.0)


def test_prefill_is_timed_over_pure_prefill_steps():
    steps = [step(0, 0, 30, 100), step(0, 30, 40), step(0, 40, 60, 100)]
    assert lesson00.prefill_ms_per_token(run([], steps)) == pytest.approx(50 / 200)


def test_bounds_follow_the_bytes_and_the_operations():
    case, roofs = ReferenceCase(), Roofs(read_gb_s=10.0, gflop_s=100.0)
    found = lesson00.bounds_ms(case, "tp2", roofs, run([], [step(0, 0, 30, 512), step(0, 30, 40)]))
    read = case.weights_bytes("tp1") + 200 * case.kv_bytes_per_token("tp1")
    assert found["decode"] == pytest.approx(read / 10e6, rel=0.01)  # both ranks read all of it, once
    assert found["prefill"] == pytest.approx(2 * 29.4e6 / 100e6, rel=0.2)
    assert lesson02.decode_bound_ms(case, "tp4", roofs) == pytest.approx(
        lesson02.decode_bound_ms(case, "tp1", roofs), rel=0.01
    )


def test_the_mean_is_told_with_who_was_faster():
    rows = [request(i, 0, 10, 20) for i in range(9)] + [request(9, 0, 1000, 1010)]
    ladder = {"p50": 10.0, "p99": 910.9, "mean": 109.0, "few": ["p99"]}
    (row,) = lesson00.where_the_mean_lies({"x": run(rows, ttft_ms=ladder)}).rows
    assert row == ["x", "10 ms", "109 ms", "911 ms (too few samples)", "90% of 10"]


@pytest.mark.parametrize(("num", "room", "least"), [(8, 1000, 0), (4, 400, 0), (8, 400, 4), (3, 90, 1)])
def test_the_least_number_of_preemptions(num: int, room: int, least: int):
    """Prompts of 40, answers of 51: 90 tokens each before the first is complete."""
    rows = [request(i, 0, 10, 20, prompt=40, n=51) for i in range(num)]
    assert lesson01.least_preemptions(run(rows, concurrency=num), room) == least


def test_a_tight_budget_holds_the_weights_and_so_many_tokens():
    case = ReferenceCase()
    measured = run([], memory_bytes=[{"rank": 0, "weights": 64 * MIB}])
    measured.summary["layout"] = "tp2"
    assert lesson01.budget_for(case, measured, 750) == 64 * MIB + (750 + 16) * 8192


def test_roofs_are_measured_and_bound_what_they_say():
    roofs = Roofs.measured(1)
    assert roofs.read_gb_s > 0.1 and roofs.gflop_s > 0.1
    assert roofs.read_ms(roofs.read_gb_s * 1e9) == pytest.approx(1000)
    assert roofs.compute_ms(roofs.gflop_s * 1e9) == pytest.approx(1000)
    assert "GB/s" in repr(roofs) and "<table>" in roofs._repr_html_()


@pytest.mark.parametrize(("value", "quick"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_quick_is_a_setting(monkeypatch: pytest.MonkeyPatch, value: str | None, quick: bool):
    monkeypatch.delenv("LABKIT_QUICK", raising=False)
    if value is not None:
        monkeypatch.setenv("LABKIT_QUICK", value)
    assert is_quick() is quick


def test_roofs_are_taken_from_the_measured_device() -> None:
    found = {"copy_gb_s": {"alone": 10.0, "together": 12.0}, "gflop_s": {"float32": {"alone": 50.0, "together": None}}}
    assert Roofs.of(found) == Roofs(read_gb_s=10.0, gflop_s=50.0)
