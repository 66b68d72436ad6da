"""What a reader said is kept, and said to have been said after the answer where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.teach.predictions import Book
from labkit.teach.sidebyside import Row, in_order, is_beyond, side_by_side, verdict


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "predictions.json")


def test_a_prediction_outlives_its_kernel(book: Book):
    book.predict("00", "tpot", "How many ms?", 12, "ms")
    again = Book(book.path)
    assert str(again.predict("00", "tpot", "How many ms?", None, "ms")) == "12 ms"
    assert again.predict("00", "other", "And?").value is None


def test_a_question_that_was_answered_before_is_still_asked(book: Book):
    side_by_side(book, "00", "t", [Row("TPOT", 10.0, "ms", key="tpot")])
    asked = Book(book.path).predict("00", "tpot", "How many ms?", None, "ms")
    assert "How many ms?" in repr(asked) and asked.value is None
    late = Book(book.path).predict("00", "tpot", "How many ms?", 10, "ms")
    assert late.seen


def test_none_is_no_prediction_and_everything_goes_on(book: Book):
    assert "no prediction" in repr(book.predict("00", "tpot", "How many ms?"))
    table = side_by_side(book, "00", "t", [Row("TPOT", 9.0, "ms", key="tpot")])
    assert table.rows[0][1] == "no prediction" and table.rows[0][4] == ""
    assert "No predictions yet" in table.remarks[0]


def test_a_change_after_the_answer_is_marked_and_does_not_count(book: Book):
    book.predict("00", "tpot", "?", 30, "ms")
    side_by_side(book, "00", "t", [Row("TPOT", 10.0, "ms", key="tpot")])
    assert "1 made, 1 judged, 0 right" in book.score()
    changed = book.predict("00", "tpot", "?", 10, "ms")
    assert changed.seen and "after the answer" in str(changed)
    side_by_side(book, "00", "t", [Row("TPOT", 10.0, "ms", key="tpot")])
    assert "1 right" not in Book(book.path).score()


@pytest.mark.parametrize("value", [float("nan"), True, [], [1, 2], {}, ""])
def test_what_is_no_answer_is_refused_with_a_sentence(book: Book, value: object):
    with pytest.raises(ValueError, match="is not a prediction"):
        book.predict("00", "tpot", "?", value)


def test_an_unreadable_book_is_put_aside(book: Book):
    book.path.write_text("{ half of a")
    assert Book(book.path).get("00", "tpot") is None
    assert book.path.with_suffix(".unreadable").exists()


@pytest.mark.parametrize(
    ("guess", "found", "words"),
    [
        (11.0, 10.0, "right (within a quarter)"),
        (30.0, 10.0, "3.0× too high"),
        (5.0, 10.0, "2.0× too low"),
        (0.0, 10.0, "too low"),
        ("decode", "decode", "right"),
        ("prefill", "decode", "otherwise"),
        (["a", "b"], ["b", "a"], "otherwise"),
        (["a", "b", "c"], ["a", "b = c"], "right"),
        (["a", "c", "b"], ["a", "b = c"], "right"),
        (["b", "a", "c"], ["a", "b = c"], "otherwise"),
        (["a", "b"], ["a", "b = c"], "otherwise"),
        ("three", 3.0, "otherwise"),
    ],
)
def test_verdicts(book: Book, guess: object, found: object, words: str):
    prediction = book.predict("00", "k", "?", guess)
    assert verdict(prediction, Row("x", found)) == words  # type: ignore[arg-type]


def test_equal_values_are_one_place_in_an_order():
    assert in_order({"x": 3, "y": 1, "z": 3}) == ["y", "x = z"]


def test_too_few_samples_judge_nobody(book: Book):
    prediction = book.predict("00", "k", "?", 1.0)
    row = Row("p99", 5.0, "ms", key="k", n=20, needs=1000)
    assert verdict(prediction, row) == "cannot tell yet: n = 20, it takes 1000"
    side_by_side(book, "00", "t", [row])
    assert "1 made, 0 judged" in book.score()


@pytest.mark.parametrize(
    ("side", "measured", "beyond"),
    [("at least", 9.0, True), ("at least", 9.95, False), ("at most", 10.5, True), ("at most", 3.0, False)]
    + [("exactly", 10.0, False), ("exactly", 11.0, True)],
)
def test_a_broken_bound_is_told(side: str, measured: float, beyond: bool):
    row = Row("x", measured, bound=10.0, side=side)
    assert is_beyond(row) is beyond and ("beyond its bound" in verdict(None, row)) is beyond
