"""Which ranks owe the run a profile, and the wait for it before the run is closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.engine.messages import Profile
from labkit.server.errors import ApiError

if TYPE_CHECKING:
    from labkit.engine.core import Engine

END_S = 30.0
"""A trace of many steps takes a rank seconds to write."""
MOST_STEPS = 1000


class Profiling:
    def __init__(self) -> None:
        self._owed: set[int] = set()
        self._all_came = asyncio.Event()

    def begin(self, engine: Engine, ranks: Sequence[int], skip: int, steps: int) -> None:
        """Raises ApiError 400."""
        num_ranks = engine.settings.layout.world_size
        wrong = [rank for rank in ranks if not 0 <= rank < num_ranks]
        if wrong or not ranks:
            raise ApiError(
                400, f"ranks is {list(ranks)}: name some of 0 to {num_ranks - 1}, those that the layout uses.", "ranks"
            )
        if not 1 <= steps <= MOST_STEPS or skip < 0:
            raise ApiError(400, f"{steps} steps after {skip}: profile 1 to {MOST_STEPS}, after 0 or more.", "steps")
        if self._owed:
            raise ApiError(409, f"Ranks {sorted(self._owed)} are being profiled: wait until that is over.", "ranks")
        self._owed = set(ranks)
        self._all_came.clear()
        self._tell(engine, skip, steps)

    def came(self, rank: int) -> None:
        self._owed.discard(rank)
        if not self._owed:
            self._all_came.set()

    async def end(self, engine: Engine) -> None:
        """Ask for what there is of profiles still owed, and wait for it; a rank that failed owes nothing more."""
        if not self._owed:
            return
        if engine.state()["state"] == "ready":
            self._tell(engine, 0, 0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_came.wait(), END_S)
        self._owed.clear()

    def _tell(self, engine: Engine, skip: int, steps: int) -> None:
        for rank in self._owed:
            engine.pool.send(rank, Profile(0, skip, steps))
