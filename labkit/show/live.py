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

    def stored(self) -> list[dict[str, Any]]:
        """Runs of the store that can be pinned (`labkit.lab.stored.StoredRun`); the same object until they change."""

    def look_up(self) -> None:
        """Somebody wants to choose from the stored runs: read the list anew."""

    def pin(self, run_id: str) -> None:
        """Show that stored run beside the current figures."""

    def pin_current(self) -> None:
        """Keep the current layout's samples, for differences to it; the page itself keeps the figures."""

    def unpin(self) -> None: ...

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


class _LookUp(msgspec.Struct, tag="look_up"):
    pass


class _Pin(msgspec.Struct, tag="pin"):
    """run_id: of a stored run; empty: the current layout."""

    run_id: str = ""


class _Unpin(msgspec.Struct, tag="unpin"):
    pass


class LayoutsPage(LivePage):
    """The page as a widget."""

    _esm = bundle(HERE / "web" / "live.js")
    wishes = Hello | Ack | _Start | _Change | _Stop | _Objective | _LookUp | _Pin | _Unpin
    choices = traitlets.Dict().tag(sync=True)
    """What can be chosen, and why not the rest: apart from the frames, because it is larger and hardly ever changes."""
    stored: Any = traitlets.List().tag(sync=True)
    """Stored runs to choose from; sent when somebody opens the list."""

    def __init__(self, source: Source, **pace: float) -> None:
        super().__init__(source, **pace)
        self._shown_choices: dict[str, Any] = {}
        self._shown_stored: list[dict[str, Any]] = []

    def frame_now(self) -> LayoutsFrame:
        frame: LayoutsFrame = self._source.frame()
        choices = self._source.choices()
        if choices is not self._shown_choices:
            self.choices = self._shown_choices = choices
        stored = self._source.stored()
        if stored is not self._shown_stored:
            self.stored = self._shown_stored = stored
        return frame

    def carry_out(self, wish: Any) -> None:
        if isinstance(wish, _Start):
            self._source.start(wish)
        elif isinstance(wish, _Change):
            self._source.change(wish)
        elif isinstance(wish, _Objective):
            self._source.set_objective(Objective(wish.ttft_ms, wish.tpot_ms))
        elif isinstance(wish, _Stop):
            self._source.stop()
        else:
            self._look_back(wish)

    def _look_back(self, wish: Any) -> None:
        if isinstance(wish, _Pin):
            self._source.pin(wish.run_id) if wish.run_id else self._source.pin_current()
        elif isinstance(wish, _Unpin):
            self._source.unpin()
        else:
            self._source.look_up()


def layouts_page() -> LayoutsPage:
    """The page over the lab server of this machine: finds it, and says what to do where there is none."""
    from labkit.show.lab_source import LabSource

    return LayoutsPage(LabSource())
