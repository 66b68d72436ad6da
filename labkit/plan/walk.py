"""The decision flow as questions with answers: one GPU first, then each axis by the job that it would have.

A question is answered from the table of all layouts, so its figures are the ones by which the layout was chosen. Once
every wish is met the walk is over: what comes after is not asked, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.layout import Deployment, Layout
from labkit.plan.candidates import Candidate
from labkit.plan.case import Case
from labkit.plan.choose import lowered
from labkit.plan.limits import INTERFERENCE, Limit
from labkit.plan.objective import spoken_ms
from labkit.plan.rank_places import FAST, axis_reach
from labkit.plan.remedies import Remedy, settings_changed

YES, NO, NOT_ASKED = "yes", "no", "not asked"
WALKED = ("tp", "pp", "dp", "pcp", "dcp", "ep")


@dataclass(frozen=True)
class Question:
    code: str
    question: str
    answer: str
    """yes, no, or not asked (every wish was met before it)."""
    sentence: str
    figures: dict[str, Any] = field(default_factory=dict)
    layout: str = ""
    """Where the walk stands after it."""

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "question": self.question, "answer": self.answer, "sentence": self.sentence,
                "figures": self.figures, "layout": self.layout}  # fmt: skip


@dataclass(frozen=True)
class Path:
    """What the walk is told of: how the layout was found."""

    case: Case
    candidates: Sequence[Candidate]
    base: Candidate
    """Where it began: what serves now, or the smallest that holds the model."""
    limit: Limit
    """Of the base: what is addressed."""
    chosen: Candidate | None
    engine: tuple[Remedy, ...] = ()
    others: tuple[Remedy, ...] = ()
    pools: tuple[Candidate, ...] = ()
    measured: bool = False
    """The limit is of a run."""
    given: bool = False
    """The base is what serves now."""
    correction: str = ""
    """How a measurement that contradicts the prediction was taken into account."""

    def of(self, layout: Layout) -> Candidate | None:
        return next((one for one in self.candidates if one.layout == layout), None)

    @property
    def axes(self) -> tuple[str, ...]:
        """Of the chosen layout, those in use."""
        grid = self.chosen.layout if self.chosen else None
        if not isinstance(grid, Layout):
            return ()
        return tuple(axis for axis in WALKED if getattr(grid, axis) > 1)


def walk(path: Path) -> list[Question]:
    """The questions in order; after the one that settles it, the rest are not asked."""
    found = [_one_gpu(path), *_held(path), _limit(path)]
    settled = path.base.does and path.chosen is path.base
    asks: list[tuple[str, str, Callable[[Path], Question]]] = [
        ("settings", _SETTINGS, _settings),
        *((axis, _QUESTIONS[axis], _axis_question(axis)) for axis in WALKED),
        ("pd", _PD, _pd),
    ]
    still = {axis for axis in path.axes if _more_than_base(path, axis)}
    for code, question, answer in asks:
        if settled:
            found.append(Question(code, question, NOT_ASKED, "Every wish is met before.", layout=_stands(path)))
            continue
        if code in WALKED and code in path.axes and not _more_than_base(path, code):
            continue  # stands in the base already, and was asked there
        found.append(answer(path))
        still.discard(code)
        settled = found[-1].answer == YES and _done(path, code, still)
    return [*found, _smallest(path)]


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
        yield Question("now", "What serves now?", YES, f"{base}, on {base.world_size} GPU"
                       f"{'s' if base.world_size > 1 else ''}.", {}, base.slug)  # fmt: skip
        return
    for axis in WALKED:
        if getattr(base, axis) > 1:
            sentence, figures = job(path, path.base, axis)
            yield Question(f"fit-{axis}", _QUESTIONS[axis], YES, f"{axis.upper()} {getattr(base, axis)} to hold it: "
                           f"{sentence}", figures, base.slug)  # fmt: skip


def _done(path: Path, code: str, still: set[str]) -> bool:
    if path.chosen is None:
        return False
    if code == "settings":
        return path.chosen.layout == path.base.layout
    return not still and isinstance(path.chosen.layout, Layout)


def _stands(path: Path) -> str:
    return path.chosen.layout.slug if path.chosen else path.base.layout.slug


# ---- the questions

_ONE = "Does one replica fit one GPU, with KV for the requests in flight?"
_SETTINGS = "Would it do without any axis: engine limits, prefix cache, other input, admission, more servers?"
_PD = "Do prompts and answers get in each other's way, and is moving the KV worth it?"
_QUESTIONS = {
    "tp": "Must layers be cut (TP), to fit or to be fast enough, inside the fastest link?",
    "pp": "Must layers cross a slower boundary (PP), or be cut where TP cannot?",
    "dp": "Can the traffic use more replicas (DP)?",
    "pcp": "Does TTFT fail at long prompts, which more ranks could share out (PCP)?",
    "dcp": "Does KV limit while ranks keep copies of it (DCP)?",
    "ep": "Do the experts' weights ask to be shared out (EP)?",
}


def _one_gpu(path: Path) -> Question:
    one = path.of(Layout())
    assert one is not None
    in_flight = path.case.demand.concurrency or (one.prediction.concurrency if one.prediction else None)
    figures = {"most_requests": one.most_requests, "kv_tokens": one.memory.kv_tokens if one.memory else 0,
               "in_flight": in_flight}  # fmt: skip
    if not one.fits:
        return Question("one-gpu", _ONE, NO, one.reason, figures, path.base.layout.slug)
    if one.queues or one.fault == "overload":
        return Question("one-gpu", _ONE, NO, one.reason, figures, path.base.layout.slug)
    return Question("one-gpu", _ONE, YES, f"KV holds {one.most_requests} requests of "
                    f"{path.case.demand.tokens_each:,} tokens.", figures, path.base.layout.slug)  # fmt: skip


def _limit(path: Path) -> Question:
    how = "measured" if path.measured else "predicted"
    question = f"What is the limit of {path.base.layout} ({how})?"
    sentence = f"{path.limit.sentence} {path.correction}".strip()
    return Question("limit", question, YES if path.limit.cause != "met" else NO, sentence,
                    path.limit.to_dict() | {"how": how}, path.base.layout.slug)  # fmt: skip


def _settings(path: Path) -> Question:
    chosen = path.chosen
    done = next((remedy for remedy in path.engine if remedy.does and chosen and remedy.candidate is chosen), None)
    figures = {"engine": [remedy.to_dict() for remedy in path.engine],
               "others": [remedy.to_dict() for remedy in path.others]}  # fmt: skip
    elsewhere = "; ".join(remedy.sentence for remedy in path.others if remedy.does)
    more = f" Also: {elsewhere}." if elsewhere else ""
    if done is not None:
        return Question("settings", _SETTINGS, YES, f"{done.sentence} on {path.base.layout}.{more}", figures,
                        path.base.layout.slug)  # fmt: skip
    number = len(path.engine)
    tried = f"{number} setting{'s' if number > 1 else ''} of the engine tried on {path.base.layout}, not enough" \
        if number else f"No setting of the engine speaks to it on {path.base.layout}"  # fmt: skip
    return Question("settings", _SETTINGS, NO, f"{tried}.{more}", figures, path.base.layout.slug)


def _axis_question(axis: str) -> Callable[[Path], Question]:
    def ask(path: Path) -> Question:
        chosen = path.chosen
        if chosen is not None and isinstance(chosen.layout, Layout) and axis in path.axes:
            return _has_job(path, chosen, axis)
        return _no_job(path, axis)

    return ask


def _has_job(path: Path, chosen: Candidate, axis: str) -> Question:
    degree = getattr(chosen.grid, axis)
    sentence, figures = job(path, chosen, axis)
    if axis == "tp":
        inside = axis_reach(chosen.grid, path.case.hardware, "tp") == FAST
        figures["inside_fast_group"] = inside
        sentence += "" if inside else " Its collectives leave the fast group: no layout that keeps them in does it."
    stands = chosen.layout.slug
    return Question(axis, _QUESTIONS[axis], YES, f"{axis.upper()} {degree}: {sentence}", figures, stands)


def job(path: Path, chosen: Candidate, axis: str) -> tuple[str, dict[str, Any]]:
    """What would be missing without the axis, by the nearest layout with less of it."""
    less = lowered(path.candidates, chosen.grid, axis)
    if less is None:
        return "no legal layout has less of it.", {}
    q = path.case.objective.percentile
    figures: dict[str, Any] = {"without": less.layout.slug, "fault": less.fault}
    for metric in ("ttft", "tpot"):
        both = [one.figure(metric, q) for one in (less, chosen)]
        figures[f"{metric}_{q}_ms"] = [value if value < float("inf") else None for value in both]
    figures["most_requests"] = [less.most_requests, chosen.most_requests]
    if less.does and less.settings == chosen.settings:
        return f"{less.layout} would meet every wish by prediction; what was measured says it does not.", figures
    return f"without it, {less.reason or path.limit.sentence}", figures


def _no_job(path: Path, axis: str) -> Question:
    """Why not: not legal, no help, or more than is needed."""
    others = [one for one in path.candidates if _degree(one, axis) > 1]
    legal = [one for one in others if one.legal]
    stands, question = _stands(path), _QUESTIONS[axis]
    if not legal:
        why = next((one.reason for one in others if "÷" in one.reason or "expert" in one.reason), "")
        return Question(axis, question, NO, why or "No layout of these GPUs has it.", {}, stands)
    doing = [one for one in legal if one.does]
    figures = {"legal": len(legal), "doing": len(doing)}
    if doing and path.chosen is not None:
        first = min(doing, key=lambda one: one.num_gpus)
        return Question(axis, question, NO, f"{first.layout} would do too, on {first.num_gpus} GPUs; "
                        f"{path.chosen.layout} does it without.", figures, stands)  # fmt: skip
    best = _nearest(legal)
    return Question(axis, question, NO, f"Of {len(legal)} layouts with it none does; nearest: {best.reason}"
                    if best else f"None of {len(legal)} layouts with it holds the model.", figures, stands)  # fmt: skip


def _degree(candidate: Candidate, axis: str) -> int:
    return int(getattr(candidate.grid, axis))


def _nearest(candidates: Sequence[Candidate]) -> Candidate | None:
    """By the wish that is missed most; where nothing keeps up, by what it does."""
    tried = [one for one in candidates if one.outcomes]
    rank = {one.layout: (max(o.ratio for o in one.outcomes), -one.figure("server_tokens", "")) for one in tried}
    return min(tried, key=lambda one: rank[one.layout], default=None)


def _pd(path: Path) -> Question:
    stands = _stands(path)
    if path.chosen is not None and isinstance(path.chosen.layout, Deployment):
        return Question("pd", _PD, YES, f"{path.chosen.layout} on {path.chosen.num_gpus} GPUs: {path.limit.sentence}",
                        {"pools": len(path.pools)}, stands)  # fmt: skip
    if path.limit.cause != INTERFERENCE and not path.pools:
        return Question("pd", _PD, NO, "What is short is not that prompts and answers share steps.", {}, stands)
    doing = [one for one in path.pools if one.does]
    if doing:
        return Question("pd", _PD, NO, f"{doing[0].layout} would do on {doing[0].num_gpus} GPUs, which is no fewer.",
                        {"pools": len(path.pools)}, stands)  # fmt: skip
    return Question("pd", _PD, NO, f"None of {len(path.pools)} pairs of pools does it.", {"pools": len(path.pools)},
                    stands)  # fmt: skip


def _smallest(path: Path) -> Question:
    question = "Is that the smallest, and has every axis a job?"
    chosen = path.chosen
    if chosen is None:
        told = "No layout of these GPUs meets every wish."
        return Question("smallest", question, NO, told, {}, path.base.layout.slug)
    fewer = [one for one in path.candidates if one.num_gpus < chosen.num_gpus and one.legal]
    figures: dict[str, Any] = {"fewer_gpus": len(fewer)}
    if isinstance(chosen.layout, Layout):
        figures["jobs"] = {axis: job(path, chosen, axis)[0] for axis in path.axes}
    doing = [str(one.layout) for one in fewer if one.does]
    told = f"Of {len(fewer)} legal layouts on fewer GPUs none meets every wish"
    if doing:
        names = ", ".join(doing[:3])
        told = f"On fewer GPUs {names} would do, by another way to hold the model than {path.base.layout}"
        figures["fewer_doing"] = len(doing)
    ttft = chosen.figure("ttft", path.case.objective.percentile)
    tpot = chosen.figure("tpot", path.case.objective.percentile)
    changed = settings_changed(path.case.settings, chosen.settings)
    if changed:
        told += " (nor with other settings, as far as they were tried)"
    said = "".join(f", {name} {value}" for name, value in changed.items())
    met = f"with {path.case.objective.percentile} TTFT {spoken_ms(ttft)} and TPOT {spoken_ms(tpot)}"
    sentence = f"{told}; {chosen.layout}{said} does, {met}."
    if not chosen.does:
        sentence = f"No layout passes all; {chosen.layout}{said} comes nearest: {chosen.reason}"
        return Question("smallest", question, NO, sentence, figures, chosen.layout.slug)
    return Question("smallest", question, YES, sentence, figures, chosen.layout.slug)
