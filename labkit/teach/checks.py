"""Exercises that check themselves: a function of the reader's is held against cases, each with its reason.

A check never raises for what the reader wrote; it says which case came out otherwise, and what that case is about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.teach.html import Table


@dataclass(frozen=True)
class Problem:
    """One call, what it should return, and what the case is there for."""

    args: tuple[Any, ...]
    expected: Any
    why: str
    shown: str = ""
    """The call in words, where the arguments are too long to show."""


@dataclass(frozen=True)
class Outcome:
    problem: Problem
    ok: bool
    got: str


class Check:
    """True when every case came out as it should."""

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.name, self.outcomes = name, list(outcomes)

    def __bool__(self) -> bool:
        return all(outcome.ok for outcome in self.outcomes)

    def _table(self) -> Table:
        rows = [
            [
                "✓" if outcome.ok else "✕",
                outcome.problem.why,
                outcome.problem.shown or ", ".join(map(_short, outcome.problem.args)),
                _short(outcome.problem.expected),
                outcome.got,
            ]
            for outcome in self.outcomes
        ]
        done = sum(outcome.ok for outcome in self.outcomes)
        state = "passed" if self else "not there yet"
        title = f"{self.name}: {done} of {len(rows)} cases, {state}"
        return Table(title, ["", "case", "given", "expected", "yours"], rows)

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()

    def __repr__(self) -> str:
        return repr(self._table())


def show_check(function: Callable[..., Any], problems: Sequence[Problem]) -> Check:
    """Run `function` on every case."""
    return Check(getattr(function, "__name__", "exercise"), [_try(function, case) for case in problems])


def _try(function: Callable[..., Any], problem: Problem) -> Outcome:
    try:
        got = function(*problem.args)
    except NotImplementedError:
        return Outcome(problem, False, "not written yet")
    except Exception as error:
        return Outcome(problem, False, f"{type(error).__name__}: {error}")
    return Outcome(problem, is_same(got, problem.expected), _short(got))


def is_same(got: Any, expected: Any) -> bool:
    """Equal; numbers and arrays within 1e-6 of each other, relative."""
    if expected is None or isinstance(expected, str | bool | range):
        return type(got) is type(expected) and got == expected
    if isinstance(expected, tuple | list):
        alike = isinstance(got, tuple | list) and len(got) == len(expected)
        return alike and all(map(is_same, got, expected))
    try:
        return np.shape(got) == np.shape(expected) and bool(np.allclose(got, expected, rtol=1e-5, atol=1e-6))
    except (TypeError, ValueError):
        return False


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.size <= 9:
        value = value.tolist()
    if isinstance(value, np.ndarray):
        return f"array of shape {value.shape}"
    if isinstance(value, list | tuple) and value and isinstance(value[0], np.ndarray):
        return f"{len(value)} arrays of shape {value[0].shape}"
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
