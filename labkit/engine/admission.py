"""What a request may cost: refused when it can never be served, else expected to be as long as answers lately
were.

Expected answer = min(max_tokens, p90 of the last 256 finished answers); max_tokens itself while fewer than
ten have finished, for a p90 of nine is a guess.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from labkit.engine.request import Request, RequestRefused

WINDOW = 256
MIN_FINISHED = 10


class ExpectedLength:
    """The running p90 of finished answers' lengths, by nearest rank."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._p90 = 0
        """0: not known yet."""

    def observe(self, num_tokens: int) -> None:
        lengths, recent = self._sorted, self._recent
        if len(recent) == WINDOW:
            del lengths[bisect_left(lengths, recent.popleft())]
        recent.append(num_tokens)
        insort(lengths, num_tokens)
        count = len(lengths)
        if count >= MIN_FINISHED:
            self._p90 = max(1, lengths[-(-count * 9 // 10) - 1])

    def of(self, max_tokens: int) -> int:
        p90 = self._p90
        return p90 if 0 < p90 < max_tokens else max_tokens


def check_request(request: Request, max_context: int, vocab_size: int | None = None) -> None:
    """Raise RequestRefused, with the numbers, for what no engine of this model can answer."""
    prompt, max_tokens = request.prompt, request.params.max_tokens
    if not prompt:
        raise RequestRefused("The prompt has 0 tokens. Give at least one: else there is nothing to continue.")
    if max_tokens < 1:
        raise RequestRefused(f"max_tokens is {max_tokens}. Ask for at least 1 token.")
    if len(prompt) >= max_context:
        raise RequestRefused(
            f"The prompt has {len(prompt)} tokens and the model's context is {max_context}, answer included. "
            f"Shorten the prompt to at most {max_context - 1} tokens."
        )
    if len(prompt) + max_tokens > max_context:
        raise RequestRefused(
            f"Prompt and answer need {len(prompt)} + {max_tokens} (max_tokens) = {len(prompt) + max_tokens} "
            f"tokens and the model's context is {max_context}. "
            f"Lower max_tokens to at most {max_context - len(prompt)}."
        )
    if vocab_size is not None and not (min(prompt) >= 0 and max(prompt) < vocab_size):
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise RequestRefused(f"Token id {wrong} does not exist: this model's ids are 0 to {vocab_size - 1}.")


def check_fits(request: Request, num_blocks: int, block_size: int, max_tokens: int | None = None) -> None:
    """Raise RequestRefused, with the arithmetic, when the request is larger than the whole pool.

    The last token of an answer is never read back, it needs no KV: prompt + max_tokens - 1 tokens must fit.
    max_tokens: what of the answer is computed there; None: all of it.
    """
    prompt, max_tokens = len(request.prompt), max_tokens or request.params.max_tokens
    needed = -(-(prompt + max_tokens - 1) // block_size)
    if needed <= num_blocks:
        return
    room = num_blocks * block_size
    answer = room - prompt + 1
    remedy = f"Lower max_tokens to {answer}" if answer > 0 else f"Shorten the prompt to {room} tokens"
    raise RequestRefused(
        f"The request needs {needed} KV blocks of {block_size} tokens ({prompt} prompt + {max_tokens} "
        f"max_tokens - 1) and the replica has {num_blocks}. {remedy}, give the ranks more memory, or "
        f"choose a layout that leaves more room for KV."
    )
