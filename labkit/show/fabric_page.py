"""The widget of the page Fabric: what joins the ranks, as measured on them, and what they do with it right now."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import traitlets

from labkit.show.bundle import bundle
from labkit.show.fabric_frame import FabricFrame
from labkit.show.page import HERE, Ack, Hello, LivePage


class Source(Protocol):
    """Where frames come from and wishes go. Any method may raise; its sentence is shown to the visitor."""

    def open(self) -> None: ...

    def frame(self) -> FabricFrame: ...

    def measured(self) -> dict[str, Any]:
        """What `ServerClient.fabric` told last, {} while unknown; the same object until it changes."""

    def measure(self) -> None:
        """Returns at once; the frame's progress tells the rest."""

    def stop(self) -> None: ...

    def close(self) -> None: ...


class _Measure(msgspec.Struct, tag="measure"):
    pass


class _Stop(msgspec.Struct, tag="stop"):
    pass


class FabricPage(LivePage):
    """The page as a widget."""

    _esm = bundle(HERE / "web" / "fabric.js")
    _css = LivePage._css + (HERE / "fabric.css").read_text(encoding="utf-8")
    wishes = Hello | Ack | _Measure | _Stop
    measured = traitlets.Dict().tag(sync=True)

    def __init__(self, source: Source, **pace: float) -> None:
        super().__init__(source, **pace)
        self._shown: dict[str, Any] = {}

    def frame_now(self) -> FabricFrame:
        frame: FabricFrame = self._source.frame()
        measured = self._source.measured()
        if measured is not self._shown:
            self.measured = self._shown = measured
        return frame

    def carry_out(self, wish: Any) -> None:
        if isinstance(wish, _Measure):
            self._source.measure()
        else:
            self._source.stop()


def fabric_page() -> FabricPage:
    """The page over the lab server of this machine: finds it, and says what to do where there is none."""
    from labkit.show.fabric_source import FabricSource

    return FabricPage(FabricSource())
