"""Which pool served which prompts, from records made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from labkit.teach.long_pool import pool_table, threshold
from tests.measure.make import request, server_times


def served(index: int, prompt: int, replica: int, first_ms: float) -> Any:
    record = request(0, (first_ms, first_ms + 1), index=index, prompt_tokens=prompt)
    record.server = server_times(record, {}, replica=replica)
    return record


def test_each_pool_has_its_prompts_and_their_median() -> None:
    records = [served(0, 32, 0, 10), served(1, 64, 1, 30), served(2, 512, 2, 90), served(3, 512, 2, 110)]
    records.append(request(0, (), index=4, status="failed"))
    summary = {"layout": "any:dp2,long:pcp2", "settings": {"long_prompt_tokens": 500}}
    table = pool_table(SimpleNamespace(records=records, summary=summary))  # type: ignore[arg-type]
    assert table.rows == [["any", "DP2", "32, 64", "2", "20 ms"], ["long", "PCP2", "512", "2", "100 ms"]]
    assert "500 tokens" in table.title


def test_the_threshold_is_the_crossover_where_there_is_one() -> None:
    assert threshold(258.4, (32, 512)) == 258
    assert threshold("not found in this range", (32, 512)) == 512
