"""The questions of the walk, each answered from the table of all layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.layout import Deployment, Layout
from labkit.plan.candidates import Candidate
from labkit.plan.choose import lowered
from labkit.plan.limits import INTERFERENCE
from labkit.plan.objective import spoken_ms
from labkit.plan.rank_places import FAST, axis_reach
from labkit.plan.reasons import num_gpus
from labkit.plan.remedies import settings_changed
from labkit.plan.walk_path import NO, YES, Path, Question
from labkit.said import in_turn, say, with_commas, with_semicolons

ONE_GPU = say("Does one replica fit one GPU, with KV for the requests in flight?")
SETTINGS = say("Would it do without any axis: engine limits, prefix cache, other input, admission, more servers?")
PREFILL_APART = say("Do prompts and answers get in each other's way, and is moving the KV worth it?")
QUESTIONS = {
    "tp": say("Must layers be cut (TP), to fit or to be fast enough, inside the fastest link?"),
    "pp": say("Must layers cross a slower boundary (PP), or be cut where TP cannot?"),
    "dp": say("Can the traffic use more replicas (DP)?"),
    "pcp": say("Does TTFT fail at long prompts, which more ranks could share out (PCP)?"),
    "dcp": say("Does KV limit while ranks keep copies of it (DCP)?"),
    "ep": say("Do the experts' weights ask to be shared out (EP)?"),
}


def one_gpu(path: Path) -> Question:
    one = path.of(Layout())
    assert one is not None
    in_flight = path.case.demand.concurrency or (one.prediction.concurrency if one.prediction else None)
    figures = {"most_requests": one.most_requests, "kv_tokens": one.memory.kv_tokens if one.memory else 0,
               "in_flight": in_flight}  # fmt: skip
    if not one.fits or one.queues or one.fault == "overload":
        return Question("one-gpu", ONE_GPU, NO, one.reason, figures, path.base.layout.slug)
    told = say("KV holds {most} requests of {tokens:,} tokens.", most=one.most_requests,
               tokens=path.case.demand.tokens_each)  # fmt: skip
    return Question("one-gpu", ONE_GPU, YES, told, figures, path.base.layout.slug)


def limit_question(path: Path) -> Question:
    how = "measured" if path.measured else "predicted"
    question = say("What is the limit of {layout} (measured)?", layout=path.base.layout) if path.measured else \
        say("What is the limit of {layout} (predicted)?", layout=path.base.layout)  # fmt: skip
    sentence = in_turn(path.limit.sentence, path.correction)
    return Question("limit", question, YES if path.limit.cause != "met" else NO, sentence,
                    path.limit.to_dict() | {"how": how}, path.base.layout.slug)  # fmt: skip


def settings_question(path: Path) -> Question:
    done = next((remedy for remedy in path.engine if remedy.does and path.takes(remedy.candidate)), None)
    figures = {"engine": [remedy.to_dict() for remedy in path.engine],
               "others": [remedy.to_dict() for remedy in path.others]}  # fmt: skip
    elsewhere = with_semicolons(remedy.sentence for remedy in path.others if remedy.does)
    more = say("Also: {remedies}.", remedies=elsewhere) if elsewhere else ""
    base = path.base.layout
    told = say("{remedy} on {layout}.", remedy=done.sentence, layout=base) if done else _settings_tried(path)
    return Question("settings", SETTINGS, YES if done else NO, in_turn(told, more), figures, base.slug)


def _settings_tried(path: Path) -> str:
    number, layout = len(path.engine), path.base.layout
    if not number:
        return say("No setting of the engine speaks to it on {layout}.", layout=layout)
    if number == 1:
        return say("1 setting of the engine tried on {layout}, not enough.", layout=layout)
    return say("{n} settings of the engine tried on {layout}, not enough.", n=number, layout=layout)


def axis_question(axis: str) -> Callable[[Path], Question]:
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
        if not inside and path.case.hardware.fast is not None:
            sentence = in_turn(sentence, say("Its collectives leave the fast group: no layout that keeps them in does "
                                             "it."))  # fmt: skip
    told = say("{axis} {degree}: {job}", axis=axis.upper(), degree=degree, job=sentence)
    return Question(axis, QUESTIONS[axis], YES, told, figures, chosen.layout.slug)


def job(path: Path, chosen: Candidate, axis: str) -> tuple[str, dict[str, Any]]:
    """What would be missing without the axis, by the nearest layout with less of it."""
    less = lowered(path.candidates, chosen.grid, axis)
    if less is None:
        return say("no legal layout has less of it."), {}
    q = path.case.objective.percentile
    figures: dict[str, Any] = {"without": less.layout.slug, "fault": less.fault}
    for metric in ("ttft", "tpot"):
        both = [one.figure(metric, q) for one in (less, chosen)]
        figures[f"{metric}_{q}_ms"] = [value if value < float("inf") else None for value in both]
    figures["most_requests"] = [less.most_requests, chosen.most_requests]
    if less.does and less.settings == chosen.settings:
        return say("{layout} would meet every wish by prediction; what was measured says it does not.",
                   layout=less.layout), figures  # fmt: skip
    return say("without it, {reason}", reason=less.reason or path.limit.sentence), figures


def _no_job(path: Path, axis: str) -> Question:
    """Why not: not legal, no help, or more than is needed."""
    others = [one for one in path.candidates if _degree(one, axis) > 1]
    legal = [one for one in others if one.legal]
    stands, question = path.stands, QUESTIONS[axis]
    if not legal:
        why = next((one.reason for one in others if "÷" in one.reason or "expert" in one.reason), "")
        return Question(axis, question, NO, why or say("No layout of these GPUs has it."), {}, stands)
    doing = [one for one in legal if one.does]
    figures = {"legal": len(legal), "doing": len(doing)}
    if doing and path.chosen is not None:
        first = min(doing, key=lambda one: one.num_gpus)
        told = say("{layout} would do too, on {gpus}; {chosen} does it without.", layout=first.layout,
                   gpus=num_gpus(first.num_gpus), chosen=path.chosen.layout)  # fmt: skip
        return Question(axis, question, NO, told, figures, stands)
    best = _nearest(legal)
    told = say("Of {n} layouts with it none does; nearest: {reason}", n=len(legal), reason=best.reason) if best else \
        say("None of {n} layouts with it holds the model.", n=len(legal))  # fmt: skip
    return Question(axis, question, NO, told, figures, stands)


def _degree(candidate: Candidate, axis: str) -> int:
    return int(getattr(candidate.grid, axis))


def _nearest(candidates: Sequence[Candidate]) -> Candidate | None:
    """By the wish that is missed most; where nothing keeps up, by what it does."""
    tried = [one for one in candidates if one.outcomes]
    rank = {one.layout: (max(o.ratio for o in one.outcomes), -one.figure("server_tokens", "")) for one in tried}
    return min(tried, key=lambda one: rank[one.layout], default=None)


def prefill_apart(path: Path) -> Question:
    stands, figures = path.stands, {"pools": len(path.pools)}
    if path.chosen is not None and isinstance(path.chosen.layout, Deployment):
        told = say("{layout} on {gpus}: {limit}", layout=path.chosen.layout, gpus=num_gpus(path.chosen.num_gpus),
                   limit=path.limit.sentence)  # fmt: skip
        return Question("pd", PREFILL_APART, YES, told, figures, stands)
    if path.limit.cause != INTERFERENCE and not path.pools:
        told = say("What is short is not that prompts and answers share steps.")
        return Question("pd", PREFILL_APART, NO, told, {}, stands)
    if not path.pools:
        return Question("pd", PREFILL_APART, NO, say("No two pools fit on fewer GPUs."), figures, stands)
    doing = [one for one in path.pools if one.does]
    told = say("{layout} would do on {gpus}, which is no fewer.", layout=doing[0].layout,
               gpus=num_gpus(doing[0].num_gpus)) if doing else \
        say("None of {n} pairs of pools does it.", n=len(path.pools))  # fmt: skip
    return Question("pd", PREFILL_APART, NO, told, figures, stands)


def smallest_question(path: Path) -> Question:
    question = say("Is that the smallest, and has every axis a job?")
    chosen = path.chosen
    if chosen is None:
        told = say("No layout of these GPUs meets every wish.")
        return Question("smallest", question, NO, told, {}, path.base.layout.slug)
    fewer = [one for one in path.candidates if one.num_gpus < chosen.num_gpus and one.legal]
    doing = [str(one.layout) for one in fewer if one.does]
    figures: dict[str, Any] = {"fewer_gpus": len(fewer)}
    if isinstance(chosen.layout, Layout):
        figures["jobs"] = {axis: job(path, chosen, axis)[0] for axis in path.axes}
    if doing:
        figures["fewer_doing"] = len(doing)
    changed = settings_changed(path.case.settings, chosen.settings)
    so = with_commas([str(chosen.layout), *(f"{name} {value}" for name, value in changed.items())])
    if not chosen.does:
        told = say("No layout passes all; {layout} comes nearest: {reason}", layout=so, reason=chosen.reason)
        return Question("smallest", question, NO, told, figures, chosen.layout.slug)
    q = path.case.objective.percentile
    told = say("{smaller}; {layout} does, with {percentile} TTFT {ttft} and TPOT {tpot}.",
               smaller=_smaller(path, len(fewer), doing, bool(changed)), layout=so, percentile=q,
               ttft=spoken_ms(chosen.figure("ttft", q)), tpot=spoken_ms(chosen.figure("tpot", q)))  # fmt: skip
    return Question("smallest", question, YES, told, figures, chosen.layout.slug)


def _smaller(path: Path, number: int, doing: Sequence[str], changed: bool) -> str:
    """What is known of layouts on fewer GPUs. `changed`: the chosen one comes with settings of its own."""
    told = say("Of {n} legal layouts on fewer GPUs none meets every wish", n=number) if number else \
        say("There is no legal layout on fewer GPUs")
    if doing:
        told = say("On fewer GPUs {layouts} would do, by another way to hold the model than {base}",
                   layouts=with_commas(doing[:3]), base=path.base.layout)  # fmt: skip
    return say("{smaller} (nor with other settings, as far as they were tried)", smaller=told) if changed else told
