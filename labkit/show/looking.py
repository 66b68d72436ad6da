"""What the pages' sources share: a thread that looks for the lab server, from `open` until `close`."""

from __future__ import annotations

import threading


class Looking:
    """`_keep` runs on a thread of its own while the page is open; an `open` after a `close` starts another."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._url, self._token = url, token
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        with self._lock:
            if self._thread is not None and self._thread.is_alive() and not self._closed.is_set():
                return
            self._closed = threading.Event()
            self._thread = threading.Thread(target=self._keep, args=(self._closed,), daemon=True, name="labkit-look")
            self._thread.start()

    def _keep(self, closed: threading.Event) -> None:
        """Until `closed` is set; one that is set stays the event of the thread that it ended."""
        raise NotImplementedError
