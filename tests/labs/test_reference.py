"""The reference case's arithmetic: one rank is too little, two are enough, and the numbers are the layout's."""

from __future__ import annotations

import pytest

from labkit.teach import lesson00, lesson01, lesson02
from labkit.teach.lesson import refusal
from labkit.teach.reference import MIB, ReferenceCase


def test_the_model_needs_two_ranks():
    case = ReferenceCase()
    assert case.weights_bytes("tp1") > case.budget_bytes and case.weights_bytes("dp4") > case.budget_bytes
    room = case.budget_bytes - case.weights_bytes("tp2")
    assert room // case.kv_bytes_per_token("tp2") > 2 * 1500  # two of the longest prompts, at least
    table = repr(case.arithmetic("tp1", "tp2"))
    assert "112.0 MiB" in table and "does not fit" in table and "5,115 tokens" in table


def test_it_needs_two_in_half_precision_too():
    case = ReferenceCase(dtype="bfloat16")
    assert case.weights_bytes("tp1") > case.budget_bytes > case.weights_bytes("tp2")


def test_the_four_resources_are_those_of_the_layout():
    table = lesson00.resources(ReferenceCase(), "tp2", 512, 256, 1)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["parameter memory of a rank"] == ["56.0 MiB", "56.0 MiB"]
    prefill, decode = (float(value) for value in rows["operations per byte read"])
    assert prefill > 100 > 1 > decode


def test_what_halves_and_what_does_not():
    rows = {row[0]: row[1:] for row in lesson02.what_halves(ReferenceCase()).rows}
    assert rows["mlp"] == ["72 MiB", "36 MiB", "18 MiB", "9 MiB", "÷ 8"]
    assert rows["norm"][-1] == "stays whole"
    assert rows["KV of a token"][-1] == "÷ 4, not ÷ 8"


def test_the_table_of_degrees_gives_the_division():
    rows = {row[0]: row for row in lesson02.legality_table("lab-30m").rows}
    assert [name for name, row in rows.items() if row[1] == "legal"] == ["TP1", "TP2", "TP4", "TP8"]
    assert "8 query heads ÷ tp 3" in rows["TP3"][2]


def test_a_cache_saves_at_most_all_but_the_first_of_each_prefix():
    best = lesson01.best_cached_tokens("shared-prefix", 24)
    assert best % 512 == 0 and 24 - 8 <= best // 512 < 24
    assert lesson01.best_cached_tokens("chat", 24) == 0


def test_a_refusal_that_does_not_come_is_an_error():
    with pytest.raises(AssertionError):
        refusal(lambda: None)
    assert "no" in refusal(int, "no").sentence
    assert MIB == 1 << 20
