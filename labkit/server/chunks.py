"""Server-sent events of the two APIs, as bytes: a stream's constant parts are encoded once, a token fills the gaps.

At hundreds of tokens a second on a machine that also computes them, building and encoding a dictionary for each one
is a cost that shows; the field order and the explicit nulls are those of vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from labkit.server.answer import Answer, LogprobForms, Piece

dumps = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What of an answer the client asked to see."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    logprobs: bool = False


def usage_of(answers: list[Answer]) -> dict[str, Any]:
    num_prompt = sum(len(answer.request.prompt) for answer in answers)
    num_output = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": {"cached_tokens": sum(answer.num_cached for answer in answers)},
    }


def event(data: Any) -> bytes:
    return b"data: " + dumps(data) + b"\n\n"


class Chunks:
    """One choice of one stream. `chunk(piece)` is what to send for it."""

    object_name = "text_completion"

    def __init__(self, answer: Answer, wanted: Wanted, forms: LogprobForms, meta: dict[str, Any]) -> None:
        """`meta`: id, created and model, which every chunk repeats."""
        self._answer, self._wanted, self._forms = answer, wanted, forms
        self._meta = {"id": meta["id"], "object": self.object_name, **meta}
        self._head = b"data: " + dumps(self._meta)[:-1] + b',"choices":[{"index":%d,' % answer.index
        self._num_prompt = len(answer.request.prompt)
        self._text_offset = 0
        self._first = True

    def chunk(self, piece: Piece) -> bytes:
        body = self._plain(piece) if self._is_plain(piece) else self._full(piece)
        self._first = False
        return body

    def _is_plain(self, piece: Piece) -> bool:
        return piece.finish_reason is None and not self._wanted.logprobs and not self._first

    def _plain(self, piece: Piece) -> bytes:
        return (
            b'%b"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null,'
            b'"prompt_token_ids":null,"token_ids":%b}]%b'
            % (self._head, dumps(piece.text), self._ids(piece), self._tail())
        )

    def _full(self, piece: Piece) -> bytes:
        fields = {
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": self._prompt_ids(),
            "token_ids": piece.token_ids if self._wanted.token_ids else None,
        }
        return self._head + dumps(fields)[1:] + b"]" + self._tail()

    def _ids(self, piece: Piece) -> bytes:
        return dumps(piece.token_ids) if self._wanted.token_ids else b"null"

    def _prompt_ids(self) -> tuple[int, ...] | None:
        return self._answer.request.prompt if self._first and self._wanted.token_ids else None

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None or not self._wanted.logprobs:
            return None
        form = self._forms.completion(piece, self._text_offset)
        self._text_offset += sum(map(len, form["tokens"]))
        return form

    def _tail(self) -> bytes:
        if not self._wanted.continuous_usage:
            return b"}\n\n"
        num_prompt, num_output = self._num_prompt, self._answer.num_tokens
        return b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (
            num_prompt, num_prompt + num_output, num_output,
        )  # fmt: skip

    def last(self, answers: list[Answer]) -> bytes:
        """What ends the stream: the usage of all choices if it was asked for, and the end mark."""
        if not self._wanted.usage:
            return DONE
        return event({**self._meta, "choices": [], "usage": usage_of(answers)}) + DONE


class ChatChunks(Chunks):
    """The chat form: the first chunk names the role and bears no token."""

    object_name = "chat.completion.chunk"

    def chunk(self, piece: Piece) -> bytes:
        if not self._first:
            return super().chunk(piece)
        role = self._role_chunk()
        self._first = False
        return role + super().chunk(piece)

    def _role_chunk(self) -> bytes:
        choice = {
            "index": self._answer.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = {**self._meta, "choices": [choice], "prompt_token_ids": self._prompt_ids()}
        if self._wanted.continuous_usage:
            num = self._num_prompt
            chunk["usage"] = {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}
        return event(chunk)

    def _plain(self, piece: Piece) -> bytes:
        return b'%b"delta":{"content":%b},"logprobs":null,"finish_reason":null,"token_ids":%b}]%b' % (
            self._head, dumps(piece.text), self._ids(piece), self._tail(),
        )  # fmt: skip

    def _full(self, piece: Piece) -> bytes:
        fields: dict[str, Any] = {
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            fields["stop_reason"] = piece.stop_reason
        fields["token_ids"] = piece.token_ids if self._wanted.token_ids else None
        return self._head + dumps(fields)[1:] + b"]" + self._tail()

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None or not self._wanted.logprobs:
            return None
        return self._forms.chat(piece)
