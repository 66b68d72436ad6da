"""The newest frame, when the browser can take it: what keeps a live page responsive on any machine.

Nothing between a kernel and a browser coalesces messages, so a producer that is faster than the screen builds a
backlog in which buttons die. Here frames are *pulled*: one is made only when the browser has drawn the last (its
acknowledgement), at most `rate_hz` times a second. Before a browser says hello nothing is made; when it falls silent
for `silent_after_s` the thread ends and `on_silence` may let go of what the visitor held, so that the kernel is idle
and can be culled. A later hello starts it again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

Frame = dict[str, Any]
HIDDEN_PERIOD_S = 1.0
"""A tab in the background draws nothing; one frame a second tells it that the kernel lives."""
KEEPALIVE_S = 1.0
"""An unchanged frame is not sent again, but a heartbeat is, or the page would call the connection stale."""


class Publisher:
    """Sends `make_frame()` through `send`, one at a time.

    Args:
        make_frame: builds the newest frame; called from this object's thread, only while somebody watches.
        send: hands one message to the browser: `{"type": "frame", "seq", "data"}`, `data` None when nothing changed.
        rate_hz: the most frames in a second.
        resend_after_s: a frame that was not acknowledged by then is taken as lost.
        silent_after_s: nobody is watching once nothing was heard for so long.
        on_silence: called once each time that happens.
    """

    def __init__(
        self,
        make_frame: Callable[[], Frame],
        send: Callable[[Frame], None],
        *,
        rate_hz: float = 8.0,
        resend_after_s: float = 2.0,
        silent_after_s: float = 15.0,
        on_silence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_frame = make_frame
        self._send = send
        self._period_s = 1.0 / rate_hz
        self._resend_after_s = resend_after_s
        self._silent_after_s = silent_after_s
        self._on_silence = on_silence
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._hidden = False
        self._sent = 0
        self._acknowledged = 0
        self._sent_at = float("-inf")
        self._heard_at = float("-inf")
        self._last_data: Frame | None = None

    @property
    def num_sent(self) -> int:
        return self._sent

    @property
    def is_watched(self) -> bool:
        return self._clock() - self._heard_at < self._silent_after_s

    def hello(self) -> None:
        """A browser is there and knows nothing: the next frame goes out whole and at once."""
        with self._changed:
            self._heard_at = self._clock()
            self._acknowledged, self._last_data, self._hidden = self._sent, None, False
            self._sent_at = float("-inf")
            self._ensure_thread()
            self._changed.notify()

    def acknowledge(self, seq: int, hidden: bool = False) -> None:
        """Frame `seq` was drawn (or put aside: the tab is in the background)."""
        with self._changed:
            self._heard_at = self._clock()
            self._acknowledged = max(self._acknowledged, min(seq, self._sent))
            self._hidden = hidden
            self._ensure_thread()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def step(self) -> float:
        """Send if it is time; how many seconds to wait before asking again."""
        now = self._clock()
        wait_s = self._wait_s(now)
        if wait_s > 0:
            return wait_s
        data = self._make_frame()
        unchanged = data == self._last_data
        if unchanged and now - self._sent_at < KEEPALIVE_S:
            return self._period_s
        self._last_data = data
        self._sent, self._sent_at = self._sent + 1, now
        self._send({"type": "frame", "seq": self._sent, "data": None if unchanged else data})
        return self._period()

    def _wait_s(self, now: float) -> float:
        since_s = now - self._sent_at
        if self._acknowledged < self._sent:
            return self._resend_after_s - since_s
        return self._period() - since_s

    def _period(self) -> float:
        return HIDDEN_PERIOD_S if self._hidden else self._period_s

    def _ensure_thread(self) -> None:
        if not self._closed and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, daemon=True, name="labkit-publisher")
            self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            if not self.is_watched:
                break
            wait_s = self.step()
            with self._changed:
                self._changed.wait(min(max(wait_s, 0.005), self._silent_after_s / 4))
        if self._give_up():
            with contextlib.suppress(Exception):
                self._on_silence()

    def _give_up(self) -> bool:
        """Leave the thread; False when a hello came in the meantime and took over."""
        with self._changed:
            self._thread = None
            if self.is_watched and not self._closed:
                self._ensure_thread()
                return False
            return True
