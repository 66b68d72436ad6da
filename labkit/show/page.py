"""What the live pages have in common: one comm, through which newest frames go out and a visitor's wishes come in.

What is drawn comes from a source; nothing here knows the lab server. Wishes are checked, then carried out one after
another on a thread of their own, because they take as long as the lab takes, and a kernel whose main thread waits
answers nobody. Of wishes that supersede each other (a slider being dragged) only the newest is carried out.
"""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any, ClassVar, Protocol

import anywidget
import msgspec
import traitlets

from labkit.show.frame import to_message
from labkit.show.i18n import LANGUAGES, catalogues
from labkit.show.publisher import Publisher

HERE = Path(__file__).parent


class Watched(Protocol):
    """Any method may raise; its sentence is shown to the visitor."""

    def open(self) -> None:
        """Somebody watches: connect, if not connected."""

    def close(self) -> None:
        """Nobody watches: give back what the visitor held, disconnect."""


class Hello(msgspec.Struct, tag="hello"):
    pass


class Ack(msgspec.Struct, tag="ack"):
    seq: int
    hidden: bool = False


class LivePage(anywidget.AnyWidget):
    """`rate_hz` and `silent_after_s` as in `Publisher`. A page says what it draws (`frame_now`), what may be wished
    (`wishes`, beside Hello and Ack) and what a wish does (`carry_out`)."""

    _css: Any = (HERE / "live.css").read_text(encoding="utf-8")
    text = traitlets.Dict().tag(sync=True)
    languages = traitlets.Dict().tag(sync=True)
    wishes: ClassVar[Any] = Hello | Ack

    def __init__(self, source: Watched, *, rate_hz: float = 8.0, silent_after_s: float = 15.0) -> None:
        super().__init__(text=catalogues(), languages=LANGUAGES)
        self._source: Any = source
        self._notice = ""
        self._wishes = Wishes(self._carry_out, self._refused)
        self.publisher = Publisher(
            self._make_frame, self.send, rate_hz=rate_hz, silent_after_s=silent_after_s, on_silence=source.close
        )
        self.on_msg(self._receive)

    def frame_now(self) -> Any:
        """The newest frame, a struct with `notice`; must not block."""
        raise NotImplementedError

    def carry_out(self, wish: Any) -> None:
        """One of `wishes`. May take its time."""
        raise NotImplementedError

    def _make_frame(self) -> dict[str, Any]:
        frame = self.frame_now()
        frame.notice = self._notice or frame.notice
        return to_message(frame)

    def _receive(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        try:
            message = msgspec.convert(content, type=self.wishes)
        except msgspec.ValidationError as error:
            self._notice = f"The page sent something the kernel does not understand ({error}); reload the page."
            return
        if isinstance(message, Ack):
            self.publisher.acknowledge(message.seq, message.hidden)
        else:
            self._wishes.add(message)
            if isinstance(message, Hello):
                self.publisher.hello()

    def _carry_out(self, wish: Any) -> None:
        if isinstance(wish, Hello):
            self._source.open()
            return
        self._notice = ""
        self.carry_out(wish)

    def _refused(self, error: Exception) -> None:
        self._notice = str(error) or type(error).__name__

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
