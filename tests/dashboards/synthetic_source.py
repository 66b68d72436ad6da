"""A source of made-up frames that obeys the page's wishes: for tests of the chain from kernel to browser alone."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import synthetic

from labkit.show.frame import Holder, LayoutsFrame, Objective, Switch
from labkit.show.frame_run import Beside
from labkit.show.live import LayoutsPage, Wanted

SHAPES = {"tp1": (1, 1), "tp2": (1, 2), "dp2": (2, 1)}


class SyntheticSource:
    """Counts its own calls, so that a test can see that nothing is made for nobody."""

    def __init__(self) -> None:
        self.num_frames = 0
        self.is_open = False
        self._lock = threading.Lock()
        self._choices = synthetic.choices(num_ranks=2)
        self._wanted: Wanted | None = None
        self._layout = "tp1"
        self._since = time.monotonic()
        self._objective = Objective(200.0, 12.0)
        self._switch: Switch | None = None
        self._stored: list[dict[str, Any]] = []
        self._beside: Beside | None = None

    def open(self) -> None:
        self.is_open = True

    def frame(self) -> LayoutsFrame:
        with self._lock:
            self.num_frames += 1
            num_requests = int((time.monotonic() - self._since) * 40) if self._wanted else 0
            dp, tp = SHAPES[self._layout]
            made = synthetic.frame(dp, tp, num_requests, p50=150.0 / tp)
            made.objective, made.switch, made.beside = self._objective, self._switch, self._beside
            if self._wanted is None:
                made.role, made.run, made.switch = "watching", None, None
                made.lab.holder = Holder("shell of Bob", "compare", 5.0)
            return made

    def choices(self) -> dict[str, Any]:
        return self._choices

    def stored(self) -> list[dict[str, Any]]:
        return self._stored

    def look_up(self) -> None:
        self._stored = synthetic.stored()

    def pin(self, run_id: str) -> None:
        self._beside = synthetic.beside(run_id)

    def pin_current(self) -> None:
        self._beside = None

    def unpin(self) -> None:
        self._beside = None

    def start(self, wanted: Wanted) -> None:
        self.change(wanted)

    def change(self, wanted: Wanted) -> None:
        if wanted.layout not in SHAPES:
            raise ValueError(f"{wanted.layout} is not one of {', '.join(SHAPES)}.")
        with self._lock:
            self._wanted, self._layout, self._since = wanted, wanted.layout, time.monotonic()
            self._switch = Switch(wanted.layout, wanted.layout.upper(), 0.18, 0.24)

    def set_objective(self, objective: Objective) -> None:
        self._objective = objective

    def stop(self) -> None:
        self._wanted = None

    def close(self) -> None:
        self._wanted, self.is_open = None, False


def page() -> LayoutsPage:
    return LayoutsPage(SyntheticSource(), silent_after_s=float(os.environ.get("LABKIT_TEST_SILENT_S", "15")))
