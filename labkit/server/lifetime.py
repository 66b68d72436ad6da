"""A detached server leaves when nobody needs it: a timer runs only while there is no client at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

DEFAULT_LINGER_S = 600.0


class Lifetime:
    """Calls `on_end()` once there has been no client for `linger_s` seconds; 0: never."""

    def __init__(self, linger_s: float, on_end: Callable[[], None]) -> None:
        self._linger_s = linger_s
        self._on_end = on_end
        self._num_clients = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_clients(self) -> int:
        return self._num_clients

    def start(self) -> None:
        """Begin to count; nobody has come yet."""
        self._arm()

    @contextlib.contextmanager
    def client(self) -> Iterator[None]:
        self._num_clients += 1
        self._disarm()
        try:
            yield
        finally:
            self._num_clients -= 1
            self._arm()

    def _arm(self) -> None:
        if self._num_clients == 0 and self._linger_s > 0:
            self._disarm()
            self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._on_end)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
