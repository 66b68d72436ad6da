"""Stop strings, found in a text that arrives in pieces: nothing that may yet become a stop is shown.

Only as much is held back as is the beginning of some stop string, so ordinary text streams without delay.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Feed pieces; get what may be shown. `found` is the stop string once it has been seen."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show now; after a match, what stood before the match."""
        text = self._held + piece
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            at, self.found = min(matches, key=lambda match: match[0])
            self._held = ""
            return text[:at]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when the text has ended without a stop."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
