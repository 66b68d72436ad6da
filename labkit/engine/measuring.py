"""The engine's own warm ranks, lent to a measurement while nobody's request runs.

Requests that come meanwhile wait, as during a switch; the measurement gives way after the question under way, so that
they wait a fraction of a second. Lost ranks end it with their sentence.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import TYPE_CHECKING

from labkit.engine.bench_messages import Benched, BenchLink
from labkit.engine.bringup import RankPool, Replies
from labkit.engine.watchdog import STEP_TIMEOUT_S

if TYPE_CHECKING:
    from labkit.cluster.pool import Pool
    from labkit.engine.dispatcher import Dispatcher


class EngineBusy(RuntimeError):
    """Requests run, or came: a measurement now would disturb them and be disturbed. The message says so."""


class Measuring:
    """One loan. `num_waiting` tells how many requests wait for its end."""

    serial = count(1)
    """No two questions of this process have one number."""

    def __init__(self, pool: RankPool, num_ranks: int, epoch: int, num_waiting: Callable[[], int]) -> None:
        self._pool, self._num_ranks, self.epoch, self._num_waiting = pool, num_ranks, epoch, num_waiting
        self._replies: Replies | None = None
        self._error: Exception | None = None

    async def ask(self, message: BenchLink) -> Mapping[int, Benched]:
        """Every rank's answer. Raises EngineBusy when a request has come (the ranks may still be asked to end), and
        what `fail` was given."""
        if message.ranks and (num := self._num_waiting()):
            raise EngineBusy(f"{_requests(num)} came meanwhile, so the measurement gave way. Measure again later.")
        if self._error is not None:
            raise self._error
        self._replies = Replies(range(self._num_ranks), Benched, self.epoch)
        questions = dict.fromkeys(range(self._num_ranks), message)
        return await self._replies.ask(self._pool, questions, "a measurement", STEP_TIMEOUT_S)

    def add(self, rank: int, message: Benched) -> None:
        if self._replies is not None:
            self._replies.add(rank, message)

    def fail(self, error: Exception) -> None:
        self._error = error
        if self._replies is not None:
            self._replies.fail(error)


class Lender:
    """Lends an engine's ranks, one loan at a time, and passes on to it what they answer."""

    def __init__(self, pool: Pool, dispatcher: Dispatcher) -> None:
        self._pool, self._dispatcher = pool, dispatcher
        self._loan: Measuring | None = None

    @asynccontextmanager
    async def lend(self, epoch: int, stands: Callable[[], bool]) -> AsyncIterator[Measuring]:
        """stands: whether the layout still does, so that requests can go on. Raises EngineBusy, EngineDown."""
        refuse_if_busy(self._dispatcher.num_requests)
        await self._dispatcher.hold()
        ranks = self._pool.config.num_ranks
        self._loan = Measuring(self._pool, ranks, epoch, lambda: self._dispatcher.num_requests)
        try:
            yield self._loan
        finally:
            self._loan = None
            if stands():
                self._dispatcher.resume()

    def add(self, rank: int, message: Benched) -> None:
        if self._loan is not None:
            self._loan.add(rank, message)

    def fail(self, error: Exception) -> None:
        if self._loan is not None:
            self._loan.fail(error)


def refuse_if_busy(num_requests: int) -> None:
    """Raises EngineBusy."""
    if num_requests:
        verb = "runs" if num_requests == 1 else "run"
        raise EngineBusy(
            f"{_requests(num_requests)} {verb}, which a measurement would disturb and be disturbed by. Stop the load, "
            f"then measure."
        )


def _requests(num: int) -> str:
    return "1 request" if num == 1 else f"{num} requests"
