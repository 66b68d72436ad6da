"""From a submitted job to bytes: the whole answer at once, or a stream that writes once per step.

A stream's first bytes leave with its first token, so that whatever goes wrong before it still has a status of its
own. The client's disappearance cancels the handler, and with it the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import HttpVersion11, web

from labkit.engine.request import FinishReason
from labkit.engine.stream import EngineDown, Output, RequestStream
from labkit.server.answer import Answer, LogprobForms, Piece, merge
from labkit.server.chunks import DONE, ChatChunks, Chunks, Wanted, dumps, event, usage_of
from labkit.server.errors import ApiError, error_body
from labkit.server.protocol import Body
from labkit.server.pump import Pump
from labkit.server.service import Service


@dataclass(slots=True)
class Job:
    """One HTTP request: its answers, in order, and how they are to be written."""

    service: Service
    body: Body
    wanted: Wanted
    meta: dict[str, Any]
    chunks: type[Chunks]
    answers: list[Answer]
    forms: LogprobForms
    streams: list[RequestStream] = field(default_factory=list)

    def submit(self) -> None:
        for answer in self.answers:
            self.streams.append(self.service.submit(answer.request))

    def advance(self, index: int, output: Output) -> Piece:
        """The next piece of one answer; a stop string ends the request in the engine as well."""
        answer = self.answers[index]
        piece = answer.advance(output)
        if piece.finish_reason is not None and output.finish_reason is None:
            # not in the engine's turn, in which a listener is called
            finish = self.service.engine.finish
            asyncio.get_running_loop().call_soon(finish, answer.request.id, FinishReason.STOP)
        return piece

    def done(self) -> None:
        for answer in self.answers[: len(self.streams)]:
            self.service.done(answer.request)


ChoiceForm = Callable[[Job, Answer, Piece], dict[str, Any]]


async def serve(http: web.Request, job: Job, form: ChoiceForm) -> web.StreamResponse:
    await job.service.until_ready()
    try:
        job.submit()
        return await (_stream(http, job) if job.body.stream else _whole(job, form))
    finally:
        job.done()


async def _whole(job: Job, form: ChoiceForm) -> web.Response:
    async def one(index: int) -> Piece:
        pieces = []
        async for output in job.streams[index]:
            pieces.append(job.advance(index, output))
            if pieces[-1].finish_reason is not None:
                break
        return merge(pieces)

    try:
        pieces = await asyncio.gather(*(one(i) for i in range(len(job.answers))))
    except EngineDown as error:
        raise ApiError(503, str(error)) from error
    choices = [form(job, answer, piece) for answer, piece in zip(job.answers, pieces, strict=True)]
    name = "chat.completion" if job.chunks is ChatChunks else "text_completion"
    body = {"id": job.meta["id"], "object": name, **job.meta, "choices": choices}
    if job.chunks is ChatChunks and job.wanted.token_ids:
        body["prompt_token_ids"] = job.answers[0].request.prompt
    return web.Response(body=dumps({**body, "usage": usage_of(job.answers)}), content_type="application/json")


def completion_choice(job: Job, answer: Answer, piece: Piece) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": piece.text,
        "logprobs": None if piece.logprobs is None else job.forms.completion(piece, 0),
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": piece.token_ids if job.wanted.token_ids else None,
        "prompt_token_ids": answer.request.prompt if job.wanted.token_ids else None,
    }


def chat_choice(job: Job, answer: Answer, piece: Piece) -> dict[str, Any]:
    return {
        "index": answer.index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": None if piece.logprobs is None else job.forms.chat(piece),
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": piece.token_ids if job.wanted.token_ids else None,
    }


async def _stream(http: web.Request, job: Job) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    if http.version >= HttpVersion11:
        response.enable_chunked_encoding()
    try:
        last = await _write_all(http, job, response)
    except EngineDown as error:
        last = await _broken(response, error)
    await response.write_eof(last)
    return response


async def _write_all(http: web.Request, job: Job, response: web.StreamResponse) -> bytes:
    """Write all choices' chunks as they come; returns what ends the stream, with a lone choice's last chunk."""
    if len(job.answers) == 1:
        held = await _write_choice(http, job, response, 0)
        return held + _closing(job)
    await asyncio.gather(*(_write_held(http, job, response, i) for i in range(len(job.answers))))
    return _closing(job)


def _closing(job: Job) -> bytes:
    return _chunks(job, 0).last(job.answers)


def _chunks(job: Job, index: int) -> Chunks:
    return job.chunks(job.answers[index], job.wanted, job.forms, job.meta)


async def _write_held(http: web.Request, job: Job, response: web.StreamResponse, index: int) -> None:
    held = await _write_choice(http, job, response, index)
    await response.write(held)


async def _write_choice(http: web.Request, job: Job, response: web.StreamResponse, index: int) -> bytes:
    """Returns the last chunk unwritten, so that it can leave together with what follows it."""
    chunks = _chunks(job, index)
    async for output in job.streams[index]:
        piece = job.advance(index, output)
        chunk = chunks.chunk(piece)
        if not response.prepared:
            await response.prepare(http)
        if piece.finish_reason is not None:
            return chunk
        await response.write(chunk)
        if response.chunked and http.transport is not None:
            pump = Pump(http.transport, lambda output: _next_chunk(job, index, chunks, output))
            job.streams[index].listen(pump)
            return await pump.last_chunk
    return b""


def _next_chunk(job: Job, index: int, chunks: Chunks, output: Output) -> tuple[bytes, bool]:
    piece = job.advance(index, output)
    return chunks.chunk(piece), piece.finish_reason is not None


async def _broken(response: web.StreamResponse, error: EngineDown) -> bytes:
    """Before the first byte the status tells; after it an error event does, and the connection closes."""
    if not response.prepared:
        raise ApiError(503, str(error)) from error
    response.force_close()
    return event(error_body(503, str(error))) + DONE
