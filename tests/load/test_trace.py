"""Traces: three formats, their windows and stretches, and prefix blocks that stay equal where they were."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.load.trace import read_trace, trace_schedule
from labkit.paths import repo_dir

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.5000000,374,44
2023-11-17 00:00:01.2500000,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,x
9,GPT-4,50,0,50,x
7,GPT-4,30,5,35,x
"""
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 9]}\n'
)
TRACES = repo_dir().parent / "shared" / "data" / "traces"


def write(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def facts(rows):
    return [(row.at_s, row.prompt_tokens, row.output_tokens) for row in rows]


def test_azure_rows_across_midnight(tmp_path):
    assert facts(read_trace(write(tmp_path, AZURE))) == [(0.0, 374, 44), (pytest.approx(1.75), 396, 109)]


def test_burstgpt_rows_are_sorted_and_failed_ones_left_out(tmp_path):
    assert facts(read_trace(write(tmp_path, BURST))) == [(0.0, 472, 18), (2.0, 30, 5)]


def test_mooncake_blocks_that_were_equal_stay_equal(tmp_path):
    path = write(tmp_path, MOONCAKE, "m.jsonl")
    one, two = trace_schedule(path).requests
    assert (one.at_s, two.at_s, len(one.prompt_ids), len(two.prompt_ids)) == (0.0, 2.0, 1300, 1536)
    assert np.array_equal(one.prompt_ids[:1024], two.prompt_ids[:1024])
    assert not np.array_equal(one.prompt_ids[1024:1100], two.prompt_ids[1024:1100])
    assert one.block_ids == (0, 1, 2)


def test_scaled_mooncake_prompts_share_the_scaled_blocks(tmp_path):
    one, two = trace_schedule(write(tmp_path, MOONCAKE, "m.jsonl"), length_scale=0.125).requests
    assert len(two.prompt_ids) == 192
    assert np.array_equal(one.prompt_ids[:128], two.prompt_ids[:128])
    assert not np.array_equal(one.prompt_ids[128:144], two.prompt_ids[128:144])


def test_another_run_does_not_find_the_blocks_of_the_last(tmp_path):
    path = write(tmp_path, MOONCAKE, "m.jsonl")
    one, other = (trace_schedule(path, run_id=run).requests[0] for run in ("a", "b"))
    assert not np.array_equal(one.prompt_ids[:64], other.prompt_ids[:64])


def test_time_is_scaled_or_stretched_to_a_rate(tmp_path):
    path = write(tmp_path, MOONCAKE, "m.jsonl")
    assert trace_schedule(path, time_scale=4).requests[-1].at_s == pytest.approx(0.5)
    slow = trace_schedule(path, rate=0.25)
    assert slow.rate == pytest.approx(0.25) and slow.requests[-1].at_s == pytest.approx(8.0)


def test_long_requests_are_cut_to_the_context(tmp_path):
    schedule = trace_schedule(write(tmp_path, MOONCAKE, "m.jsonl"), max_context=600)
    assert all(len(r.prompt_ids) + r.max_tokens <= 600 for r in schedule.requests) and schedule.num_cut == 2


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("a,b\n1,2\n", "t.csv", "no known trace"),
        (AZURE.split("\n")[0] + "\n", "t.csv", "no request"),
        ('{"timestamp": 1}\n', "t.jsonl", "line 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, text, name, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_trace(write(tmp_path, text, name))


def test_an_empty_window_says_where_the_trace_ends(tmp_path):
    with pytest.raises(ValueError, match="ends at 2 s"):
        trace_schedule(write(tmp_path, MOONCAKE, "m.jsonl"), start_s=100)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces do not lie in ../shared/data/traces")
@pytest.mark.parametrize(
    ("name", "num_rows", "hours"),
    [
        ("azure_llm_2023_conv.csv", 19_366, 1.0),
        ("azure_llm_2023_code.csv", 8_819, 1.0),
        ("mooncake_conversation.jsonl", 12_031, 1.0),
    ],
)
def test_the_public_traces_are_read_whole_and_replayed_at_a_rate(name, num_rows, hours):
    rows = read_trace(TRACES / name)
    assert len(rows) == num_rows and rows[-1].at_s / 3600 == pytest.approx(hours, abs=0.1)
    schedule = trace_schedule(TRACES / name, start_s=600, seconds=60, rate=5, length_scale=0.05, max_context=2048)
    num_inside = sum(600 <= row.at_s < 660 for row in rows)
    assert len(schedule.requests) == num_inside and schedule.rate == pytest.approx(5)
    assert 0 <= schedule.requests[-1].at_s <= schedule.seconds
