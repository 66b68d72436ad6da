"""The widget of the page Layouts. What is drawn comes from a `Source`; this file knows nothing of the lab server."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import traitlets

from labkit.show.bundle import bundle
from labkit.show.frame import LayoutsFrame, Objective
from labkit.show.page import HERE, Ack, Hello, LivePage


class Wanted(msgspec.Struct, kw_only=True):
    """What a visitor has set: layout slug, workload name, requests a second, and the two policies."""

    layout: str
    workload: str
    rate: float
    router: str
    admission: str


class Source(Protocol):
    """Where frames come from and wishes go. Any method may raise; its sentence is shown to the visitor."""

    def open(self) -> None:
        """Somebody watches: connect, if not connected."""

    def frame(self) -> LayoutsFrame:
        """The newest figures; must not block."""

    def choices(self) -> dict[str, Any]:
        """`labkit.layout.choice_table` of the server's model and ranks, {} while unknown; the same object until it
        changes.
        """

    def start(self, wanted: Wanted) -> None: ...

    def change(self, wanted: Wanted) -> None: ...

    def set_objective(self, objective: Objective) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None:
        """Nobody watches: end the load, give the ranks back, disconnect."""


class _Start(Wanted, tag="start"):
    pass


class _Change(Wanted, tag="change"):
    pass


class _Stop(msgspec.Struct, tag="stop"):
    pass


class _Objective(Objective, tag="objective"):
    pass


class LayoutsPage(LivePage):
    """The page as a widget."""

    _esm = bundle(HERE / "web" / "live.js")
    wishes = Hello | Ack | _Start | _Change | _Stop | _Objective
    choices = traitlets.Dict().tag(sync=True)
    """What can be chosen, and why not the rest: apart from the frames, because it is larger and hardly ever changes."""

    def __init__(self, source: Source, **pace: float) -> None:
        super().__init__(source, **pace)
        self._shown_choices: dict[str, Any] = {}

    def frame_now(self) -> LayoutsFrame:
        frame: LayoutsFrame = self._source.frame()
        choices = self._source.choices()
        if choices is not self._shown_choices:
            self.choices = self._shown_choices = choices
        return frame

    def carry_out(self, wish: Any) -> None:
        if isinstance(wish, _Start):
            self._source.start(wish)
        elif isinstance(wish, _Change):
            self._source.change(wish)
        elif isinstance(wish, _Objective):
            self._source.set_objective(Objective(wish.ttft_ms, wish.tpot_ms))
        else:
            self._source.stop()


def layouts_page() -> LayoutsPage:
    """The page over the lab server of this machine: finds it, and says what to do where there is none."""
    from labkit.show.lab_source import LabSource

    return LayoutsPage(LabSource())
