"""From the engine's token ids to what a client is told: text cut at stops, logprobs with names, counts.

One `Answer` follows one request and turns each `Output` of its stream into a `Piece`, whichever of the two APIs asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.engine.request import FinishReason, Request
from labkit.model.tokenizer import Tokenizer
from labkit.server.stops import StopFinder

TokenLogprob = tuple[float, list[tuple[int, float]]]
"""The chosen token's logprob, and (token id, logprob) of the most likely, most likely first."""
_FLOOR = -9999.0
"""JSON has no -inf; this is what the OpenAI forms carry instead."""


@dataclass(slots=True)
class Piece:
    """What one step added to one answer."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Answer:
    """Accumulates one request's answer. `num_tokens` counts every token so far, shown as text or not."""

    def __init__(self, request: Request, tokenizer: Tokenizer, index: int, skip_special: bool) -> None:
        self.request = request
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self._push = tokenizer.detokenizer(skip_special)
        self._stops = StopFinder(request.params.stop) if request.params.stop else None
        self._stop_ids = frozenset(request.params.stop_token_ids)

    def advance(self, output: Any) -> Piece:
        """`output`: labkit.engine.core.Output. After a piece with a finish_reason there is no other."""
        if not self.num_tokens:
            self.num_cached = self.request.num_cached
        self.num_tokens += len(output.token_ids)
        ended = output.finish_reason
        piece = Piece(self._text_of(output.token_ids, ended), output.token_ids, output.logprobs)
        if self._stops is not None:
            self._apply_stops(piece, self._stops)
        if ended is not None and piece.finish_reason is None:
            self._finish(piece, ended)
        return piece

    def _text_of(self, token_ids: list[int], ended: FinishReason | None) -> str:
        """The token that ended the answer (end of text, or a stop id) is counted and has no text."""
        if ended is FinishReason.STOP:
            token_ids = token_ids[:-1]
        push = self._push.push
        return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))

    def _apply_stops(self, piece: Piece, stops: StopFinder) -> None:
        piece.text = stops.push(piece.text)
        if stops.found is not None:
            piece.finish_reason, piece.stop_reason = FinishReason.STOP.value, stops.found

    def _finish(self, piece: Piece, ended: FinishReason) -> None:
        left = self._push.flush()
        if self._stops is not None:
            left = self._stops.push(left)
            if self._stops.found is None:
                left += self._stops.flush()
        piece.text += left
        piece.finish_reason = ended.value
        if ended is FinishReason.STOP and piece.token_ids and piece.token_ids[-1] in self._stop_ids:
            piece.stop_reason = piece.token_ids[-1]


def merge(pieces: list[Piece]) -> Piece:
    """All of an answer as one piece."""
    logprobs = [entry for piece in pieces for entry in piece.logprobs or ()]
    return Piece(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        logprobs=logprobs if pieces and pieces[0].logprobs is not None else None,
        finish_reason=pieces[-1].finish_reason if pieces else None,
        stop_reason=pieces[-1].stop_reason if pieces else None,
    )


# ---- logprobs -------------------------------------------------------------------------------------------------------


class LogprobForms:
    """The two shapes in which the OpenAI APIs name tokens beside their logprobs."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def completion(self, piece: Piece, text_offset: int) -> dict[str, Any]:
        """Four parallel lists. `text_offset` counts characters of tokens before this piece."""
        names = [self.name(token_id) for token_id in piece.token_ids]
        offsets = []
        for name in names:
            offsets.append(text_offset)
            text_offset += len(name)
        entries = piece.logprobs or []
        return {
            "text_offset": offsets,
            "token_logprobs": [max(chosen, _FLOOR) for chosen, _ in entries],
            "tokens": names,
            "top_logprobs": [
                self._top(token_id, *entry) for token_id, entry in zip(piece.token_ids, entries, strict=False)
            ],
        }

    def _top(self, token_id: int, chosen: float, top: list[tuple[int, float]]) -> dict[str, float]:
        named = {self.name(token_id): max(chosen, _FLOOR)}
        for other, logprob in top:
            named.setdefault(self.name(other), max(logprob, _FLOOR))
        return named

    def chat(self, piece: Piece) -> dict[str, Any]:
        entries = zip(piece.token_ids, piece.logprobs or (), strict=False)
        return {
            "content": [
                self._entry(token_id, chosen)
                | {"top_logprobs": [self._entry(other, logprob) for other, logprob in top]}
                for token_id, (chosen, top) in entries
            ]
        }

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = list(self._tokenizer.token_bytes(token_id))
        return {"token": self.name(token_id), "logprob": max(logprob, _FLOOR), "bytes": data}
