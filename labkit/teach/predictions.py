"""What a reader expected before the run, kept in LABKIT_HOME beside the runs.

A prediction made after its answer was seen is kept too, and marked: it is no longer a prediction. No prediction is
a fine answer; everything goes on without one.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from labkit.paths import home_dir
from labkit.teach.html import box

Value = float | str | list[str]


class Prediction(msgspec.Struct):
    """`value` None: none was made. `seen`: the answer had been shown before this value was given."""

    lesson: str
    key: str
    question: str
    value: Value | None = None
    unit: str = ""
    made_at: str = ""
    seen: bool = False

    def __str__(self) -> str:
        if self.value is None:
            return "no prediction"
        text = " < ".join(self.value) if isinstance(self.value, list) else _plain(self.value)
        after = " (changed after the answer was seen)" if self.seen else ""
        return f"{text}{' ' + self.unit if self.unit else ''}{after}"

    def __repr__(self) -> str:
        return f"{self.question}\nYour prediction: {self}"

    def _repr_html_(self) -> str:
        return box(f"{self.question} Your prediction: {self}.", "Predict.")


def _plain(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, int | float) else value


class _Entry(msgspec.Struct):
    prediction: Prediction
    answered_at: str = ""
    hit: bool | None = None


class Book:
    """All predictions of this user, one file, replaced whole at each change."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or home_dir() / "predictions.json"
        self._entries: dict[str, _Entry] = self._read()

    def _read(self) -> dict[str, _Entry]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, _Entry])
        except FileNotFoundError:
            return {}
        except msgspec.DecodeError:  # a torn or foreign file must not stop a lesson
            os.replace(self.path, self.path.with_suffix(".unreadable"))
            return {}

    def _write(self) -> None:
        draft = self.path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(msgspec.to_builtins(self._entries), indent=1))
        os.replace(draft, self.path)

    def predict(self, lesson: str, key: str, question: str, value: Any = None, unit: str = "") -> Prediction:
        """Keep `value`; None keeps what was predicted earlier. Raises ValueError for what is no answer."""
        name = f"{lesson}/{key}"
        kept = self._entries.get(name)
        checked = check_value(value)
        if checked is None or (kept and kept.prediction.value == checked):
            said = kept.prediction if kept else Prediction(lesson, key, question)
            return msgspec.structs.replace(said, question=question, unit=unit)
        seen = bool(kept and kept.answered_at)
        prediction = Prediction(lesson, key, question, checked, unit, _now(), seen)
        self._entries[name] = _Entry(prediction, kept.answered_at if kept else "", kept.hit if kept else None)
        self._write()
        return prediction

    def get(self, lesson: str, key: str) -> Prediction | None:
        entry = self._entries.get(f"{lesson}/{key}")
        return entry.prediction if entry and entry.prediction.value is not None else None

    def answer(self, lesson: str, key: str, hit: bool | None) -> None:
        """The answer was shown; `hit`: whether the prediction was right, None where that cannot be told."""
        name = f"{lesson}/{key}"
        entry = self._entries.setdefault(name, _Entry(Prediction(lesson, key, "")))
        first = not entry.answered_at
        entry.answered_at = entry.answered_at or _now()
        if first or not entry.prediction.seen:
            entry.hit = hit if entry.prediction.value is not None else None
        self._write()

    def score(self) -> str:
        """Over the predictions that were made before their answer was seen."""
        made = [e for e in self._entries.values() if e.prediction.value is not None and not e.prediction.seen]
        judged = [entry for entry in made if entry.hit is not None]
        if not made:
            return "No predictions yet. A guess that turns out wrong is what one remembers."
        hits = sum(bool(entry.hit) for entry in judged)
        return f"Your predictions so far: {len(made)} made, {len(judged)} judged, {hits} right."


def check_value(value: Any) -> Value | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value):
        return list(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return float(value)
    raise ValueError(
        f"{value!r} is not a prediction: give a number, a word, a list of words in order, or None for none."
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
