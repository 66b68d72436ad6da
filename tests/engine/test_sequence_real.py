"""Rows shared out over four real ranks: ragged, in chunks, with a prefix found and sequences preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hard_batch import assert_as_transformers, assert_hard, serve
from real_ranks import RealRanks
from tiny_models import make_checkpoint

from labkit.layout import Layout

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_shared_rows_give_what_transformers_gives(four: RealRanks, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama-tied-llama3-rope")
    for slug in ("tp4+sp", "pp2xtp2+sp"):
        layout = Layout.parse(slug)
        answers = serve(four, folder, layout)
        assert_as_transformers(folder, answers)
        assert_hard(four, layout, answers)
