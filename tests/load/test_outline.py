"""Lengths and instants without words: the same requests as the schedule that is sent."""

from __future__ import annotations

import json

import pytest

from labkit.load.schedule import make_schedule, outline
from labkit.load.trace import trace_outline, trace_schedule
from labkit.load.workload import load_workload


@pytest.mark.parametrize("name", ["chat", "mixed", "shared-prefix", "small-engines-256"])
@pytest.mark.parametrize("max_context", [None, 300])
def test_an_outline_is_the_schedule_without_its_words(name, max_context):
    workload = load_workload(name)
    rate = None if name == "small-engines-256" else 7.0
    schedule = make_schedule(workload, rate=rate, num_requests=100, seed=5, max_context=max_context)
    drawn = outline(workload, 100, rate, 5, max_context=max_context)
    assert [len(r.prompt_ids) for r in schedule.requests] == [o.prompt_tokens for o in drawn]
    assert [r.max_tokens for r in schedule.requests] == [o.output_tokens for o in drawn]
    assert [r.at_s for r in schedule.requests] == pytest.approx([o.at_s for o in drawn])
    assert [r.prefix_id for r in schedule.requests] == [o.block_ids[0] if o.block_ids else -1 for o in drawn]


def test_a_trace_outline_is_the_trace_schedule_without_its_words(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 1000 * i, "input_length": 700 + 300 * i, "output_length": 40, "hash_ids": list(range(i + 2))}
        for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    for options in ({}, {"rate": 3.0, "num_requests": 4}, {"length_scale": 0.1, "max_context": 120}):
        schedule, drawn = trace_schedule(path, **options), trace_outline(path, **options)
        assert [len(r.prompt_ids) for r in schedule.requests] == [o.prompt_tokens for o in drawn]
        assert [r.max_tokens for r in schedule.requests] == [o.output_tokens for o in drawn]
        assert [r.at_s for r in schedule.requests] == pytest.approx([o.at_s for o in drawn])
        assert [r.block_ids for r in schedule.requests] == [o.block_ids for o in drawn]
