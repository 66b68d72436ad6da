"""One lesson under way: its lab, its predictions, and the list of everything that it measured.

`run` is `Lab.run` with the reference case's settings named in full, so that a lesson measures the same whatever ran
on the server before it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from labkit.lab import Lab, Run
from labkit.layout import read_layout
from labkit.load.workload import Workload
from labkit.measure.explain import Explanation, explain
from labkit.server.client import ServerError
from labkit.teach.html import Table, box
from labkit.teach.machine import Roofs
from labkit.teach.own_server import lab_for
from labkit.teach.predictions import Book, Prediction
from labkit.teach.reference import MIB, ReferenceCase, is_quick
from labkit.teach.sidebyside import Row, side_by_side


class Lesson:
    """Shown by its own repr: where the lesson takes place."""

    def __init__(self, number: str, lab: Lab, case: ReferenceCase, book: Book | None = None) -> None:
        self.number, self.lab, self.case = number, lab, case
        self.runs: list[tuple[str, Run]] = []
        self.quick = is_quick()
        self.book = book or Book()
        self._roofs: Roofs | None = None
        self.beside = ""
        """What the lab server serves, where this lesson has a server of its own."""

    # ---- the reader

    def predict(self, key: str, question: str, value: Any = None, unit: str = "") -> Prediction:
        """Keep what the reader expects (None: nothing, or what was said earlier)."""
        return self.book.predict(self.number, key, question, value, unit)

    def side_by_side(self, title: str, *rows: Row) -> Table:
        return side_by_side(self.book, self.number, title, rows)

    # ---- the engine

    def size(self, quick: float, full: float) -> float:
        """Requests or seconds: the first under LABKIT_QUICK, else the second."""
        return quick if self.quick else full

    def run(
        self,
        layout: str,
        workload: str | Workload = "mixed",
        *,
        label: str = "",
        settings: dict[str, Any] | None = None,
        num_requests: float | None = None,
        **load: Any,
    ) -> Run:
        """Measure. `settings` change the reference case's; `load` is what `Lab.run` takes. Raises ServerError when
        refused, and when the run failed.
        """
        run = self.lab.run(
            layout,
            workload,
            settings=self.case.settings(**{"fabric": self.fabric, **(settings or {})}),
            num_requests=None if num_requests is None else int(num_requests),
            **load,
        )
        if run.status == "failed":
            raise ServerError(f"The run failed: {run.summary.get('error')}")
        self.runs.append((label or layout, run))
        return run

    def switch(self, layout: str, **settings: Any) -> dict[str, Any]:
        """Stand the layout up without a load, with the reference case's settings."""
        return self.lab.switch(layout, **self.case.settings(**{"fabric": self.fabric, **settings}))

    @property
    def fabric(self) -> str:
        return "nccl" if self.lab.state()["backend"] == "nccl" else "shm"

    def roofs(self) -> Roofs:
        """Measured once a lesson, while no run is under way."""
        if self._roofs is None:
            self._roofs = Roofs.measured(3 if self.quick else 10)
        return self._roofs

    def explain(self, run: Run, other: Run | None = None) -> Explanation:
        """Where the run's TTFT and TPOT went and what holds them up; with `other`, what grew from run to other."""
        on_cpu = self.lab.state()["backend"] != "nccl"
        return explain(run, other, self.roofs() if on_cpu else None)

    # ---- the first cell and the last

    def _place(self) -> Table:
        state = self.lab.state()
        environment = state["environment"]
        versions = {**environment["versions"], "plotly": metadata.version("plotly")}
        rows = [
            ["machine", f"{environment['host']}, {platform.system()}, {state['num_cores']} cores"],
            ["backend", f"{environment['backend']}, {environment['dtype']}"],
            ["versions", ", ".join(f"{name} {version}" for name, version in versions.items())],
            ["model", f"{state['model']}, {self.case.spec.num_parameters / 1e6:.1f} M parameters"],
            ["ranks", f"{state['num_ranks']}, of {state['threads_per_rank']} thread each"],
            ["budget", f"{self.case.budget_bytes / MIB:g} MiB a rank, for weights and KV together"],
            ["size", "quick: few requests, coarse figures" if self.quick else "full"],
        ]
        if self.beside:
            own = f"its own: the lab server serves {self.beside}, and goes on; this one ends with the kernel"
            rows.insert(1, ["server", own])
        return Table(f"Lesson {self.number}: where it is measured", ["", ""], rows, _cautions(state))

    def _repr_html_(self) -> str:
        return self._place()._repr_html_()

    def __repr__(self) -> str:
        return repr(self._place())

    def measured(self) -> Table:
        """Every run of this lesson, so that each figure can be looked up again with `Run.load`."""
        rows = []
        for label, run in self.runs:
            counts, worst = run.summary["requests"], _against(run)
            done = f"{counts['completed']} of {counts['scheduled']}"
            layout = str(read_layout(run.summary["layout"])) if run.summary["layout"] else "not told"
            rows.append([label, layout, done, run.run_id, worst])
        columns = ["run", "layout", "completed", "Run.load(…)", "what it says against itself"]
        return Table(f"Measured in lesson {self.number}", columns, rows, [self.book.score()])

    def close(self) -> None:
        self.lab.close()


def _against(run: Run) -> str:
    codes = [verdict["code"] for verdict in run.quality if verdict["severity"] in ("warn", "bad")]
    return ", ".join(codes) or "nothing"


def _cautions(state: dict[str, Any]) -> list[str]:
    threads = state["num_ranks"] * state["threads_per_rank"]
    if state["environment"]["backend"] != "cpu" or threads <= state["num_cores"]:
        return []
    return [
        f"More ranks than cores: {state['num_ranks']} ranks share {state['num_cores']} cores when all of them work. "
        "Times of such layouts say nothing about a machine that has the cores; bytes, counts and tokens are right."
    ]


def begin(number: str, model: str = "lab-30m", **serve: Any) -> Lesson:
    """The lesson's lab, found or started with the reference case's ranks. `model`: a name under data/models, or a
    folder with a config.json, as `labkit serve` takes it. Where the lab server serves another model, the lesson gets
    a server of its own, which ends with the kernel.

    Raises ServerError when the server that runs has fewer ranks.
    """
    case = ReferenceCase(model)
    lab, beside = lab_for({"model": model, "ranks": case.num_ranks, **serve})
    lab.wait_ready()
    dtype = lab.state()["environment"]["dtype"]
    lesson = Lesson(number, lab, ReferenceCase(model, dtype=dtype))
    lesson.beside = beside
    return lesson


class Refusal:
    """The sentence with which something wrong was refused."""

    def __init__(self, sentence: str) -> None:
        self.sentence = sentence

    def __repr__(self) -> str:
        return f"Refused: {self.sentence}"

    def _repr_html_(self) -> str:
        return box(self.sentence, "Refused.")


def refusal(action: Callable[..., Any], *args: Any, **named: Any) -> Refusal:
    """Do what must not work and show the sentence. AssertionError when it works after all."""
    try:
        action(*args, **named)
    except (ServerError, ValueError) as error:
        return Refusal(str(error))
    raise AssertionError("This was expected to be refused, and it was accepted.")
