"""Rows shared out over four real ranks: ragged, in chunks, with a prefix found and sequences preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_parity_real import FourRanks, assert_as_transformers
from tiny_models import make_checkpoint

from labkit.layout import Layout

pytestmark = pytest.mark.engine


def test_shared_rows_give_what_transformers_gives(tmp_path: Path) -> None:
    folder, ranks = make_checkpoint(tmp_path, "llama-tied-llama3-rope"), FourRanks(tmp_path / "pool")
    try:
        for slug in ("tp4+sp", "pp2xtp2+sp"):
            answered = ranks.serve(folder, Layout.parse(slug))
            for request, outputs in answered:
                assert_as_transformers(folder, request, outputs)
            told = [event for event in ranks.events if event["event"] == "request"]
            assert sum(event["cached_tokens"] for event in told) > 0, "no prefix was found in the cache"
            assert sum(request.num_preemptions for request, _ in answered) > 0, "nothing was preempted"
    finally:
        ranks.close()
