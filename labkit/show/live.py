"""The widget of the page Layouts: one comm, through which newest frames go out and a visitor's wishes come in.

What is drawn comes from a `Source`; this file knows nothing of the lab server. Wishes are checked, then carried out one
after another on a thread of their own, because they take as long as the lab takes, and a kernel whose main thread
waits answers nobody. Of wishes that supersede each other (a slider being dragged) only the newest is carried out.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, Protocol

import anywidget
import msgspec
import traitlets

from labkit.show.bundle import bundle
from labkit.show.frame import LayoutsFrame, Objective, to_message
from labkit.show.i18n import LANGUAGES, catalogues
from labkit.show.publisher import Publisher

_HERE = Path(__file__).parent


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


class _Hello(msgspec.Struct, tag="hello"):
    pass


class _Ack(msgspec.Struct, tag="ack"):
    seq: int
    hidden: bool = False


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


_Message = _Hello | _Ack | _Start | _Change | _Stop | _Objective | _LookUp | _Pin | _Unpin


class LayoutsPage(anywidget.AnyWidget):
    """The page as a widget. `rate_hz` and `silent_after_s` as in `Publisher`."""

    _esm = bundle(_HERE / "web" / "live.js")
    _css = (_HERE / "live.css").read_text(encoding="utf-8")
    choices = traitlets.Dict().tag(sync=True)
    """What can be chosen, and why not the rest: apart from the frames, because it is larger and hardly ever changes."""
    stored: Any = traitlets.List().tag(sync=True)
    """Stored runs to choose from; sent when somebody opens the list."""
    text = traitlets.Dict().tag(sync=True)
    languages = traitlets.Dict().tag(sync=True)

    def __init__(self, source: Source, *, rate_hz: float = 8.0, silent_after_s: float = 15.0) -> None:
        super().__init__(text=catalogues(), languages=LANGUAGES)
        self._source = source
        self._notice = ""
        self._shown_choices: dict[str, Any] = {}
        self._shown_stored: list[dict[str, Any]] = []
        self._wishes = Wishes(self._carry_out, self._refused)
        self.publisher = Publisher(
            self._make_frame, self.send, rate_hz=rate_hz, silent_after_s=silent_after_s, on_silence=self._let_go
        )
        self.on_msg(self._receive)

    def _make_frame(self) -> dict[str, Any]:
        frame = self._source.frame()
        choices = self._source.choices()
        if choices is not self._shown_choices:
            self.choices = self._shown_choices = choices
        stored = self._source.stored()
        if stored is not self._shown_stored:
            self.stored = self._shown_stored = stored
        frame.notice = self._notice or frame.notice
        return to_message(frame)

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        try:
            message = msgspec.convert(content, type=_Message)
        except msgspec.ValidationError as error:
            self._notice = f"The page sent something the kernel does not understand ({error}); reload the page."
            return
        if isinstance(message, _Ack):
            self.publisher.acknowledge(message.seq, message.hidden)
        else:
            self._wishes.add(message)
            if isinstance(message, _Hello):
                self.publisher.hello()

    def _carry_out(self, wish: _Message) -> None:
        if isinstance(wish, _Hello):
            self._source.open()
            return
        self._notice = ""
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

    def _look_back(self, wish: _Message) -> None:
        if isinstance(wish, _Pin):
            self._source.pin(wish.run_id) if wish.run_id else self._source.pin_current()
        elif isinstance(wish, _Unpin):
            self._source.unpin()
        else:
            self._source.look_up()

    def _refused(self, error: Exception) -> None:
        self._notice = str(error) or type(error).__name__

    def _let_go(self) -> None:
        self._source.close()

    def close(self) -> None:
        self.publisher.close()
        self._wishes.close()
        self._source.close()
        super().close()


class Wishes:
    """Carries out messages in order on one thread; of a kind that waits, only the newest."""

    def __init__(self, carry_out: Any, refused: Any) -> None:
        self._carry_out = carry_out
        self._refused = refused
        self._waiting: dict[type, Any] = {}
        self._order: queue.SimpleQueue[type | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, message: Any) -> None:
        kind = type(message)
        with self._lock:
            new = kind not in self._waiting
            self._waiting[kind] = message
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="labkit-wishes")
                self._thread.start()
        if new:
            self._order.put(kind)

    def close(self) -> None:
        self._order.put(None)

    def _run(self) -> None:
        while (kind := self._order.get()) is not None:
            with self._lock:
                message = self._waiting.pop(kind)
            try:
                self._carry_out(message)
            except Exception as error:
                self._refused(error)


def layouts_page() -> LayoutsPage:
    """The page over the lab server of this machine: finds it, and says what to do where there is none."""
    from labkit.show.lab_source import LabSource

    return LayoutsPage(LabSource())
