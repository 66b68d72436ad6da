"""The decision flow as questions with answers: one GPU first, then each axis by the job that it would have.

A question is answered from the table of all layouts, so its figures are the ones by which the layout was chosen. Once
every wish is met the walk is over: what comes after is not asked, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labkit.layout import Layout
from labkit.plan.reasons import num_gpus
from labkit.plan.walk_path import NOT_ASKED, WALKED, YES, Path, Question
from labkit.plan.walk_questions import (
    PREFILL_APART,
    QUESTIONS,
    SETTINGS,
    axis_question,
    job,
    limit_question,
    one_gpu,
    prefill_apart,
    settings_question,
    smallest_question,
)
from labkit.said import say


def walk(path: Path) -> list[Question]:
    """The questions in order; after the one that settles it, the rest are not asked."""
    found = [one_gpu(path), *_held(path), limit_question(path)]
    settled = path.base.does and path.takes(path.base)
    asks: list[tuple[str, str, Callable[[Path], Question]]] = [
        ("settings", SETTINGS, settings_question),
        *((axis, QUESTIONS[axis], axis_question(axis)) for axis in WALKED),
        ("pd", PREFILL_APART, prefill_apart),
    ]
    still = {axis for axis in path.axes if _more_than_base(path, axis)}
    for code, question, answer in asks:
        if settled:
            found.append(Question(code, question, NOT_ASKED, say("Every wish is met before."), layout=path.stands))
            continue
        if code in WALKED and code in path.axes and not _more_than_base(path, code):
            continue  # stands in the base already, and was asked there
        found.append(answer(path))
        still.discard(code)
        settled = found[-1].answer == YES and _done(path, code, still)
    return [*found, smallest_question(path)]


def _more_than_base(path: Path, axis: str) -> bool:
    base, chosen = path.base.layout, path.chosen.layout if path.chosen else None
    if not isinstance(base, Layout) or not isinstance(chosen, Layout):
        return False
    return int(getattr(chosen, axis)) > int(getattr(base, axis))


def _held(path: Path) -> Iterator[Question]:
    """What serves now, or the axes that it takes to hold the model."""
    base = path.base.layout
    assert isinstance(base, Layout)
    if path.given:
        told = say("{layout}, on {gpus}.", layout=base, gpus=num_gpus(base.world_size))
        yield Question("now", say("What serves now?"), YES, told, {}, base.slug)
        return
    for axis in WALKED:
        if getattr(base, axis) > 1:
            sentence, figures = job(path, path.base, axis)
            told = say("{axis} {degree} to hold it: {job}", axis=axis.upper(), degree=getattr(base, axis), job=sentence)
            yield Question(f"fit-{axis}", QUESTIONS[axis], YES, told, figures, base.slug)


def _done(path: Path, code: str, still: set[str]) -> bool:
    if path.chosen is None:
        return False
    if code == "settings":
        return path.chosen.layout == path.base.layout
    return not still and isinstance(path.chosen.layout, Layout)
