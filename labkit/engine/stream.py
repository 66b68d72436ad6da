"""What comes back to whoever asked: tokens as they are sampled, then a reason, or the sentence that says what
broke.

A slow reader finds several tokens in one piece; nothing is lost and nothing waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from labkit.engine.request import FinishReason, Request

TokenLogprobs = tuple[float, list[tuple[int, float]]]
"""Logprob of the chosen token, and the most likely ones as (token id, logprob)."""


class EngineDown(RuntimeError):
    """The engine cannot answer; the message names the rank and its error (HTTP 503)."""


@dataclass(slots=True)
class Output:
    token_ids: list[int]
    """New since the last piece; empty when only the reason came."""
    logprobs: list[TokenLogprobs] | None
    """One per token, when the request asked for them."""
    finish_reason: FinishReason | None
    """Set on the last piece."""


class RequestStream:
    """Async iterator of `Output`. Raises EngineDown when the engine fails under it."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._error: EngineDown | None = None
        self._is_over = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[Output | EngineDown], None] | None = None

    # ---- the engine's side

    def push(self, token_id: int, logprobs: TokenLogprobs | None, finish_reason: FinishReason | None) -> None:
        self._token_ids.append(token_id)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        self._finish_reason = finish_reason
        self._wake()

    def end(self, finish_reason: FinishReason) -> None:
        self._finish_reason = finish_reason
        self._wake()

    def fail(self, error: EngineDown) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._listener is not None:
            self._give(self._listener)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- the reader's side

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Output:
        if self._is_over:
            raise StopAsyncIteration
        while not (self._token_ids or self._finish_reason or self._error):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._token_ids or self._finish_reason:
            return self._take()
        self._is_over = True
        assert self._error is not None
        raise self._error

    def listen(self, listener: Callable[[Output | EngineDown], None]) -> None:
        """From now on give each piece to `listener` as it comes, what waits already at once.

        This spares a token the waking of a task. The listener is called in the engine's turn: it must be quick and
        must not raise.
        """
        self._listener = listener
        self._give(listener)

    def _give(self, listener: Callable[[Output | EngineDown], None]) -> None:
        if self._is_over:
            return
        if self._token_ids or self._finish_reason:
            listener(self._take())
        elif self._error is not None:
            self._is_over = True
            listener(self._error)

    def _take(self) -> Output:
        output = Output(self._token_ids, self._logprobs, self._finish_reason)
        self._token_ids = []
        self._logprobs = None if self._logprobs is None else []
        self._is_over = self._finish_reason is not None
        return output
