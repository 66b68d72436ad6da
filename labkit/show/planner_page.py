"""The widget of the page Planner: what a visitor sets goes to the planner, and what it says is drawn."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import traitlets

from labkit.show.bundle import bundle
from labkit.show.frame import to_message
from labkit.show.i18n import in_parts
from labkit.show.page import HERE, Ack, Hello, LivePage
from labkit.show.planner_frame import PlannerFrame
from labkit.show.planner_inputs import Inputs, options


class Source(Protocol):
    """Where predictions come from. Any method may raise; its sentence is shown to the visitor."""

    def open(self) -> None: ...

    def frame(self) -> PlannerFrame: ...

    def card(self, inputs: Inputs) -> dict[str, Any]:
        """The layout that is looked at, at once; all layouts are looked at afterwards."""

    def plan(self) -> dict[str, Any]:
        """The newest of all layouts, {} before the first; the same object until it changes."""

    def following(self) -> dict[str, Any] | None:
        """The card of the newest plan's answer; None where the visitor looks at another layout."""

    def trial(self, layout: str) -> None:
        """Run it on the machine at hand; returns at once."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


class _Want(Inputs, tag="want", frozen=True, kw_only=True):
    pass


class _Trial(msgspec.Struct, tag="trial"):
    layout: str


class _Stop(msgspec.Struct, tag="stop"):
    pass


class PlannerPage(LivePage):
    """The page as a widget."""

    _esm = bundle(HERE / "web" / "planner.js")
    _css = LivePage._css + (HERE / "planner.css").read_text(encoding="utf-8")
    wishes = Hello | Ack | _Want | _Trial | _Stop
    options = traitlets.Dict().tag(sync=True)
    card = traitlets.Dict().tag(sync=True)
    """The layout that is looked at: predictions and commands. Set as soon as it is known, not with a frame."""
    plan = traitlets.Dict().tag(sync=True)
    """All layouts, the walk, the checks, the front."""

    def __init__(self, source: Source, **pace: float) -> None:
        super().__init__(source, **pace)
        self.options = options()
        self._shown: dict[str, Any] = {}

    def frame_now(self) -> PlannerFrame:
        frame: PlannerFrame = self._source.frame()
        plan = self._source.plan()
        if plan is not self._shown:
            self._shown = plan
            self.plan = to_message(in_parts(plan))
            if (card := self._source.following()) is not None:
                self.card = to_message(in_parts(card))
        return frame

    def carry_out(self, wish: Any) -> None:
        if isinstance(wish, _Want):
            self.card = to_message(in_parts(self._source.card(wish)))
        elif isinstance(wish, _Trial):
            self._source.trial(wish.layout)
        else:
            self._source.stop()


def planner_page() -> PlannerPage:
    """The page over this machine's planner, and over its lab server where there is one."""
    from labkit.show.planner_source import PlannerSource

    return PlannerPage(PlannerSource())
