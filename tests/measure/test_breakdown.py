"""The parts of TTFT and of a rank's time, against sums done by hand."""

from __future__ import annotations

import pytest

from labkit.measure.breakdown import (
    TTFT_PARTS,
    phase_of,
    step_share,
    summarize_ttft,
    ttft_parts_ms,
    unaccounted_share,
)
from labkit.measure.metrics import Window
from tests.measure.make import MS, request, server_times, step

PARTS = {"network": 2, "queue": 10, "compute": 30, "wait": 4, "transfer": 3, "delivery": 1}


def test_parts_come_from_their_own_instants_and_the_rest_is_shown():
    record = request(0, (51.5, 60), late_ms=1)
    record.server = server_times(record, PARTS)
    parts = dict(zip(TTFT_PARTS, ttft_parts_ms(record), strict=True))
    assert parts == pytest.approx(
        {
            "lateness": 1,
            "network": 2,
            "queue": 10,
            "prefill_compute": 30,
            "wait": 4,
            "transfer": 3,
            "handoff": 0,
            "delivery": 1,
        }
        | {"unaccounted": 0.5}
    )


def test_a_handoff_is_part_of_ttft_where_the_first_token_waits_for_it():
    record = request(0, (51.5, 60), late_ms=1)
    record.server = server_times(record, PARTS)
    record.server.handoff_queue_ns, record.server.handoff_ns = 100_000, 300_000
    before = dict(zip(TTFT_PARTS, ttft_parts_ms(record), strict=True))
    assert before["handoff"] == 0, "its first token went out at once: what came later is no part of TTFT"
    record.server.released_ns = record.server.first_end_ns + 400_000
    after = dict(zip(TTFT_PARTS, ttft_parts_ms(record), strict=True))
    assert after["handoff"] == pytest.approx(0.3) and after["queue"] == pytest.approx(before["queue"] + 0.1)
    assert after["delivery"] == pytest.approx(before["delivery"] - 0.4)
    assert sum(after.values()) == pytest.approx(sum(before.values()))


def test_means_add_up_to_the_mean_ttft_and_errors_do_not_cancel():
    records = [request(0, (51.5,), index=0, late_ms=1), request(0, (50.5,), index=1, late_ms=1)]
    for record in records:
        record.server = server_times(record, PARTS)
    summary = summarize_ttft(records)
    assert sum(summary["ttft_parts_ms"].values()) == pytest.approx(51)
    assert summary["ttft_parts_ms"]["unaccounted"] == pytest.approx(0)
    assert summary["ttft_parts"]["unaccounted_share"] == pytest.approx(1 / 102)
    assert summary["ttft_parts"]["n"] == 2


def test_a_server_on_another_clock_or_a_silent_one_is_not_split():
    foreign, silent = request(0, (50,)), request(0, (50,))
    foreign.server = server_times(foreign, PARTS, received_ns=10**15)
    assert ttft_parts_ms(foreign) is None and ttft_parts_ms(silent) is None
    summary = summarize_ttft([foreign, silent])
    assert summary["ttft_parts"]["n"] == 0 and summary["ttft_parts_ms"]["queue"] is None


def test_shares_of_the_window_per_rank_and_over_ranks():
    steps = [
        step(0, 40, [20, 30], [15, 0], [5, 5], prefill=1, decode=0),
        step(50, 60, [4, 4], [1, 1], [3, 3], step_id=1),
        step(990, 1010, [9, 9], [0, 0], [1, 1], step_id=2),  # ends after the window
    ]
    share = step_share(steps, Window(0, 100 * MS))
    first = {"rank": 0, "compute": 0.24, "wait": 0.16, "transfer": 0.08, "idle": 0.52}
    assert share["by_rank"][0] == pytest.approx(first)
    assert share["compute"] == pytest.approx((24 + 34) / 200)
    assert sum(share[name] for name in ("compute", "wait", "transfer", "idle")) == pytest.approx(1)
    assert share["by_phase"]["prefill"]["compute"] == pytest.approx(50 / 80)
    assert share["by_phase"]["decode"]["transfer"] == pytest.approx(6 / 20)
    assert share["num_steps"] == 2 and "mixed" not in share["by_phase"]


def test_a_rank_that_did_nothing_is_idle_and_counts():
    share = step_share([step(0, 100, [100], [0], [0])], Window(0, 100 * MS), ranks=[0, 1])
    assert share["compute"] == 0.5 and share["by_rank"][1]["idle"] == 1.0


def test_no_steps_no_shares():
    share = step_share([], Window(0, 100 * MS))
    assert share["compute"] is None and share["by_rank"] == []


def test_a_step_with_chunks_and_decodes_is_neither_phase():
    assert phase_of(step(0, 1, [1], [0], [0], prefill=1, decode=3)) == "mixed"
    assert phase_of(step(0, 1, [1], [0], [0], prefill=1, decode=0)) == "prefill"
    assert phase_of(step(0, 1, [1], [0], [0])) == "decode"


def test_what_is_in_no_part_of_a_step_is_told_and_does_not_cancel():
    whole = step(0, 40, [20, 30], [15, 5], [5, 5])
    assert unaccounted_share([whole]) == 0 and step_share([whole], Window(0, 100 * MS))["unaccounted"] == 0
    lacks, doubles = step(0, 40, [19, 30], [15, 5], [5, 5]), step(0, 40, [20, 31], [15, 5], [5, 5], step_id=1)
    assert unaccounted_share([lacks]) == pytest.approx(1 / 80)
    assert unaccounted_share([lacks, doubles]) == pytest.approx(2 / 160)
    waited = step(0, 40, [20, 20], [15, 5], [5, 5])
    waited.idle_ns = [0, 10 * MS]
    assert unaccounted_share([waited]) == 0 and unaccounted_share([]) is None
