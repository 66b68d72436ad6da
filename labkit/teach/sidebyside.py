"""Prediction, bound and measurement in one row, with what may be said about them, and no more.

A number is right within a quarter of the measurement; an order or a word is right when it is the same. A
measurement beyond its bound is a fault of the measurement or of the bound, and the row says so. Where there are
too few samples, the row says that nothing can be told yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labkit.teach.html import Table
from labkit.teach.predictions import Book, Prediction, Value

CLOSE = 0.25
TIE = " = "
_SIGNS = {"at least": "≥", "at most": "≤", "exactly": "="}


@dataclass(frozen=True)
class Row:
    """One quantity. `n` and `needs`: samples, and how many a verdict needs (0: it is a count, or exact)."""

    name: str
    measured: Value | None
    unit: str = ""
    bound: float | None = None
    side: str = "at least"
    """What the bound says of the measurement: at least, at most or exactly."""
    key: str = ""
    """Of the prediction; empty: nothing was asked."""
    n: int | None = None
    needs: int = 0

    @property
    def is_sure(self) -> bool:
        return self.measured is not None and (self.n is None or self.n >= self.needs)


def side_by_side(book: Book, lesson: str, title: str, rows: Sequence[Row]) -> Table:
    """The table; each row's answer is noted in the book."""
    lines = []
    for row in rows:
        prediction = book.get(lesson, row.key) if row.key else None
        hit = is_hit(prediction, row)
        if row.key and row.measured is not None:
            book.answer(lesson, row.key, hit)
        guess = str(prediction) if prediction else "no prediction" if row.key else "–"
        lines.append([row.name, guess, _bound(row), _measured(row), verdict(prediction, row)])
    return Table(title, ["", "predicted by you", "bound", "measured", ""], lines, [book.score()])


def is_hit(prediction: Prediction | None, row: Row) -> bool | None:
    if prediction is None or not row.is_sure:
        return None
    guess, found = prediction.value, row.measured
    if isinstance(found, int | float) and isinstance(guess, int | float):
        return abs(guess - found) <= CLOSE * abs(found)
    return found is not None and _agrees(guess, found)


def _agrees(guess: Value | None, found: Value) -> bool:
    """A word is the same word; an order has the same things, none before one that was found before it."""
    if not isinstance(guess, list) or not isinstance(found, list):
        return guess == found
    places = {name: place for place, tied in enumerate(found) for name in tied.split(TIE)}
    if sorted(guess) != sorted(places):
        return False
    return all(places[a] <= places[b] for a, b in zip(guess, guess[1:], strict=False))


def in_order(values: Mapping[str, float]) -> list[str]:
    """Names from the smallest value to the largest; equal ones together, as `a = b`."""
    levels = sorted(set(values.values()))
    return [TIE.join(name for name, value in values.items() if value == level) for level in levels]


def verdict(prediction: Prediction | None, row: Row) -> str:
    words = []
    if row.measured is None:
        return "not measured"
    if not row.is_sure:
        words.append(f"cannot tell yet: n = {row.n}, it takes {row.needs}")
    elif prediction is not None:
        words.append(_compare(prediction.value, row.measured))
    if is_beyond(row):
        words.append("beyond its bound: look for what the bound left out, or what the run did wrong")
    return "; ".join(words)


def _compare(guess: Value | None, found: Value) -> str:
    if not isinstance(found, int | float) or not isinstance(guess, int | float):
        return "right" if _agrees(guess, found) else "otherwise"
    if abs(guess - found) <= CLOSE * abs(found):
        return "right (within a quarter)"
    if guess * found <= 0:
        return "too high" if guess > found else "too low"
    ratio = guess / found
    return f"{ratio:.1f}× too high" if ratio > 1 else f"{1 / ratio:.1f}× too low"


def is_beyond(row: Row) -> bool:
    """By more than a hundredth, which rounding and clocks explain."""
    if row.bound is None or not isinstance(row.measured, int | float):
        return False
    slack = 0.01 * abs(row.bound)
    below, above = row.measured < row.bound - slack, row.measured > row.bound + slack
    return {"at least": below, "at most": above, "exactly": below or above}[row.side]


def _bound(row: Row) -> str:
    return f"{_SIGNS[row.side]} {_number(row.bound)} {row.unit}".strip() if row.bound is not None else "–"


def _measured(row: Row) -> str:
    if row.measured is None:
        return "–"
    if isinstance(row.measured, list):
        text = " < ".join(row.measured)
    elif isinstance(row.measured, str):
        text = row.measured
    else:
        text = f"{_number(row.measured)} {row.unit}".strip()
    return text + (f" (n = {row.n})" if row.n is not None else "")


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        text = f"{int(value):,}"
    else:
        text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return text.replace("-", "−")
