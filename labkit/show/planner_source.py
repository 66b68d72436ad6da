"""The page Planner's answers, from `labkit.plan`: one layout at once, all of them a moment later.

A slider asks many times a second. The layout that is looked at is predicted on the thread that carries out wishes (a
few milliseconds); all layouts take seconds, so they wait until the visitor has been still for a moment, on a thread of
their own, and an answer to a question that is no longer asked is dropped.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import Any

from labkit.layout import AnyLayout, Layout, read_layout
from labkit.plan.advise import advise
from labkit.plan.candidates import Candidate, evaluate
from labkit.plan.case import Case
from labkit.plan.deploy import every_engine
from labkit.plan.pools import pool_candidate
from labkit.show.planner_frame import PlannerFrame
from labkit.show.planner_inputs import Inputs, asked_of, case_of
from labkit.show.planner_lab import PlannerLab

STILL_S = 0.35
"""Without a move for so long, all layouts are looked at."""
SWITCH_S = 0.001
"""How often the interpreter lets another thread go on: at its usual 5 ms a slider's answer, which changes threads
several times, would wait long behind the planning of all layouts."""


class PlannerSource:
    """A `Source` (see planner_page.py) over the planner and, for trials, over this machine's lab server."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._lab = PlannerLab(url, token)
        self._changed = threading.Condition()
        self._wanted: Inputs | None = None
        self._moved_at = 0.0
        self._done: tuple[Any, ...] | None = None
        self._plan: dict[str, Any] = {}
        self._planned_for: tuple[Any, ...] | None = None
        """The question that the plan answers."""
        self._notice = ""
        self._thread: threading.Thread | None = None
        self._open = False

    # ---- who watches

    def open(self) -> None:
        self._lab.open()
        with self._changed:
            self._open = True
            sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._keep_planning, daemon=True, name="labkit-plan")
                self._thread.start()

    def close(self) -> None:
        self._lab.close()
        with self._changed:
            self._open = False
            self._changed.notify()

    # ---- one layout, at once

    def card(self, inputs: Inputs) -> dict[str, Any]:
        case = case_of(inputs)  # whatever is wrong is said before anything is dropped
        with self._changed:
            self._wanted, self._moved_at, self._notice = inputs, time.monotonic(), ""
            self._changed.notify()
        return self._card(inputs, case)

    def following(self) -> dict[str, Any] | None:
        """The answer's card, for a visitor who looks at no layout of his own choice; None for one who does."""
        inputs = self._wanted
        return self._card(inputs, case_of(inputs)) if inputs is not None and not inputs.layout else None

    def _card(self, inputs: Inputs, case: Case) -> dict[str, Any]:
        layout = self._looked_at(inputs, case)
        candidate = look(self._as_chosen(case, layout), layout)
        return {
            "n": inputs.n,
            "candidate": self._planned(inputs, candidate.layout.slug) or candidate.to_dict(),
            "percentile": inputs.percentile,
            "commands": self._commands(case, candidate, inputs) if candidate.fits else [],
        }

    def _planned(self, inputs: Inputs, slug: str) -> dict[str, Any] | None:
        """The layout as the plan has it, which may have simulated it; None before there is one for these inputs."""
        if self._planned_for != question_of(inputs):
            return None
        return next((row for row in self._plan["layouts"] if row["layout"] == slug), None)

    def _looked_at(self, inputs: Inputs, case: Case) -> AnyLayout | None:
        """The one that was asked for; else the answer, or what comes nearest, as far as it is known and these GPUs have
        it."""
        chosen = (self._plan.get("chosen") or {}).get("layout", "")
        nearest = (self._plan.get("infeasible") or {}).get("nearest_layout", "")
        for slug in (inputs.layout, chosen, nearest):
            if slug and (layout := read_layout(slug)).world_size <= case.hardware.num_gpus:
                return layout
        return None

    def _as_chosen(self, case: Case, layout: AnyLayout | None) -> Case:
        """The answer comes with settings of its own, where those are part of it."""
        chosen = self._plan.get("chosen") or {}
        if layout is None or chosen.get("layout") != layout.slug:
            return case
        return replace(case, settings=replace(case.settings, **chosen.get("settings", {})))

    def _commands(self, case: Case, candidate: Candidate, inputs: Inputs) -> list[dict[str, Any]]:
        return every_engine(
            candidate.layout, case.spec, candidate.settings, workload=case.demand, objective=case.objective,
            asked=asked_of(inputs), gpus_per_node=case.hardware.gpus_per_node,
        )  # fmt: skip

    # ---- all of them, when the visitor is still

    def plan(self) -> dict[str, Any]:
        return self._plan

    def _keep_planning(self) -> None:
        while self._open:
            inputs = self._next()
            if inputs is None:
                continue
            try:
                begun = time.monotonic()
                found = plan_of(inputs) | {"n": inputs.n, "took_s": time.monotonic() - begun}
            except (ValueError, OSError) as error:
                found, self._notice = None, str(error)
            with self._changed:
                self._done = question_of(inputs)
                if found is not None and self._wanted is not None and question_of(self._wanted) == self._done:
                    self._plan, self._planned_for = found | {"n": self._wanted.n}, self._done

    def _next(self) -> Inputs | None:
        """The newest question, once nothing has moved for a while; None: ask again."""
        with self._changed:
            inputs = self._wanted
            if inputs is None or question_of(inputs) == self._done:
                if inputs is not None and self._plan and self._plan["n"] != inputs.n and not self._notice:
                    self._plan = self._plan | {"n": inputs.n}  # only another layout was looked at
                self._changed.wait(1.0)
                return None
            left = self._moved_at + STILL_S - time.monotonic()
            if left > 0:
                self._changed.wait(left)
                return None
            return inputs

    # ---- the machine at hand

    def trial(self, layout: str) -> None:
        self._lab.start(layout, self._wanted or Inputs())

    def stop(self) -> None:
        self._lab.stop()

    def frame(self) -> PlannerFrame:
        frame = self._lab.frame()
        frame.provenance = "predicted" if self._plan else "none"
        wanted = self._wanted
        frame.planning = wanted is not None and question_of(wanted) != self._done
        frame.notice = self._notice or frame.notice
        return frame


def question_of(inputs: Inputs) -> tuple[Any, ...]:
    """What the plan depends on: everything but which layout is looked at."""
    names = [name for name in inputs.__struct_fields__ if name not in ("n", "layout")]
    return tuple(getattr(inputs, name) for name in names)


def plan_of(inputs: Inputs) -> dict[str, Any]:
    """All layouts, JSON-ready, as `labkit plan --json` prints them."""
    case = case_of(inputs)
    found = advise(
        case.spec, case.hardware, case.demand, case.objective, case.settings, engine=case.engine, price=case.price,
        asked=asked_of(inputs),
    )  # fmt: skip
    return found.to_json()


def look(case: Case, layout: AnyLayout | None) -> Candidate:
    """One layout; without one, the smallest tensor-parallel that holds the model (all of them follow)."""
    if isinstance(layout, Layout):
        return evaluate(case, layout)
    if layout is not None:
        return pool_candidate(case, layout)
    tried = [Layout()]
    while tried[-1].world_size * 2 <= case.hardware.num_gpus:
        tried.append(Layout(tp=tried[-1].tp * 2))
    found = [evaluate(case, one) for one in tried]
    return next((one for one in found if one.does), next((one for one in found if one.fits), found[-1]))
